"""Copy plans: the lanes and addresses are those of the loaders (executed in tests/hardware), drawn one by one."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvlab.hardware import RegTileLoader, SubTileLoaderLDS, SubTileLoaderLDS_st_8x32, get_arch
from kvlab.layout import Layout, LinearLayout, Swizzle
from kvlab.layout.encodings import BlockedLayout
from kvlab.viz import CopyPlan, draw, draw_copy_plan

BLOCKED = BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]).to_linear_layout((32, 64))
LANE = np.arange(128).reshape(4, 32)
PLANS = {
    "lds": CopyPlan.of(SubTileLoaderLDS("bf16", Swizzle(3, 0, 4, "vector")), (32, 32)),
    "lds 8x32": CopyPlan.of(SubTileLoaderLDS_st_8x32("bf16", BN=64, depth=128, BK=32, num_threads=256)),
    "registers": CopyPlan.of(RegTileLoader("bf16", Layout.col_major(32, 2)), (32, 64)),
    "blocked": CopyPlan.of(BLOCKED),
    "cp.async": CopyPlan.of_cp_async(LANE // 8, LANE % 8 * 8, 128 * (LANE // 8) + 16 * (LANE % 8), (16, 64), "bf16"),
    "cp.async.4": CopyPlan.of_cp_async(LANE // 16, LANE % 16 * 2, 4 * LANE + 512, (8, 64), "bf16", nbytes=4),
}


@pytest.mark.parametrize("name", PLANS)
def test_source_and_destination_name_lane_and_instruction(name: str, sound, hovers, overlaps) -> None:
    plan = PLANS[name]
    picture = draw_copy_plan(plan)
    titles = hovers(sound(picture))
    assert not overlaps(picture)
    place, who = r"row (\d+), columns (\d+)\.\.(\d+)", r"instruction (\d+) of warp (\d+), lane (\d+)"
    pattern = re.compile(rf"{place}\n{who}(?:\nto byte (\d+))?")
    source = [match for title in titles if (match := pattern.fullmatch(title))]
    assert source
    for match in source:
        row, column, last, instruction, warp, lane = (int(match[i]) for i in range(1, 7))
        assert (plan.row[instruction, lane], plan.col[instruction, lane]) == (row, column)
        assert last - column + 1 == plan.width
        assert plan.warp[instruction] == warp
        if plan.destination is not None:
            assert plan.destination[instruction, lane] == int(match[7])
    first = {(int(match[1]), int(match[2])) for match in source if match[4] == "0"}
    shown = {int(match[1]) for match in source}
    assert first == {(r, c) for r, c in zip(*(a[0].tolist() for a in (plan.row, plan.col)), strict=True) if r in shown}
    if plan.destination is not None:
        pattern = re.compile(r"byte (\d+), bank (\d+)\nrow (\d+), column (\d+)\n.*", re.DOTALL)
        target = [tuple(map(int, match.groups())) for title in titles if (match := pattern.fullmatch(title))]
        assert len(target) >= plan.lanes
        where = {int(d): (int(r), int(c)) for d, r, c in
                 zip(plan.destination.flat, plan.row.flat, plan.col.flat, strict=True)}
        assert all(
            where[byte] == (r, c) and bank == byte // 4 % get_arch(plan.arch).banks for byte, bank, r, c in target
        )
        assert f"rows of {get_arch(plan.arch).pass_bytes} bytes" in picture.svg


def test_no_bank_of_another_machine() -> None:
    """Rests on the banks of gfx950, 64 (LLVM): byte 128 of its LDS lies in bank 32; on NVIDIA it is bank 0 again."""
    amd = draw(SubTileLoaderLDS("bf16"), shape=(32, 32)).svg
    assert "byte 128, bank 32" in amd
    assert "byte 128, bank 0" in draw(PLANS["cp.async"]).svg
    with pytest.raises(ValueError, match="arch is 'sm_1': must be one of"):
        CopyPlan("copy", (4, 8), "bf16", np.arange(4), np.zeros(4, int), 8, arch="sm_1")


def test_plans_are_those_of_the_loaders() -> None:
    loader = SubTileLoaderLDS("bf16", Swizzle(3, 0, 4, "vector"))
    plan, of = loader.plan(32, 32), PLANS["lds"]
    assert np.array_equal(plan.row, of.row)
    assert np.array_equal(plan.col, of.col)
    assert of.destination.reshape(-1).tolist() == list(range(0, 2048, 16))
    vectors = RegTileLoader("bf16", Layout.col_major(32, 2)).vectors((32, 64))
    assert np.array_equal(PLANS["registers"].row, vectors[..., 0].T)
    held = PLANS["blocked"]
    for instruction, lane in np.ndindex(held.row.shape):
        warp, vector = divmod(instruction, 2)
        place = BLOCKED(register=8 * vector, lane=lane, warp=warp)
        assert (held.row[instruction, lane], held.col[instruction, lane]) == place


def test_bundles_are_lanes_of_one_row() -> None:
    assert [b.tolist() for b in PLANS["cp.async"].bundles()] == [list(range(8 * i, 8 * i + 8)) for i in range(4)]
    assert len(PLANS["registers"].bundles()) == 64
    assert "more</text>" in draw(PLANS["registers"]).svg


def test_titles_state_the_finding() -> None:
    assert draw(PLANS["cp.async"]).title == (
        "cp.async.16: 16 x 64 bfloat16 in 4 instructions of 32 lanes x 16 bytes; the first takes 4 rows of 128 bytes"
    )


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape is None: must be \(rows, columns\) of the tile"):
        draw_copy_plan(SubTileLoaderLDS("bf16"))
    with pytest.raises(ValueError, match="is no loader with a plan"):
        draw_copy_plan(7)
    with pytest.raises(ValueError, match=r"row 3, columns 8\.\.15 are outside the tile of 4 x 8"):
        CopyPlan("copy", (4, 8), "bf16", np.arange(4), np.array([0, 0, 0, 8]), 8)
    with pytest.raises(ValueError, match="is not a map from register, lane and warp"):
        CopyPlan.of(LinearLayout({"offset": [[1]]}, (2,)))
