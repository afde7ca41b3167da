"""Hopper's instructions: mbarriers, TMA boxes, products of warpgroups with operands in shared memory.

A box of TMA lands when a warp tests the mbarrier that counts its bytes: who reads shared memory without that wait reads
what nobody wrote, which raises. Products of wgmma are computed at once; who touches their registers or overwrites their
operands before the wait, raises (:mod:`kvlab.simt.order`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.hardware import SmemDescriptor, TmaDescriptor, get_atom, shared_mma_wavefronts
from kvlab.hardware.copies import tma
from kvlab.hardware.copies.tensor_map import TensorMapSwizzle
from kvlab.hardware.mma.atom import MmaAtom
from kvlab.memory import Memory, bfloat16, float16

from .values import REGION, TYPES, Array, Mask, Operands, Read, Step
from .warp import products, whole

if TYPE_CHECKING:
    from .control import Control
    from .machine import SimtMachine

GROUP = 128  # threads of a warpgroup
_PERIOD = 1024  # bytes after which every swizzle begins anew
_CHUNK = 16
_MAP_BYTES = 128


def decode(x: Operands) -> Step | None:
    """The step of an instruction that Hopper has; None for another one."""
    if x.op[:3] == ("cp", "async", "bulk"):
        return _bulk(x)
    found = _FORMS.get(x.op[0])
    return None if found is None else found(x)


# ---- mbarriers

class Mbarriers:
    """The mbarriers of CTAs side by side, by their address: arrivals that a phase needs, those that are pending, bytes
    that are pending, and phases that have ended, each ``[ctas]``.

    >>> barriers, one, two = Mbarriers(2), np.array([64]), np.array([64, 64])
    >>> barriers.init(two, np.array([0, 1]), np.array([2, 1]))
    >>> barriers.arrive(two, np.array([0, 1]), np.array([1, 1]))
    >>> barriers.done(two, np.array([0, 1]), np.array([0, 0])).tolist()
    [False, True]
    >>> barriers.arrive(two, np.array([0, 0]), np.array([1, 1]))
    Traceback (most recent call last):
        ...
    ValueError: mbarrier at shared address 64: 2 of 2 arrivals came more than 1 pending
    """

    def __init__(self, ctas: int) -> None:
        self.ctas = ctas
        self.version = 0
        self._state: dict[int, Array] = {}

    def init(self, where: Array, cta: Array, count: Array) -> None:
        """Every phase of the mbarriers needs ``count`` arrivals."""
        for address in np.unique(where).tolist():
            here = where == address
            state = self._state.setdefault(address, np.zeros((4, self.ctas), np.int64))
            state[0, cta[here]] = state[1, cta[here]] = count[here]
            state[2:, cta[here]] = 0

    def arrive(self, where: Array, cta: Array, count: Array, nbytes: Array | None = None) -> None:
        """``count`` arrivals of each lane, which announce ``nbytes`` bytes."""
        for address in np.unique(where).tolist():
            here, state = where == address, self._known(address, cta[where == address])
            if nbytes is not None:
                np.add.at(state[2], cta[here], nbytes[here])
            arrivals = np.bincount(cta[here], count[here], self.ctas).astype(np.int64)
            over = arrivals > state[1]
            if over.any():
                many, pending = int(arrivals[over][0]), int(state[1][over][0])
                raise ValueError(
                    f"mbarrier at shared address {address}: {many} of {int(state[0][over][0])} arrivals came more than "
                    f"{pending} pending"
                )
            state[1] -= arrivals
            self._settle(state)

    def complete(self, where: Array, cta: Array, nbytes: int) -> None:
        """A copy brought so many bytes, 0 or less to announce them."""
        for address in np.unique(where).tolist():
            here = where == address
            state = self._known(address, cta[here])
            np.subtract.at(state[2], cta[here], nbytes)
            self._settle(state)

    def done(self, where: Array, cta: Array, parity: Array) -> Array:
        """Lanes whose phase of that parity has ended: bool ``[lanes]``."""
        found = np.zeros(where.shape, np.bool_)
        for address in np.unique(where).tolist():
            here = where == address
            found[here] = self._known(address, cta[here])[3][cta[here]] % 2 != parity[here]
        return found

    def _known(self, address: int, cta: Array) -> Array:
        state = self._state.get(address)
        if state is None or not state[0, cta].all():
            raise ValueError(f"mbarrier at shared address {address} was not initialised")
        return state

    def _settle(self, state: Array) -> None:
        ended = (state[0] > 0) & (state[1] == 0) & (state[2] == 0)
        if ended.any():
            state[3] += ended
            state[1] = np.where(ended, state[0], state[1])
            self.version += 1


def _lanes(m: SimtMachine, mask: Mask, *arrays: Array) -> tuple[Array, ...]:
    """(CTAs of the lanes that take part, their values of each array)."""
    on = np.ones(m.shape, np.bool_) if mask is None else mask
    cta = np.broadcast_to(m.cta[:, None], m.shape)[on]
    return (cta, *(np.broadcast_to(array, m.shape)[on] for array in arrays))


def _mbarrier(x: Operands) -> Step | None:
    if "try_wait" in x.op or "test_wait" in x.op:
        return _test_wait(x) if "test_wait" in x.op and "parity" in x.op else None
    if "inval" in x.op:
        return lambda m, mask: None
    if "init" in x.op:
        where, count = x.shared_address(0), x.read(1, "u32")

        def init(m: SimtMachine, mask: Mask) -> None:
            cta, at, n = _lanes(m, mask, where(m), count(m))
            m.mbarriers.init(at, cta, n)

        return init
    if "expect_tx" in x.op and "arrive" not in x.op:
        where, nbytes = x.shared_address(0), x.read(1, "u32")

        def expect(m: SimtMachine, mask: Mask) -> None:
            cta, at, n = _lanes(m, mask, where(m), nbytes(m))
            for many in np.unique(n).tolist():
                m.mbarriers.complete(at[n == many], cta[n == many], -many)

        return expect
    if "arrive" not in x.op or x.texts[0] != "_":
        return None
    where, announces = x.shared_address(1), "expect_tx" in x.op
    number = x.read(2, "u32") if len(x) > 2 else None

    def arrive(m: SimtMachine, mask: Mask) -> None:
        given = np.uint32(1) if number is None else number(m)
        cta, at, n = _lanes(m, mask, where(m), np.asarray(given))
        n = n.astype(np.int64)
        m.mbarriers.arrive(at, cta, np.ones(len(n), np.int64) if announces else n, n if announces else None)
        if m.order is not None:
            for address, warps in _by_address(m, mask, where(m)):
                m.order.hand(("mbarrier", address), warps)

    return arrive


def _test_wait(x: Operands) -> Step:
    where, parity, write = x.shared_address(1), x.read(2, "u32"), x.write(0, "pred")

    def step(m: SimtMachine, mask: Mask) -> None:
        on = np.ones(m.shape, np.bool_) if mask is None else mask
        write(m, _arrived(m, on, where, parity), mask)

    return step


def _arrived(m: SimtMachine, on: Array, where: Callable[[SimtMachine], Array], parity: Read) -> Array:
    """Lanes ``[warps, 32]`` whose phase has ended, after the boxes that their mbarriers count have landed."""
    cta, at, bit = _lanes(m, on, where(m), parity(m))
    m.land(at, cta)
    done = np.zeros(m.shape, np.bool_)
    done[on] = m.mbarriers.done(at, cta, bit & 1)
    if m.order is not None and done.any():
        for address, warps in _by_address(m, done, where(m)):
            m.order.take(("mbarrier", address), warps)
    return done


def _by_address(m: SimtMachine, mask: Mask, where: Array) -> Iterator[tuple[int, Array]]:
    """Each address of the lanes that take part, and its warps ``[all]``."""
    where = np.broadcast_to(where, m.shape)
    for address in np.unique(where if mask is None else where[mask]).tolist():
        here = where == address
        yield address, np.asarray((here if mask is None else here & mask).any(axis=1))


def control(x: Operands) -> Control | None:
    """The control step of a wait for an mbarrier: lanes whose phase has not ended stay, and their warps sleep."""
    if x.op[0] != "mbarrier" or "try_wait" not in x.op:
        return None
    if "parity" not in x.op:
        x.unknown("waits are for a parity")
    where, parity, write, at = x.shared_address(1), x.read(2, "u32"), x.write(0, "pred"), x.at

    def wait(m: SimtMachine, here: Mask, on: Array) -> None:
        done = _arrived(m, on, where, parity)
        write(m, done, on)
        late = on & ~done
        if late.any():
            m.go(late, at)
            m.seen[late.any(axis=1)] = m.mbarriers.version

    return wait


# ---- TMA

@dataclass
class Boxes:
    """Boxes on their way to shared memory: whose, where the chunks of 16 bytes go, what they hold, and the mbarrier
    that counts them."""

    cta: Array
    barrier: Array
    where: Array
    value: Array
    nbytes: int
    landed: Array = field(init=False)

    def __post_init__(self) -> None:
        self.landed = np.zeros(len(self.cta), np.bool_)


def _bulk(x: Operands) -> Step | None:
    if "commit_group" in x.op or "wait_group" in x.op:
        return _groups(x, "boxes")
    if "prefetch" in x.op:
        return _nothing(x)
    rank = next((int(word[0]) for word in x.op if word[1:] == "d" and word[0] in "12345"), 0)
    spaces = [word.split("::")[0] for word in x.op if word.split("::")[0] in ("shared", "global")]
    if "tensor" not in x.op or not rank or any(word in x.op for word in ("im2col", "multicast::cluster", "reduce")):
        return None
    loads = spaces == ["shared", "global"]
    tensor, barrier = (x.texts[1], x.texts[2]) if loads else (x.texts[0], None)
    inside = tensor.strip()[1:-1]
    name, _, rest = inside.partition(",")
    coordinates = [x.read(c.strip(), "s32") for c in rest.strip().strip("{} ").split(",")]
    descriptor = x.address(f"[{name.strip()}]")
    shared = x.shared_address(0 if loads else 1)
    counted = x.shared_address(barrier) if barrier is not None else None

    def step(m: SimtMachine, mask: Mask) -> None:
        cta, which, where, *at = _lanes(m, mask, descriptor(m), shared(m), *(read(m) for read in coordinates))
        bars = _lanes(m, mask, counted(m))[1] if counted is not None else None
        warp = _lanes(m, mask, (np.arange(m.shape[0]) % m.warps)[:, None])[1]
        start = where % _PERIOD
        for address, first in np.unique(np.stack([which, start]), axis=1).T.tolist():
            here = (which == address) & (start == first)
            found, coords = m.tensor_map(address), [c[here] for c in reversed(at)]
            image = found.image(first)[..., :: _CHUNK // found.dtype.itemsize].ravel()  # of the chunks of a box
            chunks = (where[here] - first)[:, None] + image
            m.trace.note_boxes(x.at, int(here.sum()), found.transaction_bytes)
            size = -(-int(image.max() + _CHUNK) // _PERIOD) * _PERIOD
            boxes = np.arange(len(chunks)) * size  # in a memory of their own
            memory, lies = Memory(len(chunks) * size, name="a box of TMA"), boxes[:, None] + image
            if bars is not None:
                if m.order is not None:
                    m.order.copied(cta[here], warp[here], chunks)
                tma.load(found, coords, memory, boxes + first)
                value = memory.load(lies, np.dtype(np.uint32), 4)
                m.forget_boxes(cta[here], chunks, _CHUNK)
                m.boxes.append(Boxes(cta[here], bars[here], chunks, value, found.transaction_bytes))
                m.mbarriers.version += 1
            else:
                if m.order is not None:
                    m.order.read_async(m.order.boxes, cta[here], warp[here], chunks)
                memory.store(lies, m.load_boxes(cta[here], chunks, np.dtype(np.uint32), 4))
                tma.store(found, coords, memory, boxes + first)

    return step


def _groups(x: Operands, kind: str) -> Step:
    """Groups of asynchronous instructions, closed or waited for."""
    left = None if "commit_group" in x.op else int(x.texts[0], 0)

    def step(m: SimtMachine, mask: Mask) -> None:
        if m.order is None:
            return
        groups = m.order.products if kind == "products" else m.order.boxes
        warps: Array = np.ones(m.shape[0], np.bool_) if mask is None else np.asarray(mask.any(axis=1))
        if left is None:
            groups.close(warps)
        else:
            groups.end(warps, left)

    return step


# ---- descriptors that the kernel makes

_FIELDS = {"global_address": (0, 8), "global_stride": (8, 8), "global_dim": (40, 4), "box_dim": (60, 4),
           "element_stride": (80, 4), "rank": (100, 1), "elemtype": (101, 1), "interleave_layout": (102, 1),
           "swizzle_mode": (103, 1), "fill_mode": (104, 1)}
"""Where the machine keeps the fields of a tensor map, of 128 bytes: (byte, bytes of an element)."""
_ELEMENTS = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.int32), np.dtype(np.uint64),
             np.dtype(np.int64), np.dtype(float16), np.dtype(np.float32), np.dtype(np.float32), np.dtype(np.float64),
             bfloat16)


def _tensormap(x: Operands) -> Step | None:
    if x.op[1] == "cp_fenceproxy":
        to, fro = x.address(0), x.shared_address(1)

        def copy(m: SimtMachine, mask: Mask) -> None:
            on = (np.ones(m.shape, np.bool_) if mask is None else mask).copy()
            on[:, 1:] = False  # a warp copies once
            part = np.arange(0, _MAP_BYTES, _CHUNK)
            source, target = fro(m)[..., None] + part, to(m)[..., None] + part
            lanes = np.broadcast_to(on[..., None], source.shape)
            flat = (m.shape[0], -1)
            value = m.load(source.reshape(flat), np.dtype(np.uint32), 4, lanes.reshape(flat), "shared")
            m.store(target.reshape(flat), value, lanes.reshape(flat), "global")

        return copy
    name = next((word for word in x.op if word in _FIELDS), None)
    if x.op[1] != "replace" or name is None:
        return None
    (first, size), where = _FIELDS[name], x.address(0)
    place = x.read(1, "u32") if len(x) > 2 else None
    value_of = x.read(len(x) - 1, "b64" if size == 8 else "b32")

    def replace(m: SimtMachine, mask: Mask) -> None:
        at = where(m) + first + (0 if place is None else place(m).astype(np.int64) * size)
        value = np.broadcast_to(value_of(m), m.shape).astype(f"u{size}")
        m.store(np.broadcast_to(at, m.shape), value[..., None], mask, "generic")

    return replace


def tensor_map_of(data: Array, allocations: dict[int, Memory]) -> TmaDescriptor:
    """The descriptor that 128 bytes hold, as ``tensormap.replace`` wrote them."""
    def read(name: str, many: int) -> list[int]:
        first, size = _FIELDS[name]
        return [int(n) for n in data[first : first + many * size].view(f"u{size}")]

    rank = read("rank", 1)[0] + 1
    dtype, address = _ELEMENTS[read("elemtype", 1)[0]], read("global_address", 1)[0]
    source = allocations[address >> REGION]
    strides = [n // dtype.itemsize for n in read("global_stride", rank - 1)]
    return TmaDescriptor(
        source, dtype, tuple(reversed(read("global_dim", rank))), (*reversed(strides), 1),
        tuple(reversed(read("box_dim", rank))), TensorMapSwizzle(read("swizzle_mode", 1)[0]), address,
    )


# ---- wgmma

def _wgmma(x: Operands) -> Step | None:
    if x.op[1] == "fence":
        return _fence
    if x.op[1] != "mma_async":
        return _groups(x, "products")
    shape = next(word for word in x.op if word.startswith("m64n"))
    result, a_kind, b_kind = x.op[-3:]
    suffix = a_kind if a_kind == b_kind else f"{a_kind}.{b_kind}"
    if result not in ("f32", "s32"):
        x.unknown("accumulators are float32 or int32")
    try:
        atom = get_atom(f"wgmma.{shape}.{suffix}")
    except ValueError as error:
        x.unknown(str(error))
    names = x.list(0)
    c, writes = [x.read(name, result) for name in names], [x.write(name, result) for name in names]
    in_registers = x.texts[1].startswith("{")
    a = [x.read(name, "b32") for name in x.list(1)] if in_registers else [x.read(1, "b64")]
    b, flags = x.read(2, "b64"), [int(text, 0) for text in x.texts[4:]]
    keeps = x.read(3, "pred")
    majors = ["MN" if flag else "K" for flag in flags[2:]]
    a_major, b_major = (["K", "K"] if not majors else ["K", majors[0]] if in_registers else majors)
    passes = shared_mma_wavefronts(atom, a_in_registers=in_registers)
    signs = flags[0] * flags[1]
    sums, factors = ({x.register(name).slot: name for name in part} for part in (names, x.list(1) * in_registers))

    def step(m: SimtMachine, mask: Mask) -> None:
        warps = whole(x, m, mask)
        if m.warps % 4:
            raise RuntimeError("wgmma needs warpgroups of 4 warps")
        groups = np.asarray(warps.reshape(-1, 4).all(axis=1))
        if groups.sum() * 4 != warps.sum():
            raise RuntimeError("wgmma needs all 4 warps of a warpgroup, some are elsewhere")
        cta = m.cta.reshape(-1, 4)[groups, 0]
        if m.order is not None:
            m.order.start(warps, sums, factors)
        third = _of_groups(m, c, groups).view(TYPES[result])
        third = np.where(np.broadcast_to(keeps(m), m.shape).reshape(-1, GROUP)[groups][..., None], third, 0)
        second = _tile(m, atom, b, "b", b_major, groups, cta)
        if in_registers:
            first = _of_groups(m, a, groups).view(atom.dtype_of("a"))
        else:
            first = atom.fragment_a(_tile(m, atom, a[0], "a", a_major, groups, cta))
        first = -first if signs < 0 else first
        out = products(m, atom, first, second.swapaxes(-1, -2), third.astype(TYPES[result]))
        m.trace.note_products(x.at, passes * int(groups.sum()))
        every = groups.all()
        for i, write in enumerate(writes):
            if every:
                write(m, np.ascontiguousarray(out[..., i]).reshape(m.shape), mask)
            else:
                value = np.zeros((len(groups), GROUP), out.dtype)
                value[groups] = out[..., i]
                write(m, value.reshape(m.shape), mask)

    return step


def _fence(m: SimtMachine, mask: Mask) -> None:
    if m.order is not None:
        m.order.fence_registers(np.ones(m.shape[0], np.bool_) if mask is None else np.asarray(mask.any(axis=1)))


def _of_groups(m: SimtMachine, reads: list[Read], groups: Array) -> Array:
    """Registers of warpgroups: ``[groups, 128, registers]``."""
    return np.stack([np.broadcast_to(read(m), m.shape).reshape(-1, GROUP)[groups] for read in reads], axis=-1)


def _tile(m: SimtMachine, atom: MmaAtom, read: Read, operand: str, major: str, groups: Array, cta: Array) -> Array:
    """An operand in shared memory ``[groups, M or N, K]``, found by the descriptor of each warpgroup."""
    words = np.broadcast_to(read(m), m.shape).reshape(-1, GROUP)[groups, 0]
    dtype, (rows, columns, depth) = atom.dtype_of(operand), atom.shape
    extent, width = rows if operand == "a" else columns, _CHUNK // atom.dtype_of(operand).itemsize
    every, inverse = np.unique(words, return_inverse=True)
    found = np.stack([SmemDescriptor.decode(int(word)).addresses(extent, depth, dtype, major) for word in every])
    chunks = found[:, :, ::width] if major == "K" else found[:, ::width, :]
    where = chunks.reshape(len(every), -1)[inverse.reshape(-1)]
    if m.order is not None:
        m.order.read_async(m.order.products, cta, np.arange(0, m.shape[0], 4)[groups] % m.warps, where)
    value = m.load_boxes(cta, where, dtype, width)
    if major == "K":
        return value.reshape(len(words), extent, depth)
    return value.reshape(len(words), extent // width, depth, width).swapaxes(-1, -2).reshape(len(words), extent, depth)


def _nothing(x: Operands) -> Step:
    return lambda m, mask: None


_FORMS: dict[str, Callable[[Operands], Step | None]] = {
    "mbarrier": _mbarrier, "wgmma": _wgmma, "setmaxnreg": _nothing, "tensormap": _tensormap,
}


def descriptor_over(memory: Memory, array: Any, given: Any, meta: dict[str, Any]) -> TmaDescriptor:
    """The descriptor of an argument of a launch, for the boxes of ``meta``: over its tensor's memory."""
    return TmaDescriptor(
        memory, array.dtype, tuple(int(n) for n in given.shape), tuple(int(n) for n in given.strides),
        tuple(int(n) for n in meta["block_size"]), TensorMapSwizzle(meta["swizzle"]), memory.base,
    )
