"""Operands of instructions as arrays: how a register, a constant or a special register is read and written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from kvlab.memory import bfloat16, float16

from .ptx import Program, PtxInstruction, Register

if TYPE_CHECKING:
    from .machine import SimtMachine

Array = np.ndarray[Any, Any]
Mask = Array | None
"""Lanes that take part, ``[warps, 32]``; None: all of them."""
Read = Callable[["SimtMachine"], Array]
Write = Callable[["SimtMachine", Array, Mask], None]
Step = Callable[["SimtMachine", Mask], None]
"""One instruction, executed for the lanes of a mask."""

TYPES: dict[str, np.dtype[Any]] = {
    **{f"{kind}{8 * n}": np.dtype(f"{code}{n}") for kind, code in (("b", "u"), ("u", "u"), ("s", "i"))
       for n in (1, 2, 4, 8)},
    "f16": float16, "bf16": bfloat16, "f32": np.dtype(np.float32), "f64": np.dtype(np.float64),
    "f16x2": float16, "bf16x2": bfloat16, "u16x2": np.dtype(np.uint16), "s16x2": np.dtype(np.int16),
    "pred": np.dtype(np.bool_), "tf32": np.dtype(np.uint32),
}
"""Element types; of a packed pair that of one element."""
PACKED = ("f16x2", "bf16x2", "u16x2", "s16x2")
BITS = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}
SPECIAL = ("tid", "ntid", "ctaid", "nctaid", "laneid", "warpid", "clusterid", "nclusterid", "cluster_ctaid",
           "cluster_nctaid", "cluster_ctarank", "cluster_nctarank", "globaltimer", "globaltimer_lo", "clock", "clock64",
           "smid", "nsmid", "lanemask_lt")
REGION = 40
"""Bits of an address inside an allocation; those above number the allocation, 0 is shared memory."""
GLOBALS = 0xF0000
"""The first allocation of the module's own arrays."""
LOCAL = 0xD0000000
"""First address of the memory that each lane has for itself; pointers to it may have 32 bits."""
PARAMETERS = 0xE0000000
"""Address of the first parameter that is an array: one of 32 bits, past all shared memory."""
_ADDRESS = re.compile(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]$")
_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})$|0[dD]([0-9a-fA-F]{16})$")


class UnknownInstruction(NotImplementedError):
    """An instruction that the machine does not have: the message names its line."""

    __module__ = "kvlab.simt"


class Operands:
    """The operands of one instruction of a program, by place."""

    def __init__(self, program: Program, at: int, symbols: dict[str, int], parameters: dict[str, bytes]) -> None:
        self.program, self.at, self.symbols, self.parameters = program, at, symbols, parameters
        self.instruction: PtxInstruction = program.instructions[at]
        self.op, self.texts = self.instruction.op, self.instruction.operands

    def __len__(self) -> int:
        return len(self.texts)

    def unknown(self, why: str = "the machine has no such instruction") -> NoReturn:
        """Raise :class:`UnknownInstruction` for it."""
        raise UnknownInstruction(f"{self.instruction.where}: {why}")

    def register(self, text: str) -> Register:
        """The register of that name."""
        found = self.program.register(self.instruction.scope, text)
        if found is None:
            self.unknown(f"{text!r} is no register")
        return found

    def predicate(self, text: str) -> Read:
        """A predicate operand, negated by ``!``."""
        if re.match(r"-?\d", text):
            value = np.bool_(int(text, 0) != 0)
            return lambda m: np.broadcast_to(value, m.shape)
        slot = self.register(text.lstrip("! ")).slot
        if text.startswith("!"):
            return lambda m: ~m.registers[slot]
        return lambda m: m.registers[slot]

    def read(self, place: int | str, kind: str) -> Read:
        """An operand as ``kind``: ``[warps, 32]`` (pairs: ``[warps, 64]``), a constant without axes."""
        text = self.texts[place] if isinstance(place, int) else place
        if kind == "pred":
            return self.predicate(text)
        dtype, packed = TYPES[kind], kind in PACKED
        nbytes = 4 if packed else dtype.itemsize
        if text.startswith("%") and text[1:].split(".")[0] in SPECIAL:
            name = text[1:]
            return lambda m: m.special(name).astype(BITS[nbytes], copy=False).view(dtype)
        found = self.program.register(self.instruction.scope, text)
        if found is not None:
            slot, bits = found.slot, BITS[nbytes]
            if found.nbytes == nbytes:
                return lambda m: m.registers[slot].view(dtype)
            return lambda m: m.registers[slot].astype(bits).view(dtype)
        value = self.constant(text, nbytes)
        constant = np.array(value, BITS[nbytes]).view(dtype) if not packed else np.array([value], np.uint32).view(dtype)
        if packed:
            return lambda m: np.tile(constant, (1, m.shape[1]))
        return lambda m: constant

    def constant(self, text: str, nbytes: int = 8) -> int:
        """Bits of a constant operand."""
        if text in self.symbols:
            return self.symbols[text]
        try:
            floating = _FLOAT.match(text)
            if floating:
                return int(floating[1] or floating[2], 16)
            if re.match(r"-?\d+\.\d", text):
                return int(np.array(float(text), f"f{nbytes}").view(BITS[nbytes]))
            number = text.rstrip("U")
            octal = re.match(r"-?0[0-7]+$", number)
            return int(number, 8 if octal else 0) % (1 << 8 * nbytes)
        except ValueError:
            self.unknown(f"{text!r} is no register, number or name that is known")

    def write(self, place: int | str, kind: str) -> Write:
        """The way of a result of ``kind`` into a register; a smaller one is widened by its sign, or zeros."""
        text = self.texts[place] if isinstance(place, int) else place
        if text == "_":
            return lambda m, value, mask: None
        found = self.register(text)
        slot, dtype = found.slot, TYPES[kind]
        bits = np.dtype(np.bool_) if not found.nbytes else BITS[found.nbytes]
        same = kind in PACKED or dtype.itemsize == bits.itemsize
        wider = np.dtype(f"i{bits.itemsize}") if dtype.kind == "i" else bits
        narrow = dtype if dtype.kind in "iu" or kind == "pred" else BITS[dtype.itemsize]

        def put(m: SimtMachine, value: Array, mask: Mask) -> None:
            value = value.view(bits) if same else value.view(narrow).astype(wider).view(bits)
            if mask is not None:
                value = np.where(mask, value, m.registers[slot])
            elif value.shape != m.shape:
                value = np.array(np.broadcast_to(value, m.shape))
            m.registers[slot] = value

        return put

    def list(self, place: int) -> list[str]:
        """The names in ``{a, b}``, or the only one."""
        text = self.texts[place].strip()
        return [name.strip() for name in text[1:-1].split(",")] if text.startswith("{") else [text]

    def address(self, place: int | str) -> Callable[[SimtMachine], Array]:
        """The byte addresses of ``[register + offset]``: int64 ``[warps, 32]``."""
        text = self.texts[place] if isinstance(place, int) else place
        found = _ADDRESS.match(text)
        if found is None:
            self.unknown(f"{text!r} is no address")
        offset = int(found[2] or "0", 0)
        register = self.program.register(self.instruction.scope, found[1])
        if register is None:
            where = np.int64(self.constant(found[1]) + offset)
            return lambda m: np.broadcast_to(where, m.shape)
        slot, unsigned = register.slot, BITS[register.nbytes]
        if register.nbytes == 4:
            step = np.uint32(offset % (1 << 32))
            return lambda m: (m.registers[slot] + step).astype(np.int64)
        wide = np.uint64(offset % (1 << 64))
        return lambda m: (m.registers[slot].view(unsigned) + wide).view(np.int64)

    def shared_address(self, place: int | str) -> Callable[[SimtMachine], Array]:
        """The same in shared memory: the low 32 bits."""
        address = self.address(place)
        return lambda m: address(m) & 0xFFFFFFFF
