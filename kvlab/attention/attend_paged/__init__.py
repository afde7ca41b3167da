"""Attention of new tokens, any number of each sequence, over a paged cache, by a schedule made from the lengths."""

from __future__ import annotations

from typing import Unpack

from kvlab.attention.call.operation import PublicOperation
from kvlab.attention.call.options import AttendOptions
from kvlab.common.arrays import Array

from .call import AttendPaged
from .step import plan

__all__ = ["attend_paged", "plan"]


@PublicOperation
def attend_paged(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, cu_seqlens_q: Array,
    **options: Unpack[AttendOptions],
) -> AttendPaged:
    """Attention of the new tokens of a serving step over a paged cache that already holds them: none, one, drafts or
    chunks of each sequence in one call, ``softmax(scale Q K^T) V``.

    q            ``[total, Hq, D]``: the new tokens of all sequences; bfloat16, float16 or float32; e4m3 with K and V of
                 e4m3. D and Dv are multiples of 8 (of 16 with e4m3) from 16 to 576
    k_cache, v_cache  ``[pages, page_size, Hkv, D]`` and ``[.., Dv]`` of q's dtype, or of float8_e4m3fn with q of 16
                 bits, or of uint8 with as many, two columns of 4 bits a byte, as of ``mha_decode_paged``; any strides
                 whose last is 1. Hq is a multiple of Hkv
    block_table  integers ``[B, columns]``: the page of tokens ``c * page_size ...`` of each sequence; entries past the
                 sequence's end are not read
    seq_lens     integers ``[B]``: keys of each sequence, the new ones among them; 0 is allowed
    cu_seqlens_q  integers ``[B + 1]``: where each sequence's new tokens start in q, and the total
    plan         None, or what :func:`~kvlab.attention.plan` made of these lengths: made once a step, it serves all
                 layers whose heads and windows are the same; without it the call makes its own
    max_seqlen_q  the most new tokens of a sequence; None is that of ``cu_seqlens_q``, on a GPU any number. Where it is
                 small, all sequences are walked in one grid
    causal       query i of S is at position ``p = i + n - S`` and sees the keys up to p (aligned at the end). True
                 unless there is a ``mask``
    scale        of the scores, ``1 / sqrt(D)`` by default, ``1 / sqrt(D + Dv)`` with qv
    mask         None, or a mask of :mod:`kvlab.attention.masks`, as of ``mha_prefill_paged``
    window       None; with causal a number of keys, the query's own among them; or ``(left, right)``
    leftpad_k    None, or integers ``[B]``: keys before the first valid one of each, as of ``mha_prefill_paged``
    q_positions  None, or integers ``[total]``: the position of each new token, as of ``mha_prefill_paged``. With either
                 the list has all keys of a sequence: a plan is one with ``causal=False`` and no window
    {features:13}
    return_lse   return ``(out, lse)`` with lse ``[total, Hq]``, natural log (base2: that of 2), float32
    out          where to write the output ``[total, Hq, Dv]`` of q's dtype (bfloat16 for e4m3); a new array by default.
                 It may be q itself, and shares no memory with anything else
    kv_layout    "NHD", or "HND": pages (and scales of tokens) have the heads before the tokens of a page
    batch_invariant  the same bits for a sequence alone and in any batch: units of 2048 keys, of 32768 where it has more
                 than a tile of 32 rows, and tiles that do not follow from others; a plan is one with
                 ``batch_invariant=True``. Partial results then take room for the keys of a row of the table
    backend      "auto": the emulator for NumPy arrays, the Triton kernels for torch tensors (interpreted on the CPU);
                 on sm_90 Gluon kernels for what they can do: the ring of decode for sequences of up to 32 rows of a KV
                 head, prefill tiles for those of more, both at the same time; "reference" (float64), "emulator",
                 "triton"; "hopper": these kernels (their emulators where the arrays are not on a GPU), ValueError for
                 what both cannot do
    arch         the machine that is emulated: "sm_80", "sm_90", or "gfx950" with D = Dv of 64, 128, 256 or 512
    arithmetic   of the emulator: "float32", or "chip", provisional
    check        look at the values of seq_lens, block_table and cu_seqlens_q, and whether the plan was made of them.
                 None: unless they are on a GPU, which would wait for it
    traffic      a :class:`~kvlab.staging.Traffic` that counts what the emulator moves

    A fixed grid of programs walks a list of units: (sequence, KV head, tile of rows, range of keys), made from the
    lengths where they are. A tile is new tokens times the query heads of a KV head; sequences with more rows than a
    tile of 32 holds are walked after the others, in larger tiles; by Hopper's two kernels at the same time, on as many
    of the processors as each has work for. Tiles that are cut have partial results, merged in the order of the keys:
    the same lengths give the same bits. A row without a key gives 0 and lse -inf (the sink's logit with sinks).
    ValueError on bad arguments, before anything is written. Nothing waits for the GPU (but for a mask of one's own),
    and a captured CUDA graph may be replayed with other lengths, 0 among them.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 5, 16, 1, 64)).astype(np.float32)
    >>> q = rng.standard_normal((6, 2, 64)).astype(np.float32)
    >>> table, lens, starts = np.array([[3, 1], [2, 0], [4, 4]]), np.array([20, 32, 9]), np.array([0, 1, 6, 6])
    >>> step = plan(lens, (starts, 6), q_heads=2, kv_heads=1, head_dim=64, itemsize=4)
    >>> out, lse = attend_paged(q, k, v, table, lens, starts, plan=step, return_lse=True)
    >>> out.shape, lse.shape
    ((6, 2, 64), (6, 2))
    >>> exact = attend_paged(q, k, v, table, lens, starts, backend="reference")
    >>> bool(np.abs(out - exact).max() < 1e-6)
    True
    >>> attend_paged(q, k, v, table, lens + 1, starts, plan=step, check=True)
    Traceback (most recent call last):
        ...
    ValueError: seq_lens[1] is 33: must be 0 to 32, what the 2 columns of block_table hold in pages of 16
    >>> attend_paged(q, k, v, table, lens - 1, starts, plan=step)
    Traceback (most recent call last):
        ...
    ValueError: plan was made of seq_lens[0] 20: must be the call's, 19
    """
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    return AttendPaged(**arrays, cu_seqlens_q=cu_seqlens_q, **options)
