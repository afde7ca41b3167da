"""Values to codes and bytes, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvlab.common.arrays import in_cpu_memory, to_numpy
from kvlab.common.checks import count, require, shown

from .field import REPLICA, Field

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Codes: TypeAlias = dict[str, np.ndarray[Any, Any]]


def as_bytes(buffer: Any, name: str = "buffer") -> Bytes:
    """Bytes, an array or a torch tensor as flat uint8; shared where it is contiguous, and copied from a GPU."""
    if isinstance(buffer, bytes | bytearray | memoryview):
        whole = not isinstance(buffer, memoryview) or buffer.c_contiguous
        return np.frombuffer(buffer if whole else bytes(buffer), np.uint8)
    return np.ascontiguousarray(numbers(in_cpu_memory(buffer), name)).reshape(-1).view(np.uint8)


def numbers(given: Any, name: str) -> np.ndarray[Any, Any]:
    """Array of NumPy over what was given: numbers, or fields of them. ValueError, naming it, for anything else."""
    try:
        array = to_numpy(given, name)
    except ValueError:
        require(hasattr(given, "shape"), f"{name} is {shown(given)}", "numbers, in rows of one length")
        raise
    require(array.dtype.kind not in "OUSMm", f"{name} has dtype {array.dtype}", "numbers")
    return array


def nibbles(flat: Bytes) -> Bytes:
    """Half bytes, the low one first: ``[2 * bytes]``."""
    out = np.empty(2 * flat.size, np.uint8)
    out[0::2], out[1::2] = flat & 15, flat >> 4
    return out


def joined(halves: Bytes) -> Bytes:
    """Bytes of their halves, the low one first."""
    return np.bitwise_or(halves[0::2], halves[1::2] << 4, dtype=np.uint8)


def pack(fields: Sequence[Field], nbytes: int, codes: Mapping[str, npt.ArrayLike], fill: int) -> Bytes:
    """The bytes of the codes of all fields."""
    require(isinstance(codes, Mapping), f"codes are {shown(codes)}", "arrays by the names of the fields")
    require(0 <= count("fill", fill) < 256, f"fill is {fill}", "a byte, 0 to 255")
    out = np.full(nbytes, fill, np.uint8)
    for small in (False, True):
        mine = [field for field in fields if (field.type.bits < 8) == small]
        if not mine:
            continue
        target, unit = (nibbles(out), 4) if small else (out, 8)
        for field in mine:
            require(field.name in codes, f"codes have no {field.name}", f"of {', '.join(f.name for f in fields)}")
            code = np.asarray(codes[field.name])
            require(code.shape == field.shape, f"codes of {field.name} have shape {code.shape}", str(field.shape))
            require(code.dtype.kind in "iu", f"codes of {field.name} have dtype {code.dtype}", "unsigned integers")
            least, most = int(code.min()), int(code.max())
            fits = least >= 0 and most >> field.type.bits == 0
            require(fits, f"codes of {field.name} have {least if least < 0 else most}", f"of {field.type.bits} bits")
            wide = code.astype(f"<u{max(field.type.bits // 8, 1)}")[..., None].view(np.uint8)
            window = field.window(target, unit)
            window[...] = wide.reshape(window.shape[len(field.of(REPLICA)) :])
        if small:
            out = joined(target)
    return out


def unpack(fields: Sequence[Field], flat: Bytes) -> Codes:
    """The codes of all fields, of the first copy."""
    halves = nibbles(flat) if any(field.type.bits < 8 for field in fields) else flat
    out: Codes = {}
    for field in fields:
        small = field.type.bits < 8
        window = field.window(halves if small else flat, 4 if small else 8)
        one = np.ascontiguousarray(window[(0,) * len(field.of(REPLICA))])
        out[field.name] = one.view(f"<u{one.shape[-1]}").reshape(field.shape)
    return out


def _groups(part: Field, shared: Field) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The values' shape with each axis as (groups, members), and the axes of the members."""
    shape: list[int] = []
    for axis in part.axes:
        group = shared.group(axis) or part.extent(axis)
        shape += [part.extent(axis) // group, group]
    return tuple(shape), tuple(range(1, len(shape), 2))


def _spread(codes: np.ndarray[Any, Any], part: Field, shared: Field) -> np.ndarray[Any, Any]:
    """What groups share, broadcast over the values: of the shape of :func:`_groups` with members of 1."""
    shape, members = _groups(part, shared)
    return codes.reshape([1 if axis in members else size for axis, size in enumerate(shape)])


def quantise(fields: Sequence[Field], values: Mapping[str, np.ndarray[Any, Any]]) -> Codes:
    """Codes of all fields for ``values`` of the parts; scales and minima are computed."""
    named = {field.name: field for field in fields}
    out: Codes = {}
    for name, x in values.items():
        part = named[name]
        scale, least = named.get(f"{name}_scale"), named.get(f"{name}_min")
        if scale is None:
            out[name] = part.type.codes(x)
            continue
        shape, members = _groups(part, scale)
        x = x.reshape(shape)
        low = np.zeros((), np.float32)
        if least is not None:
            alike = _groups(part, least) == (shape, members)
            require(alike, f"{least.name} has other groups than {scale.name}", "alike")
            low = x.min(members, keepdims=True)
            out[least.name] = least.type.codes(low.reshape(least.shape))
            low = least.type.numbers(out[least.name]).reshape(low.shape)
        reach = _reach(x - low, members, part, scale)
        step = _steps(reach, part, scale)
        with np.errstate(over="ignore"):
            out[scale.name] = scale.type.codes(step.reshape(scale.shape))
        held = scale.type.numbers(out[scale.name]).reshape(step.shape)
        lost = ~np.isfinite(held) | ((held == 0) & (reach != 0) & (part.type.bits > 8))
        if lost.any():
            most = f"{name} has {reach[lost][0]:g}, whose scale is {step[lost][0]:g}"
            raise ValueError(f"{most}: must be one that {scale.name}, {scale.stored}, holds")
        if scale.type.bits == 8:  # a coarse scale is what the codes are made with; a float16 one is not
            step = held
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            inverse = np.where(step != 0, np.float32(1) / step, np.float32(0)).astype(np.float32)
        out[name] = part.type.codes((x - low) * inverse).reshape(part.shape)
    return out


def _reach(x: np.ndarray[Any, Any], members: tuple[int, ...], part: Field, scale: Field) -> np.ndarray[Any, Any]:
    """What a group's scale has to reach: the largest magnitude; with its sign where codes reach further below 0."""
    if not part.type.offset or scale.stored == "e8m0":  # a scale of e8m0 has no sign
        return np.abs(x).max(members, keepdims=True)
    rest = [axis for axis in range(x.ndim) if axis not in members]
    flat = x.transpose(*rest, *members).reshape(*(x.shape[axis] for axis in rest), -1)
    most = np.take_along_axis(flat, np.abs(flat).argmax(-1)[..., None], -1)
    return most.reshape([1 if axis in members else size for axis, size in enumerate(x.shape)])


def _steps(reach: np.ndarray[Any, Any], part: Field, scale: Field) -> np.ndarray[Any, Any]:
    """Scales: reach over the largest number of the type, a power of two, rounded up, where the scale is one."""
    if scale.stored == "e8m0":
        step = (reach / np.float32(part.type.largest - bool(part.type.offset))).astype(np.float32)
        with np.errstate(divide="ignore"):
            step = np.exp2(np.ceil(np.log2(np.maximum(step, np.float32(2.0**-126))))).astype(np.float32)
        return step
    return (reach / np.float32(-part.type.offset or part.type.largest)).astype(np.float32)


def dequantise(
    fields: Sequence[Field], part: Field, codes: Codes, tensor_scale: float
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The values of a part: code * scale + min, times the tensor's scale."""
    named = {field.name: field for field in fields}
    value = part.type.numbers(codes[part.name])
    for kind in ("scale", "min"):
        shared = named.get(f"{part.name}_{kind}")
        if shared is not None:
            factor = _spread(shared.type.numbers(codes[shared.name]), part, shared)
            value = value.reshape(_groups(part, shared)[0])
            value = (value * factor if kind == "scale" else value + factor).reshape(part.shape)
    return (value * np.float32(tensor_scale)).astype(np.float32)
