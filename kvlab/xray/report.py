"""An X-ray in words, as plain data, and as HTML."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvlab.xray.edges import Edge, brief
from kvlab.xray.result import XRay

MOST = 40  #: rows of a table


def as_text(xray: XRay) -> str:
    """The whole X-ray in words."""
    lines = [f"{xray.name} on {xray.target}: {xray.resources}"]
    if xray.assumed:
        names = [f"{name}={value}" for name, value in xray.assumed.items()]
        lines.append("Taken for arguments: " + ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8))
    lines += ["", "Findings" if xray.findings else "No findings"]
    lines += [f"  {place}. {finding}" for place, finding in enumerate(xray.findings, 1)]
    lines += ["", "Shared memory"] + [f"  {piece}" for piece in xray.allocations] if xray.allocations else []
    lines += ["", "Edges"] + [f"  {edge}" for edge in xray.edges]
    lines += ["", "Layouts"] + [f"  #{name}: {brief(layout)}" for name, layout in xray.layouts.items()]
    lines += ["", "Instructions"] + [f"  {row}" for row in _counts(xray)]
    if xray.notes:
        lines += ["", "To know"] + [f"  {what}" for what in xray.notes]
    if xray.unknown:
        lines += ["", "Not known here"] + [f"  {what}" for what in xray.unknown]
    return "\n".join(lines)


def _counts(xray: XRay) -> Iterator[str]:
    for kind, names in xray.histogram.items():
        total = Counter[int]()
        for lines in names.values():
            total += lines
        where = ", ".join(f"line {line}: {n}" for line, n in total.most_common(4) if line)
        yield f"{kind} {total.total()} ({where})" if where else f"{kind} {total.total()}"


def as_data(xray: XRay) -> dict[str, Any]:
    """Plain data: dicts, lists, numbers, words."""
    resources = xray.resources
    return {
        "kernel": xray.name, "target": xray.target, "seconds": list(xray.seconds), "assumed": dict(xray.assumed),
        "resources": {
            "registers": resources.registers, "spills": resources.spills, "stack": resources.stack,
            "shared": resources.shared, "warps": resources.warps, "ctas": resources.ctas,
            "occupancy": resources.occupancy, "limiter": resources.limiter, "limits": resources.limits,
        },
        "findings": [
            {"kind": one.kind, "line": one.line, "words": one.words, "cost": one.cost,
             "cures": [{"words": cure.words, "before": cure.before, "after": cure.after, "tried": cure.tried,
                        "layout": None if cure.layout is None else repr(cure.layout)} for cure in one.cures]}
            for one in xray.findings
        ],
        "layouts": {name: repr(layout) for name, layout in xray.layouts.items()},
        "allocations": [
            {"name": piece.name, "what": piece.what, "line": piece.line, "offset": piece.offset, "size": piece.size,
             "type": piece.type, "layout": None if piece.layout is None else repr(piece.layout),
             "life": list(piece.life)} for piece in xray.allocations
        ],
        "edges": [_edge(edge) for edge in xray.edges],
        "instructions": {kind: {name: dict(lines) for name, lines in names.items()}
                         for kind, names in xray.histogram.items()},
        "unknown": xray.unknown, "notes": xray.notes,
    }


def _edge(edge: Edge) -> dict[str, Any]:
    return {
        "operation": edge.operation, "kind": edge.kind, "line": edge.line, "column": edge.column,
        "names": list(edge.names), "type": str(edge.type or ""), "source": brief(edge.source),
        "target": brief(edge.target), "allocation": edge.allocation.name if edge.allocation else None,
        "depth": edge.depth, "instructions": edge.instructions, "bytes_a_lane": edge.nbytes,
        "wavefronts": edge.wavefronts, "ideal": edge.ideal, "sectors": edge.sectors,
        "ideal_sectors": edge.ideal_sectors, "distinct_sectors": edge.distinct, "why": edge.why,
        "measured": edge.measured,
    }


_STYLE = (
    ".kvlab-xray{font:14px/1.45 system-ui,sans-serif;max-width:900px;color:inherit}"
    ".kvlab-xray table{border-collapse:collapse;margin:.4em 0 1em;font-size:12px}"
    ".kvlab-xray th,.kvlab-xray td{text-align:left!important;padding:2px 10px 2px 0;vertical-align:top;"
    "border-bottom:1px solid color-mix(in srgb,currentColor 18%,transparent);background:none!important}"
    ".kvlab-xray td.n{text-align:right!important;font-variant-numeric:tabular-nums}"
    ".kvlab-xray li{margin:.35em 0}.kvlab-xray b.bad{color:#c4006a;color:light-dark(#c4006a,#ff6ab0)}"
    ".kvlab-xray code{font:12px ui-monospace,monospace}"
    ".kvlab-xray summary{cursor:pointer;margin:.5em 0}.kvlab-xray .quiet{opacity:.7}"
)


def as_html(xray: XRay) -> str:
    """A fragment for a notebook: findings first, the worst access drawn, the rest in tables that open."""
    out = [f"<style>{_STYLE}</style><div class='kvlab-xray'>",
           f"<h3>{_e(xray.name)} on {_e(xray.target)}</h3><p>{_e(xray.resources)}</p>"]
    if xray.findings:
        out.append("<ol>" + "".join(
            f"<li><b class='bad'>{_e(one.kind)}</b> {_source(xray, one.line)}{_e(one.words)}."
            + "".join(f"<br>Cure: {_e(cure.words)}"
                      + (f", gives {cure.after} for {cure.before}" if cure.after != cure.before else "") + "."
                      for cure in one.cures) + "</li>" for one in xray.findings) + "</ol>")
    else:
        out.append("<p>No findings.</p>")
    out += _pictures(xray)
    head = ("line", "operation", "tensor", "instructions", "wavefronts", "ideal", "sectors", "ideal")
    out.append(_table("Ways of tensors", head, [
        (e.line, e.operation, e.type or "", ", ".join(f"{n} {name}" for name, n in e.instructions.items()),
         e.wavefronts or "", e.ideal or "", e.sectors or "", e.ideal_sectors or "") for e in xray.edges]))
    out.append(_table("Shared memory", ("offset", "bytes", "name", "made by", "line", "tensor", "layout", "life"), [
        ("?" if p.offset is None else p.offset, p.size, p.name, p.what, p.line, p.type, brief(p.layout),
         f"{p.life[0]}-{p.life[1]}") for p in xray.allocations]))
    out.append(_table("Instructions", ("kind", "instruction", "count", "lines"), [
        (kind, name, lines.total(), ", ".join(f"{line}: {n}" for line, n in sorted(lines.items())))
        for kind, names in xray.histogram.items() for name, lines in names.items()]))
    out.append(_layouts(xray))
    if xray.notes:
        out.append(_table("To know of the counts", ("what",), [(what,) for what in xray.notes]))
    if xray.unknown:
        out.append(_table("Not known here", ("what",), [(what,) for what in xray.unknown]))
    return "".join(out) + "</div>"


def as_page(xray: XRay) -> str:
    """A file of HTML that needs no other."""
    title = f"{xray.name} on {xray.target}"
    return (f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{_e(title)}</title>"
            "<style>:root{color-scheme:light dark}body{margin:24px}</style></head>"
            f"<body>{as_html(xray)}</body></html>")


def _e(value: object) -> str:
    return html.escape(str(value))


def _source(xray: XRay, line: int) -> str:
    if not line:
        return ""
    text = xray.source.get(line, "").strip()
    return f"line {line} <code>{_e(text)}</code>: " if text else f"line {line}: "


def _table(title: str, head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    if not rows:
        return ""
    lines = ["".join(f"<td{' class=n' if isinstance(c, int) else ''}>{_e(c)}</td>" for c in row) for row in rows[:MOST]]
    cells = "".join(f"<tr>{line}</tr>" for line in lines)
    more = f"<p class='quiet'>{len(rows) - MOST} more in to_json()</p>" if len(rows) > MOST else ""
    names = "".join(f"<th>{_e(name)}</th>" for name in head)
    table = f"<table><tr>{names}</tr>{cells}</table>"
    return f"<details><summary>{_e(title)} ({len(rows)})</summary>{table}{more}</details>"


def _pictures(xray: XRay) -> list[str]:
    """The dearest conflict beside its cure, and the dearest access to global memory."""
    out = []
    conflict = next((one for one in xray.findings if one.kind == "bank-conflict"), None)
    if conflict is not None:
        proof = next((c.proof for c in conflict.cures if c.proof is not None and c.proof.before is not None), None)
        worst = max(xray.edges, key=lambda e: e.wavefronts - e.ideal).worst(xray.target)
        drawn = proof if proof is not None else worst
        out.append((drawn._repr_html_() if drawn is not None else "") or "")
    lines = {one.line for one in xray.findings if one.kind in ("uncoalesced", "misaligned", "narrow-access")}
    moved = max((e for e in xray.edges if e.line in lines), key=lambda e: e.sectors - e.ideal_sectors, default=None)
    if moved is not None and moved.sectors > moved.ideal_sectors and (apart := moved.worst_sectors()) is not None:
        out.append(apart._repr_html_() or "")
    return out


def _layouts(xray: XRay) -> str:
    drawn = "".join(f"<h4>#{_e(name)} <span class='quiet'>{_e(brief(layout))}</span></h4>{layout._repr_html_() or ''}"
                    for name, layout in xray.layouts.items())
    return f"<details><summary>Layouts ({len(xray.layouts)})</summary>{drawn}</details>" if drawn else ""


def difference_html(both: Any) -> str:
    """A difference as a table, findings above it."""
    head = ("number", f"a: {both.a.name} on {both.a.target}", f"b: {both.b.name} on {both.b.target}")
    rows = "".join(f"<tr><td>{_e(name)}</td><td class=n>{_e(a)}</td><td class=n>{_e(b)}</td></tr>"
                   for name, a, b in both.rows)
    words = "".join(f"<li>gone: {_e(one)}</li>" for one in both.gone) + \
        "".join(f"<li><b class='bad'>new</b>: {_e(one)}</li>" for one in both.new)
    names = "".join(f"<th>{_e(name)}</th>" for name in head)
    return f"<style>{_STYLE}</style><div class='kvlab-xray'><ul>{words}</ul><table><tr>{names}</tr>{rows}</table></div>"
