"""MHA prefill as the hardware does it, byte by byte: the kernel's twin in NumPy, all programs of the launch at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.online_softmax import LOG2E, MASK_VALUE
from kvlab.cache import PagedKVCache
from kvlab.memory import Memory
from kvlab.staging import Fragments, KVCacheIterator, Traffic, program_ids, ragged_range

from .config import UNLIMITED, PrefillConfig, PrefillProblem
from .machine import prefill_cta
from .rows import SequenceRows

Array = np.ndarray[Any, Any]
LN2 = np.float32(0.6931471805599453)


def attend(
    q_array: Array, k_rows: Any, v_rows: Any, cu_q: Array | None, num_keys: Array, sinks: Array | None, o_array: Array,
    lse_array: Array, scale_log2: float, mask_value: float, problem: PrefillProblem, config: PrefillConfig, arch: str,
    traffic: Traffic,
) -> None:  # fmt: skip
    """BM query rows of one head, or of the heads of one KV head, against the keys that they see, for each program."""
    #: setup -> q, lo, full, hi, first, limit    this program's rows, the keys they see, the query tile
    BM, BN, pack, left, right = config.BM, config.BN, config.pack, np.int32(problem.left), np.int32(problem.right)
    tile_and_batch, heads = program_ids(config.grid(problem))  # [P]
    tile, batch = config.row_tiles - 1 - tile_and_batch // problem.batch, tile_and_batch % problem.batch
    row = tile[:, None] * BM + np.arange(BM, dtype=np.int32)  # [P, BM]
    token, head = row // pack, heads[:, None] * pack + row % pack
    kv_head = heads * pack // problem.group
    starts = np.zeros(problem.batch, np.int64) if cu_q is None else cu_q[:-1].astype(np.int64)
    num_q = np.full(problem.batch, problem.max_q, np.int32) if cu_q is None else np.diff(cu_q).astype(np.int32)
    q_row, num_q, num_keys = starts[batch][:, None] + token, num_q[batch], num_keys[batch].astype(np.int32)
    is_row = token < num_q[:, None]
    position = token + (num_keys - num_q)[:, None]
    first = np.maximum(position - left, 0)  # [P, BM], first key that a row sees
    limit = np.minimum(position + right + 1, num_keys[:, None])  # [P, BM], first key after it that a row does not see
    top = tile * BM // pack + num_keys - num_q  # positions of the tile's rows
    bottom = np.minimum((tile * BM + BM - 1) // pack, num_q - 1) + num_keys - num_q
    lo = np.maximum(top - left, 0) // BN * BN
    hi = np.where(bottom < top, lo, np.maximum(np.minimum(bottom + right + 1, num_keys), lo))
    full = np.maximum(np.minimum(np.minimum(top + right + 1, num_keys) // BN * BN, hi), lo)
    full = np.where(left < UNLIMITED, lo, full)
    cta = prefill_cta(arch, config, k_rows, v_rows, batch, kv_head, traffic)
    q_at = _row_offsets(q_array, np.zeros_like(batch) if cu_q is not None else batch, q_row, head, is_row)
    q = cta.load_q(Memory.over(q_array, name="q"), q_at, is_row)
    m = np.full(row.shape, -np.inf, np.float32)
    l = np.zeros(row.shape, np.float32)
    if sinks is not None:
        m = sinks.astype(np.float32)[head] * np.float32(LOG2E)
        l = np.ones(row.shape, np.float32)
    o = cta.zeros()
    k_tiles, v_tiles = (KVCacheIterator(rows, BN, batch, kv_head, full) for rows in (k_rows, v_rows))
    k_rest, v_rest = (KVCacheIterator(rows, BN, batch, kv_head, hi) for rows in (k_rows, v_rows))
    k_tiles.tile_start_row, v_tiles.tile_start_row, k_rest.tile_start_row, v_rest.tile_start_row = lo, lo, full, full
    cta.follow(k_tiles, v_tiles, k_rest, v_rest)
    for start in ragged_range(lo, full, BN):
        #: load_k -> k    a K tile that every row sees, DRAM -> shared memory
        active = start < full  # [P], programs whose range is not over
        k = cta.load_k(k_tiles.next_tile(), active)
        #: scores -> s    S = Q K^T in float32, in units of log2
        s = _scores(cta.scores(q, k, active), scale_log2, problem.softcap)
        s = s.with_values(np.where(active[:, None, None, None], s.values, np.float32(mask_value)))
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        p, m, l, o = _online(cta, s, m, l, o, active)
        #: load_v -> v    the V tile of the same keys
        v = cta.load_v(v_tiles.next_tile(), active)
        #: accumulate -> o    O += P V, P rounded once to the storage dtype
        o = cta.accumulate(p, v, o, active)
    for start in ragged_range(full, hi, BN):
        #: load_k -> k    a K tile that some rows see in part
        active = start < hi
        k = cta.load_k(k_rest.next_tile(), active)
        #: scores -> s    S = Q K^T in float32, in units of log2
        s = _scores(cta.scores(q, k, active), scale_log2, problem.softcap)
        #: mask -> s    keys that a row does not see
        key = start[:, None, None, None] + s.map.col  # [P, threads, registers, elements]
        visible = (key >= s.by_row(first)) & (key < s.by_row(limit)) & active[:, None, None, None]
        s = s.with_values(np.where(visible, s.values, np.float32(mask_value)))
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        p, m, l, o = _online(cta, s, m, l, o, active)
        #: load_v -> v    the V tile of the same keys
        v = cta.load_v(v_rest.next_tile(), active)
        #: accumulate -> o    O += P V, P rounded once to the storage dtype
        o = cta.accumulate(p, v, o, active)
    #: normalise -> o, lse    rows without a visible key give 0 and -inf, or the sink's logit
    sees = (limit > first) & is_row
    l = np.where(sees, l, np.float32(1))
    o = o.with_values(np.where(o.by_row(sees), o.values / o.by_row(l), np.float32(0)))
    nothing = np.full(row.shape, -np.inf, np.float32) if sinks is None else sinks.astype(np.float32)[head]
    lse = np.where(sees, (m + np.log2(l)) * LN2, nothing)
    #: store    the rows of this sequence
    p_index, r_index = np.nonzero(is_row)
    rows = o.tile()[p_index, r_index, : problem.head_dim].astype(o_array.dtype)  # [rows to write, D]
    sequence, at, to = 0 if cu_q is not None else batch[p_index], q_row[p_index, r_index], head[p_index, r_index]
    o_array[sequence, at, to] = rows
    lse_array[sequence, to, at] = lse[p_index, r_index]
    traffic.move("registers->DRAM", rows.nbytes + len(p_index) * lse.itemsize)


def _scores(s: Fragments, scale_log2: float, softcap: float) -> Fragments:
    """Scores in units of log2: ``softcap * tanh(s / softcap)`` saturates, it does not overflow."""
    values = s.values * np.float32(scale_log2)
    if softcap:
        with np.errstate(over="ignore"):
            e = np.exp2(values * np.float32(2 / softcap))
        values = np.float32(softcap * LOG2E) * (1 - 2 / (e + np.float32(1)))
    return s.with_values(values)


def _online(
    cta: Any, s: Fragments, m: Array, l: Array, o: Fragments, active: Array
) -> tuple[Fragments, Array, Array, Fragments]:
    """New row maximum, exponentials, row sum, rescale; programs whose loop is over add nothing."""
    m_new = np.maximum(m, cta.row_max(s))
    p = s.with_values(np.where(active[:, None, None, None], np.exp2(s.values - s.by_row(m_new)), np.float32(0)))
    alpha = np.exp2(m - m_new)
    return p, m_new, l * alpha + cta.row_sum(p), o.with_values(o.values * o.by_row(alpha))


def launch(
    q: Array,
    k: Array,
    v: Array,
    cu_q: Array | None = None,
    cu_k: Array | None = None,
    table: Array | None = None,
    seq_lens: Array | None = None,
    sinks: Array | None = None,
    *,
    scale: float,
    problem: PrefillProblem,
    config: PrefillConfig,
    mask_value: float = MASK_VALUE,
    out: Array | None = None,
    arch: str = "sm_90",
    traffic: Traffic | None = None,
) -> tuple[Array, Array]:
    """Run the twin; arrays as in ``reference``: out of q's shape and dtype, lse ``[B, Hq, S]`` or ``[1, Hq, total]``
    float32. The arguments are valid.
    """
    out = np.empty(q.shape, q.dtype) if out is None else out
    lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    if q.size == 0:
        return out, lse
    if k.shape[1] == 0:  # no sequence has a key
        k = v = np.zeros((len(k), 1, *k.shape[2:]), k.dtype)
        num_keys = np.zeros(problem.batch, np.int32)
    elif table is not None and seq_lens is not None:
        num_keys = seq_lens
    else:
        num_keys = np.full(problem.batch, k.shape[1]) if cu_k is None else np.diff(cu_k)
    rows: list[Any] = [SequenceRows(x, cu_k) for x in (k, v)]
    if table is not None:
        lengths = np.maximum(num_keys, 0).astype(np.uint32), table, problem.max_q, table.shape[1] * k.shape[1]
        rows = [PagedKVCache(x, *lengths) for x in (k, v)]
    traffic = Traffic() if traffic is None else traffic
    k_rows, v_rows = rows
    attend(
        q, k_rows, v_rows, cu_q, num_keys, sinks, out, lse, scale * LOG2E, mask_value, problem, config, arch, traffic
    )  # fmt: skip
    return out, lse


def _row_offsets(array: Array, sequence: Array, row: Array, head: Array, valid: Array) -> Array:
    """Element offsets of rows ``(sequence, row, head)`` of a strided array ``[B, S, H, D]``; 0 where not valid."""
    at = sum(
        index.astype(np.int64) * (stride // array.itemsize)
        for index, stride in zip((sequence[:, None], row, head), array.strides, strict=False)
    )
    return np.where(valid, at, 0)
