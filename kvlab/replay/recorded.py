"""A recorded call: what its file says, checked; its arguments again; what the file lacks."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlab.attention.call.call import Call
from kvlab.attention.call.operation import PUBLIC
from kvlab.common.checks import path_of, require, shown

from .array_values import ALIGNMENT, Entry, described, digest, dtype_named, kept, laid_out, reach
from .compact import compacted
from .recorder import FORMAT, VERSION
from .values import missing_in, packed, unpacked

Values = dict[str, np.ndarray[Any, Any]]
MOST_JSON = 64 << 20
MOST_AXES = 8
MOST_BYTES = 1 << 30
"""Bytes of memory in which a call is laid out as it was; a larger pool is made small."""


@dataclass(frozen=True, eq=False)
class Held:
    """Arrays of a file: an entry for each, their storages, and the values that are kept, by member."""

    entries: dict[str, Entry] = field(default_factory=dict)
    storages: list[dict[str, int]] = field(default_factory=list)
    values: Values = field(default_factory=dict)

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Held:
        """All values of arrays."""
        entries, storages = described(arrays)
        return cls(entries, storages, kept(arrays, entries, {}, 1 << 62)[0])

    @property
    def missing(self) -> list[str]:
        """The arrays without values, in words."""
        return [
            f"{name}: {entry['dtype']} {entry['shape']}, SHA-256 {entry['sha256'][:12]}.. and {len(entry['sample'])} "
            "of its values alone"
            for name, entry in self.entries.items() if name not in self.values
        ]


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A call that was recorded. call : the class of the call; operation : its folder in :mod:`kvlab.attention`.

    plan : backend, reason, arch, grid, config and sibling as text, None of a call that was refused. versions : of the
    packages, and the device. ended : tells whether the file has results; raised : what the call raised.
    """

    source: str
    call: str
    operation: str
    trees: dict[str, Any]
    held: Held
    results: Held = field(default_factory=Held)
    plan: dict[str, Any] | None = None
    versions: dict[str, Any] = field(default_factory=dict)
    ended: bool = True
    raised: str | None = None

    @classmethod
    def of(cls, source: str, call: str, arguments: Mapping[str, Any], results: Mapping[str, Any]) -> RecordedCall:
        """A call with these arguments, and what it gave."""
        arrays: dict[str, Any] = {}
        trees = {name: packed(value, name, arrays) for name, value in arguments.items()}
        operation = call_type(call, "call").operation
        return cls(source, call, operation, trees, Held.of(arrays), Held.of(results), ended=bool(results))

    @property
    def missing(self) -> list[str]:
        """Lacks of the file, with which no call can run: arrays of which a digest is kept, objects of the caller's."""
        return self.held.missing + [one for name, tree in self.trees.items() for one in missing_in(tree, name)]

    def arguments(self, device: str | None = None) -> dict[str, Any]:
        """The arguments, new arrays each time: NumPy's, or torch's in CPU memory, or on ``device``, of the recorded
        values, shapes, strides and alignment, sharing memory where they did. Pages that the call does not name are
        poisoned; where all would take more than 1 GiB they are left out, and the others get new numbers. ValueError for
        a file that lacks values, naming them.
        """
        missing = self.missing
        require(not missing, f"{self.source} lacks {'; '.join(missing)}", "recorded with a larger limit to be run")
        trees, entries, storages, values = self.trees, self.held.entries, self.held.storages, self.held.values
        if sum(storage["bytes"] for storage in storages) > MOST_BYTES:
            trees, entries, storages, values = compacted(trees, entries, storages, values)
        arrays = laid_out(entries, storages, values, device)
        return {name: unpacked(tree, f"arguments.{name}", arrays) for name, tree in trees.items()}

    def made(self, device: str | None = None, **changed: Any) -> Call[Any]:
        """The call of the arguments, some of them changed, unchecked."""
        return call_type(self.call, "call")(**self.arguments(device) | changed)

    def __str__(self) -> str:
        plan, versions = self.plan, ", ".join(f"{name} {text}" for name, text in self.versions.items())
        lines = [f"{self.call} of kvlab.attention.{self.operation}, from {self.source}"]
        if versions:
            lines.append(versions)
        if plan is not None:
            where = f" as on {plan['arch']}" if plan.get("arch") else ""
            lines.append(f"{plan.get('backend')}{where} ({plan.get('reason')}); {plan.get('config')}")
        for name, tree in self.trees.items():
            entry = self.held.entries.get(tree["array"]) if isinstance(tree, dict) and "array" in tree else None
            if entry is None:
                lines.append(f"  {name} = {json.dumps(tree)[:200]}")
                continue
            pages = f", {entry['pages']} pages of it" if "pages" in entry else ""
            lines.append(f"  {name}: {entry['dtype']} {entry['shape']}, strides {entry['strides']} bytes, "
                         f"{entry['library']} on {entry['device']}{pages}, {entry['kept']}")
        lines += [f"lacks {one}" for one in self.missing]
        if self.raised is not None:
            lines.append(f"raised {self.raised}")
        elif not self.ended:
            lines.append("has no results: the call did not end")
        return "\n".join(lines)


def call_type(name: Any, where: str) -> type[Call[Any]]:
    """The class of calls of this name. ValueError for another."""
    known = {one.call_type.__name__: one.call_type for one in PUBLIC.values()}
    require(isinstance(name, str) and name in known, f"{where} is {shown(name)}", f"one of {', '.join(sorted(known))}")
    return known[name]


def load(path: str | os.PathLike[str]) -> RecordedCall:
    """The call that is recorded in a file. ValueError, naming the field, for what is no such file or one of a later
    version, and where values are not those that were written (by their SHA-256).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = os.path.join(folder, "x.npz")
    ...     np.savez(file, q=np.zeros(3))
    ...     load(file)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: ...x.npz has no call.json: must be a file that kvlab.replay recorded
    """
    source = path_of("path", path)
    require(source.is_file(), f"path is {str(path)!r}", "a file")
    try:
        with zipfile.ZipFile(source) as file:
            return _read(file, source.name)
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
        raise ValueError(f"{source.name} is no whole zip archive ({error}): must be a recorded call") from None


def _read(file: zipfile.ZipFile, name: str) -> RecordedCall:
    names = set(file.namelist())
    require("call.json" in names, f"{name} has no call.json", "a file that kvlab.replay recorded")
    told = _json(file, "call.json")
    require(told.get("format") == FORMAT, f"format is {shown(told.get('format'))}", repr(FORMAT))
    version = told.get("version")
    require(type(version) is int and 1 <= version <= VERSION, f"version is {shown(version)}", f"1 to {VERSION}")
    call = call_type(told.get("call"), "call")
    trees = _field(told, "arguments", dict, "")
    held = _held(file, told, "arguments/", "")
    for argument, tree in trees.items():
        _check_tree(argument, tree, held)
    ended = "results.json" in names
    after = _json(file, "results.json") if ended else {}
    results = _held(file, after, "results/", "results.") if ended else Held()
    raised = after.get("raised")
    require(raised is None or isinstance(raised, str), f"results.raised is {shown(raised)}", "text or null")
    plan, versions = told.get("plan"), told.get("versions", {})
    require(plan is None or isinstance(plan, dict), f"plan is {shown(plan)}", "an object or null")
    require(isinstance(versions, dict), f"versions is {shown(versions)}", "an object")
    return RecordedCall(name, call.__name__, call.operation, trees, held, results, plan, versions, ended, raised)


def _check_tree(name: str, tree: Any, held: Held) -> None:
    """ValueError for an argument that is not one; arrays without values stand for themselves."""
    if not missing_in(tree, name):
        unpacked(tree, f"arguments.{name}", _Stand(held.entries))


class _Stand(dict[str, Any]):
    """An array of ones for each name, of so few axes that any class takes it, for the check of a tree alone."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        super().__init__({name: np.ones([1] * len(entry["shape"]), np.int32) for name, entry in entries.items()})


def _json(file: zipfile.ZipFile, member: str) -> dict[str, Any]:
    size = file.getinfo(member).file_size
    require(size <= MOST_JSON, f"{member} has {size} bytes", f"at most {MOST_JSON}")
    try:
        told = json.loads(file.read(member).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{member} is no JSON: must be an object ({error})") from None
    require(isinstance(told, dict), f"{member} is {shown(told)}", "an object")
    return dict(told)


def _field(told: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    """The field of an object. ValueError unless it is of this kind."""
    value = told.get(name)
    require(type(value) is kind, f"{where}{name} is {shown(value)}", {dict: "an object", list: "a list", int: "a whole "
            "number", str: "text"}[kind])
    return value


def _held(file: zipfile.ZipFile, told: Mapping[str, Any], folder: str, where: str) -> Held:
    """Arrays of a part of the file, checked."""
    entries, storages = _field(told, "arrays", dict, where), _field(told, "storages", list, where)
    for i, storage in enumerate(storages):
        place = f"{where}storages[{i}]"
        require(isinstance(storage, dict), f"{place} is {shown(storage)}", "an object")
        size, address = (_field(storage, one, int, f"{place}.") for one in ("bytes", "address"))
        require(0 <= size < 1 << 48, f"{place}.bytes is {size}", "0 or more, of at most 48 bits")
        require(0 <= address < ALIGNMENT, f"{place}.address is {address}", f"0 to {ALIGNMENT - 1}")
    values: Values = {}
    for name, entry in entries.items():
        _check_entry(entry, storages, f"{where}arrays.{name}")
        if entry["kept"] == "values":
            _read_values(file, name, entry, folder, f"{where}arrays.{name}", values)
    return Held(entries, storages, values)


def _check_entry(entry: Any, storages: list[dict[str, int]], where: str) -> None:
    require(isinstance(entry, dict), f"{where} is {shown(entry)}", "an object")
    library, how = entry.get("library"), entry.get("kept")
    require(library in ("numpy", "torch"), f"{where}.library is {shown(library)}", "numpy or torch")
    require(how in ("values", "digest"), f"{where}.kept is {shown(how)}", "values or digest")
    _field(entry, "device", str, f"{where}.")
    dtype = dtype_named(entry.get("dtype"), f"{where}.dtype")
    shape, strides = (_field(entry, one, list, f"{where}.") for one in ("shape", "strides"))
    fits = len(shape) <= MOST_AXES and all(type(n) is int and n >= 0 for n in shape)
    require(fits, f"{where}.shape is {shown(shape)}", f"at most {MOST_AXES} numbers of 0 or more")
    fits = len(strides) == len(shape) and all(type(n) is int for n in strides)
    require(fits, f"{where}.strides is {shown(strides)}", f"{len(shape)} numbers, as shape has")
    number, offset = (_field(entry, one, int, f"{where}.") for one in ("storage", "offset"))
    require(0 <= number < len(storages), f"{where}.storage is {number}", f"one of the {len(storages)} storages")
    low, high = reach(tuple(shape), tuple(strides), dtype.itemsize)
    inside = 0 <= offset + low and offset + high <= storages[number]["bytes"]
    require(inside, f"{where}.offset is {offset}", f"such that all elements are in storage {number}, of "
            f"{storages[number]['bytes']} bytes")
    text, sample = _field(entry, "sha256", str, f"{where}."), _field(entry, "sample", list, f"{where}.")
    require(len(text) == 64, f"{where}.sha256 is {shown(text)}", "64 digits")
    require(all(isinstance(x, str) for x in sample), f"{where}.sample is {shown(sample)}", "a list of texts")
    if "pages" in entry:
        rows = _field(entry, "pages", int, f"{where}.")
        fits = bool(shape) and 0 <= rows <= shape[0]
        require(fits, f"{where}.pages is {rows}", f"0 to {shape[0] if shape else 0}, the first axis")


def _read_values(
    file: zipfile.ZipFile, name: str, entry: Entry, folder: str, where: str, values: Values
) -> None:
    """Put the values of an array into ``values``, and its pages."""
    dtype, shape = dtype_named(entry["dtype"], where), list(entry["shape"])
    if "pages" in entry:
        shape[0] = entry["pages"]
        rows = _member(file, f"{folder}{name}.pages.npy", (entry["pages"],), np.dtype(np.int64), where)
        fits = not rows.size or (rows[0] >= 0 and rows[-1] < entry["shape"][0] and bool((np.diff(rows) > 0).all()))
        require(fits, f"{where}.pages", f"numbers of pages in order, below {entry['shape'][0]}")
        values[f"{name}.pages"] = rows
    stored = dtype if dtype.isbuiltin == 1 or not dtype.isnative else np.dtype(f"u{dtype.itemsize}")
    found = _member(file, f"{folder}{name}.npy", tuple(shape), stored, where)
    same = digest(found) == entry["sha256"]
    require(same, f"{where}.sha256 is {entry['sha256'][:12]}..", f"that of its values, {digest(found)[:12]}..")
    values[name] = found


def _member(
    file: zipfile.ZipFile, member: str, shape: tuple[int, ...], dtype: np.dtype[Any], where: str
) -> np.ndarray[Any, Any]:
    try:
        size = file.getinfo(member).file_size
    except KeyError:
        raise ValueError(f"{where}.kept is 'values': must be with a member {member}") from None
    expected = math.prod(shape) * dtype.itemsize
    require(expected <= size <= expected + 4096, f"{member} has {size} bytes", f"{expected} and a header")
    with file.open(member) as stream:
        try:
            array: np.ndarray[Any, Any] = np.lib.format.read_array(stream, allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"{member} is no array of NumPy: must be one ({error})") from None
    same = array.shape == shape and array.dtype == dtype
    require(same, f"{member} is {array.dtype} {array.shape}", f"{dtype} {shape}")
    return np.ascontiguousarray(array).reshape(shape)
