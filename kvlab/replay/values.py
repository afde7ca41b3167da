"""Values of a call as JSON, and back: its arrays by name, and no class but those that operations take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvlab.attention import Rope, Schedule, masks
from kvlab.attention.kv_store.inputs import Names
from kvlab.attention.schedule.config import ScheduleConfig, ScheduleProblem
from kvlab.common.checks import require, shown
from kvlab.common.torch_here import is_torch

from .array_values import dtype_named, known_array

_MASKS = (
    masks.NullMask, masks.CausalMask, masks.SlidingWindowCausalMask, masks.SlidingWindowNonCausalMask, masks.BandMask,
    masks.ChunkedMask, masks.ChunkedCausalMask, masks.CausalPaddingMask, masks.MaterializedMask, masks.AndMask,
    masks.OrMask,
)
_SCHEDULE = ("problem", "config", "list", "seq_lens", "cu_seqlens", "rest")
CLASSES: dict[str, tuple[type, tuple[str, ...]]] = {
    **{one.__name__: (one, tuple(f.name for f in dataclasses.fields(one) if f.init))
       for one in (*_MASKS, Rope, ScheduleProblem, ScheduleConfig)},
    "Schedule": (Schedule, _SCHEDULE),
    "Names": (Names, Names._fields),
}
"""Classes of arguments, and what they are made of."""
MOST_DEPTH = 32


def packed(value: Any, name: str, arrays: dict[str, Any]) -> Any:
    """``value`` as JSON has it. Arrays go to ``arrays`` by where they are, as ``mask.array``. What has no such form is
    ``{"missing": its class}``.

    >>> arrays = {}
    >>> packed((np.float32(0.5), float("inf")), "window", arrays)
    {'tuple': [{'number': 'float32', 'bytes': '0000003f'}, {'float': 'inf'}]}
    >>> packed(masks.CausalPaddingMask(np.array([3])), "mask", arrays), list(arrays)
    ({'class': 'CausalPaddingMask', 'fields': {'valid_lengths': {'array': 'mask.valid_lengths'}}}, \
['mask.valid_lengths'])
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, np.generic) and value.dtype.kind != "O":
        return {"number": value.dtype.name, "bytes": value.tobytes().hex()}
    if isinstance(value, np.ndarray) or is_torch(value):
        if not known_array(value):
            return {"missing": kind.__name__}
        arrays[name] = value
        return {"array": name}
    if kind in (tuple, list):
        return {kind.__name__: [packed(one, f"{name}[{i}]", arrays) for i, one in enumerate(value)]}
    known, fields = CLASSES.get(kind.__name__, (None, ()))
    if kind is not known:
        return {"missing": kind.__name__}
    inside = {field: packed(getattr(value, field), f"{name}.{field}", arrays) for field in fields}
    return {"class": kind.__name__, "fields": inside}


def unpacked(tree: Any, name: str, arrays: Mapping[str, Any], depth: int = 0) -> Any:
    """The value that :func:`packed` was given, with ``arrays`` for its arrays. ValueError for another tree.

    >>> unpacked({"class": "ChunkedMask", "fields": {"chunk": 4}}, "mask", {})
    ChunkedMask(chunk=4)
    >>> unpacked({"class": "Popen", "fields": {}}, "mask", {})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: mask.class is 'Popen': must be one of NullMask, ...
    """
    require(depth < MOST_DEPTH, f"{name} is {depth} deep", f"less than {MOST_DEPTH}")
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    require(isinstance(tree, dict) and tree, f"{name} is {shown(tree)}", "a value of a recorded call")
    what, inside = next(iter(tree.items()))
    if what == "float":
        require(inside in ("inf", "-inf", "nan"), f"{name}.float is {shown(inside)}", "inf, -inf or nan")
        return float(inside)
    if what == "number":
        dtype, bits = dtype_named(inside, f"{name}.number"), tree.get("bytes")
        fits = isinstance(bits, str) and len(bits) == 2 * dtype.itemsize and not set(bits) - set("0123456789abcdef")
        require(fits, f"{name}.bytes is {shown(bits)}", f"{dtype.itemsize} bytes in hex")
        return np.frombuffer(bytes.fromhex(bits or ""), dtype)[0]
    if what == "array":
        require(isinstance(inside, str) and inside in arrays, f"{name}.array is {shown(inside)}", "one of the arrays")
        return arrays[inside]
    if what in ("tuple", "list"):
        require(isinstance(inside, list), f"{name}.{what} is {shown(inside)}", "a list")
        items = [unpacked(one, f"{name}[{i}]", arrays, depth + 1) for i, one in enumerate(inside)]
        return tuple(items) if what == "tuple" else items
    require(what == "class", f"{name} is {shown(tree)}", "a value of a recorded call")
    fits = isinstance(inside, str) and inside in CLASSES
    require(fits, f"{name}.class is {shown(inside)}", f"one of {', '.join(CLASSES)}")
    (kind, fields), given = CLASSES[inside], tree.get("fields")
    fits = isinstance(given, dict) and set(given) == set(fields)
    require(fits, f"{name}.fields is {shown(given)}", f"those of {inside}: {', '.join(fields) or 'none'}")
    made = {field: unpacked(given[field], f"{name}.{field}", arrays, depth + 1) for field in fields}
    try:
        return kind(**made)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{name}.fields are no {inside}: must be ({error})") from None


def missing_in(tree: Any, name: str) -> list[str]:
    """Places whose values a file does not have because nothing says how to write them.

    >>> missing_in({"tuple": [1, {"missing": "EvenKeys"}]}, "mask")
    ['mask[1]: a EvenKeys, a class of the caller']
    """
    if not isinstance(tree, dict):
        return []
    if "missing" in tree:
        return [f"{name}: a {tree['missing']}, a class of the caller"]
    inside = tree.get("fields")
    if isinstance(inside, dict):
        return [one for field, value in inside.items() for one in missing_in(value, f"{name}.{field}")]
    items = next(iter(tree.values()), None)
    if isinstance(items, list):
        return [one for i, value in enumerate(items) for one in missing_in(value, f"{name}[{i}]")]
    return []
