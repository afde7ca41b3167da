"""One sentence for each kind of object that a text may describe."""

from __future__ import annotations

import functools
from typing import Any

from kvlab.hardware import SmemDescriptor, TensorMapSwizzle, TmaDescriptor, get_arch
from kvlab.layout import ComposedLayout, Layout, LinearLayout, Swizzle
from kvlab.layout.encodings import (
    AMDMFMALayout,
    AMDRotatingSharedLayout,
    AMDWMMALayout,
    BlockedLayout,
    DistributedLinearLayout,
    DotOperandLayout,
    Encoding,
    NVMMADistributedLayout,
    NVMMASharedLayout,
    PaddedSharedLayout,
    SharedLinearLayout,
    SliceLayout,
    SwizzledSharedLayout,
    TensorMemoryLayout,
)


def sentence_of(thing: Any, more: str = "") -> str:
    """The sentence of an object; ``more`` is put behind it.

    >>> sentence_of(Swizzle(3, 4, 3, "byte"))
    'Bits 4 to 6 of a byte address are XORed with bits 7 to 9, the mode 128B of TMA and wgmma.'
    """
    return f"{_words(thing)}; {more}." if more else f"{_words(thing)}."


def _by(sizes: Any) -> str:
    return " x ".join(map(str, sizes))


@functools.singledispatch
def _words(thing: Any) -> str:
    raise ValueError(f"{thing!r:.200} has no sentence: must be a layout, a swizzle, an encoding or a descriptor")


@_words.register
def _(thing: Swizzle) -> str:
    if not thing.bits:
        return "No swizzle: every address stays as it is"
    own = thing.in_bytes()
    low, high = own.base - min(own.shift, 0), own.base + max(own.shift, 0)
    modes = {(mode.value, 4, 3): mode.label for mode in TensorMapSwizzle if mode}
    mode = modes.get((own.bits, own.base, own.shift))
    hardware = f", the mode {mode} of TMA and wgmma" if mode else ", no mode of TMA"
    return f"{_bits(low, own.bits)} of a byte address are XORed with {_bits(high, own.bits).lower()}{hardware}"


def _bits(first: int, count: int) -> str:
    return f"Bits {first} to {first + count - 1}" if count > 1 else f"Bit {first}"


@_words.register
def _(thing: Layout) -> str:
    span = f"{thing.size} elements in {thing.cosize} places" if thing.size else "no element"
    if thing.rank != 2 or not thing.size:
        return f"A layout of {thing.rank} mode{'s' * (thing.rank != 1)}: {span}"
    rows, columns = thing.modes
    one = {"row": columns, "column": rows}
    along = [f"{name}s are contiguous" for name, mode in one.items() if mode.size > 1 and mode(1) == 1]
    return f"A layout of {rows.size} x {columns.size}: {span}; {along[0] if along else 'no mode is contiguous'}"


@_words.register
def _(thing: ComposedLayout) -> str:
    inner = _words(thing.layout)
    start = f", from {thing.offset} on" if thing.offset else ""
    if isinstance(thing.outer, Swizzle):
        swizzle = _words(thing.outer)
        return f"{inner}{start}; then {swizzle[0].lower()}{swizzle[1:]}"
    return f"{inner}{start}" + ("" if thing.outer is None else f"; its offsets are looked up in {thing.outer}")


@_words.register
def _(thing: LinearLayout) -> str:
    ins = ", ".join(f"{name} ({size})" for name, size in thing.in_dims.items())
    kind = "every place once" if thing.is_invertible else "some places more than once or never"
    return f"A linear layout from {ins} to {_by(thing.shape)}, {kind}"


@_words.register
def _(thing: SmemDescriptor) -> str:
    unit = "wgmma" if "wgmma" in get_arch(thing.arch).features else "tcgen05.mma"
    where = f"The operand of a {unit} at byte {thing.start_address} of shared memory"
    base = f", whose pattern starts {128 * thing.base_offset} bytes past a multiple of 1024" * bool(thing.base_offset)
    if thing.swizzle:
        rows = f"in rows of {thing.swizzle.bytes} bytes with swizzle {thing.swizzle.label}"
        return f"{where}, if K-major {rows}, {thing.stride_bytes} bytes from 8 rows to the next{base}"
    return (
        f"{where}, without a swizzle, if K-major {thing.stride_bytes} bytes from 8 rows to the next and "
        f"{thing.leading_bytes} from 16 bytes of K to the next"
    )


@_words.register
def _(thing: TmaDescriptor) -> str:
    steps = "" if set(thing.element_strides) == {1} else f", every {_by(thing.element_strides)}th element"
    rows = [stride * thing.dtype.itemsize for stride in thing.strides[:-1]]
    apart = f", strides of {', '.join(map(str, rows))} bytes" if rows else ""
    swizzle = f"swizzle {thing.swizzle.label}" if thing.swizzle else "no swizzle"
    return (
        f"TMA copies boxes of {_by(thing.box)} {thing.dtype} out of {_by(thing.shape)} at {thing.base:#x}"
        f"{apart}{steps}, with {swizzle}: {thing.transaction_bytes} bytes a box"
    )


@_words.register
def _(thing: Encoding) -> str:
    return f"{type(thing).__name__}, an encoding of Triton"


@_words.register
def _(thing: BlockedLayout) -> str:
    return (
        f"Registers in blocks: {_by(thing.size_per_thread)} elements a thread, {_by(thing.threads_per_warp)} threads a "
        f"warp, {_by(thing.warps_per_cta)} warps, dimension {thing.order[0]} first"
    )


@_words.register
def _(thing: SliceLayout) -> str:
    parent = _words(thing.parent)
    return f"A layout without its dimension {thing.dim}: {parent[0].lower()}{parent[1:]}"


@_words.register
def _(thing: DistributedLinearLayout) -> str:
    held = (("registers", thing.reg_bases), ("lanes", thing.lane_bases), ("warps", thing.warp_bases))
    return f"Registers by basis vectors: {', '.join(f'{1 << len(b)} {n}' for n, b in held)} hold {_by(thing.shape)}"


@_words.register
def _(thing: NVMMADistributedLayout) -> str:
    unit = {2: "mma.sync", 3: "wgmma"}.get(thing.version[0], f"mma of version {thing.version[0]}")
    return f"The accumulator of {unit} {_by(thing.instr_shape)} over {_by(thing.warps_per_cta)} warps"


@_words.register
def _(thing: AMDMFMALayout) -> str:
    turned = ", transposed" if thing.transposed else ""
    return f"The accumulator of MFMA {_by(thing.instr_shape)} over {_by(thing.warps_per_cta)} warps{turned}"


@_words.register
def _(thing: AMDWMMALayout) -> str:
    return f"The accumulator of AMD's WMMA of version {thing.version}"


@_words.register
def _(thing: DotOperandLayout) -> str:
    parent = _words(thing.parent)
    pieces = f"pieces of {thing.k_width} along K" if thing.k_width else "its parent's elements along K"
    return f"Operand {'AB'[thing.operand_index]} of a product in registers, {pieces}; {parent[0].lower()}{parent[1:]}"


@_words.register
def _(thing: SwizzledSharedLayout) -> str:
    rows = f"Shared memory, rows along dimension {thing.order[0]}"
    if thing.max_phase == 1:
        return f"{rows}, no swizzle"
    also = " and the number of the period" if isinstance(thing, AMDRotatingSharedLayout) else ""
    phase = f"r / {thing.per_phase} mod {thing.max_phase}{also}"
    return f"{rows}: pieces of {thing.vec} elements of row r are XORed with {phase}"


@_words.register
def _(thing: NVMMASharedLayout) -> str:
    width = thing.swizzle_byte_width
    swizzle = f"panels of {width} bytes with swizzle {width}B" if width else "no swizzle"
    major = f"the {'first' if thing.transposed else 'last'} dimension contiguous"
    kind = f"elements of {thing.element_bitwidth} bits{', fp4 with gaps' if thing.fp4_padded else ''}"
    return f"Shared memory as TMA writes and wgmma reads it: {swizzle}, {major}, {kind}"


@_words.register
def _(thing: TensorMemoryLayout) -> str:
    apart = f", an element every {thing.col_stride} columns" if thing.col_stride > 1 else ""
    return f"Tensor memory, blocks of {_by(thing.block)}: a row a lane, its elements along columns of 32 bits{apart}"


@_words.register
def _(thing: PaddedSharedLayout) -> str:
    gaps = " and ".join(f"{more} empty after every {every}" for every, more in thing.interval_padding_pairs)
    return f"Shared memory of {_by(thing.shape)} with gaps: {gaps} elements"


@_words.register
def _(thing: SharedLinearLayout) -> str:
    return f"Shared memory by basis vectors: {1 << len(thing.offset_bases)} elements of {_by(thing.pattern_shape())}"
