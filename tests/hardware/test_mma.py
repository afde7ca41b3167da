"""MMA atoms. Rests on laws (bijection, inverse), the ISAs' fragment tables and exact references (float64, int64)."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest

from kvlab.hardware import ARCHS, ATOMS, MmaAtom, get_arch, get_atom, round_tf32

IN_REGISTERS = [atom for atom in ATOMS.values() if atom.b is not None]
FAMILIES = {
    name: list(atoms)
    for name, atoms in groupby(
        (atom for atom in ATOMS.values() if atom.b is None), lambda atom: f"{atom.name.split('.')[0]}.{atom.dtype}"
    )
}
SMALL = pytest.mark.parametrize("atom", IN_REGISTERS, ids=[atom.name for atom in IN_REGISTERS])
WIDE = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def operands_of(atom: MmaAtom) -> list[str]:
    return [operand for operand in "abc" if getattr(atom, operand) is not None]


def values(atom: MmaAtom, operand: str, rng: np.random.Generator, *lead: int, whole: bool = False) -> np.ndarray:
    """A random matrix of an operand: whole numbers, or any that the atom's multiplier sees whole."""
    shape, dtype = (*lead, *atom.extent(operand)), atom.dtype_of(operand)
    if dtype.kind in "iu":
        low, high = (0, 256) if dtype.kind == "u" else (-128, 128)
        return rng.integers(low, high, shape).astype(dtype)
    x = rng.integers(-8, 9, shape) if whole else rng.standard_normal(shape)
    return round_tf32(x) if atom.ignored_bits and operand != "c" else np.asarray(x).astype(dtype)


def operand(atom: MmaAtom, name: str, matrix: np.ndarray) -> np.ndarray:
    """What ``mma`` takes: the fragment, or the matrix where no register holds it."""
    return matrix if getattr(atom, name) is None else getattr(atom, f"fragment_{name}")(matrix)


def check_bijection(atom: MmaAtom) -> None:
    for name in operands_of(atom):
        rows, cols = atom.extent(name)
        registers = getattr(atom, f"regs_{name}")
        row, col = getattr(atom, name)(np.arange(atom.warp_size)[:, None], np.arange(registers))
        row, col = np.broadcast_to(row, (atom.warp_size, registers)), np.broadcast_to(col, (atom.warp_size, registers))
        assert row.min() == 0 == col.min()
        assert (row.max(), col.max()) == (rows - 1, cols - 1)
        holders = 1 if name == "c" else atom.holders
        assert (np.bincount((row * cols + col).ravel(), minlength=rows * cols) == holders).all()


def check_fragments(atom: MmaAtom) -> None:
    for name in operands_of(atom):
        matrix = np.arange(3 * np.prod(atom.extent(name))).reshape(3, *atom.extent(name))
        fragment = getattr(atom, f"fragment_{name}")(matrix)
        assert fragment.shape == (3, atom.warp_size, getattr(atom, f"regs_{name}"))
        for lane in (0, 13, atom.warp_size - 1):
            for r in range(0, fragment.shape[-1], 3):
                row, col = getattr(atom, name)(lane, r)
                assert (fragment[:, lane, r] == matrix[:, row, col]).all()
        np.testing.assert_array_equal(getattr(atom, f"tile_{name}")(fragment), matrix)


def check_product(atom: MmaAtom) -> None:
    rng = np.random.default_rng(5)
    a, b, c = values(atom, "a", rng, 7), values(atom, "b", rng, 7), values(atom, "c", rng, 7)
    out = atom.mma(operand(atom, "a", a), operand(atom, "b", b), atom.fragment_c(c))
    assert out.dtype == atom.dtype_c
    assert out.shape == (7, atom.warp_size, atom.regs_c)
    if atom.dtype_c.kind == "i":
        np.testing.assert_array_equal(atom.tile_c(out), c + a.astype(np.int64) @ b.astype(np.int64))
        return
    a, b, c = (x.astype(np.float64) for x in (a, b, c))
    scale = np.abs(a) @ np.abs(b) + np.abs(c)
    eps = np.finfo(atom.dtype_c).eps
    assert (np.abs(atom.tile_c(out) - (c + a @ b)) <= eps * atom.shape[2] * scale).all()


def check_exact_product(atom: MmaAtom) -> None:
    rng = np.random.default_rng(6)
    a, b = values(atom, "a", rng, whole=True), values(atom, "b", rng, whole=True)
    zero = np.zeros((atom.warp_size, atom.regs_c), atom.dtype_c)
    out = atom.mma(operand(atom, "a", a), operand(atom, "b", b), zero)
    np.testing.assert_array_equal(atom.tile_c(out), a.astype(np.float64) @ b.astype(np.float64))


@SMALL
def test_maps_are_bijections(atom: MmaAtom) -> None:
    """Law: every element is held by exactly one register of one lane (of ``holders`` lanes: RDNA3's A and B)."""
    check_bijection(atom)


@SMALL
def test_fragments_follow_the_maps_and_come_back(atom: MmaAtom) -> None:
    """Law: fragment[lane, r] is the element that the map names, and tile undoes fragment."""
    check_fragments(atom)


@SMALL
def test_product_through_the_fragments(atom: MmaAtom) -> None:
    """Reference: C + A @ B in float64 (rounding of K + 1 float32 sums) or int64 (exact)."""
    check_product(atom)


@SMALL
def test_product_of_whole_numbers_is_exact(atom: MmaAtom) -> None:
    check_exact_product(atom)


@WIDE
def test_wgmma_and_tcgen05_of_every_width(family: list[MmaAtom]) -> None:
    """The same four for all N; B (tcgen05: A too) is the matrix itself."""
    for atom in family:
        assert atom.regs_b == 0
        check_bijection(atom)
        check_exact_product(atom)
    for atom in (family[0], family[len(family) // 2], family[-1]):
        check_fragments(atom)
        check_product(atom)


def test_the_widths() -> None:
    """PTX ISA: wgmma N = 8, 16, ..., 256 (8-bit integers: 8, 24, and multiples of 16); tcgen05 with M = 128: 16s."""
    n_of = {name: [atom.shape[1] for atom in atoms] for name, atoms in FAMILIES.items()}
    assert n_of["wgmma.bfloat16"] == n_of["wgmma.float32"] == [*range(8, 257, 8)]
    assert set(n_of["wgmma.int8"]) == {8, 24, *range(16, 257, 16)}
    assert n_of["tcgen05.float16"] == [*range(16, 257, 16)]
    assert {a.shape[2] * a.dtype.itemsize for atoms in FAMILIES.values() for a in atoms} == {32}


@SMALL
def test_a_common_order_of_k_leaves_the_product_unchanged(atom: MmaAtom) -> None:
    """Law: loaders may deliver A and B in any order of k, if it is the same."""
    rng = np.random.default_rng(7)
    a, b = values(atom, "a", rng, whole=True), values(atom, "b", rng, whole=True)
    order = rng.permutation(atom.shape[2])
    zero = np.zeros((atom.warp_size, atom.regs_c), atom.dtype_c)
    plain = atom.mma(atom.fragment_a(a), atom.fragment_b(b), zero)
    np.testing.assert_array_equal(atom.mma(atom.fragment_a(a[:, order]), atom.fragment_b(b[order]), zero), plain)


def pairs(place, lane: int, registers: int) -> list[tuple[int, int]]:  # type: ignore[no-untyped-def]
    return [place(lane, r) for r in range(registers)]


def test_worked_lanes() -> None:
    """Lanes worked out by hand from the ISA tables: m16n8k16 A of lane 13, 32x32 C of lane 40, m16n8 C of lane 5."""
    sync = get_atom("mma.sync.m16n8k16.bf16")
    assert pairs(sync.a, 13, 8) == [(3, 2), (3, 3), (11, 2), (11, 3), (3, 10), (3, 11), (11, 10), (11, 11)]
    assert pairs(sync.b, 13, 4) == [(2, 3), (3, 3), (10, 3), (11, 3)]
    assert pairs(sync.c, 13, 4) == [(3, 2), (3, 3), (11, 2), (11, 3)]
    assert pairs(sync.c, 5, 4) == [(1, 2), (1, 3), (9, 2), (9, 3)]
    wide = get_atom("mfma.32x32x16.bf16")
    rows = [*range(4, 8), *range(12, 16), *range(20, 24), *range(28, 32)]
    assert pairs(wide.c, 40, 16) == [(row, 8) for row in rows]


def test_m16n8_accumulator_as_an_offset() -> None:
    """(j & 1) + 2 (lane % 4) + 8 (lane // 4) + 64 (j >> 1) in a row-major 16 x 8 tile, whatever K and the types."""
    lane, j = np.arange(32)[:, None], np.arange(4)
    offset = (j & 1) + 2 * (lane % 4) + 8 * (lane // 4) + 64 * (j >> 1)
    for atom in IN_REGISTERS:
        if atom.name.startswith("mma.sync.m16"):
            row, col = atom.c(lane, j)
            np.testing.assert_array_equal(row * 8 + col, offset)


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("m16n8k4.tf32", "g,t g+8,t", "t,g"),
        ("m16n8k8.tf32", "g,t g+8,t g,t+4 g+8,t+4", "t,g t+4,g"),
        ("m16n8k8.f16", "g,2*t g,2*t+1 g+8,2*t g+8,2*t+1", "2*t,g 2*t+1,g"),
        ("m8n8k4.f64", "g,t", "t,g"),
        ("m16n8k4.f64", "g,t g+8,t", "t,g"),
        ("m16n8k8.f64", "g,t g+8,t g,t+4 g+8,t+4", "t,g t+4,g"),
        ("m8n8k16.s8", "g,4*t g,4*t+1 g,4*t+2 g,4*t+3", "4*t,g 4*t+1,g 4*t+2,g 4*t+3,g"),
        ("m16n8k16.u8", "g,4*t g,4*t+1 g,4*t+2 g,4*t+3 g+8,4*t g+8,4*t+1 g+8,4*t+2 g+8,4*t+3",
         "4*t,g 4*t+1,g 4*t+2,g 4*t+3,g"),
    ],
)
def test_mma_sync_by_the_table(name: str, a: str, b: str) -> None:
    """The PTX ISA's table of fragments, spelled out: g = lane // 4, t = lane % 4."""
    atom = get_atom(f"mma.sync.{name}")
    for lane in range(32):
        names = {"g": lane // 4, "t": lane % 4}
        assert pairs(atom.a, lane, atom.regs_a) == [eval(f"({pair})", names) for pair in a.split()]
        assert pairs(atom.b, lane, atom.regs_b) == [eval(f"({pair})", names) for pair in b.split()]


def test_fp8_by_the_table() -> None:
    """m16n8k32: a0..3 (g, 4t+e), a4..7 (g+8, 4t+e), a8..11 (g, 4t+16+e), a12..15 (g+8, 4t+16+e)."""
    atom = get_atom("mma.sync.m16n8k32.e4m3")
    for lane in range(32):
        g, t = divmod(lane, 4)
        expected = [(g + dg, 4 * t + dk + e) for dk in (0, 16) for dg in (0, 8) for e in range(4)]
        assert pairs(atom.a, lane, 16) == expected
        assert pairs(atom.b, lane, 8) == [(4 * t + dk + e, g) for dk in (0, 16) for e in range(4)]


def test_wgmma_accumulator_is_a_layout() -> None:
    """Thread (4,8,4) -> (column 2, row 1, row 16); value (2,2,N/8) -> (column 1, row 8, column 8)."""
    atom = get_atom("wgmma.m64n24k16.bf16")
    for q in range(4):
        for g in range(8):
            for w in range(4):
                expected = [
                    (g + 16 * w + 8 * v1, 2 * q + v0 + 8 * v2) for v2 in range(3) for v1 in range(2) for v0 in range(2)
                ]
                assert pairs(atom.c, q + 4 * g + 32 * w, 12) == expected


@pytest.mark.parametrize("kind", ["bf16", "tf32", "e4m3"])
def test_wgmma_a_in_registers_is_mma_sync_s_of_each_warp(kind: str) -> None:
    k = {"bf16": 16, "tf32": 8, "e4m3": 32}[kind]
    wide, warp = get_atom(f"wgmma.m64n8k{k}.{kind}"), get_atom(f"mma.sync.m16n8k{k}.{kind}")
    matrix = np.arange(64 * k).reshape(64, k)
    found = wide.fragment_a(matrix).reshape(4, 32, -1)
    np.testing.assert_array_equal(found, warp.fragment_a(matrix.reshape(4, 16, k)))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_mfma_16x16x32_by_the_formulas(dtype: str) -> None:
    """A: row l%16, k 8*(l//16)+e. B: column l%16, the same k. C: row 4*(l//16)+e, column l%16."""
    atom = get_atom(f"mfma.16x16x32.{dtype}")
    assert (atom.regs_a, atom.regs_b, atom.regs_c) == (8, 8, 4)
    for lane in range(64):
        assert pairs(atom.a, lane, 8) == [(lane % 16, 8 * (lane // 16) + e) for e in range(8)]
        assert pairs(atom.b, lane, 8) == [(8 * (lane // 16) + e, lane % 16) for e in range(8)]
        assert pairs(atom.c, lane, 4) == [(4 * (lane // 16) + e, lane % 16) for e in range(4)]


@pytest.mark.parametrize(("m", "k"), [(16, 128), (32, 64)])
def test_two_orders_of_k_in_one_instruction(m: int, k: int) -> None:
    """Canonical: 32 consecutive k a lane group; two halves: 16 of the lower half of k and 16 of the upper one. The
    same registers hold different k, A and B alike, so the product is the same."""
    canonical, halves = get_atom(f"mfma.{m}x{m}x{k}.fp8"), get_atom(f"mfma.{m}x{m}x{k}.fp8.two_half")
    for lane in (0, 17, 63):
        assert pairs(canonical.a, lane, 32) == [(lane % m, 32 * (lane // m) + e) for e in range(32)]
        expected = [(lane % m, k // 2 * half + 16 * (lane // m) + e) for half in (0, 1) for e in range(16)]
        assert pairs(halves.a, lane, 32) == expected
    rng = np.random.default_rng(8)
    a, b = values(canonical, "a", rng, whole=True), values(canonical, "b", rng, whole=True)
    fragments = [(atom.fragment_a(a), atom.fragment_b(b)) for atom in (canonical, halves)]
    assert not np.array_equal(fragments[0][0], fragments[1][0])
    zero = np.zeros((64, canonical.regs_c), np.float32)
    np.testing.assert_array_equal(canonical.mma(*fragments[1], zero), halves.mma(*fragments[1], zero))


def test_rdna_accumulators_differ_by_generation() -> None:
    rdna3, rdna4 = get_atom("wmma.gfx11.16x16x16.bf16"), get_atom("wmma.gfx12.16x16x16.bf16")
    for lane in range(32):
        assert pairs(rdna3.c, lane, 8) == [(2 * e + lane // 16, lane % 16) for e in range(8)]
        assert pairs(rdna4.c, lane, 8) == [(8 * (lane // 16) + e, lane % 16) for e in range(8)]
        assert pairs(rdna3.a, lane, 16) == [(lane % 16, k) for k in range(16)]
        assert pairs(rdna4.b, lane, 8) == [(8 * (lane // 16) + e, lane % 16) for e in range(8)]
    assert (rdna3.regs_a, rdna3.regs_b, rdna3.regs_c) == (16, 16, 8)


def test_rdna3_half_waves_must_agree() -> None:
    """Lanes 16-31 repeat lanes 0-15, to the bit; a NaN agrees with itself."""
    atom = get_atom("wmma.gfx11.16x16x16.f16")
    a = np.full((2, 16, 16), np.nan, np.float16)
    fragment = atom.fragment_a(a)
    assert (fragment[:, 16:].view(np.uint16) == fragment[:, :16].view(np.uint16)).all()
    np.testing.assert_array_equal(atom.tile_a(fragment), a)
    fragment[1, 21, 3] = 1
    with pytest.raises(ValueError, match="lane 21 holds other elements of A than lane 5; lanes 16 to 31 must repeat"):
        atom.tile_a(fragment)


@pytest.mark.parametrize(
    ("name", "registers"),
    [
        ("mma.sync.m16n8k16.f16", (8, 4, 4)),
        ("mma.sync.m16n8k16.f64", (8, 4, 4)),
        ("mma.sync.m8n8k4.f64", (1, 1, 2)),
        ("wgmma.m64n256k16.bf16", (8, 0, 128)),
        ("tcgen05.m128n64k32.e4m3", (0, 0, 64)),
        ("mfma.16x16x4.f32", (1, 1, 4)),
        ("mfma.32x32x2.f32", (1, 1, 16)),
        ("mfma.16x16x16.f16", (4, 4, 4)),
        ("mfma.32x32x8.bf16", (4, 4, 16)),
        ("mfma.32x32x16.f16", (8, 8, 16)),
        ("mfma.16x16x32.fp8fnuz", (8, 8, 4)),
        ("mfma.16x16x128.fp8", (32, 32, 4)),
        ("mfma.32x32x64.bf8.two_half", (32, 32, 16)),
    ],
)
def test_register_counts(name: str, registers: tuple[int, int, int]) -> None:
    atom = get_atom(name)
    assert (atom.regs_a, atom.regs_b, atom.regs_c) == registers


def test_where_the_atoms_exist() -> None:
    for atom in ATOMS.values():
        assert atom.archs[0] == atom.arch
        assert set(atom.archs) <= set(ARCHS)
        lanes = get_arch(atom.arch).warp_size
        assert atom.warp_size == (4 * lanes if atom.b is None else lanes)
    assert all(arch.atoms for arch in ARCHS.values())
    assert "mma.sync.m16n8k32.e4m3" not in get_arch("sm_86").atoms
    assert "mma.sync.m16n8k8.f64" not in get_arch("sm_89").atoms
    assert "wgmma.m64n8k16.bf16" not in get_arch("sm_100").atoms
    assert "mfma.16x16x32.fp8" not in get_arch("gfx942").atoms
    assert "mfma.16x16x16.i8" not in get_arch("gfx942").atoms


def test_tf32_ignores_the_low_bits() -> None:
    """13 bits of a float32 do not reach the multiplier; round_tf32 rounds them away first, halves away from zero."""
    atom = get_atom("mma.sync.m16n8k8.tf32")
    rng = np.random.default_rng(9)
    a, b = rng.standard_normal((16, 8)).astype(np.float32), round_tf32(rng.standard_normal((8, 8)))
    zero = np.zeros((32, 4), np.float32)
    out = atom.mma(atom.fragment_a(a), atom.fragment_b(b), zero)
    kept = (a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    np.testing.assert_array_equal(out, atom.mma(atom.fragment_a(kept), atom.fragment_b(b), zero))
    rounded = round_tf32(a)
    assert (rounded.view(np.uint32) & 0x1FFF == 0).all()
    assert (np.abs(rounded - a) <= np.abs(a) * 2.0**-11).all()
    specials = np.array([np.inf, -np.inf, np.nan, 0.0], np.float32)
    np.testing.assert_array_equal(round_tf32(specials), specials)


def test_int32_sums_wrap_around() -> None:
    atom = get_atom("mma.sync.m16n8k32.s8")
    ones = np.ones((16, 32), np.int8), np.ones((32, 8), np.int8)
    top = np.full((32, 4), 2**31 - 1, np.int32)
    out = atom.mma(atom.fragment_a(ones[0]), atom.fragment_b(ones[1]), top)
    assert (out == -(2**31) + 31).all()


def test_bad_input() -> None:
    atom = get_atom("mma.sync.m16n8k16.bf16")
    with pytest.raises(ValueError, match=r"bf16: a has shape \(16, 8\): must be \[\.\.\., 16, 16\]"):
        atom.fragment_a(np.zeros((16, 8)))
    with pytest.raises(ValueError, match=r"bf16: c has shape \(64, 4\): must be \[\.\.\., 32, 4\]"):
        atom.tile_c(np.zeros((64, 4)))
    a, b = np.zeros((32, 8), atom.dtype), np.zeros((32, 4), atom.dtype)
    with pytest.raises(ValueError, match="a is float32, must be bfloat16"):
        atom.mma(a.astype(np.float32), b, np.zeros((32, 4), np.float32))
    with pytest.raises(ValueError, match="c is float64, must be float32"):
        atom.mma(a, b, np.zeros((32, 4)))
    with pytest.raises(ValueError, match=r"atom is 'mma': must be one of mma\.sync\.m16n8k16\.bf16"):
        get_atom("mma")
    with pytest.raises(ValueError, match=r"close to it: .*mfma\.16x16x32\.bf16"):
        get_atom("mfma.16x16x32bf16")
    wide = get_atom("wgmma.m64n16k16.bf16")
    with pytest.raises(ValueError, match="B is read from shared memory, no register holds it"):
        wide.fragment_b(np.zeros((16, 16)))
    with pytest.raises(ValueError, match=r"b has shape \(8, 16\): must be \[\.\.\., 16, 16\]"):
        wide.mma(np.zeros((128, 8), wide.dtype), np.zeros((8, 16), wide.dtype), np.zeros((128, 8), np.float32))
