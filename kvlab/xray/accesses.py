"""Accesses to memory in a compiled kernel: the address of every lane, from the LLVM IR that the compiler left."""

from __future__ import annotations

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


def accesses(
    made: IrFunction, lanes: LaneValues, arch: str, unread: list[str] | None = None, ptx: str = ""
) -> list[MemoryAccess]:
    """All accesses to shared and global memory of a function, in its order.

    unread   where given, takes the texts of the lines that could not be read
    ptx      where given, what the compiler's last stage made of the function: neighbours are joined as there
    """
    vendor, stretch = get_arch(arch).vendor, 0
    found: list[Line] = []
    for one in made.instructions:
        try:
            found.append(((one.block, stretch, element_of(one)), alignment(one), list(_of(one, lanes, vendor))))
        except (ValueError, IndexError, KeyError, TypeError):
            if unread is not None:
                unread.append(f"{one.opcode} {one.text}"[:120])
        stretch += one.opcode in _ORDERED or (one.opcode == "call" and _ORDERED_CALL.search(one.text) is not None)
    return joined(found, ptx)


_ORDERED = ("atomicrmw", "cmpxchg", "fence")
_ORDERED_CALL = re.compile(r"^void (?!@llvm\.(?:assume|dbg|lifetime))|\basm sideeffect|\.(?:shfl|barrier|vote|redux)\b")
_SHARED = re.compile(r"^\s*(?:@!?%p\d+\s+)?(ld|st)\.shared(?:::cta)?(?:\.v(\d))?\.[a-z]+(\d+)\s", re.M)
_WIDEST = 16


def alignment(one: IrLine) -> int:
    """Bytes of which the address of a load or a store is known to be a multiple; 0 for another line.

    >>> from kvlab.xray.llir import IrLine
    >>> alignment(IrLine("%2", "load", "<4 x float>, ptr addrspace(3) %1, align 8", 0, ()))
    8
    """
    told = re.search(r", align (\d+)", one.text) if one.opcode in ("load", "store") else None
    return int(told[1]) if told else 0


def element_of(one: IrLine) -> int:
    """Bytes of an element of what a line loads or stores; 0 for another line.

    >>> from kvlab.xray.llir import IrLine
    >>> element_of(IrLine("%2", "load", "<4 x float>, ptr addrspace(3) %1, align 8", 0, ()))
    4
    """
    if one.opcode not in ("load", "store"):
        return 0
    kind = _kind(one)
    vector = re.match(r"<\d+ x (.*)>$", kind)
    return size_of(vector[1] if vector else kind)


def _kind(one: IrLine) -> str:
    """The type that a line loads or stores."""
    first = split(_without_flags(one.text))[0]
    return first if one.opcode == "load" else typed(first)[0]


Line = tuple[tuple[int, int, int], int, list[MemoryAccess]]
"""Block and stretch of code within which accesses may change places and bytes of an element; alignment; accesses."""


def joined(found: Sequence[Line], ptx: str) -> list[MemoryAccess]:
    """The accesses of all lines. Loads, and stores, of shared memory whose addresses run on are joined as the
    compiler's last stage joins those of a stretch, as far as their alignment is known: where that gives just the widths
    that the PTX has. Otherwise they stay.
    """
    widths: dict[str, Counter[int]] = {"ld": Counter(), "st": Counter()}
    for verb, many, bits in _SHARED.findall(ptx):
        widths[verb][int(many or 1) * int(bits) // 8] += 1
    taken: dict[int, list[MemoryAccess]] = {number: one[2] for number, one in enumerate(found)}
    for verb, wanted in widths.items():
        lines = {n: one for n, one in enumerate(found) if _verb(one[2]) == verb}
        plain = {n: one for n, one in lines.items() if one[1]}
        fixed = Counter(a.nbytes for n, one in lines.items() if n not in plain for a in one[2])
        for behind, between in ((0, 0), (1, 0), (1, 1)):  # elements that nobody reads
            runs = [
                run for element, many in _stretches(plain) for run in _runs(many, behind * element, between * element)
            ]
            parts = [part for run in runs for part in _parts(*run)]
            if fixed + Counter(a.nbytes for _, a in parts) == wanted:
                taken |= {n: [a for at, a in parts if at == n] for n in plain}
                break
    return [access for many in taken.values() for access in many]


def _verb(many: Sequence[MemoryAccess]) -> str:
    """``ld`` or ``st`` of a line that reads or writes shared memory so."""
    return next((a.instruction[:2] for a in many if a.instruction[2:].startswith(".shared.b")), "")


Run = list[tuple[int, int, list[MemoryAccess]]]
"""Lines whose addresses run on: number, alignment, accesses."""


def _stretches(plain: Mapping[int, Line]) -> Iterator[tuple[int, Run]]:
    """Lines of one stretch, of elements of one size, whose addresses are the same distance apart on all lanes, by
    distance, without loads of what one of them loads; and the bytes of an element."""
    groups: dict[tuple[tuple[int, int, int], bytes, bytes], Run] = {}
    for number, (stretch, align, many) in plain.items():
        where = many[0].addresses
        shape = (where - where.flat[0]).tobytes(), many[0].active.tobytes()
        groups.setdefault((stretch, *shape), []).append((number, align, many))
    for (key, *_), lines in groups.items():
        ordered: Run = []
        end = -1
        for one in sorted(lines, key=lambda one: (int(one[2][0].addresses.flat[0]), -_bytes(one))):
            last = int(one[2][0].addresses.flat[0]) + _bytes(one)
            if last > end or one[2][0].store:
                ordered.append(one)
            end = max(end, last)
        yield key[2], ordered


def _bytes(line: tuple[int, int, list[MemoryAccess]]) -> int:
    return sum(access.nbytes for access in line[2])


def _runs(lines: Run, behind: int, between: int) -> Iterator[tuple[Run, int]]:
    """These parted: from each line on the longest run that is an aligned access of a legal width, or itself; and its
    bytes, among them up to ``behind`` at its end and ``between`` in each of its gaps that nobody reads."""
    first = 0
    while first < len(lines):
        _, align, many = lines[first]
        start, end = int(many[0].addresses.flat[0]), 0
        best, width = 1, _bytes(lines[first])
        for count, one in enumerate(lines[first:], 1):
            gap = int(one[2][0].addresses.flat[0]) - start - end
            end += gap + _bytes(one)
            whole = 1 << (end - 1).bit_length()
            if end > _WIDEST or not 0 <= gap <= between:
                break
            if count > 1 and align % whole == 0 and whole - end <= behind:
                best, width = count, whole
        yield lines[first : first + best], width
        first += best


def _parts(run: Run, nbytes: int) -> list[tuple[int, MemoryAccess]]:
    """The accesses of a run: one of so many bytes, or those of its only line."""
    number, _, many = run[0]
    if len(run) == 1:
        return [(number, one) for one in many]
    stem = many[0].instruction.rsplit(".", 1)[0]
    return [(number, replace(many[0], nbytes=nbytes, instruction=f"{stem}.b{8 * nbytes}"))]


def _of(one: IrLine, lanes: LaneValues, vendor: str) -> Iterator[MemoryAccess]:
    if one.opcode in ("load", "store"):
        parts, kind = split(_without_flags(one.text)), _kind(one)
        space = _SPACE.search(parts[1])
        if space is None or space[1] not in ("1", "3"):
            return
        where, value = ("shared" if space[1] == "3" else "global"), typed(parts[1])
        for offset, nbytes in _pieces(one, kind) if vendor == "nvidia" else [(0, size_of(kind))]:
            yield _plain(one, lanes, vendor, where, one.opcode == "store", nbytes, value, offset)
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


def _pieces(one: IrLine, kind: str) -> list[tuple[int, int]]:
    """(offset, bytes) of the accesses that a load or store becomes: a vector that is aligned to less than its size is
    parted; of bits, whose bytes are asked for one by one, the upper half stays one."""
    nbytes = size_of(kind)
    if kind.endswith(" x i1>"):
        return [*((n, 1) for n in range(nbytes // 2)), (nbytes // 2, nbytes - nbytes // 2)]
    step = max(element_of(one), min(nbytes, alignment(one) or nbytes))
    return [(offset, step) for offset in range(0, nbytes, step)]


def _plain(
    one: IrLine, lanes: LaneValues, vendor: str, space: str, store: bool, nbytes: int, pointer: tuple[str, str],
    offset: int = 0,
) -> MemoryAccess:
    bits = 8 * nbytes
    if vendor == "nvidia":
        name = f"{'st' if store else 'ld'}.{space}.b{bits}"
    elif space == "shared":
        name = f"ds_{'write_b' if store else 'read_' + ('u' if bits < 32 else 'b')}{bits}"
    else:
        name = f"global_{'store' if store else 'load'}_b{bits}"
    return _access(one, lanes, name, space, store, nbytes, lanes.operand(*pointer), offset=offset)


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
