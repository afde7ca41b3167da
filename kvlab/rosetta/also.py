"""One tile of shared memory in the other notations: those whose offsets are the same, element for element."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.hardware import TensorMapSwizzle
from kvlab.layout import ComposedLayout, Layout, Swizzle, to_cute
from kvlab.layout.encodings import NVMMASharedLayout, SharedEncoding, SwizzledSharedLayout

Offsets = npt.NDArray[np.int64]
MOST = 1 << 16
"""Elements of a tile that is compared."""


def also(thing: Any, how: Mapping[str, Any]) -> dict[str, str]:
    """Notation -> text of the same tile; empty for what is no tile of two dimensions of powers of two, or where the
    size of its elements is not known.

    >>> from kvlab.layout.encodings import SwizzledSharedLayout
    >>> found = also(SwizzledSharedLayout(8, 1, 8, [1, 0]), {"shape": (64, 64), "element_bytes": 2})
    >>> for name, text in found.items():
    ...     print(name, text)
    CuTe Sw<3,3,3> o _0 o (_64,_64):(_64,_1)
    swizzled_shared #ttg.swizzled_shared<{vec = 8, perPhase = 1, maxPhase = 8, order = [1, 0]}>
    nvmma_shared #ttg.nvmma_shared<{swizzlingByteWidth = 128, transposed = false, elementBitWidth = 16}>
    swizzle mode 128B, Sw<3,4,3> of bytes
    """
    offsets, size = _offsets(thing, how), how.get("element_bytes")
    if offsets is None or not size or offsets.size > MOST or any(n & (n - 1) or n < 2 for n in offsets.shape):
        return {}
    found: dict[str, str] = {}
    if (layout := _composed(offsets, size)) is not None:
        found["CuTe"] = to_cute(layout)
    for vec, per, phases, order in _swizzles(offsets.shape):
        if _same(SwizzledSharedLayout(vec, per, phases, order), offsets):
            found["swizzled_shared"] = (
                f"#ttg.swizzled_shared<{{vec = {vec}, perPhase = {per}, maxPhase = {phases}, order = {list(order)}}}>"
            )
            break
    for width, transposed in itertools.product((128, 64, 32), (False, True)):
        if size in (1, 2, 4, 8) and _same(NVMMASharedLayout(width, 8 * size, transposed=transposed), offsets):
            found["nvmma_shared"] = (
                f"#ttg.nvmma_shared<{{swizzlingByteWidth = {width}, transposed = {str(transposed).lower()}, "
                f"elementBitWidth = {8 * size}}}>"
            )
            mode = TensorMapSwizzle.of(f"{width}B")
            found["swizzle mode"] = f"{mode.label}, {str(mode.swizzle()).partition(' ')[0]} of bytes"
            break
    return found


def _offsets(thing: Any, how: Mapping[str, Any]) -> Offsets | None:
    """The offset of each element ``[rows, columns]``, None where there are no two dimensions."""
    if isinstance(thing, SharedEncoding):
        shape = how.get("shape", ())
        if len(shape) != 2 or hasattr(thing, "interval_padding_pairs"):
            return None
        try:
            return np.asarray(thing.offsets(shape))
        except ValueError:  # the encoding is on another shape
            return None
    if not isinstance(thing, Layout | ComposedLayout) or thing.rank != 2 or thing.size > MOST:
        return None
    rows, columns = (mode.size for mode in (thing.layout if isinstance(thing, ComposedLayout) else thing).modes)
    return np.asarray(thing(np.arange(rows)[:, None], np.arange(columns)), np.int64)


def _same(encoding: SharedEncoding, offsets: Offsets) -> bool:
    try:
        return np.array_equal(encoding.offsets(offsets.shape), offsets)
    except ValueError:
        return False


def _swizzles(shape: tuple[int, ...]) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    for order in ((1, 0), (0, 1)):
        columns, rows = (shape[axis].bit_length() - 1 for axis in order)
        yield 1, 1, 1, order
        for phases in range(1, columns + 1):
            for per, vec in itertools.product(range(rows), range(columns - phases + 1)):
                yield 1 << vec, 1 << per, 1 << phases, order


def _composed(offsets: Offsets, size: int) -> Layout | ComposedLayout | None:
    """The layout, or the swizzle after a layout, with these offsets: the smallest swizzle that leaves each bit of a
    coordinate one bit of the offset."""
    rows, columns = (1 << np.arange(n.bit_length() - 1) for n in offsets.shape)
    steps = [offsets[rows, 0], offsets[0, columns]]
    every = np.concatenate(steps)
    top = int(every.max()).bit_length()
    for bits in range(6):
        for shift, base in itertools.product(range(bits, top) if bits else (0,), range(top) if bits else (0,)):
            if bits and base + shift + bits > top:
                continue
            swizzle = Swizzle(bits, base, shift, f"uint{8 * size}")
            plain = swizzle(every)
            if (plain & (plain - 1)).any():
                continue
            layout = _layout(offsets.shape, plain)
            found = ComposedLayout(layout, swizzle) if bits else layout
            if np.array_equal(_offsets(found, {}), offsets):  # type: ignore[arg-type]
                return found
    return None


def _layout(shape: tuple[int, ...], strides: Offsets) -> Layout:
    """The layout whose bits of the rows, then of the columns, have these strides; bits that double are one mode."""
    modes = []
    first = 0
    for extent in shape:
        count = extent.bit_length() - 1
        parts: list[list[int]] = []
        for stride in strides[first : first + count].tolist():
            if parts and stride == parts[-1][0] * parts[-1][1]:
                parts[-1][0] *= 2
            else:
                parts.append([2, stride])
        sizes, steps = zip(*parts, strict=True)
        modes.append((sizes[0], steps[0]) if len(parts) == 1 else (sizes, steps))
        first += count
    return Layout(tuple(mode[0] for mode in modes), tuple(mode[1] for mode in modes))
