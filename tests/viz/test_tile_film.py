"""The film of one tile (law: the bytes that are followed are the same in every frame; the events decide the frames)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlab.cache import PagedKVCache
from kvlab.layout import Swizzle
from kvlab.memory import AddressSpace, Memory
from kvlab.staging import Hazards, KVBuffer, Timeline, Traffic
from kvlab.staging.max.params import KVBufferParams
from kvlab.viz import draw_tile_film
from kvlab.viz.pen.palette import ACCENT

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ["in DRAM", "in flight", "in shared memory", "in registers", "in the product"]


def filmed(steps: int, transpose: bool = True, **how: Any) -> Any:
    """A tile of 32 keys, as far as ``steps`` statements bring it; with what it holds in register 0 of lane 5."""
    p = KVBufferParams("bf16", (32, 32, 16), Swizzle(3, 0, 4, "vector") if transpose else None, BN=32, WN=32, BK=32,
                       num_threads=256, depth=128, kv_num_heads=1, transpose=transpose, num_smem_stages=1)
    smem = Memory(p.smem_stage_size * 2, space=AddressSpace.SHARED, programs=1)
    traffic = Traffic(timeline=Timeline())
    hazards = Hazards(smem, 4, arch="gfx950", timeline=traffic.timeline)
    cache = PagedKVCache(np.zeros((1, 32, 1, 128), p.dtype), [0], [[0]], 1, 32)
    buffer = KVBuffer(p, cache, 0, 0, p.smem_tile(smem), end=32, traffic=traffic, hazards=hazards)
    script = [
        lambda: buffer.load_from_dram(0), lambda: hazards.wait_group(0), hazards.barrier,
        lambda: buffer.load_from_shared(0),
    ]
    for step in script[:steps]:
        step()
    return draw_tile_film(buffer, traffic.trace(), **how), buffer


def frames_of(picture: Any, sound: Any) -> list[str]:
    texts = [t.text or "" for t in sound(picture).iter(f"{SVG}text")]
    return [name for name in NAMES if any(text.endswith(f" {name}") for text in texts)]


def outlines(picture: Any, sound: Any) -> list[tuple[float, float]]:
    """Left edge and width of the accented rects."""
    return [
        (float(rect.get("x")), float(rect.get("width")))
        for rect in sound(picture).iter(f"{SVG}rect") if rect.get("stroke") == ACCENT
    ]


@pytest.mark.parametrize("steps, frames", [(1, 2), (2, 3), (3, 3), (4, 5)])
def test_the_events_decide_the_frames(steps: int, frames: int, sound: Any, overlaps: Any) -> None:
    picture, _ = filmed(steps)
    assert frames_of(picture, sound) == NAMES[:frames]
    assert not overlaps(picture)


def test_sixteen_bytes_of_k_go_to_one_lane_and_of_v_to_eight(sound: Any) -> None:
    """K: a fragment is 16 bytes of a key. V: transposing reads give each of 8 columns to a lane of its own."""
    k, buffer = filmed(4, thread=5, strip=1)
    slots = buffer.smem_image().stage(0).slots
    where = int(np.flatnonzero((slots == (5, 4)).all(axis=1))[0]) * 16
    assert k.title == f"Key 5, bytes 64–79 of 256: byte {where} of the stage, then 1 lane of warp 0"
    assert len(outlines(k, sound)) == 5
    v, _ = filmed(4, transpose=False, thread=64 + 5)
    assert v.title.endswith("then 8 lanes of warp 1")
    assert len(outlines(v, sound)) == 4 + 8


@pytest.mark.parametrize("what, stage", [("k copy", 1), ("v copy", 0)])
def test_events_of_another_stage_or_operand_tell_nothing(what: str, stage: int, sound: Any) -> None:
    _, buffer = filmed(4)
    assert frames_of(draw_tile_film(buffer, [("copy", what, stage, (0, 1))]), sound) == NAMES[:1]


def test_another_program_has_a_tile_of_its_own() -> None:
    p = KVBufferParams("bf16", (32, 32, 16), None, BN=32, WN=32, BK=32, num_threads=256, depth=128, kv_num_heads=1,
                       transpose=True, num_smem_stages=1)
    cache = PagedKVCache(np.zeros((1, 32, 1, 128), p.dtype), [0, 0], [[0], [0]], 1, 32)
    smem = Memory(p.smem_stage_size * 2, space=AddressSpace.SHARED, programs=2)
    buffer = KVBuffer(p, cache, np.arange(2), 0, p.smem_tile(smem), end=np.array([32, 0]))
    buffer.load_from_dram(0)
    draw_tile_film(buffer, [])
    with pytest.raises(ValueError, match="stage 0 holds no tile"):
        draw_tile_film(buffer, [], program=1)


def test_what_cannot_be_filmed() -> None:
    with pytest.raises(ValueError, match="stage 0 holds no tile: load it first"):
        filmed(0)
    with pytest.raises(ValueError, match="thread is 256: must be one of the 256 threads"):
        filmed(4, thread=256)
