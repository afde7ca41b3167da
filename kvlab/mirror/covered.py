"""Share of a kernel's lines with a counterpart in its emulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.mirror.lines import Line, Lines
from kvlab.mirror.report import compare
from kvlab.mirror.twin import Operation


@dataclass(frozen=True)
class Coverage:
    """The lines of an operation's twins; as text the shares, then what differs and what is on one side only.

    >>> coverage("merge_states").share("merge")
    0.9
    """

    lines: tuple[Lines, ...]

    @property
    def of_twins(self) -> tuple[Lines, ...]:
        """The twins themselves, without helpers."""
        return tuple(lines for lines in self.lines if ":" not in lines.name)

    def share(self, twin: str) -> float:
        """Share of the statements of a twin's kernel that have a counterpart, 0 to 1."""
        return next(lines.share for lines in self.lines if lines.name == twin)

    def __str__(self) -> str:
        return "\n".join(text for lines in self.lines for text in _twin(lines))

    __repr__ = __str__


def coverage(op: str | Operation) -> Coverage:
    """The statements of an operation's twins, and of the helpers that both sides call by one name, beside each other.

    Read from the sources; nothing is run.

    >>> print(str(coverage("merge_states")).splitlines()[0])
    merge: 27 of 30 statements of the kernel have a counterpart (90 %), 27 are equal to it
    """
    return Coverage(compare(op).lines)


def _twin(lines: Lines) -> Iterator[str]:
    total, paired, equal = lines.count()
    yield (
        f"{lines.name}: {paired} of {total} statements of the kernel have a counterpart ({100 * lines.share:.0f} %), "
        f"{equal} are equal to it"
    )
    if lines.alone:
        yield f"  helpers without a counterpart, which lockstep alone compares: {', '.join(lines.alone)}"
    for line in lines.lines:
        if line.differences:
            yield f"  {line.step}: {'; '.join(line.differences)}"
            yield from _code(lines, line)
    shown = set()
    for line in lines.lines:
        place = [one and one.line for one in (line.kernel, line.emulator)]
        if None in place and tuple(place) not in shown:
            shown.add(tuple(place))
            side = "emulator" if line.kernel is None else "kernel"
            yield f"  {line.step}: in the {side} only, {line.kind or 'no class'}"
            yield from _code(lines, line)


def _code(lines: Lines, line: Line) -> Iterator[str]:
    for side, statement, name in ((lines.kernel, line.kernel, "kernel  "), (lines.emulator, line.emulator, "emulator")):
        if statement is not None:
            text = " ".join(part.strip() for part in side.lines[statement.line - 1 : statement.last_line])
            yield f"      {name} {statement.line:4}: {text[:150]}"
