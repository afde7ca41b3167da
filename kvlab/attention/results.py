"""The tensors that attention kernels write."""

from __future__ import annotations

import torch

__all__ = ["results"]


def results(
    q: torch.Tensor, out: torch.Tensor | None, shape: tuple[int, ...], lse_shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out``, or a new tensor of ``shape`` and q's dtype (bfloat16 for e4m3); and an lse, float32, of ``lse_shape``.

    >>> [x.dtype for x in results(torch.zeros(2, 3).to(torch.float8_e4m3fn), None, (2, 5), (2,))]
    [torch.bfloat16, torch.float32]
    """
    if out is None:
        out = q.new_empty(shape, dtype=torch.bfloat16 if q.dtype == torch.float8_e4m3fn else None)
    return out, q.new_empty(lse_shape, dtype=torch.float32)
