"""The shared memory of the buffers (contents against ``smem_image`` and ``read_addresses``, which tests/staging checks
against the bytes)."""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
import pytest

from kvlab.cache import PagedKVCache
from kvlab.layout import Layout, Swizzle
from kvlab.staging import (
    CpAsyncKVBuffer,
    DecodeKVBuffer,
    DecodeKVBufferParams,
    DecodeStreamingKVBuffer,
    KVBuffer,
    KVBufferParams,
    NvidiaKVParams,
    TiledTensorCore,
    TmaKVBuffer,
    WarpSlices,
)
from kvlab.viz import draw, draw_kv_buffer

SVG = "{http://www.w3.org/2000/svg}"
SW = Swizzle(3, 0, 4, "vector")


def cache(depth: int, dtype: str = "bf16") -> PagedKVCache:
    kind = KVBufferParams(dtype, (16, 16, 32), None, 32, 32, 32, 64, 32, 1, True).dtype
    return PagedKVCache(np.ones((2, 128, 1, depth), kind), [99], [[1, 0]], 1, 100)


def k_buffer(**more) -> KVBuffer:
    params = KVBufferParams("bf16", (32, 32, 16), SW, 64, 64, 32, 256, 128, 1, True, **more)
    return KVBuffer(params, cache(128), 0, 0, end=100)


def texts(root) -> list[str]:
    return [t.text for t in root.iter(f"{SVG}text")]


def test_every_slot_tells_its_row_and_vector(sound, hovers, overlaps) -> None:
    buffer = k_buffer()
    buffer.load_from_dram(0)
    buffer.load_from_dram(1)
    picture = draw_kv_buffer(buffer, fold=False)
    found = hovers(sound(picture))
    slots = buffer.smem_image().slots
    assert len(found) == len(slots) == 2048
    for slot in (0, 17, 100, 1023, 1024, 1030):
        row, vector = slots[slot]
        assert found[slot].startswith(f"byte {16 * slot}, bank {4 * slot % 64}\nrow {row} of the tile, vector {vector}")
    zeros = int((slots[:, 0] == -3).sum())
    assert zeros == (64 - 36) * 16
    assert sum("zeros" in text for text in found) == zeros
    assert not overlaps(picture)


def test_stages_and_blocks_have_their_rules(sound, overlaps) -> None:
    buffer = k_buffer()
    buffer.load_from_dram(0)
    picture = draw_kv_buffer(buffer)
    seen = texts(sound(picture))
    assert "stage 0, keys 0–63, block 1: columns 32–63" in seen
    assert "stage 1, not loaded, block 3: columns 96–127" in seen
    assert "hatch)" in picture.svg
    assert not overlaps(picture)
    one = texts(sound(draw_kv_buffer(buffer, stage=1)))
    assert not any(word and word.startswith("stage 0") for word in one)
    with pytest.raises(ValueError, match=r"stage is 2: must be one of \[0, 1\]"):
        draw_kv_buffer(buffer, stage=2)


@pytest.mark.parametrize("swizzle", [SW, None], ids=["swizzled", "plain"])
def test_the_title_counts_bank_groups(swizzle, sound) -> None:
    """The groups of vector 0 of the first 16 keys, counted from the addresses of the image."""
    params = KVBufferParams("bf16", (32, 32, 16), swizzle, 64, 64, 32, 256, 128, 1, True, num_smem_stages=1)
    buffer = KVBuffer(params, cache(128), 0, 0, end=100)
    buffer.load_from_dram(0)
    slots = buffer.smem_image().slots
    groups = {slot % 16 for slot, (row, vector) in enumerate(slots.tolist()) if vector == 0 and row < 16}
    picture = draw_kv_buffer(buffer)
    assert f"lies in {len(groups)} of 16 bank groups" in picture.title
    assert len(groups) == (16 if swizzle else 4)
    sound(picture)


def test_lanes_of_a_read(sound, hovers) -> None:
    buffer = k_buffer()
    buffer.load_from_dram(0)
    buffer.load_from_dram(1)
    name, address = buffer.read_addresses(1, 2)
    picture = draw_kv_buffer(buffer, read=(1, 2), instruction=1, warp=3, fold=False)
    found = hovers(sound(picture))
    for lane in (0, 31, 63):
        assert f"T{lane} " in found[address[1, 3, lane] // 16]
    assert name in picture.title
    assert "wavefronts" in picture.title
    for wrong in ({"instruction": 99}, {"warp": 4}):
        with pytest.raises(ValueError, match="must be one of the"):
            draw_kv_buffer(buffer, read=(0, 0), **wrong)


def test_all_buffers_draw_themselves(sound, overlaps) -> None:
    v = KVBufferParams("bf16", (16, 16, 32), None, 128, 128, 32, 256, 256, 1, False, num_smem_stages=1)
    whole = KVBuffer(v, cache(256), 0, 0, end=100)
    whole.load_from_dram(0)
    strips = KVBufferParams("bf16", (16, 16, 32), None, 128, 32, 32, 256, 128, 1, False)
    streaming = DecodeStreamingKVBuffer(strips, cache(128), 0, 0, num_keys=100)
    streaming.load_from_dram(1, streaming.iterator().next_tile())
    core = TiledTensorCore("fp32", "bf16", (16, 16, 32), 1, transpose_b=True)
    staged = DecodeKVBufferParams("bf16", Layout.row_major(128, 128), core, None, 128, 32, 32, 128, 256)
    ring = DecodeKVBuffer(staged, cache(128), 0, 0, end=100)
    ring.load_from_dram()
    ring.copy_to_shared()
    for buffer in (whole, WarpSlices(whole, 4), streaming, ring, k_buffer()):
        picture = draw(buffer)
        sound(picture)
        assert not overlaps(picture)
        assert buffer._repr_svg_() == picture.svg
        assert buffer._repr_html_() == picture.inline
    sound(draw_kv_buffer(WarpSlices(whole, 4), read=(0, 1)))
    sound(draw_kv_buffer(streaming, read=()))
    sound(draw_kv_buffer(ring, read=(0,)))


def test_many_blocks_fold(sound, overlaps) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        params = KVBufferParams("bf16", (32, 32, 16), SW, 64, 64, 32, 256, 512, 1, True)
        buffer = KVBuffer(params, cache(512), 0, 0, end=100)
    buffer.load_from_dram(1)
    picture = draw_kv_buffer(buffer)
    blocks = Counter(word.partition(",")[0] for word in texts(sound(picture)) if word and word.startswith("stage"))
    assert blocks == {"stage 0": 3, "stage 1": 3}
    assert picture.height < 1300
    assert not overlaps(picture)


def test_nvidia_buffers(sound, hovers, overlaps) -> None:
    params = NvidiaKVParams("bf16", BN=64, depth=128, kv_num_heads=1, transpose=True)
    ring = CpAsyncKVBuffer(params, cache(128), 0, 0, end=100)
    ring.load_from_dram(0)
    picture = draw_kv_buffer(ring, read=(0,), fold=False)
    found = hovers(sound(picture))
    assert "takes 4 wavefronts, ideal 4" in picture.title
    _, address = ring.read_addresses(0)
    assert f"bank {address[0, 0, 9] // 4 % 32}\n" in found[address[0, 0, 9] // 16]
    assert "T9 " in found[address[0, 0, 9] // 16]
    boxes = TmaKVBuffer(NvidiaKVParams("bf16", 64, 128, 1, True, arch="sm_90"), cache(128), 0, 0, end=100)
    boxes.load_from_dram(0)
    for buffer in (ring, boxes):
        drawn = draw(buffer)
        sound(drawn)
        assert "8 of 8 bank groups" in drawn.title
        assert buffer._repr_html_() == drawn.inline
        assert not overlaps(drawn)
    with pytest.raises(ValueError, match="the tensor cores read a TmaKVBuffer themselves"):
        draw_kv_buffer(boxes, read=(0,))
