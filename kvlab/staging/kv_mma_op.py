"""The matrix-product operator of the KV buffers: the register tile, its loads from shared memory, and the product."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.hardware import MmaAtom, get_atom
from kvlab.memory import Memory, as_dtype

from . import mma_op_addresses as addresses
from .mma_op_addresses import KVMmaOpParams
from .params import WARP_SIZE

__all__ = ["KVMmaOp", "KVMmaOpParams", "mfma_atom", "mma_tiles"]

Array = np.ndarray[Any, Any]

_SUFFIX = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float8_e4m3fn": "fp8"}


class KVMmaOp:
    """The fragments of K or V that the warps of a CTA hold, for all CTAs of a launch.

    ``reg_tile`` is ``[programs, threads, num_k_tiles * num_k_mmas * num_mmas, input_frag_size]``, ordered strip, k
    group, fragment; strip s stands in slot ``s % num_k_tiles``. What was never loaded is poison. In the loads ``base``
    is an element offset from the first byte of ``smem``: a scalar, or one for each warp.

    >>> params = KVMmaOpParams("bf16", (16, 16, 32), num_mmas=2, num_k_mmas=1, num_k_tiles=1, BN=32, BK=32,
    ...                        transpose=True)
    >>> op = KVMmaOp(params, num_threads=64)
    >>> keys = np.arange(32 * 32).reshape(32, 32) % 251
    >>> op.load_prefill(0, Memory.over(keys.astype(params.dtype)), base=0)
    >>> op.reg_tile.shape, op.reg_tile[0, 17, 1, :3].astype(int).tolist(), keys[17, 8:11].tolist()
    ((1, 64, 2, 8), [50, 51, 52], [50, 51, 52])
    """

    def __init__(self, params: KVMmaOpParams, *, programs: int = 1, num_threads: int = 256) -> None:
        if num_threads < 1 or num_threads % WARP_SIZE:
            raise ValueError(f"num_threads {num_threads} must be a positive multiple of {WARP_SIZE}")
        self.params, self.programs, self.num_warps = params, programs, num_threads // WARP_SIZE
        rows = params.num_k_tiles * params.rows_per_strip
        nbytes = params.input_frag_size * params.dtype.itemsize
        self.reg_tile: Array = np.full((programs, num_threads, rows, nbytes), 0xFF, np.uint8).view(params.dtype)

    @property
    def out_type(self) -> np.dtype[Any]:
        """The accumulator's dtype."""
        return as_dtype("float32")

    def mma_tile_at(self, strip: int, kg: int) -> Array:
        """The fragments of k group ``kg`` of the strip: ``[programs, threads, num_mmas, frag]``."""
        p = self.params
        if not 0 <= kg < p.num_k_mmas:
            raise ValueError(f"kg {kg} is not one of the {p.num_k_mmas} k groups of a strip")
        first = self._slot(strip).start + kg * p.num_mmas
        return self.reg_tile[:, :, first : first + p.num_mmas]

    def strip_tile(self, strip: int) -> Array:
        """All fragments of the strip, k group after k group: ``[programs, threads, num_k_mmas * num_mmas, frag]``."""
        return self.reg_tile[:, :, self._slot(strip)]

    def load_prefill(self, strip: int, smem: Memory, base: Any) -> None:
        """K: the strip from the warp's ``WN x BK`` tile at ``base``.

        Fragments of 32 bytes are two halves of the k group.
        """
        addresses.prefill_offsets(self.params)  # refuses what it is not for
        p = self.params
        self._set(strip, p.loader.load_b(smem, self._bases(base), p.num_mmas, p.BK))

    def load_prefill_split(self, strip: int, smem: Memory, lo: Any, hi: Any, has_hi: bool = True) -> None:
        """K: the strip from two ``WN x 64`` tiles, its lower and upper half; without the upper one it is zeros."""
        addresses.split_offsets(self.params)
        p = self.params
        halves = [p.half_loader.load_b(smem, self._bases(lo), p.num_mmas, p.bk_smem)]
        halves.append(
            p.half_loader.load_b(smem, self._bases(hi), p.num_mmas, p.bk_smem) if has_hi else np.zeros_like(halves[0])
        )
        self._set(strip, np.concatenate(halves, axis=-1))

    def load_v_bf16(self, strip: int, smem: Memory, base: Any) -> None:
        """V of 2 bytes: BK keys from the stage at ``base``, by transposing reads.

        The order of the keys is that of the score accumulator.
        """
        tiles = addresses.v_bf16_tiles(self.params, strip)
        self._set(strip, self.params.loader.load_b_tr(smem, self._bases(base), self.params.BK, tiles))

    def load_v_fp8_strip(self, strip: int, smem: Memory, base: Any) -> None:
        """V of 1 byte: MMA_K keys from the stage at ``base``, by transposing reads."""
        addresses.v_fp8_offsets(self.params, strip)
        p, tiles = self.params, np.arange(self.params.num_mmas)
        self._set(
            strip,
            p.loader.load_v_fp8_strip(smem, self._bases(base), BN=p.BN, BK=p.bk_smem, bk_tile=strip, dt=tiles),
        )

    def mma(self, a: Array, c: Array, strip: int, kg: int, swap_a_b: bool = True) -> Array:
        """``C[m + n * num_m_mmas] + A[m] * B[n]`` with B = ``mma_tile_at(strip, kg)``.

        a : ``[programs, threads, num_m_mmas, frag]``.
        c : ``[programs, threads, num_m_mmas * num_mmas, c_frag]`` float32.
        swap_a_b : give the instruction B as its first operand, so that the accumulator tile is transposed and a lane
            owns one query row, as MAX does. The order of C stays.
        """
        atom = mfma_atom(self.params.mma_shape, self.params.dtype)
        return mma_tiles(atom, a, self.mma_tile_at(strip, kg), c, swap_a_b)

    def _slot(self, strip: int) -> slice:
        rows = self.params.rows_per_strip
        first = strip % self.params.num_k_tiles * rows
        return slice(first, first + rows)

    def _bases(self, base: Any) -> Array:
        """``base`` for each warp."""
        return np.broadcast_to(np.asarray(base, np.int64), (self.num_warps,))

    def _set(self, strip: int, registers: Array) -> None:
        self.reg_tile[:, :, self._slot(strip)] = registers


def mfma_atom(mma_shape: tuple[int, int, int], dtype: Any) -> MmaAtom:
    """The matrix instruction for a shape and a storage dtype.

    >>> mfma_atom((16, 16, 32), "bf16").name
    'mfma.16x16x32.bf16'
    """
    name = as_dtype(dtype).name
    return get_atom(f"mfma.{'x'.join(map(str, mma_shape))}.{_SUFFIX.get(name, name)}")


def mma_tiles(atom: MmaAtom, a: Array, b: Array, c: Array, swap_a_b: bool = True) -> Array:
    """One k group: ``c[m + n * num_m] + a[m] * b[n]`` for the fragments of every warp.

    a ``[programs, threads, num_m, regs]``, b ``[programs, threads, num_n, regs]``, c ``[programs, threads,
    num_m * num_n, regs_c]`` float32; a new c is returned. With ``swap_a_b`` the instruction computes the transposed
    tile, B times A.

    >>> atom = mfma_atom((16, 16, 32), "bf16")
    >>> ones = np.ones((1, 64, 1, 8), atom.dtype)  # one warp, one tile each
    >>> mma_tiles(atom, ones, ones, np.zeros((1, 64, 1, 4), np.float32))[0, 0, 0].tolist()
    [32.0, 32.0, 32.0, 32.0]
    """
    num_m, num_n, lanes = a.shape[2], b.shape[2], atom.warp_size
    if c.shape[2] != num_m * num_n:
        raise ValueError(f"c has {c.shape[2]} registers, must have num_m * num_n = {num_m} * {num_n}")
    by_warp_a = np.swapaxes(a.reshape(len(a), -1, lanes, *a.shape[2:]), 2, 3)[:, :, None]
    by_warp_b = np.swapaxes(b.reshape(len(b), -1, lanes, *b.shape[2:]), 2, 3)[:, :, :, None]
    tiles = c.reshape(len(c), -1, lanes, num_n, num_m, c.shape[-1]).transpose(0, 1, 3, 4, 2, 5)
    # [programs, warps, num_n, num_m, lanes, regs]
    out = atom.mma(by_warp_b, by_warp_a, tiles) if swap_a_b else atom.mma(by_warp_a, by_warp_b, tiles)
    return out.transpose(0, 1, 4, 2, 3, 5).reshape(c.shape)
