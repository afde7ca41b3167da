"""MHA prefill as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvlab.attention.call.operands import result_dtype
from kvlab.attention.features.intervals import given_positions, key_count, key_range, padding, visible_end
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.scales import P_SCALE, head_scale, key_scales, scale_weights
from kvlab.attention.features.scores import adjust, hide, row_terms
from kvlab.attention.features.sinks import start_rows
from kvlab.attention.machines.prefill import prefill_cta
from kvlab.attention.machines.rows import KeyRows, SequenceRows, per_sequence
from kvlab.attention.tiles.masked import store
from kvlab.attention.tiles.online_softmax import LN2, LOG2E, weigh
from kvlab.attention.tiles.pages import DENSE, Sequences, row_count, row_of
from kvlab.cache import PagedKVCache
from kvlab.hardware.chip import divide, log2
from kvlab.memory import bfloat16, float8_e4m3fn
from kvlab.staging import Traffic, program_ids, ragged_range

from .config import PrefillConfig, PrefillProblem

Array = np.ndarray[Any, Any]


def attend(
    q_array: Array, keys: KeyRows, sequences: Sequences, o_array: Array, lse_array: Array, scale_log2: Any,
    features: Features, problem: PrefillProblem, config: PrefillConfig, arch: str, traffic: Traffic,
) -> None:
    """BM query rows of one head, or of the heads of one KV head, against the keys that they see, for each program."""
    #: setup -> q, lo, full, hi, first, limit    this program's rows, the keys they see, the query tile
    BM, BN, mask, scales = config.BM, config.BN, features.mask, features.scales  #- launch
    k_rows, v_rows, max_k, _ = keys  #- launch
    cu_q_array, cu_k_array, _, lens_array, _ = sequences  #- launch
    o_scale = scales.v.number / (P_SCALE if problem.p_fp8 else 1)  #- launch
    tile_and_batch, heads = program_ids(config.grid(problem))  # [P]
    tile = config.row_tiles - 1 - tile_and_batch // problem.batch
    batch = tile_and_batch % problem.batch
    row = tile[:, None] * BM + np.arange(BM, dtype=np.int32)  # [P, BM]
    token = row // config.pack
    head = heads[:, None] * config.pack + row % config.pack
    kv_head = heads * config.pack // problem.group
    q_first, num_q = row_count(cu_q_array, batch, problem.max_q)
    k_first, num_keys = row_count(cu_k_array, batch, max_k)
    if lens_array is not None:
        num_keys = key_count(lens_array[batch], max_k)
    pad = padding(num_keys, mask.leftpad, batch)
    num_keys = num_keys - pad
    end = visible_end(num_keys, mask.valid, batch)
    is_row = token < num_q[:, None]
    position = token + num_keys[:, None] - num_q[:, None]
    top = tile * BM // config.pack + num_keys - num_q  # positions of the tile's rows
    bottom = np.minimum((tile * BM + BM - 1) // config.pack, num_q - 1) + num_keys - num_q
    q_row = q_first[:, None] + token
    position, top, bottom = given_positions(mask.positions, batch, q_row, is_row, position, top, bottom)
    first, limit = key_range(position, end[:, None], mask.left, mask.right, mask.chunk)  # [P, BM], keys that a row sees
    rows = batch, head, token, is_row, first, limit
    lo, every = key_range(top, end, mask.left, mask.right, mask.chunk)
    if not mask.bounded:
        lo = lo // BN * BN  # it is 0
    _, hi = key_range(bottom, end, mask.left, mask.right, mask.chunk)
    hi = np.where(bottom < top, lo, np.maximum(hi, lo))
    full = np.maximum(np.minimum(every // BN * BN, hi), lo)
    if mask.bounded:
        full = lo
    bounds = lo, full, hi
    q_dtype = q_array.dtype
    dtype = float8_e4m3fn if problem.p_fp8 else bfloat16 if q_dtype == float8_e4m3fn else q_dtype
    cta = prefill_cta(arch, problem, config, q_dtype, dtype, k_rows, v_rows, batch, kv_head, traffic)  #- programs
    q = cta.load_q(q_array, (batch[:, None], q_row, head), is_row)
    factor, slope = row_terms(scale_log2, features, batch, kv_head, head)
    m, l = start_rows(features.sinks, head, True)
    o = cta.zeros()
    cta.follow(k_first, *(bound + pad for bound in bounds))  #- programs
    for MASKED in range(2):
        for start in ragged_range(bounds[MASKED], bounds[MASKED + 1], BN):
            #: load_k -> k    a K tile, DRAM -> shared memory: those that every row sees, then those seen in part
            active = start < bounds[MASKED + 1]  #- programs
            key = start[:, None] + np.arange(BN, dtype=np.int32)  # [P, BN]
            exists = key < bounds[MASKED + 1][:, None]
            page, slot = row_of(k_rows, batch[:, None], k_first[:, None], key + pad[:, None], exists)
            k = cta.load_k(MASKED, active)
            #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
            s = cta.scores(q, k, active)
            scale = key_scales(features, page, slot, kv_head, exists)
            s = adjust(s, factor, slope, scale, features, position, key)
            s = s.only(active[:, None, None, None])  #- programs
            #: mask -> s    keys that a row does not see; the bias of those that it sees
            if MASKED:
                s = hide(s, rows, key, features, True)
            #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale; scales of tokens
            p, alpha, m, l = weigh(cta, s, m, l)
            o = o.rescale(alpha)
            p = scale_weights(p, features, page, slot, kv_head, exists)
            #: load_v -> v    the V tile of the same keys
            v = cta.load_v(MASKED, active)
            #: accumulate -> o    O += P V, P rounded once
            o = cta.accumulate(p, v, o, dtype, active)
    #: normalise -> o, lse    rows without a sum have seen no key: 0 and -inf; with a sink, its logit
    sees = l != 0
    if features.sinks is None:
        sees = sees & (first < limit)
    l = np.where(sees, l, np.float32(1))
    factor = divide(head_scale(o_scale, scales.v.heads, batch, kv_head)[:, None], l)
    o = o.normalise(factor, sees)
    lse = np.where(sees, m + log2(l), np.float32(-np.inf))
    if not problem.base2:
        lse = lse * np.float32(LN2)
    #: store    the rows of this sequence
    store(o_array, (batch[:, None], q_row, head), o.rows(), mask=is_row)
    store(lse_array, (batch[:, None], q_row, head), lse, mask=is_row)
    traffic.move("registers->DRAM", int(is_row.sum()) * (problem.value_dim * o_array.itemsize + lse.itemsize))


def launch(
    q: Array, k: Array, v: Array, sequences: Sequences = DENSE, *, scale: float, problem: PrefillProblem,
    config: PrefillConfig, features: Features, out: Array | None = None, arch: str = "sm_90",
    traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twin; arrays as in ``reference``: out ``[.., Hq, Dv]`` of q's dtype (bfloat16 for e4m3) and lse
    ``[.., Hq]`` float32. The arguments are valid.
    """
    out = np.empty((*q.shape[:3], v.shape[3]), result_dtype(q)) if out is None else out
    lse = np.empty(q.shape[:3], np.float32)
    if out.size == 0:
        return out, lse
    cu_q, cu_k, table, seq_lens, _ = sequences
    max_k = sequences.most_keys(k)
    if k.shape[1] == 0:  # no sequence has a key
        k, v = (np.zeros((len(x), 1, *x.shape[2:]), x.dtype) for x in (k, v))
    if table is None:
        keys = KeyRows(SequenceRows(per_sequence(k, cu_k)), SequenceRows(per_sequence(v, cu_k)), max_k)
    else:
        lengths = key_count(seq_lens, max_k).astype(np.uint32), table, problem.max_q, max_k
        keys = KeyRows(PagedKVCache(k, *lengths), PagedKVCache(v, *lengths), max_k)
    traffic, scales = Traffic() if traffic is None else traffic, features.scales
    k_scale, v_scale = (
        x if x.tokens is None else replace(x, tokens=per_sequence(x.tokens, cu_k)) for x in (scales.k, scales.v)
    )
    features = replace(features, scales=replace(scales, k=k_scale, v=v_scale))
    o_array, lse_array = (per_sequence(x, cu_q) for x in (out, lse))
    with traffic.launch():
        attend(
            per_sequence(q, cu_q), keys, sequences, o_array, lse_array,
            scale * scales.q.number * scales.k.number * LOG2E, features, problem, config, arch, traffic,
        )
    return out, lse
