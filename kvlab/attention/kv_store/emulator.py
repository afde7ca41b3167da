"""KV store as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.hardware import get_arch
from kvlab.memory import Memory
from kvlab.staging import Traffic, program_ids

from .config import SMALLEST, Side, StoreConfig, reciprocal

Array = np.ndarray[Any, Any]
SMALLEST_TOP = np.float32(SMALLEST)
LARGEST_TOP = np.finfo(np.float32).max
NO_TOKEN = 2**31 - 1


def sequence_of(token: Array, where: Array, BB: int, BITS: int) -> Array:
    """Each token's sequence, ``batch`` past the last: as many as end at it or before. First BB stretches of 2^BITS
    sequences at once, then one stretch by halves.
    """
    batch, ends = where.size - 1, where.astype(np.int64)
    first = np.arange(BB) << BITS
    first = first[first < batch]
    over = np.searchsorted(ends[np.minimum(first + (1 << BITS), batch)], token, side="right")
    sequence = np.minimum(over << BITS, batch)
    for bit in range(BITS):
        later = sequence + (1 << (BITS - 1 - bit))
        start = np.where(later <= batch, ends[np.minimum(later, batch)], NO_TOKEN)
        sequence = np.where(start <= token, later, sequence)
    return sequence


def place(
    token: Array, where: Array, lens: Array | None, table: Array | None, positions: Array | None,
    tokens: int, seq_tokens: int, pages: int, config: StoreConfig,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Page, slot and position of each token, and whether it is stored (else the other three mean nothing)."""
    FORM, PAGE = config.form, config.page_size
    live = token < tokens
    position = None if positions is None else _pick(positions, token, live)
    if FORM == "slots":
        at = _pick(where, token, live)
        live = live & (at >= 0)
        at = np.maximum(at, 0)
        page = at // PAGE
    else:
        assert lens is not None
        assert table is not None
        if FORM == "ragged":
            sequence = sequence_of(token, where, config.BB, config.BITS)
            live = live & (sequence < lens.size)
            new = token - _pick(where, sequence, live)
        else:
            sequence = token // seq_tokens
            new = (token % seq_tokens).astype(np.int64)
            live = live & (new < _pick(where, sequence, live))
        at = new + _pick(lens, sequence, live)
        live = live & (new >= 0) & (at >= 0)
        at = np.maximum(at, 0)
        column = at // PAGE
        live = live & (column < table.shape[1])
        page = _pick(table, (sequence, column), live)
        live = live & (page >= 0)
    live = live & (page < pages)
    return page, at % PAGE, at if position is None else position, live


def rotate(
    x: Array, x_memory: Memory, x_at: Array, dim: Array, inside: Array, position: Array, new: Array,
    cos: Array | None, sin: Array | None, side: Side, config: StoreConfig,
) -> Array:  # fmt: skip
    """``x`` [P, BR, BG] in float32, its roped dims rotated by the angles of the token's position."""
    assert cos is not None
    assert sin is not None
    R = config.rope_dim
    dtype, x = x.dtype, x.astype(np.float32)
    known = (new & (position >= 0) & (position < len(cos)))[..., None]
    start = dim[..., None] - config.rope_first
    if config.interleaved:
        pair = start // 2 + np.arange(side.BG // 2)
        roped = known & (pair >= 0) & (pair < R // 2)
    else:
        j = start + np.arange(side.BG)
        pair = j % (R // 2)
        roped = known & (j >= 0) & (j < R)
    at = np.where(known, position[..., None], 0), np.where(roped, pair, 0)
    c = np.where(roped, cos[at].astype(np.float32), np.float32(1))
    s = np.where(roped, sin[at].astype(np.float32), np.float32(0))
    if config.interleaved:
        one, two = x[..., 0::2], x[..., 1::2]
        turned_one = np.where(roped, one * c - two * s, one)
        turned_two = np.where(roped, two * c + one * s, two)
        return np.stack([turned_one, turned_two], -1).reshape(x.shape)
    near = j < R // 2
    partner_at = (x_at + np.where(near, R // 2, -(R // 2))) * dtype.itemsize
    partner = x_memory.load(partner_at, dtype, mask=roped & inside)[..., 0].astype(np.float32)
    return np.where(roped & inside, x * c + partner * np.where(near, -s, s), x)


def given(scale: Array | float | None, head: Array, quant: str) -> Array:
    """The scale that is given for each row ``[P, rows]``, 1 where there is none; it waits for nothing."""
    if quant == "tensor":
        assert isinstance(scale, np.ndarray)
        return np.asarray(scale.astype(np.float32)[head % scale.size])
    return np.ones(head.shape, np.float32)


@np.errstate(over="ignore")  # what is too large for float32 is an infinity, which saturates
def quantise(x: Array, scale: Array, stored: Array | float | None, side: Side) -> tuple[Array, Array]:
    """``x`` divided by its scale, and the scale, which is computed here for "block"."""
    if side.quant == "number":
        x = x.astype(np.float32) * np.float32(reciprocal(stored))
    elif side.quant == "tensor":
        x = x.astype(np.float32) * (np.float32(1) / scale)[..., None]
    elif side.quant == "block":
        assert isinstance(stored, np.ndarray)
        x = x.astype(np.float32)
        magnitude = np.abs(x)
        finite = np.where(magnitude <= LARGEST_TOP, magnitude, np.float32(0))  # infinities and NaN: as in the kernel
        top = np.maximum(finite.max(axis=-1), SMALLEST_TOP)
        scale = (top / np.float32(side.limit)).astype(stored.dtype).astype(np.float32)
        x = x * (np.float32(1) / scale)[..., None]
    return x, scale


def convert(x: Array, dtype: np.dtype[Any], limit: float) -> Array:
    """Rounded once to ``dtype``; an 8-bit format saturates at ``limit``, as the hardware's conversion does."""
    if x.dtype == dtype:
        return x
    return (np.clip(x.astype(np.float32), -limit, limit) if dtype.itemsize == 1 else x).astype(dtype)


def append(
    k_array: Array, v_array: Array, k_cache: Array, v_cache: Array, where: Array, lens: Array | None,
    table: Array | None, positions: Array | None, cos: Array | None, sin: Array | None,
    k_scale_array: Array | float | None, v_scale_array: Array | float | None, config: StoreConfig, pages: int,
    traffic: Traffic, lanes: int,
) -> None:  # fmt: skip
    """K and V of the rows of each program, to where their tokens belong. A row: one block of one head of one token."""
    #: setup -> k_token_idx, k_head_idx, k_dim, v_token_idx, v_head_idx, v_dim    the rows of this program
    K, V, H = config.k, config.v, config.heads
    (program,) = program_ids(config.grid())  # [P]
    k_row = program[:, None] * K.BR + np.arange(K.BR, dtype=np.int32)  # [P, BR]
    v_row = program[:, None] * V.BR + np.arange(V.BR, dtype=np.int32)
    k_token_idx, k_head_idx, k_dim = k_row // (H * K.blocks), k_row // K.blocks % H, k_row % K.blocks * K.G
    v_token_idx, v_head_idx, v_dim = v_row // (H * V.blocks), v_row // V.blocks % H, v_row % V.blocks * V.G
    k_col, v_col = np.arange(K.BG), np.arange(V.BG)
    k_inside = (k_col < K.G) & (k_dim[..., None] + k_col < K.D)  # [P, BR, BG]
    v_inside = (v_col < V.G) & (v_dim[..., None] + v_col < V.D)
    #: load -> k, v, k_scale, v_scale    the new tokens and the scales that are given; no need to wait for their slots
    k_scale = given(k_scale_array, k_head_idx, K.quant)  # [P, BR]
    v_scale = given(v_scale_array, v_head_idx, V.quant)
    tokens, seq_tokens = k_array.shape[0] * k_array.shape[1], max(1, k_array.shape[1])
    k_new, v_new = k_token_idx < tokens, v_token_idx < tokens
    k_memory, v_memory = Memory.over(k_array, name="k"), Memory.over(v_array, name="v")
    k_from = _offset(k_array, k_token_idx // seq_tokens, k_token_idx % seq_tokens, k_head_idx) + k_dim
    v_from = _offset(v_array, v_token_idx // seq_tokens, v_token_idx % seq_tokens, v_head_idx) + v_dim
    k_at, v_at = k_from[..., None] + k_col, v_from[..., None] + v_col
    k = _load(k_memory, k_at, k_array.dtype, k_new[..., None] & k_inside, K.vec_in, traffic, lanes)
    v = _load(v_memory, v_at, v_array.dtype, v_new[..., None] & v_inside, V.vec_in, traffic, lanes)
    #: place -> k_page, k_slot, k_live, v_page, v_slot, v_live    where each row belongs, and whether anywhere
    k_page, k_slot, k_position, k_live = place(
        k_token_idx, where, lens, table, positions, tokens, seq_tokens, pages, config
    )
    v_page, v_slot, v_position, v_live = place(
        v_token_idx, where, lens, table, positions, tokens, seq_tokens, pages, config
    )
    #: rope_v -> v    where V is the roped side: in float32
    if config.rope == "v":
        v = rotate(v, v_memory, v_at, v_dim, v_inside, v_position, v_new, cos, sin, V, config)
    #: quantise_v -> v, v_scale    divided by the scale, rounded once to the cache's format
    v, v_scale = quantise(v, v_scale, v_scale_array, V)
    v = convert(v, v_cache.dtype, V.limit)
    #: store_v    registers -> DRAM, before K, which may wait for its angles; rows without a slot write nothing
    v_to = _offset(v_cache, v_page, v_slot, v_head_idx) + v_dim
    _store(v_cache, "v_cache", v_to[..., None] + v_col, v, v_live[..., None] & v_inside, V.vec_out, traffic, lanes)
    if V.quant == "block" and isinstance(v_scale_array, np.ndarray):
        v_scale_at = _offset(v_scale_array, v_page, v_slot, v_head_idx, v_row % V.blocks)
        stored = v_scale.astype(v_scale_array.dtype)[..., None]
        _store(v_scale_array, "v_scale", v_scale_at[..., None], stored, v_live[..., None], 1, traffic, lanes)
    #: rope_k -> k    where K is the roped side
    if config.rope == "k":
        k = rotate(k, k_memory, k_at, k_dim, k_inside, k_position, k_new, cos, sin, K, config)
    #: quantise_k -> k, k_scale    as V
    k, k_scale = quantise(k, k_scale, k_scale_array, K)
    k = convert(k, k_cache.dtype, K.limit)
    #: store_k    as V
    k_to = _offset(k_cache, k_page, k_slot, k_head_idx) + k_dim
    _store(k_cache, "k_cache", k_to[..., None] + k_col, k, k_live[..., None] & k_inside, K.vec_out, traffic, lanes)
    if K.quant == "block" and isinstance(k_scale_array, np.ndarray):
        k_scale_at = _offset(k_scale_array, k_page, k_slot, k_head_idx, k_row % K.blocks)
        stored = k_scale.astype(k_scale_array.dtype)[..., None]
        _store(k_scale_array, "k_scale", k_scale_at[..., None], stored, k_live[..., None], 1, traffic, lanes)


def launch(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    where: Array,
    *,
    config: StoreConfig,
    pages: int,
    lens: Array | None = None,
    table: Array | None = None,
    positions: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    arch: str = "sm_90",
    traffic: Traffic | None = None,
) -> None:
    """Run the twin on k, v ``[B, S, H, D]`` (``[1, T, H, D]`` unless padded). The arguments are valid."""
    if config.programs:
        traffic = Traffic() if traffic is None else traffic
        append(
            k, v, k_cache, v_cache, where, lens, table, positions, cos, sin, k_scale, v_scale, config, pages, traffic,
            get_arch(arch).warp_size,
        )  # fmt: skip


def _pick(array: Array, index: Any, mask: Array) -> Array:
    """``array[index]`` as int64; 0 where masked, whatever the index there."""
    value = np.zeros(mask.shape, np.int64)
    index = index if isinstance(index, tuple) else (index,)
    value[mask] = array[tuple(i[mask] for i in index)]
    return value


def _offset(array: Array, *index: Array) -> Array:
    """Element offset of ``array[index]`` by its strides, int64."""
    strides = (stride // array.itemsize for stride in array.strides)
    at = sum(i.astype(np.int64) * stride for i, stride in zip(index, strides, strict=False))
    return np.asarray(at)


def _load(
    memory: Memory, at: Array, dtype: np.dtype[Any], mask: Array, vector: int, traffic: Traffic, lanes: int
) -> Array:
    """``[P, BR, BG]`` elements, a lane taking ``vector`` of them at a time; 0 where masked."""
    address, on = at[..., ::vector] * dtype.itemsize, mask[..., ::vector]
    value = memory.load(address, dtype, vector, mask=on, alignment=vector * dtype.itemsize)
    traffic.move("DRAM->registers", int(on.sum()) * vector * dtype.itemsize)
    traffic.issue(f"{memory.name} load", -(-on.size // lanes))
    return value.reshape(at.shape)


def _store(
    array: Array, name: str, at: Array, value: Array, mask: Array, vector: int, traffic: Traffic, lanes: int
) -> None:  # fmt: skip
    """The same in the other direction; nothing is written where masked."""
    address, on = at[..., ::vector] * array.itemsize, mask[..., ::vector]
    vectors = value.reshape(*address.shape, vector)
    Memory.over(array, name=name).store(address, vectors, mask=on, alignment=vector * array.itemsize)
    traffic.move("registers->DRAM", int(on.sum()) * vector * array.itemsize)
    traffic.issue(f"{name} store", -(-on.size // lanes))
