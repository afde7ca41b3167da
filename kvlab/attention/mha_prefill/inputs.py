"""What prefill asks of its arrays, and the one form in which the three siblings take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.attention.inputs import (
    check_apart,
    check_arrays,
    check_dtype,
    check_heads,
    check_integers,
    check_lengths_and_pages,
    check_out,
    check_pages,
    check_strides,
    check_table,
    finite_number,
    given,
    looks_at_values,
    require,
)
from kvlab.cache.arrays import element_strides, is_torch, to_numpy

from .config import UNLIMITED

__all__ = ["PrefillInputs", "dense_inputs", "finite", "mask_bounds", "paged_inputs"]


@dataclass(frozen=True)
class PrefillInputs:
    """Checked arguments: q and out ``[B, S, Hq, D]`` or ``[1, total, Hq, D]``; k and v as in ``reference``."""

    q: Any
    k: Any
    v: Any
    cu_q: Any
    cu_k: Any
    table: Any
    seq_lens: Any
    sinks: Any
    out: Any
    batch: int
    max_q: int

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The positional arguments of the launch functions."""
        return self.q, self.k, self.v, self.cu_q, self.cu_k, self.table, self.seq_lens, self.sinks

    @property
    def ragged(self) -> bool:
        """Results drop the first axis."""
        return self.cu_q is not None


def dense_inputs(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int | None, sinks: Any, out: Any, check: bool | None
) -> PrefillInputs:
    """Arguments of ``mha_prefill``. ValueError that names argument, value and rule."""
    require((cu_q is None) == (cu_k is None), "only one of cu_seqlens_q and cu_seqlens_k is given", "both or neither")
    ragged = cu_q is not None
    form = "[total, H, D] with cu_seqlens" if ragged else "[B, S, H, D] without cu_seqlens"
    arrays = {"q": q, "k": k, "v": v, **given(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, sinks=sinks, out=out)}
    check_arrays(arrays)
    check_apart(arrays)
    for name, array in (("q", q), ("k", k), ("v", v)):
        require(array.ndim == (3 if ragged else 4), f"{name} has shape {tuple(array.shape)}", form)
    if not ragged:
        require(k.shape[0] == q.shape[0], f"k has {k.shape[0]} sequences", f"those of q, {q.shape[0]}")
    _check_rows(q, {"k": k, "v": v}, sinks, out)
    batch, longest = (q.shape[0], q.shape[1])
    if ragged:
        batch = _check_starts("cu_seqlens_q", cu_q)
        require(
            _check_starts("cu_seqlens_k", cu_k) == batch,
            f"cu_seqlens_k has shape {tuple(cu_k.shape)}",
            f"that of cu_seqlens_q, {tuple(cu_q.shape)}",
        )
        longest = _longest(max_q, q)
        if looks_at_values(check, q):
            _check_offsets("cu_seqlens_q", cu_q, q, longest)
            _check_offsets("cu_seqlens_k", cu_k, k, None)
        q, k, v, out = (x if x is None else x[None] for x in (q, k, v, out))
    else:
        require(max_q is None, f"max_seqlen_q {max_q!r} without cu_seqlens_q", "None; q tells the length")
    return PrefillInputs(q, k, v, cu_q, cu_k, None, None, sinks, out, batch, longest)


def paged_inputs(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, cu_q: Any, max_q: int | None, sinks: Any,
    out: Any, check: bool | None,
) -> PrefillInputs:  # fmt: skip
    """Arguments of ``mha_prefill_paged``. ValueError that names argument, value and rule."""
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    tables = {"block_table": block_table, "seq_lens": seq_lens}
    arrays = {"q": q, **caches, **tables, **given(cu_seqlens_q=cu_q, sinks=sinks, out=out)}
    check_arrays(arrays)
    check_apart(arrays)
    require(q.ndim == 3, f"q has shape {tuple(q.shape)}", "[total, Hq, D]")
    check_pages(caches)
    _check_rows(q, caches, sinks, out)
    batch = _check_starts("cu_seqlens_q", cu_q)
    check_table(block_table, seq_lens, batch)
    check_strides("seq_lens", seq_lens)
    longest = _longest(max_q, q)
    if looks_at_values(check, q):
        _check_offsets("cu_seqlens_q", cu_q, q, longest)
        check_lengths_and_pages(seq_lens, block_table, k_cache.shape[0], k_cache.shape[1])
    q, out = q[None], None if out is None else out[None]
    return PrefillInputs(q, k_cache, v_cache, cu_q, None, block_table, seq_lens, sinks, out, batch, longest)


def mask_bounds(causal: bool, window: Any) -> tuple[int, int]:
    """(left, right): a query at position p sees the keys from ``p - left`` to ``p + right``.

    >>> mask_bounds(True, None) == (UNLIMITED, 0)
    True
    >>> mask_bounds(True, 128), mask_bounds(False, (128, 16))
    ((127, 0), (128, 16))
    """
    left = right = UNLIMITED
    if isinstance(window, int | np.integer) and not isinstance(window, bool):
        require(window >= 1, f"window {window}", "at least 1, the keys that a query sees, itself among them")
        require(causal, f"window {window} with causal=False", "a pair (left, right)")
        left = int(window) - 1
    elif window is not None:
        pair = isinstance(window, tuple | list) and len(window) == 2
        sides = [UNLIMITED if side is None else side for side in window] if pair else [None]
        valid = all(isinstance(side, int | np.integer) and side >= 0 for side in sides)
        require(valid, f"window {window!r}", "None, a number of keys, or a pair (left, right) of numbers or None")
        left, right = (min(int(side), UNLIMITED) for side in sides)  # type: ignore[arg-type, unused-ignore]
    return left, 0 if causal else right


def _check_rows(q: Any, kv: dict[str, Any], sinks: Any, out: Any) -> None:
    """Dtypes, heads, depth, strides."""
    check_dtype("q", q)
    check_heads(q, kv)
    if sinks is not None:
        q_heads = int(q.shape[-2])
        require(tuple(sinks.shape) == (q_heads,), f"sinks has shape {tuple(sinks.shape)}", f"[Hq = {q_heads}]")
        check_dtype("sinks", sinks)
        require(q_heads < 2 or element_strides(sinks, "sinks") == (1,), "sinks is strided", "contiguous")
    for name, array in {"q": q, **kv}.items():
        check_strides(name, array)
    if out is not None:
        require(tuple(out.shape) == tuple(q.shape), f"out has shape {tuple(out.shape)}", f"that of q, {tuple(q.shape)}")
        check_out(out, q)


def _check_starts(name: str, starts: Any) -> int:
    """The sequences that ``cu_seqlens`` tells of."""
    fits = starts is not None and starts.ndim == 1 and starts.shape[0] >= 1
    require(fits, f"{name} has shape {None if starts is None else tuple(starts.shape)}", "[B + 1]")
    check_integers(name, starts)
    check_strides(name, starts)
    return int(starts.shape[0]) - 1


def _check_offsets(name: str, starts: Any, rows: Any, longest: int | None) -> None:
    o = to_numpy(starts.cpu() if is_torch(starts) else starts).astype(np.int64)
    total, lengths = int(rows.shape[0]), np.diff(o)
    good = o[0] == 0 and (lengths >= 0).all() and o[-1] == total
    require(good, f"{name} {o.tolist()}", f"numbers from 0 to {total}, the rows, none less than the one before")
    if longest is not None and lengths.size:
        most = int(lengths.max())
        require(most <= longest, f"max_seqlen_q {longest}", f"at least {most}, the longest sequence of {name}")


def _longest(max_q: int | None, q: Any) -> int:
    if max_q is None:
        return int(q.shape[0])
    require(isinstance(max_q, int) and max_q >= 0, f"max_seqlen_q {max_q!r}", "a number of tokens")
    return min(max_q, int(q.shape[0]))


def finite(name: str, value: Any) -> float:
    """``value``, a number of Python or NumPy, as a float that float32 holds; ValueError otherwise."""
    accepted = "a finite number that float32 holds"
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    require(number, f"{name} {value!r}", accepted)
    return finite_number(value, name, accepted)
