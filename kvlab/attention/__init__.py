"""Attention operations, each as reference, emulator and kernel.

The functions have the names of the folders that hold them: ``kvlab.attention.mha_decode`` is the function, and through
it the folder's modules are reached: ``import kvlab.attention.mha_decode.emulator``, then
``kvlab.attention.mha_decode.emulator``, or ``from kvlab.attention.mha_decode import emulator``.

With ``backend="auto"`` NumPy arrays go to the emulator, tensors on a GPU to a compiled kernel, tensors in CPU memory to
Triton's interpreter, or, where there is no Triton (macOS, Windows), to the emulator.
"""

import importlib
import os

from .attend_paged import attend_paged, plan
from .call.explain import Explanation, explain
from .features.rope import Rope
from .kv_store import kv_store, kv_store_paged, mla_store_paged
from .merge_states import merge_states
from .mha_decode import mha_decode, mha_decode_paged
from .mha_decode_streaming import mha_decode_streaming, mha_decode_streaming_paged
from .mha_prefill import mha_prefill, mha_prefill_cache, mha_prefill_paged
from .mla_decode import mla_decode, mla_decode_paged
from .mla_prefill import mla_prefill, mla_prefill_paged, mla_prefill_ragged
from .schedule import Schedule

__all__ = [
    "Explanation",
    "Rope",
    "Schedule",
    "attend_paged",
    "explain",
    "kv_store",
    "kv_store_paged",
    "merge_states",
    "mha_decode",
    "mha_decode_paged",
    "mha_decode_streaming",
    "mha_decode_streaming_paged",
    "mha_prefill",
    "mha_prefill_cache",
    "mha_prefill_paged",
    "mla_decode",
    "mla_decode_paged",
    "mla_prefill",
    "mla_prefill_paged",
    "mla_prefill_ragged",
    "mla_store_paged",
    "plan",
]

if os.environ.get("KVLAB_RECORD"):
    importlib.import_module("kvlab.replay.recorder").record_process()
