"""A case of a pairwise table as a call: its operands, what it should give, and the backends that it goes to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pairs.covering import Table
from pairs.formula import Rows, compare
from pairs.operands import Operand, only_within, placed, result

from kvlab.common.arrays import to_numpy, to_torch

Array = np.ndarray[Any, Any]
SCORES: dict[str, tuple[Any, ...]] = {
    "softcap": (0.0, 2.5),
    "sinks": ("", "float32", "bfloat16"),
    "slopes": ("", "head", "sequence"),
    "q_scale": ("", "number", "head"),
    "k_scale": ("", "number", "head", "token"),
}
CALLS: dict[str, tuple[Any, ...]] = {
    "base2": (False, True),
    "out": ("new", "given"),
    "ints": ("int32", "int64"),
    "spread": (1, 4),
}
"""Levels that all operations have: of scores, and of calls."""
NUMBERS = {"q": 0.75, "k": 0.625, "v": 1.375, "rope": 0.875}


class Row:
    """A row of a table; its levels are attributes. Equal only to itself."""

    def __init__(self, number: int, levels: dict[str, Any]) -> None:
        self.number, self.levels = number, levels

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["levels"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __str__(self) -> str:
        words = (str(level) for level in self.levels.values() if level not in (None, "", False, 0.0))
        return f"{self.number}-" + "-".join(words).replace("float8_e4m3fn", "fp8").replace(" ", "").replace("'", "")


def rows_of(table: Table) -> list[Row]:
    """The rows of a table, numbered."""
    return [Row(number, levels) for number, levels in enumerate(table.rows() + table.further_rows())]


@dataclass
class Call:
    """``function(*arrays, **options)``; options that are functions are called each time (masks are made anew)."""

    row: Row
    function: Callable[[], Any]
    arrays: list[Array]
    options: dict[str, Any]
    operands: dict[str, Operand]
    expected: Rows
    out: tuple[tuple[int, ...], str, int] | None = None
    """Shape, dtype and unit of an output of the caller's."""
    emulated: dict[str, Any] = field(default_factory=dict)
    """Options of the emulator."""
    written: dict[str, Operand] = field(default_factory=dict)
    """Operands that it writes, besides out."""
    e4m3: bool = False
    """Whether scores are products of e4m3, which Hopper's tensor cores sum in 14 digits."""

    def check(self, backend: str) -> None:
        """Run it and compare: "emulator", "triton" (interpreted), "reference", "hopper" (its emulator), "cuda" (what
        the GPU gets by default), "cuda triton", "cuda hopper"."""
        convert = (lambda x: x) if not backend.startswith("cuda") else _on_gpu
        options = {name: value() if callable(value) else value for name, value in self.options.items()}
        options |= _backend(backend) | (self.emulated if backend == "emulator" else {})
        given = None if self.out is None else result("out", *self.out)
        if given is not None:
            options["out"] = convert(given.array)
        options = {name: _converted(value, convert) for name, value in options.items()}
        got, lse = self.function()(*map(convert, self.arrays), **options, return_lse=True)
        if given is not None:
            assert got is options["out"], "out is what the caller gave"
            if backend.startswith("cuda"):
                given.array[...] = _host(got)
            else:
                assert only_within(given), "written beside out"
            got = given.array
        compare(_host(got), _host(lse), self.expected, fourteen=self.e4m3 and backend.startswith("cuda"))


def _backend(name: str) -> dict[str, str]:
    names = {"cuda": "auto", "cuda triton": "triton", "cuda hopper": "hopper"}
    return {"backend": names.get(name, name)}


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Arrays, and those in the fields of masks, by ``convert``."""
    if isinstance(value, np.ndarray):
        return convert(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        some = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        made = {name: _converted(x, convert) for name, x in some.items()}
        return value if all(made[n] is some[n] for n in some) else dataclasses.replace(value, **made)
    return value


def _on_gpu(array: Array, buffers: dict[int, Any] | None = None) -> Any:
    """On the GPU with the strides that it has. Views of one buffer are views of one there, if it is in ``buffers``."""
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    flat = (buffers or {}).get(whole.ctypes.data)
    if flat is None:
        flat = _flat(whole)
    first = (array.ctypes.data - whole.ctypes.data) // array.itemsize
    return flat.as_strided(array.shape, [s // array.itemsize for s in array.strides], first)


def _flat(buffer: Array) -> Any:
    """A buffer's elements on the GPU; those of a mask are bools, which caches do not hold."""
    flat = np.ascontiguousarray(buffer).reshape(-1)
    return to_torch(flat.view(np.uint8)).cuda() != 0 if flat.dtype == bool else to_torch(flat).cuda()


def _host(array: Any) -> Array:
    return to_numpy(array if isinstance(array, np.ndarray) else array.cpu())


@dataclass(frozen=True)
class Scale:
    """A scale of a call: a number, or an array of heads or of tokens and heads."""

    number: float = 1.0
    heads: Operand | None = None
    tokens: Operand | None = None

    @property
    def operand(self) -> Operand | None:
        return self.heads or self.tokens

    def at(self, where: Any) -> Array:
        """float64, ``[Hkv]`` or ``[n, Hkv]`` of the rows ``where``, or a number."""
        if self.operand is None:
            return np.asarray(self.number)
        array = self.operand.array
        return (array if self.tokens is None else array[where]).astype(np.float64)


def scale(
    name: str, kind: str, rng: np.random.Generator, heads: int, tokens: tuple[int, ...] = (),
    order: tuple[int, ...] | None = None,
) -> Scale:
    """The scale of operand ``name``; those of tokens are still to be filled in (with :func:`fill`)."""
    if kind == "number":
        return Scale(NUMBERS[name])
    if kind == "head":
        return Scale(heads=_apart(f"{name}_scale", random_scales(rng, (heads,))))
    if kind == "token":
        return Scale(tokens=_apart(f"{name}_scale", np.full(tokens, np.nan, np.float32), order))
    return Scale()


def _apart(name: str, values: Array, order: tuple[int, ...] | None = None) -> Operand:
    """``values`` whose neighbours along the last axis lie apart, too."""
    order = None if order is None else (*order, values.ndim)
    made = placed(name, values[..., None], order=order)
    return Operand(made.array[..., 0], made.buffer)


def random_scales(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Around 1, no two alike."""
    return (0.5 + rng.random(shape)).astype(np.float32)


def argument(scale: Scale, view: Callable[[Array], Array] = lambda x: x) -> Any:
    """What a call gets for a scale."""
    if scale.operand is not None:
        return scale.heads.array if scale.heads is not None else view(scale.tokens.array)
    return None if scale.number == 1 else scale.number
