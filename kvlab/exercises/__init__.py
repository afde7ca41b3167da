"""Questions, hints and predictions of the notebooks.

>>> from kvlab.exercises import ask, hint
>>> ask("03.passes", None)
No answer yet: question 1 of 5. hint("03.passes") helps.
>>> hint("03.passes")
Which banks do lanes 0 and 16 use? (hint 1 of 1)
>>> ask("03.passes", 2)
Right. 1 of 5 in this notebook.

``python -m kvlab.exercises notebooks/*.ipynb`` writes the notebooks with all questions answered into ``solved/``.
"""

from .asking import ask, hint, progress
from .prediction import Prediction, predict
from .question import Question
from .solving import solution, solve

__all__ = ["Prediction", "Question", "ask", "hint", "predict", "progress", "solution", "solve"]
