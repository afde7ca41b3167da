"""torch, for those who have imported it already; nothing here imports it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def torch_here() -> Any:
    """torch where it has been imported to its end, None before: another thread may be in the middle of it."""
    torch = sys.modules.get("torch")
    return None if torch is None or getattr(torch.__spec__, "_initializing", False) else torch


def is_torch(array: Any) -> bool:
    """Tells whether ``array`` is a torch tensor. Nobody who has one has not imported torch."""
    if isinstance(array, np.ndarray):
        return False
    torch = torch_here()
    return torch is not None and isinstance(array, torch.Tensor)


def is_traced(array: Any) -> bool:
    """Tells whether torch records what is done with ``array``: torch.compile or torch.export runs, or it is a fake
    tensor, or a dispatch mode looks on.
    """
    torch = torch_here()
    if torch is None:
        return False
    if torch.compiler.is_compiling():
        return True
    if not isinstance(array, torch.Tensor) or array.is_nested:  # a nested one is refused by name
        return False
    plain = type(array).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return not plain or torch._C._len_torch_dispatch_stack() > 0
