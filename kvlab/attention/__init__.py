"""Attention operations, each as reference, emulator and kernel.

The functions have the names of the folders that hold them: ``kvlab.attention.mha_decode`` is the function, and the
folder's modules are reached with ``from kvlab.attention.mha_decode import emulator``.
"""

from .explain import Explanation, explain
from .merge_states import merge_states
from .mha_decode import mha_decode, mha_decode_paged

__all__ = ["Explanation", "explain", "merge_states", "mha_decode", "mha_decode_paged"]
