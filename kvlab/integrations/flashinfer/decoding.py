"""Decode over page lists: one query a sequence, or a few."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from kvlab.attention import mha_decode_paged
from kvlab.attention.masks import CausalMask
from kvlab.common.checks import count, flag, require
from kvlab.integrations.adapting import in_names

from .pages import PageLists, checked_layout, halves
from .scores import (
    PlanOptions,
    Scores,
    check_planned,
    checked_heads,
    finished,
    lacking,
    page_of,
    plans,
    room_for,
    runs,
    scale_factors,
)

TOKENS = 4
"""Most queries of a sequence."""
NAMES = {"scale": "sm_scale", "softcap": "logits_soft_cap", "k_cache": "paged_kv_cache", "v_cache": "paged_kv_cache",
         "seq_lens": "last_page_len", "block_table": "indices"}


class BatchDecodeWithPagedKVCacheWrapper:
    """Decode of a batch over paged K and V, planned once for the layers of a step.

    float_workspace_buffer  a tensor, whose device the lists are brought to, or None: that of ``indices``
    kv_layout  "NHD": pages ``[page_size, Hkv, D]``; "HND": ``[Hkv, page_size, D]``
    use_cuda_graph  lists of later plans go where those of the first are, so that a captured ``run`` sees them. The
        table of pages has as many columns as ``paged_kv_indices_buffer`` elements, unless plans give ``block_tables``
    use_tensor_cores  accepted: they are used in any case

    >>> kv = torch.zeros(8, 2, 16, 2, 64)
    >>> kv[:, 1] = 7
    >>> wrapper = BatchDecodeWithPagedKVCacheWrapper(None, backend="emulator")
    >>> lists = (torch.tensor(x) for x in ([0, 2, 2, 3], [7, 0, 4], [3, 0, 16]))
    >>> wrapper.plan(*lists, 4, 2, 64, 16, q_data_type="float32", sm_scale=0.0)
    >>> out, lse = wrapper.run(torch.ones(3, 4, 64), kv, return_lse=True)
    >>> out[:, 0, 0].tolist(), lse[:, 0].exp2().round(decimals=3).tolist()
    ([7.0, 0.0, 7.0], [19.0, 0.0, 16.0])
    """

    def __init__(
        self, float_workspace_buffer: Tensor | None, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None, paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: Any = "auto", **others: None,
    ) -> None:
        lacking(("jit_args",), others)
        flag("use_tensor_cores", use_tensor_cores)
        self.kv_layout, self.backend = checked_layout(kv_layout), backend
        device = None if float_workspace_buffer is None else float_workspace_buffer.device
        most = None if paged_kv_indices_buffer is None else int(paged_kv_indices_buffer.shape[0])
        self.lists = PageLists(device, graph=flag("use_cuda_graph", use_cuda_graph), most=most)

    @in_names(**NAMES)
    @plans
    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, block_tables: Tensor | None = None, q_len_per_req: int = 1,
        disable_split_kv: bool = False, data_type: Any = None, **options: Unpack[PlanOptions],
    ) -> None:
        """Take the page lists of a step, and what its calls have in common; waits for no GPU.

        indptr         integers ``[B + 1]``: the pages of sequence b are ``indices[indptr[b] : indptr[b + 1]]``; in CPU
                       memory it tells the longest sequence, on a GPU the table is as wide as all pages are many
        last_page_len  integers ``[B]``: keys in the last page of each, 1 to ``page_size``; 0 where it has no page
        block_tables   integers ``[B, columns]``: the same pages as a table, taken in place of the lists'
        q_len_per_req  new tokens of each sequence, 1 to 4, each sees the keys up to its own
        disable_split_kv  one program for all keys of a sequence
        pos_encoding_mode  "NONE", or "ALIBI" (without lse and soft cap)
        window_left    keys before the query's own that it sees, -1 for all
        logits_soft_cap, sm_scale  as ``softcap`` and ``scale`` of :func:`kvlab.attention.mha_decode_paged`
        q_data_type, kv_data_type, o_data_type  dtypes of torch or their names, float16 and q's by default

        NotImplementedError: rope_scale, rope_theta, fixed_split_size, window_right.
        """
        checked_heads(num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size)
        dtypes: Any = {"q_data_type": "float16" if data_type is None else data_type, "kv_data_type": data_type}
        more = ("fixed_split_size", "window_right")
        self.scores = Scores.of({**dtypes, **options}, causal=True, more=more)
        self.tokens = count("q_len_per_req", q_len_per_req, 1)
        require(self.tokens <= TOKENS, f"q_len_per_req is {self.tokens}", f"1 to {TOKENS}")
        self.shape = int(num_qo_heads), int(head_dim), int(num_kv_heads), int(page_size)
        self.splits = 1 if flag("disable_split_kv", disable_split_kv) else None
        self.lists.hold(indptr, indices, last_page_len, page_size, None, block_tables)

    begin_forward = plan

    @in_names(**NAMES)
    @runs
    def run(
        self, q: Tensor, paged_kv_cache: Any, *, q_scale: Any = None, k_scale: Any = None, v_scale: Any = None,
        out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = False, window_left: int | None = None,
        sinks: Tensor | None = None, **others: Any,
    ) -> Any:
        """Attention of q ``[B * q_len_per_req, Hq, D]``: out of its shape, or ``(out, lse)`` with lse ``[.., Hq]``.

        paged_kv_cache  ``(k_cache, v_cache)``, or one tensor ``[pages, 2, ..]``
        q_scale, k_scale, v_scale  None or numbers, for all dtypes; tensors for float8_e4m3fn, as kvlab takes them
        window_left    None, or that of the plan
        sinks          float32 ``[Hq]``: a logit of each head that counts as a key without a value

        NotImplementedError: enable_pdl, kv_cache_sf, skip_softmax_threshold_scale_factor.
        """
        lacking(("enable_pdl", "kv_cache_sf", "skip_softmax_threshold_scale_factor"), others)
        caches, (heads, head_dim, kv_heads, page_size) = halves(paged_kv_cache), self.shape
        self.scores.check_dtypes(q=q, paged_kv_cache=caches[0])
        check_planned(q, heads, head_dim)
        found = page_of(caches, self.kv_layout)
        require(found == (page_size, kv_heads), f"paged_kv_cache has pages of {found[0]} tokens and {found[1]} heads",
                f"as planned, of {page_size} and {kv_heads}")
        batch, left = int(self.lists.lens.shape[0]), self.scores.left
        require(q.shape[0] == batch * self.tokens, f"q has {q.shape[0]} tokens", f"{batch} sequences x {self.tokens}")
        planned = -1 if left is None else left
        require(window_left in (None, planned), f"window_left is {window_left}", f"None or the plan's, {planned}")
        scale = head_dim**-0.5 if self.scores.scale is None else self.scores.scale
        scales, factor = scale_factors(scale, q, *caches, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        into = room_for(out, self.scores.o_dtype, (*q.shape[:-1], int(caches[1].shape[-1])), q, lse,
                        return_lse)
        by_sequence = (batch, self.tokens)
        options = self.scores.options(
            q, return_lse, mask=CausalMask(), window=None if left is None else (left, None), sinks=sinks,
            num_splits=self.splits, kv_layout=self.kv_layout, backend=self.backend,
            out=None if into is None else into.view(*by_sequence, *into.shape[1:]), **scales,
        )
        result, own = mha_decode_paged(
            q.view(*by_sequence, *q.shape[1:]), *caches, self.lists.table, self.lists.lens, **options
        )
        return finished((result.flatten(0, 1) if into is None else into, own.flatten(0, 1)), factor, lse, return_lse)

    def run_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """``run`` with ``return_lse=True``."""
        return self.run(*args, **kwargs, return_lse=True)


@in_names(scale="sm_scale", softcap="logits_soft_cap", k_cache="k", v_cache="v")
def single_decode_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, kv_layout: str = "NHD", *, q_scale: Any = None, k_scale: Any = None,
    v_scale: Any = None, return_lse: bool = False, use_tensor_cores: bool = False, backend: Any = "auto",
    **options: Unpack[PlanOptions],
) -> Any:
    """Attention of one query ``[Hq, D]`` to k and v ``[n, Hkv, D]`` (HND: ``[Hkv, n, D]``): out ``[Hq, D]``, or
    ``(out, lse)`` with lse ``[Hq]``.

    The options: as for the wrapper's ``plan`` and ``run``.

    >>> q, k = torch.ones(4, 64), torch.ones(5, 2, 64)
    >>> out, lse = single_decode_with_kv_cache(q, k, k, sm_scale=0.0, return_lse=True, backend="emulator")
    >>> out.shape, round(lse[0].exp2().item(), 3)
    (torch.Size([4, 64]), 5.0)
    """
    flag("use_tensor_cores", use_tensor_cores)
    scores = Scores.of(options, causal=True)
    scores.check_dtypes(q=q, k=k)
    require(q.ndim == 2, f"q has shape {tuple(q.shape)}", "[Hq, D]")
    for name, array in (("k", k), ("v", v)):
        require(array.ndim == 3, f"{name} has shape {tuple(array.shape)}", "[n, Hkv, D], or with HND [Hkv, n, D]")
    keys = int(k.shape[0 if checked_layout(kv_layout) == "NHD" else 1])
    scales, factor = scale_factors(q.shape[-1] ** -0.5 if scores.scale is None else scores.scale, q, k, v,
                                   q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    table = torch.zeros(1, 1, dtype=torch.int32, device=q.device)
    into = room_for(None, scores.o_dtype, (1, int(q.shape[0]), int(v.shape[-1])), q)
    options_ = scores.options(q, return_lse, window=None if scores.left is None else (scores.left, None), out=into,
                              mask=CausalMask(), kv_layout=kv_layout, backend=backend, **scales)
    found = mha_decode_paged(q[None], k[None], v[None], table, torch.full_like(table[0], keys), **options_)
    return finished((found[0][0], found[1][0]), factor, None, return_lse)
