"""A transfer between ranks: who sends which heads to whom, in how many copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..pen.axis import QUIET
from ..pen.palette import BANKS, text_on
from ..pen.picture import Picture
from ..pen.svg import Canvas

if TYPE_CHECKING:
    from kvlab.formats import Ranks, Transfer

BOX, TALL, GAP, BETWEEN, TOP = 250.0, 40.0, 12.0, 300.0, 26.0
MOST = 32


def draw_transfer(plan: Transfer, *, title: str | None = None, caption: str | None = None) -> Picture:
    """Ranks of the source on the left, of the target on the right, a line for each pair that copies bytes.

    A line is as wide as its share of the bytes; hovering tells its copies. At most 32 ranks of a side are shown.

    plan    what :func:`kvlab.formats.transfer` gives

    >>> from kvlab.formats import known_format, transfer
    >>> one = known_format("vllm.LBNHC", pages=2, heads=4, dim=64)
    >>> draw_transfer(transfer(one, one, degrees=(2, 4))).title
    '2 -> 4 ranks: 4 pairs, 128 copies, 32,768 bytes, each byte once'
    """
    canvas = Canvas()
    right = BOX + BETWEEN
    for x, side, what in ((0.0, plan.source, "source"), (right, plan.target, "target")):
        slots = side.format.sizes.get("slot", 1)
        words = f"{what}: {side.format.name or 'format'}, pages of {slots}"
        canvas.text(x, 12, words, size=12, weight=600)
        senders = {there: here for here, there in plan.pairs} if x else {rank: rank for rank in range(side.degree)}
        _ranks(canvas, side, x, senders)
    most = max((float(copies.nbytes) for copies in plan.pairs.values()), default=1.0)
    hidden = 0
    for (here, there), copies in plan.pairs.items():
        if max(here, there) >= MOST:
            hidden += 1
            continue
        y0, y1 = (TOP + (TALL + GAP) * rank + TALL / 2 for rank in (here, there))
        middle = BOX + BETWEEN / 2
        wide = 1.0 + 7.0 * float(copies.nbytes) / most
        words = f"rank {here} to rank {there}: {len(copies)} copies, {copies.nbytes} bytes"
        canvas.path(
            f"M{BOX} {y0}C{middle} {y0} {middle} {y1} {right} {y1}", stroke=BANKS[4 * (here % 8) + 1],
            stroke_width=wide, opacity=0.8, title=words,
        )
    proof = plan.proof()
    once = "each byte once" if proof else f"{proof.expected - proof.arrived} bytes lost, {proof.twice} twice"
    pairs = f"{len(plan.pairs)} pair{'s' * (len(plan.pairs) != 1)}"
    rest = f" {hidden} pairs of ranks from {MOST} on are left out." if hidden else ""
    return canvas.picture(
        title or f"{plan.source.degree} -> {plan.target.degree} ranks: {pairs}, {plan.descriptors:,} copies, "
        f"{plan.nbytes:,} bytes, {once}",
        caption or f"{plan.tokens} tokens go from left to right. A line's width is its share of the bytes.{rest}",
    )


def _ranks(canvas: Canvas, side: Ranks, x: float, senders: dict[int, int]) -> None:
    """A box for each rank with its heads, in the colour of a rank that sends to it."""
    for rank, heads in enumerate(side.heads[:MOST]):
        y, fill = TOP + (TALL + GAP) * rank, BANKS[4 * (senders.get(rank, 0) % 8) + 3]
        numbers = f"{heads[0]}" if len(heads) == 1 else f"{heads[0]} to {heads[-1]}"
        if len(heads) > 1 and heads[-1] - heads[0] + 1 != len(heads):
            numbers = ", ".join(map(str, heads[:6])) + (", ..." if len(heads) > 6 else "")
        held = f"head {numbers}" if len(heads) == 1 else f"heads {numbers}"
        known = "head" in side.format.sizes
        told = f"rank {rank}: {held if known else 'all of each row'}; {side.local(rank).nbytes} bytes"
        canvas.rect(x, y, BOX, TALL, fill=fill, radius=4, title=told)
        canvas.text(x + 10, y + 17, f"rank {rank}", size=12, weight=600, fill=text_on(fill))
        words = held if known else "whole rows"
        canvas.text(x + 10, y + 32, words, size=10, fill=text_on(fill))
    if side.degree > MOST:
        canvas.text(x, TOP + (TALL + GAP) * MOST + 10, f"and {side.degree - MOST} more", size=10, opacity=QUIET)
