"""The CTA of MAX's decode on gfx950 through KVBuffer, piece by piece, against NumPy in float64 and against laws.

The images and registers of its K and V buffer are compared with compiled values in test_kv_buffer.
"""

from __future__ import annotations

import numpy as np
import pytest
from cta_tiles import check_conservation, check_pieces, tiles

from kvlab.attention.machines.decode import decode_cta
from kvlab.attention.mha_decode.config import DecodeConfig
from kvlab.memory import as_dtype
from kvlab.staging import Traffic
from kvlab.staging.gfx950.kv_buffer_decode_cta import KVBufferDecodeCTA, KVBufferDecodeShape
from kvlab.staging.tile.pairs import halves

BF16, FP8 = as_dtype("bf16"), as_dtype("fp8")


@pytest.mark.parametrize("D", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_pieces(D: int, dtype: str) -> None:
    check_pieces(tiles("decode", dtype, 16, 128, D), D)


@pytest.mark.parametrize("page", [1, 5, 128])
def test_pages_of_any_size(page: int) -> None:
    check_pieces(tiles("decode", "bf16", 16, 128, 64, page=page), 64)


@pytest.mark.parametrize("D", [64, 512])
def test_bytes_are_conserved(D: int) -> None:
    check_conservation(tiles("decode", "bf16", 16, 128, D))


@pytest.mark.parametrize("D, dtype, product", [(96, BF16, BF16), (64, FP8, BF16), (128, FP8, FP8), (128, BF16, FP8)])
def test_shapes_that_it_has_not(D: int, dtype: np.dtype, product: np.dtype) -> None:
    with pytest.raises(ValueError, match=r"D must be .*128, 256 or 512, the products of 16 bits"):
        KVBufferDecodeShape(D, dtype, product)


def test_is_what_decode_asks_for() -> None:
    t = tiles("decode", "bf16", 16, 128, 64)
    cache, one = t.cta.k.cache, np.zeros(1, np.int64)
    config = DecodeConfig(16, 128, (64, 0), (64, 0), row_tiles=1, num_splits=1)
    cta = decode_cta("gfx950", config, cache, cache, one, one, (one, one + 9), Traffic())
    assert isinstance(cta.ctas[0], KVBufferDecodeCTA)


def test_every_byte_of_fp8_in_float16() -> None:
    """Rests on ml_dtypes: float16 holds every e4m3."""
    byte = np.arange(256, dtype=np.uint8)
    even, odd = halves(byte.view(np.int16))
    values = byte.view(FP8).astype(np.float32)
    np.testing.assert_array_equal(even.astype(np.float32), values[::2])
    np.testing.assert_array_equal(odd.astype(np.float32), values[1::2])
