"""FlashInfer's calls over kvlab's operations: wrappers that plan and run, append, merge, cascade.

Names, layouts and meaning are FlashInfer's: page lists ``indptr``, ``indices``, ``last_page_len``; NHD and HND; lse in
base 2, -inf for a row without a key. Optional arguments are given by name. Plans wait for no GPU, unless they have to
lay out a custom mask. What a signature has and kvlab lacks raises NotImplementedError, an argument that is not right
ValueError; both name it. ``backend`` is one of kvlab's own, see :func:`kvlab.attention.mha_decode_paged`.

Workspaces may be None: kvlab takes memory for partial results from torch.
"""

from .cascade import MultiLevelCascadeAttentionWrapper
from .decoding import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache
from .mla import BatchMLAPagedAttentionWrapper
from .pages import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from .prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
)
from .states import merge_state, merge_state_in_place, merge_states

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
]
