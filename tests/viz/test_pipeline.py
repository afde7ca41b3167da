"""A pipeline without one of its waits. Rests on the record of hazards, which is asked directly, and on laws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvlab.cache import PagedKVCache
from kvlab.memory import Memory
from kvlab.staging import CpAsyncKVBuffer, Hazard, Hazards, NvidiaKVParams
from kvlab.viz import Pipeline, draw, draw_pipeline, explore

PARAMS = NvidiaKVParams("bf16", BN=32, depth=64, kv_num_heads=1, transpose=True)


def two_tiles(memory: Memory, hazards: Hazards) -> None:
    """Three tiles through two stages; the last barrier orders nothing that follows."""
    cache = PagedKVCache(np.zeros((1, 96, 1, 64), PARAMS.dtype), [96], [[0]], 0, 96)
    k = CpAsyncKVBuffer(PARAMS, cache, 0, 0, 96, memory, smem_address=memory.base, hazards=hazards)
    k.load_from_dram(0)
    for tile in range(3):
        if tile < 2:
            k.load_from_dram((tile + 1) % 2)
        hazards.wait_group(int(tile < 2))
        hazards.barrier()
        k.load_from_shared(tile % 2)
        hazards.barrier()


PIPELINE = Pipeline(two_tiles, nbytes=12288, warps=4, arch="sm_80")


def test_each_wait_is_left_out_once() -> None:
    whole = PIPELINE.whole
    assert whole.fault is None
    assert len(PIPELINE.waits) == 9
    for number, at in enumerate(whole.ordering):
        run = PIPELINE.run(number)
        kind = whole.events[at].kind
        covered = number in (5, 8)  # stage 1 is not written again; nothing follows the end
        assert (run.fault is None) == covered, number
        assert [event for event in run.events if event.kind != "landed"] == [
            event for i, event in enumerate(whole.events) if event.kind != "landed" and i != at
        ][: len([event for event in run.events if event.kind != "landed"])]
        if not covered:
            assert isinstance(run.fault, Hazard)
            after_read = kind == "barrier" and number % 3 == 2
            assert run.fault.kind == ("overwritten while read" if after_read else "read in flight")


def test_the_hazard_is_that_of_a_program_without_the_wait() -> None:
    record = Hazards(Memory(1024), 2, arch="sm_90")

    def program(memory: Memory, hazards: Hazards, barrier: bool = True) -> None:
        mine = hazards.footprint(np.array([[[0, 64]], [[512, 600]]]).reshape(1, 2, 2), 8)
        hazards.write(mine, "p write", 1)
        if barrier:
            hazards.barrier()
        hazards.read(hazards.region(0, 1024), "p read", 1)

    with pytest.raises(Hazard) as told:
        program(Memory(1024), record, barrier=False)
    pipeline = Pipeline(program, 1024, 2)
    assert str(pipeline.run(0).fault) == str(told.value)
    assert pipeline.whole.touched[0] == [(0, 8), (64, 72), (512, 520), (600, 608)]


def test_the_picture_says_what_is_missing(sound: Callable[[Any], Any]) -> None:
    sound(draw(PIPELINE))
    picture = draw_pipeline(PIPELINE, without=0)
    sound(picture)
    assert picture.title.startswith("Without cp.async.wait_group(1), event 4: read in flight: k read")
    with pytest.raises(ValueError, match="without is 9: must be one of the 9 waits"):
        draw_pipeline(PIPELINE, without=9)


def test_a_pipeline_that_fails_by_itself_is_not_explored() -> None:
    with pytest.raises(ValueError, match="must run through with all of its waits"):
        explore(Pipeline(lambda memory, hazards: hazards.wait_group(0) or hazards.copy_async(
            hazards.region(0, 64), "k copy") or hazards.read(hazards.region(0, 64), "k read"), 64, 1))
