"""Arrays in a file: how they lie, their values or a digest of them; and the same arrays again, in the same places."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvlab.common.arrays import address_of, on_gpu
from kvlab.common.checks import require, shown
from kvlab.common.dtypes import as_dtype
from kvlab.common.torch_here import is_torch

ALIGNMENT = 256
"""Where an array begins is kept by its remainder: calls ask for less, and arrays of this one are laid out again."""
POISONED = 1 << 28
"""Bytes of a storage that are poisoned before values are put into it; a larger one is left to the system, as zeros."""
SAMPLE = 16
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}

Entry = dict[str, Any]


def known_array(array: Any) -> bool:
    """Tells whether an array's values are simply its bytes.

    >>> known_array(np.zeros(2)), known_array(np.array([None])), known_array(np.ma.zeros(2))
    (True, False, False)
    """
    if is_torch(array):
        return str(array.layout) == "torch.strided" and array.element_size() in _BITS and not array.is_quantized
    plain = not isinstance(array, np.ma.MaskedArray | np.matrix) and array.dtype.names is None
    return bool(plain and array.dtype.kind != "O" and array.dtype.itemsize in _BITS)


def name_of_dtype(array: Any) -> str:
    """The dtype's name, of another byte order its NumPy text.

    >>> name_of_dtype(np.zeros(1, np.float32)), name_of_dtype(np.zeros(1, ">f4"))
    ('float32', '>f4')
    """
    if is_torch(array):
        return str(array.dtype).removeprefix("torch.")
    return array.dtype.name if array.dtype.isnative else array.dtype.str


def dtype_named(name: Any, field: str) -> np.dtype[Any]:
    """The dtype of a name. ValueError, naming the field, for another."""
    require(isinstance(name, str), f"{field} is {shown(name)}", "the name of a dtype")
    try:
        return as_dtype(name)
    except ValueError:
        pass
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = np.dtype("O")
    fits = dtype.kind in "biufc" and dtype.itemsize in _BITS
    require(fits, f"{field} is {shown(name)}", "the name of a dtype of 1, 2, 4 or 8 bytes")
    return dtype


def strides_in_bytes(array: Any) -> tuple[int, ...]:
    """Strides of an array of either library in bytes."""
    if is_torch(array):
        return tuple(int(step) * array.element_size() for step in array.stride())
    return tuple(array.strides)


def reach(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """The first byte, and the one behind the last, of an array beside its first element.

    >>> reach((4, 8), (32, 4), 4), reach((3,), (-4,), 4), reach((0, 5), (20, 4), 4)
    ((0, 128), (-8, 4), (0, 0))
    """
    if 0 in shape:
        return 0, 0
    ends = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
    return sum(min(end, 0) for end in ends), sum(max(end, 0) for end in ends) + itemsize


def values_of(array: Any, pages: Any = None) -> np.ndarray[Any, Any]:
    """A contiguous copy of the values, or of some rows of the first axis, in CPU memory; what NumPy has no dtype for is
    of unsigned integers.

    >>> values_of(np.arange(6.0).reshape(3, 2)[::-1], np.array([0, 2])).tolist()
    [[4.0, 5.0], [0.0, 1.0]]
    """
    if not is_torch(array):
        copy = np.array(array if pages is None else array[pages], order="C", copy=True)
        return copy if copy.dtype.isbuiltin == 1 else copy.view(f"u{copy.itemsize}")
    torch = importlib.import_module("torch")
    name = name_of_dtype(array)
    plain = array.detach().resolve_conj().resolve_neg().view(getattr(torch, _BITS[array.element_size()]))
    if pages is not None:
        plain = plain[torch.as_tensor(pages, device=plain.device)]
    dtype = dtype_named(name, "dtype")
    bits: np.ndarray[Any, Any] = plain.contiguous().cpu().numpy()
    return (bits if on_gpu(array) else bits.copy()).view(dtype if dtype.isbuiltin == 1 else f"u{dtype.itemsize}")


def digest(values: np.ndarray[Any, Any]) -> str:
    """SHA-256 of the bytes of a contiguous array, in hex."""
    return hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data).hexdigest()


def sample_of(values: np.ndarray[Any, Any], name: str) -> list[str]:
    """Some of the values as text, evenly spaced, for people.

    >>> sample_of(np.arange(100, dtype=np.float32), "float32")[:3]
    ['0', '6', '13']
    """
    flat = values.reshape(-1).view(dtype_named(name, "dtype"))
    at = np.linspace(0, max(flat.size - 1, 0), min(SAMPLE, flat.size)).astype(int)
    wide = [complex(x) if flat.dtype.kind == "c" else float(x) for x in flat[at]]
    return [f"{x:.6g}" for x in wide]


def described(arrays: Mapping[str, Any]) -> tuple[dict[str, Entry], list[dict[str, int]]]:
    """An entry for each array, and the storages in which they lie. Arrays whose bytes lie among each other, as those of
    ``out`` and q or of the halves of a cache, have one storage.
    """
    entries: dict[str, Entry] = {}
    spans = []
    for name, array in arrays.items():
        shape, strides = tuple(int(n) for n in array.shape), strides_in_bytes(array)
        itemsize = array.element_size() if is_torch(array) else array.itemsize
        low, high = reach(shape, strides, itemsize)
        first, device = address_of(array), str(array.device) if is_torch(array) else "cpu"
        entries[name] = {
            "library": "torch" if is_torch(array) else "numpy", "device": device, "dtype": name_of_dtype(array),
            "shape": list(shape), "strides": list(strides),
        }
        spans.append((device, first + low, first + high, first, name))
    storages: list[dict[str, int]] = []
    begin, end, place = 0, -1, ""
    for device, low, high, first, name in sorted(spans):
        if device != place or low >= end or low == high:
            begin, end, place = low, high, device
            storages.append({"bytes": 0, "address": low % ALIGNMENT})
        end = max(end, high)
        storages[-1]["bytes"] = end - begin
        entries[name] |= {"storage": len(storages) - 1, "offset": first - begin}
    return entries, storages


def kept(
    arrays: Mapping[str, Any], entries: dict[str, Entry], pages: Mapping[str, Any], limit: int
) -> tuple[dict[str, np.ndarray[Any, Any]], int]:
    """Values of the smallest arrays that together take at most ``limit`` bytes, by member name, and the bytes that are
    left; entries say which, and have a digest and a sample of each. Of an array in ``pages`` only these rows count.
    """
    def size(name: str) -> int:
        shape = entries[name]["shape"]
        rows = len(pages[name]) if name in pages else shape[0] if shape else 1
        return int(rows) * math.prod(shape[1:]) * dtype_named(entries[name]["dtype"], "dtype").itemsize

    members: dict[str, np.ndarray[Any, Any]] = {}
    for name in sorted(arrays, key=size):
        rows, entry = pages.get(name), entries[name]
        values = values_of(arrays[name], rows)
        cost = values.nbytes + (0 if rows is None else 8 * len(rows))
        entry |= {"kept": "values" if cost <= limit else "digest", "sha256": digest(values)}
        entry["sample"] = sample_of(values, entry["dtype"])
        if rows is not None:
            entry["pages"] = len(rows)
        if cost <= limit:
            limit -= cost
            members[name] = values
            if rows is not None:
                members[f"{name}.pages"] = np.asarray(rows, np.int64)
    return members, limit


def laid_out(
    entries: Mapping[str, Entry], storages: list[dict[str, int]], values: Mapping[str, np.ndarray[Any, Any]],
    device: str | None = None,
) -> dict[str, Any]:
    """New arrays of the entries, where they were beside each other and to 256 bytes: NumPy's, torch's in CPU memory, or
    on ``device``, where NumPy's of a call without tensors go, too. Bytes that no array has are poisoned: 0xff, that is
    NaN and -1.
    """
    buffers, made = [], {}
    for i, storage in enumerate(storages):
        size = storage["address"] + storage["bytes"]
        try:
            room = np.zeros(size + ALIGNMENT, np.uint8)
        except (MemoryError, ValueError):
            raise ValueError(f"storages[{i}].bytes is {storage['bytes']}: must fit into memory") from None
        start = -address_of(room) % ALIGNMENT
        buffers.append(room[start : start + size])
        if size <= POISONED:
            buffers[-1][...] = 0xFF
    views = {}
    for name, entry in entries.items():
        dtype, buffer = dtype_named(entry["dtype"], f"arrays.{name}.dtype"), buffers[entry["storage"]]
        first = storages[entry["storage"]]["address"] + entry["offset"]
        bits = np.ndarray(entry["shape"], f"u{dtype.itemsize}", buffer, first, entry["strides"])
        views[name] = bits.view(dtype)
        if name in values:
            rows = values.get(f"{name}.pages")
            bits[... if rows is None else rows] = values[name].view(bits.dtype)
    on: dict[int, Any] = {}
    moved = device is not None and all(entry["library"] == "numpy" for entry in entries.values())
    for name, entry in entries.items():
        if entry["library"] == "numpy" and not (moved and views[name].dtype.isnative):
            made[name] = views[name]
            continue
        torch, number = importlib.import_module("torch"), entry["storage"]
        dtype, first = dtype_named(entry["dtype"], "dtype"), storages[number]["address"] + entry["offset"]
        require(first % dtype.itemsize == 0, f"arrays.{name}.offset is {entry['offset']}", "whole elements")
        if number not in on:
            on[number] = torch.from_numpy(buffers[number])
            on[number] = on[number] if device is None else on[number].to(device)
        bytes_, empty = on[number], torch.empty(0, dtype=getattr(torch, dtype.name), device=device or "cpu")
        steps = [step // dtype.itemsize for step in entry["strides"]]
        made[name] = empty.set_(bytes_.untyped_storage(), first // dtype.itemsize, entry["shape"], steps)
    return made
