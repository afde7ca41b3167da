"""Cases asked for in practice (tests/data/layout_cases_hardware.json), each tried as it is written there. Their values
were computed with integer arithmetic."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from kvlab.hardware import TmaDescriptor, get_atom, ldmatrix, tile_layout_k_major, tile_to_descriptor, wavefronts
from kvlab.layout import Swizzle
from kvlab.memory import Memory

CASES = json.loads((Path(__file__).parents[1] / "data" / "layout_cases_hardware.json").read_text())["cases"]
LANE = np.arange(32)


def expected(name: str) -> dict:
    result: dict = CASES[name]["expected"]
    return result


def swizzle(text: str, unit: str) -> Swizzle:
    return Swizzle.identity(unit) if text == "none" else Swizzle.parse(f"Sw{text}", unit)


def test_every_case_has_a_test() -> None:
    here = Path(__file__).read_text()
    assert [name for name in CASES if f'"{name}"' not in here] == []


def test_lds128_lane_phases() -> None:
    e = expected("lds128-lane-phases")
    for name, address, pair in (
        ("ld.shared.b128", 16 * LANE, (e["wavefronts"], e["ideal"])),
        ("ld.shared.b64", 8 * LANE, e["LDS.64 contiguous"]),
        ("ld.shared.b128", 128 * LANE, e["address 128*lane"]),
    ):
        found = wavefronts(name, address)
        assert [found.wavefronts, found.ideal] == list(pair)


def test_column_read_pitch_and_swizzle() -> None:
    case = CASES["column-read-pitch-and-swizzle"]
    for pitch, ways in zip(case["input"]["pitches"], case["expected"]["ways_by_pitch"], strict=True):
        assert wavefronts("ld.shared.b32", 4 * pitch * LANE).wavefronts == ways
    for text, ways in zip(case["input"]["swizzles_at_pitch_32"], case["expected"]["ways_by_swizzle"], strict=True):
        assert wavefronts("ld.shared.b32", 4 * swizzle(text, "float32")(32 * LANE)).wavefronts == ways


def test_ldmatrix_x2_unswizzled() -> None:
    e = expected("ldmatrix-x2-unswizzled")
    rows = 16 * (LANE % 16)
    found = wavefronts("ldmatrix.x2.trans", 2 * rows)
    assert (found.wavefronts, found.ideal, found.conflicts) == (e["wavefronts"], e["ideal"], e["excess_wavefronts"])
    assert wavefronts("ldmatrix.x2.trans", 2 * Swizzle(1, 3, 3, "fp16")(rows)).conflicts == 0


def test_ldmatrix_swizzle_by_pitch() -> None:
    case = CASES["ldmatrix-swizzle-by-pitch"]

    def passes(pitch: int, text: str) -> int:
        element = LANE % 16 * pitch + 8 * (LANE // 16)
        return wavefronts("ldmatrix.x4", 2 * swizzle(text, "fp16")(element)).wavefronts

    pitches = case["input"]["pitches"]
    assert [passes(pitch, "none") for pitch in pitches] == case["expected"]["wavefronts_none"]
    for pitch, text in case["expected"]["smallest_swizzle"].items():
        assert passes(int(pitch), text) == 4
        bits = int(text[1])
        for fewer, shift in product(range(bits), range(1, 6)):
            assert shift < fewer or passes(int(pitch), f"<{fewer},3,{shift}>") > 4
    assert passes(128, "<3,3,3>") == case["expected"]["128 with <3,3,3>"]


def test_mma_accumulator_store() -> None:
    e = expected("mma-accumulator-store")["excess_per_wavefront"]
    atom = get_atom("mma.sync.m16n8k16.f16")
    row, col = atom.c(LANE, 0)
    for text, excess in e.items():
        found = wavefronts("st.shared.b32", 2 * swizzle(text, "fp16")(row * 64 + col))
        assert found.conflicts == excess


def test_m16n8_accumulator_owner() -> None:
    e = expected("m16n8-accumulator-owner")
    atom = get_atom("mma.sync.m16n8k16.f16")
    assert [list(atom.c(5, j)) for j in range(4)] == e["lane_5"]
    row, col = atom.c(LANE[:, None], np.arange(4))
    assert sorted((row * 8 + col).ravel().tolist()) == list(range(128))


def test_ldmatrix_x4_lane_rows() -> None:
    e = expected("ldmatrix-x4-lane-rows")
    tile = np.arange(256, dtype=np.int16).reshape(16, 16)
    found = ldmatrix(Memory.over(tile), 32 * (LANE % 16) + 16 * (LANE // 16), 4, dtype=np.int16)
    for q, (row, col) in enumerate(e["matrix_origins_row_col"]):
        for lane in range(32):
            first = tile[row + lane // 4, col + 2 * (lane % 4) :][:2]
            assert found[lane, 2 * q : 2 * q + 2].tolist() == first.tolist()


def test_tma_swizzle_base_alignment() -> None:
    case = CASES["tma-swizzle-base-alignment"]
    tensor = np.zeros((8, 64), np.float16)
    for label, alignment in case["expected"]["alignment_bytes"].items():
        assert TmaDescriptor.of(tensor, (8, 8), label).swizzle.alignment == alignment
    descriptor = TmaDescriptor.of(tensor, (8, 64), case["input"]["mode"])
    relative = {base: descriptor.image(base)[:, ::8] - base for base in (0, 128, 1024)}
    for base, fits in case["expected"]["aligned_ok"].items():
        assert np.array_equal(relative[int(base)], relative[0]) == fits
    wrong = f"{int((relative[128] != relative[0]).sum())} of {relative[0].size}"
    assert wrong == case["expected"]["wrong_16B_chunks_at_128"]


def test_tma_box_wider_than_swizzle() -> None:
    case = CASES["tma-box-wider-than-swizzle"]
    tensor, inner = np.zeros((8, 64), np.float16), case["input"]["box_inner"]
    for span, valid in case["expected"]["valid"].items():
        if valid:
            TmaDescriptor.of(tensor, (8, inner), f"{span}B")
            continue
        with pytest.raises(ValueError, match=r"48\*2 = 96 B > (32|64) B") as error:
            TmaDescriptor.of(tensor, (8, inner), f"{span}B")
        assert span != "32" or case["expected"]["message"] in str(error.value)


def test_wgmma_descriptor_k_major_128b() -> None:
    e = expected("wgmma-descriptor-k-major-128b")
    descriptor = tile_to_descriptor(tile_layout_k_major("bf16", 64, 64, "128B"), "bf16", "128B")
    word = descriptor.encode()
    assert descriptor.stride_bytes == e["SBO_bytes"]
    assert word >> 32 & 0x3FFF == e["SBO_encoded"]
    assert word >> 16 & 0x3FFF == 1
    assert word >> 62 == e["layout_type"]
    assert "ignored" in descriptor.explain().splitlines()[2]
