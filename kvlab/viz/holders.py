"""Who holds a cell when several do: the lowest."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["lowest"]


def lowest(shape: tuple[int, ...], place: tuple[Any, ...], number: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """[*shape] the lowest of the numbers at each place, -1 where there is none.

    >>> lowest((2, 2), (np.array([0, 0, 1]), np.array([1, 1, 0])), [5, 3, 4]).tolist()
    [[-1, 3], [4, -1]]
    """
    none = np.iinfo(np.int64).max
    out = np.full(shape, none, np.int64)
    np.minimum.at(out, place, np.asarray(number, np.int64))
    return np.where(out == none, -1, out)
