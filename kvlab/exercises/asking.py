"""Marks and hints of the course's questions, by name: ``"03.passes"`` is one of notebook 3."""

from __future__ import annotations

from typing import Any

from kvlab.common.checks import require, shown

from .course import QUESTIONS
from .question import Question

right: set[str] = set()
"""Questions that were answered in this process."""
given: dict[str, int] = {}
"""How many hints of each question were given."""


def question(name: str) -> Question:
    """The question of a name. ValueError for an unknown one."""
    known = isinstance(name, str) and name in QUESTIONS
    require(known, f"name is {shown(name)}", f"that of a question, as {', '.join(list(QUESTIONS)[:3])}")
    return QUESTIONS[name]


def ask(name: str, answer: Any = None) -> None:
    """Tell whether an answer is right, without giving it away; mistakes that have a name are named.

    name    of the question, ``"notebook.variable"``
    answer  a number, text or sequence; None stands for a question that nobody has answered yet

    Raises ValueError for an unknown name.

    >>> ask("02.offset", 323)
    323 is not it: so it is counted down the columns. hint("02.offset") helps.
    """
    asked, of = question(name), siblings(name)
    helps = f'hint("{name}") helps.'
    if answer is None:
        print(f"No answer yet: question {of.index(name) + 1} of {len(of)}. {helps}")
        return
    verdict = asked.verdict(answer)
    if verdict == "Right.":
        right.add(name)
        print(f"Right. {sum(one in right for one in of)} of {len(of)} in this notebook.")
    else:
        print(verdict, helps)


def hint(name: str) -> None:
    """Print a question's next hint; after the last one, the last one again.

    >>> hint("11.factor")
    128 * (192 + 128) numbers a token, against 512 + 64. (hint 1 of 1)
    """
    hints = question(name).hints
    given[name] = number = min(given.get(name, 0) + 1, len(hints))
    print(f"{hints[number - 1]} (hint {number} of {len(hints)})")


def progress() -> None:
    """Print how many questions of each notebook were answered in this process."""
    for notebook in dict.fromkeys(name[:2] for name in QUESTIONS):
        of = siblings(notebook)
        done = sum(one in right for one in of)
        print(f"{notebook}  {'#' * done}{'.' * (len(of) - done)}  {done} of {len(of)}")


def siblings(name: str) -> list[str]:
    """The questions of a question's notebook, in their order."""
    return [one for one in QUESTIONS if one[:3] == f"{name[:2]}."]
