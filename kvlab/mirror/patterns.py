"""Patterns of a difference between two tiles: transposed, shifted, swizzle, mask or scale missing, rounded.

Standard NumPy on two arrays of one shape; nothing is run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from kvlab.layout.encodings import Encoding

_CLOSE = 1e-5
_NARROW = (ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


@dataclass(frozen=True)
class Pattern:
    """Relation of one tile to another: a name, and words; ``where`` says which elements differ.

    name   ``transposed``, ``shifted``, ``tile shifted``, ``stride``, ``swizzle``, ``mask missing``, ``scale missing``,
           ``sum dropped``, ``negated``, ``offset``, ``rounding``, ``rows permuted``, ``not finite``, ``region``,
           ``equal``; from the text (:mod:`kvlab.mirror.causes`) ``operand missing``, ``carried``

    >>> tile = np.arange(16.0).reshape(4, 4)
    >>> print(pattern_of(tile.T, tile))
    transposed: the first is the second, rows and columns exchanged; 12 of 16 elements differ, rows 0-3, columns 0-3
    """

    name: str
    words: str
    where: str

    def __str__(self) -> str:
        return f"{self.name}: {self.words}" + f"; {self.where}" * bool(self.where)


def pattern_of(first: np.ndarray, second: np.ndarray, *others: tuple[str, np.ndarray]) -> Pattern:
    """The pattern of the difference of two tiles of one shape, the first's values against the second's.

    others   further tiles of the second side, each with words for it (``"of the iteration before"``): if the first is
             one of them, a whole tile is shifted

    ValueError where the shapes differ.

    >>> x = np.linspace(1, 2, 8)
    >>> pattern_of(x * 0.125, x).words
    'the first is 0.125 times the second'
    >>> pattern_of(x.astype(np.float16).astype(np.float64), x).name
    'rounding'
    """
    if first.shape != second.shape:
        raise ValueError(f"first has shape {first.shape}: must be {second.shape}, that of second")
    a, b = (np.asarray(x).astype(np.float64) for x in (first, second))
    differs = differing(a, b)
    where = _region(differs)
    if not differs.any():
        return Pattern("equal", "no element differs", "")
    named: Iterator[tuple[str, str]] = itertools.chain(
        ((name, f"the first is the second's tile {words}") for words, tile in others if tile.shape == a.shape
         for name in ["tile shifted"] if _near(a, tile.astype(np.float64)).all()),
        (("sum dropped", f"the first is the second without its value {words}") for words, tile in others
         if tile.shape == a.shape and words.endswith("before") and _near(a, b - tile.astype(np.float64)).all()),
        _moved(a, b), _masked(a, b, differs), _not_finite(a, b, differs), _scaled(a, b), _rounded(a, b),
    )
    for name, words in named:
        return Pattern(name, words, where)
    return Pattern("region", "no known pattern", where)


def differing(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The elements of two tiles that differ by more than rounding in float32, as booleans.

    >>> differing(np.float32([1, 2, np.nan]), np.float32([1, 3, np.nan])).tolist()
    [False, True, False]
    """
    return ~_near(first.astype(np.float64), second.astype(np.float64))


def held_by(layout: Encoding, elements: np.ndarray) -> str:
    """Words for the warps, lanes and registers that hold these elements of a tile, a boolean for each.

    >>> from kvlab.layout.encodings import BlockedLayout
    >>> held_by(BlockedLayout([1, 4], [4, 8], [2, 1], [1, 0]), np.arange(256).reshape(8, 32) % 32 < 8)
    '16 lanes of 64: warps 0-1, lanes 0-1, 8-9, 16-17, 24-25, registers 0-3'
    """
    linear = layout.to_linear_layout(elements.shape)
    at = linear.coordinates()
    hit = elements[tuple(np.moveaxis(at, -1, 0))]
    names = list(linear.in_dims)
    kept = [names.index(name) for name in ("warp", "lane", "register")]
    hit = hit.any(axis=tuple(n for n in range(hit.ndim) if n not in kept)) if len(names) > 3 else hit
    order = [sorted(kept).index(axis) for axis in kept]
    hit = hit.transpose(order)
    parts = [f"{name} {_runs(np.flatnonzero(hit.any(axis=tuple({0, 1, 2} - {axis}))))}"
             for axis, name in enumerate(("warps", "lanes", "registers"))]
    lanes = hit.any(axis=2)
    return f"{int(lanes.sum())} lanes of {lanes.size}: {', '.join(parts)}"


def _runs(numbers: np.ndarray) -> str:
    """Numbers as runs: ``0-3, 8-11``."""
    starts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    ends = [*(starts[1:] - 1), len(numbers) - 1]
    return ", ".join(f"{numbers[a]}-{numbers[b]}" if b > a else f"{numbers[a]}"
                     for a, b in zip(starts, ends, strict=True))


def _near(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(b)
        scale = np.abs(b[finite]).max(initial=0)
        same: np.ndarray = (a == b) | (np.isnan(a) & np.isnan(b)) | (finite & (np.abs(a - b) <= _CLOSE * scale))
    return same


def _moved(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[str, str]]:
    """Elements that are the same at other places."""
    varied = len(np.unique(b)) > 1
    if not varied:
        return
    if a.ndim == 2 and a.shape[0] == a.shape[1] and _near(a, b.T).all():
        yield "transposed", "the first is the second, rows and columns exchanged"
    if a.ndim == 2 and _near(a.ravel(), b.T.ravel()).all():
        yield "transposed", "the first is the second, read column by column"
    for axis, size in enumerate(a.shape):
        what = ("elements", ) if a.ndim == 1 else ("rows", "columns", "places")
        for by in [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < size]:
            low, high = ([slice(None)] * a.ndim for _ in range(2))
            low[axis], high[axis] = slice(0, size - by), slice(by, size)
            for one, other, sign in ((low, high, "on"), (high, low, "back")):
                x, y = a[tuple(one)], b[tuple(other)]
                if len(np.unique(y)) > 1 and _near(x, y).all():
                    yield "shifted", f"the first is the second, {by} {what[min(axis, len(what) - 1)]} further {sign}"
    for axis, line in ((0, "row" if a.ndim == 2 else "element"), (1, "column"))[: min(a.ndim, 2)]:
        lines = [np.moveaxis(x, axis, 0) for x in (a, b)]
        for by in (n for n in (0, 2, 3, 4, 5, 8, 16) if 4 * n <= len(lines[0])):
            place = np.arange(len(lines[0]))
            kept = place * by < len(place)
            for mine, theirs in ((0, 1), (1, 0)):
                source = lines[theirs][place[kept] * by]
                distinct = len(np.unique(source if by else lines[theirs])) > 1
                if distinct and _near(lines[mine][kept], source).all():
                    step = f"{by} n" if by else "0"
                    said = ("n", step) if mine == 0 else (step, "n")
                    yield "stride", f"{line} {said[0]} of the first is {line} {said[1]} of the second"
    if a.ndim == 2:
        rows, columns = np.arange(a.shape[0])[:, None], np.arange(a.shape[1])
        for vec, per, most in itertools.product((1, 2, 4, 8, 16), (1, 2, 4), (2, 4, 8, 16)):
            if vec * most <= a.shape[1] and not a.shape[1] % (vec * most):
                there = columns ^ (rows // per % most * vec)
                if _near(a, b[rows, there]).all():
                    yield "swizzle", f"the first is the second with columns XORed: swizzle ({vec}, {per}, {most})"
        if _near(a[np.lexsort(a.T)], b[np.lexsort(b.T)]).all():
            yield "rows permuted", "the first has the rows of the second in another order"


def _masked(a: np.ndarray, b: np.ndarray, differs: np.ndarray) -> Iterator[tuple[str, str]]:
    """Elements that one side replaces by a constant."""
    for name, ours, theirs in (("the first", a, b), ("the second", b, a)):
        constant = np.unique(theirs[differs])
        if len(constant) == 1 and (constant[0] in (0, -np.inf, np.inf) or abs(constant[0]) >= 1e4) \
                and not differs.all() and len(np.unique(ours[differs])) >= 1:
            yield "mask missing", f"{name} has values where the other has {constant[0]:g}"


def _scaled(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[str, str]]:
    """A factor or a summand."""
    use = np.isfinite(a) & np.isfinite(b) & (b != 0)
    if use.sum() >= 2:
        ratio = a[use] / b[use]
        middle = float(np.median(ratio))
        if middle not in (0.0, 1.0) and np.allclose(ratio, middle, rtol=1e-4) and abs(middle - 1) > 0.02:
            yield ("negated", "the first is the second with the other sign") if abs(middle + 1) < 1e-4 else \
                ("scale missing", f"the first is {middle:.6g} times the second")
        if a.ndim == 2:
            for axis, what in ((0, "column"), (1, "row")):
                with np.errstate(invalid="ignore", divide="ignore"):
                    lines = np.where(use, a / np.where(b == 0, 1, b), np.nan)
                    if np.isfinite(lines).any(axis=axis).all():
                        middles = np.nanmedian(lines, axis=axis, keepdims=True)
                        if np.nanmax(np.abs(lines / np.where(middles == 0, 1, middles) - 1)) < 1e-4 and \
                                np.abs(middles - 1).max() > 0.02 and np.abs(middles).min() > 0:
                            yield "scale missing", f"each {what} of the first is the second's times a factor of its own"
        apart = (a - b)[use]
        if len(np.unique(b[use])) > 1 and np.allclose(apart, apart[0], rtol=1e-4) and apart[0]:
            yield "offset", f"the first is the second plus {apart[0]:.6g}"


def _rounded(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[str, str]]:
    """One side in a narrower type."""
    scale = max(float(np.abs(b[np.isfinite(b)]).max(initial=0)), 1e-300)
    for dtype in _NARROW:
        for name, ours, theirs in (("the first", a, b), ("the second", b, a)):
            step = float(ml_dtypes.finfo(dtype).eps)
            with np.errstate(over="ignore", invalid="ignore"):
                rounded = theirs.astype(np.float32).astype(dtype).astype(np.float64)
            if _near(ours, rounded).all():
                yield "rounding", f"{name} is the other rounded to {np.dtype(dtype).name}"
            elif step < 2**-6 and step * scale / 16 < np.abs(a - b).max() <= 2 * step * scale:
                yield "rounding", f"as far apart as values rounded to {np.dtype(dtype).name}"
                return


def _not_finite(a: np.ndarray, b: np.ndarray, differs: np.ndarray) -> Iterator[tuple[str, str]]:
    for name, ours, theirs in (("the first", a[differs], b[differs]), ("the second", b[differs], a[differs])):
        if not np.isfinite(ours).all() and np.isfinite(theirs).any():
            yield "not finite", f"{name} is {'NaN' if np.isnan(ours).any() else 'infinite'} where the other has numbers"


def _region(differs: np.ndarray) -> str:
    """Words for the elements that differ."""
    many, names = int(differs.sum()), ("rows", "columns") if differs.ndim == 2 else ("elements",)
    text = f"{many} of {differs.size} elements differ"
    if not differs.ndim or not many or differs.ndim > 2:
        return text
    spans = []
    for axis, name in enumerate(names):
        other = tuple(n for n in range(differs.ndim) if n != axis)
        hit = np.flatnonzero(differs.any(axis=other) if other else differs)
        steps = np.unique(np.diff(hit))
        run = f"{hit[0]}-{hit[-1]}" if len(hit) > 1 else f"{hit[0]}"
        even = len(steps) == 1 and int(steps[0]) > 1
        spans.append(f"{name} {run} in steps of {steps[0]}" if even else f"{name} {run}")
    return f"{text}, {', '.join(spans)}"
