"""A capture: q, k, v and o of some layers of a model, for a prompt and the decode steps after it.

The ``.npz`` schema (``SCHEMA``) is the same for the embedded file and for a user's own. npz has no bfloat16, so such
arrays are stored as their bits: ``a.view(np.uint16)``.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

SCHEMA = """\
q              [layers, tokens, query heads, head_dim]  after rope
k, v           [layers, tokens, KV heads, head_dim]     after rope, query heads a multiple of KV heads
o              like q, optional                         what the model's attention gave back
prompt_tokens  integer, optional                        the tokens after these are decode steps (default: the last 8)
layers         [layers] integers, optional              the layers' numbers in the model (default: 0, 1, ...)
scale          number, optional                         multiplies q k^T (default: head_dim ** -0.5)

q, k, v, o have one dtype: float32, float16, or uint16 = the bits of bfloat16 (a.view(np.uint16)).
The axis `layers` may be left out of all of them when there is one layer."""

_DECODE_STEPS = 8
_REQUIRED = ("q", "k", "v")
_KEYS = (*_REQUIRED, "o", "prompt_tokens", "layers", "scale")
_REMEDY = "write it with np.savez(path, q=q, k=k, v=v)"
_MOST_TIMES = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}
"""How np.savez and np.savez_compressed store, and how many bytes at most come out of one."""
_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_DTYPES = {"float32": np.float32, "float16": np.float16, "uint16": ml_dtypes.bfloat16}


@dataclass(frozen=True, eq=False)
class Capture:
    """q, k, v (and o) of ``layers`` for ``prompt_tokens + decode_steps`` tokens of one sequence.

    With ``t = prompt_tokens + step``, a decode step has the query ``q[:, t]``, sees the keys ``k[:, : t + 1]`` and
    gave ``o[:, t]``. The arrays are read-only.

    >>> capture = load_smollm2()
    >>> capture.group  # query heads per KV head
    3
    """

    q: Array  # [layers, tokens, query heads, D]
    k: Array  # [layers, tokens, KV heads, D]
    v: Array  # [layers, tokens, KV heads, D]
    o: Array | None  # [layers, tokens, query heads, D]
    prompt_tokens: int
    decode_steps: int
    layers: tuple[int, ...]
    scale: float
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Prompt and decode steps together."""
        return self.q.shape[1]

    @property
    def query_heads(self) -> int:
        return self.q.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The storage dtype of q, k, v and o."""
        return self.q.dtype


@functools.cache
def load_smollm2() -> Capture:
    """The embedded capture: SmolLM2-135M-Instruct, layers 0, 14 and 29, 299 prompt tokens and 8 decode steps.

    q, k, v (after rope) and o were computed in float32 and rounded once to bfloat16; ``metadata`` has the prompt, the
    answer, the versions, the licence (Apache-2.0) and the command. ``o`` is the output for the values *before* they
    were rounded, so attention of the stored q, k, v agrees with it within bfloat16 rounding only.

    >>> load_smollm2().metadata["licence"]
    'Apache-2.0'
    """
    folder = importlib.resources.files("kvlab.data")
    metadata = json.loads(folder.joinpath("smollm2.json").read_text(encoding="utf-8"))
    with folder.joinpath("smollm2.npz").open("rb") as file:
        return _load(file, "kvlab/data/smollm2.npz", metadata)


def load_capture(path: str | os.PathLike[str]) -> Capture:
    """A user's own capture from an ``.npz`` file in the schema of :data:`SCHEMA`.

    float32 and float16 arrays keep their dtype, uint16 becomes bfloat16. Raises ``FileNotFoundError``, or
    ``ValueError`` naming the file, the array and what is accepted.

    >>> import tempfile, pathlib
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((20, heads, 64), np.float32) for heads in (8, 2, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "mine.npz"
    ...     np.savez(path, q=q, k=k, v=v, prompt_tokens=16)
    ...     capture = load_capture(path)
    >>> capture.q.shape, capture.decode_steps, capture.scale
    ((1, 20, 8, 64), 4, 0.125)
    """
    with Path(path).open("rb") as file:
        return _load(file, os.fspath(path), {})


def _load(file: IO[bytes], name: str, metadata: Mapping[str, Any]) -> Capture:
    try:
        return _capture(_read(file), metadata)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _read(file: IO[bytes]) -> dict[str, Array]:
    """The arrays of an npz by name; nothing pickled is ever loaded."""
    if not zipfile.is_zipfile(file):
        raise ValueError("not an .npz archive; write one with np.savez(path, q=q, k=k, v=v)")
    size = file.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            _check_keys(list(members))
            if strange := [key for key, info in members.items() if not _is_npy(archive, info)]:
                raise _Refused(f"{', '.join(strange)}: not in NumPy's .npy format; {_REMEDY}")
            for key, info in members.items():
                _check_header(key, archive, info, size)
            return {key: _array(archive, info) for key, info in members.items()}
    except (_Refused, MemoryError):
        raise
    except Exception as error:  # what zipfile and NumPy make of damaged bytes is of any kind
        first = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"damaged archive: {first}; {_REMEDY}") from None


class _Refused(ValueError):
    """What is in the file is sound, or is not looked at further, and not what the schema asks for."""


def _is_npy(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    if info.flag_bits & 1:
        raise _Refused(f"{info.filename} is encrypted; {_REMEDY}")
    with archive.open(info) as member:
        return member.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX


def _check_header(key: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo, size: int) -> None:
    """ValueError unless the array that the header tells of is what the archive holds; no memory is taken for it."""
    if info.compress_type not in _MOST_TIMES:
        raise _Refused(f"{key} is compressed in an unknown way, {info.compress_type}; {_REMEDY}")
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        if version not in _READ_HEADER:
            raise _Refused(f"{key} is in version {version} of the .npy format; {_REMEDY}")
        shape, _, dtype = _READ_HEADER[version](member)
        held = info.file_size - member.tell()
    if dtype.hasobject:
        raise _Refused(f"{key} holds Python objects; every array must hold numbers")
    claimed = math.prod(int(n) for n in shape) * dtype.itemsize
    most = _MOST_TIMES[info.compress_type] * size
    if min(shape, default=0) < 0 or claimed != held or held > most:
        raise _Refused(
            f"{key} claims to be {dtype} {shape}, {claimed} bytes, of which the file holds {min(held, most)}; {_REMEDY}"
        )


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as member:
        array: Array = np.lib.format.read_array(member, allow_pickle=False)
        return array


def _check_keys(names: list[str]) -> None:
    keys = [name if name.isprintable() else repr(name) for name in names]
    if missing := [key for key in _REQUIRED if key not in keys]:
        found = ", ".join(sorted(keys)) or "nothing"
        raise _Refused(f"has no {', '.join(missing)}; found {found}; the schema is\n{SCHEMA}")
    if unknown := sorted(set(keys) - set(_KEYS)):
        raise _Refused(f"unknown {', '.join(unknown)}; accepted are {', '.join(_KEYS)}")


def _capture(arrays: dict[str, Array], metadata: Mapping[str, Any]) -> Capture:
    values = {key: _values(key, arrays[key]) for key in ("q", "k", "v", "o") if key in arrays}
    q, k = values["q"], values["k"]
    for key, array in values.items():
        if array.dtype != q.dtype or arrays[key].ndim != arrays["q"].ndim:
            raise ValueError(
                f"{key} is {arrays[key].dtype} with {arrays[key].ndim} axes, q is {arrays['q'].dtype} with "
                f"{arrays['q'].ndim}; all must have one dtype and the same axes"
            )
    layers, tokens, query_heads, depth = q.shape
    if k.shape[:2] != (layers, tokens) or k.shape[3] != depth:
        raise ValueError(f"k is {k.shape}, q is {q.shape}; [layers, tokens, heads, head_dim] may differ in heads only")
    if values["v"].shape != k.shape:
        raise ValueError(f"v is {values['v'].shape}; must be {k.shape} like k")
    if query_heads % k.shape[2]:
        raise ValueError(f"q has {query_heads} heads, k has {k.shape[2]}; query heads must be a multiple of KV heads")
    if "o" in values and values["o"].shape != q.shape:
        raise ValueError(f"o is {values['o'].shape}; must be {q.shape} like q")

    prompt = int(_scalar("prompt_tokens", arrays, max(tokens - _DECODE_STEPS, 0), "iu"))
    if not 0 <= prompt < tokens:
        raise ValueError(f"prompt_tokens is {prompt}; must leave a decode step: 0 to {tokens - 1} of {tokens} tokens")
    scale = float(_scalar("scale", arrays, depth**-0.5, "iuf"))
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; must be a positive finite number")
    numbers = arrays.get("layers", np.arange(layers))
    if numbers.shape != (layers,) or numbers.dtype.kind not in "iu":
        raise ValueError(f"layers is {numbers.dtype} {numbers.shape}; must be {layers} integers, one a layer of q")
    return Capture(
        q=q, k=k, v=values["v"], o=values.get("o"), prompt_tokens=prompt, decode_steps=tokens - prompt,
        layers=tuple(int(number) for number in numbers), scale=scale, metadata=metadata,
    )


def _values(key: str, array: Array) -> Array:
    """``array`` as float ``[layers, tokens, heads, D]``, read-only."""
    if array.dtype.name not in _DTYPES:
        raise ValueError(
            f"{key} is {array.dtype}; must be float32, float16, or uint16 holding bfloat16 bits (a.view(np.uint16))"
        )
    if array.ndim not in (3, 4):
        raise ValueError(f"{key} has shape {array.shape}; must be [layers, tokens, heads, head_dim] or without layers")
    if not array.size:
        raise ValueError(f"{key} has shape {array.shape}; every axis must hold at least 1")
    dtype = np.dtype(_DTYPES[array.dtype.name])
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    values = array.view(dtype) if array.dtype.name == "uint16" else array
    values = np.ascontiguousarray(values.reshape((1,) * (4 - array.ndim) + array.shape))
    if not np.isfinite(values.astype(np.float32)).all():
        raise ValueError(f"{key} holds NaN or infinity; every value must be finite")
    values.flags.writeable = False
    return values


def _scalar(key: str, arrays: dict[str, Array], default: float, kinds: str) -> Any:
    value = arrays.get(key, np.asarray(default))
    if value.shape != () or value.dtype.kind not in kinds:
        wanted = "integer" if kinds == "iu" else "number"
        raise ValueError(f"{key} is {value.dtype} {value.shape}; must be one {wanted}")
    return value[()]
