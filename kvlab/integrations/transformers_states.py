"""New keys and values on their way from a cache to the attention function that stores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from .transformers_cache import KVLabCache

Array = np.ndarray[Any, Any]
NAME = "kvlab"
"""The ``attn_implementation`` that reads the pages."""


@dataclass(frozen=True)
class CacheStep:
    """One forward: ``tokens`` columns of each row, of which those exist that ``columns`` names (all if None).

    slots    int64 ``[T]``: where the T tokens that exist are stored, negative for those of a row without a sequence
    table    int32 ``[B, columns]``; lengths  int32 ``[B]``, keys with the new tokens
    starts   int32 ``[B + 1]``: where the tokens of each row start among the T
    columns  int64 ``[T]``: places of the T tokens among B x tokens, or None
    longest  most tokens of a row
    """

    tokens: int
    longest: int
    slots: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    columns: torch.Tensor | None

    def decodes(self, most: int) -> bool:
        """All columns exist, and are no more than ``most``."""
        return self.columns is None and self.tokens <= most

    def rows(self, states: torch.Tensor) -> torch.Tensor:
        """``[T, H, D]`` of the tokens that exist, of states ``[B, H, tokens, D]``."""
        rows = states.transpose(1, 2).flatten(0, 1)
        return rows if self.columns is None else rows[self.columns]

    def padded(self, rows: torch.Tensor, batch: int) -> torch.Tensor:
        """``[B, tokens, H, D]`` of rows ``[T, H, D]``, zeros where there is no token."""
        if self.columns is not None:
            found = rows
            rows = found.new_zeros(batch * self.tokens, *found.shape[1:])
            rows[self.columns] = found
        return rows.unflatten(0, (batch, self.tokens))


@dataclass
class Pending:
    """New states of a layer that its attention is going to store, once, when it knows which of them are padding."""

    cache: KVLabCache
    layer: int
    keys: torch.Tensor
    values: torch.Tensor
    latent: bool
    step: CacheStep | None = None

    def check(self, module: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        """NotImplementedError for a layer that makes other keys and values of the states than kvlab would read."""
        if self.latent:
            known = hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")
            what = "makes keys of latent rows in a way of its own: must have expand_kv and kv_b_proj"
        else:
            pairs = (key, self.keys), (value, self.values)
            known = all((a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride()) for a, b in pairs)
            what = "changes keys or values behind the cache: must attend to those that it stores"
        if not known:
            raise NotImplementedError(f"layer {self.layer}, {type(module).__name__}, {what}")

    def store(self, valid: Array | None, backend: Any) -> CacheStep:
        """The step of these states, which are in the pages afterwards. ``valid``: bool ``[B, columns so far]``."""
        if self.step is None:
            step = self.cache._step_of(self, valid)
            self.cache._store(self, step, backend)
            self.step = step
        return self.step


class PagedStates(torch.Tensor):
    """New keys or values on their way from a cache to the attention function; what is made of them goes there, too.

    They are those of the new tokens alone, so that a product of scores would be wrong: it raises.
    """

    pending: Pending | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            raise ValueError(f"{func.__name__} of keys in the pages of a KVLabCache: {_ONLY}")
        made = super().__torch_function__(func, types, args, kwargs or {})
        given = [part for one in (*args, *(kwargs or {}).values()) for part in _parts(one)]
        pending = next((one.pending for one in given if isinstance(one, cls) and one.pending is not None), None)
        for one in _parts(made):
            if isinstance(one, cls):
                one.pending = pending
        return made


def _parts(one: Any) -> tuple[Any, ...]:
    return tuple(one) if isinstance(one, tuple | list) else (one,)


_ONLY = f'must be read by attn_implementation="{NAME}"; call kvlab.integrations.transformers.register() first'
_PRODUCTS = {
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.bmm, torch.baddbmm,
    torch.einsum, torch.nn.functional.scaled_dot_product_attention,
}


class GrowingColumns(int):
    """A number of columns of a KVLabCache, which grows: a mask need not look whether they end with the new ones."""
