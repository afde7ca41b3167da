"""MHA decode as a portable Triton kernel: paged cache, packed query heads, split over the keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.attention.merge_states.kernel import launch as merge
from kvlab.attention.online_softmax import LOG2E, MASK_VALUE

from .config import DecodeConfig, DecodeProblem

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, o_ptr, lse_ptr,
    scale_log2, mask_value, group, tokens, num_splits,
    q_batch, q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, table_batch, lens_batch,
    o_split, o_batch, o_token, o_head, lse_split, lse_batch, lse_token, lse_head,
    PAGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM query rows (tokens x heads of one KV head) against the keys of one split of one sequence."""
    #: setup -> q, lo, hi, limit    this program's rows, its split of the keys, the query tile
    batch = tl.program_id(0).to(tl.int64)
    row_tiles = tl.cdiv(group * tokens, BM)
    kv_head = (tl.program_id(1) // row_tiles).to(tl.int64)
    row = (tl.program_id(1) % row_tiles) * BM + tl.arange(0, BM)  # [BM], token-major
    split = tl.program_id(2)
    num_keys = tl.load(seq_lens_ptr + batch * lens_batch).to(tl.int32)
    size = tl.cdiv(tl.cdiv(num_keys, num_splits), BN) * BN
    lo = tl.minimum(split * size, num_keys)
    hi = tl.minimum(lo + size, num_keys)
    token = row // group
    head = kv_head * group + row % group
    is_row = row < group * tokens
    limit = tl.minimum(num_keys - tokens + 1 + token, hi)  # [BM], first key that a row does not see
    d = tl.arange(0, BD)
    q_at = batch * q_batch + token.to(tl.int64)[:, None] * q_token + head[:, None] * q_head + d[None, :]
    q = tl.load(q_ptr + q_at, mask=is_row[:, None] & (d[None, :] < D), other=0.0)  # [BM, BD]
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    o = tl.zeros([BM, BD], tl.float32)
    for start in range(lo, hi, BN):
        #: load_k -> k    the K tile of these pages, DRAM -> shared memory
        key = start + tl.arange(0, BN)
        in_tile = (key < hi)[:, None] & (d[None, :] < D)
        page = tl.load(table_ptr + batch * table_batch + key // PAGE, mask=key < hi, other=0).to(tl.int64)
        slot = (key % PAGE).to(tl.int64)
        k_at = page[:, None] * k_page + slot[:, None] * k_token + kv_head * k_head + d[None, :]
        k = tl.load(k_ptr + k_at, mask=in_tile, other=0.0)  # [BN, BD]
        #: scores -> s    S = Q K^T in float32, in units of log2
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [BM, BN]
        #: mask -> s    keys that a row does not see
        s = tl.where(key[None, :] < limit[:, None], s, mask_value)
        #: softmax -> p, m, l, o    online: new row maximum, exponentials, row sum, rescale
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - m_new[:, None])
        alpha = tl.math.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        o = o * alpha[:, None]
        m = m_new
        #: load_v -> v    the V tile of the same pages
        v_at = page[:, None] * v_page + slot[:, None] * v_token + kv_head * v_head + d[None, :]
        v = tl.load(v_ptr + v_at, mask=in_tile, other=0.0)  # [BN, BD]
        #: accumulate -> o    O += P V, P rounded once to the storage dtype
        o = tl.dot(p.to(v.dtype), v, o, input_precision="ieee")
    #: normalise -> o, lse    rows without a visible key give 0 and -inf
    sees = limit > lo
    o = tl.where(sees[:, None], o / l[:, None], 0.0)
    lse = tl.where(sees, (m + tl.math.log2(l)) * LN2, -float("inf"))
    #: store    an empty split leaves its partial output alone
    writes_o = is_row & (sees | (num_splits == 1))
    o_at = split.to(tl.int64) * o_split + batch * o_batch + token.to(tl.int64) * o_token + head * o_head
    o_mask = writes_o[:, None] & (d[None, :] < D)
    tl.store(o_ptr + o_at[:, None] + d[None, :], o.to(o_ptr.dtype.element_ty), mask=o_mask)
    lse_at = split.to(tl.int64) * lse_split + batch * lse_batch + token * lse_token + head * lse_head
    tl.store(lse_ptr + lse_at, lse, mask=is_row)


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    config: DecodeConfig,
    mask_value: float = MASK_VALUE,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels: out ``[B, S, Hq, D]`` of q's dtype and lse ``[B, Hq, S]`` float32. The arguments are valid."""
    batch, tokens, q_heads, head_dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    problem = DecodeProblem(
        batch, tokens, q_heads, kv_heads, head_dim, q.element_size(), block_table.shape[1] * page_size
    )
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty((batch, q_heads, tokens), dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return out, lse
    splits = config.num_splits
    part, part_lse = out[None], lse[None]
    if splits > 1:
        part = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device)
    part_lse_strides = (part_lse.stride(0), part_lse.stride(1), part_lse.stride(3), part_lse.stride(2))
    attend[config.grid(problem)](
        q, k_cache, v_cache, block_table, seq_lens, part, part_lse,
        scale * LOG2E, mask_value, problem.group, tokens, splits,
        *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0), seq_lens.stride(0),
        *part.stride()[:4], *part_lse_strides,
        PAGE=page_size, D=head_dim, BD=config.BD, BM=config.BM, BN=config.BN,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if splits > 1:
        merge(part, part_lse.transpose(2, 3), out=out, lse=lse.transpose(1, 2))
    return out, lse
