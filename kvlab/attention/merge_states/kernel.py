"""Merging of partial attention in Triton: one program for each piece of columns of each head of each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvlab.triton_support.launching import Again, first_launch, relaunched

from .config import chunk_of, merge_grid, piece_of


@triton.jit
def merge(
    part_ptr, part_lse_ptr, o_ptr, lse_ptr, tokens, num_parts,
    part_n, part_batch, part_token, part_head, part_lse_n, part_lse_batch, part_lse_token, part_lse_head,
    o_batch, o_token, o_head, lse_batch, lse_token, lse_head,
    D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
):
    """Put BD columns of the parts of one head of one token together; parts without a key have no share in it."""
    #: setup -> lse_parts    each part's lse; +inf, as some write for no key, is -inf
    program, head, piece = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch = (program // tokens).to(tl.int64)
    token = (program % tokens).to(tl.int64)
    at_lse = part_lse_ptr + batch * part_lse_batch + token * part_lse_token + head * part_lse_head  #- address
    every = tl.arange(0, PARTS).to(tl.int64)
    lse_parts = tl.load(at_lse + every * part_lse_n, mask=every < num_parts, other=-float("inf"))
    lse_parts = tl.where(lse_parts == float("inf"), -float("inf"), lse_parts)
    #: total -> top, total    weights relative to the largest, so that nothing overflows
    top = tl.max(lse_parts, 0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp(lse_parts - shift), 0)
    d = piece * BD + tl.arange(0, BD)
    at = part_ptr + batch * part_batch + token * part_token + head * part_head  #- address
    o = tl.zeros([BD], tl.float32)
    lost = tl.zeros([BD], tl.float32)
    for first in range(0, num_parts, CHUNK):
        #: weights -> w    of the next parts
        n = (first + tl.arange(0, CHUNK)).to(tl.int64)
        lse_chunk = tl.load(at_lse + n * part_lse_n, mask=n < num_parts, other=-float("inf"))
        w = tl.where(lse_chunk == float("inf"), 0.0, tl.exp(lse_chunk - shift))
        #: load_parts -> parts    those that count; what a part without a key left behind is not read
        has = (w > 0)[:, None] & (d[None, :] < D)
        parts = tl.load(at + n[:, None] * part_n + d[None, :], mask=has, other=0.0).to(tl.float32)
        #: add -> o, lost    compensated: what the sum could not hold is kept for the next
        term = tl.sum(parts * w[:, None], 0) - lost
        new = o + term
        lost = (new - o) - term
        o = new
    #: combine -> o, lse    weighted mean; no key at all gives 0 and -inf
    o = tl.where(total == 0, 0.0, o / total)
    lse = tl.where(total == 0, -float("inf"), top + tl.log(total))
    #: store
    o_at = batch * o_batch + token * o_token + head * o_head + d  #- address
    tl.store(o_ptr + o_at, o.to(o_ptr.dtype.element_ty), mask=d < D)
    tl.store(lse_ptr + batch * lse_batch + token * lse_token + head * lse_head, lse, mask=piece == 0)


def launch(
    outs: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
    again: Again = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel on outs ``[N, B, S, H, D]`` and lses ``[N, B, S, H]``: out ``[B, S, H, D]``, lse ``[B, S, H]``.

    The arguments are valid; ``again`` as of :mod:`kvlab.triton_support.launching`.
    """
    num_parts, batch, tokens, heads, head_dim = outs.shape
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device) if out is None else out
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=lses.device) if lse is None else lse
    if lse.numel() == 0:
        return out, lse
    pointers = outs, lses, out, lse
    if not relaunched(merge, pointers, again):
        first_launch(merge, merge_grid(batch, tokens, heads, head_dim), pointers, again)(
            tokens, num_parts, *outs.stride()[:4], *lses.stride(), *out.stride()[:3], *lse.stride(),
            D=head_dim, BD=piece_of(head_dim), PARTS=triton.next_power_of_2(max(num_parts, 1)),
            CHUNK=chunk_of(num_parts), num_warps=1,
        )
    return out, lse


def partial_results(out: torch.Tensor, lse: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Arrays for the results of so many splits of the keys, out ``[B, S, H, D]`` and lse ``[B, S, H]``: these
    themselves for one, else float32 tensors ``[splits, ..]`` of their own, to be merged.
    """
    if splits == 1:
        return out, lse
    part, part_lse = (x.new_empty((splits, *x.shape), dtype=torch.float32) for x in (out, lse))
    return part, part_lse


def partial_strides(part: torch.Tensor, part_lse: torch.Tensor, splits: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Strides (split, sequence, token, head) of what ``partial_results`` gives."""
    if splits == 1:
        part, part_lse = part[None], part_lse[None]
    return tuple(part.stride()[:4]), tuple(part_lse.stride())


def merge_partial_results(
    part: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, again: Again
) -> None:
    """Merge what ``partial_results`` gave for out and lse."""
    if not relaunched(merge, (part, part_lse, out, lse), again):
        launch(part, part_lse, out=out, lse=lse, again=again)
