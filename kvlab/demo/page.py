"""The demo's page: one self-contained HTML file."""

from __future__ import annotations

import html
from pathlib import Path

from kvlab.cache import PagedKVCacheCollection
from kvlab.data import Capture
from kvlab.viz.pen.host import document

from . import pictures
from .steps import ARCHS, Step
from .summary import notes

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:1060px;margin:2.5rem auto;padding:0 1rem}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .3rem}h2{font-size:1.25rem;margin:2rem 0 .5rem}
p{max-width:46rem}.table+p{margin-top:1rem}
.quiet{opacity:.7;font-size:.85rem}figure{margin:1.5rem 0;overflow-x:auto}
.table{overflow-x:auto}
table{border-collapse:collapse;font-size:.72rem;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .4rem;text-align:right;white-space:nowrap}thead th{font-weight:600;vertical-align:bottom}
thead tr:last-child th{border-bottom:1px solid currentColor}tbody tr:nth-child(3n) td{border-bottom:1px solid #8884}
nav{margin:1.2rem 0 0}nav a,summary{color:inherit}summary{cursor:pointer;margin:.6rem 0;font-weight:600}
details:not([open])>:not(summary){display:none}
td.none{opacity:.6}td.bad{font-weight:700;color:#c4006a}
"""


_WAY = (
    "Six places, the same byte marked in each; beside them the lines of the kernel and of its emulator that take it "
    "there, and how far their values were apart."
)


def write_page(
    folder: Path, capture: Capture, pool: PagedKVCacheCollection, steps: list[Step], gpu: str | None
) -> Path:
    """Write ``folder/index.html`` and return its path."""
    token = pictures.shown_token(capture)
    layer = len(capture.layers) // 2
    run = steps[layer].lockstep["sm_90"]
    config = steps[layer].config
    first = pictures.diagonal(capture, config)
    scroll = pictures.scroll(capture, pool, config, layer, token, run)
    sections = [("why", first.heading, _shown(first))] if first is not None else []
    if scroll is not None:
        sections.append(("way", "The way of one byte", f"<p>{_WAY}</p><figure>{scroll._repr_html_()}</figure>"))
    names = [*ARCHS, "triton", *(["gpu"] if gpu else [])]
    chart = pictures.errors(steps, names)
    figure = f"<figure>{chart.inline}</figure>" if chart is not None else ""
    table = f"<details><summary>All numbers: errors, bytes moved, wavefronts</summary>{_table(steps, gpu)}</details>"
    sections.append(("errors", "Every step, every sibling", figure + table))
    chapters = [
        pictures.pages(pool, capture.tokens, token),
        pictures.sm_90(capture, config, token),
        pictures.gfx950(capture, pool, layer),
    ]
    folded = [(chapter.heading, _shown(chapter)) for chapter in chapters if chapter is not None]
    folded.append(("The kernel and its emulator, line by line", _lockstep(steps[layer])))
    more = "".join(f"<details><summary>{html.escape(name)}</summary>{shown}</details>" for name, shown in folded)
    sections.append(("more", "A closer look", more))
    title = "A KV cache on its way from DRAM to registers"
    model = html.escape(str(capture.metadata.get("model", "a capture of your own")))
    body = f"""<h1>{title}</h1>
<p class="quiet">{model} &middot; layers {", ".join(map(str, capture.layers))} &middot; {capture.prompt_tokens} prompt
tokens, {capture.decode_steps} decode steps &middot; {capture.query_heads} query heads, {capture.kv_heads} KV heads of
{capture.head_dim} &middot; {capture.dtype}</p>
<p>Every decode step was computed by the float64 reference, by the emulator of two machines, which moves each byte
through pages, shared memory and fragments, and by the production Triton kernel. Below: how far they are apart, what
moved, and the way of one key, token {token}, in pictures.</p>
<nav>{" &middot; ".join(f'<a href="#{anchor}">{html.escape(heading)}</a>' for anchor, heading, _ in sections)}</nav>
{"".join(f'<h2 id="{anchor}">{html.escape(heading)}</h2>{shown}' for anchor, heading, shown in sections)}"""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    path.write_text(document(f"kvlab: {title}", body, style=_STYLE), encoding="utf-8")
    return path


def _shown(chapter: pictures.Chapter) -> str:
    """Words and pictures."""
    figures = "".join(f"<figure>{picture.inline}</figure>" for picture in chapter.pictures)
    return f"<p>{html.escape(chapter.words)}</p>{figures}"


def _lockstep(step: Step) -> str:
    """The two sources side by side."""
    return (
        f"<p>Both ran in lockstep (sm_90) on layer {step.layer}, step {step.step}: after each step of the algorithm "
        "the outputs named in its marker were compared, for every program and every iteration. Between the sources are "
        f"the largest differences.</p><figure>{step.lockstep['sm_90'].to_html()}</figure>"
    )


def _table(steps: list[Step], gpu: str | None) -> str:
    names = [*ARCHS, "triton", *(["gpu"] if gpu else []), "model"]
    shown = {"triton": "Triton", "gpu": "GPU"}
    groups = (
        f'<tr><th colspan="3"></th><th colspan="{len(names) + 1}">largest error against float64</th>'
        '<th colspan="2">KiB moved, sm_90</th><th colspan="3">wavefronts, sm_90</th>'
        '<th colspan="3">wavefronts, gfx950*</th><th>lockstep</th></tr>'
    )
    heads = ["layer", "step", "keys", *(shown.get(name, name) for name in names), "allowed", "DRAM&rarr;SMEM"]
    heads += ["SMEM&rarr;regs", *("swizzled", "plain", "ideal") * 2, "differs at"]
    rows = "".join(f"<tr>{_row(step, names)}</tr>" for step in steps)
    said = "".join(f"{html.escape(note)}.<br>" for note in notes(steps, gpu))
    head = f"<thead>{groups}<tr>{''.join(f'<th>{name}</th>' for name in heads)}</tr></thead>"
    return f'<div class="table"><table>{head}<tbody>{rows}</tbody></table></div><p class="quiet">{said}</p>'


def _row(step: Step, names: list[str]) -> str:
    cells = [f"<td>{number}</td>" for number in (step.layer, step.step, step.keys)]
    for name in names:
        error = step.errors.get(name)
        bad = error is not None and name != "model" and error > step.allowed
        cells.append('<td class="none">-</td>' if error is None else f"<td{' class=bad' * bad}>{error:.1e}</td>")
    cells.append(f'<td class="none">{step.allowed:.1e}</td>')
    moved = step.traffic["sm_90"].moved if "sm_90" in step.traffic else None
    for edge in ("DRAM->SMEM", "SMEM->registers"):
        cells.append(f"<td>{moved[edge] / 1024:.0f}</td>" if moved else '<td class="none">-</td>')
    for arch in ARCHS:
        traffic = step.traffic.get(arch)
        for kind in ("wavefronts", "unswizzled", "ideal"):
            cells.append(f"<td>{traffic.total(kind)}</td>" if traffic else '<td class="none">-</td>')
    cells.append(f"<td{' class=bad' * (step.difference != 'none')}>{html.escape(step.difference)}</td>")
    return "".join(cells)
