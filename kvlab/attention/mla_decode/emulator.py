"""MLA decode as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.call.operands import result_dtype
from kvlab.attention.features.intervals import key_count, split_keys
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import head_scale, value_scales
from kvlab.attention.features.scores import adjust, hide, row_terms
from kvlab.attention.features.sinks import start_rows
from kvlab.attention.machines.mla_decode import LatentCaches, mla_cta
from kvlab.attention.merge_states.emulator import launch as merge
from kvlab.attention.merge_states.emulator import partial_results
from kvlab.attention.tiles.masked import store
from kvlab.attention.tiles.online_softmax import log_sum, weigh
from kvlab.attention.tiles.pages import in_pages, in_slots
from kvlab.attention.tiles.rows import packed_rows
from kvlab.cache import PagedKVCache
from kvlab.hardware.chip import divide
from kvlab.memory import Memory, bfloat16
from kvlab.staging import Traffic, program_ids, ragged_range, row_offsets

from .config import MLADecodeConfig, MLADecodeProblem

Array = np.ndarray[Any, Any]


def place(
    cache: PagedKVCache, batch: Array, key: Array, pad: Array | int, exists: Array, slots: int | None
) -> tuple[Array, Array, Array, Array]:
    """(page, slot, key, exists) of the keys of a tile, which ``pad`` others are before; ``slots``: of the cache, which
    the table lists.
    """
    if slots is not None:
        page, slot, key, exists = in_slots(cache, batch, key, exists, slots)
    else:
        page, slot = in_pages(cache, batch, key + pad, exists)
    return page, slot, key, exists


def attend(
    q_array: Array, caches: LatentCaches, seq_lens: Array | None, o_array: Array, lse_array: Array, scale_log2: Any,
    features: Features, problem: MLADecodeProblem, config: MLADecodeConfig, arch: str, traffic: Traffic,
) -> None:
    """BM query rows (tokens x heads) against the keys of one split of one sequence, for each program."""
    #: setup -> q, q_rope, lo, hi, first, limit    this program's rows, its split of the keys, the query tile
    BN, mask, scales = config.BN, features.mask, features.scales  #- launch
    cache, slots = caches.latent, caches.slots  #- launch
    program, split = program_ids(config.grid(problem))  # [P]
    batch, kv_head, token, head, is_row = packed_rows(program, problem, config.BM)
    position, lo, hi, first, limit, pad = split_keys(seq_lens, features, batch, token, split, problem, config)
    rows = batch, head, token, is_row, first, limit
    cta = mla_cta(  #- programs
        arch, config.BM, BN, (config.BV, config.BR), caches, batch, hi + pad, traffic, dtype=q_array.dtype,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )
    dram = Memory.over(q_array, name="q")  #- address
    rows_at = row_offsets(q_array, (batch[:, None], token, head), is_row)  #- address
    q, q_rope = cta.load_q(dram, rows_at, is_row)
    factor, slope = row_terms(scale_log2, features, batch, kv_head, head)
    latent = head_scale(scales.v.number, scales.v.heads, batch, kv_head)[:, None]
    m, l = start_rows(features.sinks, head, split == 0)
    o = cta.zeros()
    for start in ragged_range(lo, hi, BN):
        #: load_k -> k, k_rope    the tile of these pages, latent and rope columns, DRAM -> shared memory
        active, at = start < hi, start + pad  #- programs
        key = start[:, None] + np.arange(BN, dtype=np.int32)  # [P, BN]
        exists = key < hi[:, None]
        page, slot, key, exists = place(cache, batch[:, None], key, pad[:, None], exists, slots)
        k, k_rope = cta.load_k(at, active)
        #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
        scale = value_scales(features, page, slot, kv_head, exists)
        by_key = np.broadcast_to(latent * scale, key.shape)
        s = cta.scores((q, q_rope), (k, k_rope), active, by_key if scales.nope.scaled else None)
        s = adjust(s, factor, slope, scale, features, position, key)
        #: mask -> s    keys that a row does not see
        s = hide(s, rows, key, features, mask.windowed)
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        p, alpha, m, l = weigh(cta, s, m, l)
        o = o.times(alpha)
        #: load_v -> v    V is the latent part of the K tile: nothing moves from DRAM
        v = cta.load_v(active)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product; scales of tokens
        if features.scales.v.tokens is not None:
            p = p.with_values(p.values * p.by_column(scale))
        o = cta.accumulate(p, v, o, active)
    #: normalise -> o, lse    rows without a sum have seen no key: 0 and -inf
    sees = l != 0
    lse = log_sum(m, l, sees)
    with np.errstate(divide="ignore", invalid="ignore"):  # where the kernel has infinities, too
        o = o.with_values(np.where(o.by_row(sees), o.values * o.by_row(divide(latent, l)), np.float32(0)))
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (config.num_splits == 1))
    store(o_array, (split[:, None], batch[:, None], token, head), o.tile()[:, :, : problem.latent], mask=writes_o)
    store(lse_array, (split[:, None], batch[:, None], token, head), lse, mask=is_row)
    traffic.move("registers->DRAM", int(writes_o.sum()) * o_array[0, 0, 0, 0].nbytes + int(is_row.sum()) * lse.itemsize)


def launch(
    q: Array, kv_cache: Array, k_rope: Array, block_table: Array, seq_lens: Array | None, *, scale: float,
    features: Features, config: MLADecodeConfig, row_scales: Array | None = None, out: Array | None = None,
    arch: str = "sm_90", traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twins: out ``[B, S, H, v_dim]`` of q's dtype (bfloat16 for e4m3) and lse ``[B, S, H]`` float32. The
    arguments are valid.

    q ``[B, S, H, v_dim + rope]``; the windows of the cache, kv_cache ``[pages, page_size, v_dim]`` and k_rope.
    row_scales ``[pages, page_size, v_dim / 128]``: of the latents of rows.
    """
    batch, tokens, heads, _ = q.shape
    problem = MLADecodeProblem.of(q, kv_cache, k_rope, block_table, seq_lens, row_scales)
    traffic = Traffic() if traffic is None else traffic
    out = np.empty((batch, tokens, heads, problem.latent), result_dtype(q)) if out is None else out
    lse = np.empty((batch, tokens, heads), np.float32)
    if q.size == 0:
        return out, lse
    keys = None if seq_lens is None else key_count(seq_lens, problem.max_keys)
    caches = LatentCaches.of((kv_cache, k_rope, row_scales), block_table, keys, problem)
    part, part_lse = partial_results(out, lse, config.num_splits)
    features = features.of_latents(k_rope.dtype == kv_cache.dtype)
    scale_log2 = features.scales.factor_log2(scale)
    with traffic.launch():
        attend(
            q if q.dtype.itemsize > 1 else q.astype(bfloat16), caches, seq_lens, part, part_lse, scale_log2, features,
            problem, config, arch, traffic,
        )
    if config.num_splits > 1:
        merge(part, part_lse, out=out, lse=lse, traffic=traffic)
    return out, lse
