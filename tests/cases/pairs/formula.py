"""Attention written from its definition in float64, with nothing of the project in it, and how far a result may be off.

The bound of an output follows from what every implementation rounds: P once to the dtype of its product, the result
once to its own, sums and exponentials in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4}
"""Half a unit in the last place, relative."""
LEAST = {"float32": 0.0, "float16": 2.0**-25, "bfloat16": 0.0, "float8_e4m3fn": 2.0**-18}
"""Half of the distance of the smallest numbers that results come near; of e4m3 less the 2^8 by which P is scaled."""

FOURTEEN = 2.0**-12
"""Error of a score that Hopper's tensor cores sum from products of e4m3, relative to the sum of their magnitudes: terms
are cut off at 2^-13 of the largest in each step of 32. The largest of 16 and more random terms is at most a quarter of
their magnitudes, and what is cut off has their signs, so that it adds up as a root; one lost term would be 2^-5."""

NAMES = "out", "lse", "slack", "lse_slack", "cut", "lse_cut"


@dataclass
class Rows:
    """Results of query rows ``[.., H, Dv]``, and per element what may be missing of them; ``cut`` and ``lse_cut``: how
    much more where scores are sums of 14 digits."""

    out: Array
    lse: Array
    slack: Array
    lse_slack: Array
    cut: Array
    lse_cut: Array

    @classmethod
    def stacked(cls, parts: list[Rows]) -> Rows:
        """Sequences of the same number of rows, side by side."""
        return cls(*(np.stack([getattr(part, name) for part in parts]) for name in NAMES))

    @classmethod
    def joined(cls, parts: list[Rows]) -> Rows:
        """Sequences one after the other."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in NAMES))

    def without(self, axis: int) -> Rows:
        """The first along an axis."""
        return Rows(*(getattr(self, name).take(0, axis) for name in NAMES))

    def in_base2(self) -> Rows:
        """lse as a logarithm of base 2."""
        lse, lse_slack, lse_cut = (x / np.log(2) for x in (self.lse, self.lse_slack, self.lse_cut))
        return Rows(self.out, lse, self.slack, lse_slack, self.cut, lse_cut)


@dataclass
class Scores:
    """How scores come about. ``visible(h, p, j)``: whether head h at position p sees key j; arrays that broadcast;
    ``bias(h, i, j)`` for query i is added.
    """

    scale: float
    visible: Any
    softcap: float = 0.0
    slopes: Array | None = None
    sinks: Array | None = None
    bias: Any = None


def attend(
    q: Array, k: Array, v: Array, scores: Scores, *, keys: int, first_key: int = 0, p_dtype: str, out_dtype: str,
    score_error: float = 2.0**-21,
) -> Rows:
    """One sequence: q ``[S, Hq, D]``, k ``[n, Hkv, D]`` and v ``[n, Hkv, Dv]``, true values; the keys that are given
    are those from ``first_key`` on of ``keys``; query i stands at position ``i + keys - S``.

    score_error : of a score, relative to the sum of the magnitudes of its terms.
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    (S, heads, _), (n, kv_heads, _) = q.shape, k.shape
    out, slack, cut = np.zeros((3, S, heads, v.shape[2]))
    lse, lse_slack, lse_cut = np.full((S, heads), -np.inf), *np.zeros((2, S, heads))
    j = np.arange(first_key, first_key + n)
    for i in range(S):
        p = i + keys - S
        for h in range(heads):
            g = h // (heads // kv_heads)
            s = scores.scale * (k[:, g] @ q[i, h])
            magnitude = abs(scores.scale) * (np.abs(k[:, g]) @ np.abs(q[i, h]))
            error = score_error * magnitude
            if scores.softcap:
                error = error + 2.0**-20 * np.minimum(np.abs(s), scores.softcap)
                s = scores.softcap * np.tanh(s / scores.softcap)
            if scores.slopes is not None:
                s = s - scores.slopes[h] * np.abs(p - j)
                error = error + 2.0**-22 * scores.slopes[h] * np.abs(p - j)
            seen = np.broadcast_to(scores.visible(h, p, j), s.shape)
            if scores.bias is not None:
                added = scores.bias(h, i, j)
                seen = seen & (added > -np.inf)
                s = s + np.where(seen, added, 0)
            s, error, values = s[seen], error[seen] + 2.0**-22 * np.abs(s[seen]), v[seen, g]
            logits = s if scores.sinks is None else np.append(s, scores.sinks[h])
            if not logits.size:
                continue
            top = logits.max()
            total = np.exp(logits - top).sum()
            weight = np.exp(s - top) / total
            lse[i, h] = top + np.log(total)
            out[i, h] = weight @ values
            off = error.max(initial=0.0)
            lse_cut[i, h] = FOURTEEN * magnitude[seen].max(initial=0.0)
            cut[i, h] = 2 * lse_cut[i, h] * weight @ np.abs(values)
            lse_slack[i, h] = off + 2.0**-22 * (abs(lse[i, h]) + abs(top) + 2)
            lost = (UNIT[p_dtype] + 2.0**-21 + 2 * off) * weight + LEAST[p_dtype] / total
            slack[i, h] = lost @ np.abs(values) + UNIT[out_dtype] * np.abs(out[i, h]) + LEAST[out_dtype] + 1e-9
    return Rows(out, lse, slack, lse_slack, cut, lse_cut)


def compare(got: Array, lse: Array | None, rows: Rows, *, fourteen: bool = False) -> None:
    """AssertionError where a result is further from the definition than its rounding explains.

    fourteen : whether scores are sums of 14 digits.
    """
    got = got.astype(np.float64)
    slack, lse_slack = rows.slack + fourteen * rows.cut, rows.lse_slack + fourteen * rows.lse_cut
    assert got.shape == rows.out.shape, (got.shape, rows.out.shape)
    assert np.isfinite(got).all(), "not finite"
    off = np.abs(got - rows.out) / slack.clip(1e-9)
    assert off.max(initial=0) <= 1, f"out is off by {off.max():.3g} times what rounding explains, at {_worst(off)}"
    empty = np.isneginf(rows.lse)
    nothing = empty | (rows.out == 0).all(-1)
    assert (got[nothing] == 0).all(), "a row without a key must give exactly 0"
    if lse is None:
        return
    assert lse.shape == rows.lse.shape, (lse.shape, rows.lse.shape)
    assert (np.isneginf(lse) == empty).all(), "lse is -inf exactly where there is no key"
    off = np.abs(lse[~empty] - rows.lse[~empty]) / lse_slack[~empty]
    assert off.max(initial=0) <= 1, f"lse is off by {off.max():.3g} times what rounding explains"


def _worst(off: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(off.argmax(), off.shape))
