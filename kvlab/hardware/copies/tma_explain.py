"""Words for :class:`~kvlab.hardware.TmaDescriptor`: the box, its image, what the barrier counts."""

from __future__ import annotations

import numpy as np

from .tensor_map import TmaDescriptor


def explain(d: TmaDescriptor, address: int) -> str:
    """The text of :meth:`TmaDescriptor.explain`."""
    moved = " x ".join(map(str, d.smem_box))
    tensor = " x ".join(map(str, d.shape))
    rows = d.image_bytes // d.pitch
    lines = [
        f"One copy moves a box of {moved} {d.dtype} out of a tensor of {tensor}: {d.transaction_bytes} bytes, which "
        f"the mbarrier counts in full, also where the box lies outside the tensor (there: zeros).",
        f"In shared memory its {rows} rows of {d.row_bytes} bytes are {d.pitch} bytes apart, {d.image_bytes} bytes in "
        f"all."
        if rows > 1
        else f"In shared memory it is one row of {d.row_bytes} bytes.",
    ]
    if d.pitch > d.row_bytes:
        lines[-1] += (
            f" The row is narrower than the swizzle: the other {d.pitch - d.row_bytes} bytes of each row stay "
            f"untouched. That is legal, though rarely what is meant."
        )
    if d.stored_extent > d.shape[-1]:
        lines.append(
            f"A store writes whole chunks of 16 bytes: rows of {d.shape[-1]} elements are written up to element "
            f"{d.stored_extent}, over what stands behind them."
        )
    if d.l2_promotion:
        lines.append(f"L2 fetches {d.l2_promotion.bytes} bytes at least of what it does not hold.")
    if d.swizzle:
        bits = int(d.swizzle)
        names = (f"bits {low}-{low + bits - 1}" if bits > 1 else f"bit {low}" for low in (4, 7))
        target, source = names
        verb = "are" if bits > 1 else "is"
        lines.append(f"Swizzle {d.swizzle.label}: address {target} {verb} XORed with address {source}.")
    lines.append(_place(d, address))
    return "\n".join(lines)


def _place(d: TmaDescriptor, address: int) -> str:
    if address % 128:
        return f"Address {address} is not a multiple of 128 bytes: the copy faults, in every swizzle mode."
    whole = d.swizzle.alignment
    if address % whole == 0:
        return f"Address {address} is a multiple of {whole}: the pattern starts with the box."
    chunk = (slice(None),) * (d.rank - 1) + (slice(None, None, 16 // d.dtype.itemsize),)
    here, aligned = d.image(address)[chunk] - address, d.image(0)[chunk]
    elsewhere = int(np.count_nonzero(here != aligned))
    return (
        f"Address {address} is not a multiple of {whole}: {elsewhere} of {here.size} chunks stand elsewhere than in a "
        f"box at a multiple of {whole}. The XOR reads absolute address bits."
    )
