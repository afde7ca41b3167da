"""Shared-memory accesses counted by Nsight Compute: the addresses, the launches, and what the counters say.

An access kernel holds one instruction :data:`SLOTS` times, each time with other addresses; ncu counts the wavefronts of
every instruction of its code by itself, and for the kernel in all its bank conflicts and the passes (``lsu``) that the
load and store unit took. TMA copies and wgmma are launched one by one: no lane addresses what they move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import chip, profiler, records
from .cuda_source import ACCESSES, SLOT_WORDS, SLOTS, WGMMA_ACCESSES, wgmma_name

__all__ = ["SEEDS", "START", "Access", "TmaCopy", "accesses", "is_access", "launch", "play", "record", "tma_copies",
           "took", "wgmma_reads"]

Array = np.ndarray[Any, Any]
LANE = np.arange(32)
FULL = 0xFFFFFFFF
SEEDS = (0, 1)  # 0: patterns with names, then random ones; others: random
WAVEFRONTS = "smsp__sass_l1tex_pipe_lsu_wavefronts_mem_shared.sum"
ONE_BY_ONE = "memory_l1_wavefronts_shared"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
BANK_WORDS = {"load": "l1tex__data_bank_writes.sum", "store": "l1tex__data_bank_reads.sum"}
LSU = "l1tex__data_pipe_lsu_wavefronts_mem_shared"
GMMA = f"{LSU}_op_gmma.sum"
GMMA_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_gmma.sum"
START = 4 * SLOT_WORDS * SLOTS  # cp.async reads this many bytes past the start of an allocation, and on
WARM = ("--cache-control", "none")


@dataclass(frozen=True)
class Access:
    """One warp's access: byte addresses of the lanes, active lanes as bits, byte offsets in global memory."""

    note: str
    address: Array
    mask: int
    source: Array


@dataclass(frozen=True)
class TmaCopy:
    """A box of ``rows`` x ``width`` bytes, "load" or "store", with a swizzle mode 0 to 3, at a shared address."""

    what: str
    itemsize: int
    rows: int
    width: int
    swizzle: int
    address: int = 0

    def __str__(self) -> str:
        box = f"{self.what} {self.rows} x {self.width} B"
        return f"{box}, items of {self.itemsize}, mode {self.swizzle}, at {self.address}"


def size_of(op: str) -> int:
    """Bytes a lane."""
    last = op.rsplit(".", 1)[-1]
    return int(last) if last.isdigit() else int(last.lstrip("bu")) // 8


def accesses(op: str, seed: int = 0) -> list[Access]:
    """The :data:`SLOTS` accesses of an instruction."""
    size = size_of(op)
    rng = np.random.default_rng(1000 * seed + 10 * size + len(op))
    own = LANE * (size if op.startswith("cp.async") else 8)
    out = [Access(note, address, mask, own) for note, address, mask in _named(size)] if seed == 0 else []
    if op.startswith("cp.async") and seed == 0:
        for where in (LANE * size, LANE * 128, LANE // 4 * 128 + LANE % 4 * 16):
            out += [Access(note, where, FULL, source) for note, source in _sources(size)]
    while len(out) < SLOTS:
        window, masked = int(rng.choice([4, 8, 16, 32, 64, 256, 1024, 4096])), rng.random() < 0.3
        mask = int(rng.integers(1, 1 << 32)) if masked else FULL
        source = LANE * size
        if op.startswith("cp.async") and rng.random() < 0.5:
            source = rng.permutation(64)[:32] * size
        words = f"random in {window}" + (f", mask {mask:#x}" if masked else "")
        out.append(Access(words, rng.integers(0, window, 32) * size, mask, source))
    return out[:SLOTS]


def _named(size: int) -> list[tuple[str, Array, int]]:
    per_word = max(1, 4 // size)
    strides = (0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 32, 33, 64, 65, 128)
    out = [(f"stride {stride} x {size} B", LANE * stride * size, FULL) for stride in strides]
    out += [(f"lane // {n}", LANE // n * size, FULL) for n in (2, 4, 8, 16)]
    out += [(f"lane % {n}", LANE % n * size, FULL) for n in (2, 4, 8, 16)]
    out += [(f"lane % {n} rows of 128 B", LANE % n * 128, FULL) for n in (2, 4, 8, 32)]
    out += [(f"lane // {n} rows of 128 B", LANE // n * 128, FULL) for n in (2, 4, 8, 16)]
    out += [("reversed", (31 - LANE) * size, FULL), ("lane ^ 1", (LANE ^ 1) * size, FULL)]
    out += [("rows of 128 B, next column", LANE * 128 + LANE % (32 * per_word) * size, FULL)]
    out += [("rows of 128 B, shifted by words", LANE * 128 + LANE * max(size, 4), FULL)]
    if size < 4:
        out += [("same bank, different bytes", LANE * 128 + LANE % per_word * size, FULL)]
        out += [("one word, different bytes", LANE % per_word * size, FULL)]
        out += [("8 words, different bytes", LANE // 4 * 4 + LANE % per_word * size, FULL)]
    for mask in (1, 0x80000000, 0x3, 0x55555555, 0xAAAAAAAA, 0xFFFF, 0xFFFF0000, 0x0F0F0F0F, 0x33333333, 0xFF):
        out += [(f"stride 1, mask {mask:#x}", LANE * size, mask), (f"rows of 128 B, mask {mask:#x}", LANE * 128, mask)]
    return out


def _sources(size: int) -> list[tuple[str, Array]]:
    """Where cp.async reads from, beside its own place in a row."""
    return [
        ("source lines of 128 B", LANE * 128), ("source one address", LANE * 0), ("source stride 32 B", LANE * 32),
        ("source reversed", (31 - LANE) * size), ("source shuffled", LANE * 13 % 32 * size),
        ("source shifted by 16 B", LANE * size + 16), ("source lane // 2", LANE // 2 * size),
    ]


def tma_copies() -> list[TmaCopy]:
    """Boxes of all widths and swizzles."""
    out = []
    boxes = [(8, 128), (64, 128), (256, 128), (1, 128), (3, 128), (8, 64), (64, 64), (8, 32), (64, 32), (64, 16)]
    for what in BANK_WORDS:
        for rows, width in boxes:
            out += [TmaCopy(what, 2, rows, width, mode) for mode in range(4) if not mode or width <= 16 << mode]
        out += [TmaCopy(what, itemsize, 64, 128, 3) for itemsize in (1, 4)]
        out += [TmaCopy(what, 2, 64, 512, 0), TmaCopy(what, 2, 8, 128, 3, 128)]
    return out


def wgmma_reads() -> list[tuple[str, str, int, int]]:
    """Kernel, note, descriptors of A and B: every swizzle, core matrices close together and far apart."""
    out = []
    for atom, in_registers, a, b in WGMMA_ACCESSES:
        kernel = wgmma_name(atom, in_registers, a, b)
        for mode, code, width in (("none", 0, 16), ("32B", 3, 32), ("64B", 2, 64), ("128B", 1, 128)):
            for stride in (8 * width, 2048) if mode in ("none", "128B") else (8 * width,):
                leading = 2048 if a or b else 128 if mode == "none" else 16
                word = leading >> 4 << 16 | stride >> 4 << 32 | code << 62
                out.append((kernel, f"swizzle {mode}, LBO {leading}, SBO {stride}", word, word + (16384 >> 4)))
    return out


def play(group: str) -> None:
    """The launches of ``lanes``, ``tma`` or ``wgmma``, in order; what runs under the profiler."""
    if group == "tma":
        chip.launch_tma("nothing", 2, 8, 128, 0, 0)
        for copy in tma_copies():
            chip.launch_tma(copy.what, copy.itemsize, copy.rows, copy.width, copy.swizzle, copy.address)
    elif group == "wgmma":
        for kernel, _, a, b in wgmma_reads():
            words = np.zeros(5 + 128 * 4, np.uint32)
            words[1:5] = [w >> s & FULL for w in (a, b) for s in (0, 32)]
            chip.launch(f"access {kernel}", 128, words, 128)
    else:
        for op in ACCESSES:
            for seed in SEEDS:
                launch(op, seed)


def launch(op: str, seed: int, only: int | None = None) -> None:
    """The accesses of an instruction, or the one numbered ``only``: the lanes of the others are off."""
    table = np.zeros((SLOTS, SLOT_WORDS), np.uint32)
    for i, (row, access) in enumerate(zip(table, accesses(op, seed), strict=True)):
        if only in (None, i):
            row[0], row[1:33], row[33:65] = access.mask, access.address, access.source
    chip.launch(f"access {op}", 32, np.concatenate([table.ravel(), np.zeros(4096, np.uint32)]), 1024)


def record(step: records.Steps) -> dict[str, Any]:
    """Counters of everything; lanes' addresses packed, so that the record stands alone."""
    chip.build()
    return {"lanes": step("lanes", _count_lanes), "tma": step("tma", _count_tma), "wgmma": step("wgmma", _count_wgmma)}


HARDWARE = [f"{LSU}.sum", f"{LSU}_op_misc.sum"]


def _count_lanes() -> dict[str, Any]:
    rows = profiler.profile("lanes", [WAVEFRONTS, CONFLICTS, *HARDWARE], *WARM, by_instruction=[ONE_BY_ONE])
    launches = [(op, seed) for op in ACCESSES for seed in SEEDS]
    out = {}
    for (op, seed), row in zip(launches, rows, strict=True):
        chosen = accesses(op, seed)
        counts = [count for _, count, sass in row["instructions"][ONE_BY_ONE] if is_access(sass)]
        if len(counts) != SLOTS or sum(counts) != row[WAVEFRONTS]:
            raise RuntimeError(f"{op}: {len(counts)} counts of {sum(counts)} in all for {SLOTS} of {row[WAVEFRONTS]}")
        out[f"{op}, {seed}"] = {
            "all_wavefronts": row[WAVEFRONTS], "all_conflicts": row[CONFLICTS], "lsu": took(row), "wavefronts": counts,
            "notes": [x.note for x in chosen],
            "mask": [x.mask for x in chosen],
            "address": records.pack(np.stack([x.address for x in chosen])),
            "source": records.pack(np.stack([x.source for x in chosen])),
        }
    return out


def _count_tma() -> dict[str, Any]:
    nothing, *rows = profiler.profile("tma", [*BANK_WORDS.values(), *HARDWARE], *WARM)
    out = {}
    for copy, row in zip(tma_copies(), rows, strict=True):
        words = BANK_WORDS[copy.what]
        out[str(copy)] = {"bank_words": row[words] - nothing[words] * (copy.what == "load"), "lsu": took(row)}
    return out


def _count_wgmma() -> dict[str, Any]:
    rows = profiler.profile("wgmma", [GMMA, GMMA_CONFLICTS], *WARM)
    launches = zip(wgmma_reads(), rows, strict=True)
    return {f"{kernel}, {note}": [row[GMMA], row[GMMA_CONFLICTS]] for (kernel, note, _, _), row in launches}


def took(row: dict[str, Any]) -> Any:
    """Passes that the load and store unit took for shared memory."""
    everything, misc = (row[name] for name in HARDWARE)
    return everything - misc


def is_access(sass: str) -> bool:
    """Whether an instruction is one of those that are counted, not the placeholders before a cp.async."""
    return any(word in sass for word in ("LDS", "STS", "ATOMS", "LDGSTS")) and "[RZ]" not in sass
