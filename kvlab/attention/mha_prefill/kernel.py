"""MHA prefill as a portable Triton kernel: dense, ragged or paged keys, full tiles first, then those with a mask."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.attention.online_softmax import LOG2E, MASK_VALUE

from .config import UNLIMITED, PrefillConfig, PrefillProblem

LN2 = tl.constexpr(0.6931471805599453)
NO_BOUND = tl.constexpr(UNLIMITED)


@triton.jit
def load_tile(
    ptr, table_ptr, page, first, key, end, page_stride, token_stride,
    PAGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rows ``key`` of one KV head: of the page that the table names, or of one piece that starts at ``first``."""
    d = tl.arange(0, BD)
    slot = first + key
    if PAGE:
        if MASKED:
            page = tl.load(table_ptr + key // PAGE, mask=key < end, other=0).to(tl.int64)[:, None]
        else:
            page = tl.load(table_ptr + key // PAGE).to(tl.int64)[:, None]
        slot = (key % PAGE).to(tl.int64)
    at = page * page_stride + slot[:, None] * token_stride + d[None, :]
    if MASKED:
        return tl.load(ptr + at, mask=(key < end)[:, None] & (d[None, :] < D), other=0.0)
    if D == BD:
        return tl.load(ptr + at)
    return tl.load(ptr + at, mask=d[None, :] < D, other=0.0)


@triton.jit
def qk(q, k, scale_log2, softcap, CAPPED: tl.constexpr):
    """Scores in units of log2: ``softcap * tanh(s / softcap)`` saturates, it does not overflow."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if CAPPED:
        s = softcap * 1.4426950408889634 * (1.0 - 2.0 / (tl.math.exp2(s * (2.0 / softcap)) + 1.0))
    return s


@triton.jit
def online(s, m, l, o):
    """New row maximum, exponentials, row sum, rescale."""
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.math.exp2(s - m_new[:, None])
    alpha = tl.math.exp2(m - m_new)
    return p, m_new, l * alpha + tl.sum(p, 1), o * alpha[:, None]


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, table_ptr, lens_ptr, sinks_ptr, o_ptr, lse_ptr,
    scale_log2, softcap, mask_value, batches, row_tiles, pack, group, max_q, max_k, left, right,
    q_batch, q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, table_batch,
    o_batch, o_token, o_head, lse_batch, lse_head, lse_token,
    RAGGED_Q: tl.constexpr, RAGGED_K: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM query rows of one head, or of the heads of one KV head, against the keys that they see."""
    #: setup -> q, lo, full, hi, first, limit    this program's rows, the keys they see, the query tile
    tile = row_tiles - 1 - tl.program_id(0) // batches
    batch = (tl.program_id(0) % batches).to(tl.int64)
    row = tile * BM + tl.arange(0, BM)  # [BM], token-major
    token = row // pack
    head = (tl.program_id(1) * pack + row % pack).to(tl.int64)
    kv_head = (tl.program_id(1) * pack // group).to(tl.int64)
    q_first = tl.zeros([], tl.int64)
    num_q = max_q
    if RAGGED_Q:
        q_first = tl.load(cu_q_ptr + batch).to(tl.int64)
        num_q = (tl.load(cu_q_ptr + batch + 1) - tl.load(cu_q_ptr + batch)).to(tl.int32)
    k_first = tl.zeros([], tl.int64)
    num_keys = max_k
    if RAGGED_K:
        k_first = tl.load(cu_k_ptr + batch).to(tl.int64)
        num_keys = (tl.load(cu_k_ptr + batch + 1) - tl.load(cu_k_ptr + batch)).to(tl.int32)
    if PAGE:
        num_keys = tl.load(lens_ptr + batch).to(tl.int32)
    is_row = token < num_q
    position = token + num_keys - num_q
    first = tl.maximum(position - left, 0)  # [BM], first key that a row sees
    limit = tl.minimum(position + right + 1, num_keys)  # [BM], first key after it that a row does not see
    top = tile * BM // pack + num_keys - num_q  # positions of the tile's rows
    bottom = tl.minimum((tile * BM + BM - 1) // pack, num_q - 1) + num_keys - num_q
    lo = tl.maximum(top - left, 0) // BN * BN
    hi = tl.maximum(tl.minimum(bottom + right + 1, num_keys), lo)
    hi = tl.where(bottom < top, lo, hi)
    full = tl.maximum(tl.minimum(tl.minimum(top + right + 1, num_keys) // BN * BN, hi), lo)
    full = tl.where(left < NO_BOUND, lo, full)
    d = tl.arange(0, BD)
    q_at = batch * q_batch + (q_first + token)[:, None] * q_token + head[:, None] * q_head + d[None, :]
    q = tl.load(q_ptr + q_at, mask=is_row[:, None] & (d[None, :] < D), other=0.0)  # [BM, BD]
    k_base, v_base, pages = k_ptr + kv_head * k_head, v_ptr + kv_head * v_head, table_ptr + batch * table_batch
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    if SINKS:
        m = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        l += 1.0
    o = tl.zeros([BM, BD], tl.float32)
    for start in range(lo, full, BN):
        #: load_k -> k    a K tile that every row sees, DRAM -> shared memory
        key = start + tl.arange(0, BN)
        k = load_tile(k_base, pages, batch, k_first, key, full, k_page, k_token, PAGE, D, BD, False)
        #: scores -> s    S = Q K^T in float32, in units of log2
        s = qk(q, k, scale_log2, softcap, CAPPED)  # [BM, BN]
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        p, m, l, o = online(s, m, l, o)
        #: load_v -> v    the V tile of the same keys
        v = load_tile(v_base, pages, batch, k_first, key, full, v_page, v_token, PAGE, D, BD, False)
        #: accumulate -> o    O += P V, P rounded once to the storage dtype
        o = tl.dot(p.to(v.dtype), v, o, input_precision="ieee")
    for start in range(full, hi, BN):
        #: load_k -> k    a K tile that some rows see in part
        key = start + tl.arange(0, BN)
        k = load_tile(k_base, pages, batch, k_first, key, hi, k_page, k_token, PAGE, D, BD, True)
        #: scores -> s    S = Q K^T in float32, in units of log2
        s = qk(q, k, scale_log2, softcap, CAPPED)  # [BM, BN]
        #: mask -> s    keys that a row does not see
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < limit[:, None])
        s = tl.where(visible, s, mask_value)
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        p, m, l, o = online(s, m, l, o)
        #: load_v -> v    the V tile of the same keys
        v = load_tile(v_base, pages, batch, k_first, key, hi, v_page, v_token, PAGE, D, BD, True)
        #: accumulate -> o    O += P V, P rounded once to the storage dtype
        o = tl.dot(p.to(v.dtype), v, o, input_precision="ieee")
    #: normalise -> o, lse    rows without a visible key give 0 and -inf, or the sink's logit
    sees = (limit > first) & is_row
    l = tl.where(sees, l, 1.0)
    o = tl.where(sees[:, None], o / l[:, None], 0.0)
    nothing = tl.full([BM], -float("inf"), tl.float32)
    if SINKS:
        nothing = tl.load(sinks_ptr + head).to(tl.float32)
    lse = tl.where(sees, (m + tl.math.log2(l)) * LN2, nothing)
    #: store    the rows of this sequence
    o_at = batch * o_batch + (q_first + token)[:, None] * o_token + head[:, None] * o_head + d[None, :]
    tl.store(o_ptr + o_at, o.to(o_ptr.dtype.element_ty), mask=is_row[:, None] & (d[None, :] < D))
    lse_at = batch * lse_batch + (q_first + token) * lse_token + head * lse_head
    tl.store(lse_ptr + lse_at, lse, mask=is_row)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None = None,
    cu_k: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    scale: float,
    problem: PrefillProblem,
    config: PrefillConfig,
    mask_value: float = MASK_VALUE,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; arrays as in ``reference``: out of q's shape and dtype, lse ``[B, Hq, S]`` or ``[1, Hq, total]``
    float32. The arguments are valid.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return out, lse
    ragged_q, ragged_k, paged = cu_q is not None, cu_k is not None, table is not None
    strides = [list(x.stride()[:3]) for x in (q, k, v, out)]
    lse_strides = list(lse.stride())
    for one, ragged in ((strides[0], ragged_q), (strides[1], ragged_k), (strides[2], ragged_k), (strides[3], ragged_q)):
        one[0] = 0 if ragged else one[0]
    lse_strides[0] = 0 if ragged_q else lse_strides[0]
    absent = q  # stands for a pointer that is not followed
    attend[config.grid(problem)](
        q, k, v, *(absent if x is None else x for x in (cu_q, cu_k, table, seq_lens, sinks)), out, lse,
        scale * LOG2E, problem.softcap, mask_value, problem.batch, config.row_tiles, config.pack, problem.group,
        q.shape[1], k.shape[1], problem.left, problem.right, *strides[0], *strides[1], *strides[2],
        table.stride(0) if table is not None else 0, *strides[3], *lse_strides,
        RAGGED_Q=ragged_q, RAGGED_K=ragged_k, PAGE=k.shape[1] if paged else 0, CAPPED=problem.softcap > 0,
        SINKS=sinks is not None, D=q.shape[3], BD=config.BD, BM=config.BM, BN=config.BN,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out, lse
