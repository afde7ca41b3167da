"""Prefill over page lists and over ragged keys, with masks of one's own."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from kvlab.attention import mha_prefill, mha_prefill_paged
from kvlab.attention.masks import Mask, MaterializedMask
from kvlab.common.checks import count, flag, is_integer, require, shown
from kvlab.integrations.adapting import checked_tensors, in_names, in_sight, lacks, sight

from .pages import PageLists, checked_layout, halves
from .scores import (
    PlanOptions,
    PrefillPlanOptions,
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

MORE = ("use_fp16_qk_reduction", "fixed_split_size", "prefix_len_ptr", "token_pos_in_items_ptr",
        "token_pos_in_items_len", "max_item_len_ptr")
RUN = ("enable_pdl", "kv_cache_sf", "skip_softmax_threshold_scale_factor", "use_fp16_softmax", "uses_spcompress")
PLAN = PlanOptions.__annotations__
NAMES = {"scale": "sm_scale", "softcap": "logits_soft_cap", "cu_seqlens_q": "qo_indptr"}
PAGED = NAMES | {"k_cache": "paged_kv_cache", "v_cache": "paged_kv_cache", "seq_lens": "paged_kv_last_page_len",
                 "block_table": "paged_kv_indices", "indptr": "paged_kv_indptr", "indices": "paged_kv_indices",
                 "last_page_len": "paged_kv_last_page_len"}


class _Prefill:
    """Parts that plans of paged and of ragged keys share."""

    def __init__(self, workspace: Tensor | None, kv_layout: str, use_cuda_graph: bool, backend: Any) -> None:
        self.kv_layout, self.backend = checked_layout(kv_layout), backend
        self.device = None if workspace is None else workspace.device
        self.graph = flag("use_cuda_graph", use_cuda_graph)

    def hold(self, starts: Tensor, heads: tuple[int, int, int], options: Any, more: tuple[str, ...]) -> None:
        """Take where sequences start in q, and what calls have in common. ``more``: names of ``LACKING`` that the
        caller's signature has.
        """
        taken = {n: v for n, v in options.items() if n not in PrefillPlanOptions.__annotations__ or n in PLAN}
        self.masks = options.get("custom_mask"), options.get("packed_custom_mask")
        masked = any(mask is not None for mask in self.masks)
        checked_tensors(qo_indptr=starts, custom_mask=self.masks[0], packed_custom_mask=self.masks[1])
        checked_heads(num_qo_heads=heads[0], head_dim_qk=heads[1], num_kv_heads=heads[2])
        flag("disable_split_kv", options.get("disable_split_kv", False))  # no prefill splits
        self.heads, self.causal = heads, flag("causal", options.get("causal", False))
        self.scores = Scores.of({"q_data_type": "float16", **taken}, causal=self.causal and not masked, more=more)
        self.value_dim = heads[1] if options.get("head_dim_vo") is None else options["head_dim_vo"]
        longest = options.get("max_token_per_sequence")
        if longest is None and not self.graph and in_sight(starts):
            longest = int(starts.long().diff().max()) if starts.shape[0] > 1 else 0
        self.longest = None if longest is None else count("max_token_per_sequence", longest)
        self.starts = self.kept("starts", starts.to(self.device or starts.device, non_blocking=True))
        if masked and self.graph:
            lacks("a mask is laid out by the lengths of its plan; without a graph it may be given", False,
                  use_cuda_graph=True)

    def lay_out(self, keys: Tensor) -> None:
        """Lay out the mask of one's own, where there is one, over sequences of so many ``keys``."""
        masked = any(mask is not None for mask in self.masks)
        self.mask: Mask | None = mask_of(*self.masks, self.starts, keys) if masked else None

    def kept(self, name: str, new: Tensor) -> Tensor:
        """``new``, where that of the first plan lies if a CUDA graph may have captured it."""
        old: Tensor | None = getattr(self, name, None)
        if not self.graph or old is None:
            return new.clone() if self.graph else new
        same = old.shape == new.shape
        require(same, f"qo_indptr has shape {tuple(new.shape)}", f"that of the first plan, {tuple(old.shape)}")
        return old.copy_(new)

    def attend(self, operation: Any, arrays: tuple[Any, ...], v: Tensor, **given: Any) -> Any:
        """Call an operation over q and keys ``arrays``; ``given``: keywords of ``run`` and of the operation."""
        q, k, scores = arrays[0], arrays[1], self.scores
        check_planned(q, *self.heads[:2])
        left = given.pop("window_left", None)
        number = left is None or is_integer(left)
        require(number, f"window_left is {shown(left)}", "None, or a number of keys, -1 for no bound")
        left = scores.left if left is None else None if left < 0 else left
        scale = self.heads[1] ** -0.5 if scores.scale is None else scores.scale
        by = {name: given.pop(name) for name in ("q_scale", "k_scale", "v_scale")}
        scales, factor = scale_factors(scale, q, k, v, **by)
        lse, return_lse = given.pop("lse"), given.pop("return_lse")
        shape = (*(int(n) for n in q.shape[:-1]), int(v.shape[-1]))
        into = room_for(given.pop("out"), scores.o_dtype, shape, q, lse, return_lse)
        window = left, None
        seen = sight(self.causal, window) if self.mask is None else {"mask": self.mask, "window": window}
        options = scores.options(q, return_lse, out=into, max_seqlen_q=self.longest, backend=self.backend, **seen,
                                 **scales, **given)
        return finished(operation(*arrays, **options), factor, lse, return_lse)


class BatchPrefillWithPagedKVCacheWrapper(_Prefill):
    """Prefill of a batch over paged K and V that already hold the new tokens.

    The arguments are those of the decode wrapper, with FlashInfer's names; with ``use_cuda_graph`` the table of pages
    has as many columns as ``paged_kv_indices_buf`` elements, unless plans give ``max_sequence_kv``.

    >>> cache = torch.ones(4, 2, 16, 2, 64)
    >>> wrapper = BatchPrefillWithPagedKVCacheWrapper(None, backend="emulator")
    >>> lists = (torch.tensor(x) for x in ([0, 3, 3], [0, 2, 2], [3, 1], [4, 0]))
    >>> wrapper.plan(*lists, 4, 2, 64, 16, causal=True, sm_scale=0.0, q_data_type=torch.float32)
    >>> out, lse = wrapper.run(torch.ones(3, 4, 64), cache, return_lse=True)
    >>> out[:, 0, 0].tolist(), lse[:, 0].exp2().round(decimals=3).tolist()
    ([1.0, 1.0, 1.0], [18.0, 19.0, 20.0])
    """

    def __init__(
        self, float_workspace_buffer: Tensor | None, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None, paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None, paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None, mask_indptr_buf: Tensor | None = None, backend: Any = "auto",
        **others: None,
    ) -> None:
        lacking(("jit_args", "jit_kwargs"), others)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        most = None if paged_kv_indices_buf is None else int(paged_kv_indices_buf.shape[0])
        self.lists = PageLists(self.device, graph=self.graph, most=most)

    @in_names(**PAGED)
    @plans
    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, **options: Unpack[PrefillPlanOptions],
    ) -> None:
        """Take the page lists of a step, and what its calls have in common; waits for no GPU but for a custom mask.

        qo_indptr     integers ``[B + 1]``: where the new tokens of each sequence start in q, and the total
        paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len  as those of the decode wrapper's plan
        custom_mask   bool: of each sequence ``[new tokens, keys]``, flattened, one after the other; False masks. It
                      tells alone, but for the window, what a query sees
        packed_custom_mask  the same as uint8, eight to a byte, the lowest bit first; a sequence begins with a byte
        causal        query i of S sees the keys up to ``i + n - S``
        max_token_per_sequence, max_sequence_kv  most new tokens and keys of a sequence: smaller grids and tables where
                      the lists are on a GPU

        head_dim_vo   columns of V, head_dim_qk if None

        The rest: as for the decode wrapper. NotImplementedError, besides: use_fp16_qk_reduction, prefix_len_ptr,
        token_pos_in_items_ptr, max_item_len_ptr, custom masks with use_cuda_graph.
        """
        self.page_size = page_size
        self.hold(qo_indptr, (num_qo_heads, head_dim_qk, num_kv_heads), options, MORE)
        lists = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self.lists.hold(*lists, page_size, options.get("max_sequence_kv"))
        shapes = tuple(paged_kv_indptr.shape), tuple(qo_indptr.shape)
        require(shapes[0] == shapes[1], f"paged_kv_indptr has shape {shapes[0]}", f"that of qo_indptr, {shapes[1]}")
        self.lay_out(self.lists.lens)

    begin_forward = plan

    @in_names(**PAGED)
    @runs
    def run(
        self, q: Tensor, paged_kv_cache: Any, *, q_scale: Any = None, k_scale: Any = None, v_scale: Any = None,
        out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = False, window_left: int | None = None,
        sinks: Tensor | None = None, **others: Any,
    ) -> Any:
        """Attention of q ``[total, Hq, D]``: out ``[total, Hq, Dv]``, or ``(out, lse)`` with lse ``[total, Hq]``.

        window_left  None: that of the plan

        The rest: as for the decode wrapper's ``run``.
        """
        lacking(RUN, others)
        caches, kv_heads = halves(paged_kv_cache), self.heads[2]
        self.scores.check_dtypes(q=q, paged_kv_cache=caches[0])
        found = (*page_of(caches, self.kv_layout), int(caches[1].shape[-1]))
        require(found == (self.page_size, kv_heads, self.value_dim),
                "paged_kv_cache has pages of {} tokens, {} heads and {} columns of V".format(*found),
                f"as planned, {self.page_size}, {kv_heads} and {self.value_dim}")
        return self.attend(
            mha_prefill_paged, (q, *caches, self.lists.table, self.lists.lens, self.starts), caches[1],
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=return_lse,
            window_left=window_left, sinks=sinks, kv_layout=self.kv_layout,
        )

    def run_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """``run`` with ``return_lse=True``."""
        return self.run(*args, **kwargs, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(_Prefill):
    """Prefill of a batch over keys of sequences one after the other.

    The arguments are those of the paged wrapper.

    >>> q, k = torch.ones(3, 4, 64), torch.ones(5, 2, 64)
    >>> wrapper = BatchPrefillWithRaggedKVCacheWrapper(None, backend="emulator")
    >>> wrapper.plan(torch.tensor([0, 1, 3]), torch.tensor([0, 2, 5]), 4, 2, 64, causal=True, sm_scale=0.0,
    ...              q_data_type="float32")
    >>> wrapper.run(q, k, k, return_lse=True)[1][:, 0].exp2().round(decimals=3).tolist()
    [2.0, 2.0, 3.0]
    """

    def __init__(
        self, float_workspace_buffer: Tensor | None, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None, kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None, mask_indptr_buf: Tensor | None = None, backend: Any = "auto",
        **others: None,
    ) -> None:
        lacking(("jit_args", "jit_kwargs"), others)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)

    @in_names(**NAMES, cu_seqlens_k="kv_indptr")
    @plans
    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        **options: Unpack[PrefillPlanOptions],
    ) -> None:
        """Take where sequences start in q (``qo_indptr``) and in k and v (``kv_indptr``), integers ``[B + 1]``, and
        what calls have in common. The rest: as for the paged wrapper.
        """
        self.hold(qo_indptr, (num_qo_heads, head_dim_qk, num_kv_heads), options, (*MORE, "v_indptr", "o_indptr"))
        checked_tensors(kv_indptr=kv_indptr)
        self.key_starts = self.kept("key_starts", kv_indptr.to(self.starts.device, non_blocking=True))
        self.lay_out(self.key_starts.diff())

    begin_forward = plan

    @in_names(**NAMES, cu_seqlens_k="kv_indptr")
    @runs
    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, q_scale: Any = None, k_scale: Any = None, v_scale: Any = None,
        out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = False, **others: Any,
    ) -> Any:
        """Attention of q ``[total, Hq, D]`` to k ``[total_k, Hkv, D]`` and v ``[total_k, Hkv, Dv]`` (HND: heads first):
        out ``[total, Hq, Dv]``, or ``(out, lse)`` with lse ``[total, Hq]``.
        """
        lacking(("enable_pdl", "kv_cache_sf", "o_scale"), others)
        self.scores.check_dtypes(q=q, k=k, v=v)
        if self.kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        return self.attend(
            mha_prefill, (q, k, v), v, cu_seqlens_q=self.starts, cu_seqlens_k=self.key_starts, q_scale=q_scale,
            k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=return_lse,
        )

    def run_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """``run`` with ``return_lse=True``."""
        return self.run(*args, **kwargs, return_lse=True)


@in_names(scale="sm_scale", softcap="logits_soft_cap", q_scale="scale_q")
def single_prefill_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, *, scale_q: Tensor | None = None, scale_k: Tensor | None = None,
    scale_v: Tensor | None = None, o_dtype: Any = None, kv_layout: str = "NHD", k_scale: Any = None,
    v_scale: Any = None, return_lse: bool = False, backend: Any = "auto", **options: Unpack[PrefillPlanOptions],
) -> Any:
    """Attention of q ``[S, Hq, D]`` to k ``[n, Hkv, D]`` and v ``[n, Hkv, Dv]`` (HND: heads first): out
    ``[S, Hq, Dv]``, or ``(out, lse)`` with lse ``[S, Hq]``.

    scale_q, scale_k, scale_v  float32 of each head of float8_e4m3fn arrays; scale_q where q has as many heads as k
    custom_mask   bool ``[S, n]``, or ``packed_custom_mask``, its bits in uint8, the lowest first

    The rest: as for the wrappers' ``plan`` and ``run``.

    >>> q, k = torch.ones(2, 4, 64), torch.ones(5, 2, 64)
    >>> out, lse = single_prefill_with_kv_cache(
    ...     q, k, k, causal=True, sm_scale=0.0, return_lse=True, backend="emulator")
    >>> lse[:, 0].exp2().round(decimals=3).tolist()
    [4.0, 5.0]
    """
    checked_tensors("q k v", q=q, k=k, v=v, custom_mask=options.get("custom_mask"))
    for name, array in (("q", q), ("k", k), ("v", v)):
        require(array.ndim == 3, f"{name} has shape {tuple(array.shape)}", "of three axes, tokens, heads and columns")
    if checked_layout(kv_layout) == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    if scale_q is not None and q.shape[1] != k.shape[1]:
        lacks("the query heads of a group share a scale", scale_q=scale_q)
    for name, one, other in (("k", scale_k, k_scale), ("v", scale_v, v_scale)):
        require(one is None or other is None, f"scale_{name} and {name}_scale are given", "one of them")
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(None, backend=backend)
    ends, ends_k = (torch.tensor([0, int(x.shape[0])], dtype=torch.int32) for x in (q, k))
    wrapper.device = q.device
    mask, (_, heads, D), kv_heads = options.get("custom_mask"), q.shape, int(k.shape[1])
    given: Any = {**options, "head_dim_vo": int(v.shape[2]), "custom_mask": None if mask is None else mask.flatten(),
                  "q_data_type": q.dtype, "kv_data_type": k.dtype, "o_data_type": o_dtype}
    wrapper.plan(ends, ends_k, int(heads), kv_heads, int(D), **given)
    return wrapper.run(q, k, v, q_scale=scale_q, k_scale=k_scale if scale_k is None else scale_k,
                       v_scale=v_scale if scale_v is None else scale_v, return_lse=return_lse)


def mask_of(mask: Tensor | None, packed: Tensor | None, starts: Tensor, keys: Tensor) -> MaterializedMask:
    """The masks of sequences, flattened one after the other, as one array ``[B, 1, S, n]``. It waits for a GPU on which
    they lie, as the lengths tell where each begins.

    >>> flat = torch.tensor([True, False, True, True, True, False])
    >>> mask_of(flat, None, torch.tensor([0, 1, 3]), torch.tensor([2, 2])).array[:, 0].int().tolist()
    [[[1, 0], [0, 0]], [[1, 1], [1, 0]]]
    """
    new, lens = starts.diff().tolist(), keys.tolist()
    sizes = [n * m for n, m in zip(new, lens, strict=True)]
    if packed is not None:
        require(packed.dtype == torch.uint8, f"packed_custom_mask has dtype {packed.dtype}", "uint8")
        bits = (packed[:, None] >> torch.arange(8, device=packed.device, dtype=torch.uint8)) & 1
        flat, spans, name = bits.flatten().bool(), [-(-size // 8) * 8 for size in sizes], "packed_custom_mask"
    else:
        require(mask is not None and mask.dtype == torch.bool, "custom_mask is not bool", "bool, False where it masks")
        flat, spans, name = mask, sizes, "custom_mask"
    have, want = int(flat.shape[0]), sum(spans)
    require(have == want, f"{name} tells of {have} pairs", f"of {want}, new tokens times keys of each sequence")
    array = torch.zeros(len(new), 1, max(new, default=0), max(lens, default=0), dtype=torch.bool, device=starts.device)
    first = 0
    for b, (n, m, span) in enumerate(zip(new, lens, spans, strict=True)):
        array[b, 0, :n, :m] = flat[first : first + n * m].view(n, m).to(array.device)
        first += span
    return MaterializedMask(array)
