"""What queries see: masks by name as kvlab has them, and as a rule of positions written for itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pairs.operands import Operand, placed

from kvlab.attention import masks as M

Array = np.ndarray[Any, Any]

CHUNK, SLIDE = 24, 19

MASKS = ("causal", "null", "chunked", "chunked causal", "sliding", "sliding not causal", "padding", "bias", "own")
MORE = ("bias of heads", "bool", "own values", "or", "and", "causal mask")
WINDOWS = (None, 9, (13, None), (11, 4))


@dataclass(frozen=True)
class Sight:
    """A mask and a window over sequences with ``tokens`` new tokens of ``keys`` keys."""

    mask: str
    window: Any
    causal: bool
    """Whether the call's own causal bound holds, besides the mask."""
    tokens: Array
    keys: Array
    heads: int
    bias: Operand | None = None
    valid: Array | None = None

    def visible(self, sequence: int) -> Any:
        """``(h, p, j)`` of one sequence -> whether head h at position p sees key j."""
        left, right = _sides(self.window, self.causal)
        own = self._own(sequence)
        return lambda h, p, j: own(h, p, j) & (j >= p - left) & (j <= p + right)

    def added(self, sequence: int) -> Any:
        """``(h, i, j)`` -> what the mask adds to the score of query i, -inf where it hides; None if nothing."""
        if self.mask == "own values":
            shift = int(self.keys[sequence] - self.tokens[sequence])
            return lambda h, i, j: own_values(sequence, h, i + shift, j)
        if self.bias is None:
            return None
        values = self.bias.array

        def add(h: int, i: int, j: Array) -> Array:
            row = values[sequence if len(values) > 1 else 0, h if values.shape[1] > 1 else 0]
            inside = (j < row.shape[1]) & (i < row.shape[0])
            found = row[min(i, row.shape[0] - 1)][np.minimum(j, row.shape[1] - 1)]
            found = np.where(found, 0.0, -np.inf) if found.dtype == bool else found.astype(np.float64)
            return np.where(inside, found, -np.inf)

        return add

    def mask_of_kvlab(self) -> Any:
        """The ``mask`` argument of a call. Made when it is asked for, of the classes as they are then."""
        made: dict[str, Any] = {
            "causal": lambda: None,
            "null": M.NullMask,
            "causal mask": M.CausalMask,
            "chunked": lambda: M.ChunkedMask(CHUNK),
            "chunked causal": lambda: M.ChunkedCausalMask(CHUNK),
            "sliding": lambda: M.SlidingWindowCausalMask(SLIDE),
            "sliding not causal": lambda: M.SlidingWindowNonCausalMask(SLIDE),
            "padding": lambda: M.CausalPaddingMask(self.valid),
            "own": _own_mask,
            "own values": _own_values_mask,
            "or": lambda: M.OrMask(M.ChunkedMask(CHUNK), _own_mask()),
            "and": lambda: M.AndMask(M.SlidingWindowCausalMask(SLIDE), _own_mask()),
        }
        return made[self.mask]() if self.bias is None else M.MaterializedMask(self.bias.array)

    def first_key(self, sequence: int) -> int:
        """The first key that some query of a sequence may see; those before it are never read."""
        n, S = int(self.keys[sequence]), int(self.tokens[sequence])
        if self.mask in ("or", "and", "own", "own values") or self.bias is not None:
            return max(0, n - S - _sides(self.window, self.causal)[0])
        p, j = np.arange(n - S, n)[:, None], np.arange(n)
        seen = np.broadcast_to(self.visible(sequence)(0, p, j), (S, n)).any(0)
        return int(seen.argmax()) if seen.any() else n

    def end(self, sequence: int) -> int:
        """Behind the last such key."""
        n, S = int(self.keys[sequence]), int(self.tokens[sequence])
        if self.mask in ("or", "and", "own", "own values") or self.bias is not None:
            return min(n, n + _sides(self.window, self.causal)[1])
        p, j = np.arange(n - S, n)[:, None], np.arange(n)
        seen = np.broadcast_to(self.visible(sequence)(0, p, j), (S, n)).any(0)
        return n - int(seen[::-1].argmax()) if seen.any() else 0

    def _own(self, b: int) -> Any:
        valid = 0 if self.valid is None else int(self.valid[b])
        rules: dict[str, Any] = {
            "causal mask": lambda h, p, j: j <= p,
            "chunked": lambda h, p, j: j // CHUNK == p // CHUNK,
            "chunked causal": lambda h, p, j: (j // CHUNK == p // CHUNK) & (j <= p),
            "sliding": lambda h, p, j: (j <= p) & (p - j < SLIDE),
            "sliding not causal": lambda h, p, j: p - j < SLIDE,
            "padding": lambda h, p, j: (j <= p) & (j < valid),
            "own": lambda h, p, j: own_sight(b, h, p, j),
            "or": lambda h, p, j: (j // CHUNK == p // CHUNK) & own_sight(b, h, p, j),
            "and": lambda h, p, j: ((j <= p) & (p - j < SLIDE)) | own_sight(b, h, p, j),
        }
        return rules.get(self.mask, lambda h, p, j: 0 * p + j == j)


def sight(mask: str, window: Any, causal: bool, tokens: Array, keys: Array, heads: int, rng: Any) -> Sight:
    """The mask called ``mask``, its arrays made."""
    S, n, batch = int(tokens.max(initial=0)), int(keys.max(initial=0)), len(keys)
    lead = {"bias": (1, 1), "bias of heads": (batch, heads), "bool": (batch, 1)}.get(mask)
    bias = None
    if lead is not None:
        shape = *lead, max(S - 1, 1), max(n - 2, 1)  # rows and keys outside it are hidden
        values = np.where(rng.random(shape) < 0.7, rng.standard_normal(shape), -np.inf).astype(np.float32)
        bias = placed("bias", values > 0.2 if mask == "bool" else values)
    valid = np.array([n // 2 - b for b in range(batch)], np.int32) if mask == "padding" else None
    return Sight(mask, window, causal, tokens, keys, heads, bias, valid)


def own_sight(batch: Any, head: Any, q: Any, k: Any) -> Any:
    """Sees each third key, which ones depends on all that may matter."""
    return (k + q + head + batch) % 3 != 0


def own_values(batch: Any, head: Any, q: Any, k: Any) -> Any:
    """Adds what depends on all that may matter, and hides some."""
    return np.where((2 * k + q + batch) % 5 == 0, -np.inf, 0.03125 * ((3 * k + q + 2 * head + batch) % 7))


def _sides(window: Any, causal: bool) -> tuple[float, float]:
    left, right = (window - 1, 0) if isinstance(window, int) else window or (None, None)
    left, right = (np.inf if side is None else side for side in (left, right))
    return left, 0 if causal else right


def _own_mask() -> Any:
    class Own(M.Mask):
        def visible(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
            return own_sight(batch, head, q_pos, k_pos)

    return Own()


def _own_values_mask() -> Any:
    class Own(M.Mask):
        def value(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
            return own_values(batch, head, q_pos, k_pos)

    return Own()
