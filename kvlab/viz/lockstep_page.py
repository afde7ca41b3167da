"""The picture of a lockstep run as HTML: two sources side by side, a narrow column of errors between them."""

from __future__ import annotations

import html
import io
import keyword
import tokenize
from collections.abc import Collection
from typing import TYPE_CHECKING

from kvlab.mirror.lines import Beside, beside

from .pen.host import document, view
from .pen.text import MONO

if TYPE_CHECKING:
    from kvlab.mirror.lockstep_result import Difference, Lockstep, Maximum
    from kvlab.mirror.source import TwinSide

_RULES = """
.finding{padding:8px 10px;font-weight:600;overflow-wrap:anywhere}
.finding.bad{color:var(--kvlab-alarm)}
.finding div{margin:4px 0 0 20px;font-weight:400}
.note{padding:6px 10px;color:var(--kvlab-soft);font-size:12px;border-top:1px solid var(--kvlab-rule)}
.sources{overflow:auto}
table{border-collapse:collapse;width:100%;min-width:720px;table-layout:fixed}
th,td{padding:3px 6px;vertical-align:top;text-align:left;border-top:1px solid var(--kvlab-rule)}
th{position:sticky;top:0;z-index:1;background:var(--kvlab-paper);font-weight:600;overflow-wrap:anywhere}
.middle{width:184px;border-left:1px solid var(--kvlab-rule);border-right:1px solid var(--kvlab-rule)}
pre{margin:0;font:11px/1.45 MONO}
.line{display:block;white-space:pre-wrap;overflow-wrap:anywhere;padding-left:calc((6 + var(--indent))*1ch);
  text-indent:calc((-6 - var(--indent))*1ch)}
.n{display:inline-block;width:3ch;margin-right:1ch;text-align:right;text-indent:0;color:var(--kvlab-soft);
  user-select:none}
b{color:var(--kvlab-word);font-weight:600}
i{color:var(--kvlab-soft);font-style:normal}
s{color:var(--kvlab-string);text-decoration:none}
.m{background:var(--kvlab-band);font-weight:600}
.line.alarm{background:var(--kvlab-alarmed);color:var(--kvlab-alarm);font-weight:600}
tr.bad>td.middle,tr.first>td{background:var(--kvlab-alarmed)}
tr.first>td{border-top:2px solid var(--kvlab-alarm);border-bottom:2px solid var(--kvlab-alarm)}
tr.more>td{border-top-color:transparent}
tr.more.first>td{border-top:0}
tr.first:has(+.more)>td:not(.middle){border-bottom:0}
tr.more.first:has(+.more)>td{border-bottom:0}
summary{font-size:11px;cursor:pointer}
details:not([open])>:not(summary){display:none}
tr.first .m{background:none;color:var(--kvlab-alarm)}
.out{display:flex;flex-wrap:wrap;justify-content:space-between;column-gap:6px;font:11px/1.45 MONO}
.out.bad{font-weight:700}
.flag{color:var(--kvlab-alarm);font-weight:700;font-size:12px;overflow-wrap:anywhere}
.quiet{color:var(--kvlab-soft)}
""".replace("MONO", MONO)
_ONE_SCREEN = ".sources{max-height:600px}"


def page(run: Lockstep) -> str:
    """A self-contained page around the whole of :func:`fragment`."""
    return document("Lockstep", _view(run, _RULES), style="body{margin:8px}")


def fragment(run: Lockstep) -> str:
    """HTML for a page of any host: the sources scroll inside one screen."""
    return _view(run, _RULES + _ONE_SCREEN)


def _view(run: Lockstep, rules: str) -> str:
    bad, (finding, *more) = not run.ok, map(html.escape, run.sentences)
    twins = "".join(_twin(run, name, kernel, emulator) for name, kernel, emulator in run.ran)
    body = (
        f'<div class="finding{" bad" * bad}">{_mark(not bad)} {finding[:1].upper()}{finding[1:]}'
        f'{"".join(f"<div>{one}</div>" for one in more)}</div>'
        f'<div class="sources" tabindex="0">{twins}{_returned(run)}</div>'
        f'<div class="note">{html.escape(run.legend)}</div>'
    )
    return view("lockstep", body, rules=rules, label=f"Lockstep of kernel and emulator: {run.finding}")


def _mark(ok: bool) -> str:
    return "&#10003;" if ok else "&#10007;"


def _twin(run: Lockstep, name: str, kernel: TwinSide, emulator: TwinSide) -> str:
    """One table: a row for the function's head, for each header, and for each step."""
    left, right = kernel.bands, emulator.bands
    colours = _colour(kernel), _colour(emulator)
    file = [side.path.rsplit("/", 1)[-1] for side in (kernel, emulator)]
    rows = [
        f'<table><colgroup><col><col class="middle"><col></colgroup><tr><th>{file[0]}: {kernel.function}</th>'
        f'<th class="middle">{html.escape(name)}: max error</th><th>{file[1]}: {emulator.function}</th></tr>'
    ]
    for (lines, step), (others, _) in zip(left, right, strict=True):
        listed = kernel.steps[step].marker.outputs if step is not None else ()
        flags, middle = _errors(run, name, step, listed) if step is not None else ("", "")
        alarmed = {line: kind for line in lines if (kind := run.alarms.get((kernel.path, line)))}
        middle += "".join(f'<div class="flag">&#10007; {kind.upper()}<br>line {n}</div>' for n, kind in alarmed.items())
        aligned = [Beside(lines, others)]
        if step is not None and name in run.lines:
            marker = Beside(lines[:1], others[:1])
            aligned = [marker, *beside(run.lines[name].steps[step], lines[1:], others[1:])]
        cell = f'<td class="middle" rowspan="{len(aligned)}">{middle}</td>'
        for number, row in enumerate(aligned):
            first = step is not None and not number
            one, other = (
                _code(there, colour, first, row.kinds, alarms)
                for there, colour, alarms in zip((row.kernel, row.emulator), colours, (alarmed, {}), strict=True)
            )
            kind = flags if not number else flags.replace('class="', 'class="more ') or ' class="more"'
            rows.append(f"<tr{kind}><td>{one}</td>{cell if not number else ''}<td>{other}</td></tr>")
    return "".join([*rows, "</table>"])


def _errors(run: Lockstep, twin: str, step: int, listed: tuple[str, ...]) -> tuple[str, str]:
    """The row's class and the middle cell of one step."""
    maxima, first = run.at(twin, step)
    text = []
    if first is not None:
        iteration = f"iteration {', '.join(map(str, first.iteration))}, " if first.iteration else ""
        where = f"{iteration}program {first.program}{_pid(first)}"
        text.append(f'<div class="flag">&#10007; FIRST DIFFERENCE<br>{where}</div>')
    elif not all(m.ok for m in maxima):
        text.append('<div class="flag">&#10007; differs, too</div>')
    nothing = "did not run" if listed else "nothing listed"
    text += [_output(m) for m in maxima] or [f'<span class="quiet">{nothing}</span>']
    kind = ' class="bad first"' if first else "" if all(m.ok for m in maxima) else ' class="bad"'
    return kind, "".join(text)


def _pid(first: Difference) -> str:
    return f" = {first.pid}" if first.pid else ""


def _output(m: Maximum) -> str:
    hover = f"{m.output} {list(m.shape)} {m.dtype}, {m.compared} tiles compared, relative error {m.relative:.2g}"
    if m.problem:
        return f'<div class="flag">&#10007; {html.escape(m.output)}: {html.escape(m.problem)}</div>'
    kind = " quiet" if not m.absolute else "" if m.ok else " bad"
    tint = f"background:color-mix(in srgb,var(--kvlab-alarm) {30 * m.shade:.0f}%,transparent)"
    spans = f"<span>{html.escape(m.output)}</span><span>{html.escape(m.number)} {_mark(m.ok)}</span>"
    return f'<div class="out{kind}" style="{tint}" title="{html.escape(hover)}">{spans}</div>'


def _returned(run: Lockstep) -> str:
    results = [m for m in run.maxima if m.twin == "launch"]
    if not results:
        return ""
    cells = "".join(_output(m) for m in results)
    first = run.first_difference
    kind = (
        ""
        if all(m.ok for m in results)
        else ' class="bad first"'
        if first and first.twin == "launch"
        else ' class="bad"'
    )
    return (
        '<table><colgroup><col><col class="middle"><col></colgroup>'
        f'<tr{kind}><td>returned by the kernel\'s launch</td><td class="middle">{cells}</td>'
        "<td>returned by the emulator's launch</td></tr></table>"
    )


def _code(
    lines: range, coloured: dict[int, str], step: bool, alone: tuple[str, ...] = (), alarms: Collection[int] = ()
) -> str:
    """Lines of a source, ``alarms`` red; those that are on this side ``alone``, for these reasons, are folded."""
    if alone and lines:
        head = f'<span class="quiet">{len(lines)} line{"s" * (len(lines) > 1)} here only: {", ".join(alone)}</span>'
        return f"<details><summary>{head}</summary>{_code(lines, coloured, step, (), alarms)}</details>"
    shown = list(lines)
    while shown and not coloured.get(shown[-1], "").strip():
        shown.pop()
    out = []
    for line in shown:
        kind = " alarm" if line in alarms else " m" if step and line == shown[0] else ""
        text = coloured.get(line, "")
        indent = len(text) - len(text.lstrip(" "))
        out.append(f'<span class="line{kind}" style="--indent:{indent}"><span class="n">{line}</span>{text}\n</span>')
    return f"<pre>{''.join(out)}</pre>"


def _colour(side: TwinSide) -> dict[int, str]:
    """Each line of the function as HTML: keywords bold, comments soft, strings tinted."""
    first, last = side.spans[0]
    text = "\n".join(side.lines[first - 1 : last]) + "\n"
    marks: dict[int, list[tuple[int, int, str]]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        tag = {tokenize.COMMENT: "i", tokenize.STRING: "s"}.get(token.type, "")
        if token.type == tokenize.NAME and keyword.iskeyword(token.string):
            tag = "b"
        if not tag or token.string.startswith(("#:", "#@")):
            continue
        for line in range(token.start[0], token.end[0] + 1):
            whole = side.lines[first - 2 + line]
            begin = token.start[1] if line == token.start[0] else len(whole) - len(whole.lstrip())
            end = token.end[1] if line == token.end[0] else len(whole)
            marks.setdefault(line, []).append((begin, end, tag))
    return {
        first - 1 + line: _line(side.lines[first - 2 + line], marks.get(line, []))
        for line in range(1, last - first + 2)
    }


def _line(text: str, marks: list[tuple[int, int, str]]) -> str:
    out, at = [], 0
    for begin, end, tag in marks:
        out.append(html.escape(text[at:begin]))
        out.append(f"<{tag}>{html.escape(text[begin:end])}</{tag}>")
        at = end
    return "".join([*out, html.escape(text[at:])])
