"""The machine: warps of several CTAs side by side, each lane with a place in the program.

A step executes one instruction for all lanes that are at its place: registers are arrays ``[warps, 32]``. Lanes that
are furthest behind go first, so lanes of a warp that went apart meet again where their ways join. A warp that waits at
a barrier lets others go on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvlab.hardware import TmaDescriptor
from kvlab.memory import AddressSpace, Memory, OutOfBounds

from . import access, alu, control, hopper, order, warp
from .control import ENDED
from .ptx import Program
from .record import Trace
from .values import GLOBALS, LOCAL, PARAMETERS, REGION, Array, Mask, Operands, Step, UnknownInstruction

POISON = 0xFFFFFFFFFFFFFFFF
_FAIR = 64
"""Every so many turns the warps that are furthest ahead go, so that a loop that waits for them ends."""


class Deadlock(RuntimeError):
    """All warps wait for something that nobody will bring."""

    __module__ = "kvlab.simt"


class Code:
    """A program decoded for a launch: a step for each instruction, and the blocks that run without a branch."""

    def __init__(
        self, program: Program, symbols: Mapping[str, int], parameters: Mapping[str, bytes], contract: bool = True
    ) -> None:
        self.program = program
        self.contracted = contractions(program) if contract else {}
        self.steps: list[Step | None] = []
        self.controls: dict[int, control.Control] = {}
        self.guards: dict[int, Any] = {}
        products = order.product_registers(program)
        unknown = []
        for at in range(len(program.instructions)):
            try:
                self._decode(Operands(program, at, dict(symbols), dict(parameters)), products)
            except UnknownInstruction as error:
                unknown.append(str(error))
        if unknown:
            more = f"; and {len(unknown) - 5} more" * (len(unknown) > 5)
            raise UnknownInstruction("; ".join(unknown[:5]) + more)
        leaders = {*program.labels.values(), *(at + 1 for at in self.controls), len(program.instructions)}
        self._leaders = sorted(leaders)
        self.blocks: dict[int, tuple[list[tuple[int, Step]], int, int]] = {}

    def _decode(self, x: Operands, products: set[int]) -> None:
        instruction = x.instruction
        guard = None
        if instruction.guard is not None:
            guard = x.predicate(("!" if instruction.negated else "") + instruction.guard)
        found = control.decode(x) or hopper.control(x)
        if found is not None:
            self.steps.append(None)
            self.controls[x.at], self.guards[x.at] = found, guard
            return
        for room in (hopper, access, warp, alu):
            step = self._contracted(x) if x.at in self.contracted else room.decode(x)
            if step is not None:
                step = order.watched(x, step, products) if products else step
                self.steps.append(step if guard is None else _guarded(step, guard))
                return
        x.unknown()

    def _contracted(self, x: Operands) -> Step:
        product = self.contracted[x.at]
        if product == x.at:
            return alu.product_to_add(x)
        return alu.added_product(x, self.program.instructions[product], product)

    def block(self, start: int) -> tuple[list[tuple[int, Step]], int, int]:
        """(steps with their numbers, the number of the control step behind them or -1, where the next block begins)."""
        if start not in self.blocks:
            end = next(at for at in self._leaders if at > start)
            last = end - 1 if end - 1 in self.controls else -1
            steps = [(at, step) for at in range(start, end) if (step := self.steps[at]) is not None]
            self.blocks[start] = steps, last, end
        return self.blocks[start]


_TOKEN = re.compile(r"[%\w$]+")


def contractions(program: Program) -> dict[int, int]:
    """Products and sums that are one fused operation, as ptxas makes them by default: the number of a ``mul`` and that
    of the only instruction that uses its result, an ``add`` or ``sub``, each with the number of the ``mul``."""
    places: dict[int, list[int]] = defaultdict(list)
    for at, instruction in enumerate(program.instructions):
        for token in (t for text in instruction.operands for t in _TOKEN.findall(text)):
            register = program.register(instruction.scope, token)
            if register is not None:
                places[register.slot].append(at)
    found: dict[int, int] = {}
    for at, instruction in enumerate(program.instructions):
        if instruction.op[0] != "mul" or instruction.op[1:] not in (("f32",), ("ftz", "f32")):
            continue
        result = program.register(instruction.scope, instruction.operands[0])
        where = places[result.slot] if result is not None else []
        user = where[1] if len(where) == 2 and where[0] == at else -1
        if user > 0 and user not in found and instruction.guard is None:
            op = program.instructions[user].op
            if op[0] in ("add", "sub") and op[1:] == instruction.op[1:]:
                found[at] = found[user] = at
    return found


def _guarded(step: Step, guard: Any) -> Step:
    def guarded(m: SimtMachine, mask: Mask) -> None:
        on = guard(m) if mask is None else mask & guard(m)
        if on.all():
            step(m, None)
        elif on.any():
            step(m, on)
    return guarded


class SimtMachine:
    """CTAs of one launch that run side by side.

    ctas        their numbers in the grid, x fastest;  ``grid`` (x, y, z)
    allocations  memories by the number of their region of addresses;  ``nbytes`` of shared memory of a CTA
    tensor_maps  TMA descriptors by their address
    launch_before  is called at each ``griddepcontrol.wait``
    """

    def __init__(
        self, code: Code, ctas: Sequence[int], grid: tuple[int, int, int], threads: int, nbytes: int,
        allocations: Mapping[int, Memory], tensor_maps: Mapping[int, TmaDescriptor], trace: Trace, arithmetic: str,
        strict: bool, races: bool, launch_before: Callable[[], None] = lambda: None,
    ) -> None:
        self.launch_before = launch_before
        self.code, self.trace, self.arithmetic, self.grid, self.threads = code, trace, arithmetic, grid, threads
        self.warps = -(-threads // 32)
        self.shape = (len(ctas) * self.warps, 32)
        self.cta = np.repeat(np.arange(len(ctas)), self.warps)
        self.number = np.repeat(np.asarray(ctas, np.uint32), self.warps)[:, None]
        self.shared = Memory(max(nbytes, 1), space=AddressSpace.SHARED, name="shared memory", programs=len(ctas),
                             unsafe=not strict)
        self.order = order.Order(len(ctas), self.warps, nbytes, races) if strict else None
        self.allocations, self.tensor_maps = allocations, tensor_maps
        own = sum(-(-v.nbytes // 16) * 16 for v in code.program.variables.values() if v.space == "local")
        self.local = Memory(own, space=AddressSpace.LOCAL, name="local memory", programs=self.shape[0] * 32,
                            base=LOCAL, unsafe=not strict)
        self.carry = np.zeros(self.shape, np.bool_)
        poison = {size: np.full(self.shape, POISON % (1 << 8 * size), f"u{size}") for size in (1, 2, 4, 8)}
        poison[0] = np.zeros(self.shape, np.bool_)
        self.registers = [poison[register.nbytes] for register in code.program.registers.values()]
        self.pc = np.zeros(self.shape, np.int32)
        if threads % 32:
            self.pc.reshape(len(ctas), -1)[:, threads:] = ENDED
        self.waiting = np.zeros(self.shape[0], np.bool_)
        self.barrier = np.full((2, self.shape[0]), -1, np.int64)
        self.copies: list[access.Copy] = []
        self.arrivals: list[access.Arrival] = []
        self.groups = np.zeros(self.shape[0], np.int64)
        self.mbarriers = hopper.Mbarriers(len(ctas))
        self.seen = np.full(self.shape[0], -1, np.int64)  # of mbarriers, by a warp that sleeps
        self.boxes: list[hopper.Boxes] = []
        self.provisional: set[str] = set()
        self.products: dict[int, tuple[Array, Array]] = {}  # that sums will add, by their instruction
        self.time = 0
        self._special: dict[str, Array] = {}
        self._arrived: dict[tuple[int, int], int] = {}

    # ---- the turns

    def run(self) -> None:
        """All lanes to their end."""
        instructions = self.code.program.instructions
        while True:
            place: Array = self.pc.min(axis=1)
            awake = ~self.waiting & (self.seen < self.mbarriers.version)
            ready = awake & (place != ENDED)
            if not ready.any():
                if (place == ENDED).all():
                    return
                self._stuck(place)
            self.time += 1
            at = int(place[ready].max() if self.time % _FAIR == 0 else place[ready].min())
            here = (self.pc == at) & ready[:, None]
            self.seen[here.any(axis=1)] = -1
            mask = None if here.all() else here
            steps, last, following = self.code.block(at)
            warps, lanes = int(here.any(axis=1).sum()), int(here.sum())
            self.trace.count(at, warps, lanes)
            try:
                for at, step in steps:  # noqa: B007 (the place of an error)
                    step(self, mask)
                if following == len(instructions) and last < 0:
                    following = ENDED
                self.go(here, following)
                if last >= 0:
                    at, guard = last, self.code.guards[last]
                    on = here if guard is None else here & guard(self)
                    if on.any():
                        self.code.controls[last](self, mask, on)
            except UnknownInstruction:
                raise
            except (ArithmeticError, AssertionError, IndexError, RuntimeError, ValueError) as error:
                raise type(error)(f"{error}; at {instructions[at].where}") from error
            self._release()

    def go(self, lanes: Array, to: Any) -> None:
        """The lanes go on there."""
        np.copyto(self.pc, to, where=lanes, casting="unsafe")

    def _stuck(self, place: Array) -> None:
        instructions = self.code.program.instructions
        late = {int(at) - 1 for at in np.where(place == ENDED, len(instructions), place)[self.waiting]}
        late |= {int(at) for at in place[~self.waiting & (place != ENDED)]}
        lines = [instructions[at].where for at in sorted(late)]
        raise Deadlock(f"all warps wait, for what nobody brings: {'; '.join(lines)}")

    # ---- barriers

    def arrive(self, warps: Array, number: Array, needed: Array, waits: bool) -> None:
        """Warps come to barriers; ``needed`` warps of the CTA must, 0: all that have not returned."""
        if not waits:
            for cta, name in zip(self.cta[warps].tolist(), number[warps].tolist(), strict=True):
                self._arrived[cta, name] = self._arrived.get((cta, name), 0) + 1
            if self.order is not None:
                for name in np.unique(number[warps]).tolist():
                    self.order.hand(("bar", name), warps & (number == name))
            return
        self.waiting[warps] = True
        self.barrier[0, warps], self.barrier[1, warps] = number[warps], needed[warps]

    def _release(self) -> None:
        if not self.waiting.any():
            return
        alive = (self.pc != ENDED).any(axis=1)
        ctas = self.shared.programs or 1
        for number in np.unique(self.barrier[0, self.waiting]).tolist():
            here = self.waiting & (self.barrier[0] == number)
            arrived = np.bincount(self.cta[here], minlength=ctas)
            for (cta, name), count in self._arrived.items():
                arrived[cta] += count * (name == number)
            needed = np.zeros(ctas, np.int64)
            np.maximum.at(needed, self.cta[here], self.barrier[1, here])
            needed = np.where(needed == 0, np.bincount(self.cta[alive], minlength=ctas), needed)
            full = arrived >= needed
            self.waiting[here & full[self.cta]] = False
            if self.order is not None:
                self.order.meet(("bar", number), here & full[self.cta])
            self._arrived = {key: n for key, n in self._arrived.items() if key[1] != number or not full[key[0]]}

    # ---- memory

    def load(
        self, where: Array, dtype: Any, count: int, mask: Mask, space: str, alignment: int | None = None
    ) -> Array:
        """``count`` elements at each address: ``[warps, lanes, count]``, zeros where the mask is False.

        ``space`` is shared, global, local or generic."""
        align = alignment or count * dtype.itemsize
        out = None
        for memory, lanes in self._memories(where, mask, space):
            if memory is self.shared:
                found = memory.load(self._by_cta(where), dtype, count, mask=self._by_cta(lanes), alignment=align)
                found = found.reshape(*where.shape, count)
            elif memory is self.local:
                found = memory.load(where.reshape(-1, 1), dtype, count, mask=_column(lanes), alignment=align)
                found = found.reshape(*where.shape, count)
            else:
                found = memory.load(where, dtype, count, mask=lanes, alignment=align)
            out = found if out is None else np.where(lanes[..., None], found, out)  # type: ignore[index]
        return np.zeros((*where.shape, count), dtype) if out is None else out

    def store(self, where: Array, value: Array, mask: Mask, space: str, alignment: int | None = None) -> None:
        """Store ``value`` ``[warps, lanes, count]`` at the addresses."""
        align = alignment or value.shape[-1] * value.itemsize
        for memory, lanes in self._memories(where, mask, space):
            if memory is self.shared:
                ctas = memory.programs or 1
                memory.store(self._by_cta(where), value.reshape(ctas, -1, value.shape[-1]), mask=self._by_cta(lanes),
                             alignment=align)
            elif memory is self.local:
                each = value.reshape(-1, 1, value.shape[-1])
                memory.store(where.reshape(-1, 1), each, mask=_column(lanes), alignment=align)
            else:
                memory.store(where, value, mask=lanes, alignment=align)

    def _slots(self, cta: Array) -> Array:
        """The place of each box among those of its CTA."""
        order = np.argsort(cta, kind="stable")
        ordered = cta[order]
        opens = np.ones(len(cta), np.bool_)
        opens[1:] = ordered[1:] != ordered[:-1]
        number = np.arange(len(cta))
        slots = np.empty(len(cta), np.int64)
        slots[order] = number - np.maximum.accumulate(np.where(opens, number, 0))
        return slots

    def _spread(self, cta: Array, values: Array, slots: Array) -> Array:
        """Values of boxes ``[boxes, ...]`` by CTA: ``[ctas, most boxes of one, ...]``."""
        out = np.zeros((self.shared.programs, int(slots.max()) + 1, *values.shape[1:]), values.dtype)
        out[cta, slots] = values
        return out

    def load_boxes(self, cta: Array, where: Array, dtype: Any, count: int) -> Array:
        """``count`` elements at addresses ``[boxes, n]`` in the shared memory of a CTA each: ``[boxes, n, count]``."""
        slots = self._slots(cta)
        on = self._spread(cta, np.ones(where.shape, np.bool_), slots)
        return self.shared.load(self._spread(cta, where, slots), dtype, count, mask=on)[cta, slots]

    def store_boxes(self, cta: Array, where: Array, value: Array) -> None:
        """Store ``value`` ``[boxes, n, count]`` at addresses ``[boxes, n]`` in the shared memory of a CTA each."""
        slots = self._slots(cta)
        on = self._spread(cta, np.ones(where.shape, np.bool_), slots)
        self.shared.store(self._spread(cta, where, slots), self._spread(cta, value, slots), mask=on)

    def forget_boxes(self, cta: Array, where: Array, nbytes: int) -> None:
        """Pieces of boxes that are on their way count as never written."""
        if not self.shared.unsafe:
            slots = self._slots(cta)
            on = self._spread(cta, np.ones(where.shape, np.bool_), slots)
            every = (self.shared.programs, -1)
            access.forgotten(self.shared, self._spread(cta, where, slots).reshape(every), nbytes, on.reshape(every))

    def land(self, barrier: Array, cta: Array) -> None:
        """The boxes and the copies that these mbarriers count are there."""
        if not self.boxes and not self.arrivals:
            return
        wanted = np.unique(cta << 32 | barrier)
        for one in self.arrivals:
            lanes = one.mask & np.isin(self.cta[:, None] << 32 | one.where, wanted)
            if lanes.any():
                for copy in one.copies:
                    copy.land(self, lanes)
                where, ctas = one.where[lanes], np.broadcast_to(self.cta[:, None], self.shape)[lanes]
                self.mbarriers.arrive(where, ctas, np.ones(len(where), np.int64))
                one.mask = one.mask & ~lanes
        self.arrivals = [one for one in self.arrivals if one.mask.any()]
        self.copies = [copy for copy in self.copies if copy.mask.any()]
        for box in self.boxes:
            lands = ~box.landed & np.isin(box.cta << 32 | box.barrier, wanted)
            if lands.any():
                self.store_boxes(box.cta[lands], box.where[lands], box.value[lands])
                self.mbarriers.complete(box.barrier[lands], box.cta[lands], box.nbytes)
                box.landed |= lands
        self.boxes = [box for box in self.boxes if not box.landed.all()]

    def tensor_map(self, address: int) -> TmaDescriptor:
        """The TMA descriptor at an address: an argument, or what the kernel made."""
        if address in self.tensor_maps:
            return self.tensor_maps[address]
        where = np.array([address])
        memory = self._memory(address >> REGION, where, None, "global")
        return hopper.tensor_map_of(memory.load(where, np.dtype(np.uint8), 128)[0], dict(self.allocations))

    def forget(self, where: Array, nbytes: int, mask: Array) -> None:
        """Bytes of shared memory that are on their way count as never written."""
        if not self.shared.unsafe:
            access.forgotten(self.shared, self._by_cta(where), nbytes, self._by_cta(mask))

    def _by_cta(self, lanes: Any) -> Any:
        return None if lanes is None else lanes.reshape(self.shared.programs, -1)

    def _memories(self, where: Array, mask: Mask, space: str) -> list[tuple[Memory, Mask]]:
        """The memories that addresses lie in, with the lanes of each."""
        if space in ("shared", "local"):
            return [(self.shared if space == "shared" else self.local, mask)]
        region = where >> REGION
        regions = region if mask is None else region[mask]
        if not regions.size:
            return []
        first = int(regions.flat[0])
        if (regions == first).all():
            return [(self._memory(first, where, mask, space), mask)]
        on = np.ones(where.shape, np.bool_) if mask is None else mask
        return [(self._memory(int(n), where, lanes, space), lanes)
                for n in np.unique(regions) if (lanes := on & (region == n)).any()]

    def _memory(self, region: int, where: Array, mask: Mask, space: str) -> Memory:
        if region == 0 and space == "generic":
            first = int(where.flat[0] if mask is None else where[mask].flat[0])
            return self.shared if first < LOCAL else self.local
        if region not in self.allocations:
            wrong = int(where.flat[0] if mask is None else where[mask].flat[0])
            raise OutOfBounds(f"address {wrong:#x} lies in no argument of the kernel")
        return self.allocations[region]

    # ---- special registers

    def special(self, name: str) -> Array:
        """A special register such as ``tid.x``: uint32 ``[warps, 32]``."""
        if name.startswith(("clock", "globaltimer")):
            return np.full(self.shape, self.time, np.uint32)
        if name not in self._special:
            value = np.asarray(self._value_of(*name.partition(".")[::2]), np.uint32)
            self._special[name] = np.array(np.broadcast_to(value, self.shape))
        return self._special[name]

    def _value_of(self, name: str, axis: str) -> Any:
        x = axis in ("", "x")
        lane = np.arange(32, dtype=np.uint32)
        warp_of_cta = (np.arange(self.shape[0]) % self.warps)[:, None]
        if name == "tid":
            return warp_of_cta * 32 + lane if x else 0
        if name == "ntid":
            return self.threads if x else 1
        if name in ("ctaid", "clusterid"):
            X, Y, _ = self.grid
            return self.number % X if x else self.number // X % Y if axis == "y" else self.number // (X * Y)
        if name in ("nctaid", "nclusterid"):
            return self.grid["xyz".index(axis or "x")]
        if name == "laneid":
            return lane
        if name == "warpid":
            return warp_of_cta
        if name == "lanemask_lt":
            return (np.uint64(1) << lane.astype(np.uint64)) - np.uint64(1)
        if name == "smid":
            return self.number
        return {"cluster_nctaid": 1, "cluster_nctarank": 1, "nsmid": int(np.prod(self.grid))}.get(name, 0)


def _column(lanes: Mask) -> Mask:
    return None if lanes is None else lanes.reshape(-1, 1)


def symbols_of(program: Program, shared: int) -> tuple[dict[str, int], dict[int, Memory], int]:
    """Addresses of the module's arrays and of array parameters, the memories of those in global memory by region, and
    the bytes of shared memory, ``shared`` of them for the array whose size the launch says."""
    symbols: dict[str, int] = {}
    memories: dict[int, Memory] = {}
    used, local = 0, LOCAL
    for variable in sorted(program.variables.values(), key=lambda v: v.space != "shared" or v.nbytes == 0):
        if variable.space == "shared":
            used = -(-used // variable.align) * variable.align
            symbols[variable.name] = used
            used += variable.nbytes or shared
            continue
        if variable.space == "local":
            symbols[variable.name] = local = -(-local // variable.align) * variable.align
            local += variable.nbytes
            continue
        region = GLOBALS + len(memories)
        data = np.frombuffer((variable.value or b"").ljust(max(variable.nbytes, 1), b"\0"), np.uint8).copy()
        memory = Memory.over(data, name=variable.name)
        memory.base = region << REGION
        symbols[variable.name], memories[region] = memory.base, memory
    for number, parameter in enumerate(program.parameters):
        if parameter.nbytes:
            symbols[parameter.name] = PARAMETERS + 256 * number
    return symbols, memories, max(used, shared)
