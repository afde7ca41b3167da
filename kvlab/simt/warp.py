"""Instructions of whole warps: shuffles, votes, ldmatrix and stmatrix, products of tensor cores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.hardware import get_atom
from kvlab.hardware.chip import SUMS, arithmetic
from kvlab.hardware.mma.atom import MmaAtom
from kvlab.hardware.mma.ldmatrix import register_of_unit, unit_of_register

from .values import TYPES, Array, Mask, Operands, Read, Step

if TYPE_CHECKING:
    from .machine import SimtMachine

LANE = np.arange(32)


def decode(x: Operands) -> Step | None:
    """The step of an instruction of whole warps; None for another one."""
    found = _FORMS.get(x.op[0])
    return None if found is None else found(x)


def whole(x: Operands, m: SimtMachine, mask: Mask) -> Array:
    """The warps ``[warps]`` that take part, with all their lanes; an error where a warp takes part in parts."""
    if mask is None:
        return np.ones(m.shape[0], np.bool_)
    warps: Array = np.asarray(mask.any(axis=1))
    if not mask[warps].all():
        raise RuntimeError(f"{x.op[0]} needs all 32 lanes of a warp, some are elsewhere")
    return warps


# ---- shuffles and votes

def _shfl(x: Operands) -> Step:
    if x.op[1] != "sync" or x.op[-1] != "b32":
        return x.unknown("shuffles are .sync and of b32")
    names = [name.strip() for name in x.texts[0].split("|")]
    a, b, c = (x.read(place, "b32") for place in (1, 2, 3))
    write = x.write(names[0], "b32")
    inside = x.write(names[1], "pred") if len(names) > 1 else None
    mode = x.op[2]

    def step(m: SimtMachine, mask: Mask) -> None:
        value = np.broadcast_to(a(m), m.shape)
        offset, limit = (np.broadcast_to(read(m), m.shape).astype(np.int64) for read in (b, c))
        offset, segment, clamp = offset & 31, limit >> 8 & 31, limit & 31
        most = LANE & segment | clamp & ~segment
        least = LANE & segment
        source = {"up": LANE - offset, "down": LANE + offset, "bfly": LANE ^ offset,
                  "idx": least | offset & ~segment}[mode]
        found = source >= most if mode == "up" else source <= most
        taken = np.take_along_axis(value, np.where(found, source, LANE) & 31, axis=1)
        write(m, taken, mask)
        if inside is not None:
            inside(m, found, mask)

    return step


def _vote(x: Operands) -> Step:
    a = x.read(1, "pred")
    mode = x.op[2]
    write = x.write(0, "b32" if mode == "ballot" else "pred")

    def step(m: SimtMachine, mask: Mask) -> None:
        on = np.ones(m.shape, np.bool_) if mask is None else mask
        said = a(m) & on
        if mode == "ballot":
            found = (said.astype(np.uint64) << LANE.astype(np.uint64)).sum(axis=1).astype(np.uint32)
            write(m, np.array(np.broadcast_to(found[:, None], m.shape)), mask)
        else:
            count, lanes = said.sum(axis=1), on.sum(axis=1)
            truth = {"any": count > 0, "all": count == lanes, "uni": (count == 0) | (count == lanes)}[mode]
            write(m, np.array(np.broadcast_to(truth[:, None], m.shape)), mask)

    return step


def _activemask(x: Operands) -> Step:
    write = x.write(0, "b32")

    def step(m: SimtMachine, mask: Mask) -> None:
        on = np.ones(m.shape, np.bool_) if mask is None else mask
        found = (on.astype(np.uint64) << LANE.astype(np.uint64)).sum(axis=1).astype(np.uint32)
        write(m, np.array(np.broadcast_to(found[:, None], m.shape)), mask)

    return step


def _redux(x: Operands) -> Step:
    kind = x.op[-1]
    a, write = x.read(1, kind), x.write(0, kind)
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
                 "xor": np.bitwise_xor}
    function = functions[x.op[2]]
    if kind == "f32":
        function = {"min": np.fmin, "max": np.fmax}[x.op[2]] if "NaN" not in x.op else function

    def step(m: SimtMachine, mask: Mask) -> None:
        whole(x, m, mask)
        value = np.broadcast_to(a(m), m.shape)
        found = function.reduce(value, axis=1, dtype=value.dtype)
        write(m, np.array(np.broadcast_to(found[:, None], m.shape)), mask)

    return step


def _elect(x: Operands) -> Step:
    """The first lane of those that take part."""
    names = [name.strip() for name in x.texts[0].split("|")]
    leader, chosen = x.write(names[0], "b32"), x.write(names[1], "pred")

    def step(m: SimtMachine, mask: Mask) -> None:
        first = np.zeros(m.shape[0], np.int64) if mask is None else mask.argmax(axis=1)
        leader(m, np.array(np.broadcast_to(first[:, None].astype(np.uint32), m.shape)), mask)
        chosen(m, first[:, None] == LANE, mask)

    return step


# ---- matrices

def _matrices(x: Operands) -> tuple[int, bool]:
    if x.op[-1] != "b16" or "m8n8" not in x.op:
        x.unknown("this shape of matrices is not modelled")
    return next(int(word[1:]) for word in x.op if word in ("x1", "x2", "x4")), "trans" in x.op


def _ldmatrix(x: Operands) -> Step:
    number, trans = _matrices(x)
    address = x.shared_address(1)
    writes = [x.write(name, "b32") for name in x.list(0)]
    name = f"ldmatrix.x{number}{'.trans' * trans}"

    def step(m: SimtMachine, mask: Mask) -> None:
        warps, where = whole(x, m, mask), address(m)
        rows = where[:, : 8 * number]
        on = None if mask is None else np.broadcast_to(warps[:, None], rows.shape)
        if m.order is not None:
            m.order.read(m, rows, 16, on)
        units = m.load(rows, np.dtype(np.uint16), 8, on, "shared", 16)  # [warps, rows, 8]
        found = unit_of_register(number, trans)(units.reshape(m.shape[0], 64 * number)).view(np.uint32)
        m.trace.note_matrix(x.at, name, where[warps])
        for i, write in enumerate(writes):
            write(m, np.ascontiguousarray(found[..., i]), mask)

    return step


def _stmatrix(x: Operands) -> Step:
    number, trans = _matrices(x)
    address = x.shared_address(0)
    reads = [x.read(name, "b32") for name in x.list(1)]
    name = f"stmatrix.x{number}{'.trans' * trans}"

    def step(m: SimtMachine, mask: Mask) -> None:
        warps, where = whole(x, m, mask), address(m)
        value = np.empty((*m.shape, number), np.uint32)
        for i, read in enumerate(reads):
            value[..., i] = read(m)
        flat = value.view(np.uint16).reshape(m.shape[0], 64 * number)
        units = register_of_unit(number, trans)(flat).reshape(m.shape[0], 8 * number, 8)
        rows = where[:, : 8 * number]
        on = None if mask is None else np.broadcast_to(warps[:, None], rows.shape)
        if m.order is not None:
            m.order.wrote(m, rows, 16, on)
        m.store(rows, units, on, "shared", 16)
        m.trace.note_matrix(x.at, name, where[warps])

    return step


_ATOMS = {"s8": "s8", "u8": "u8", "bf16": "bf16", "f16": "f16", "tf32": "tf32", "e4m3": "e4m3", "e5m2": "e5m2",
          "f64": "f64"}


def _mma(x: Operands) -> Step:
    shape = next((word for word in x.op if word.startswith("m") and word[1:2].isdigit()), "")
    result, a_kind, b_kind, c_kind = x.op[-4:]
    if x.op[1] != "sync" or a_kind not in _ATOMS or c_kind not in ("f32", "s32", "f64", "f16") or result != c_kind:
        x.unknown("this product is not modelled")
    suffix = a_kind if a_kind == b_kind else f"{a_kind}.{b_kind}"
    try:
        atom = get_atom(f"mma.sync.{shape}.{suffix}")
    except ValueError as error:
        x.unknown(str(error))
    half = c_kind == "f16"
    kind = "b64" if a_kind == "f64" else "b32"
    a, b = ([x.read(name, kind) for name in x.list(place)] for place in (1, 2))
    c_type = "f64" if a_kind == "f64" else "s32" if c_kind == "s32" else "b32" if half else "f32"
    c, writes = [x.read(name, c_type) for name in x.list(3)], [x.write(name, c_type) for name in x.list(0)]

    def step(m: SimtMachine, mask: Mask) -> None:
        warps = whole(x, m, mask)
        part = slice(None) if warps.all() else warps
        first = _fragment(m, a, part, atom.dtype_of("a"))
        second = _fragment(m, b, part, atom.dtype_of("b"))
        third = _fragment(m, c, part, np.dtype(np.float16) if half else TYPES[c_type])
        sums = products(m, atom, first, second, third.astype(np.float32) if half else third)
        out = sums.astype(np.float16).view(np.uint32) if half else sums
        for i, write in enumerate(writes):
            value = np.zeros(m.shape, out.dtype)
            value[part] = out[..., i]
            write(m, value, mask)

    return step


def _fragment(m: SimtMachine, reads: list[Read], part: slice | Array, dtype: np.dtype[Any]) -> Array:
    """Registers as the elements that they hold: ``[warps, 32, elements]``."""
    registers = np.stack([np.broadcast_to(read(m), m.shape)[part] for read in reads], axis=-1)
    return registers.view(dtype)


def products(m: SimtMachine, atom: MmaAtom, a: Array, b: Array, c: Array) -> Array:
    """``c + a b`` of an atom: as the chip sums it where that is known, else in the atom's own type."""
    known = _sums_are_known(atom)
    if not known and m.arithmetic == "chip":
        m.provisional.add(atom.name)
    with arithmetic(m.arithmetic if known else "float32"):
        return atom.mma(a, b, c)


@functools.cache
def _sums_are_known(atom: MmaAtom) -> bool:
    return atom.dtype in SUMS and atom.dtype_of("b") == atom.dtype and atom.shape[2] % SUMS[atom.dtype].k == 0


_FORMS: dict[str, Callable[[Operands], Step | None]] = {
    "shfl": _shfl, "vote": _vote, "activemask": _activemask, "redux": _redux, "elect": _elect, "ldmatrix": _ldmatrix,
    "stmatrix": _stmatrix, "mma": _mma,
}
