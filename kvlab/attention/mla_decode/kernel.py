"""MLA decode as a portable Triton kernel: paged latent cache, packed heads, K tile reused as V, split keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.attention.merge_states.kernel import launch as merge
from kvlab.attention.online_softmax import LOG2E, MASK_VALUE

from .config import MLADecodeConfig, MLADecodeProblem

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attend(
    q_ptr, kv_ptr, table_ptr, seq_lens_ptr, o_ptr, lse_ptr,
    scale_log2, mask_value, heads, tokens, num_splits,
    q_batch, q_token, q_head, kv_page, kv_token, table_batch, lens_batch,
    o_split, o_batch, o_token, o_head, lse_split, lse_batch, lse_token, lse_head,
    PAGE: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM query rows (tokens x heads) against the keys of one split of one sequence."""
    #: setup -> q, q_rope, lo, hi, limit    this program's rows, its split of the keys, the query tile
    row_tiles = tl.cdiv(heads * tokens, BM)
    batch = (tl.program_id(0) // row_tiles).to(tl.int64)
    row = (tl.program_id(0) % row_tiles) * BM + tl.arange(0, BM)  # [BM], token-major
    split = tl.program_id(1)
    num_keys = tl.load(seq_lens_ptr + batch * lens_batch).to(tl.int32)
    size = tl.cdiv(tl.cdiv(num_keys, num_splits), BN) * BN
    lo = tl.minimum(split * size, num_keys)
    hi = tl.minimum(lo + size, num_keys)
    token = row // heads
    head = row % heads
    is_row = row < heads * tokens
    limit = tl.minimum(num_keys - tokens + 1 + token, hi)  # [BM], first key that a row does not see
    d = tl.arange(0, BV)
    r = tl.arange(0, BR)
    q_at = q_ptr + batch * q_batch + token.to(tl.int64) * q_token + head.to(tl.int64) * q_head
    q = tl.load(q_at[:, None] + d[None, :], mask=is_row[:, None] & (d[None, :] < DV), other=0.0)  # [BM, BV]
    q_rope = tl.load(q_at[:, None] + DV + r[None, :], mask=is_row[:, None] & (r[None, :] < DR), other=0.0)  # [BM, BR]
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    o = tl.zeros([BM, BV], tl.float32)
    for start in range(lo, hi, BN):
        #: load_k -> k, k_rope    the tile of these pages, latent and rope columns, DRAM -> shared memory
        key = start + tl.arange(0, BN)
        in_tile = (key < hi)[:, None]
        page = tl.load(table_ptr + batch * table_batch + key // PAGE, mask=key < hi, other=0).to(tl.int64)
        slot = (key % PAGE).to(tl.int64)
        k_at = kv_ptr + page[:, None] * kv_page + slot[:, None] * kv_token
        in_latent = in_tile if DV == BV else in_tile & (d[None, :] < DV)
        in_rope = in_tile if DR == BR else in_tile & (r[None, :] < DR)
        k = tl.load(k_at + d[None, :], mask=in_latent, other=0.0)  # [BN, BV]
        k_rope = tl.load(k_at + DV + r[None, :], mask=in_rope, other=0.0)  # [BN, BR]
        #: scores -> s    S = Q K^T in float32, in units of log2
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = tl.dot(q_rope, tl.trans(k_rope), s, input_precision="ieee") * scale_log2  # [BM, BN]
        #: mask -> s    keys that a row does not see
        s = tl.where(key[None, :] < limit[:, None], s, mask_value)
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - m_new[:, None])
        alpha = tl.math.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        o = o * alpha[:, None]
        m = m_new
        #: load_v -> v    V is the latent part of the K tile: nothing moves from DRAM
        v = k  # [BN, BV]
        #: accumulate -> o    O += P V, P rounded once to the storage dtype
        o = tl.dot(p.to(v.dtype), v, o, input_precision="ieee")
    #: normalise -> o, lse    rows without a visible key give 0 and -inf
    sees = limit > lo
    o = tl.where(sees[:, None], o / l[:, None], 0.0)
    lse = tl.where(sees, (m + tl.math.log2(l)) * LN2, -float("inf"))
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (num_splits == 1))
    part = split.to(tl.int64)
    o_at = part * o_split + batch * o_batch + token.to(tl.int64) * o_token + head.to(tl.int64) * o_head
    o_mask = writes_o[:, None] & (d[None, :] < DV)
    tl.store(o_ptr + o_at[:, None] + d[None, :], o.to(o_ptr.dtype.element_ty), mask=o_mask)
    lse_at = part * lse_split + batch * lse_batch + token * lse_token + head * lse_head
    tl.store(lse_ptr + lse_at, lse, mask=is_row)


def launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    v_dim: int,
    scale: float,
    config: MLADecodeConfig,
    mask_value: float = MASK_VALUE,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels: out ``[B, S, H, v_dim]`` of q's dtype and lse ``[B, H, S]`` float32. The arguments are valid.

    q ``[B, S, H, D]``, kv_cache ``[pages, page_size, D]``.
    """
    batch, tokens, heads, D = q.shape
    page_size = kv_cache.shape[1]
    max_keys = block_table.shape[1] * page_size
    problem = MLADecodeProblem(batch, tokens, heads, v_dim, D - v_dim, q.element_size(), max_keys)
    shape = batch, tokens, heads, v_dim
    out = torch.empty(shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return out, lse
    splits = config.num_splits
    part, part_lse = out[None], lse[None]
    if splits > 1:
        part = torch.empty((splits, *shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device)
    part_lse_strides = (part_lse.stride(0), part_lse.stride(1), part_lse.stride(3), part_lse.stride(2))
    attend[config.grid(problem)](
        q, kv_cache, block_table, seq_lens, part, part_lse,
        scale * LOG2E, mask_value, heads, tokens, splits,
        *q.stride()[:3], *kv_cache.stride()[:2], block_table.stride(0), seq_lens.stride(0),
        *part.stride()[:4], *part_lse_strides,
        PAGE=page_size, DV=v_dim, DR=D - v_dim, BV=config.BV, BR=config.BR, BM=config.BM, BN=config.BN,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if splits > 1:
        merge(part, part_lse.transpose(2, 3), out=out, lse=lse.transpose(1, 2))
    return out, lse
