"""MHA decode as a portable Triton kernel: paged cache, packed query heads, split over the keys."""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, o_ptr, lse_ptr,
    scale_log2, mask_value, group, tokens, num_splits,
    q_batch, q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, table_batch,
    o_split, o_batch, o_token, o_head, lse_split, lse_batch, lse_token, lse_head,
    PAGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    """One program: BM query rows (tokens x heads of one KV head) against the keys of one split of one sequence."""
    #: setup -> q, lo, hi, limit    this program's rows, its split of the keys, the query tile
    batch = tl.program_id(0).to(tl.int64)
    row_tiles = tl.cdiv(group * tokens, BM)
    kv_head = tl.program_id(1) // row_tiles
    split = tl.program_id(2)
    num_keys = tl.load(seq_lens_ptr + batch)
    size = tl.cdiv(tl.cdiv(num_keys, num_splits), BN) * BN
    lo = tl.minimum(split * size, num_keys)
    hi = tl.minimum(lo + size, num_keys)
    row = (tl.program_id(1) % row_tiles) * BM + tl.arange(0, BM)  # [BM], token-major
    token = row // group
    head = kv_head * group + row % group
    is_row = row < group * tokens
    limit = tl.minimum(num_keys - tokens + 1 + token, hi)  # [BM] first key that the row does not see
    d = tl.arange(0, BD)
    q_at = batch * q_batch + token[:, None] * q_token + head[:, None] * q_head + d[None, :]
    q = tl.load(q_ptr + q_at, mask=is_row[:, None] & (d[None, :] < D), other=0.0)  # [BM, BD]
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    o = tl.zeros([BM, BD], tl.float32)
    for start in range(lo, hi, BN):
        #: load_k -> k    the K tile of these pages
        key = start + tl.arange(0, BN)
        in_tile = (key < hi)[:, None] & (d[None, :] < D)
        page = tl.load(table_ptr + batch * table_batch + key // PAGE, mask=key < hi, other=0).to(tl.int64)
        k_at = page[:, None] * k_page + (key % PAGE)[:, None] * k_token + kv_head * k_head + d[None, :]
        k = tl.load(k_ptr + k_at, mask=in_tile, other=0.0)  # [BN, BD]
        #: scores -> s    S = Q K^T in float32, in units of log2
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [BM, BN]
        #: mask -> s    keys that a row does not see
        s = tl.where(key[None, :] < limit[:, None], s, mask_value)
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, rescale
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - m_new[:, None])
        alpha = tl.math.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        o = o * alpha[:, None]
        m = m_new
        #: load_v -> v    the V tile of the same pages
        v_at = page[:, None] * v_page + (key % PAGE)[:, None] * v_token + kv_head * v_head + d[None, :]
        v = tl.load(v_ptr + v_at, mask=in_tile, other=0.0)  # [BN, BD]
        #: accumulate -> o    O += P V, P rounded once to the storage dtype
        o = tl.dot(p.to(v.dtype), v, o, input_precision="ieee")
    #: normalise -> o, lse    rows without a visible key give 0 and -inf
    sees = limit > lo
    o = tl.where(sees[:, None], o / l[:, None], 0.0)
    lse = tl.where(sees, (m + tl.math.log2(l)) * LN2, -float("inf"))
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (num_splits == 1))
    o_at = split * o_split + batch * o_batch + token * o_token + head * o_head
    tl.store(o_ptr + o_at[:, None] + d[None, :], o.to(o_ptr.dtype.element_ty), mask=writes_o[:, None] & (d[None, :] < D))
    lse_at = split * lse_split + batch * lse_batch + token * lse_token + head * lse_head
    tl.store(lse_ptr + lse_at, lse, mask=is_row)
