"""Judges of what readers build or mend: each tries all inputs and says what is wrong, or ""."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvlab.hardware import wavefronts
from kvlab.layout import Layout, Swizzle

ROWS, VECTORS = 16, 4


class Formula:
    """Judge of a function of whole numbers, which shall be what a text says.

    text      an expression of the inputs' names
    wrong     (expression, what it is) of the mistakes that readers make
    inputs    name -> its values; all their combinations are tried

    >>> place = Formula("16 * row + column", [("8 * row + column", "a row is longer")], row=range(3), column=range(4))
    >>> place(lambda row, column: row), place(lambda row, column: 8 * row + column), place(eval(repr(place)))
    ('for row 0, column 1 it gives 0, right is 1', 'a row is longer', '')
    """

    def __init__(self, text: str, wrong: Sequence[tuple[str, str]] = (), **inputs: Iterable[int]) -> None:
        self.text, self.wrong = text, tuple(wrong)
        self.inputs = {name: np.array(list(values)) for name, values in inputs.items()}

    def __repr__(self) -> str:
        return self.code(self.text)

    def code(self, text: str) -> str:
        """An expression as a function."""
        return f"lambda {', '.join(self.inputs)}: {text}"

    def __call__(self, function: Any) -> str:
        if not callable(function):
            return f"a function of ({', '.join(self.inputs)}) is asked"
        at = np.meshgrid(*self.inputs.values(), indexing="ij")
        try:
            found = np.vectorize(function)(*at)
        except Exception as error:  # whatever the reader's function raises is the reader's
            return f"it raises {error!r}"
        for text, what in self.wrong:
            if np.array_equal(found, np.vectorize(eval(self.code(text)))(*at)):
                return what
        right = np.vectorize(eval(repr(self)))(*at)
        wrong = np.argwhere(found != right) if found.shape == right.shape else np.zeros((1, len(at)), int)
        if not wrong.size:
            return ""
        one = tuple(wrong[0].tolist())
        where = ", ".join(f"{name} {values[i]}" for (name, values), i in zip(self.inputs.items(), one, strict=True))
        return f"for {where} it gives {found[one]}, right is {right[one]}"


class ElementPlaces:
    """Judge of a layout of a matrix, which shall be that of a text.

    shape     in words, for a shape that is not it
    names     of the two coordinates

    >>> transposed = ElementPlaces("(32,8):(1,40)", "32 columns come first, then 8 rows", ("column", "row"))
    >>> transposed("(32,8):(1,40)"), transposed("(8,32):(40,1)")
    ('', 'its shape is (8, 32): 32 columns come first, then 8 rows')
    >>> transposed(Layout("(32,8):(1,32)"))
    'row 1 of column 0 is sent to 32, it shall lie at 40'
    """

    def __init__(self, text: str, shape: str, names: tuple[str, str]) -> None:
        self.text, self.shape, self.names = text, shape, names

    def __repr__(self) -> str:
        return repr(self.text)

    def __call__(self, layout: Any) -> str:
        right = Layout(self.text)
        try:
            made = layout if isinstance(layout, Layout) else Layout(layout)
            shape = made.shape
        except (TypeError, ValueError) as error:
            return f"that is no layout: {error}"
        if shape != right.shape:
            return f"its shape is {shape}: {self.shape}"
        found, wanted = (np.asarray(one.offsets()) for one in (made, right))
        wrong = np.argwhere(found != wanted)
        if not wrong.size:
            return ""
        i, j = one = tuple(wrong[0].tolist())
        return f"{self.names[1]} {j} of {self.names[0]} {i} is sent to {found[one]}, it shall lie at {wanted[one]}"


def narrow_swizzle(place: Any) -> str:
    """Faults of ``place(row, vector)``, the place 0 to 3 of a 16-byte vector in its row of 64 bytes, for 16 rows that
    ``ldmatrix.x4`` reads without a conflict.

    >>> narrow_swizzle(lambda row, vector: vector)
    'ldmatrix.x4 takes 16 passes, 4 are possible'
    >>> narrow_swizzle(lambda row, vector: vector ^ row // 2 % 4), narrow_swizzle(lambda row, vector: vector + row)
    ('', 'row 1 has places [1, 2, 3, 4]: a row has 0, 1, 2 and 3, each once')
    """
    row, vector = np.indices((ROWS, VECTORS))
    if not callable(place):
        return "a function of (row, vector) is asked"
    try:
        places = np.asarray(place(row, vector))
    except Exception as error:  # whatever the reader's function raises is the reader's
        return f"it raises {error!r} when row and vector are arrays"
    if places.shape != row.shape:
        return f"it gives the shape {places.shape} for arrays of {row.shape}"
    wrong = np.flatnonzero((np.sort(places, axis=1) != np.arange(VECTORS)).any(axis=1))
    if wrong.size:
        return f"row {wrong[0]} has places {places[wrong[0]].tolist()}: a row has 0, 1, 2 and 3, each once"
    lane = np.arange(32)
    passes = 0
    for first in (0, 2):
        at = lane % 16 * 64 + places[lane % 16, first + lane // 16] * 16
        passes = max(passes, wavefronts("ldmatrix.x4", at).wavefronts)
    return "" if passes == 4 else f"ldmatrix.x4 takes {passes} passes, 4 are possible"


def swizzle_of_floats(swizzle: Any) -> str:
    """Faults of a swizzle of a tile of 16 rows and 64 columns of float32 whose vectors ``ldmatrix.x4`` reads.

    >>> swizzle_of_floats(Swizzle(3, 2, 4, "fp32")), swizzle_of_floats(Swizzle(3, 4, 4, "byte"))
    ('', 'its unit is byte: the kernel counts float32')
    >>> swizzle_of_floats(Swizzle(3, 2, 3, "fp32"))
    'ldmatrix.x4 takes 8 passes, 4 are possible'
    """
    if not isinstance(swizzle, Swizzle):
        return "a Swizzle is asked"
    if swizzle.unit != Swizzle(0, 0, 1, "fp32").unit:
        return f"its unit is {swizzle.unit}: the kernel counts float32"
    lane, column = np.arange(32), np.arange(0, 64, 8)[:, None]
    at = 4 * swizzle(lane % 16 * 64 + lane // 16 * 4 + column)
    if (at % 16).any():
        return "it takes vectors of 16 bytes apart"
    passes = max(wavefronts("ldmatrix.x4", one).wavefronts for one in at)
    return "" if passes == 4 else f"ldmatrix.x4 takes {passes} passes, 4 are possible"


def merged(function: Any) -> str:
    """Faults of ``function(outs [splits, D], lses [splits])``, which puts the outputs of splits together.

    >>> merged(lambda outs, lses: outs.mean(axis=0))
    'two splits, of lse 0 and 1: it is off by 0.23'
    """

    def right(outs: Any, lses: Any) -> Any:
        weights = np.exp(lses - lses.max())
        return weights @ outs / weights.sum()

    outs = np.array([[1.0, 0.0], [0.0, 1.0]])
    cases = {"two splits, of lse 0 and 1": (outs, np.array([0.0, 1.0])),
             "a split without a key, of lse -inf": (np.array([[1.0, 2.0], [0.0, 0.0]]), np.array([3.0, -np.inf])),
             "large lse, 999 and 1000": (outs, np.array([999.0, 1000.0]))}
    return _off(function, right, cases, "(outs, lses)")


def scaled_values(function: Any) -> str:
    """Faults of ``function(p [rows, keys], v [keys, D], s [keys])``: P times V, of which each key has a scale.

    >>> scaled_values(lambda p, v, s: p @ v * s.mean())
    '2 rows, 3 keys: it is off by 4.5'
    """
    p, v, s = np.array([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]]), np.array([[1.0, 2], [3, 4], [5, 6]]), np.arange(1.0, 4)
    return _off(function, lambda p, v, s: (p * s) @ v, {"2 rows, 3 keys": (p, v, s)}, "(p, v, s)")


def rows_of_split_keys(function: Any) -> str:
    """Faults of ``function(raw)``: the bytes of x-split keys of 3 heads, 16 slots and 64 dims of two bytes, as rows.

    >>> rows_of_split_keys(lambda raw: raw)
    'these are the bytes as they were'
    >>> rows_of_split_keys(lambda raw: raw.view("u2").reshape(3, 8, 16, 8).transpose(0, 2, 1, 3))
    'heads come before slots: that is HND'
    >>> rows_of_split_keys(lambda raw: raw.view("u2").reshape(3, 8, 16, 8).transpose(2, 0, 1, 3))
    ''
    """
    if not callable(function):
        return "a function of raw is asked"
    split = np.arange(3 * 16 * 64, dtype=np.uint16).reshape(3, 8, 16, 8)
    try:
        found = np.ascontiguousarray(function(split.reshape(-1).view(np.uint8).copy())).reshape(-1).view(np.uint8)
    except Exception as error:  # whatever the reader's function raises is the reader's
        return f"it raises {error!r}"
    if found.size != 2 * split.size:
        return f"it gives {found.size} bytes, {2 * split.size} are asked"
    mistakes = {
        (2, 0, 1, 3): "", (0, 1, 2, 3): "these are the bytes as they were",
        (0, 2, 1, 3): "heads come before slots: that is HND", (2, 1, 0, 3): "the pieces of a row come before its heads",
        (2, 0, 3, 1): "neighbours within a piece are 8 apart",
    }
    for order, what in mistakes.items():
        if np.array_equal(found, split.transpose(order).reshape(-1).view(np.uint8)):
            return what
    right = split.transpose(2, 0, 1, 3).reshape(-1)
    first = int(np.flatnonzero(found.view(np.uint16) != right)[0])
    slot, head, dim = np.unravel_index(first, (16, 3, 64))
    return f"the number of slot {slot}, head {head}, dim {dim} is another one's"


def _off(function: Any, right: Callable[..., Any], cases: dict[str, tuple[Any, ...]], inputs: str) -> str:
    """The first case that a function of arrays gets wrong, and by how much."""
    if not callable(function):
        return f"a function of {inputs} is asked"
    for name, case in cases.items():
        wanted = right(*case)
        try:
            with np.errstate(all="ignore"):
                found = np.asarray(function(*case), float)
        except Exception as error:  # whatever the reader's function raises is the reader's
            return f"{name}: it raises {error!r}"
        if found.shape != wanted.shape:
            return f"{name}: it gives the shape {found.shape}, {wanted.shape} is asked"
        off = np.abs(found - wanted).max()
        if not off < 1e-6:
            return f"{name}: it is off by {off:.2g}"
    return ""
