"""Strided copies: the twin, its programs alone, both twins in lockstep, and what is compiled for a GPU, executed.

Rests on NumPy's execution of a plan's descriptors, which tests/formats holds against the encoders of both formats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from any_formats import any_format
from format_pairs import pairs_of_formats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvlab.attention.strided_copy import emulator
from kvlab.attention.strided_copy.config import CopyConfig, choose_tile, unit_of
from kvlab.formats import Conversion, Format, convert, known_format
from kvlab.formats.codec import joined, nibbles
from kvlab.mirror import check, lockstep
from kvlab.simt import run
from kvlab.staging import program_ids


def configs(plan: Conversion, item: int = 8, **how: Any) -> list[CopyConfig]:
    sizes = [plan.source.nbytes * 8 // item, plan.target.nbytes * 8 // item]
    moving = [one for one in plan.strided if one.moves or "in_place" not in how]
    found = [choose_tile(one, unit_of(one, item, sizes), item, **how) for one in moving]
    assert None not in found
    return [one for one in found if one is not None]


def launched(config: CopyConfig, source: Any, target: Any) -> None:
    emulator.launch(*(x.view(f"u{config.unit}") for x in (source, target)), config=config, table=config.table)


def some_bytes(size: int) -> Any:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def moved(plan: Conversion, x: Any, tile: int) -> Any:
    """The bytes of the target as the twin moves them, in tiles of so many bytes; padding is 9."""
    out = np.full(plan.target.nbytes, 9, np.uint8)
    whole = all(one.whole for one in plan.strided)
    here, there = (x, out) if whole else (nibbles(x), nibbles(out))
    for config in configs(plan, 8 if whole else 4, tile=tile):
        launched(config, here, there)
    return there if whole else joined(there)


@pytest.mark.parametrize(
    ("source", "target"), pairs_of_formats(), ids=lambda one: f"{one.name}-{one.sizes.get('slot')}"
)
def test_the_twin_moves_what_the_descriptors_say(source: Format, target: Format) -> None:
    plan, x = convert(source, target), some_bytes(source.nbytes)
    for tile in (256, 8 << 10):
        assert np.array_equal(moved(plan, x, tile), plan.apply(x, fill=9))


@settings(max_examples=40, deadline=None)
@given(any_format(), any_format(), st.sampled_from([16, 64, 8192]))
def test_the_twin_moves_between_any_two_formats(source: Format, target: Format, tile: int) -> None:
    """Axes in any order, split, counted down, with padding between."""
    assume(source.fields[0].stored == target.fields[0].stored)
    plan, x = convert(source, target), some_bytes(source.nbytes)
    assert np.array_equal(moved(plan, x, tile), plan.apply(x, fill=9))


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize(
    ("one", "other"), [("vllm.blocks_first", "vllm.hnd"), ("vllm.x_split", "flash_attention.paged"),
                       ("flash_attention.paged", "aiter.shuffle")],
)
def test_programs_in_place_leave_each_other_alone(
    one: str, other: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program after the other, in any order: each has read what it writes over, and nobody else needs it."""
    sizes = {"layers": 2, "pages": 3, "page_size": 48, "heads": heads, "dim": 64}
    plan = convert(known_format(one, **sizes), known_format(other, **sizes))
    held = some_bytes(plan.source.nbytes)
    exact = plan.apply(held)
    for config in configs(plan, in_place=True):
        programs = np.random.default_rng(1).permutation(config.grid()[0])
        assert programs.size > 1
        for program in programs:
            monkeypatch.setattr(emulator, "program_ids", lambda grid, p=program: (program_ids(grid)[0][p : p + 1],))
            launched(config, held, held)
    assert np.array_equal(held, exact)


def test_a_pool_that_changes_places_with_itself_has_no_tile_in_place() -> None:
    """Pieces of 16 bytes of 8192 rows are 128 KiB, the values of a page of 512 slots are 1 MiB; rows that move apart go
    to bytes that held none of them.
    """
    many = {"layers": 2, "pages": 2048, "page_size": 1, "heads": 1, "dim": 16}
    first, fewer = (
        convert(*(known_format(name, **{**many, "pages": pages}) for name in ("max.paged", "vllm.kv_first")))
        for pages in (2048, 512)
    )
    sizes = {"page_size": 512, "heads": 8, "dim": 128}
    large = convert(*(known_format(name, **sizes) for name in ("vllm.x_split", "flash_attention.paged")))
    longer = convert(Format.parse("slot:8 dim:16 k.s8"), Format.parse("slot:8@32 dim:16 k.s8"))
    for one in (*first.strided, large.strided[1], *longer.strided):
        assert choose_tile(one, unit_of(one), in_place=True) is None
    assert choose_tile(fewer.strided[0], 8, in_place=True) is not None


@pytest.mark.interpreter
@pytest.mark.parametrize("which", ["a table", "in place"])
def test_the_twins_in_lockstep(which: str) -> None:
    """Pages of 32 and 48 have a table; heads of three and pages of six leave columns and rows of a tile empty."""
    if which == "a table":
        plan = convert(known_format("mla.584", pages=3, page_size=8), known_format("mla.584", pages=2, page_size=12))
        chosen = configs(plan)[:1]
        assert chosen[0].table is not None
    else:
        sizes = {"pages": 2, "page_size": 6, "heads": 3, "dim": 16}
        plan = convert(known_format("vllm.blocks_first", **sizes), known_format("vllm.hnd", **sizes))
        chosen = configs(plan, in_place=True)
    x, config = some_bytes(plan.source.nbytes), chosen[0]
    ends = [array.view(f"i{config.unit}") for array in (x, np.zeros(plan.target.nbytes, np.uint8))]
    both = lockstep("strided_copy", {"source": ends[0], "target": ends[1], "config": config, "table": config.table})
    assert both.ok, both.first_difference


@pytest.mark.compile
@pytest.mark.parametrize(
    ("one", "other", "in_place"),
    [("flash_attention.paged", "vllm.x_split", False), ("vllm.x_split", "flash_attention.paged", False),
     ("vllm.blocks_first", "vllm.hnd", True)],
)
def test_compiled_for_hopper_it_moves_whole_sectors_and_no_lanes_meet_in_a_bank(
    one: str, other: str, in_place: bool
) -> None:
    """What the compiler emits, run in the PTX machine: runs of 16 bytes, runs of 2 that go through shared memory, and
    tiles that are read before they are written.
    """
    from kvlab.attention.strided_copy import kernel

    assert check("strided_copy").ok
    sizes = {"pages": 2, "heads": 2, "dim": 64}
    plan = convert(known_format(one, **sizes), known_format(other, **sizes))
    x, out = some_bytes(plan.source.nbytes), np.zeros(plan.target.nbytes, np.uint8)
    exact, source = plan.apply(x), out if in_place else x
    out[...] = x if in_place else 0
    for config in configs(plan, in_place=True) if in_place else configs(plan):
        ends = (array.view(f"i{config.unit}") for array in (source, out))
        constants = {"X": config.X, "Y": config.Y, "C": kernel.CopyConstants(config.align, config.in_place)}
        ran = run(kernel.move, config.grid(), *ends, None, None, config.outer, num_warps=config.num_warps,
                  target="sm_90", **constants)
        assert ran.sectors == sum(one.ideal_sectors or 0 for one in ran.accesses)
        assert ran.conflicts == 0
        if in_place:  # its warps do not exchange a thing: a barrier is that between loads and stores
            assert any(name.startswith("bar") for name in ran.executed)
    assert np.array_equal(out, exact)
