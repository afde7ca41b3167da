"""The tensors that attention kernels write."""

from __future__ import annotations

import torch


def results(
    q: torch.Tensor, out: torch.Tensor | None, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out``, or a new tensor of ``shape`` and q's dtype (bfloat16 for e4m3); and an lse of it, float32, without the
    last axis.

    >>> [(x.dtype, tuple(x.shape)) for x in results(torch.zeros(2, 3).to(torch.float8_e4m3fn), None, (2, 5))]
    [(torch.bfloat16, (2, 5)), (torch.float32, (2,))]
    """
    if out is None:
        out = q.new_empty(shape, dtype=torch.bfloat16 if q.dtype == torch.float8_e4m3fn else None)
    return out, q.new_empty(shape[:-1], dtype=torch.float32)
