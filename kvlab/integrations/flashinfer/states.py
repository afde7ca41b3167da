"""States of attention, an output and the lse in base 2 of the keys that it is of, merged."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvlab.attention import merge_states as merge
from kvlab.common.checks import require
from kvlab.integrations.adapting import checked_tensors, in_names

LN2 = math.log(2)


@in_names(outs="v", lses="s")
def merge_states(v: Tensor, s: Tensor, *, backend: Any = "auto") -> tuple[Tensor, Tensor]:
    """``(v [T, H, D], s [T, H])`` of all keys, from n states ``[T, n, H, D]`` and ``[T, n, H]`` of disjoint ones.

    s   float32, base 2; -inf for a state of no key, whose output may be anything

    >>> v, s = torch.tensor([1.0, 4.0]).view(1, 2, 1, 1), torch.tensor([1.0, 0.0]).view(1, 2, 1)
    >>> v, s = merge_states(v, s, backend="emulator")
    >>> round(v.item(), 5), round(2 ** s.item(), 5)
    (2.0, 3.0)
    """
    checked_tensors("v s", v=v, s=s)
    require(v.ndim == 4, f"v has shape {tuple(v.shape)}", "[T, n, H, D]")
    require(s.shape == v.shape[:-1], f"s has shape {tuple(s.shape)}", f"that of v without its last axis, "
            f"{tuple(v.shape[:-1])}")
    merged, lse = merge(v.movedim(1, 0), s.movedim(1, 0).float() * LN2, return_lse=True, backend=backend)
    return merged, lse / LN2


@in_names(v="v_a and v_b", s="s_a and s_b")
def merge_state(
    v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, *, backend: Any = "auto"
) -> tuple[Tensor, Tensor]:
    """The state of all keys, from two ``[T, H, D]`` and ``[T, H]`` of disjoint ones, as of :func:`merge_states`.

    >>> one, two = (torch.full((1, 1, 1), x) for x in (1.0, 4.0))
    >>> v, s = merge_state(one, torch.ones(1, 1), two, torch.zeros(1, 1), backend="emulator")
    >>> round(v.item(), 5), round(2 ** s.item(), 5)
    (2.0, 3.0)
    """
    checked_tensors("v_a s_a v_b s_b", v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    require(v_a.shape == v_b.shape, f"v_b has shape {tuple(v_b.shape)}", f"that of v_a, {tuple(v_a.shape)}")
    require(s_a.shape == s_b.shape, f"s_b has shape {tuple(s_b.shape)}", f"that of s_a, {tuple(s_a.shape)}")
    return merge_states(torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1), backend=backend)


def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None, *, backend: Any = "auto"
) -> None:
    """Merge another state into ``v`` ``[T, H, D]`` and ``s`` ``[T, H]``, float32; where ``mask``, bool ``[T]``, is
    False, a token keeps its own.

    >>> v, s = torch.ones(1, 1, 1), torch.ones(1, 1)
    >>> merge_state_in_place(v, s, torch.full((1, 1, 1), 4.0), torch.zeros(1, 1), backend="emulator")
    >>> round(v.item(), 5), round(2 ** s.item(), 5)
    (2.0, 3.0)
    """
    checked_tensors("v s v_other s_other", v=v, s=s, v_other=v_other, s_other=s_other, mask=mask)
    require(s.dtype == torch.float32, f"s has dtype {s.dtype}", "float32, to be written in place")
    if mask is not None:
        fits = mask.dtype == torch.bool and mask.shape == v.shape[:1]
        require(fits, f"mask is {mask.dtype} {tuple(mask.shape)}", f"bool [T = {v.shape[0]}]")
    merged, lse = merge_state(v, s, v_other, s_other, backend=backend)
    if mask is not None:
        merged, lse = torch.where(mask[:, None, None], merged, v), torch.where(mask[:, None], lse, s)
    v.copy_(merged)
    s.copy_(lse)
