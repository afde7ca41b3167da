"""MMA atoms. Rests on laws (bijection, inverse), the ISA's fragment tables and a float64 reference."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.hardware import ATOMS, MmaAtom, get_arch, get_atom

EVERY = pytest.mark.parametrize("atom", ATOMS.values(), ids=ATOMS)


@EVERY
@pytest.mark.parametrize("operand", ["a", "b", "c"])
def test_maps_are_bijections(atom: MmaAtom, operand: str) -> None:
    """Law: every element of the operand is held by exactly one register of one lane."""
    m, n, k = atom.shape
    rows, cols = {"a": (m, k), "b": (k, n), "c": (m, n)}[operand]
    registers = getattr(atom, f"regs_{operand}")
    held = {getattr(atom, operand)(lane, r) for lane in range(atom.warp_size) for r in range(registers)}
    assert held == {(row, col) for row in range(rows) for col in range(cols)}
    assert atom.warp_size * registers == rows * cols


@EVERY
def test_fragments_follow_the_maps_and_come_back(atom: MmaAtom) -> None:
    """Law: fragment[lane, r] is the element that the map names, and tile undoes fragment."""
    m, n, k = atom.shape
    for operand, shape in (("a", (m, k)), ("b", (k, n)), ("c", (m, n))):
        matrix = np.arange(3 * shape[0] * shape[1]).reshape(3, *shape)
        fragment = getattr(atom, f"fragment_{operand}")(matrix)
        for lane in (0, 13, atom.warp_size - 1):
            for r in range(fragment.shape[-1]):
                row, col = getattr(atom, operand)(lane, r)
                assert (fragment[:, lane, r] == matrix[:, row, col]).all()
        np.testing.assert_array_equal(getattr(atom, f"tile_{operand}")(fragment), matrix)


@EVERY
def test_product_through_the_fragments(atom: MmaAtom) -> None:
    """Float64 reference: C + A @ B of random matrices; the storage dtype's products are exact, sums are float32."""
    m, n, k = atom.shape
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(shape).astype(atom.dtype) for shape in ((7, m, k), (k, n)))
    c = rng.standard_normal((7, m, n)).astype(np.float32)
    out = atom.mma(atom.fragment_a(a), atom.fragment_b(b), atom.fragment_c(c))
    assert out.dtype == np.float32
    assert out.shape == (7, atom.warp_size, atom.regs_c)
    exact = c.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(atom.tile_c(out), exact, rtol=0, atol=1e-5)


@EVERY
def test_product_of_small_integers_is_exact(atom: MmaAtom) -> None:
    m, n, k = atom.shape
    rng = np.random.default_rng(6)
    a, b = (rng.integers(-8, 9, shape) for shape in ((m, k), (k, n)))
    zero = np.zeros((atom.warp_size, atom.regs_c), np.float32)
    out = atom.mma(atom.fragment_a(a.astype(atom.dtype)), atom.fragment_b(b.astype(atom.dtype)), zero)
    np.testing.assert_array_equal(atom.tile_c(out), a @ b)


@EVERY
def test_a_common_order_of_k_leaves_the_product_unchanged(atom: MmaAtom) -> None:
    """Law: loaders may deliver A and B in any order of k, if it is the same."""
    m, n, k = atom.shape
    rng = np.random.default_rng(7)
    a, b = (rng.integers(-8, 9, shape).astype(atom.dtype) for shape in ((m, k), (k, n)))
    order = rng.permutation(k)
    zero = np.zeros((atom.warp_size, atom.regs_c), np.float32)
    plain = atom.mma(atom.fragment_a(a), atom.fragment_b(b), zero)
    np.testing.assert_array_equal(atom.mma(atom.fragment_a(a[:, order]), atom.fragment_b(b[order]), zero), plain)


def test_worked_lanes() -> None:
    """Lanes worked out by hand from the ISA tables: m16n8k16 A of lane 13, 32x32 C of lane 40."""
    sync = get_atom("mma.sync.m16n8k16.bf16")
    assert [sync.a(13, r) for r in range(8)] == [
        (3, 2), (3, 3), (11, 2), (11, 3), (3, 10), (3, 11), (11, 10), (11, 11),
    ]  # fmt: skip
    assert [sync.b(13, r) for r in range(4)] == [(2, 3), (3, 3), (10, 3), (11, 3)]
    assert [sync.c(13, r) for r in range(4)] == [(3, 2), (3, 3), (11, 2), (11, 3)]
    wide = get_atom("mfma.32x32x16.bf16")
    rows = [*range(4, 8), *range(12, 16), *range(20, 24), *range(28, 32)]
    assert [wide.c(40, r) for r in range(16)] == [(row, 8) for row in rows]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_mfma_16x16x32_by_the_formulas(dtype: str) -> None:
    """A: row l%16, k 8*(l//16)+e. B: column l%16, the same k. C: row 4*(l//16)+e, column l%16."""
    atom = get_atom(f"mfma.16x16x32.{dtype}")
    assert (atom.regs_a, atom.regs_b, atom.regs_c) == (8, 8, 4)
    for lane in range(64):
        assert [atom.a(lane, e) for e in range(8)] == [(lane % 16, 8 * (lane // 16) + e) for e in range(8)]
        assert [atom.b(lane, e) for e in range(8)] == [(8 * (lane // 16) + e, lane % 16) for e in range(8)]
        assert [atom.c(lane, e) for e in range(4)] == [(4 * (lane // 16) + e, lane % 16) for e in range(4)]


@pytest.mark.parametrize(
    ("name", "registers"),
    [
        ("mma.sync.m16n8k16.f16", (8, 4, 4)),
        ("mfma.16x16x4.f32", (1, 1, 4)),
        ("mfma.16x16x16.f16", (4, 4, 4)),
        ("mfma.32x32x8.bf16", (4, 4, 16)),
        ("mfma.32x32x16.f16", (8, 8, 16)),
    ],
)
def test_register_counts(name: str, registers: tuple[int, int, int]) -> None:
    atom = get_atom(name)
    assert (atom.regs_a, atom.regs_b, atom.regs_c) == registers


def test_warp_size_is_the_architecture_s() -> None:
    for atom in ATOMS.values():
        machine = "sm_80" if atom.name.startswith("mma") else "gfx942"
        assert atom.warp_size == get_arch(machine).warp_size


def test_bad_input() -> None:
    atom = get_atom("mma.sync.m16n8k16.bf16")
    with pytest.raises(ValueError, match=r"bf16: a of shape \(16, 8\) is not \[\.\.\., 16, 16\]"):
        atom.fragment_a(np.zeros((16, 8)))
    with pytest.raises(ValueError, match=r"bf16: c of shape \(64, 4\) is not \[\.\.\., 32, 4\]"):
        atom.tile_c(np.zeros((64, 4)))
    a, b = np.zeros((32, 8), atom.dtype), np.zeros((32, 4), atom.dtype)
    with pytest.raises(ValueError, match="a is float32, must be bfloat16"):
        atom.mma(a.astype(np.float32), b, np.zeros((32, 4), np.float32))
    with pytest.raises(ValueError, match="c is float64, must be float32"):
        atom.mma(a, b, np.zeros((32, 4)))
    with pytest.raises(ValueError, match=r"atom 'mma' is not one of mma\.sync\.m16n8k16\.bf16"):
        get_atom("mma")
