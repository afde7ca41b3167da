"""Cascade: attention to pages that many sequences share, level by level, and to their own."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from kvlab.common.checks import count, require
from kvlab.integrations.adapting import lacks

from .prefill import BatchPrefillWithPagedKVCacheWrapper
from .scores import PlanOptions, plans, runs
from .states import merge_states


class MultiLevelCascadeAttentionWrapper:
    """Attention to keys that lie in page lists of ``num_levels`` levels: a level's sequence is a group of queries.

    The other arguments: lists of those of the paged prefill wrapper, one of each level.

    >>> wrapper = MultiLevelCascadeAttentionWrapper(2, None, backend="emulator")
    >>> lists = [[torch.tensor(x) for x in both] for both in (
    ...     ([0, 2], [0, 1, 2]), ([0, 1], [0, 1, 2]), ([3], [0, 2]), ([16], [4, 16]))]
    >>> wrapper.plan(*lists, 2, 1, 64, 16, q_data_type="float32", sm_scale=0.0)
    >>> cache = torch.zeros(4, 2, 16, 1, 64)
    >>> cache[3, 1] = 20
    >>> wrapper.run(torch.ones(2, 2, 64), cache)[:, 0, 0].round(decimals=3).tolist()
    [16.0, 10.0]
    """

    def __init__(
        self, num_levels: int, float_workspace_buffer: Tensor | None, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf_arr: Any = None, paged_kv_indptr_buf_arr: Any = None,
        paged_kv_indices_buf_arr: Any = None, paged_kv_last_page_len_buf_arr: Any = None, *, backend: Any = "auto",
    ) -> None:
        levels = count("num_levels", num_levels, 1)
        buffers = paged_kv_indices_buf_arr or [None] * levels
        require(len(buffers) == levels, f"paged_kv_indices_buf_arr has {len(buffers)} levels", f"{levels}")
        self.levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph,
                                                paged_kv_indices_buf=buffer, backend=backend) for buffer in buffers
        ]
        self.backend = backend

    @plans
    def plan(
        self, qo_indptr_arr: list[Tensor], paged_kv_indptr_arr: list[Tensor], paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor], num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        causal: bool = False, **options: Unpack[PlanOptions],
    ) -> None:
        """Take the lists of each level; ``causal`` goes for the last. The rest: as for the paged prefill wrapper.

        NotImplementedError, besides: window_left, as the levels' keys have no positions in common.
        """
        given = {"qo_indptr_arr": qo_indptr_arr, "paged_kv_indptr_arr": paged_kv_indptr_arr,
                 "paged_kv_indices_arr": paged_kv_indices_arr, "paged_kv_last_page_len": paged_kv_last_page_len}
        lacks("the levels' keys have no positions in common", -1, window_left=options.get("window_left", -1))
        levels = len(self.levels)
        for name, arrays in given.items():
            require(len(arrays) == levels, f"{name} has {len(arrays)} levels", f"num_levels, {levels}")
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        for level, (wrapper, *lists) in enumerate(zip(self.levels, *given.values(), strict=True)):
            wrapper.plan(*lists, *sizes, causal=causal and level == levels - 1, **options)

    begin_forward = plan

    @runs
    def run(self, q: Tensor, paged_kv_cache: Any) -> Tensor:
        """Attention of q ``[total, Hq, D]`` to the keys of all levels: out of its shape."""
        states = [wrapper.run(q, paged_kv_cache, return_lse=True) for wrapper in self.levels]
        outs, lses = (torch.stack(parts, 1) for parts in zip(*states, strict=True))
        return merge_states(outs, lses, backend=self.backend)[0] if len(states) > 1 else states[0][0]
