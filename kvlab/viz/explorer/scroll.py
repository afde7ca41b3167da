"""The scroll of a byte: its six places one below the other, with the lines of kernel and emulator beside each."""

from __future__ import annotations

import html
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.common.drawn import Shown
from kvlab.viz.path import PANEL, BytePath, draw_path_of_a_byte, stages
from kvlab.viz.pen.host import document, view
from kvlab.viz.pen.picture import Picture
from kvlab.viz.pen.svg import Canvas
from kvlab.viz.pen.text import MONO

if TYPE_CHECKING:
    from kvlab.mirror import Lockstep

ZOOM, ABOVE = 1.7, 14
"""How much larger than in the strip, and what the strip has above each place."""
_STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("load_k", ("page", "slot")), ("load_k", ("k",)), ("load_k", ("key", "exists")), ("", ()), ("", ()),
    ("scores", ("s",)),
)
"""Step of a decode kernel, and the names that its lines bind, for each place of the byte; none: the compiler's."""
_COMPILERS = {
    3: "No line of the kernel says where: the compiler chooses the layout of shared memory and its swizzle, and the "
    "emulator moves the same bytes. kvlab.triton_support.staged_tile reads the choice from compiled code.",
    4: "The instruction says which lane holds which element; the compiler loads the fragments that it takes.",
}
_RULES = f"""
section{{display:grid;grid-template-columns:{PANEL * ZOOM + 12:.0f}px minmax(0,1fr);gap:16px;padding:14px 16px;
  border-top:1px solid var(--kvlab-rule)}}
section:first-of-type{{border-top:0}}
svg,svg *{{box-sizing:content-box}}
.name{{margin:0 0 4px;font-size:15px;font-weight:600}}
p{{margin:0 0 6px}}
.value{{font:12px MONO;font-weight:600;color:var(--kvlab-accent)}}
.soft{{color:var(--kvlab-soft);font-size:12px}}
pre{{margin:0 0 6px;padding:6px 8px;font:11px/1.45 MONO;background:var(--kvlab-band);white-space:pre-wrap;
  overflow-wrap:anywhere;text-align:left}}
.who{{font-size:11px;color:var(--kvlab-soft)}}
""".replace("MONO", MONO)


class ByteScroll(Shown):
    """One element of a K cache on its way, place after place: each with the same byte marked, the line of the kernel
    and of its emulator that takes it there, and how far their values are apart.

    path     the :class:`BytePath`
    value    the element itself, a NumPy scalar, shown in bits where the byte is
    run      the Lockstep run of ``mha_decode``: the lines and the largest differences are its own

    >>> import numpy as np
    >>> path = BytePath(
    ...     name="K", sequence=0, token=17, head=0, element=3, element_bytes=2, page_table=(4, 2), page_size=16,
    ...     depth=64, dram_byte=4230, tile=(64, 64), tile_at=(17, 3), shared_byte=2198, plain_byte=2182, warp=2, lane=5,
    ...     register=1, lanes=32, registers=4, atom="mma.sync.m16n8k16.bf16", shape=(16, 8, 16), operand="b",
    ...     operand_at=(3, 1), packed=2,
    ... )
    >>> ByteScroll(path, np.float16(0.5)).places[3]
    ('shared memory', 'byte 2,198, bank 5', '0x3800 = 0.5')
    """

    def __init__(self, path: BytePath, value: Any = None, run: Lockstep | None = None) -> None:
        if value is not None and np.asarray(value).dtype.itemsize != path.element_bytes:
            raise ValueError(
                f"value is of {np.asarray(value).dtype}: must have the {path.element_bytes} bytes of the path's element"
            )
        self.path, self.value, self.run = path, value, run

    @property
    def places(self) -> list[tuple[str, str, str]]:
        """The six places: name, where the byte is in words, and what it is there."""
        bits = "" if self.value is None else _bits(np.asarray(self.value))
        said = [f"page {self.path.page}", *[bits] * 5]
        return [(name, words[0], told) for (name, _, words), told in zip(stages(self.path), said, strict=True)]

    def __repr__(self) -> str:
        return f"ByteScroll({draw_path_of_a_byte(self.path).title!r})"

    def _repr_svg_(self) -> str:
        return draw_path_of_a_byte(self.path).svg

    def _repr_html_(self) -> str:
        whole = draw_path_of_a_byte(self.path)
        parts = []
        for number, ((name, draw, words), told) in enumerate(zip(stages(self.path), self.places, strict=True)):
            canvas = Canvas()
            draw(canvas, self.path, 0.0)
            body = f'<g transform="scale({ZOOM}) translate(0 {-ABOVE})">{"".join(canvas._parts)}</g>'
            high = canvas.bottom - ABOVE + 4
            picture = Picture(f"{number + 1} {name}", _sentences(words), PANEL * ZOOM + 4, high * ZOOM, body)
            value = f'<p class="value">{html.escape(told[2])}</p>' if told[2] else ""
            said = f"<p>{html.escape(_sentences(words))}</p>"
            parts.append(
                f"<section><div>{picture.inline}</div><div>{_heading(number, name)}{said}{value}"
                f"{''.join(self._lines(number))}</div></section>"
            )
        return view("scroll", "".join(parts), rules=_RULES, label=whole.title)

    def _lines(self, number: int) -> Iterator[str]:
        """The statements of kernel and emulator, and how far the outputs of the step are apart."""
        step, names = _STEPS[number]
        if self.run is None:
            return
        if not step:
            yield f'<p class="soft">{_COMPILERS[number]}</p>'
            return
        name, kernel, emulator = self.run.ran[0]
        index = [one.marker.name for one in kernel.steps].index(step)
        for who, side, of in (("kernel", kernel, 0), ("emulator", emulator, 1)):
            found = [(line.kernel, line.emulator)[of] for line in self.run.lines[name].steps[index]]
            text = [_source(side.lines, one) for one in found if one is not None and set(one.binds) & set(names)]
            file = side.path.rsplit("/", 1)[-1]
            if text:
                shown = html.escape("\n".join(text[:2]))
                yield f'<div class="who">{who}: {html.escape(file)}, step {step}</div><pre>{shown}</pre>'
        maxima, _ = self.run.at(name, index)
        apart = ", ".join(f"{one.output}: {one.number}" for one in maxima)
        yield f'<p class="soft">Largest difference over all programs: {html.escape(apart)}.</p>'

    def save(self, path: str | PathLike[str]) -> Path:
        """Write one page that needs nothing else to the file ``path``, which ends in .html."""
        target = Path(path)
        if target.suffix.lower() != ".html":
            raise ValueError(f"path {str(path)!r} must end in .html")
        title = draw_path_of_a_byte(self.path).title
        style = "body{margin:16px auto;max-width:920px;font-family:system-ui,sans-serif}"
        body = f"<h1 style='font-size:1.2rem'>{html.escape(title)}</h1>{self._repr_html_()}"
        target.write_text(document(title, body, style=style), encoding="utf-8")
        return target


def _heading(number: int, name: str) -> str:
    """A heading that is none of HTML's own: JupyterLab adds a link to those."""
    return f'<div class="name" role="heading" aria-level="3">{number + 1}&ensp;{html.escape(name)}</div>'


def _source(lines: list[str], statement: Any) -> str:
    """A statement as it is written, without what it is indented by."""
    text = lines[statement.line - 1 : statement.last_line]
    indent = len(text[0]) - len(text[0].lstrip())
    return "\n".join(line[indent:] for line in text)


def _sentences(words: tuple[str, ...]) -> str:
    """What is said of a place; words that end in "of" go on."""
    text = ". ".join(one[:1].upper() + one[1:] if at == 0 or words[at - 1][-3:] != " of" else one
                     for at, one in enumerate(words))
    return text.replace(" of. ", " of ") + "."


def _bits(value: np.ndarray[Any, Any]) -> str:
    size = value.dtype.itemsize
    return f"0x{int(value.view(f'u{size}')):0{2 * size}x} = {float(value):.6g}"
