"""P's way from the accumulators to the operand of O += P V, in every form. Rests on MAX's formulas, restated here in
closed form, and on the law that each element arrives where V's fragments expect its key."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from kvlab.layout import Swizzle
from kvlab.memory import Memory
from kvlab.staging import FP8_P_SCALE, KVBufferParams, PRegisterBuffer, PStaging, PStagingParams, cast_p
from kvlab.staging.max.operand_maps import kv_buffer_operand_map, score_map
from kvlab.staging.max.p_staging import _read, _written, lds_accesses

SW = Swizzle(3, 0, 3, "vector")
FORMS: dict[str, tuple[Any, ...]] = {  # dtype, mma_shape, BM, WM, BN, WN, BK, swizzle
    "registers-32": ("bf16", (32, 32, 16), 128, 32, 64, 64, 32, None),
    "registers-32-fp8": ("fp8", (32, 32, 64), 128, 32, 128, 128, 64, None),
    "registers-16": ("bf16", (16, 16, 32), 64, 16, 64, 64, 32, None),
    "registers-16-two-rows": ("bf16", (16, 16, 32), 64, 32, 64, 64, 32, None),
    "lane contiguous": ("fp8", (32, 32, 64), 64, 64, 128, 32, 64, None),
    "narrow": ("fp8", (16, 16, 128), 16, 16, 128, 32, 128, SW),
    "pairs": ("bf16", (16, 16, 32), 16, 16, 128, 32, 32, SW),
    "pairs-wide": ("bf16", (16, 16, 32), 16, 16, 128, 64, 32, SW),
    "tiles": ("bf16", (16, 16, 32), 32, 32, 128, 32, 32, None),
    "tiles-two-rows-of-warps": ("bf16", (16, 16, 32), 64, 32, 128, 64, 32, None),
    "tiles-two-warps-a-block": ("bf16", (16, 16, 32), 16, 16, 128, 16, 32, None),
    "tiles-swizzled": ("bf16", (32, 32, 16), 32, 32, 128, 64, 64, Swizzle(2, 0, 3, "vector")),
    "tiles-32": ("bf16", (32, 32, 16), 32, 32, 128, 32, 32, None),
    "tiles-fp8": ("fp8", (16, 16, 32), 32, 32, 128, 32, 32, None),
}


def params(name: str, tr: bool = True) -> PStagingParams:
    return PStagingParams(*FORMS[name], tr=tr)


def groups(p: PStagingParams) -> Any:
    return itertools.product(range(p.BN // p.BK), range(p.k_groups))


@pytest.mark.parametrize("name", FORMS)
def test_every_element_arrives_once(name: str) -> None:
    """Two CTAs with other P: the operand put back together is P, cast; the blocks in LDS hold every element once."""
    p = params(name)
    assert p.form == name.partition("-")[0]
    tile = np.random.default_rng(0).random((2, p.BM, p.BN), np.float32)
    staging = PStaging(p, programs=2)
    with pytest.raises(ValueError, match="copy P first"):
        staging.mma_tile(0, 0)
    staging.copy(p.score_map().spread(tile))
    operand = np.concatenate([np.asarray(staging.mma_tile(*at)) for at in groups(p)], axis=2)
    assert operand.shape[2] == p.num_m * p.k_groups * (p.BN // p.BK)
    assert p.operand_map().gather(operand).tobytes() == cast_p(tile, p.dtype).tobytes()
    if p.form == "registers":
        assert not staging.smem.written.any()  # type: ignore[union-attr]
    else:
        offset, width = _written(p)
        assert np.unique(offset[..., None] + np.arange(width)).size == p.BM * p.BN


@pytest.mark.parametrize(
    "name", ["registers-32", "registers-32-fp8", "registers-16", "lane contiguous", "narrow", "pairs"]
)
def test_keys_stand_as_in_the_fragments_of_v(name: str) -> None:
    """The operand of KVBuffer's V, key by key, for every lane."""
    p = params(name)
    v = KVBufferParams(p.dtype, p.mma_shape, None, p.BN, p.WN, p.BK, 64 * p.num_warps, 256, 1, transpose=False)
    wanted = kv_buffer_operand_map(v, p.BM)
    np.testing.assert_array_equal(p.operand_map().flat, wanted.flat)
    np.testing.assert_array_equal(p.score_map().flat, score_map(v, p.BM).flat)


def test_two_forms_that_stand_elsewhere_too() -> None:
    """The decode CTA's exchange is the pairs, 16 bytes at once; blocks row by row are those of streaming."""
    p = params("pairs")
    offset, width = _written(p)
    write, read = lds_accesses(p, p.operand_map())
    assert (write.name, read.name) == ("ds_write_b128", "ds_read_b128")
    assert (offset[:, ::2, 0].ravel() * 2 == write.address.ravel()).all()  # its 16 bytes begin with key tile 0
    assert (offset[:, 1::2] == offset[:, ::2] + 4).all()
    assert (p.BN, width, p.swizzle) == (128, 4, SW)
    plain = params("tiles")
    v = KVBufferParams("bf16", (16, 16, 32), None, 128, 32, 32, 256, 128, 1, transpose=False)
    tile = np.random.default_rng(0).random((1, 32, 128), np.float32)
    ours, streaming = PStaging(plain), PRegisterBuffer(v, BM=32)
    ours.copy(plain.score_map().spread(tile))
    streaming.copy_to_shared(streaming.score_map.spread(tile))
    assert ours.smem.image()[0].tobytes() == streaming.smem.image()[0].tobytes()


def lanes(M: int) -> tuple[Any, Any]:
    lane = np.arange(64)
    return lane % M, lane // M


def test_closed_forms() -> None:
    """MAX's addresses, warp by warp, in elements of a block."""
    p, l = params("lane contiguous"), np.arange(64)
    offset, _ = _written(p)
    for w, m in itertools.product(range(4), range(2)):
        got = offset[w * 64 : w * 64 + 64, m, 0]
        np.testing.assert_array_equal(got, w // 2 * 64 * 64 + m * 32 * 64 + w % 2 * (32 * 64 // 2) + 16 * l)
    at, width = _read(p, 1, 0)
    assert width == 16
    np.testing.assert_array_equal(at[:64, 1], 64 * 64 + 32 * 64 + 16 * l[:, None] + np.array([0, 32 * 64 // 2]))

    p, (r, c) = params("narrow"), lanes(16)
    offset, _ = _written(p)
    for w, n in itertools.product(range(4), range(2)):
        wanted = SW(r * (128 // 32) + w) * 32 + c * 4 + n * (32 // 2)
        np.testing.assert_array_equal(offset[w * 64 : w * 64 + 64, n, 0], wanted)

    p = params("tiles-two-warps-a-block")
    offset, _ = _written(p)
    for w in range(8):
        wanted = w // 2 * 16 * 32 + r * 32 + w % 2 * 16 + c * 4
        np.testing.assert_array_equal(offset[w * 64 : w * 64 + 64, 0, 0], wanted)

    at, width = _read(params("tiles"), 2, 0)
    assert width == 4
    for m, half in itertools.product(range(2), range(2)):
        wanted = 2 * 32 * 32 + (m * 16 + r) * 32 + 4 * c + 16 * half
        np.testing.assert_array_equal(at[:64, m, half], wanted)
    at, _ = _read(params("tiles", tr=False), 2, 0)
    for m, half in itertools.product(range(2), range(2)):
        np.testing.assert_array_equal(at[:64, m, half], 2 * 32 * 32 + (m * 16 + r) * 32 + 8 * c + 4 * half)


def test_without_transposing_reads_an_accumulator_is_interleaved() -> None:
    p = params("registers-32", tr=False)
    staging = PStaging(p)
    staging.copy(np.broadcast_to(np.arange(16, dtype=np.float32), (1, 256, 2, 16)))
    assert np.asarray(staging.mma_tile(1, 0))[0, 7, 0].astype(int).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert np.asarray(staging.mma_tile(0, 1))[0, 9, 0].astype(int).tolist() == [8, 12, 9, 13, 10, 14, 11, 15]


def test_fp8_keeps_small_p() -> None:
    """2^-17 survives the factor 2^8; without it e4m3 would have made it 0."""
    small = np.float32([2.0**-17])
    assert cast_p(small, "fp8").astype(np.float32)[0] == small[0] * FP8_P_SCALE
    assert small.astype(cast_p(small, "fp8").dtype)[0] == 0
    assert cast_p(small, "bf16").astype(np.float32)[0] == small[0]


@pytest.mark.parametrize(
    "change, says",
    [
        ((0, "fp32"), "must be 1 or 2 bytes"),
        ((1, (16, 16, 8)), r"must be 1 or 2 bytes and 16x16xK or 32x32xK"),
        ((3, 12), "WM is 12: must be a multiple of 16 and divide BM 32"),
        ((5, 48), "WN is 48: must be a multiple of 16 and divide BN 128"),
        ((7, SW), "WM 32 with Sw<3,0,3>"),
    ],
)
def test_what_is_refused(change: Any, says: str) -> None:
    arguments = list(FORMS["tiles"])
    arguments[change[0]] = change[1]
    with pytest.raises(ValueError, match=says):
        PStagingParams(*arguments)
    p = params("tiles")
    with pytest.raises(ValueError, match=r"mma_tile\(4, 0\): P has 4 blocks of 1 k groups"):
        PStaging(p).mma_tile(4, 0)
    with pytest.raises(ValueError, match="8192 bytes of P on a multiple of 16 do not fit"):
        PStaging(p, smem=Memory(8192, programs=1), smem_address=16)
