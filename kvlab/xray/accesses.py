"""Accesses to memory in a compiled kernel: the address of every lane, from the LLVM IR that the compiler left."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvlab.hardware import COPIES, INSTRUCTIONS, copy_wavefronts, count_wavefronts, get_arch, sectors
from kvlab.xray.llir import (
    IntArray,
    IrFunction,
    IrLine,
    LaneValues,
    Place,
    Value,
    call_arguments,
    size_of,
    split,
    typed,
)

_ASM = re.compile(r'asm (?:sideeffect |convergent |alignstack |inteldialect )*"((?:[^"\\]|\\.)*)", "([^"]*)"\(')
_PTX = re.compile(r"(?:@(!?)\$(\d+)\s+)?\b(ld|st|atom|red|ldmatrix|stmatrix|cp\.async)\.([\w.:]+)([^;]*)")
_ATOMIC = ("add", "max", "min", "exch", "cas", "and", "or", "xor")
_UNITS = re.compile(
    r"\b(wgmma\.mma_async|tcgen05\.mma|cp(?:\.reduce)?\.async\.bulk\.tensor)([\w.:]*)([^;]*)"
)
_PLACE = re.compile(r"\[\s*\$(\d+)\s*(?:\+\s*(-?\d+)\s*)?[\],]")
_SPACE = re.compile(r"addrspace\((\d+)\)")


@dataclass(frozen=True, eq=False)
class MemoryAccess:
    """One instruction that reads or writes memory, on all threads of the CTA.

    instruction   name as in the ISA: ``ld.shared.b128``, ``ldmatrix.x4``, ``ds_read_b128``, ``ld.global.b32``, ...
    space         ``shared`` or ``global``; a copy from global to shared memory is ``shared`` and has ``source``;
                  ``unit`` for TMA and the tensor cores, which find shared memory themselves: such have no addresses
    store         whether it writes
    nbytes        bytes a lane
    addresses     ``[warps, lanes]`` bytes: in shared memory from the kernel's first byte on
    active        ``[warps, lanes]`` bool
    source        ``[warps, lanes]`` addresses in global memory of a copy, None otherwise
    zeros         ``[warps, lanes]`` lanes of a copy that write, those whose source has no bytes, too; None otherwise
    place         line and column, the innermost call first;  ``depth`` loops it is in
    notes         what had to be assumed of the address

    >>> lane = np.arange(32)[None]
    >>> access = MemoryAccess("ld.shared.b32", "shared", False, 4, lane * 128, lane >= 0, None, ((7, 4),), 1)
    >>> access.passes("sm_90")
    (32, 1)
    """

    instruction: str
    space: str
    store: bool
    nbytes: int
    addresses: IntArray
    active: np.ndarray
    source: IntArray | None
    place: Place
    depth: int
    notes: frozenset[str] = frozenset()
    zeros: np.ndarray | None = None

    def passes(self, arch: str) -> tuple[int, int]:
        """Wavefronts of all warps, and the fewest that such instructions take; (0, 0) where no rule is known."""
        taken, least = passes_of([self], arch)
        return int(taken.sum()), int(least.sum())

    def global_side(self) -> MemoryAccess | None:
        """The part in global memory: the access itself, or what a copy reads."""
        if self.space == "global":
            return self
        if self.source is None:
            return None
        return replace(self, space="global", addresses=self.source, source=None, store=False)

    def sectors(self) -> tuple[int, int]:
        """Sectors of 32 bytes of all warps, and the fewest that could hold the bytes that each warp wants."""
        moved = sectors(self.addresses, self.nbytes, self.active)
        ideal = -(-wanted_bytes(self.addresses, self.nbytes, self.active) // 32)
        return int(moved.sum()), int(ideal.sum())


def passes_of(many: Sequence[MemoryAccess], arch: str) -> tuple[IntArray, IntArray]:
    """Wavefronts, and the fewest of such instructions, of each warp of many accesses: ``[accesses, warps]``; zeros
    where no rule is known. Those of one instruction are counted together.
    """
    warps = len(many[0].addresses) if many else 0
    taken, least = (np.zeros((len(many), warps), np.int64) for _ in range(2))
    names: dict[str, list[int]] = {}
    for place, access in enumerate(many):
        names.setdefault(access.instruction, []).append(place)
    for name, which in names.items():
        addresses, active = (np.stack([getattr(many[n], field) for n in which]) for field in ("addresses", "active"))
        if name in COPIES:
            source, zeros = (np.stack([getattr(many[n], field) for n in which]) for field in ("source", "zeros"))
            taken[which], least[which] = copy_wavefronts(name, addresses, source, active, arch, zeros=zeros)
        elif name in INSTRUCTIONS:
            mask = None if INSTRUCTIONS[name].matrices else active
            taken[which], least[which], _ = count_wavefronts(name, addresses, mask, arch)
    return taken, least


def wanted_bytes(addresses: IntArray, nbytes: int, active: np.ndarray) -> IntArray:
    """Different bytes that each warp wants, of addresses that are multiples of the bytes a lane moves or not."""
    ordered = np.sort(np.where(active, addresses, -(1 << 62)), axis=-1)
    fresh = ordered > -(1 << 61)
    fresh[..., 1:] &= ordered[..., 1:] != ordered[..., :-1]
    step = np.minimum(np.diff(ordered, axis=-1, prepend=-(1 << 62)), nbytes)
    wanted: IntArray = np.where(fresh, np.where(step > 0, step, nbytes), 0).sum(axis=-1)
    return wanted


def accesses(made: IrFunction, lanes: LaneValues, arch: str, unread: list[str] | None = None) -> list[MemoryAccess]:
    """All accesses to shared and global memory of a function, in its order.

    unread   where given, takes the texts of the lines that could not be read
    """
    vendor, found = get_arch(arch).vendor, []
    for one in made.instructions:
        try:
            found += list(_of(one, lanes, vendor))
        except (ValueError, IndexError, KeyError, TypeError):
            if unread is not None:
                unread.append(f"{one.opcode} {one.text}"[:120])
    return found


_SHARED = re.compile(r"^\s*(?:@!?%p\d+\s+)?(ld|st)\.shared(?:::cta)?(?:\.v(\d))?\.[a-z]+(\d+)\s", re.M)


def joined(found: Sequence[MemoryAccess], ptx: str) -> list[MemoryAccess]:
    """The accesses with neighbours of one line joined, as the compiler's last stage joins loads, and stores, of shared
    memory whose addresses run on: where that gives just the widths that the PTX has. Otherwise they stay.
    """
    widths: dict[str, Counter[int]] = {"ld": Counter(), "st": Counter()}
    for verb, many, bits in _SHARED.findall(ptx):
        widths[verb][int(many or 1) * int(bits) // 8] += 1
    result = list(found)
    for verb, wanted in widths.items():
        plain = [a for a in result if a.instruction.startswith(f"{verb}.shared.b")]
        for most, below in itertools.product((8, 16), (16, 4)):
            if Counter(a.nbytes for a in plain) != wanted:
                runs = _runs([a for a in plain if a.nbytes < below], most)
                runs += [[a] for a in plain if a.nbytes >= below]
                if Counter(run[0].nbytes * len(run) for run in runs) == wanted:
                    heads = {id(run[0]): run for run in runs}
                    gone = {id(a) for run in runs for a in run[1:]}
                    result = [_whole(heads[id(a)]) if id(a) in heads else a for a in result if id(a) not in gone]
                    break
    return result


def _runs(plain: Sequence[MemoryAccess], most: int) -> list[list[MemoryAccess]]:
    """Accesses of one line whose addresses run on, up to ``most`` bytes together and aligned to all of them."""
    runs: list[list[MemoryAccess]] = []
    for one in sorted(plain, key=lambda a: (a.place, a.nbytes, int(a.addresses[a.active].min(initial=1 << 62)))):
        run = runs[-1] if runs else [one]
        size = one.nbytes * len(run)
        follows = run[0].place == one.place and run[0].nbytes == one.nbytes and size < most \
            and np.array_equal(run[0].active, one.active) \
            and bool((run[0].addresses + size == one.addresses)[one.active].all())
        runs[-1:] = [[*run, one]] if follows else [*runs[-1:], [one]]
    whole = [not (len(run) & (len(run) - 1) or (run[0].addresses[run[0].active] % (run[0].nbytes * len(run))).any())
             for run in runs]
    return [part for run, fits in zip(runs, whole, strict=True) for part in ([run] if fits else [[one] for one in run])]


def _whole(run: Sequence[MemoryAccess]) -> MemoryAccess:
    nbytes = run[0].nbytes * len(run)
    stem = run[0].instruction.rsplit(".", 1)[0]
    return run[0] if len(run) == 1 else replace(run[0], nbytes=nbytes, instruction=f"{stem}.b{8 * nbytes}")


def _of(one: IrLine, lanes: LaneValues, vendor: str) -> Iterator[MemoryAccess]:
    if one.opcode in ("load", "store"):
        parts = split(_without_flags(one.text))
        kind = parts[0] if one.opcode == "load" else typed(parts[0])[0]
        space = _SPACE.search(parts[1])
        if space is None or space[1] not in ("1", "3"):
            return
        where, value = ("shared" if space[1] == "3" else "global"), typed(parts[1])
        yield _plain(one, lanes, vendor, where, one.opcode == "store", size_of(kind), value)
    elif one.opcode == "atomicrmw":
        parts = split(_without_flags(one.text))
        verb, _, pointer = parts[0].partition(" ")
        space = _SPACE.search(pointer)
        if space is None:
            return
        where = "shared" if space[1] == "3" else "global"
        kind = typed(parts[1])[0]
        made = _plain(one, lanes, vendor, where, True, size_of(kind), typed(pointer))
        yield replace(made, instruction=f"atom.{where}.{verb}.b{8 * size_of(kind)}")
    elif one.opcode == "call":
        asm = _ASM.search(one.text)
        if asm is not None:
            yield from _asm(one, lanes, asm)
        elif "@llvm." in one.text:
            yield from _intrinsic(one, lanes)


def _plain(
    one: IrLine, lanes: LaneValues, vendor: str, space: str, store: bool, nbytes: int, pointer: tuple[str, str]
) -> MemoryAccess:
    bits = 8 * nbytes
    if vendor == "nvidia":
        name = f"{'st' if store else 'ld'}.{space}.b{bits}"
    elif space == "shared":
        name = f"ds_{'write_b' if store else 'read_' + ('u' if bits < 32 else 'b')}{bits}"
    else:
        name = f"global_{'store' if store else 'load'}_b{bits}"
    return _access(one, lanes, name, space, store, nbytes, lanes.operand(*pointer))


def _access(one, lanes, name, space, store, nbytes, value, *, offset=0, mask=None, reads=None, source=None):
    """An access; ``reads``: lanes of a copy whose source has bytes. A mask (None: all lanes) that memory decides, and
    that is off everywhere here, is taken for on."""
    shape = (lanes.threads // lanes.warp_size, lanes.warp_size)
    spread = lambda v: np.broadcast_to(v[:, :1], (lanes.threads, 1)).reshape(shape)  # noqa: E731
    notes = value.notes.union(*({f"mask {note}" for note in part.notes} for part in (mask, reads) if part is not None))
    active, brings = (np.broadcast_to(_on(part, spread), shape) for part in (mask, reads))
    guard = lanes.guard(one.block)
    if guard is not None:
        active = active & (spread(guard.lanes) != 0)
    where = spread(value.lanes) + offset
    lost = active & ((where < 0) | (where % max(1, nbytes) != 0)) if space == "shared" else active & False
    if lost.any():
        active, notes = active & ~lost, notes | {"unknown address"}
    where = np.where(lost, 0, where)
    if source is None:
        return MemoryAccess(name, space, store, nbytes, where, active, None, one.place, one.depth, notes)
    notes = notes | {f"source {note}" for note in source.notes}
    return MemoryAccess(name, space, store, nbytes, where, active & brings, spread(source.lanes), one.place, one.depth,
                        notes, active)


def _on(mask, spread):
    if mask is None:
        return True
    on = spread(mask.lanes) != 0
    return on if on.any() or not mask.notes else True


def _asm(one: IrLine, lanes: LaneValues, asm: re.Match[str]) -> Iterator[MemoryAccess]:
    text, constraints = asm[1].replace("\\0A", "\n").replace("\\09", " ").replace("\\22", '"'), asm[2]
    outputs = sum(part.startswith("=") for part in constraints.split(","))
    rest = one.text[asm.end() :]
    operands = split(call_arguments("@f(" + rest))

    def value(number: str):  # type: ignore[no-untyped-def]
        at = int(number) - outputs
        return lanes.operand(*typed(operands[at])) if 0 <= at < len(operands) else None

    for verb, kinds, body in _UNITS.findall(text):
        registers = ".registers" if verb.startswith("wgmma") and re.search(r"\}\s*,\s*\{", body) else ""
        yield MemoryAccess(verb + kinds + registers, "unit", False, 0, np.zeros((1, 1), np.int64),
                           np.zeros((1, 1), np.bool_), None, one.place, one.depth)
    for negated, predicate, verb, kinds, body in _PTX.findall(text):
        mask = value(predicate) if predicate else None
        if mask is not None and negated:
            mask = mask._replace(lanes=1 - mask.lanes)
        pointers = [(value(number), int(offset or 0)) for number, offset in _PLACE.findall(body)]
        pointers = [(pointer, offset) for pointer, offset in pointers if pointer is not None]
        if not pointers:
            continue
        where, offset = pointers[0]
        words = kinds.split(".")
        if verb == "cp.async" and words[0] in ("ca", "cg") and len(pointers) > 1:
            size = re.search(r"\], (0x[0-9a-f]+|\d+)", body)
            nbytes = int(size[1], 0) if size else 16
            last = re.search(r",\s*\$(\d+)\s*$", body)
            yield _access(one, lanes, f"cp.async.{words[0]}.{nbytes}", "shared", True, nbytes, where, offset=offset,
                          mask=mask, reads=value(last[1]) if last else None, source=pointers[1][0])
        elif verb in ("ld", "st", "atom", "red"):
            space = next((word for word in words if word.startswith(("shared", "global"))), None)
            width = next((int(word[1:]) for word in reversed(words) if re.fullmatch(r"[bufs]\d+(x2)?", word)
                          and word[1:].isdigit()), 32)
            if space is None:
                continue
            many = next((int(word[1:]) for word in words if re.fullmatch(r"v\d", word)), 1)
            space, nbytes = space.split(":")[0], width * many // 8
            action = next((word for word in words if word in _ATOMIC), "")
            kind = re.sub(r"^b", "u", words[-1]) if action == "add" else words[-1]
            name = f"{verb}.{space}.b{8 * nbytes}" if verb in ("ld", "st") else f"{verb}.{space}.{action}.{kind}"
            yield _access(one, lanes, name, space, verb != "ld", nbytes, where, offset=offset, mask=mask)
        elif verb in ("ldmatrix", "stmatrix"):
            count = next((word for word in words if re.fullmatch(r"x\d", word)), "x1")
            trans = ".trans" if "trans" in words else ""
            yield _access(one, lanes, f"{verb}.{count}{trans}", "shared", verb == "stmatrix", 16, where, offset=offset)


def _intrinsic(one: IrLine, lanes: LaneValues) -> Iterator[MemoryAccess]:
    found = re.search(r"@llvm\.([\w.]+)\(", one.text)
    if found is None:
        return
    name, operands = found[1], split(call_arguments(one.text))
    matrix = re.search(r"nvvm\.(ldmatrix|stmatrix)\.sync\.aligned\.m8n8\.(x\d)(\.trans)?", name)
    if matrix:
        name, store = f"{matrix[1]}.{matrix[2]}{matrix[3] or ''}", matrix[1] == "stmatrix"
        yield _access(one, lanes, name, "shared", store, 16, lanes.operand(*typed(operands[0])))
    elif transposing := re.search(r"amdgcn\.ds\.read\.tr(\d+)\.b(\d+)", name):
        yield _access(one, lanes, f"ds_read_tr{transposing[1]}_b{transposing[2]}", "shared", False,
                      int(transposing[2]) // 8, lanes.operand(*typed(operands[0])))
    elif buffer := re.search(r"amdgcn\.raw\.ptr\.buffer\.(load|store|atomic)(\.async)?(\.lds)?", name):
        store, to_lds = buffer[1] != "load", bool(buffer[3])
        values = operands[1:] if store else operands
        kind = typed(operands[0])[0] if store else one.text.split(" @")[0].split(" ", 1)[-1] \
            if one.text.startswith("call") else one.text.split(" @")[0]
        base = lanes.operand(*typed(values[0]))
        if to_lds:
            nbytes = int(lanes.operand(*typed(operands[2])).lanes.flat[0])
            offset = lanes.operand(*typed(operands[3]))
            moved = base._replace(lanes=base.lanes + offset.lanes, notes=base.notes | offset.notes)
            target = _by_lane(lanes.operand(*typed(operands[1])), nbytes, lanes)
            yield _access(one, lanes, f"buffer_load_lds_b{8 * nbytes}", "shared", True, nbytes, target,
                          source=moved)
            return
        offset = lanes.operand(*typed(values[1]))
        inside = offset._replace(lanes=(offset.lanes != -(1 << 31)).astype(np.int64))
        where = base._replace(lanes=base.lanes + offset.lanes, notes=base.notes | offset.notes)
        nbytes = size_of(kind)
        yield _access(one, lanes, f"buffer_{buffer[1]}_b{8 * nbytes}", "global", store, nbytes, where, mask=inside)
    elif re.search(r"amdgcn\.global\.load\.(async\.)?lds", name):
        source, target, size = (lanes.operand(*typed(operand)) for operand in operands[:3])
        nbytes = int(size.lanes.flat[0])
        yield _access(one, lanes, f"global_load_lds_b{8 * nbytes}", "shared", True, nbytes,
                      _by_lane(target, nbytes, lanes), source=source)


def _by_lane(target: Value, nbytes: int, lanes: LaneValues) -> Value:
    """Addresses of a copy to LDS: the warp's, then lane after lane."""
    lane = np.arange(lanes.threads)[:, None] % lanes.warp_size * nbytes
    return target._replace(lanes=target.lanes + lane)


def _without_flags(text: str) -> str:
    return re.sub(r"^(?:(?:volatile|atomic|syncscope\([^)]*\))\s+)+", "", text)


def argument_values(made: IrFunction, given: Mapping[int, int]) -> list[int]:
    """A value for each argument: the one given for its place, 0 for the others."""
    return [given.get(place, 0) for place in range(len(made.arguments))]
