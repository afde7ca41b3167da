"""P between the two products of MAX's gfx950 kernels in all its forms: left in registers, or staged through LDS.

Q K^T is issued swapped, so a lane's accumulator registers run over keys: register row ``n * num_m + m`` is key tile n
of query tile m. Cast to the storage dtype they are the operand of O += P V, directly or after a way through ``BN / BK``
blocks of ``BM x BK`` in LDS, where the warps along the keys exchange what they hold."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvlab.layout import Swizzle, TileTensor
from kvlab.memory import AddressSpace, Memory, as_dtype
from kvlab.staging.tile.fragments import FragmentMap
from kvlab.staging.tile.p_exchange import PExchange
from kvlab.staging.tile.shared_access import SharedAccess

from .params import WARP_SIZE

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int64]]
FP8_P_SCALE = 256.0
"""What P is multiplied by before the cast to e4m3; the output is divided by it."""


def cast_p(p: Array, dtype: Any) -> Array:
    """P in the storage dtype: e4m3 as ``P * 2^8``, since P in (0, 1] would lose all below 2^-10.

    >>> cast_p(np.float32([1.0, 2.0**-17]), "fp8").astype(np.float32).tolist()
    [256.0, 0.001953125]
    """
    kind = as_dtype(dtype)
    scaled = p * np.float32(FP8_P_SCALE) if kind.itemsize == 1 else p
    out: Array = scaled.astype(kind)
    return out


@dataclass(frozen=True)
class PStagingParams:
    """Parameters that decide the form, by MAX's names.

    dtype      storage dtype of P: 2 bytes, or fp8 e4m3
    mma_shape  (M, N, K), M = N
    BM, WM     query rows of the tile and of a warp
    BN, WN     keys of the tile and of a warp
    BK         keys of a block
    swizzle    of LDS, on vectors of a form's own size, or None
    tr         whether V comes by transposing reads: its keys then lie in the order of the accumulators

    ``form`` is ``"registers"`` (all keys of a tile are one warp's), ``"lane contiguous"`` (32x32 without a swizzle, one
    byte), ``"narrow"`` (swizzled, a block is several warps'), ``"pairs"`` (swizzled, a block is two key tiles of one
    warp), else ``"tiles"``.

    >>> swizzle = Swizzle(3, 0, 3, "vector")
    >>> PStagingParams("bf16", (16, 16, 32), BM=16, WM=16, BN=128, WN=32, BK=32, swizzle=swizzle).form
    'pairs'
    """

    dtype: np.dtype[Any]
    mma_shape: tuple[int, int, int]
    BM: int
    WM: int
    BN: int
    WN: int
    BK: int
    swizzle: Swizzle | None = None
    tr: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        M, N, K = self.mma_shape
        if self.dtype.itemsize > 2 or M != N or M not in (16, 32) or M * K // WARP_SIZE < 4:
            raise ValueError(f"{self.dtype}, mma_shape {self.mma_shape}: must be 1 or 2 bytes and 16x16xK or 32x32xK")
        for small, large, tile in (("WM", "BM", M), ("WN", "BN", N), ("BK", "BN", K)):
            a, b = getattr(self, small), getattr(self, large)
            if a < 1 or a % tile or b % a:
                raise ValueError(f"{small} is {a}: must be a multiple of {tile} and divide {large} {b}")
        if max(self.WN, self.BK) % min(self.WN, self.BK):
            raise ValueError(f"WN {self.WN} and BK {self.BK}: one must divide the other")
        if self.form in ("narrow", "pairs") and self.num_m > 1:
            raise ValueError(f"WM {self.WM} with {self.swizzle}: must be {M}; in MAX more query tiles share one place")
        if self.form == "lane contiguous" and (self.num_n != 1 or self.BK != 2 * self.WN):
            raise ValueError(f"WN {self.WN}, BK {self.BK} of 32x32 fp8 without a swizzle: must be 32 and 64")

    @property
    def form(self) -> str:
        M, N, _ = self.mma_shape
        if self.WN == self.BN:
            return "registers"
        if M == 32 and self.swizzle is None and self.dtype.itemsize == 1:
            return "lane contiguous"
        if self.swizzle is not None and self.WN < self.BK:
            return "narrow"
        if self.swizzle is not None and self.BK == 2 * N and M == 16:
            return "pairs"
        return "tiles"

    @property
    def num_m(self) -> int:
        """Query tiles of a warp."""
        return self.WM // self.mma_shape[0]

    @property
    def num_n(self) -> int:
        """Key tiles of a warp."""
        return self.WN // self.mma_shape[1]

    @property
    def c_frag(self) -> int:
        """Elements of a lane's accumulator."""
        return self.mma_shape[0] * self.mma_shape[1] // WARP_SIZE

    @property
    def in_frag(self) -> int:
        """Elements of a lane's operand."""
        return self.mma_shape[0] * self.mma_shape[2] // WARP_SIZE

    @property
    def num_warps(self) -> int:
        return self.BM // self.WM * (self.BN // self.WN)

    @property
    def k_groups(self) -> int:
        """Matrix instructions along the keys of a block."""
        return self.BK // self.mma_shape[2]

    def score_map(self) -> FragmentMap:
        """The accumulators ``[BM, BN]``, registers ``n * num_m + m``."""
        return _scores(self)

    def places(self) -> IntArray:
        """Place of each element of P in LDS, in elements: ``[BM, BN]``."""
        return _places(self)

    def operand_map(self) -> FragmentMap:
        """Map of :meth:`PStaging.mma_tile`, registers (block, k group, m): every element is followed from the
        accumulators to the operand."""
        return _operand(self)


class PStaging:
    """P of a tile for all CTAs of a launch.

    Parameters
    ----------
    params : the form and its sizes.
    programs : CTAs.
    smem, smem_address : where the blocks lie, memory of their own if None. The form ``"registers"`` needs none.

    >>> params = PStagingParams("fp8", (32, 32, 64), BM=32, WM=32, BN=128, WN=32, BK=64)
    >>> p = PStaging(params)
    >>> params.form, p.smem.nbytes
    ('lane contiguous', 4096)
    >>> tile = (np.arange(32 * 128).reshape(1, 32, 128) % 250 / 256).astype(np.float32)
    >>> p.copy(params.score_map().spread(tile))
    >>> operand = np.concatenate([np.asarray(p.mma_tile(block, 0)) for block in range(2)], axis=2)
    >>> bool((params.operand_map().gather(operand) == cast_p(tile, "fp8")).all())
    True
    """

    def __init__(
        self, params: PStagingParams, programs: int = 1, smem: Memory | None = None, *, smem_address: int = 0
    ) -> None:
        self.params = params
        nbytes = params.BM * params.BN * params.dtype.itemsize
        if smem is None:
            smem = Memory(nbytes, space=AddressSpace.SHARED, name="shared memory", programs=programs)
        if smem_address % 16 or not smem.base <= smem_address <= smem.base + smem.nbytes - nbytes:
            raise ValueError(f"smem_address {smem_address}: {nbytes} bytes of P on a multiple of 16 do not fit")
        self.smem, self.smem_address = smem, smem_address
        self._held: Array | None = None

    @functools.cached_property
    def _exchange(self) -> PExchange:
        accesses = lds_accesses(self.params, self.params.operand_map())
        return PExchange(self.smem, accesses, self.params.dtype, first=self.smem_address)

    def copy(self, scores: Array) -> None:
        """Cast P ``[programs, threads, num_n * num_m, c_frag]``, float32, and write it to LDS, or keep it."""
        p = self.params
        self._held = cast_p(scores, p.dtype)
        if p.form != "registers":
            self._exchange.write(self._held)

    def mma_tile(self, tile_idx: int, k_idx: int) -> TileTensor:
        """The operand of a k group of a block, in registers: of each thread ``num_m x in_frag``. ValueError before a
        copy."""
        p = self.params
        if not (0 <= tile_idx < p.BN // p.BK and 0 <= k_idx < p.k_groups):
            raise ValueError(f"mma_tile({tile_idx}, {k_idx}): P has {p.BN // p.BK} blocks of {p.k_groups} k groups")
        if self._held is None:
            raise ValueError("mma_tile of nothing: copy P first")
        if p.form == "registers":
            registers = _of_registers(p, self._held, tile_idx, k_idx)
        else:
            values = self._exchange.read()
            groups = values.reshape(*values.shape[:2], -1, p.num_m, p.in_frag)
            registers = groups[:, :, tile_idx * p.k_groups + k_idx]
        return TileTensor.from_numpy(registers, name="registers", space=AddressSpace.LOCAL, batch=2)


# Registers.

_PLAIN = np.array([0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15])
"""The order of an accumulator of 32x32 where V does not come by transposing reads."""


def _of_registers(p: PStagingParams, held: Array, tile_idx: int, k_idx: int) -> Array:
    """``held`` ``[programs, threads, num_n * num_m, c_frag]``; the key tiles of a block are consecutive."""
    rows = held.reshape(*held.shape[:2], p.num_n, p.num_m, p.c_frag)
    if not p.tr:
        rows = rows[..., _PLAIN[: p.c_frag]] if p.c_frag == 16 else rows
    first = tile_idx * p.BK // p.mma_shape[1]
    block = np.moveaxis(rows[:, :, first : first + p.BK // p.mma_shape[1]], 2, 3)  # [.., m, key tiles, c_frag]
    flat = block.reshape(*block.shape[:3], -1)
    return flat[..., k_idx * p.in_frag : (k_idx + 1) * p.in_frag]


# LDS. Offsets in elements.


def _warps(p: PStagingParams, *axes: int) -> tuple[IntArray, ...]:
    """Warp, row r and column group c of the lane, and further axes, to broadcast."""
    warp, lane, *more = np.ogrid[tuple(slice(n) for n in (p.num_warps, WARP_SIZE, *axes))]
    return warp, lane % p.mma_shape[0], lane // p.mma_shape[0], *more


@functools.cache
def _written(p: PStagingParams) -> tuple[IntArray, int]:
    """Offsets ``[threads, num_n * num_m, pieces]`` and the elements of a piece."""
    (M, N, _), columns = p.mma_shape, p.BN // p.WN
    pieces = 1 if p.form == "lane contiguous" else p.c_frag // 4
    warp, r, c, n, m, piece = _warps(p, p.num_n, p.num_m, pieces)
    warp_row, key = warp // columns, warp % columns * p.WN + n * N
    block = key // p.BK * p.BM * p.BK
    q = key % p.BK // p.WN if p.WN < p.BK else 0 * key
    width = p.c_frag // pieces
    if p.form == "lane contiguous":
        inside = (warp_row * p.num_m + m) * 32 * p.BK + q * 32 * p.WN + 16 * (r + 32 * c)
    elif p.form == "narrow":
        vector = (warp_row * p.WM + r) * (p.BK // p.in_frag) + q * p.WN // p.in_frag + n * N // p.in_frag
        inside = _swizzled(p, vector) * p.in_frag + n * N % p.in_frag + c * p.c_frag + piece * width
    elif p.form == "pairs":
        group = (warp_row * p.WM + r) * (p.BK // 8) + c
        inside = _swizzled(p, group) * 8 + key % p.BK // N * 4
    else:
        at = (m * M + r) * p.BK + key % p.BK + c * p.c_frag
        at = _swizzled(p, at // p.c_frag) * p.c_frag
        inside = warp_row * p.WM * p.BK + at + piece * width
    offset = block + inside + 0 * (m + piece)
    return np.broadcast_to(offset, (p.num_warps, WARP_SIZE, p.num_n, p.num_m, pieces)).reshape(
        p.num_warps * WARP_SIZE, -1, pieces
    ), width


@functools.cache
def _read(p: PStagingParams, tile_idx: int, k_idx: int) -> tuple[IntArray, int]:
    """Offsets ``[threads, num_m, pieces]`` of a k group of a block, and the elements of a piece."""
    (M, _, K), columns, block = p.mma_shape, p.BN // p.WN, tile_idx * p.BM * p.BK
    pieces = {"lane contiguous": 2, "narrow": 1, "pairs": 1}.get(p.form, max(p.in_frag // 4, 1))
    width = p.in_frag // pieces
    warp, r, c, m, piece = _warps(p, p.num_m, pieces)
    warp_row = warp // columns
    if p.form == "lane contiguous":
        inside = (warp_row * p.num_m + m) * 32 * p.BK + 16 * (r + 32 * c) + piece * 32 * p.BK // 2
    elif p.form == "narrow":
        vector = (warp_row * p.WM + r) * (p.BK // p.in_frag) + k_idx * (K // p.in_frag) + c
        inside = _swizzled(p, vector) * p.in_frag + 0 * (m + piece)
    elif p.form == "pairs":
        inside = _swizzled(p, (warp_row * p.WM + r) * (p.BK // 8) + c) * 8 + 0 * (m + piece)
    else:
        split = p.mma_shape == (16, 16, 32) and p.tr
        col = k_idx * K + (4 * c + 16 * piece if split else p.in_frag * c + 4 * piece)
        at = (m * M + r) * p.BK + col
        at = _swizzled(p, at // p.c_frag) * p.c_frag + at % p.c_frag
        inside = warp_row * p.WM * p.BK + at
    shape = p.num_warps, WARP_SIZE, p.num_m, pieces
    return np.broadcast_to(block + inside, shape).reshape(-1, p.num_m, pieces), width


def _swizzled(p: PStagingParams, number: IntArray) -> IntArray:
    return number if p.swizzle is None else p.swizzle(number)


@functools.cache
def _scores(p: PStagingParams) -> FragmentMap:
    (M, N, _), columns = p.mma_shape, p.BN // p.WN
    warp, r, c, n, m, e = _warps(p, p.num_n, p.num_m, p.c_frag)
    row = warp // columns * p.WM + m * M + r + 0 * (n + e)
    key = warp % columns * p.WN + n * N + e // 4 * (4 * WARP_SIZE // N) + c * 4 + e % 4 + 0 * m
    shape = p.num_warps * WARP_SIZE, -1, p.c_frag
    return FragmentMap((p.BM, p.BN), (row + 0 * key).reshape(shape), (key + 0 * row).reshape(shape))


@functools.cache
def _places(p: PStagingParams) -> IntArray:
    offset, width = _written(p)
    places = np.full(p.BM * p.BN, -1)
    places[_scores(p).flat.reshape(*offset.shape, width)] = offset[..., None] + np.arange(width)
    return places.reshape(p.BM, p.BN)


@functools.cache
def lds_accesses(p: PStagingParams, operand: FragmentMap) -> tuple[SharedAccess, SharedAccess]:
    """Accesses by which the warps write P where ``p`` has it, and read it as ``operand``, ``[BM, BN]``; neighbours in
    LDS at once."""
    plain = p if p.swizzle is None else replace(p, swizzle=Swizzle.identity("vector"))
    size = p.dtype.itemsize
    at, without = (size * x.places() for x in (p, plain))
    maps = ("write", _scores(p)), ("read", operand)
    write, read = (
        SharedAccess.of_elements(f"ds_{kind}_b", at[m.row, m.col], size, "gfx950", without[m.row, m.col])
        for kind, m in maps
    )
    return write, read


@functools.cache
def _operand(p: PStagingParams) -> FragmentMap:
    place = _scores(p).flat  # [threads, num_n * num_m, c_frag]
    groups = [(block, k) for block in range(p.BN // p.BK) for k in range(p.k_groups)]
    if p.form == "registers":
        found = [_of_registers(p, place[None], *group)[0] for group in groups]
    else:
        offset, width = _written(p)
        image = np.full(p.BM * p.BN, -1)
        image[offset[..., None] + np.arange(width)] = place.reshape(*offset.shape, width)
        reads = [_read(p, *group) for group in groups]
        found = [image[at[..., None] + np.arange(w)].reshape(len(at), p.num_m, -1) for at, w in reads]
    held = np.concatenate(found, axis=1)
    return FragmentMap((p.BM, p.BN), held // p.BN, held % p.BN)
