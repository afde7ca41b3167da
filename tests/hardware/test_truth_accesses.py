"""Wavefronts of 1- and 2-byte accesses, atomics, TMA copies and wgmma operands (cp.async: test_copy_wavefronts).

Rests on hardware: counted on an H100 with Nsight Compute, every instruction by itself (tests/data/hardware).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.truth import records
from benchmarks.truth.accesses import SEEDS, TmaCopy, tma_copies
from benchmarks.truth.cuda_source import ACCESSES, SLOTS
from kvlab.hardware import ATOMS, TmaDescriptor, count_wavefronts, shared_mma_wavefronts, wavefronts

RECORD = records.read("accesses")
ALONE = records.read("accesses_alone")


def lanes(op: str, seed: int) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Addresses ``[SLOTS, 32]``, masks ``[SLOTS]``, and what was counted."""
    case = RECORD["lanes"][f"{op}, {seed}"]
    return records.unpack(case["address"]).reshape(SLOTS, 32), np.array(case["mask"]), case


COUNTED = [op for op in ACCESSES if not op.startswith("cp.async")]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("op", COUNTED)
def test_accesses_take_the_chip_s_wavefronts(op: str, seed: int) -> None:
    """Each of 104 accesses, and the sum of their conflicts; the unit took as many passes as ncu counts."""
    address, mask, case = lanes(op, seed)
    total, _, conflicts = count_wavefronts(op, address, mask)
    assert total.tolist() == case["wavefronts"]
    assert (total.sum(), conflicts.sum()) == (case["all_wavefronts"], case["all_conflicts"])
    assert total.sum() == case["lsu"]


@pytest.mark.parametrize("case", [c for c in ALONE["cases"].values() if c["op"] in COUNTED], ids=lambda c: c["op"])
def test_accesses_launched_alone(case: dict[str, Any]) -> None:
    assert wavefronts(case["op"], case["address"], case["mask"]).wavefronts == case["wavefronts"]


@pytest.mark.parametrize("op", COUNTED)
def test_one_access_is_counted_as_many_are(op: str) -> None:
    """Law: the explained form of an access agrees with the table's, its passes with its collisions."""
    address, mask, _ = lanes(op, 1)
    total, ideal, conflicts = count_wavefronts(op, address, mask)
    for i in range(0, SLOTS, 4):
        found = wavefronts(op, address[i], int(mask[i]))
        assert (found.wavefronts, found.ideal, found.conflicts) == (total[i], ideal[i], conflicts[i])
        worst = max((len(c.words) for c in found.colliding), default=1)
        assert worst == max(phase.passes for phase in found.phases)
        assert all(word % 32 == c.bank for c in found.colliding for word in c.words)


@pytest.mark.parametrize("copy", [copy for copy in tma_copies() if str(copy) in RECORD["tma"]], ids=str)
def test_tma_moves_every_bank_word_once(copy: TmaCopy) -> None:
    """A copy writes (or reads) as many 4-byte words of the banks as the box has, and no lane's wavefront."""
    dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32}[copy.itemsize]
    tensor = np.zeros((256, 1024 // copy.itemsize), dtype)
    box = TmaDescriptor.of(tensor, (copy.rows, copy.width // copy.itemsize), copy.swizzle)
    found = RECORD["tma"][str(copy)]
    assert found == {"bank_words": box.transaction_bytes // 4, "lsu": 0}


def test_wgmma_reads_128_bytes_a_wavefront_whatever_the_swizzle() -> None:
    assert len(RECORD["wgmma"]) >= 8
    for name, (passes, conflicts) in RECORD["wgmma"].items():
        kernel = name.split(",")[0]
        atom = ATOMS[kernel.split(" ")[0]]
        assert passes == shared_mma_wavefronts(atom, a_in_registers="A registers" in kernel), name
        assert conflicts == 0


@pytest.mark.parametrize("record", [RECORD, ALONE], ids=["accesses", "alone"])
def test_the_record_says_where_it_comes_from(record: dict[str, Any]) -> None:
    assert "H100" in record["card"]
    assert {"command", "driver", "date", "versions"} <= set(record)
    assert "ncu" in record["versions"]
