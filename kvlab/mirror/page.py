"""The picture of a lockstep run: two sources side by side, a narrow column of errors between them."""

from __future__ import annotations

import html
import io
import keyword
import tokenize

from kvlab.memory import as_dtype
from kvlab.mirror.comparison import Tolerance
from kvlab.mirror.lockstep_result import Difference, Lockstep, Maximum
from kvlab.mirror.source import Side

__all__ = ["fragment", "page"]

_LIGHT = (
    "--ink:#1d2530;--soft:#66707d;--rule:#d5dae1;--band:#eef2f7;--bad:#b3001b;"
    "--badband:#ffe3e6;--word:#1c4f9c;--ground:#fff;--text:#7a4b00"
)
_DARK = (
    "--ink:#e4e8ee;--soft:#98a3b1;--rule:#3a424d;--band:#232b36;--bad:#ff7b86;"
    "--badband:#4a1a20;--word:#8ab8ff;--ground:#161b22;--text:#e2b86b"
)
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
_RULES = """{color:var(--ink);background:var(--ground);max-width:900px;overflow-x:auto;
  font:13px/1.4 system-ui,sans-serif;border:1px solid var(--rule);border-radius:6px;text-align:left;
  box-sizing:border-box}
.finding{padding:8px 10px;font-weight:600;overflow-wrap:anywhere}
.finding.bad{color:var(--bad)}
.note{padding:6px 10px;color:var(--soft);font-size:12px;border-top:1px solid var(--rule)}
table{border-collapse:collapse;width:100%;min-width:720px;table-layout:fixed;margin:0}
tr{background:none}
th,td{padding:3px 6px;vertical-align:top;text-align:left;border:0 solid var(--rule);border-top-width:1px;
  background:none;color:inherit;font-weight:400;white-space:normal}
th{font-weight:600;overflow-wrap:anywhere}
.middle{width:184px;border-width:1px 1px 0}
.code{font:11px/1.45 MONO}
.code div{white-space:pre-wrap;overflow-wrap:anywhere;padding-left:calc((6 + var(--indent))*1ch);
  text-indent:calc((-6 - var(--indent))*1ch)}
.code .n{display:inline-block;width:3ch;margin-right:1ch;text-align:right;text-indent:0;color:var(--soft);
  user-select:none}
.code b{color:var(--word);font-weight:600}
.code i{color:var(--soft);font-style:normal}
.code s{color:var(--text);text-decoration:none}
.code .m{background:var(--band);font-weight:600}
tr.bad>td.middle,tr.first>td{background:var(--badband)}
tr.first>td{border-top:2px solid var(--bad);border-bottom:2px solid var(--bad)}
tr.first .code .m{background:none;color:var(--bad)}
.out{display:flex;justify-content:space-between;gap:6px;white-space:nowrap;overflow:hidden;
  font:11px/1.45 MONO}
.out.bad{color:var(--bad);font-weight:700}
.flag{color:var(--bad);font-weight:700;font-size:12px;overflow-wrap:anywhere}
.quiet{color:var(--soft)}""".replace("MONO", _MONO)


def _style() -> str:
    """The rules, each limited to our own element; a notebook's theme goes before the system's."""
    scope = ".kvlab-mirror"
    rules = [rule.strip() for rule in _RULES.split("}") if rule.strip()]
    scoped = []
    for rule in rules:
        selectors, body = rule.split("{")
        scoped.append(",".join(f"{scope} {s}".strip() for s in selectors.split(",")) + "{" + body + "}")
    return "\n".join(
        [
            f"{scope}{{{_LIGHT}}}",
            f"@media (prefers-color-scheme:dark){{{scope}{{{_DARK}}}}}",
            f'body[data-jp-theme-light="true"] {scope}{{{_LIGHT}}}',
            f'body[data-jp-theme-light="false"] {scope}{{{_DARK}}}',
            *scoped,
        ]
    )


def page(run: Lockstep) -> str:
    """A self-contained page around :func:`fragment`."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Lockstep</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"</head><body>{fragment(run)}</body></html>"
    )


def fragment(run: Lockstep) -> str:
    """HTML with its own style, at most 900 px wide, light and dark, without anything external."""
    finding = html.escape(run.finding)
    first = run.first_difference
    mark = "&#10003; " if first is None else "&#10007; "
    parts = [
        f"<style>{_style()}</style>",
        f'<div class="kvlab-mirror" role="figure" aria-label="Lockstep of kernel and emulator: {finding}">',
        f'<div class="finding{"" if first is None else " bad"}">{mark}{finding[:1].upper()}{finding[1:]}</div>',
    ]
    for name, kernel, emulator in run.twins:
        parts.append(_twin(run, name, kernel, emulator))
    parts.append(_returned(run))
    parts.append(
        '<div class="note">Between the sources: each output listed by a step, the largest absolute error over all '
        "programs and iterations, and the largest distance in units of the last place (ulp). "
        f"{html.escape(_tolerances(run))}</div></div>"
    )
    return "".join(parts)


def _tolerances(run: Lockstep) -> str:
    """The rules that were applied, each with its reason."""
    rules = dict.fromkeys(
        f"{_what(m)}: {_allowed(m)} ({m.tolerance.reason})" for m in run.maxima if m.tolerance and m.tolerance.relative
    )
    return f"Agreement means: {'; '.join(rules)}; all else exact." if rules else ""


def _what(maximum: Maximum) -> str:
    default = maximum.tolerance == Tolerance.default(as_dtype(maximum.dtype))
    return maximum.dtype if default else f"{maximum.step}.{maximum.output}"


def _allowed(maximum: Maximum) -> str:
    tolerance = maximum.tolerance
    assert tolerance is not None
    ulps = f" or {tolerance.ulps} ulp" if tolerance.ulps else ""
    return f"{tolerance.relative:.2g} of the tensor's largest magnitude{ulps}"


def _twin(run: Lockstep, name: str, kernel: Side, emulator: Side) -> str:
    """One table: a row for the function's head, for each header, and for each step."""
    left, right = kernel.bands, emulator.bands
    colours = _colour(kernel), _colour(emulator)
    file = [side.path.rsplit("/", 1)[-1] for side in (kernel, emulator)]
    rows = [
        f'<table><colgroup><col><col class="middle"><col></colgroup><tr><th>{file[0]}: {kernel.function}</th>'
        f'<th class="middle">{html.escape(name)}: max error</th><th>{file[1]}: {emulator.function}</th></tr>'
    ]
    for (lines, step), (others, _) in zip(left, right, strict=True):
        flags, middle = _errors(run, name, step) if step is not None else ("", "")
        cells = (_code(lines, colours[0], step is not None), middle, _code(others, colours[1], step is not None))
        rows.append(
            f'<tr{flags}><td class="code">{cells[0]}</td><td class="middle">{cells[1]}</td>'
            f'<td class="code">{cells[2]}</td></tr>'
        )
    return "".join([*rows, "</table>"])


def _errors(run: Lockstep, twin: str, step: int) -> tuple[str, str]:
    """The row's class and the middle cell of one step."""
    maxima, first = run.at(twin, step)
    text = []
    if first is not None:
        iteration = f"iteration {', '.join(map(str, first.iteration))}, " if first.iteration else ""
        where = f"{iteration}program {first.program}{_pid(first)}"
        text.append(f'<div class="flag">&#10007; FIRST DIFFERENCE<br>{where}</div>')
    elif not all(m.ok for m in maxima):
        text.append('<div class="flag">&#10007; differs, too</div>')
    text += [_output(m) for m in maxima] or ['<span class="quiet">nothing listed</span>']
    kind = ' class="bad first"' if first else "" if all(m.ok for m in maxima) else ' class="bad"'
    return kind, "".join(text)


def _pid(first: Difference) -> str:
    return f" = {first.pid}" if first.pid else ""


def _output(m: Maximum) -> str:
    hover = f"{m.output} {list(m.shape)} {m.dtype}, {m.compared} tiles compared, relative error {m.relative:.2g}"
    if m.problem:
        return f'<div class="flag">&#10007; {html.escape(m.output)}: {html.escape(m.problem)}</div>'
    kind = " quiet" if not m.absolute else "" if m.ok else " bad"
    tint = f"background:color-mix(in srgb,var(--bad) {30 * m.shade:.0f}%,transparent)"
    mark = "&#10003;" if m.ok else "&#10007;"
    spans = f"<span>{html.escape(m.output)}</span><span>{m.number} {mark}</span>"
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


def _code(lines: range, coloured: dict[int, str], step: bool) -> str:
    shown = list(lines)
    while shown and not coloured.get(shown[-1], "").strip():
        shown.pop()
    out = []
    for line in shown:
        kind = ' class="m"' if step and line == shown[0] else ""
        text = coloured.get(line, "")
        indent = len(text) - len(text.lstrip(" "))
        out.append(f'<div{kind} style="--indent:{indent}"><span class="n">{line}</span>{text}</div>')
    return "".join(out)


def _colour(side: Side) -> dict[int, str]:
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
            begin = token.start[1] if line == token.start[0] else 0
            end = token.end[1] if line == token.end[0] else len(side.lines[first - 2 + line])
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
