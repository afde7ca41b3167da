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
