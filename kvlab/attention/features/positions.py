"""Positions of query tokens where these are not the last of their sequences: drafts of a tree, context parallelism."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlab.attention.call.checks import check_array, check_integers, check_strides
from kvlab.common.arrays import add_axis, element_strides, same_place
from kvlab.common.checks import require

from .intervals import FAR, host

Array = np.ndarray[Any, Any]
DOCUMENTATION = (
    "None, or integers of q's shape without heads, ``[B, S]`` or ``[total]``: the position of each query token, which "
    "may lie outside its sequence; causal masks, windows, chunks and ALiBi go by it. Keys "
    "that none of a sequence's tokens sees may be read then. None: the last of the sequence"
)


def check_positions(q_positions: Any, q: Any) -> None:
    """ValueError unless ``q_positions`` is None or contiguous integers ``[B, S]`` (``[B]`` where S is 1) beside q
    ``[B, S, Hq, D]``, or ``[total]`` beside q ``[total, Hq, D]``.
    """
    if q_positions is None:
        return
    check_array("q_positions", q_positions)
    same_place(q_positions=q_positions, q=q)
    shape, rows = (tuple(int(n) for n in of) for of in (q_positions.shape, q.shape[:-2]))
    require(shape == rows or (*shape, 1) == rows, f"q_positions has shape {shape}", f"{rows}, that of q without heads")
    check_integers("q_positions", q_positions)
    check_strides("q_positions", q_positions)


def positions_of_rows(q_positions: Any, q: Any) -> Any:
    """``q_positions``, which ``check_positions`` lets pass, as ``[B, S]``, or ``[1, total]``; None of None."""
    if q_positions is None or q_positions.ndim == 2:
        return q_positions
    return add_axis(q_positions, 0 if q.ndim == 3 else 1)


def positions_stride(positions: Any) -> int | None:
    """Elements from a sequence's positions to the next one's, of a torch tensor ``[B, S]``, 0 for ``[1, total]``."""
    return None if positions is None else 0 if positions.shape[0] == 1 else int(positions.stride(0))


def positions_of_sequences(positions: Any, new: Array) -> Array:
    """Positions ``[B, S]`` in CPU memory of sequences with ``new`` tokens ``[B]``; what is behind them is any token's.

    >>> positions_of_sequences(np.array([[7, 8, 30]]), np.array([2, 0, 1])).tolist()
    [[7, 8], [30, 30], [30, 30]]
    """
    flat, start = host(positions).reshape(-1), np.cumsum(new) - new
    at = start[:, None] + np.arange(int(new.max(initial=0)))
    return flat[np.minimum(at, max(len(flat) - 1, 0))]


def check_far(q_positions: Any) -> None:
    """ValueError for a position that 30 bits do not hold."""
    if q_positions is not None and element_strides(q_positions):
        values = host(q_positions)
        far = (values < -FAR) | (values > FAR)
        if far.any():
            at = np.argwhere(far)[0]
            raise ValueError(f"q_positions{at.tolist()} is {values[tuple(at)]}: must be -{FAR} to {FAR}")


def refuse_places(arguments: dict[str, Any], why: str = "balanced=True") -> None:
    """ValueError for arguments that move keys or queries, which units over a schedule, for which ``why`` asks, do not
    follow.
    """
    for name in ("leftpad_k", "q_positions"):
        given = f"{name} with {why}"
        require(arguments.get(name) is None, given, "left out: units follow from the lengths alone")
