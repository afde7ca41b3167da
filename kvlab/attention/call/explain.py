"""Backend, configuration and reason of a call, without the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvlab.common.drawn import Drawn


@dataclass(frozen=True)
class Explanation(Drawn):
    """The plan of a call: nothing has run. schedule : the :class:`~kvlab.attention.Schedule` of a call that walks one,
    where the lengths are in CPU memory.

    >>> print(Explanation("merge_states", "emulator", "NumPy arrays", None, (4, 8)))
    merge_states: emulator (NumPy arrays); None; grid (4, 8)
    """

    operation: str
    backend: str
    reason: str
    config: Any
    grid: tuple[int, ...]
    arch: str | None = None
    schedule: Any = None

    def __str__(self) -> str:
        where = f" as on {self.arch}" if self.arch else ""
        units = "" if self.schedule is None else f"; {self.schedule}"
        return f"{self.operation}: {self.backend}{where} ({self.reason}); {self.config}; grid {self.grid}{units}"


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Plan of ``function(*args, **kwargs)``, which is not run: its backend, the reason, the configuration and the grid.

    function : a public function of ``kvlab.attention``. Raises what the call would raise for its arguments.

    >>> import numpy as np
    >>> from kvlab.attention import mha_decode_paged
    >>> q, kv = np.zeros((1, 8, 64), np.float32), np.zeros((4, 16, 2, 64), np.float32)
    >>> print(explain(mha_decode_paged, q, kv, kv, np.zeros((1, 4), np.int32), np.array([40])))
    mha_decode: emulator as on sm_90 (NumPy arrays); DecodeConfig(BM=16, BN=64, columns=(64, 0), \
v_columns=(64, 0), row_tiles=1, num_splits=1, num_warps=4, num_stages=2); grid (2, 1)
    """
    plan = getattr(function, "explain", None)
    if plan is None:
        raise ValueError(f"{function!r} cannot be explained: must be a public function of kvlab.attention")
    result: Explanation = plan(*args, **kwargs)
    return result
