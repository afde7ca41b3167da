"""Memory of partial results and lists in tests on a GPU: NaN before a launch, with numbers around it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def poison() -> None:
    """What the allocator gives to partial results and lists next is NaN."""
    for size in (1 << 24, 1 << 20, 1 << 12):
        torch.full((size,), float("nan"), device="cuda")


def guarded(patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What ``new_empty`` gives from now on is NaN, with numbers before and behind it: these, by which a write beside
    the partial results is found.
    """
    edges, empty = [], torch.Tensor.new_empty

    def new_empty(tensor: torch.Tensor, shape: Any, **options: Any) -> torch.Tensor:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        size = int(np.prod(shape))
        whole = empty(tensor, (size + 2048,), **options)
        whole.fill_(float("nan") if whole.is_floating_point() else 0)
        for edge in whole[:1024], whole[-1024:]:
            edge.fill_(7)
            edges.append(edge)
        return whole[1024:-1024].view(shape)

    patch.setattr(torch.Tensor, "new_empty", new_empty)
    return edges


def whole(edges: list[torch.Tensor]) -> bool:
    """Tells whether there were such edges, and nobody has written to them."""
    return bool(edges) and all(bool((edge == 7).all()) for edge in edges)
