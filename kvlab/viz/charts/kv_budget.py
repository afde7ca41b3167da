"""Budget of a model's cache: what a request holds of each group of layers, and what of it is waste."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.viz.pen.axis import LABEL, QUIET, WIDTH
from kvlab.viz.pen.legend import keys
from kvlab.viz.pen.palette import BANKS
from kvlab.viz.pen.picture import Picture
from kvlab.viz.pen.svg import HATCH, Canvas
from kvlab.viz.pen.text import text_width

if TYPE_CHECKING:
    from kvlab.formats import KVBudget

ROW, BAR, TOP, RIGHT = 26.0, 16.0, 46.0, 150.0
DATA, UNFILLED = BANKS[4 * 7 + 1], BANKS[4 * 1 + 2]


def draw_kv_budget(
    budget: KVBudget, *, tokens: int = 8192, title: str | None = None, caption: str | None = None
) -> Picture:
    """Draws the bytes that a request holds of each group of layers, as bars: data, slots without a token, padding.

    budget    what :func:`kvlab.formats.kv_budget` gives
    tokens    of the request, at least 0

    >>> from kvlab.formats import kv_budget
    >>> draw_kv_budget(kv_budget("gemma-2-9b"), tokens=8192).title
    'Gemma-2-9B, bf16: a request of 8,192 tokens holds 2,116,681,728 bytes on one rank, 0.1 % of them waste'
    """
    every = budget.request(tokens)
    rows = [(group, budget.request(tokens, group)) for group in budget.groups]
    names = [f"{len(group.layers)} x {group.kind}" for group, _ in rows]
    left = max([text_width(name, 11) for name in names] or [0.0]) + 16
    most = max([one.nbytes for _, one in rows] or [0]) or 1
    canvas = Canvas()
    parts = ((DATA, "", "elements, scales and states"), (UNFILLED, "", "slots without a token that counts"),
             (HATCH, "", "padding"))
    keys(canvas, 0, 0, parts)
    canvas.text(WIDTH, TOP - 8, "bytes", size=LABEL, anchor="end", opacity=QUIET)
    for n, (name, (group, one)) in enumerate(zip(names, rows, strict=True)):
        x, y = left, TOP + ROW * n
        canvas.text(0, y + 12, name, size=11)
        told = "a state" if not group.page_tokens else f"{group.pages(tokens)} pages of {group.page_tokens} tokens"
        for (fill, _, words), size in zip(parts, one[1:], strict=True):
            wide = (WIDTH - RIGHT - left) * size / most
            if wide > 0:
                canvas.rect(x, y, wide, BAR, fill=fill, title=f"{name}, {told} a layer: {size:,} bytes of {words}")
            x += wide
        canvas.text(WIDTH, y + 12, f"{one.nbytes:,}", size=11, anchor="end")
    canvas.extend(WIDTH, TOP + ROW * len(rows))
    waste = f"{every.waste:.1%}".replace("%", " %")
    rank = "one rank" if budget.degree == 1 else f"each of {budget.degree} ranks"
    return canvas.picture(
        title or f"{budget.name}, {budget.kv_dtype}: a request of {tokens:,} tokens holds {every.nbytes:,} bytes on "
        f"{rank}, {waste} of them waste",
        caption or f"A further token takes {budget.growing_bytes_per_token:,} bytes; states take "
        f"{budget.state_bytes:,} whatever the length.",
    )
