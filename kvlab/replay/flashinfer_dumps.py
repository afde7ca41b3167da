"""Dumps and workloads of FlashInfer as calls: what its flight recorder and FlashInfer-Bench write.

Sources: https://docs.flashinfer.ai/logging.html (level 10: a folder for each call with ``metadata.jsonl``, inputs and
outputs as ``.pt`` or ``.safetensors``), ``flashinfer/api_logging.py`` (arguments are ``arg_0``, .. and ``kwarg_NAME``,
those of a method begin with the object, which ``self_id`` names), and the schemas of Definition, Workload and Trace of
FlashInfer-Bench (axes; inputs that are ``random``, ``scalar`` or ``safetensors``). Its lse has base 2.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.common.arrays import to_numpy
from kvlab.common.checks import count, path_of, require, shown
from kvlab.common.dtypes import as_dtype

from .recorded import RecordedCall

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
PLANS = {
    DECODE: ("self", "indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size"),
    PREFILL: (
        "self", "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads",
        "num_kv_heads", "head_dim_qk", "page_size", "head_dim_vo", "custom_mask", "packed_custom_mask", "causal",
        "pos_encoding_mode", "use_fp16_qk_reduction", "sm_scale", "window_left", "logits_soft_cap",
    ),
}
"""Positional arguments of ``plan`` of its wrappers, in order."""
RUN = "self", "q", "paged_kv_cache"
INIT = "self", "float_workspace_buffer", "kv_layout"
REFUSED = "custom_mask", "packed_custom_mask", "kv_cache_sf"
MOST_HEADER, MOST_RANDOM = 100 << 20, 1 << 32
_SAFE = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}

Named = dict[str, Any]


def load_flashinfer(
    path: str | os.PathLike[str], definition: str | os.PathLike[str] | Mapping[str, Any] | None = None, *,
    line: int = 0, seed: int = 0,
) -> RecordedCall:
    """A call of paged decode or prefill that FlashInfer dumped, as a recorded call.

    path         a folder of a dumped ``run`` of BatchDecodeWithPagedKVCacheWrapper or of
                 BatchPrefillWithPagedKVCacheWrapper (its ``plan``, by the same object, is looked for beside it); or,
                 with ``definition``, a JSON Lines file of workloads or traces
    definition   of the workload: a JSON file or its content; of op_type gqa_paged
    line, seed   which workload of the file; of the inputs that are ``random``, standard normal

    Tensors are NumPy's. ``.pt`` is read by torch, weights alone. What kvlab has no argument for, and what is no such
    call, is a ValueError that names the field.
    """
    source = path_of("path", path)
    if definition is not None:
        return _workload(source, definition, line, seed)
    require(source.is_dir(), f"path is {str(path)!r}", "the folder of a dump, or a file given with its definition")
    return _dump(source)


# Dumps


def _dump(folder: Path) -> RecordedCall:
    told = _last(folder)
    name = told.get("function_name")
    wrapper, _, method = str(name).partition(".")
    fits = wrapper in PLANS and method in ("run", "forward")
    require(fits, f"function_name is {shown(name)}", f"{DECODE}.run or {PREFILL}.run")
    run = _given(folder, told, RUN)
    owner, when = told.get("self_id"), str(told.get("timestamp", ""))
    require(type(owner) is int, f"self_id is {shown(owner)}", "the number of the wrapper")
    before = [
        (str(other.get("timestamp", "")), beside, other) for beside in sorted(folder.parent.iterdir())
        if (beside / "metadata.jsonl").is_file() and beside != folder
        for other in [_last(beside)] if other.get("self_id") == owner
    ]
    plans = [one for one in before if one[2].get("function_name") == f"{wrapper}.plan" and one[0] <= when]
    require(plans, f"self_id {owner} of {folder.name} has no dump of {wrapper}.plan beside it",
            "dumped with its plan (no *.plan in FLASHINFER_DUMP_EXCLUDE)")
    _, beside, other = max(plans, key=lambda one: one[0])
    plan = _given(beside, other, PLANS[wrapper])
    inits = [one for one in before if one[2].get("function_name") == f"{wrapper}.__init__"]
    init = _given(inits[-1][1], inits[-1][2], INIT, tensors=False) if inits else {}
    prefill = wrapper == PREFILL
    lists = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len") if prefill else \
        (None, "indptr", "indices", "last_page_len")
    starts, indptr, indices, last = (None if one is None else _need(plan, one) for one in lists)
    cache, layout = _need(run, "paged_kv_cache"), init.get("kv_layout", "NHD")
    require(layout in ("NHD", "HND"), f"kv_layout is {shown(layout)}", "NHD or HND")
    if not isinstance(cache, tuple | list):
        fits = isinstance(cache, np.ndarray) and cache.ndim == 5 and cache.shape[1] == 2
        shape = getattr(cache, "shape", None)
        require(fits, f"paged_kv_cache has shape {shape}", "[pages, 2, .., .., D], or two tensors")
        cache = cache[:, 0], cache[:, 1]
    require(len(cache) == 2, f"paged_kv_cache has {len(cache)} tensors", "K and V")
    given = {"causal": not prefill} | plan | {key: value for key, value in run.items() if value is not None}
    options = _options(given, cache[0].dtype)
    if layout == "HND":
        options["kv_layout"] = layout
    if prefill:
        options["causal"] = bool(given["causal"])
    pages = cache[0].shape[2 if layout == "HND" else 1]
    size = plan.get("page_size", pages)
    require(size == pages, f"page_size is {shown(size)}", f"that of paged_kv_cache, {pages}")
    if run.get("return_lse"):
        options |= {"return_lse": True, "base2": True}
    table, lens = table_of(indptr, indices, last, int(pages))
    arguments = {"q": _need(run, "q"), "k_cache": cache[0], "v_cache": cache[1], "block_table": table, "seq_lens": lens}
    arguments |= {"cu_seqlens_q": starts} if prefill else {}
    found = _tensors(folder, "outputs")
    results = {ours: found[theirs] for ours, theirs in (("out", "result"), ("out", "result_0"), ("lse", "result_1"))
               if theirs in found}
    return RecordedCall.of(folder.name, "PagedPrefill" if prefill else "MHADecode", arguments | options, results)


def _options(given: Named, dtype: np.dtype[Any]) -> Named:
    """Keywords of kvlab for those of FlashInfer. ValueError for one that says something kvlab has no argument for."""
    for name in REFUSED:
        require(given.get(name) is None, f"{name} is given", "left out: kvlab has no argument for it")
    encoding = given.get("pos_encoding_mode", "NONE")
    require(encoding == "NONE", f"pos_encoding_mode is {shown(encoding)}", "NONE")
    options: Named = {}
    for theirs, ours in (("sm_scale", "scale"), ("logits_soft_cap", "softcap"), ("q_scale", "q_scale"),
                         ("k_scale", "k_scale"), ("v_scale", "v_scale"), ("sinks", "sinks")):
        value: Any = _number(given, theirs) if ours in ("scale", "softcap") else given.get(theirs)
        scaled = theirs in ("q_scale", "k_scale", "v_scale") and value is not None
        if scaled and dtype.itemsize > 1:  # which kvlab would not look at
            require(np.all(np.equal(value, 1)), f"{theirs} is {shown(value)} with a cache of {dtype}", "1")
            continue
        if value is not None and not (theirs == "logits_soft_cap" and value <= 0):
            options[ours] = value
    window = _number(given, "window_left")
    if window is not None and window >= 0:
        options["window"] = (int(window), 0 if given["causal"] else None)
    return options


def _number(given: Named, name: str) -> Any:
    """A number, or None where none is given; ValueError, naming it, for anything else."""
    value = given.get(name)
    require(value is None or isinstance(value, Real), f"{name} is {shown(value)}", "a number, or null")
    return value


def table_of(indptr: Any, indices: Any, last: Any, page_size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The page table ``[B, columns]``, -1 behind a sequence's pages, and the lengths ``[B]``, of lists of pages end to
    end. ``last``: keys on each last page; None: all.

    >>> table, lens = table_of([0, 2, 2, 3], [7, 4, 1], [3, 0, 16], 16)
    >>> table.tolist(), lens.tolist()
    ([[7, 4], [-1, -1], [1, -1]], [19, 0, 16])
    >>> table_of([0, 3], [7], None, 16)
    Traceback (most recent call last):
        ...
    ValueError: indptr ends with 3: must be at most 1, the entries of indices
    """
    starts, pages = np.asarray(indptr).astype(np.int64), np.asarray(indices).astype(np.int64)
    counts = np.diff(starts)
    fits = starts.ndim == 1 and starts.size and starts[0] == 0 and (counts >= 0).all()
    require(fits, f"indptr is {shown(starts[:8].tolist())}", "places in indices, from 0 on, in order")
    require(starts[-1] <= pages.size, f"indptr ends with {starts[-1]}", f"at most {pages.size}, the entries of indices")
    columns = np.arange(max(int(counts.max(initial=0)), 1))
    inside = columns < counts[:, None]
    table = np.full(inside.shape, -1, np.int32)
    table[inside] = pages[: starts[-1]]
    full = np.full(len(counts), page_size) if last is None else np.asarray(last).astype(np.int64)
    require(full.shape == counts.shape, f"last_page_len has shape {full.shape}", f"{counts.shape}")
    fits = ((full > 0) & (full <= page_size) | (counts == 0)).all()
    require(fits, f"last_page_len is {shown(full[:8].tolist())}", f"1 to {page_size}, the tokens of a page")
    return table, np.where(counts > 0, (counts - 1) * page_size + full, 0).astype(np.int32)


def _given(folder: Path, told: Named, positional: tuple[str, ...], tensors: bool = True) -> Named:
    """The arguments by the names of the method."""
    arrays = _tensors(folder, "inputs") if tensors else {}
    meta = told.get("input_metadata")
    require(isinstance(meta, dict), f"input_metadata is {shown(meta)}", "an object")
    found: Named = {}
    for key in [*arrays, *(meta or {})]:
        kind, _, name = key.partition("_")
        if kind == "arg" and name.isdecimal():
            place = int(name)
            known = f"one of {len(positional)} arguments"
            require(place < len(positional), f"{key} of {told.get('function_name')}", known)
            name = positional[place]
        elif kind != "kwarg":
            continue
        found[name] = arrays[key] if key in arrays else _restored((meta or {})[key], key, arrays)
    return found


def _restored(value: Any, where: str, arrays: Named) -> Any:
    """A value of the metadata; an object that is none stands for itself."""
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind == "torch.Tensor":
        key = value.get("tensor_key")
        return _need(arrays, key) if arrays else None
    if kind in ("tuple", "list"):
        require(not value.get("truncated"), f"{where} is truncated", "whole")
        items = value.get("items")
        require(isinstance(items, list), f"{where}.items is {shown(items)}", "a list")
        return tuple(_restored(one, f"{where}[{i}]", arrays) for i, one in enumerate(items or []))
    return None


def _need(given: Named, name: Any) -> Any:
    require(given.get(name) is not None, f"{name} is missing", f"among {', '.join(map(str, given)) or 'the arguments'}")
    return given[name]


def _last(folder: Path) -> Named:
    """The last line of a dump's metadata, the one that knows most."""
    file = folder / "metadata.jsonl"
    require(file.is_file(), f"{folder.name} has no metadata.jsonl", "a dump of FlashInfer")
    found = list(_lines(file))
    require(found, f"{folder.name}/metadata.jsonl is empty", "a line for each state of the call")
    return found[-1]


def _lines(file: Path) -> Iterator[Named]:
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines()):
        if text.strip():
            try:
                told = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number + 1} of {file.name} is no JSON: must be an object ({error})") from None
            require(isinstance(told, dict), f"line {number + 1} of {file.name} is {shown(told)}", "an object")
            yield told


def _tensors(folder: Path, which: str) -> Named:
    """Tensors of a file of either kind, as NumPy's arrays; none without a file."""
    safe, saved = folder / f"{which}.safetensors", folder / f"{which}.pt"
    if safe.is_file():
        return safetensors(safe)
    if not saved.is_file():
        return {}
    torch = importlib.import_module("torch")
    try:
        found = torch.load(saved, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{saved.name} is no file of tensors: must be one that torch.save wrote ({error})") from None
    whole = isinstance(found, dict) and all(isinstance(tensor, torch.Tensor) for tensor in found.values())
    require(whole, f"{saved.name} holds a {type(found).__name__}", "tensors by their names")
    return {name: to_numpy(tensor, name) for name, tensor in found.items()}


def safetensors(path: Path) -> Named:
    """Arrays of a safetensors file: 8 bytes with the header's size, JSON, and the bytes of each tensor in C order.
    ValueError, naming the field, for another.
    """
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little") if len(data) >= 8 else -1
    inside = 0 <= size <= min(len(data) - 8, MOST_HEADER)
    require(inside, f"{path.name} has a header of {size} bytes", "within the file")
    try:
        header = json.loads(data[8 : 8 + size].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"header of {path.name} is no JSON: must be an object ({error})") from None
    require(isinstance(header, dict), f"header of {path.name} is {shown(header)}", "an object")
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, place = (entry.get(one) if isinstance(entry, dict) else None
                              for one in ("dtype", "shape", "data_offsets"))
        require(isinstance(kind, str) and kind in _SAFE, f"{name}.dtype is {shown(kind)}", f"one of {', '.join(_SAFE)}")
        fits = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        require(fits, f"{name}.shape is {shown(shape)}", "numbers of 0 or more")
        word = _SAFE[str(kind)]
        dtype = np.dtype(bool) if word == "bool" else as_dtype(word)
        nbytes = math.prod(shape) * dtype.itemsize  # type: ignore[arg-type]
        fits = isinstance(place, list) and len(place) == 2 and all(type(n) is int for n in place)
        fits = fits and 0 <= place[0] <= place[1] <= len(data) - 8 - size  # type: ignore[index]
        require(fits and place[1] - place[0] == nbytes, f"{name}.data_offsets is {shown(place)}",  # type: ignore[index]
                f"{nbytes} bytes in the file")
        raw = np.frombuffer(data, np.uint8, nbytes, 8 + size + place[0])  # type: ignore[index]
        found[name] = raw.copy().view(dtype).reshape(shape)
    return found


# Workloads


def _workload(file: Path, definition: Any, line: int, seed: int) -> RecordedCall:
    require(file.is_file(), f"path is {str(file)!r}", "a JSON Lines file of workloads")
    told = list(_lines(file))
    known = f"0 to {len(told) - 1}, the workloads of {file.name}"
    require(count("line", line) < len(told), f"line is {line}", known)
    entry = told[line]
    work = entry.get("workload", entry)
    require(isinstance(work, dict), f"workload is {shown(work)}", "an object")
    if not isinstance(definition, Mapping):
        definition = _definition(path_of("definition", definition))
    kind, name = definition.get("op_type"), definition.get("name")
    require(str(kind).startswith("gqa_paged"), f"op_type is {shown(kind)}", "gqa_paged")
    stated = entry.get("definition", name)
    require(stated == name, f"definition is {shown(stated)}", f"{shown(name)}, as the definition given")
    sizes = _sizes(definition.get("axes"), work.get("axes"))
    specs, given = definition.get("inputs"), work.get("inputs")
    require(isinstance(specs, dict), f"inputs of the definition is {shown(specs)}", "an object")
    require(isinstance(given, dict), f"inputs is {shown(given)}", "an object")
    rng = np.random.default_rng(seed)
    made = {key: _input(key, spec, given.get(key), sizes, file.parent, rng) for key, spec in specs.items()}
    cache = _need(made, "k_cache")
    table, lens = table_of(_need(made, "kv_indptr"), _need(made, "kv_indices"), made.get("kv_last_page_len"),
                           int(cache.shape[1]))
    arguments = {"q": _need(made, "q"), "k_cache": cache, "v_cache": _need(made, "v_cache"), "block_table": table,
                 "seq_lens": lens, "return_lse": True, "base2": True}
    if made.get("sm_scale") is not None:
        arguments["scale"] = float(made["sm_scale"])
    prefill = made.get("qo_indptr") is not None
    if prefill:
        arguments |= {"cu_seqlens_q": made["qo_indptr"], "causal": True}
    told_uuid = str(work.get("uuid", line))
    return RecordedCall.of(f"{name} {told_uuid}", "PagedPrefill" if prefill else "MHADecode", arguments, {})


def _definition(file: Path) -> Named:
    require(file.is_file(), f"definition is {str(file)!r}", "a JSON file")
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"definition is {str(file)!r}: must be JSON ({error})") from None
    require(isinstance(told, dict), f"definition is {shown(told)}", "an object")
    return dict(told)


def _sizes(axes: Any, bound: Any) -> dict[str, int]:
    require(isinstance(axes, dict), f"axes of the definition is {shown(axes)}", "an object")
    require(isinstance(bound, dict), f"axes is {shown(bound)}", "an object")
    sizes = {}
    for name, axis in axes.items():
        value: Any = axis.get("value") if isinstance(axis, dict) and axis.get("type") == "const" else bound.get(name)
        require(type(value) is int and value >= 0, f"axes.{name} is {shown(value)}", "a number of 0 or more")
        sizes[name] = value
    return sizes


def _input(key: str, spec: Any, given: Any, sizes: dict[str, int], folder: Path, rng: np.random.Generator) -> Any:
    """One input of a workload."""
    require(isinstance(given, dict), f"inputs.{key} is {shown(given)}", "an object")
    kind = given.get("type")
    axes: Any = spec.get("shape") if isinstance(spec, dict) else None
    if kind == "scalar":
        value = given.get("value")
        require(isinstance(value, int | float), f"inputs.{key}.value is {shown(value)}", "a number")
        return value
    fits = isinstance(axes, list) and all(isinstance(one, str) and one in sizes for one in axes)
    require(fits, f"inputs.{key}.shape is {shown(axes)}", f"axes among {', '.join(sizes)}")
    shape, word = tuple(sizes[one] for one in axes), spec.get("dtype")
    require(isinstance(word, str), f"inputs.{key}.dtype is {shown(word)}", "the name of a dtype")
    dtype = as_dtype(word)
    if kind == "random":
        floats = dtype.kind in "fV"
        require(floats, f"inputs.{key}.type is 'random' for {word}", "safetensors: lists of pages have to be given")
        elements = math.prod(shape)
        require(elements <= MOST_RANDOM, f"inputs.{key}.shape is {shape}", f"of at most {MOST_RANDOM} random elements")
        return rng.standard_normal(shape, np.float32).astype(dtype)
    require(kind == "safetensors", f"inputs.{key}.type is {shown(kind)}", "random, scalar or safetensors")
    place, member = given.get("path"), given.get("tensor_key")
    file = folder / str(place)
    require(isinstance(place, str) and file.is_file(), f"inputs.{key}.path is {shown(place)}", "a file, from the "
            "workload's folder on")
    arrays = safetensors(file)
    fits = isinstance(member, str) and member in arrays
    require(fits, f"inputs.{key}.tensor_key is {shown(member)}", f"one of {', '.join(arrays)}")
    array = arrays[str(member)]
    same = array.shape == shape and array.dtype == dtype
    require(same, f"inputs.{key} is {array.dtype} {array.shape}", f"{dtype} {shape}")
    return array
