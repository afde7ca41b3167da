"""Between ``swizzle o shape:stride`` layouts and the basis vectors of linear layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvlab.layout.algebra.int_tuple import flatten
from kvlab.layout.algebra.layout import Layout
from kvlab.layout.algebra.swizzle import Swizzle


def bases_of_layout(layout: Layout, swizzle: Swizzle | None) -> dict[str, list[int]]:
    """The offsets of the indices 1, 2, 4, ... of each top-level mode, colexicographic within the mode.

    >>> bases_of_layout(Layout("((2,2),4):((8,1),2)"), None)
    {'dim0': [8, 1], 'dim1': [2, 4]}
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"from_layout of {layout!r}: must be a Layout")
    bases: dict[str, list[int]] = {}
    for axis, mode in enumerate(layout.modes):
        bases[f"dim{axis}"] = steps = []
        for extent, stride in zip(flatten(mode.shape), flatten(mode.stride), strict=True):
            if extent < 1 or extent & (extent - 1) or stride < 0:
                raise ValueError(
                    f"{layout!r} is not linear over F2: its mode {extent}:{stride} is not a power of two with a "
                    "stride of 0 or more"
                )
            steps += [stride << bit for bit in range(extent.bit_length() - 1)]
    if shared := _shared_bits(step for steps in bases.values() for step in steps):
        raise ValueError(
            f"{layout!r} is not linear over F2: its strides overlap in the bits {shared:#x}, so sums carry"
        )
    if swizzle is None:
        return bases
    return {name: [swizzle(step) for step in steps] for name, steps in bases.items()}


def layout_of_bases(bases: Mapping[str, Sequence[int]]) -> Layout:
    """The layout with one mode for each entry, nested where the strides of a mode do not double."""
    if shared := _shared_bits(step for steps in bases.values() for step in steps):
        raise ValueError(
            f"no shape:stride layout: basis vectors share the bits {shared:#x} of the offset, so offsets are not sums "
            "of strides; to_swizzled_layout(unit) looks for a swizzle that takes them apart"
        )
    modes = [_mode(steps) for steps in bases.values()]
    return Layout(tuple(shape for shape, _ in modes), tuple(stride for _, stride in modes))


def swizzled_layout_of_bases(bases: Mapping[str, Sequence[int]], unit: Any) -> tuple[Layout, Swizzle]:
    """The layout and the swizzle of the fewest bits after it, by trial of all that change bits of these offsets."""
    width = max((step.bit_length() for steps in bases.values() for step in steps), default=0)
    for bits in range(width):
        for base in range(width if bits else 1):
            for distance in range(bits, width - base - bits + 1 if bits else 1):
                for shift in (distance, -distance):
                    swizzle = Swizzle(bits, base, shift, unit)
                    inner = {name: [swizzle(step) for step in steps] for name, steps in bases.items()}
                    if not _shared_bits(step for steps in inner.values() for step in steps):
                        return layout_of_bases(inner), swizzle
    raise ValueError(f"no swizzle Sw<bits,base,shift> makes a shape:stride layout of the bases {dict(bases)}")


def _shared_bits(steps: Iterable[int]) -> int:
    """The bits that lie in more than one of the steps."""
    seen = shared = 0
    for step in steps:
        shared |= seen & step
        seen |= step
    return shared


def _mode(steps: Sequence[int]) -> tuple[Any, Any]:
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] << (runs[-1][0].bit_length() - 1):
            runs[-1][0] *= 2
        else:
            runs.append([2, step])
    if not runs:
        return 1, 0
    if len(runs) == 1:
        return runs[0][0], runs[0][1]
    return tuple(extent for extent, _ in runs), tuple(stride for _, stride in runs)
