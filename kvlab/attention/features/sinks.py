"""Sinks: a logit for each query head that takes part in the softmax without a value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.attention.call.checks import check_dtype
from kvlab.attention.tiles.online_softmax import LOG2E, LOWEST
from kvlab.hardware.chip import exp2, multiply_add

from .heads import check_heads_array

if TYPE_CHECKING:
    import triton.language as tl

Array = np.ndarray[Any, Any]
DOCUMENTATION = (
    "None, or a logit for each query head ``[Hq]`` that takes part in the softmax without a value; counted once "
    "whatever the splits"
)


def resolve_sinks(sinks: Any, q: Any) -> Any:
    """``sinks``, checked against q ``[.., Hq, D]``."""
    if sinks is not None:
        check_heads_array("sinks", sinks, q)
        check_dtype("sinks", sinks)
    return sinks


def sinks_exactly(s: Array, sinks: Array | None) -> Array:
    """The sinks' logits beside scores ``[Hq, S, n]``, float64 ``[Hq, S, 1]``; -inf where there are none."""
    extra = np.full((*s.shape[:2], 1), -np.inf)
    if sinks is not None:
        extra[...] = sinks.astype(np.float64)[:, None, None]
    return extra


def sink_alone(sink: Array) -> tuple[Array, Array]:
    """(maximum, sum) of rows that see a sink of this logit, in units of log2, and no key yet; -inf is no sink."""
    none = np.isneginf(sink)
    return np.where(none, np.float32(LOWEST), sink), np.where(none, np.float32(0), np.float32(1))


def start_rows(sinks_array: Array | None, head: Array, first: Any) -> tuple[Array, Array]:
    """(m, l): maximum and sum ``[P, BM]`` of rows of query heads ``head`` that see no key yet. A sink is counted by
    the programs ``first``, ``[P]`` or True for all.
    """
    m = np.full(head.shape, LOWEST, np.float32)
    l = np.zeros(head.shape, np.float32)
    if sinks_array is not None:
        sink, one = sink_alone(sinks_array[head].astype(np.float32) * np.float32(LOG2E))
        m = np.where(np.expand_dims(first, -1), sink, m)
        l = np.where(np.expand_dims(first, -1), one, l)
    return m, l


def add_sink(top: Array, total: Array, sinks_array: Array | None, head: Any) -> tuple[Array, Array, Array]:
    """(maximum, sum) of rows, the sink of their query head ``head`` included, and what comes from before it is
    multiplied by. Maxima are in units of log2.
    """
    weight = np.ones_like(total)
    if sinks_array is not None:
        sink = np.float32(sinks_array[head]) * np.float32(LOG2E)
        weight = exp2(top - np.maximum(top, sink))
        top = np.maximum(top, sink)
        total = multiply_add(total, weight, exp2(sink - top))
    return top, total, weight


def sink_alone_kernel(sink):
    """(maximum, sum) as of ``sink_alone``."""
    none = sink == -float("inf")
    return tl.where(none, LOWEST, sink), tl.where(none, 0.0, 1.0)


def start_rows_kernel(sinks_ptr, head, first):
    """(m, l) of rows of query heads ``head`` that see no key yet. A sink is counted where ``first``."""
    m = tl.full(head.shape, LOWEST, tl.float32)
    l = tl.zeros(head.shape, tl.float32)
    if sinks_ptr is not None:
        sink, one = sink_alone_kernel(tl.load(sinks_ptr + head).to(tl.float32) * LOG2E)
        m = tl.where(first, sink, m)
        l = tl.where(first, one, l)
    return m, l


def add_sink_kernel(top, total, sinks_ptr, head):
    """(maximum, sum, what comes from before the sink is multiplied by) of rows, as of ``add_sink``."""
    weight = 1.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        weight = tl.exp2(top - tl.maximum(top, sink))
        top = tl.maximum(top, sink)
        total = total * weight + tl.exp2(sink - top)
    return top, total, weight
