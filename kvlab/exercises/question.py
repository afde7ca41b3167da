"""One question: its right answer, hints in the order in which they are given, and mistakes that have a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def same(a: Any, b: Any) -> bool:
    """Tells whether two answers are one: numbers, texts, sequences and arrays as a whole.

    >>> same([4, 6], (4, 6)), same("None", "none"), same("a", 3)
    (True, False, False)
    """
    try:
        return bool(np.array_equal(a, b))
    except (TypeError, ValueError):
        return False


@dataclass(frozen=True)
class Question:
    """A question of a notebook.

    answer    what is right: a number, a text, or a sequence; or a judge of what a reader builds, a function that takes
              the answer and says what is wrong with it, "" where nothing is
    hints     from the gentlest to the plainest
    solution  the code of an answer that a judge takes; unless given, what the judge's ``repr`` says
    mistakes  (wrong answer, what it is the answer of) for those that readers give, as elements for bytes

    >>> rows = Question(64, ["A row is a token."], [(128, "these are bytes: a number has two")])
    >>> rows.verdict(64), rows.verdict(128), rows.verdict(9)
    ('Right.', '128 is not it: these are bytes: a number has two.', '9 is not it.')
    """

    answer: Any
    hints: Sequence[str]
    mistakes: Sequence[tuple[Any, str]] = ()
    solution: str = ""

    def verdict(self, answer: Any) -> str:
        """Words for an answer: "Right.", or that it is not it, and what it is if it is a mistake with a name."""
        if callable(self.answer):
            fault = self.answer(answer)
            return f"Not yet: {fault}." if fault else "Right."
        if same(answer, self.answer):
            return "Right."
        named = [text for wrong, text in self.mistakes if same(answer, wrong)]
        return f"{answer} is not it{''.join(f': {text}' for text in named[:1])}."
