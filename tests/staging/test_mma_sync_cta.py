"""The CTA of sm_80 and sm_90 for 16-bit storage, piece by piece, against NumPy in float64 and against laws."""

from __future__ import annotations

import numpy as np
import pytest
from cta_tiles import check_conservation, check_pieces, tiles

from kvlab.staging import FragmentMap
from kvlab.staging.nvidia.mma_sync_cta import MmaSyncCTA, MmaSyncShape

SHAPES = [
    (16, 128, 64, 64),
    (16, 64, 128, 128),
    (32, 64, 256, 256),
    (32, 128, 80, 128),
    (16, 64, 16, 32),
    (16, 64, 96, 128),
]
ids = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"BM{s[0]}-BN{s[1]}-D{s[2]}")
archs = pytest.mark.parametrize("arch", ["sm_80", "sm_90"])


@archs
@ids
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_pieces(shape: tuple[int, int, int, int], dtype: str, arch: str) -> None:
    BM, BN, D, BD = shape
    check_pieces(tiles(arch, dtype, BM, BN, D, BD), BD)


OF_PREFILL = [
    ("rows", (128, 64, 64, 64)), ("rows", (128, 32, 80, 128)), ("rows", (128, 64, 16, 16)),
    ("rows", (64, 32, 128, 128)), ("columns", (64, 64, 96, 128)), ("columns", (64, 32, 256, 256)),
    ("columns", (64, 32, 64, 64)),
]
"""Of 64 rows along the rows, and of 32 keys along the columns, four warps do again what the others do."""
of_prefill = pytest.mark.parametrize("kind, shape", OF_PREFILL, ids=str)


@of_prefill
def test_pieces_of_prefill(kind: str, shape: tuple[int, int, int, int]) -> None:
    BM, BN, D, BD = shape
    check_pieces(tiles(kind, "bf16", BM, BN, D, BD, page=48), BD)
    check_conservation(tiles(kind, "fp16", BM, BN, D, BD))


@of_prefill
def test_passes_of_prefill(kind: str, shape: tuple[int, int, int, int]) -> None:
    """Rests on arithmetic: four passes for 512 bytes. Along the rows each of eight warps reads all of K and V and its
    own rows of Q, and P stays; along the columns all of Q and P, and its share of K and V, at least eight columns.
    """
    BM, BN, D, BD = shape
    t = tiles(kind, "bf16", BM, BN, D, BD)
    q, k, v = t.load_q(), t.cta.load_k(t.k_tile, t.active), t.cta.load_v(t.v_tile, t.active)
    t.cta.accumulate(t.cta.scores(q, k, t.active), v, t.cta.zeros(), t.active)
    kv = BN * BD * 2 // 512
    if kind == "rows":
        expected = {"k read": 8 * kv, "v read": 8 * kv, "q read": 8 * max(BM // 8, 16) * BD * 2 // 512}
    else:
        rows = 8 * BM * 2 // 512
        expected = {"k read": max(kv, 8 * 8 * BD * 2 // 512), "v read": kv, "q read": rows * BD, "p read": rows * BN}
    got = {role: n // 2 // 4 for role, n in t.traffic.wavefronts.items() if role != "p write"}
    assert got == expected
    assert t.traffic.wavefronts == t.traffic.ideal
    assert all(n > t.traffic.wavefronts[role] for role, n in t.traffic.unswizzled.items())
    assert ("p write" in t.traffic.wavefronts) == (kind == "columns")


def test_registers_of_prefill() -> None:
    """Warps along the rows: K and V are in all of them, Q, S and O in one each; of 64 rows in two."""
    for BM, times in ((128, 1), (64, 2)):
        shape = MmaSyncShape(BM, 64, 64, 64, np.dtype(np.float16), "sm_80", warps=8, along_rows=True)
        maps = {role: shape.fragment_map(role) for role in "qkvp"} | {"s": shape.output_map(64)}
        for role, layout in maps.items():
            counts = np.bincount(layout.flat.reshape(-1), minlength=layout.shape[0] * layout.shape[1])
            assert (counts == (8 if role in "kv" else times)).all(), role


@archs
@pytest.mark.parametrize("page", [1, 5, 48, 128])
def test_pages_of_any_size(page: int, arch: str) -> None:
    check_pieces(tiles(arch, "bf16", 16, 64, 64, page=page), 64)


@archs
@ids
def test_bytes_are_conserved(shape: tuple[int, int, int, int], arch: str) -> None:
    BM, BN, D, BD = shape
    check_conservation(tiles(arch, "bf16", BM, BN, D, BD))


@archs
@ids
def test_no_bank_conflict_with_the_swizzle_and_many_without(shape: tuple[int, int, int, int], arch: str) -> None:
    """The rule of an H100: eight 16-byte rows of one ldmatrix phase in distinct banks take one pass."""
    BM, BN, D, BD = shape
    t = tiles(arch, "bf16", BM, BN, D, BD)
    q, k, v = t.load_q(), t.cta.load_k(t.k_tile, t.active), t.cta.load_v(t.v_tile, t.active)
    t.cta.accumulate(t.cta.scores(q, k, t.active), v, t.cta.zeros(), t.active)
    assert set(t.traffic.wavefronts) == {"q read", "k read", "v read", "p read", "p write"}
    for role, taken in t.traffic.wavefronts.items():
        assert taken == t.traffic.ideal[role] > 0, role
        assert t.traffic.unswizzled[role] >= 2 * taken, role


def test_passes_of_a_tile() -> None:
    """Rests on arithmetic: ldmatrix.x4 takes four passes; K and V are 128 x 128 bf16, so 32 KiB or 64 instructions,
    Q and P go to each of four warps, 4 KiB or 8 instructions a warp. Two programs are active."""
    t = tiles("sm_90", "bf16", 16, 128, 128)
    q, k, v = t.load_q(), t.cta.load_k(t.k_tile, t.active), t.cta.load_v(t.v_tile, t.active)
    t.cta.accumulate(t.cta.scores(q, k, t.active), v, t.cta.zeros(), t.active)
    got = {role: n // 2 for role, n in t.traffic.wavefronts.items()}
    assert got == {"k read": 256, "v read": 256, "q read": 128, "p read": 128, "p write": 32}
    assert {r: n // 2 for r, n in t.traffic.unswizzled.items()} == {r: 8 * n for r, n in got.items()}


@pytest.mark.parametrize("name", ["k", "v", "s", "o", "q", "p"])
def test_registers_hold_every_element_once(name: str) -> None:
    """K, V, S and O are shared out over the 128 threads, Q and P repeated in each of four warps."""
    t = tiles("sm_90", "bf16", 32, 128, 128)
    q, k = t.load_q(), t.cta.load_k(t.k_tile, t.active)
    s = t.cta.scores(q, k, t.active)
    maps = {"k": k.map, "s": s.map, "o": t.cta.zeros().map, "v": t.cta.load_v(t.v_tile, t.active).map}
    maps |= {role: t.cta.shape.fragment_map(role) for role in "qp"}
    layout: FragmentMap = maps[name]
    counts = np.bincount(layout.flat.reshape(-1), minlength=layout.shape[0] * layout.shape[1])
    assert (counts == (4 if name in "qp" else 1)).all()


@pytest.mark.parametrize(
    "shape", [(8, 64, 64, 64), (16, 16, 64, 64), (16, 64, 64, 72), (16, 64, 128, 64)], ids=lambda s: str(s)
)
def test_sizes_that_no_tile_has(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="BM and BD must be multiples of 16"):
        MmaSyncShape(*shape, np.dtype(np.float16))


def test_rows_that_are_not_whole_vectors() -> None:
    with pytest.raises(ValueError, match="D 60: a row of float16 must be a multiple of 16 bytes"):
        MmaSyncShape(16, 64, 60, 64, np.dtype(np.float16))


def test_is_what_decode_asks_for() -> None:
    assert isinstance(tiles("sm_80", "fp16", 16, 64, 64).cta, MmaSyncCTA)
