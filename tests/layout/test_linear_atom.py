"""Fragments of matrix instructions as linear layouts. Rests on the atoms' own maps, and on a law: the atoms of
kvlab.hardware and Triton's encodings (checked against the compilers in test_encodings.py) agree on every element."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvlab.hardware import ATOMS, get_atom
from kvlab.layout import LinearLayout
from kvlab.layout.encodings import AMDMFMALayout, AMDWMMALayout, DotOperandLayout, NVMMADistributedLayout


def power_of_two(atom, operand):
    return all(n & (n - 1) == 0 for n in atom.extent(operand))


FRAGMENTS = [
    pytest.param(atom, operand, id=f"{atom.name}-{operand}")
    for atom in ATOMS.values()
    for operand in "abc"
    if getattr(atom, operand) is not None and power_of_two(atom, operand)
]


@pytest.mark.parametrize("atom, operand", FRAGMENTS)
def test_equals_the_atom(atom, operand):
    """Every (lane, register) of every atom whose extents are powers of two."""
    layout = LinearLayout.from_atom(atom, operand)
    lanes, registers = np.ix_(np.arange(atom.warp_size), np.arange(layout.in_dims["register"]))
    per_warp = layout.in_dims["lane"]
    ours = layout(lane=lanes % per_warp, warp=lanes // per_warp, register=registers)
    for mine, theirs in zip(ours, getattr(atom, operand)(lanes, registers), strict=True):
        np.testing.assert_array_equal(mine, np.broadcast_to(theirs, mine.shape))
    assert layout.shape == atom.extent(operand)
    assert layout.is_surjective


MMA = NVMMADistributedLayout([2, 0], [2, 2], [16, 8])


@pytest.mark.parametrize(
    "atom, operand, encoding",
    [
        ("mma.sync.m16n8k16.bf16", "a", DotOperandLayout(0, MMA, 2)),
        ("mma.sync.m16n8k16.bf16", "b", DotOperandLayout(1, MMA, 2)),
        ("mma.sync.m16n8k16.bf16", "c", MMA),
        ("mfma.16x16x32.bf16", "a", DotOperandLayout(0, AMDMFMALayout(4, [16, 16, 32], False, [2, 2]), 8)),
        ("mfma.16x16x32.bf16", "b", DotOperandLayout(1, AMDMFMALayout(4, [16, 16, 32], False, [2, 2]), 8)),
        ("mfma.16x16x32.bf16", "c", AMDMFMALayout(4, [16, 16, 32], False, [2, 2])),
        ("mfma.16x16x4.f32", "b", DotOperandLayout(1, AMDMFMALayout(4, [16, 16, 4], False, [2, 2]), 1)),
    ],
    ids=str,
)
def test_equals_the_encoding(atom, operand, encoding):
    """2 x 2 warps; on the shape that they cover."""
    layout = LinearLayout.from_atom(get_atom(atom), operand, warps=(2, 2))
    theirs = encoding.to_linear_layout(layout.shape).bases
    assert layout.bases == {name: theirs[name] for name in ("register", "lane", "warp")}


def with_prefix(prefix):
    return [
        pytest.param(atom, id=name)
        for name, atom in ATOMS.items()
        if name.startswith(prefix) and power_of_two(atom, "c")
    ]


@pytest.mark.parametrize("atom", with_prefix("wgmma"))
def test_warpgroups(atom):
    """The accumulator of wgmma: a warpgroup is 4 warps along M."""
    m, n, k = atom.shape
    theirs = NVMMADistributedLayout([3, 0], [4, 1], [16, n, k]).to_linear_layout((m, n)).bases
    layout = LinearLayout.from_atom(atom, "c")
    assert layout.bases == {name: theirs[name] for name in ("register", "lane", "warp")}


@pytest.mark.parametrize("atom", with_prefix("wmma"))
def test_wmma(atom):
    """RDNA: which half-wave holds which rows differs between gfx11 (version 1) and gfx12 (version 2)."""
    version = 1 if atom.arch.startswith("gfx11") else 2
    layout = LinearLayout.from_atom(atom, "c", warps=(2, 2))
    theirs = AMDWMMALayout(version, False, warps_per_cta=[2, 2]).to_linear_layout(layout.shape).bases
    assert layout.bases == {name: theirs[name] for name in ("register", "lane", "warp")}


def fake(**fields):
    maps = {"a": None, "b": None, "c": lambda lane, register: (lane, register)}
    return SimpleNamespace(**{"name": "fake", "shape": (32, 8, 4), "warp_size": 32, **maps, **fields})


@pytest.mark.parametrize(
    "atom, operand, message",
    [
        (fake(), "a", "read from shared memory"),
        (fake(), "d", "'a', 'b' or 'c'"),
        (fake(warp_size=16), "c", "16 lanes"),
        (fake(shape=(32, 24, 8)), "c", "powers of two"),
        (fake(c=lambda lane, register: ((lane + register) % 32, register)), "c", "not linear"),
        (fake(c=lambda lane, register: (lane & 15, register & 7)), "c", "covers only 128"),
    ],
)
def test_errors(atom, operand, message):
    with pytest.raises(ValueError, match=message):
        LinearLayout.from_atom(atom, operand)
