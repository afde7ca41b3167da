"""Marks of the notebooks' questions."""

from __future__ import annotations

from typing import Any

import numpy as np


def check(answer: Any, right: Any, hint: str) -> None:
    """Tell whether an answer is right, without giving it away.

    Sequences and arrays are compared as a whole; None stands for a question that nobody has answered yet.

    >>> check(None, 389, "Rows cost 8.")
    No answer yet. Rows cost 8.
    >>> check([4, 5], (4, 6), "Columns cost 1.")
    [4, 5] is not it. Columns cost 1.
    >>> check([4, 6], (4, 6), "Columns cost 1.")
    Right.
    """
    if answer is None:
        print("No answer yet.", hint)
    else:
        print("Right." if np.array_equal(answer, right) else f"{answer} is not it. {hint}")
