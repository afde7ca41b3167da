"""Scenes: what an explorer shows, and the knobs of its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.viz.pen.picture import Picture


@dataclass(frozen=True)
class Knob:
    """One value of a state: an integer ``low <= value <= high`` (a slider), or one of ``options`` (a choice).

    >>> Knob("lane", 0, high=31).checked("lane", 31)
    31
    >>> Knob("lane", 0, high=31).checked("lane", 32)
    Traceback (most recent call last):
        ...
    ValueError: lane is 32: must be an integer from 0 to 31
    """

    label: str
    start: Any
    low: int = 0
    high: int = 0
    options: tuple[Any, ...] = ()
    power: bool = False  # the value is an exponent of 2, which is what is shown

    def checked(self, name: str, value: Any) -> Any:
        """The value, as JSON has it; ValueError if the knob cannot have it."""
        if self.options:
            if value not in self.options:
                raise ValueError(f"{name} is {value!r}: must be one of {', '.join(map(repr, self.options))}")
            return self.options[self.options.index(value)]
        whole = hasattr(value, "__index__") and not isinstance(value, bool)
        if not whole or not self.low <= value <= self.high:
            raise ValueError(f"{name} is {value!r}: must be an integer from {self.low} to {self.high}")
        return int(value)

    @property
    def shown(self) -> dict[str, Any]:
        """The form in which the module takes it."""
        if self.options:
            return {"label": self.label, "options": list(self.options)}
        return {"label": self.label, "low": self.low, "high": self.high, "power": self.power}


@dataclass(frozen=True)
class Scene:
    """An object as the module explores it.

    kind     name of the scene in the module
    data     what its picture is made of besides the state: what JSON can say
    knobs    of the state, by name
    still    draws the picture without a browser
    """

    kind: str
    data: Mapping[str, Any]
    knobs: Mapping[str, Knob]
    still: Callable[[], Picture]

    @property
    def shown(self) -> dict[str, Any]:
        """The form in which the module takes it."""
        return {
            "kind": self.kind, "data": dict(self.data), "knobs": {name: knob.shown for name, knob in self.knobs.items()}
        }
