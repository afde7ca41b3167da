"""Checks of the arrays of a call: declared for each operand, and functions for what goes together.

An :class:`Operand` states what holds of one array: its axes, dtypes, strides. ``check_heads(q, kv)`` asks whether q, K
and V go together (``check_dtypes``: q and K alone) and ``check_result(out, ...)`` whether a caller's out fits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.attention.call.checks import (
    DTYPES,
    check_arrays,
    check_integers,
    check_strides,
    check_writeable,
    known_dtype,
)
from kvlab.attention.features.intervals import UNLIMITED
from kvlab.attention.features.scales import columns_of
from kvlab.attention.tiles.pieces import MAX_DEPTH
from kvlab.common.arrays import dtype_of
from kvlab.common.checks import require
from kvlab.memory import bfloat16, float8_e4m3fn, float16

Sizes = dict[str, int]
"""Axes by name."""


@dataclass(frozen=True)
class Operand:
    """Rules for one array of an operation.

    axes : forms of its shape, ``"[B, Hq, D] or [B, S, Hq, D]"``: the form of as many axes names their sizes. An axis
        ``B = {B}`` is as long as the one that an operand before it named; ``B + 1`` names what is one less.
    like : the operand, named before it, whose shape it has.
    integers : of 32 or 64 bits; dtypes : one of these. Neither: other checks tell.
    strides : "row", contiguous in the last dimension; "any", not negative; "": other checks tell.
    paged : laid out as ``kv_layout`` says. optional : may be None.

    >>> operands = Operand("q", "[B, D]"), Operand("block_table", "[B = {B}, columns]", integers=True)
    >>> check_declared(operands, {"q": np.zeros((2, 8)), "block_table": np.zeros((2, 5), int)})["columns"]
    5
    >>> check_declared(operands, {"q": np.zeros((2, 8)), "block_table": np.zeros((3, 5), int)})
    Traceback (most recent call last):
        ...
    ValueError: block_table has shape (3, 5): must be [B = 2, columns]
    """

    name: str
    axes: str = ""
    like: str = ""
    integers: bool = False
    dtypes: tuple[np.dtype[Any], ...] = ()
    strides: str = "row"
    paged: bool = False
    optional: bool = False

    def sizes(self, array: Any, known: Sizes) -> Sizes:
        """Sizes that its shape tells. ValueError for a shape of another form."""
        shape = tuple(int(n) for n in array.shape)
        for form in re.findall(r"\[([^\]]*)\]", self.axes):
            axes = form.split(", ")
            found = dict(map(_size, axes, shape))
            bound = all(known[name] == found[name] for name in found if f"{{{name}}}" in form)
            if len(axes) == len(shape) and bound and min(found.values(), default=0) >= 0:
                return found
        require(not self.axes, f"{self.name} has shape {shape}", self.axes.format(**known))
        return {}


STARTS = Operand("cu_seqlens_q", "[B + 1]", integers=True)
"""Where each of B sequences starts in q, and the total."""
STARTS_OF_K = Operand("cu_seqlens_k", like="cu_seqlens_q", integers=True)
"""The same of k."""
TABLE = Operand("block_table", "[B = {B}, columns]", integers=True)
"""The pages of each sequence."""


def _size(axis: str, n: int) -> tuple[str, int]:
    """The name of an axis of n, and its size."""
    name, _, more = axis.partition(" = ")[0].partition(" + ")
    return name, n - int(more or 0)


def check_declared(operands: tuple[Operand, ...], arrays: dict[str, Any]) -> Sizes:
    """The sizes that the shapes tell. ValueError unless these are arrays of one library in one memory, without
    gradients, of shapes and dtypes as declared.
    """
    if arrays:
        check_arrays(arrays)
    sizes: Sizes = {}
    for operand in operands:
        if (array := arrays.get(operand.name)) is not None:
            sizes = operand.sizes(array, sizes) | sizes
            if (other := arrays.get(operand.like)) is not None:
                shape, expected = tuple(array.shape), tuple(other.shape)
                require(shape == expected, f"{operand.name} has shape {shape}", f"that of {operand.like}, {expected}")
            if operand.integers:
                check_integers(operand.name, array)
            if operand.dtypes:
                fits = known_dtype(array, operand.name) in operand.dtypes
                require(fits, f"{operand.name} has dtype {array.dtype}", listed(operand.dtypes))
    return sizes


def check_laid_out(operands: tuple[Operand, ...], arrays: dict[str, Any]) -> None:
    """ValueError for strides that are not as declared."""
    for operand in operands:
        if operand.strides and operand.name in arrays:
            check_strides(operand.name, arrays[operand.name], contiguous=operand.strides == "row")


def listed(dtypes: tuple[np.dtype[Any], ...]) -> str:
    """
    >>> listed(DTYPES)
    'bfloat16, float16 or float32'
    """
    *first, last = (dtype.name for dtype in dtypes)
    return f"{', '.join(first)} or {last}" if first else last


def check_dtypes(q: Any, k_name: str, k: Any, *, four_bits: bool = False) -> tuple[Any, Any]:
    """The dtypes of q and K. ValueError unless q is bfloat16, float16 or float32 and K the same, or q is bfloat16,
    float16 or e4m3 and K is e4m3, or with ``four_bits`` q is bfloat16 or float16 and K is uint8.
    """
    of_q, of_k = known_dtype(q, "q"), known_dtype(k, k_name)
    known = of_q in (*DTYPES, float8_e4m3fn)
    require(known, f"q has dtype {q.dtype}", "bfloat16, float16, float32 or float8_e4m3fn")
    narrow = of_q in (bfloat16, float16)
    narrower = (float8_e4m3fn, np.dtype(np.uint8))[: 1 + four_bits] if narrow else ()
    accepted = f"that of q, {q.dtype}" + "".join(f", or {dtype}" for dtype in narrower)
    require(of_k == of_q or of_k in narrower, f"{k_name} has dtype {k.dtype}", accepted)
    return of_q, of_k


def check_heads(q: Any, kv: dict[str, Any], *, four_bits: bool = False) -> None:
    """ValueError unless q ``[.., Hq, D]`` fits K ``[.., Hkv, D]`` and V ``[.., Hkv, Dv]``, in this order in ``kv``.

    q is bfloat16, float16 or float32 and K and V the same, or q is bfloat16, float16 or e4m3 and K and V are e4m3, or
    with ``four_bits`` q is bfloat16 or float16 and K and V are uint8, two columns a byte. D and Dv are multiples of 8
    from 16 to 576 (of 16 with e4m3; of 32 with uint8, from 32).
    """
    (k_name, k), (v_name, v) = kv.items()
    _, of_k = check_dtypes(q, k_name, k, four_bits=four_bits)
    require(known_dtype(v, v_name) == of_k, f"{v_name} has dtype {v.dtype}", f"that of {k_name}, {k.dtype}")
    (q_heads, D), shape = q.shape[-2:], tuple(int(n) for n in k.shape)
    require(columns_of(k) == D, f"{k_name} has head dimension {columns_of(k)}", f"that of q, {D}")
    require(
        tuple(v.shape[:-1]) == shape[:-1],
        f"{v_name} has shape {tuple(v.shape)}",
        f"that of {k_name}, {shape}, but for the last axis",
    )
    require(shape[-3] <= UNLIMITED, f"{k_name} has {shape[-3]} rows", f"at most {UNLIMITED}, as keys have 32 bits")
    kv_heads, unit = shape[-2], {float8_e4m3fn: 16, np.dtype(np.uint8): 32}.get(of_k, 8)
    fits = kv_heads > 0 and q_heads > 0 and q_heads % kv_heads == 0
    require(fits, f"q has {q_heads} heads", f"a multiple of the {kv_heads} heads of {k_name}")
    for what, depth in (("head dimension", D), (f"head dimension of {v_name}", columns_of(v))):
        least = max(16, unit)
        good = least <= depth <= MAX_DEPTH and depth % unit == 0
        require(good, f"{what} {depth}", f"a multiple of {unit} from {least} to {MAX_DEPTH}")


def result_dtype(q: Any) -> np.dtype[Any]:
    """The dtype of the output of a call without ``out``: that of q, bfloat16 for e4m3."""
    dtype = dtype_of(q, "q")
    return bfloat16 if dtype == float8_e4m3fn else dtype


def check_result(out: Any, shape: tuple[int, ...], q: Any) -> None:
    """ValueError unless ``out`` has ``shape`` and q's dtype (bfloat16, float16 or float32 for q of e4m3)."""
    require(tuple(out.shape) == shape, f"out has shape {tuple(out.shape)}", f"{shape}")
    dtype = dtype_of(q, "q")
    if dtype == float8_e4m3fn:
        require(known_dtype(out, "out") in DTYPES, f"out has dtype {out.dtype}", "bfloat16, float16 or float32")
    else:
        require(known_dtype(out, "out") == dtype, f"out has dtype {out.dtype}", f"that of q, {q.dtype}")
    check_strides("out", out)
    check_writeable("out", out)
