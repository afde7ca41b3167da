"""Places of a compiled kernel's tile of K or V on its way from DRAM to registers, read from its TTGIR.

No GPU is needed. :func:`compiler_staging` compiles a kernel whose shared memory Triton lays out as it sees fit,
:func:`staging_as` one that is told the layout. What comes back are encodings of :mod:`kvlab.layout.encodings`, so that
addresses are index arrays, to be held against those of :mod:`kvlab.staging`.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.layout.encodings import Encoding, SharedEncoding, from_ttgir, ttgir_aliases
from kvlab.staging import FragmentMap
from kvlab.triton_support.compile import TARGETS, Compiled, compile_kernel
from kvlab.triton_support.versions import require

IntArray = np.ndarray[Any, np.dtype[np.int64]]
BITS, WARPS = 16, 4
_ALLOC = r"local_alloc : \(\) -> !ttg\.memdesc<(?:\d+x)?{}x{}xbf16, (#\w+)"
_LOAD = r"local_load .* : !ttg\.memdesc<{}x{}xbf16, .* -> tensor<\d+x\d+xbf16, (#.*)>"
_BRIEF = {
    "NVMMASharedLayout": "nvmma_shared {swizzle_byte_width}",
    "PaddedSharedLayout": "padded_shared {pairs}",
    "SharedLinearLayout": "shared_linear",
    "SwizzledSharedLayout": "swizzled_shared {vec}, {per_phase}, {max_phase}",
}


@dataclass(frozen=True)
class StagedTile:
    """A tile of bfloat16, ``shape`` (rows, columns), of a kernel that was compiled for ``target``.

    shared     its encoding in shared memory
    registers  its encoding in registers; None where the tensor cores read shared memory themselves (wgmma)

    >>> from kvlab.layout.encodings import SwizzledSharedLayout
    >>> tile = StagedTile("sm_80", (32, 128), SwizzledSharedLayout(8, 1, 8, [1, 0]), None)
    >>> print(tile)
    swizzled_shared 8, 1, 8
    >>> tile.addresses()[1, :64:8].tolist()
    [272, 256, 304, 288, 336, 320, 368, 352]
    """

    target: str
    shape: tuple[int, int]
    shared: SharedEncoding
    registers: Encoding | None

    def addresses(self) -> IntArray:
        """Byte address of every element ``[rows, columns]``, counted from the first byte of the tile."""
        return self.shared.offsets(self.shape, triton_version=require()) * BITS // 8

    def __str__(self) -> str:
        kind, fields = type(self.shared).__name__, dict(vars(self.shared))
        if kind == "PaddedSharedLayout":
            fields["pairs"] = ", ".join(f"{n}:+{gap}" for n, gap in fields["interval_padding_pairs"])
        return _BRIEF.get(kind, kind).format(**fields)

    def fragment_map(self) -> FragmentMap:
        """Elements that each thread holds, in registers of 32 bits: two elements each.

        ValueError where no thread holds the tile.
        """
        if self.registers is None:
            raise ValueError(f"{self!r}: no thread holds the tile, the tensor cores read shared memory")
        layout = self.registers.to_linear_layout(self.shape, triton_version=require())
        lanes, warps = layout.in_dims["lane"], layout.in_dims["warp"]
        warp, lane = np.divmod(np.arange(warps * lanes)[:, None, None], lanes)
        register = np.arange(layout.in_dims["register"]).reshape(1, -1, 32 // BITS)
        row, column = layout(register=register, lane=lane, warp=warp, block=0)
        return FragmentMap(self.shape, row, column, warp_size=lanes)

    def read_addresses(self) -> tuple[str, IntArray]:
        """The instruction that brings the tile to the registers, and its byte addresses ``[instructions, warps,
        lanes]``: ldmatrix.x4, or ds_read_b128 on gfx950; the transposing one where a register holds two rows. They
        follow from what the lanes hold.

        ValueError where no thread holds the tile, and for machines without these instructions.
        """
        if self.target not in ("sm_80", "sm_86", "sm_89", "sm_90", "gfx950"):
            raise ValueError(f"{self!r}: reads are known of sm_80 to sm_90 and gfx950")
        held, nvidia = self.fragment_map(), self.target.startswith("sm_")
        transposed = bool(held.row[0, 0, 0] != held.row[0, 0, 1])
        name = {(True, False): "ldmatrix.x4", (True, True): "ldmatrix.x4.trans", (False, False): "ds_read_b128",
                (False, True): "ds_read_tr16_b64"}[nvidia, transposed]
        elements = 2 if nvidia else 4 if transposed else 8  # that a lane gets of a matrix, or in all
        shape = (WARPS, held.warp_size, -1, elements)
        row, column = held.row.reshape(shape)[..., 0], held.col.reshape(shape)[..., 0]
        whose: Any
        down: Any
        across: Any
        lane, piece = np.arange(held.warp_size), np.arange(row.shape[2])[:, None]
        if nvidia:  # lane l addresses row l % 8 of matrix l // 8; lane 4 r holds what row r begins with
            piece = piece[::4] + lane // 8
            whose, down, across = (0, lane % 8, 0) if transposed else (lane % 8 * 4, 0, 0)
        elif transposed:  # 16 lanes address 4 rows of 16 columns
            whose, down, across = lane // 16 * 16, lane % 16 // 4, lane % 4 * 4
        else:
            whose, down, across = lane, 0, 0
        address = self.addresses()[row[:, whose, piece] + down, column[:, whose, piece] + across]
        return name, np.moveaxis(address, 1, 0)


def compiler_staging(target: str, *, BM: int, BN: int, D: int) -> tuple[StagedTile, StagedTile]:
    """K and V tiles ``[BN, D]`` of attention on BM query rows, four warps, as the installed Triton stages them.

    target   one of :data:`~kvlab.triton_support.compile.TARGETS`
    BM, BN, D   powers of two of at least 16

    ValueError for another target, ImportError without Triton; what the compiler says of other sizes passes.
    """
    require()
    from kvlab.triton_support.stage_kernels import stage

    signature = {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "o_ptr": "*fp32", "tiles": "i32"}
    made = compile_kernel(stage, signature, {"BM": BM, "BN": BN, "D": D}, target, num_warps=WARPS)
    k, v = _staged(made, (BN, D))
    return k, v


def staging_as(target: str, shape: tuple[int, int], shared: SharedEncoding, registers: Encoding) -> StagedTile:
    """A tile of ``shape`` whose encodings Gluon is told, as the compiler has them in the end.

    ValueError for another target, and for sizes that do not fit the encodings.

    shared, registers   encodings of :mod:`kvlab.layout.encodings`; registers of four warps
    """
    if target not in TARGETS:
        raise ValueError(f"target is {target!r}: must be one of {', '.join(TARGETS)}")
    for encoding in (shared, registers):
        encoding.to_linear_layout(shape, triton_version=require())
    from triton.experimental.gluon import language as gl

    from kvlab.triton_support.stage_kernels import stage_as

    lanes, (rows, columns) = TARGETS[target][2], shape
    across = min(lanes, columns // 8)
    copy = gl.BlockedLayout([1, 8], [lanes // across, across], [WARPS, 1], [1, 0])
    constants: dict[str, Any] = {"ROWS": rows, "COLUMNS": columns, "COPY": copy}
    constants |= {"SHARED": _gluon(shared), "REGISTERS": _gluon(registers)}
    made = compile_kernel(stage_as, {"tile_ptr": "*bf16", "o_ptr": "*bf16"}, constants, target, num_warps=WARPS)
    (tile,) = _staged(made, shape)
    return tile


def _staged(made: Compiled, shape: tuple[int, int]) -> list[StagedTile]:
    """The tiles of this shape, in the order in which the kernel allots them."""
    text, aliases = made.asm["ttgir"], ttgir_aliases(made.asm["ttgir"])
    text = re.sub(r" loc\(.*", "", text)
    homes = re.findall(_ALLOC.format(*shape), text)
    loads = [load for load in re.findall(_LOAD.format(*shape), text) if "opIdx = 0" not in load]
    tiles = []
    for number, home in enumerate(homes):
        shared = from_ttgir(home, aliases)
        assert isinstance(shared, SharedEncoding)
        registers = from_ttgir(loads[number], aliases) if loads else None
        tiles.append(StagedTile(made.target, shape, shared, registers))
    return tiles


def _gluon(encoding: Any) -> Any:
    """Gluon's layout of the same name and fields."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language import amd

    kind = getattr(gl, type(encoding).__name__, None) or getattr(amd, type(encoding).__name__)
    fields = {field.name: getattr(encoding, field.name) for field in dataclasses.fields(encoding)}
    ours = {name: _gluon(value) if isinstance(value, Encoding) else _lists(value) for name, value in fields.items()}
    return kind(**{name: value for name, value in ours.items() if name in kind.__dataclass_fields__})


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, tuple) else value
