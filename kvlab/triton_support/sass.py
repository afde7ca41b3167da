"""Reads in a kernel's disassembly: uniform registers whose value nobody wrote, a fault of the assembler.

The ptxas of Triton 3.6 and 3.7 (CUDA 12.8) loses the first write of one where the descriptors of two wgmma operands at
one address, swizzled by 128 and by 64 or 32 bytes, are made before a loop; an H100 multiplies what lies elsewhere then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.M)
_PARTS = re.compile(r"(@!?U?P\w+\s+)?(\S+)\s*(.*)")
_MOVE = re.compile(r"UMOV UR\d+, UR\d+$")
_NOT_U = ("R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX", "LDCU")
_EVERY = (1 << 64) - 1
_TABLE = re.compile(
    r"Offset of Indirect Branch: 0x([0-9a-f]+)\s+Number of targets: (\d+)\s+Targets:((?: 0x[0-9a-f]+)+)"
)


def jump_tables(elf: str) -> dict[int, list[int]]:
    """Targets of each branch through a table, by its address, from what ``cuobjdump --dump-elf`` prints.

    >>> jump_tables("Offset of Indirect Branch: 0x180\\t Number of targets: 2\\n\\tTargets: 0x190 0x4e90")
    {384: [400, 20112]}
    """
    found = {int(at, 16): [int(to, 16) for to in targets.split()] for at, _, targets in _TABLE.findall(elf)}
    counts = [int(count) for _, count, _ in _TABLE.findall(elf)]
    if counts != [len(targets) for targets in found.values()]:
        raise ValueError(f"branches through tables {found}: must have {counts} targets")
    return found


def unwritten(sass: str, tables: Mapping[int, Sequence[int]] | None = None) -> list[str]:
    """The instructions of ``sass`` (up to sm_90) that read a uniform register which some path to them has not written.
    One that copies it to another reads nothing: who reads the copy does.

    A matrix product names four registers by the first; of those the last two, B's descriptor, and the first two where A
    is in shared memory, are read. ``tables`` as of :func:`jump_tables`. ValueError for a branch through a table, as
    that by which the warps of a specialised kernel find their part, that is not among them.

    >>> line = "        /*{:04x}*/                   {} ;".format
    >>> unwritten(line(0, "UMOV UR4, 0x400") + chr(10) + line(16, "UIADD3 UR6, UP0, UR4, UR5, URZ"))
    ['UIADD3 UR6, UP0, UR4, UR5, URZ']
    >>> unwritten(line(0, "UMOV UR4, UR5") + chr(10) + line(16, "UIADD3 UR6, UR4, 0x1, URZ"))
    ['UIADD3 UR6, UR4, 0x1, URZ']
    >>> unwritten(line(0, "UMOV UR4, UR5") + chr(10) + line(16, "UMOV UR4, 0x1") + chr(10) + line(32, "UMOV UR6, UR4"))
    []
    """
    tables = tables or {}
    code = [(int(at, 16), text) for at, text in _LINE.findall(sass)]
    index = {at: i for i, (at, _) in enumerate(code)}
    effects = [_effects(text) for _, text in code]
    known: dict[int, int] = {0: 0}  # registers that every path to an instruction has written, a bit each
    waiting = [0]
    while waiting:
        i = waiting.pop()
        writes, reads = effects[i]
        carries = _MOVE.match(code[i][1]) and reads & ~known[i]  # what nobody wrote to another register
        after = known[i] & ~writes if carries else known[i] | writes
        for j in _next(code, index, i, tables):
            new = known.get(j, _EVERY) & after
            if j < len(code) and known.get(j) != new:
                known[j] = new
                waiting.append(j)
    read = (i for i in sorted(known) if i < len(code) and effects[i][1] & ~known[i])
    return [code[i][1] for i in read if not _MOVE.match(code[i][1])]


def _next(
    code: list[tuple[int, str]], index: dict[int, int], i: int, tables: Mapping[int, Sequence[int]]
) -> list[int]:
    """Where the program may be after instruction ``i``."""
    parts = _PARTS.match(code[i][1])
    assert parts is not None
    guarded, name, operands = parts[1], parts[2].partition(".")[0], parts[3]
    if name in ("BRX", "JMX", "BRXU", "JMXU"):
        if code[i][0] not in tables:
            known = f"the branches of tables, {sorted(tables)}"
            raise ValueError(f"{code[i][1]!r} at {code[i][0]:#x}: must be among {known}")
        return [index[at] for at in tables[code[i][0]]] + ([i + 1] if guarded else [])
    if name not in ("BRA", "CALL", "EXIT", "RET"):
        return [i + 1]
    target = re.search(r"\b0x([0-9a-f]+)$", operands.strip())
    found = [index[int(target[1], 16)]] if name in ("BRA", "CALL") and target else []
    falls = guarded or name == "CALL" or (name == "BRA" and ("," in operands or " " in operands.strip()))
    return found + ([i + 1] if falls else [])


def _effects(text: str) -> tuple[int, int]:
    """The uniform registers that an instruction writes, and those that it reads, a bit each."""
    parts = _PARTS.match(text)
    assert parts is not None
    name, operands = parts[2], [operand.strip() for operand in parts[3].split(",")]
    uniform = name.startswith(("U", *_NOT_U))  # others have their own widths
    wide = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    writes = reads = 0
    if uniform and re.fullmatch(r"UR\d+", operands[0]):
        writes = _bits(int(operands.pop(0)[2:]), wide)
    a_in_memory = name.split(".")[0].endswith("GMMA") and operands[1:2] != [] and operands[1].startswith("gdesc")
    for bracket, first, pair in re.findall(r"(g?desc\[)?\bUR(\d+)\b(\.64)?", " , ".join(operands)):
        at = int(first)
        if bracket == "gdesc[":
            reads |= _bits(at, 4) if a_in_memory else _bits(at + 2, 2)
        else:
            reads |= _bits(at, 2 if bracket or pair or (uniform and ".64" in name) else 1)
    return writes, reads


def _bits(first: int, count: int) -> int:
    return ((1 << count) - 1) << first
