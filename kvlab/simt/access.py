"""Instructions that touch memory: loads and stores of every width, cp.async with its groups, atomics.

A copy of cp.async lands when its group is waited for. Until then its bytes in shared memory are as if nobody had
written them: who reads them too early, for want of a wait, reads what raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.memory import POISON

from .values import BITS, PACKED, REGION, TYPES, Array, Mask, Operands, Step

if TYPE_CHECKING:
    from .machine import SimtMachine

SPACES = ("global", "shared", "param", "local", "const")


def decode(x: Operands) -> Step | None:
    """The step of an instruction that touches memory; None for another one."""
    found = _FORMS.get(x.op[0])
    return None if found is None else found(x)


def space_of(x: Operands) -> str:
    """The space that an instruction names; ``generic`` where it names none."""
    return next((word.split("::")[0] for word in x.op if word.split("::")[0] in SPACES), "generic")


def _vector(x: Operands) -> int:
    return next((int(word[1:]) for word in x.op if word in ("v2", "v4", "v8")), 1)


def _ld(x: Operands) -> Step:
    space, kind, count = space_of(x), x.op[-1], _vector(x)
    names = x.list(0)
    if space == "param":
        return _ld_param(x, kind, names)
    writes = [x.write(name, kind) for name in names]
    nbytes, bits = TYPES[kind].itemsize, BITS[TYPES[kind].itemsize]
    address, shared = x.address(1), space == "shared"

    def step(m: SimtMachine, mask: Mask) -> None:
        where = address(m)
        if shared:
            where = where & 0xFFFFFFFF
            if m.order is not None:
                m.order.read(m, where, nbytes * count, mask)
        found = m.load(where, bits, count, mask, space)
        if space != "local":
            m.trace.note(x.at, shared, nbytes * count, where, mask)
        for i, write in enumerate(writes):
            write(m, np.ascontiguousarray(found[..., i]), mask)

    return step


def _ld_param(x: Operands, kind: str, names: list[str]) -> Step:
    name, _, offset = x.texts[1].strip("[] ").partition("+")
    given, size, start = x.parameters.get(name.strip()), TYPES[kind].itemsize, int(offset or "0", 0)
    if given is None and name.startswith("retval"):
        given = b""  # of printf
    if given is None:
        x.unknown(f"{name!r} is no parameter")
    writes = [x.write(name, kind) for name in names]
    values = np.frombuffer(given.ljust(start + size * len(names), b"\0"), BITS[size], len(names), start)

    def step(m: SimtMachine, mask: Mask) -> None:
        for write, value in zip(writes, values, strict=True):
            write(m, np.full(m.shape, value), mask)

    return step


def _st(x: Operands) -> Step:
    space, kind = space_of(x), x.op[-1]
    if space == "param":  # of a call
        return lambda m, mask: None
    reads = [x.read(name, f"b{8 * TYPES[kind].itemsize}") for name in x.list(1)]
    nbytes, address, shared = TYPES[kind].itemsize, x.address(0), space == "shared"

    def step(m: SimtMachine, mask: Mask) -> None:
        where = address(m)
        if shared:
            where = where & 0xFFFFFFFF
        value = np.empty((*m.shape, len(reads)), BITS[nbytes])
        for i, read in enumerate(reads):
            value[..., i] = read(m)
        if shared and m.order is not None:
            m.order.wrote(m, where, nbytes * len(reads), mask)
        m.store(where, value, mask, space)
        if space != "local":
            m.trace.note(x.at, shared, nbytes * len(reads), where, mask)

    return step


# ---- cp.async

@dataclass
class Copy:
    """Copies in flight of one instruction: where to, what, whose, and of which group of their warp."""

    where: Array
    value: Array
    mask: Array
    group: Array

    def land(self, m: SimtMachine, lanes: Array) -> None:
        """Store what is still in flight of some of the lanes."""
        lands = self.mask & lanes
        if lands.any():
            m.store(self.where, self.value, None if lands.all() else lands, "shared")
            self.mask = self.mask & ~lands


@dataclass
class Arrival:
    """Arrivals at mbarriers, of lanes, that wait for the copies which these had in flight."""

    where: Array
    mask: Array
    copies: list[Copy]


def _cp(x: Operands) -> Step | None:
    if x.op[1] != "async" or "bulk" in x.op:
        return None
    if "commit_group" in x.op:
        return lambda m, mask: _commit(m, mask)
    if "wait_group" in x.op or "wait_all" in x.op:
        left = int(x.texts[0], 0) if x.texts else -1
        return lambda m, mask: _wait(m, mask, left)
    if "mbarrier" in x.op:
        return _arrive_behind(x)
    if "shared" not in [word.split("::")[0] for word in x.op]:
        return None
    to, fro, nbytes = x.shared_address(0), x.address(1), int(x.texts[2], 0)
    size = x.read(3, "u32") if len(x) > 3 and not x.texts[3].startswith("%rd") else None

    def step(m: SimtMachine, mask: Mask) -> None:
        where, source = to(m), fro(m)
        on = np.ones(m.shape, np.bool_) if mask is None else mask
        reads = on
        if size is not None:
            given = size(m)
            reads = on & (given > 0)
            if np.any(on & (given != nbytes) & (given != 0)):
                x.unknown("a part of the bytes is not modelled: the source size must be 0 or all")
        value = np.zeros((*m.shape, nbytes // 4), np.uint32)
        if reads.any():
            whole = None if reads.all() else reads
            value = m.load(source, np.dtype(np.uint32), nbytes // 4, whole, "global", nbytes)
        m.trace.note_copy(x.at, nbytes, where, source, reads, on)
        if m.order is not None:
            m.order.wrote(m, where, nbytes, on, unfenced=False)
        m.forget(where, nbytes, on)
        m.copies.append(Copy(where, value, on, m.groups.copy()))

    return step


def _arrive_behind(x: Operands) -> Step:
    """An arrival that comes when the copies which the thread has in flight have landed, as late as that is seen."""
    if "noinc" not in x.op:
        x.unknown("arrivals are those that the mbarrier counts: .noinc")
    address = x.shared_address(0)

    def step(m: SimtMachine, mask: Mask) -> None:
        on = np.ones(m.shape, np.bool_) if mask is None else mask
        where = np.broadcast_to(address(m), m.shape).copy()
        m.arrivals.append(Arrival(where, on.copy(), list(m.copies)))
        m.mbarriers.version += 1
        if m.order is not None:
            for at in np.unique(where[on]).tolist():
                m.order.hand(("mbarrier", at), np.asarray((on & (where == at)).any(axis=1)))

    return step


def _commit(m: SimtMachine, mask: Mask) -> None:
    m.groups[slice(None) if mask is None else mask.any(axis=1)] += 1


def _wait(m: SimtMachine, mask: Mask, left: int) -> None:
    """The copies of all groups but the last ``left`` land; -1: also of the group that is open."""
    warps = np.ones(len(m.groups), np.bool_) if mask is None else mask.any(axis=1)
    for copy in m.copies:
        lands = copy.mask & (warps & (copy.group < m.groups - left))[:, None]
        if lands.any():
            if m.order is not None:
                nbytes = copy.value.shape[-1] * copy.value.itemsize
                m.order.wrote(m, copy.where, nbytes, lands, unfenced=False)
            copy.land(m, lands)
    m.copies = [copy for copy in m.copies if copy.mask.any()]


def forgotten(memory: Any, where: Array, nbytes: int, mask: Array) -> None:
    """Bytes of a memory of CTAs ``[ctas, lanes]`` count as never written."""
    cta, lane = np.nonzero(mask)
    at = (where[cta, lane] - memory.base)[:, None] + np.arange(nbytes)
    inside = (at >= 0) & (at < memory.nbytes)
    cta, at = np.broadcast_to(cta[:, None], at.shape)[inside], at[inside]
    memory.bytes[cta, at] = POISON
    memory.written[cta, at] = False


# ---- atomics

Combine = Callable[[Array, Array], Array]
"""What memory holds after an atomic, of what it held and the operand."""
_ATOMIC: dict[str, Combine] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "exch": lambda old, new: new,
    "inc": lambda old, most: np.where(old >= most, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, most: np.where((old == 0) | (old > most), most, old - old.dtype.type(1)),
}


def _added_pairs(dtype: np.dtype[Any]) -> Combine:
    """The sums of two floats of 16 bits in a word, each rounded on its own."""
    return lambda old, new: (old.view(dtype) + np.ascontiguousarray(new).view(dtype)).view(np.uint32)


def _atom(x: Operands) -> Step:
    kind, reduces, count = x.op[-1], x.op[0] == "red", _vector(x)
    name = next((word for word in x.op[1:] if word in _ATOMIC or word == "cas"), None)
    if name is None or (kind in PACKED and name != "add"):
        x.unknown("this atomic is not modelled")
    combine = _added_pairs(TYPES[kind]) if kind in PACKED else _ATOMIC.get(name, np.add)
    kind = "b32" if kind in PACKED else kind
    first = 0 if reduces else 1
    address, space = x.address(first), space_of(x)
    shared = space == "shared"
    values = [x.read(text, kind) for text in x.list(first + 1)]
    swap = x.read(first + 2, kind) if name == "cas" else None
    writes = [] if reduces else [x.write(text, kind) for text in x.list(0)]
    size = TYPES[kind].itemsize

    def step(m: SimtMachine, mask: Mask) -> None:
        where = address(m)
        if shared:
            where = where & 0xFFFFFFFF
        on = np.ones(m.shape, np.bool_) if mask is None else mask
        m.trace.note(x.at, shared, size * count, where, mask)
        for i, read in enumerate(values):
            given = np.broadcast_to(read(m), m.shape)
            new = None if swap is None else np.broadcast_to(swap(m), m.shape)
            old = _one_by_one(m, combine, where + i * size, given, new, on, space)
            if writes:
                writes[i](m, old, mask)

    return step


def _one_by_one(
    m: SimtMachine, combine: Combine, where: Array, value: Array, swap: Array | None, on: Array, space: str
) -> Array:
    """Atomics in the order of lanes: lanes of one address come in turns, those of different ones together."""
    key = where[on]
    if space != "global":  # the same address of two CTAs is another one
        cta = np.broadcast_to(m.cta[:, None], m.shape)[on]
        key = np.where(key >> REGION == 0, key + (cta << 32), key)
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    opens = np.ones(len(ordered), np.bool_)
    opens[1:] = ordered[1:] != ordered[:-1]
    start = np.maximum.accumulate(np.where(opens, np.arange(len(ordered)), 0))
    turn = np.empty(len(order), np.int64)
    turn[order] = np.arange(len(ordered)) - start
    turns = np.full(m.shape, -1)
    turns[on] = turn
    old = np.zeros(m.shape, value.dtype)
    bits = BITS[value.dtype.itemsize]
    for now in range(int(turn.max(initial=-1)) + 1):
        lanes = turns == now
        before = np.ascontiguousarray(m.load(where, bits, 1, lanes, space)[..., 0]).view(value.dtype)
        after = np.where(before == value, swap, before) if swap is not None else combine(before, value)
        m.store(where, np.asarray(after, value.dtype).view(bits)[..., None], lanes, space)
        old = np.where(lanes, before, old)
    return old


def _nothing(x: Operands) -> Step:
    return lambda m, mask: None


def _fence(x: Operands) -> Step:
    if "proxy" not in x.op or "async" not in "".join(x.op):
        return _nothing(x)
    return lambda m, mask: None if m.order is None else m.order.fence(m, mask)


def _dependents(x: Operands) -> Step:
    """From the first wait on there is what the launch before writes, not earlier."""
    return (lambda m, mask: m.launch_before()) if "wait" in x.op else _nothing(x)


def _policy(x: Operands) -> Step:
    write = x.write(0, "b64")
    return lambda m, mask: write(m, np.zeros(m.shape, np.uint64), mask)


_FORMS: dict[str, Callable[[Operands], Step | None]] = {
    "ld": _ld, "ldu": _ld, "st": _st, "cp": _cp, "atom": _atom, "red": _atom, "prefetch": _nothing,
    "prefetchu": _nothing, "discard": _nothing, "applypriority": _nothing, "createpolicy": _policy, "membar": _nothing,
    "fence": _fence, "griddepcontrol": _dependents, "nanosleep": _nothing,
}
