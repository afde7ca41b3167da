"""Absorbed MLA over page lists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvlab.attention import mla_decode_paged
from kvlab.attention.features.scales import is_fp8
from kvlab.attention.masks import CausalMask, Mask, NullMask
from kvlab.common.arrays import element_strides
from kvlab.common.checks import flag, require
from kvlab.integrations.adapting import checked_integers, checked_tensors, in_names, in_sight, lacks

from .pages import PageLists, check_lists, table_of_lists
from .scores import checked_heads, dtype_of, finished, lacking, plans, room_for, runs

NAMES = {"scale": "sm_scale", "kv_cache": "ckv_cache", "seq_lens": "kv_len_arr", "block_table": "kv_indices",
         "indptr": "kv_indptr", "indices": "kv_indices", "k_scale": "ckv_scale"}


class BatchMLAPagedAttentionWrapper:
    """Absorbed MLA of a batch over pages of latent rows, planned once for the layers of a step.

    float_workspace_buffer  a tensor, whose device the lists are brought to, or None: that of ``kv_indices``
    use_cuda_graph  lists of later plans go where those of the first are. The table of pages has as many columns as
        ``kv_indices`` given here has elements
    qo_indptr, kv_indptr, kv_indices, kv_len_arr  buffers, of which kvlab needs the size of ``kv_indices`` alone

    >>> rows = torch.zeros(4, 16, 160)  # pages of 128 latent columns and 32 of rope
    >>> rows[3, :, :128] = 7
    >>> wrapper = BatchMLAPagedAttentionWrapper(None, backend="emulator")
    >>> lists = (torch.tensor(x) for x in ([0, 1], [0, 1], [3], [12]))
    >>> wrapper.plan(*lists, 2, 128, 32, 16, False, 0.0, torch.float32, torch.float32)
    >>> q = torch.ones(1, 2, 160)
    >>> out, lse = wrapper.run(q[..., :128], q[..., 128:], rows[..., :128], rows[..., 128:], return_lse=True)
    >>> out[0, 0, 0].item(), round(lse[0, 0].exp2().item(), 3)
    (7.0, 12.0)
    """

    def __init__(
        self, float_workspace_buffer: Tensor | None, use_cuda_graph: bool = False, qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None, kv_indices: Tensor | None = None, kv_len_arr: Tensor | None = None,
        backend: Any = "auto",
    ) -> None:
        device = None if float_workspace_buffer is None else float_workspace_buffer.device
        most = None if kv_indices is None else int(kv_indices.shape[0])
        self.lists = PageLists(device, graph=flag("use_cuda_graph", use_cuda_graph), most=most)
        self.backend = backend

    @in_names(**NAMES)
    @plans
    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor, num_heads: int,
        head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float, q_data_type: Any,
        kv_data_type: Any, **others: Any,
    ) -> None:
        """Take the page lists of a step, and what its calls have in common.

        qo_indptr     integers ``[B + 1]``: where the new tokens of each sequence start, as many of each, 1 to 16. They
                      are looked at, which waits for a GPU if they lie there
        kv_indptr, kv_indices  the pages of each sequence
        kv_len_arr    integers ``[B]``: its keys, the new ones among them
        sm_scale      of the scores; it belongs to the heads before absorption

        NotImplementedError: sequences of different numbers of new tokens, use_profiler.
        """
        lacking(("use_profiler",), others)
        checked_tensors(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)
        checked_heads(num_heads=num_heads, head_dim_ckv=head_dim_ckv, head_dim_kpe=head_dim_kpe, page_size=page_size)
        new = set(qo_indptr.diff().tolist())
        if len(new) > 1:
            why = "the same for all sequences; kvlab.attention.mla_prefill_paged takes any, not absorbed"
            raise NotImplementedError(f"qo_indptr has sequences of {sorted(new)} new tokens: must be {why}")
        starts = tuple(kv_indptr.shape)
        checked_integers(starts, f"{starts}, that of kv_indptr", qo_indptr=qo_indptr)
        first = int(qo_indptr[0]) if len(qo_indptr) else 0
        require(first == 0, f"qo_indptr[0] is {first}", "0, where q begins")
        self.tokens = new.pop() if new else 1
        self.causal, self.scale, self.page_size = flag("causal", causal), sm_scale, page_size
        self.shape = num_heads, head_dim_ckv, head_dim_kpe
        self.q_dtype, self.kv_dtype = dtype_of("q_data_type", q_data_type), dtype_of("kv_data_type", kv_data_type)
        held = torch.div(kv_len_arr - 1, page_size, rounding_mode="floor")
        last = torch.where(kv_len_arr > 0, kv_len_arr - held * page_size, 0)
        if in_sight(kv_indptr, kv_indices, kv_len_arr):
            most = kv_indptr.long().diff() * page_size
            bad = (kv_len_arr < 0) | (kv_len_arr > most)
            if bad.any():
                b = int(bad.int().argmax())
                require(False, f"kv_len_arr[{b}] is {int(kv_len_arr[b])}", f"0 to {int(most[b])}, what its pages hold")
            none = kv_indptr.long().diff() == 0
            check_lists(kv_indptr, kv_indices, torch.where(none, 0, last.clamp(min=1)), page_size)
        lists, columns = self.lists, self.lists.columns(kv_indptr, kv_indices, page_size, None)
        device = lists.device or kv_indices.device
        kv_indptr, kv_indices, last = (x.to(device, non_blocking=True) for x in (kv_indptr, kv_indices, last))
        table, _ = table_of_lists(kv_indptr, kv_indices, last, page_size, columns)
        lists.set(table, kv_len_arr.to(device, non_blocking=True))

    @in_names(**NAMES, q="q_nope")
    @runs
    def run(
        self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, out: Tensor | None = None,
        lse: Tensor | None = None, return_lse: bool = False, *, return_lse_base_on_e: bool = False,
        ckv_scale: float | None = None, kpe_scale: float | None = None, **others: Any,
    ) -> Any:
        """Attention of the absorbed queries ``[tokens, H, ckv]`` and their rope parts ``[tokens, H, kpe]``: out
        ``[tokens, H, ckv]``, or ``(out, lse)`` with lse ``[tokens, H]``, base 2, or e with ``return_lse_base_on_e``.

        ckv_cache, kpe_cache  ``[pages, page_size, ckv]`` and ``[.., kpe]``: the columns of one cache of rows, next to
                   each other in memory
        ckv_scale, kpe_scale  of float8_e4m3fn rows: numbers, the same

        NotImplementedError: caches that lie apart, scales that differ, ckv_scale_arr, profiler_buffer, o_scale; kv_len
        and page_table, which plans know.
        """
        known = others.pop("kv_len", None), others.pop("page_table", None)
        lacks("plans know the lengths and the pages", kv_len=known[0], page_table=known[1])
        lacking(("ckv_scale_arr", "profiler_buffer", "o_scale"), others)
        given = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache}
        checked_tensors(**given)
        heads, ckv, kpe = self.shape
        widths = {"q_nope": ckv, "q_pe": kpe, "ckv_cache": ckv, "kpe_cache": kpe}
        for name, array in given.items():
            planned = self.q_dtype if name.startswith("q") else self.kv_dtype
            require(array.dtype == planned, f"{name} has dtype {array.dtype}", f"as planned, {planned}")
            middle = heads if name.startswith("q") else self.page_size
            fits = array.ndim == 3 and tuple(array.shape[1:]) == (middle, widths[name])
            require(fits, f"{name} has shape {tuple(array.shape)}", f"[.., {middle}, {widths[name]}], as planned")
        rows = joined(ckv_cache, kpe_cache)
        if rows is None:
            raise NotImplementedError(
                "ckv_cache and kpe_cache lie apart: must be the columns of one cache, cache[..., :ckv] and "
                "cache[..., ckv:]; kvlab reads a row as one"
            )
        scales: dict[str, Any] = {"k_scale": ckv_scale} if is_fp8(ckv_cache) else {}
        if not scales:
            lacks("rows that are not float8_e4m3fn have no scale", ckv_scale=ckv_scale, kpe_scale=kpe_scale)
        elif ckv_scale != kpe_scale:
            raise NotImplementedError(f"kpe_scale is {kpe_scale}: must be ckv_scale, {ckv_scale}; a row has one")
        joint = joined(q_nope, q_pe)
        q = torch.cat((q_nope, q_pe), -1) if joint is None else joint
        batch = int(self.lists.lens.shape[0])
        fits = q.shape[0] == batch * self.tokens
        require(fits, f"q_nope has {q.shape[0]} tokens", f"{batch} sequences x {self.tokens}, as planned")
        mask: Mask = CausalMask() if self.causal else NullMask()
        by_sequence = (batch, self.tokens, heads)
        into = room_for(out, None, tuple(q_nope.shape), q_nope, lse, return_lse)
        result, own = mla_decode_paged(
            q.reshape(*by_sequence, ckv + kpe), rows, self.lists.table, self.lists.lens, v_dim=ckv, scale=self.scale,
            mask=mask, return_lse=True, base2=not flag("return_lse_base_on_e", return_lse_base_on_e),
            out=None if into is None else into.view(*by_sequence, ckv), backend=self.backend, **scales,
        )
        return finished((result.flatten(0, 1) if into is None else into, own.flatten(0, 1)), None, lse, return_lse)


def joined(left: Tensor, right: Tensor) -> Tensor | None:
    """One view of both, whose columns lie next to each other in the same rows of one allocation; None if they do not.

    >>> x = torch.arange(12).view(2, 6)
    >>> joined(x[:, :4], x[:, 4:]).tolist() == x.tolist(), joined(x[:, :3], x[:, 4:])
    (True, None)
    """
    strides = element_strides(left)
    same = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr() and left.dtype == right.dtype
    near = left.storage_offset() + left.shape[-1] == right.storage_offset()
    alike = left.shape[:-1] == right.shape[:-1] and left.stride()[:-1] == right.stride()[:-1]
    rows = alike and left.stride(-1) == right.stride(-1) == 1
    if not (same and near and rows):
        return None
    return left.as_strided((*left.shape[:-1], left.shape[-1] + right.shape[-1]), strides)
