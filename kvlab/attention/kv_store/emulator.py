"""KV store as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvlab.attention.features.rope import rotate
from kvlab.attention.features.scales import SIDE_BY_SIDE
from kvlab.attention.tiles.four_bits.emulator import (
    code_of_float,
    code_of_int4,
    code_of_uint4,
    halves_joined,
    number_of_e4m3,
)
from kvlab.attention.tiles.masked import load
from kvlab.attention.tiles.strides import PageStrides, RowStrides
from kvlab.hardware import get_arch
from kvlab.memory import Memory
from kvlab.staging import Traffic, program_ids

from .config import (
    NO_ANGLES,
    SMALLEST,
    BlockScales,
    CosSin,
    StoreConfig,
    StoreScales,
    StoreSide,
    StoreSizes,
    StoreTables,
)

Array = np.ndarray[Any, Any]
SMALLEST_TOP = np.float32(SMALLEST)
LARGEST_TOP = np.finfo(np.float32).max
NO_TOKEN = 2**31 - 1


def source(
    array: Array, token: Array, head: Array, dim: Array, problem: StoreSizes, config: StoreConfig, VEC: int
) -> Array:
    """Element offset of each row's dim in k or v; steps in vectors."""
    strides = RowStrides(*steps_of(array, VEC)[:3])  #- launch
    at = head.astype(np.int64) * strides.head
    if config.form == "padded":
        at = at + (token // problem.seq_tokens).astype(np.int64) * strides.batch
        token = token % problem.seq_tokens
    return (at + token.astype(np.int64) * strides.token) * VEC + dim


def target(array: Array, page: Array, slot: Array, head: Array, last: Array, VEC: int) -> Array:
    """Element offset of each row in the cache, ``last`` the dim, or in its scales, ``last`` the block; other steps in
    vectors.
    """
    *steps, last_step = steps_of(array, VEC)[:4]  #- launch
    strides = PageStrides(*steps)  #- launch
    at = page * strides.page + slot * strides.token + head.astype(np.int64) * strides.head
    return at * VEC + last.astype(np.int64) * last_step


def scale_target(array: Array, page: Array, slot: Array, head: Array, block: Array, side: StoreSide) -> Array:
    """Element offset of the scale of each row's block; those of four slots may lie side by side."""
    at = target(array, page, slot // SIDE_BY_SIDE if side.fours else slot, head, block, 1)
    if side.fours:
        at = at + slot % SIDE_BY_SIDE
    return at


def steps_of(array: Array, VEC: int) -> list[int]:
    """Strides of ``array`` in vectors of VEC elements, that of the last axis in elements."""
    steps = [stride // array.itemsize for stride in array.strides]
    return [*(step // VEC for step in steps[:3]), *steps[3:]]


def sequence_of(token: Array, where_array: Array, batch: int, BB: int, BITS: int) -> Array:
    """Each token's sequence, ``batch`` past the last: as many as end at it or before. First BB stretches of 2^BITS
    sequences at once, then one stretch by halves.
    """
    first = np.arange(BB) << BITS
    last = np.minimum(first + (1 << BITS), batch)
    end = load(where_array, (last,), mask=first < batch, other=NO_TOKEN)
    over = (end.astype(np.int64) <= token[..., None]).sum(axis=-1)
    sequence = np.minimum(over << BITS, batch)
    for bit in range(BITS):
        later = sequence + (1 << (BITS - 1 - bit))
        start = load(where_array, (later,), mask=later <= batch, other=NO_TOKEN)
        sequence = np.where(start.astype(np.int64) <= token, later, sequence)
    return sequence


def place(
    token: Array, where_array: Array, lens_array: Array | None, table_array: Array | None,
    positions_array: Array | None, problem: StoreSizes, config: StoreConfig,
) -> tuple[Array, Array, Array, Array]:
    """Page, slot and position of each token, and whether it is stored (else the other three mean nothing)."""
    live = token < problem.tokens
    if positions_array is not None:
        position = load(positions_array, (token,), mask=live).astype(np.int64)
    if config.form == "slots":
        at = load(where_array, (token,), mask=live).astype(np.int64)
        live = live & (at >= 0)
        at = np.maximum(at, 0)
        page = at // config.page_size
    else:
        assert lens_array is not None
        assert table_array is not None
        if config.form == "ragged":
            sequence = sequence_of(token, where_array, problem.batch, config.BB, config.BITS)
            live = live & (sequence < problem.batch)
            start = load(where_array, (sequence,), mask=live).astype(np.int64)
            new = token - start
        else:
            sequence = token // problem.seq_tokens
            new = (token % problem.seq_tokens).astype(np.int64)
            valid = load(where_array, (sequence,), mask=live).astype(np.int64)
            live = live & (new < valid)
        before = load(lens_array, (sequence,), mask=live).astype(np.int64)
        at = new + before
        live = live & (new >= 0) & (at >= 0)
        at = np.maximum(at, 0)
        column = at // config.page_size
        live = live & (column < problem.columns)
        page = load(table_array, (sequence, column), mask=live).astype(np.int64)
        live = live & (page >= 0)
    live = live & (page < problem.pages)
    return page, at % config.page_size, position if positions_array is not None else at, live


def given(scale_array: Array | None, head: Array, side: StoreSide) -> Array:
    """The scale that is given for each row ``[P, rows]``, 1 where there is none; it waits for nothing."""
    scale = np.ones(head.shape, np.float32)
    if side.quant == "tensor":
        assert isinstance(scale_array, np.ndarray)
        head = head % scale_array.size  #- address
        scale = scale_array[head].astype(np.float32)
    return scale


@np.errstate(over="ignore", divide="ignore", invalid="ignore")  # past float32 is infinity; 0 times that is NaN
def quantise(
    x: Array, inside: Array, scale: Array, scale_array: Array | None, least_array: Array | None, number: float,
    side: StoreSide,
) -> tuple[Array, Array, Array]:
    """``x`` divided by its scale, and the scale and the minimum of "uint4", which are computed here for "block" and 4
    bits, as they are stored. ``inside``: the dims that there are.
    """
    least = scale
    if side.quant == "number":
        x = x.astype(np.float32) * np.float32(number)
    elif side.quant == "tensor":
        x = x.astype(np.float32) * (np.float32(1) / scale)[..., None]
    elif side.quant == "block":
        assert isinstance(scale_array, np.ndarray)
        x = x.astype(np.float32)
        magnitude = np.abs(x)
        finite = np.where(magnitude <= LARGEST_TOP, magnitude, np.float32(0))  # infinities and NaN: as in the kernel
        top = np.maximum(finite.max(axis=-1), SMALLEST_TOP)
        scale = (top / np.float32(side.limit)).astype(scale_array.dtype).astype(np.float32)
        x = x * (np.float32(1) / scale)[..., None]
    elif side.pack == 2:
        x = x.astype(np.float32)
        if side.quant == "e2m1":
            x = x / np.float32(number)
        magnitude = np.abs(x)
        finite = np.where(magnitude <= LARGEST_TOP, magnitude, np.float32(0))
        lost = (x != x).astype(np.int32).max(axis=-1) > 0
        if side.quant == "uint4":
            assert isinstance(least_array, np.ndarray)
            some = inside & (magnitude <= LARGEST_TOP)
            low = np.where(some, x, LARGEST_TOP).min(axis=-1)
            high = np.where(some, x, -LARGEST_TOP).max(axis=-1)
            low, high = np.where(low <= high, low, np.float32(0)), np.where(low <= high, high, np.float32(0))
            x = np.where(magnitude <= LARGEST_TOP, x, np.where(x > 0, high[..., None], low[..., None]))
            least = low.astype(least_array.dtype).astype(np.float32)
            x = x - least[..., None]
            top = np.where(inside, np.abs(x), np.float32(0)).max(axis=-1)
            least = np.where(lost, float("nan"), least)
        else:
            top = finite.max(axis=-1)
            x = np.where(magnitude <= LARGEST_TOP, x, np.where(x > 0, top[..., None], -top[..., None]))
        step = top / np.float32(side.limit)
        if side.quant == "e2m1":
            code = np.minimum(code_of_float(step, 3, 7), np.int32(126))
            step = number_of_e4m3(code)
            scale = np.where(lost, np.int32(127), code)
        else:
            scale = np.where(lost, float("nan"), step)
        x = x * np.where(step != 0, np.float32(1) / step, 0.0)[..., None]
    return x, scale, least


def stored(row: Array, side: StoreSide) -> tuple[Array, Array, Array]:
    """Number of the first element of each row in its head, numbers of the others from there, and which exist: an
    element holds ``side.pack`` dims.
    """
    first, element = row % side.blocks * (side.G // side.pack), np.arange(side.BG // side.pack)
    exists = (element < side.G // side.pack) & (first[..., None] + element < side.D // side.pack)
    return first, element, exists


def convert(x: Array, dtype: np.dtype[Any], side: StoreSide) -> Array:
    """Rounded once to ``dtype``; an 8-bit format saturates, as the hardware's conversion does, and so do those of 4
    bits, of which two become a byte.
    """
    if side.quant == "e2m1":
        sign = x.view(np.int32) >> 28 & 8
        code = code_of_float(np.minimum(np.abs(x), np.float32(side.limit)), 1, 1) | sign
        return halves_joined(code)
    elif side.quant == "int4":
        return halves_joined(code_of_int4(x, side.limit))
    elif side.quant == "uint4":
        return halves_joined(code_of_uint4(x, side.limit))
    else:
        if x.dtype != dtype and dtype.itemsize == 1:
            x = np.clip(x.astype(np.float32), -side.limit, side.limit)  #- instruction
        return x.astype(dtype)


def append(
    k_array: Array, v_array: Array, k_cache: Array, v_cache: Array, tables: StoreTables, cos_sin: CosSin,
    scales: StoreScales, problem: StoreSizes, config: StoreConfig, traffic: Traffic, lanes: int,
) -> None:
    """K and V of the rows of each program, to where their tokens belong. A row: one block of one head of one token."""
    #: setup -> k_token_idx, k_head_idx, k_dim, v_token_idx, v_head_idx, v_dim    the rows of this program
    K, V = config.k, config.v  #- launch
    where, lens, table, positions = tables  #- launch
    cos_array, sin_array = cos_sin  #- launch
    k_scale_array, v_scale_array, k_min_array, v_min_array, k_number, v_number = scales  #- launch
    (program,) = program_ids(config.grid())  # [P]
    k_row = program[:, None] * K.BR + np.arange(K.BR, dtype=np.int32)  # [P, BR]
    v_row = program[:, None] * V.BR + np.arange(V.BR, dtype=np.int32)
    k_token_idx, k_head_idx = k_row // (config.heads * K.blocks), k_row // K.blocks % config.heads
    v_token_idx, v_head_idx = v_row // (config.heads * V.blocks), v_row // V.blocks % config.heads
    k_dim, v_dim = k_row % K.blocks * K.G, v_row % V.blocks * V.G
    k_col, v_col = np.arange(K.BG), np.arange(V.BG)
    k_inside = (k_col < K.G) & (k_dim[..., None] + k_col < K.D)  # [P, BR, BG]
    v_inside = (v_col < V.G) & (v_dim[..., None] + v_col < V.D)
    #: load -> k, v, k_scale, v_scale    the new tokens and the scales that are given; no need to wait for their slots
    k_scale = given(k_scale_array, k_head_idx, K)  # [P, BR]
    v_scale = given(v_scale_array, v_head_idx, V)
    count = Counts(traffic, lanes)  #- programs
    k_new, v_new = k_token_idx < problem.tokens, v_token_idx < problem.tokens
    k_from = source(k_array, k_token_idx, k_head_idx, k_dim, problem, config, K.vec_in)
    v_from = source(v_array, v_token_idx, v_head_idx, v_dim, problem, config, V.vec_in)
    k = load_vectors(
        k_array, k_from[..., None] + k_col, mask=k_new[..., None] & k_inside, vec=K.vec_in, count=count("k")
    )
    v = load_vectors(
        v_array, v_from[..., None] + v_col, mask=v_new[..., None] & v_inside, vec=V.vec_in, count=count("v")
    )
    #: place -> k_page, k_slot, k_live, v_page, v_slot, v_live    where each row belongs, and whether anywhere
    k_page, k_slot, k_position, k_live = place(
        k_token_idx, where, lens, table, positions, problem, config
    )
    v_page, v_slot, v_position, v_live = place(
        v_token_idx, where, lens, table, positions, problem, config
    )
    #: rope_v -> v    where V is the roped side: in float32
    if config.rope == "v":
        assert cos_array is not None
        assert sin_array is not None
        v = rotate(v, v_array, v_from, v_dim, v_inside, v_position, v_new, cos_array, sin_array, config)
    #: quantise_v -> v, v_scale    divided by the scale, rounded once to the cache's format
    v, v_scale, v_least = quantise(v, v_inside, v_scale, v_scale_array, v_min_array, v_number, V)
    v = convert(v, v_cache.dtype, V)
    #: store_v    registers -> DRAM, before K, which may wait for its angles; rows without a slot write nothing
    v_first, v_element, v_exists = stored(v_row, V)
    v_to = target(v_cache, v_page, v_slot, v_head_idx, v_first, V.vec_out)
    store_vectors(
        v_cache, v_to[..., None] + v_element, v, mask=v_live[..., None] & v_exists, vec=V.vec_out,
        count=count("v_cache"),
    )
    if V.quant == "block" or V.pack == 2:
        assert isinstance(v_scale_array, np.ndarray)
        v_scale_at = scale_target(v_scale_array, v_page, v_slot, v_head_idx, v_row % V.blocks, V)
        store_vectors(v_scale_array, v_scale_at, v_scale, mask=v_live, count=count("v_scale"))
    if V.quant == "uint4":
        assert isinstance(v_min_array, np.ndarray)
        v_least_at = scale_target(v_min_array, v_page, v_slot, v_head_idx, v_row % V.blocks, V)
        store_vectors(v_min_array, v_least_at, v_least, mask=v_live, count=count("v_min"))
    #: rope_k -> k    where K is the roped side
    if config.rope == "k":
        assert cos_array is not None
        assert sin_array is not None
        k = rotate(k, k_array, k_from, k_dim, k_inside, k_position, k_new, cos_array, sin_array, config)
    #: quantise_k -> k, k_scale    as V
    k, k_scale, k_least = quantise(k, k_inside, k_scale, k_scale_array, k_min_array, k_number, K)
    k = convert(k, k_cache.dtype, K)
    #: store_k    as V
    k_first, k_element, k_exists = stored(k_row, K)
    k_to = target(k_cache, k_page, k_slot, k_head_idx, k_first, K.vec_out)
    store_vectors(
        k_cache, k_to[..., None] + k_element, k, mask=k_live[..., None] & k_exists, vec=K.vec_out,
        count=count("k_cache"),
    )
    if K.quant == "block" or K.pack == 2:
        assert isinstance(k_scale_array, np.ndarray)
        k_scale_at = scale_target(k_scale_array, k_page, k_slot, k_head_idx, k_row % K.blocks, K)
        store_vectors(k_scale_array, k_scale_at, k_scale, mask=k_live, count=count("k_scale"))
    if K.quant == "uint4":
        assert isinstance(k_min_array, np.ndarray)
        k_least_at = scale_target(k_min_array, k_page, k_slot, k_head_idx, k_row % K.blocks, K)
        store_vectors(k_min_array, k_least_at, k_least, mask=k_live, count=count("k_min"))


def launch(
    k: Array, v: Array, k_cache: Array, v_cache: Array, tables: StoreTables, *, config: StoreConfig, pages: int,
    cos_sin: CosSin = NO_ANGLES, k_scale: Array | float | BlockScales | None = None,
    v_scale: Array | float | BlockScales | None = None, arch: str = "sm_90", traffic: Traffic | None = None,
) -> None:
    """Run the twin on k, v ``[B, S, H, D]`` (``[1, T, H, D]`` unless padded). The arguments are valid."""
    if config.programs:
        traffic = Traffic() if traffic is None else traffic
        append(
            k, v, k_cache, v_cache, tables, cos_sin, StoreScales.of(k_scale, v_scale),
            StoreSizes.of(k, pages, tables, cos_sin), config, traffic, get_arch(arch).warp_size,
        )


@dataclass(frozen=True)
class Counts:
    """Counts an array's loads and stores: bytes, and instructions of warps of so many ``lanes``."""

    traffic: Traffic
    lanes: int
    name: str = ""

    def __call__(self, name: str) -> Counts:
        """Strides of the array called ``name``."""
        return replace(self, name=name)

    def add(self, direction: str, verb: str, on: Array, nbytes: int) -> None:
        """Lanes ``on`` move ``nbytes`` each."""
        self.traffic.move(direction, int(on.sum()) * nbytes)
        self.traffic.issue(f"{self.name} {verb}", -(-on.size // self.lanes))


def load_vectors(array: Array, at: Array, *, mask: Array, vec: int = 1, count: Counts | None = None) -> Array:
    """The elements of ``array`` at the offsets ``at``, a lane taking ``vec`` of them at a time; 0 where masked."""
    address, on = at[..., ::vec] * array.itemsize, mask[..., ::vec]
    memory = Memory.over(array, name=count.name if count else "x")
    value = memory.load(address, array.dtype, vec, mask=on, alignment=vec * array.itemsize)
    if count:
        count.add("DRAM->registers", "load", on, vec * array.itemsize)
    return value.reshape(at.shape)


def store_vectors(array: Any, at: Array, value: Array, *, mask: Array, vec: int = 1, count: Counts) -> None:
    """The same in the other direction; nothing is written where masked."""
    address, on = at[..., ::vec] * array.itemsize, mask[..., ::vec]
    vectors = value.astype(array.dtype).reshape(*address.shape, vec)
    Memory.over(array, name=count.name).store(address, vectors, mask=on, alignment=vec * array.itemsize)
    count.add("registers->DRAM", "store", on, vec * array.itemsize)
