"""The CTA of NVIDIA for float32 storage, piece by piece, against NumPy in float64 and against laws."""

from __future__ import annotations

import pytest
from cta_tiles import check_conservation, check_pieces, tiles

from kvlab.staging.nvidia.fma_cta import FmaCTA, FmaShape

SHAPES = [
    (16, 128, 64, 64),
    (16, 64, 128, 128),
    (32, 64, 256, 256),
    (32, 64, 80, 128),
    (16, 128, 16, 32),
    (16, 64, 24, 32),
]
ids = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"BM{s[0]}-BN{s[1]}-D{s[2]}")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@ids
def test_pieces(shape: tuple[int, int, int, int], arch: str) -> None:
    BM, BN, D, BD = shape
    check_pieces(tiles(arch, "fp32", BM, BN, D, BD), BD)


@ids
def test_bytes_are_conserved(shape: tuple[int, int, int, int]) -> None:
    BM, BN, D, BD = shape
    check_conservation(tiles("sm_90", "fp32", BM, BN, D, BD))


@ids
def test_passes_are_at_least_ideal(shape: tuple[int, int, int, int]) -> None:
    BM, BN, D, BD = shape
    t = tiles("sm_90", "fp32", BM, BN, D, BD)
    q, k, v = t.load_q(), t.cta.load_k(t.k_tile, t.active), t.cta.load_v(t.v_tile, t.active)
    t.cta.accumulate(t.cta.scores(q, k, t.active), v, t.cta.zeros(), t.active)
    for role, taken in t.traffic.wavefronts.items():
        assert taken >= t.traffic.ideal[role] > 0, role
        assert taken == t.traffic.unswizzled[role], "these rows have no swizzle"


@pytest.mark.parametrize(
    "shape", [(8, 64, 64, 64), (16, 40, 64, 64), (16, 64, 48, 48), (16, 64, 128, 64), (16, 64, 62, 64)]
)
def test_sizes_that_no_tile_has(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="BM and BN must be multiples of 16, BD of 32"):
        FmaShape(*shape)


def test_is_what_decode_asks_for() -> None:
    assert isinstance(tiles("sm_80", "fp32", 16, 64, 64).cta, FmaCTA)
