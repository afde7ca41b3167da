"""The CTA of MAX's streaming decode on gfx950, piece by piece, against NumPy in float64 and against laws.

The images and registers of its K and V buffer are compared with compiled values in test_decode_streaming.
"""

from __future__ import annotations

import numpy as np
import pytest
from cta_tiles import check_conservation, check_pieces, tiles

from kvlab.staging.mfma_cta import MfmaShape

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
