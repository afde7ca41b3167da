"""The CTA of MAX's streaming decode on gfx950, piece by piece, against NumPy in float64 and against laws.

The images and registers of its K and V buffer are compared with compiled values in test_decode_streaming.
"""

from __future__ import annotations

import numpy as np
import pytest
from cta_tiles import check_conservation, check_pieces, tiles

from kvlab.memory import bfloat16
from kvlab.staging.gfx950.mfma_cta import MfmaShape
from kvlab.staging.max import streaming_addresses

SHAPES = [(16, 128, 64), (16, 64, 128), (32, 128, 128), (32, 64, 256)]
ids = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"BM{s[0]}-BN{s[1]}-D{s[2]}")


@ids
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_pieces(shape: tuple[int, int, int], dtype: str) -> None:
    check_pieces(tiles("streaming", dtype, *shape), shape[2])


@pytest.mark.parametrize("page", [1, 5, 48, 128])
def test_pages_of_any_size(page: int) -> None:
    check_pieces(tiles("streaming", "bf16", 16, 128, 64, page=page), 64)


@ids
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_bytes_are_conserved(shape: tuple[int, int, int], dtype: str) -> None:
    check_conservation(tiles("streaming", dtype, *shape))


@pytest.mark.parametrize("shape", [(8, 64, 64), (16, 32, 64), (16, 64, 96)], ids=lambda s: str(s))
def test_sizes_that_no_tile_has(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="BM must be a multiple of 16, BN and D of 64"):
        MfmaShape(*shape, np.dtype(np.float16))


@pytest.mark.parametrize("depth", [64, 128])
def test_the_swizzle_of_k_strips_is_free_of_conflicts(depth: int) -> None:
    """Law: in each group of 16 lanes that gfx950 serves together (measured by others) the 64 words of a read lie in 64
    banks.
    """
    params = MfmaShape(16, 128, depth, np.dtype(bfloat16)).params(1, transpose=True)
    plan = streaming_addresses.read_plan(params)
    assert plan.width * params.dtype.itemsize == 16
    address = plan.by_instruction() * params.dtype.itemsize
    first = np.array([0, 1, 2, 3, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 26, 27])
    second = np.setdiff1d(np.arange(32), first)
    for lanes in (first, second, first + 32, second + 32):
        banks = (address[..., lanes, None] // 4 + np.arange(4)) % 64
        assert (np.sort(banks.reshape(*banks.shape[:-2], 64), axis=-1) == np.arange(64)).all()
    wavefronts, ideal, _ = streaming_addresses.read_passes(params)
    np.testing.assert_array_equal(wavefronts, ideal)
