"""Head dimensions in powers of two: what one or two matrix products cover without wasted multiplications."""

from __future__ import annotations

MAX_DEPTH = 576


def pieces(depth: int, smallest: int = 16) -> tuple[int, int]:
    """``(first, rest)``: widths of one or two pieces, powers of two, that cover ``depth`` columns; rest is 0 or less
    than first. ``smallest`` is the least width of a product: 16, or 32 where it contracts fp8.

    >>> [pieces(depth) for depth in (64, 80, 96, 192, 576)]
    [(64, 0), (64, 16), (64, 32), (128, 64), (512, 64)]
    >>> pieces(40), pieces(112), pieces(80, smallest=32)  # padded by 8, 16 and 16 columns
    ((32, 16), (128, 0), (64, 32))
    """
    if not 1 <= depth <= MAX_DEPTH:
        raise ValueError(f"depth is {depth}: must be 1 to {MAX_DEPTH}")
    first = 1 << (depth.bit_length() - 1)
    rest = max(1 << (depth - first - 1).bit_length(), smallest) if depth > first else 0
    if rest >= first:
        first, rest = 2 * first, 0
    return (first, rest) if first >= smallest else (smallest, 0)
