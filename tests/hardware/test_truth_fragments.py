"""Registers of ldmatrix, stmatrix, mma.sync and wgmma. Rests on hardware: dumped from an H100 (tests/data/hardware)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.truth import records
from benchmarks.truth.cuda_source import MATRICES, mma_atoms
from benchmarks.truth.fragments import ROW_PATTERNS, digest, matrix_inputs, mma_inputs, wgmma_cases
from kvlab.hardware import ATOMS, ldmatrix, shared_mma, stmatrix
from kvlab.memory import Memory

RECORD = records.read("fragments")
WGMMA = list(wgmma_cases())
FORMS = sorted({case.kernel.split("k", 1)[1].split(".", 1)[1] for case in WGMMA})


@pytest.mark.parametrize("pattern", ROW_PATTERNS)
@pytest.mark.parametrize("name", MATRICES)
def test_matrices(name: str, pattern: str) -> None:
    """What every lane got in every register, or what every half-word of memory became."""
    found = records.unpack(RECORD["matrices"][f"{name}, {pattern}"])
    verb, form, *trans = name.split(".")
    count = int(form[1:])
    words, rows, registers = matrix_inputs(pattern)
    memory = Memory.over(words.copy())
    if verb == "stmatrix":
        stmatrix(memory, rows, registers[:, : 2 * count], count, trans=bool(trans))
        np.testing.assert_array_equal(memory.image(np.uint16), found)
        return
    held = ldmatrix(memory, rows, count, trans=bool(trans), dtype=np.uint16)
    np.testing.assert_array_equal(held, found.reshape(32, 8)[:, : 2 * count])
    np.testing.assert_array_equal(registers[:, 2 * count :], found.reshape(32, 8)[:, 2 * count :])  # left alone


@pytest.mark.parametrize("name", mma_atoms())
def test_mma_sync(name: str) -> None:
    """D = A B + C from the same registers: an operand at another place would change the sums."""
    atom = ATOMS[name]
    a, b, c = mma_inputs(atom)
    found = records.unpack(RECORD["mma.sync"][name]).reshape(32, atom.regs_c)
    np.testing.assert_array_equal(atom.mma(a, b, c), found)


@pytest.mark.parametrize("form", FORMS)
def test_wgmma(form: str) -> None:
    """Accumulators, A in registers, descriptors of both operands with every swizzle: all widths of one form."""
    chosen = [case for case in WGMMA if case.kernel.split("k", 1)[1].split(".", 1)[1] == form]
    for case in chosen:
        atom = ATOMS[case.atom]
        image, word_a, word_b, fragment = case.inputs()
        start = np.broadcast_to(np.arange(atom.regs_c), (128, atom.regs_c)).astype(atom.dtype_c)
        majors: dict[str, Any] = {"a_major": "MN" if case.a_major else "K", "b_major": "MN" if case.b_major else "K"}
        a = fragment if case.in_registers else word_a
        ours = shared_mma(atom, Memory.over(image), a, word_b, start, **majors)
        assert RECORD["wgmma"][str(case)] == digest(ours), str(case)


def test_the_record_is_whole_and_says_where_it_comes_from() -> None:
    assert set(RECORD["wgmma"]) == {str(case) for case in WGMMA}
    assert set(RECORD["mma.sync"]) == set(mma_atoms())
    assert "H100" in RECORD["card"]
    assert {"command", "driver", "date", "versions"} <= set(RECORD)


def test_the_inputs_tell_every_place_apart() -> None:
    """Law: exchanging two registers of a lane, or two lanes, changes what a product gives."""
    atom = ATOMS["mma.sync.m16n8k16.bf16"]
    a, b, c = mma_inputs(atom)
    right = atom.mma(a, b, c)
    swapped = a[:, [1, 0, *range(2, 8)]]
    assert (atom.mma(swapped, b, c) != right).any()
    assert (atom.mma(a[np.arange(32) ^ 1], b, c) != right).any()
    assert (atom.mma(a, b[np.arange(32) ^ 4], c) != right).any()
