"""MHA decode as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from kvlab.attention.call.operands import result_dtype
from kvlab.attention.features.intervals import key_count, split_keys
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import head_scale, key_scales, over_minima, scale_weights
from kvlab.attention.features.scores import adjust, hide, row_terms
from kvlab.attention.features.sinks import start_rows
from kvlab.attention.machines.decode import DecodeCTA, decode_cta
from kvlab.attention.merge_states.emulator import launch as merge
from kvlab.attention.merge_states.emulator import partial_results
from kvlab.attention.tiles.four_bits.emulator import key_blocks, value_blocks
from kvlab.attention.tiles.fp8_pairs.emulator import narrow
from kvlab.attention.tiles.masked import load, store
from kvlab.attention.tiles.online_softmax import log_sum, weigh
from kvlab.attention.tiles.pages import in_pages, paged
from kvlab.attention.tiles.rows import packed_rows
from kvlab.cache import PagedKVCache
from kvlab.hardware.chip import divide
from kvlab.memory import Memory
from kvlab.staging import Traffic, program_ids, ragged_range, row_offsets

from .config import CLASSES, DecodeConfig, DecodeProblem, problem_of

Array = np.ndarray[Any, Any]


def nth_longest(seq_lens_array: Array, max_keys: int, n: Array) -> Array:
    """The sequences that are the ``n``-th of those ordered by the class of their length, the longest first, and in a
    class by number; int64.

    >>> nth_longest(np.array([10, 1000, 0, 999]), 4096, np.arange(4)).tolist()
    [1, 3, 0, 2]
    """
    BATCH = len(seq_lens_array)  #- launch
    at = np.arange(BATCH)
    length = key_count(seq_lens_array[at], max_keys).astype(np.int64)
    longest = np.maximum(np.max(length), 1)
    kind = (longest - length) * (CLASSES - 1) // longest  # 0: the longest
    counts = np.bincount(kind, minlength=CLASSES)
    found = np.sum(np.cumsum(counts) <= n[:, None], 1)[:, None]  # [P, 1]
    before = np.sum(np.where(np.arange(CLASSES) < found, counts, 0), 1)[:, None]
    member = kind == found  # [P, B]
    place = np.cumsum(member, 1)
    return np.sum(np.where(member & (place == n[:, None] - before + 1), at, 0), 1)


def load_rows(
    cta: DecodeCTA, q_array: Array, index: tuple[Array, ...], is_row: Array, EACH: int
) -> tuple[tuple[Any, ...], Array]:
    """(q, unit): the rows of ``q_array`` at ``index`` in pieces; of EACH columns an element in float16 and divided by
    ``unit`` ``[P, BM]``, a power of two for each row, before the machine has them.
    """
    rows, unit = q_array, np.ones(is_row.shape, np.float32)
    if EACH > 1:
        rows, units = narrow(q_array, np.abs(q_array.astype(np.float32)).max(axis=3))
        rows = rows if cta.q_columns is None else np.ascontiguousarray(rows[..., cta.q_columns])
        unit = load(units, index, mask=is_row)
    return cta.load_q(Memory.over(rows, name="q"), row_offsets(rows, index, is_row), is_row), unit


def attend(
    q_array: Array, k_cache: PagedKVCache, v_cache: PagedKVCache, seq_lens: Array, o_array: Array, lse_array: Array,
    scale_log2: float, features: Features, problem: DecodeProblem, config: DecodeConfig, arch: str, traffic: Traffic,
) -> None:
    """BM query rows (tokens x heads of one KV head) against the keys of one split of one sequence, for each program."""
    #: setup -> q, lo, hi, first, limit    this program's rows, the keys they see, its split of them, the query tile
    BN, mask, scales = config.BN, features.mask, features.scales  #- launch
    program, split = program_ids(config.grid(problem))  # [P]
    batch, kv_head, token, head, is_row = packed_rows(program, problem, config.BM)
    if config.longest_first:
        batch = nth_longest(seq_lens, problem.max_keys, batch)
    position, lo, hi, first, limit, pad = split_keys(seq_lens, features, batch, token, split, problem, config)
    rows = batch, head, token, is_row, first, limit
    cta = decode_cta(  #- programs
        arch, config, k_cache, v_cache, batch, kv_head, (lo + pad, hi + pad), traffic,
        minima=scales.k.minima is not None,
    )
    q, unit = load_rows(cta, q_array, (batch[:, None], token, head), is_row, problem.each)
    factor, slope = row_terms(scale_log2, features, batch, kv_head, head)
    if problem.each > 1:
        factor = factor * unit  # [P, BM]
    q_sum = cta.row_sums(q)
    m, l = start_rows(features.sinks, head, split == 0)
    o = cta.zeros()
    for start in ragged_range(lo, hi, BN):
        #: load_k -> k    the K tile of these pages, DRAM -> shared memory
        active = start < hi  #- programs
        key = start[:, None] + np.arange(BN, dtype=np.int32)  # [P, BN]
        exists = key < hi[:, None]
        page, slot = in_pages(k_cache, batch[:, None], key + pad[:, None], exists)
        k = cta.load_k(active)
        by_block = key_blocks(features, page, slot, kv_head, exists)
        #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
        s = cta.scores(q, k, active, by_block)
        scale = key_scales(features, page, slot, kv_head, exists)
        s = over_minima(s, scale, q_sum, features, page, slot, kv_head, exists)
        s = adjust(s, factor, slope, scale, features, position, key)
        #: mask -> s    keys that a row does not see
        s = hide(s, rows, key, features, mask.windowed)
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        p, alpha, m, l = weigh(cta, s, m, l)
        o = o.rescale(alpha)
        #: load_v -> v    the V tile of the same pages
        v = cta.load_v(active)
        by_block = value_blocks(features, page, slot, kv_head, exists)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product; scales of tokens
        o = cta.add_minima(p, o, features, page, slot, kv_head, exists)
        p = scale_weights(p, features, page, slot, kv_head, exists)
        o = cta.accumulate(p, v, o, active, by_block)
    #: normalise -> l, lse    rows without a sum have seen no key: 0 and -inf
    sees = l != 0
    if features.sinks is None:
        sees = sees & (first < limit)
    factor = head_scale(scales.v_factor, scales.v.heads, batch, kv_head)[:, None]
    lse = log_sum(m, l, sees)
    with np.errstate(divide="ignore", invalid="ignore"):  # where the kernel has infinities, too
        l = np.where(sees, divide(factor, l), np.float32(0))  # what the sums of a row are multiplied by
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (config.num_splits == 1))
    o = o.normalise(l, sees)
    store(o_array, (split[:, None], batch[:, None], token, head), o.rows(), mask=writes_o)
    store(lse_array, (split[:, None], batch[:, None], token, head), lse, mask=is_row)
    traffic.move("registers->DRAM", int(writes_o.sum()) * o_array[0, 0, 0, 0].nbytes + int(is_row.sum()) * lse.itemsize)


def launch(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, *, config: DecodeConfig,
    arch: str = "sm_90", **named: Any,
) -> tuple[Array, Array]:
    """Run the twins: out ``[B, S, Hq, Dv]`` and lse ``[B, S, Hq]`` float32. The arguments are valid; ``named``: those
    of :func:`run`.
    """
    return run(functools.partial(attend, arch=arch), q, k_cache, v_cache, block_table, seq_lens, config=config, **named)


def run(
    attend: Callable[..., None], q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, *,
    scale: float, config: Any, features: Features | None = None, out: Array | None = None,
    traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twin of a decode kernel, ``attend``, and merge its splits: out ``[B, S, Hq, Dv]``, lse ``[B, S, Hq]``."""
    features = Features() if features is None else features
    problem = problem_of(q, k_cache, v_cache, block_table)
    batch, tokens, q_heads = q.shape[:3]
    traffic = Traffic() if traffic is None else traffic
    out = np.empty((batch, tokens, q_heads, problem.v_dim), result_dtype(q)) if out is None else out
    lse = np.empty((batch, tokens, q_heads), np.float32)
    if out.size == 0:
        return out, lse
    num_keys = key_count(seq_lens, problem.max_keys)
    keys, values = paged((k_cache, v_cache), block_table, num_keys, tokens, problem.max_keys)
    part, part_lse = partial_results(out, lse, config.num_splits)
    scale_log2 = features.scales.factor_log2(scale)
    with traffic.launch():
        attend(
            q, keys, values, seq_lens, part, part_lse, scale_log2, features, problem, config, traffic=traffic
        )
    if config.num_splits > 1:
        merge(part, part_lse, out=out, lse=lse, traffic=traffic)
    return out, lse
