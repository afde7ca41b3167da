"""MLA prefill as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.attention.call.operands import result_dtype
from kvlab.attention.features.intervals import given_positions, key_count, key_range, padding, visible_end
from kvlab.attention.features.scales import Scale, head_scale, nope_scales, rope_scales, scale_weights
from kvlab.attention.features.scores import adjust, hide, row_terms
from kvlab.attention.features.sinks import start_rows
from kvlab.attention.machines.mla_prefill import MLAPrefillCTA
from kvlab.attention.machines.rows import KeyRows, SequenceRows, per_sequence
from kvlab.attention.tiles.masked import store
from kvlab.attention.tiles.online_softmax import LOG2E, log_sum, weigh
from kvlab.attention.tiles.pages import Sequences, row_count, row_of
from kvlab.cache import PagedKVCache
from kvlab.hardware.chip import divide
from kvlab.memory import bfloat16
from kvlab.staging import Traffic, program_ids, ragged_range

from .config import MLAPrefillConfig, MLAPrefillProblem

if TYPE_CHECKING:
    from kvlab.attention.features.resolve import Features

Array = np.ndarray[Any, Any]
ROPE_HEAD = np.zeros(1, np.int64)  # the only one


def attend(
    q_array: Array, keys: KeyRows, sequences: Sequences, o_array: Array, lse_array: Array, scale_log2: Any,
    features: Features, problem: MLAPrefillProblem, config: MLAPrefillConfig, arch: str, traffic: Traffic,
) -> None:
    """BM query rows of one head against the keys that they see, for each program. K and V hold a sequence's keys from
    ``base`` on.
    """
    #: setup -> q, q_rope, lo, full, hi, first, limit    this program's rows, the keys they see, the query tiles
    BM, BN, mask, scales = config.BM, config.BN, features.mask, features.scales  #- launch
    k_rows, v_rows, max_k, rope_rows = keys  #- launch
    cu_q_array, cu_k_array, _, lens_array, starts_array = sequences  #- launch
    tile_and_batch, kv_head = program_ids(config.grid(problem))  # [P]
    tile = config.row_tiles - 1 - tile_and_batch // problem.batch
    batch = tile_and_batch % problem.batch
    token = tile[:, None] * BM + np.arange(BM, dtype=np.int32)  # [P, BM]
    head = np.broadcast_to(kv_head[:, None], token.shape)
    q_first, num_q = row_count(cu_q_array, batch, 0)
    k_first, num_keys = row_count(cu_k_array, batch, 0)
    total = num_keys
    if lens_array is not None:
        total = key_count(lens_array[batch], max_k)
    base = total - num_keys
    if starts_array is not None:
        base = starts_array[batch].astype(np.int32)
    pad = padding(total, mask.leftpad, batch)
    total, base = total - pad, base - pad
    end = visible_end(np.minimum(base + num_keys, total), mask.valid, batch)
    is_row = token < num_q[:, None]
    position = token + total[:, None] - num_q[:, None]
    top = tile * BM + total - num_q  # positions of the tile's rows
    bottom = np.minimum(tile * BM + BM - 1, num_q - 1) + total - num_q
    q_row = q_first[:, None] + token
    position, top, bottom = given_positions(mask.positions, batch, q_row, is_row, position, top, bottom)
    first, limit = key_range(position, end[:, None], mask.left, mask.right, mask.chunk)  # [P, BM], keys that a row sees
    rows = batch, head, token, is_row, first, limit
    top_first, top_limit = key_range(top, end, mask.left, mask.right, mask.chunk)
    _, bottom_limit = key_range(bottom, end, mask.left, mask.right, mask.chunk)
    lo = np.maximum(top_first - base, 0)
    hi = np.where(bottom < top, lo, np.maximum(bottom_limit - base, lo))
    full = np.maximum(np.minimum((top_limit - base) // BN * BN, hi), lo)
    if mask.bounded or config.one_loop:
        full = lo
    full = np.where(base < 0, lo, full)  # K may hold more keys than the sequence has
    bounds = lo, full, hi
    cta = MLAPrefillCTA(  #- programs
        arch, config, problem, q_array.dtype, k_rows, v_rows, rope_rows, batch, kv_head, traffic
    )
    q, q_rope = cta.load_q(q_array, (q_row, head), is_row)
    cta.follow(k_first, base + pad, *bounds)  #- programs
    factor, slope = row_terms(scale_log2, features, batch, kv_head, head)
    if scales.nope.scaled:
        nope = head_scale(scales.nope.number, scales.nope.heads, batch, kv_head)[:, None]
    if scales.rope.scaled:
        rope = head_scale(scales.rope.number, scales.rope.heads, batch, ROPE_HEAD)[:, None]
    m, l = start_rows(features.sinks, head, True)
    o = cta.zeros()
    for MASKED in range(2):
        for start in ragged_range(bounds[MASKED], bounds[MASKED + 1], BN):
            #: load_k -> k    a K tile, DRAM -> shared memory: those that every row sees, then those seen in part
            active = start < bounds[MASKED + 1]  #- programs
            held = start[:, None] + np.arange(BN, dtype=np.int32)  # [P, BN], rows of K
            exists = held < bounds[MASKED + 1][:, None]
            k = cta.load_k(MASKED, active)
            #: load_rope -> k_rope    the rope part of the same keys, from their pages
            key = base[:, None] + held
            page, slot = row_of(rope_rows, batch[:, None], k_first[:, None], key + pad[:, None], exists)
            k_rope = cta.load_rope(MASKED, active)
            #: scores -> s    S = Q K^T in float32, in units of log2; the features of scores
            if scales.nope.scaled:
                by_key = nope * nope_scales(features, batch[:, None], k_first[:, None] + held, kv_head, exists)
            if scales.rope.scaled:
                by_rope = rope * rope_scales(features, page, slot, ROPE_HEAD, exists)
            s = cta.scores(
                q, q_rope, k, k_rope, by_key if scales.nope.scaled else None, by_rope if scales.rope.scaled else None,
                active,
            )
            s = adjust(s, factor, slope, 1.0, features, position, key)
            s = s.only(active[:, None, None, None])  #- programs
            #: mask -> s    keys that a row does not see; the bias of those that it sees
            if MASKED:
                s = hide(s, rows, key, features, True)
            #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale; scales of tokens
            p, alpha, m, l = weigh(cta, s, m, l)
            o = o.times(alpha)
            p = scale_weights(p, features, batch[:, None], k_first[:, None] + held, kv_head, exists)
            #: load_v -> v    the V tile of the same keys
            v = cta.load_v(MASKED, active)
            #: accumulate -> o    O += P V, P rounded once to the dtype of the product
            o = cta.accumulate(p, v, o, active)
    #: normalise -> o, lse    rows without a sum have seen no key: 0 and -inf
    sees = l != 0
    factor = head_scale(scales.v.number, scales.v.heads, batch, kv_head)[:, None]
    lse = log_sum(m, l, sees)
    with np.errstate(divide="ignore", invalid="ignore"):  # where the kernel has infinities, too
        o = o.with_values(np.where(o.by_row(sees), o.values * o.by_row(divide(factor, l)), np.float32(0)))
    #: store    the rows of this sequence
    store(o_array, (q_row, head), o.tile()[:, :, : problem.value], mask=is_row)
    store(lse_array, (q_row, head), lse, mask=is_row)
    traffic.move("registers->DRAM", int(is_row.sum()) * (problem.value * o_array.itemsize + lse.itemsize))


def launch_form(
    q: Array, k: Array, v: Array, k_rope: Array, sequences: Sequences, scale: float, problem: MLAPrefillProblem,
    features: Features,
) -> tuple[Array, KeyRows, float, Features]:
    """(q, keys, scale_log2, features) as the twin takes the arguments of a launch."""
    if len(k) == 0:  # no sequence has a key here: rows that nobody reads
        k, v = (np.zeros((1, *x.shape[1:]), x.dtype) for x in (k, v))
    q = q if q.dtype.itemsize > 1 else q.astype(bfloat16)
    features, k_rows, v_rows = features.of_parts(), *(SequenceRows(x[None]) for x in (k, v))
    _, cu_k, table, seq_lens, _ = sequences
    rope_rows: Any
    max_k = 0

    def ragged(scale: Scale) -> Scale:
        return scale if scale.tokens is None else replace(scale, tokens=per_sequence(scale.tokens[None], cu_k))

    scales = replace(features.scales, nope=ragged(features.scales.nope), v=ragged(features.scales.v))
    if table is None:
        scales = replace(scales, rope=ragged(scales.rope))
        k_rope = k_rope if len(k_rope) else np.zeros((1, problem.rope), k_rope.dtype)
        rope_rows = SequenceRows(k_rope[None, :, None], cu_k)
    else:
        max_k = sequences.most_keys(k_rope)
        lengths = key_count(seq_lens, max_k).astype(np.uint32)
        rope_rows = PagedKVCache(k_rope[:, :, None], lengths, table, problem.max_q, max_k)
    keys = KeyRows(k_rows, v_rows, max_k, rope_rows)
    return q, keys, scale * LOG2E * scales.q.number, replace(features, scales=scales)


def launch(
    q: Array, k: Array, v: Array, k_rope: Array, sequences: Sequences, *, scale: float, problem: MLAPrefillProblem,
    config: MLAPrefillConfig, features: Features, out: Array | None = None, arch: str = "sm_90",
    traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twin; arrays as in ``reference``: out ``[total, H, value]`` of q's dtype (bfloat16 for e4m3), lse
    ``[total, H]`` float32. The arguments are valid.
    """
    total, heads, _ = q.shape
    out = np.empty((total, heads, problem.value), result_dtype(q)) if out is None else out
    lse = np.empty((total, heads), np.float32)
    if q.size == 0 or problem.batch == 0:
        return out, lse
    query, keys, scale_log2, features = launch_form(q, k, v, k_rope, sequences, scale, problem, features)
    traffic = Traffic() if traffic is None else traffic
    with traffic.launch():
        attend(query, keys, sequences, out, lse, scale_log2, features, problem, config, arch, traffic)
    return out, lse
