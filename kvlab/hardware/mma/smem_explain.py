"""Words for :class:`~kvlab.hardware.SmemDescriptor`: every field and what it means."""

from __future__ import annotations

from .smem_descriptor import SmemDescriptor


def explain(d: SmemDescriptor, major: str) -> str:
    """The text of :meth:`SmemDescriptor.explain`."""
    if major not in ("K", "MN"):
        raise ValueError(f"major is {major!r}: must be 'K' or 'MN'")
    return "\n".join(
        [
            f"{d.arch} descriptor {d.encode():#018x}: {major}-major, swizzle {d.swizzle.label}.",
            f"Start address {d.start_address} (encoded {d.start_address >> 4:#x}): {_start(d)}.",
            f"LBO {d.leading_bytes} bytes (encoded {d.leading_bytes >> 4}): {_leading(d, major)}.",
            f"SBO {d.stride_bytes} bytes (encoded {d.stride_bytes >> 4}): {_stride(d, major)}.",
            _base_offset(d),
        ]
    )


def _start(d: SmemDescriptor) -> str:
    if not d.swizzle:
        return "without a swizzle any multiple of 16 will do"
    inside = d.start_address % d.swizzle.bytes
    return f"{inside} bytes into its row, a step along K" if inside else "the start of a row of the pattern"


def _leading(d: SmemDescriptor, major: str) -> str:
    if major == "K":
        if d.swizzle:
            return "ignored, a swizzled K-major operand has no other 16 bytes to find"
        return "to the next 16 bytes of K, the neighbouring core matrix"
    return f"to the next {d.swizzle.bytes} bytes along MN" if d.swizzle else "to the next 8 of K"


def _stride(d: SmemDescriptor, major: str) -> str:
    if major == "K":
        dense = 8 * d.swizzle.bytes
        close = f"; less than {dense}, so rows of 8 overlap" if 0 < d.stride_bytes < dense else ""
        return f"to the next 8 rows{close}"
    return "to the next 8 of K" if d.swizzle else "to the next 16 bytes along MN"


def _base_offset(d: SmemDescriptor) -> str:
    period = d.swizzle.alignment
    if not d.swizzle:
        return f"Base offset {d.base_offset}: without a swizzle it has no meaning."
    if d.base_offset:
        return f"Base offset {d.base_offset}: the pattern starts {128 * d.base_offset} bytes past a multiple of 1024."
    row = d.start_address % period // 128
    if row:
        return (
            f"Base offset 0, but the start lies {128 * row} bytes past a multiple of {period}: right only if the tile "
            f"was written with absolute address bits from there, as TMA does."
        )
    return f"Base offset 0: the pattern starts at a multiple of {period} bytes."
