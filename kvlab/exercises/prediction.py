"""Guesses before a picture: a choice is kept and, after the picture, held against what is true."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from html import escape
from typing import Any

from kvlab.common.checks import require, shown

from .question import same

MODULE = """
export default { render({ model, el }) {
  const name = "kvlab-guess-" + Math.random().toString(36).slice(2);
  const form = document.createElement("fieldset");
  form.style.cssText = "border:0;padding:0;margin:4px 0;display:flex;gap:14px;flex-wrap:wrap";
  model.get("choices").forEach((text, i) => {
    const label = document.createElement("label"), box = document.createElement("input");
    box.type = "radio"; box.name = name; box.checked = model.get("chosen") === i;
    box.onchange = () => { model.set("chosen", i); model.save_changes(); };
    model.on("change:chosen", () => { box.checked = model.get("chosen") === i; });
    label.append(box, " " + text); form.append(label);
  });
  el.append(form);
} };
"""


class Prediction:
    """A guess among choices. ``value`` is the choice, None until there is one; it may be set.

    >>> guess = predict(1, 4, 8)
    >>> guess
    Your guess: 1, 4 or 8? (set .value)
    >>> guess.value = 4
    >>> guess.compare(8)
    You guessed 4. It is 8.
    >>> guess.compare(5)
    Traceback (most recent call last):
    ValueError: truth is 5: must be one of 1, 4, 8
    """

    def __init__(self, choices: Sequence[Any]) -> None:
        self.choices = tuple(choices)
        self._value: Any = None
        self._widget: Any = None

    @property
    def value(self) -> Any:
        """The choice, or None. ValueError for what is none of the choices."""
        if self._widget is not None and self._widget.chosen >= 0:
            return self.choices[self._widget.chosen]
        return self._value

    @value.setter
    def value(self, guess: Any) -> None:
        at = self._which("value", guess)
        self._value = self.choices[at]
        if self._widget is not None:
            self._widget.chosen = at

    def _which(self, name: str, answer: Any) -> int:
        found = [i for i, one in enumerate(self.choices) if same(one, answer)]
        require(found, f"{name} is {shown(answer)}", f"one of {', '.join(map(str, self.choices))}")
        return found[0]

    def compare(self, truth: Any) -> None:
        """Print the guess beside what is true. ValueError for what is none of the choices."""
        self._which("truth", truth)
        if self.value is None:
            print(f"It is {truth}. (You made no guess.)")
        else:
            print(f"You guessed {self.value}. It is {truth}." if not same(self.value, truth) else f"So it is: {truth}.")

    def widget(self) -> Any:
        """The anywidget widget of the choices, one for each prediction. ImportError without anywidget."""
        if self._widget is None:
            self._widget = _widget_class()(choices=list(map(str, self.choices)))
            if self._value is not None:
                self._widget.chosen = self.choices.index(self._value)
        return self._widget

    def __repr__(self) -> str:
        *first, last = map(str, self.choices)
        return f"Your guess: {', '.join(first)} or {last}? (set .value)"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        plain = {"text/plain": repr(self), "text/html": self._repr_html_()}
        if importlib.util.find_spec("anywidget") is None:
            return plain
        made = self.widget()._repr_mimebundle_(**kwargs)
        data, more = made if isinstance(made, tuple) else (made, {})
        return {**(data or {}), **plain}, more


def predict(*choices: Any) -> Prediction:
    """A guess among choices, at least two, all different: shown as buttons in a notebook with anywidget.

    Raises ValueError for fewer choices or equal ones.

    >>> predict(8)
    Traceback (most recent call last):
        ...
    ValueError: choices is (8,): must be at least two, all different
    """
    different = len({str(one) for one in choices}) == len(choices)
    require(len(choices) > 1 and different, f"choices is {shown(choices)}", "at least two, all different")
    return Prediction(choices)


@functools.cache
def _widget_class() -> Any:
    """The class of the widgets; ``chosen`` is the place of the choice, -1 before there is one."""
    anywidget, traits = (importlib.import_module(name) for name in ("anywidget", "traitlets"))

    class PredictionWidget(anywidget.AnyWidget):  # type: ignore[name-defined]
        _esm = MODULE
        choices = traits.List().tag(sync=True)
        chosen = traits.Int(-1).tag(sync=True)

    return PredictionWidget
