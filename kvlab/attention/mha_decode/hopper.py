"""MHA decode on Hopper in Gluon: a ring of TMA boxes of several KV heads, mma.sync, warps with keys of their own.

A block of 64 rows of K, and of V, holds HEADS neighbouring heads of 64 / HEADS tokens, as a page has them. The 16 query
rows are those of all these heads; a row sees the keys of its own. Each of the four warps does the softmax of 16 rows of
the block by itself; they meet once a block, where its stage is given back, and are put together at the end.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2

from kvlab.attention.features import Features
from kvlab.attention.merge_states.kernel import launch as merge
from kvlab.attention.merge_states.kernel import partial_results
from kvlab.attention.mha_prefill.hopper import barriers, box_descriptor
from kvlab.attention.mha_prefill.hopper_steps import PANEL, meet, view
from kvlab.attention.online_softmax import LOG2E, MASK_VALUE
from kvlab.attention.scoring.launch import scale_strides

from .hopper_config import HopperConfig
from .hopper_steps import (
    BOX_LAYOUT,
    MMA,
    ROWS,
    TILE_LAYOUT,
    A,
    B,
    column,
    find_item,
    halves,
    load_block,
    load_rows,
    narrow,
    of_every_warp,
    rows_of,
)

SIZES = ["batches", "width", "groups", "splits", "pages", "table_batch", "lens_stride", "k_scale_head", "v_scale_head"]


@gluon.jit(do_not_specialize=SIZES)
def attend(
    dk, dv, q_ptr, table_ptr, lens, k_scale, v_scale, out, lse_out,
    scale_log2, v_factor, mask_value, batches, width, groups, splits, pages,
    q_batch, q_token, q_head, table_batch, lens_stride, k_scale_head, v_scale_head,
    o_split, o_batch, o_token, o_head, lse_split, lse_batch, lse_token, lse_head,
    C: gl.constexpr,
):  # fmt: skip
    """The query rows of HEADS KV heads of one sequence against the keys of one split."""
    #: setup -> batch, kv_head, split, lo, hi, num_keys, blocks    this program's item; its first blocks begin
    PANELS: gl.constexpr = C.W // PANEL
    BOXES: gl.constexpr = C.BT // C.BOX
    NB: gl.constexpr = C.NB
    W: gl.constexpr = C.W
    KEYS: gl.constexpr = C.BN // 4
    k_box = gl.allocate_shared_memory(dk.dtype, [NB * PANELS * BOXES, 1, C.BOX, C.HEADS, PANEL], BOX_LAYOUT)
    v_box = gl.allocate_shared_memory(dk.dtype, [NB * PANELS * BOXES, 1, C.BOX, C.HEADS, PANEL], BOX_LAYOUT)
    full = barriers(NB, 1)
    fence_async_shared()  # TMA arrives at these barriers
    meet()
    k_s = view(k_box, [NB, 4, KEYS, W], TILE_LAYOUT)
    v_s = view(v_box, [NB, 4, KEYS, W], TILE_LAYOUT)
    batch, kv_head, split, lo, hi, num_keys = find_item(
        gl.program_id(0), lens, lens_stride, batches, width, groups, splits, C
    )
    blocks = gl.cdiv(hi - lo, C.BT)
    table = table_ptr + batch * table_batch
    for i in gl.static_range(NB):
        if i < blocks:
            load_block(dk, dv, k_box, v_box, full.index(i), i, table, lo + i * C.BT, hi, kv_head, pages, C)
    #: queries -> limit    the rows, the keys that they see, what their scores are multiplied by
    q = load_rows(q_ptr, q_batch, q_token, q_head, batch, kv_head, 0, C)
    kv, token, head = rows_of(gl.arange(0, 16, layout=ROWS), C)
    limit = num_keys - C.TOKENS + 1 + token  # keys from here on a row does not see
    factor = gl.full([16], 1.0, gl.float32, layout=ROWS) * scale_log2
    if C.K_SCALE:
        factor = factor * gl.load(k_scale + (kv_head + kv) * k_scale_head, mask=kv < C.HEADS, other=0.0)
    if C.PAIRS:
        odd = load_rows(q_ptr, q_batch, q_token, q_head, batch, kv_head, 1, C)
        top = gl.maximum(gl.max(gl.abs(q.to(gl.float32)), 1), gl.max(gl.abs(odd.to(gl.float32)), 1))
        q, unit = narrow(q, top)
        odd, _ = narrow(odd, top)
        q_odd = of_every_warp(odd, C)
        factor = factor * gl.convert_layout(unit, ROWS)
    q = of_every_warp(q, C)
    col = gl.expand_dims(column(gl.SliceLayout(1, MMA), C), 1)  # [4, 1, 16]
    own = col % C.HEADS == gl.expand_dims(gl.expand_dims(kv, 0), 2)
    limits = gl.expand_dims(gl.expand_dims(limit, 0), 2)
    factor = gl.expand_dims(gl.expand_dims(factor, 0), 2)
    m = gl.full([4, 16], 1.0, gl.float32, layout=gl.SliceLayout(2, MMA)) * mask_value
    l = gl.zeros([4, 16], gl.float32, layout=gl.SliceLayout(2, MMA))
    o = gl.zeros([4, 16, W], gl.float32, layout=MMA)
    o_odd = o
    for i in range(blocks):
        #: load_k -> b, key    the block has arrived in its stage
        b = i % NB
        key = lo + i * C.BT
        mbarrier.wait(full.index(b), (i // NB) & 1)
        k = k_s.index(b).permute((0, 2, 1)).load(B)
        #: scores -> s    S = Q K^T in float32, in units of log2
        s = gl.zeros([4, 16, KEYS], gl.float32, layout=MMA)
        if C.PAIRS:
            k_even, k_odd = halves(k)
            s = mma_v2(q, k_even, s)
            s = mma_v2(q_odd, k_odd, s)
        else:
            s = mma_v2(q, k, s)
        s = s * factor
        #: load_v -> v    those rows of V that exist: what stands behind them may be anything, and 0 * NaN is NaN
        v = v_s.index(b).load(B)
        if key + C.BT > hi:
            there = gl.expand_dims(key + column(gl.SliceLayout(2, B), C) // C.HEADS < hi, 2)
            v = gl.where(there, v, gl.zeros_like(v))
        #: mask -> s    other heads' keys, and keys that a row does not see
        if C.HEADS > 1:
            s = gl.where(own, s, mask_value)
        if key + C.BT > num_keys - C.TOKENS + 1:
            s = gl.where(key + col // C.HEADS < limits, s, mask_value)
        #: softmax -> p, m, l, o    online, every warp for itself: row maximum, exponentials, row sum, rescale
        m_new = gl.maximum(m, gl.max(s, 2))
        p = gl.exp2(s - gl.expand_dims(m_new, 2))
        alpha = gl.exp2(m - m_new)
        l = l * alpha + gl.sum(p, 2)
        m = m_new
        o = o * gl.expand_dims(alpha, 2)
        if C.PAIRS:
            o_odd = o_odd * gl.expand_dims(alpha, 2)
        #: accumulate -> o    O += P V, P rounded once to the dtype of the product
        if C.PAIRS:
            weights = gl.convert_layout(p.to(gl.float16), A)
            v_even, v_odd = halves(v)
            o = mma_v2(weights, v_even, o)
            o_odd = mma_v2(weights, v_odd, o_odd)
        else:
            o = mma_v2(gl.convert_layout(p.to(v.dtype), A), v, o)
        #: refill    all warps have read the stage: the block that it holds next
        meet()
        if i + NB < blocks:
            load_block(dk, dv, k_box, v_box, full.index(b), b, table, key + NB * C.BT, hi, kv_head, pages, C)
    #: together -> top, total    the warps' maxima and sums
    top = gl.max(m, 0)
    weight = gl.exp2(m - gl.expand_dims(top, 0))
    total = gl.sum(l * weight, 0)
    weight = gl.expand_dims(weight, 2)
    o = gl.sum(o * weight, 0)
    #: normalise -> lse, l    rows without a visible key give 0 and -inf
    sees = limit > lo
    lse = gl.where(sees, (top + gl.log2(total)) * 0.6931471805599453, float("-inf"))
    factor = gl.full([16], 1.0, gl.float32, layout=ROWS) * v_factor
    if C.V_SCALE:
        factor = factor * gl.load(v_scale + (kv_head + kv) * v_scale_head, mask=kv < C.HEADS, other=0.0)
    l = gl.where(sees, factor / total, 0.0)  # what the sums of a row are multiplied by
    #: store    an empty split leaves its partial output alone
    heads = (kv_head + kv) * C.GROUP + head
    at = lse_out + split.to(gl.int64) * lse_split + batch * lse_batch
    gl.store(at + token * lse_token + heads * lse_head, lse, mask=kv < C.HEADS)
    l = gl.convert_layout(l, gl.SliceLayout(1, o.type.layout))
    rows = out + split.to(gl.int64) * o_split + batch * o_batch + token * o_token + heads * o_head
    rows = gl.convert_layout(rows, gl.SliceLayout(1, o.type.layout))
    writes = gl.convert_layout((kv < C.HEADS) & (sees | (splits == 1)), gl.SliceLayout(1, o.type.layout))
    cols = gl.arange(0, W, layout=gl.SliceLayout(0, o.type.layout)) * (2 if C.PAIRS else 1)
    seen = gl.expand_dims(l != 0.0, 1)
    o = gl.where(seen, o * gl.expand_dims(l, 1), 0.0)
    gl.store(rows[:, None] + cols[None, :], o.to(out.dtype.element_ty), mask=writes[:, None])
    if C.PAIRS:
        o_odd = gl.sum(o_odd * weight, 0)
        o_odd = gl.where(seen, o_odd * gl.expand_dims(l, 1), 0.0)
        gl.store(rows[:, None] + cols[None, :] + 1, o_odd.to(out.dtype.element_ty), mask=writes[:, None])


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    config: HopperConfig,
    features: Features,
    mask_value: float = MASK_VALUE,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernels; arguments and results as of ``kernel.launch``, such as ``hopper_lacks`` lets pass."""
    C, splits, scales = config.constants, config.num_splits, features.scales
    batch, tokens, q_heads = q.shape[:3]
    out = torch.empty((*q.shape[:3], v_cache.shape[3]), dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty((batch, q_heads, tokens), dtype=torch.float32, device=q.device)
    part, part_lse = partial_results(out, lse, splits)
    k, v = (x.view(torch.int16) for x in (k_cache, v_cache)) if C.PAIRS else (k_cache, v_cache)
    attend[config.grid()](
        *(box_descriptor(x, (C.BOX, C.HEADS), BOX_LAYOUT) for x in (k, v)), q, block_table, seq_lens,
        *(q if x.array is None else x.array for x in (scales.k, scales.v)), part, part_lse,
        scale * LOG2E * scales.k.number, scales.v.number, mask_value, batch, config.width, config.groups, splits,
        k.shape[0], *q.stride()[:3], block_table.stride(0), seq_lens.stride(0),
        *scale_strides(scales.k, 1), *scale_strides(scales.v, 1), *part.stride()[:4],
        *(part_lse.stride(axis) for axis in (0, 1, 3, 2)), C=C, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        merge(part, part_lse.transpose(2, 3), out=out, lse=lse.transpose(1, 2))
    return out, lse
