"""Wavefronts. Rests on hardware: 1112 warp instructions counted on an H100 (tests/data/h100_wavefronts.json)."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from lds_groups import amd_phases

from kvlab.hardware import ARCHS, INSTRUCTIONS, count_wavefronts, get_arch, wavefronts
from kvlab.hardware.banks import rule

MEASURED = json.loads((Path(__file__).parents[1] / "data" / "h100_wavefronts.json").read_text())["operations"]


def isa_name(op: str) -> str:
    """``ld64`` of the data file is ``ld.shared.b64``."""
    return op if "matrix" in op else f"{op[:2]}.shared.b{op[2:]}"


@pytest.mark.parametrize("op", MEASURED)
def test_count_wavefronts_equals_the_chip(op: str) -> None:
    cases = MEASURED[op]
    total, ideal, conflicts = count_wavefronts(isa_name(op), cases["addr"], cases.get("mask"))
    np.testing.assert_array_equal(total, cases["wavefronts"])
    np.testing.assert_array_equal(conflicts, cases["conflicts"])
    np.testing.assert_array_equal(total - ideal, conflicts)


@pytest.mark.parametrize("op", MEASURED)
def test_wavefronts_of_one_instruction_equal_the_chip(op: str) -> None:
    cases = MEASURED[op]
    for i, addresses in enumerate(cases["addr"]):
        found = wavefronts(isa_name(op), addresses, cases["mask"][i] if "mask" in cases else None)
        assert (found.wavefronts, found.conflicts) == (cases["wavefronts"][i], cases["conflicts"][i]), found.explain()


def test_the_module_names_as_many_instructions_as_the_record_holds() -> None:
    assert rule.__doc__ is not None
    assert f"{sum(len(cases['addr']) for cases in MEASURED.values())} instructions" in rule.__doc__


def test_every_measured_operation_is_an_instruction() -> None:
    assert {isa_name(op) for op in MEASURED} <= set(INSTRUCTIONS)


LANE = np.arange(32)


@pytest.mark.parametrize(
    ("name", "addresses", "mask", "passes", "conflicts"),
    [
        ("ld.shared.b128", 0 * LANE, None, 2, 0),
        ("ld.shared.b64", 8 * (LANE % 2), None, 1, 0),
        ("ld.shared.b64", 8 * (LANE % 4), None, 2, 0),
        ("ld.shared.b64", 128 * (LANE % 2), None, 2, 1),
        ("ld.shared.b64", 8 * LANE, 0x55555555, 2, 1),
        ("ld.shared.b128", 16 * LANE, None, 4, 0),
        ("st.shared.b128", 0 * LANE, None, 4, 0),
        ("ld.shared.b32", 4 * LANE, 0, 0, 0),
    ],
)
def test_worked_examples(name: str, addresses: np.ndarray, mask: int | None, passes: int, conflicts: int) -> None:
    """The examples that the measured rule's description works out (and: stores never merge; nobody active, no pass)."""
    found = wavefronts(name, addresses, mask)
    assert (found.wavefronts, found.conflicts) == (passes, conflicts)


@pytest.mark.parametrize(("name", "ideal"), [("b32", 1), ("b64", 2), ("b128", 4)])
def test_ideal_of_a_full_warp_without_merging(name: str, ideal: int) -> None:
    size = int(name[1:]) // 8
    assert wavefronts(f"ld.shared.{name}", LANE * size).ideal == ideal
    assert wavefronts(f"st.shared.{name}", LANE * size * 64).ideal == ideal


def brute_force(name: str, addresses: np.ndarray, arch: str) -> int:
    """Passes by the words of the rule: lane by lane, phase by phase, bank by bank (no merging)."""
    phases, banks = amd_phases(name, arch)
    total = 0
    for lanes in phases:
        wanted: dict[int, set[int]] = {}
        for address in addresses[lanes].tolist():
            for word in range(address // 4, (address + INSTRUCTIONS[name].nbytes) // 4):
                wanted.setdefault(word % banks, set()).add(word)
        total += max(len(words) for words in wanted.values())
    return total


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
@pytest.mark.parametrize("name", ["ds_read_b32", "ds_read_b64", "ds_read_b128", "ds_write_b64", "ds_write_b128"])
def test_amd_phases(arch: str, name: str) -> None:
    """Law: the specification's rule for AMD, spelled out in loops."""
    op, lanes = INSTRUCTIONS[name], get_arch(arch).warp_size
    phases, banks = amd_phases(name, arch)
    addresses = np.random.default_rng(1).integers(0, 200, (50, lanes)) * op.nbytes
    total, ideal, _ = count_wavefronts(name, addresses, arch=arch)
    assert total.tolist() == [brute_force(name, row, arch) for row in addresses]
    assert (ideal == len(phases)).all()
    for row in addresses[:5]:
        found = wavefronts(name, row, arch=arch)
        assert found.wavefronts == brute_force(name, row, arch)
        assert [list(phase.lanes) for phase in found.phases] == phases
        assert found.bank_count == banks
        assert found.banks.max() < banks


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", ["ds_read_b128", "ds_write_b128", "ds_read_b64", "ds_write_b64", "ds_read_b32"])
def test_two_lanes_collide_in_their_group_alone(arch: str, name: str) -> None:
    """Each pair of lanes is sent to one bank, as those who measured did: the pair takes a second pass if and only if it
    belongs to one group.
    """
    phases, banks = amd_phases(name, arch)
    group = np.empty(64, int)
    for number, lanes in enumerate(phases):
        group[lanes] = number
    a, b = np.divmod(np.arange(64 * 64), 64)
    a, b = a[a < b], b[a < b]
    lane = np.arange(64)
    addresses = np.where(lane == b[:, None], 4 * banks, 0)
    _, _, conflicts = count_wavefronts(name, addresses, (lane == a[:, None]) | (lane == b[:, None]), arch)
    np.testing.assert_array_equal(conflicts, group[a] == group[b])


def test_groups_are_told_and_marked() -> None:
    lane = np.arange(64)
    read = wavefronts("ds_read_b128", np.where(lane == 20, 256, 0), mask=1 | 1 << 20, arch="gfx950")
    assert read.explain().splitlines() == [
        "ds_read_b128 on gfx950: 2 wavefronts, ideal 1, 1 conflict.",
        "4 phases of 16 lanes, not in lane order (0-3, 12-15 and 20-27; 4-11, 16-19 and 28-31; the same 32 lanes on): "
        "16 lanes x 16 bytes can fill all 64 banks once.",
        "Inactive: lanes 1-19 and 21-63.",
        "Phase 0 (lanes 0 and 20) takes 2 passes: banks 0-3 each have to deliver 2 different words. Bank 0: bytes 0 "
        "(lane 0), 256 (lane 20).",
        "Addresses that differ by a multiple of 256 bytes lie in the same bank; a bank delivers one word a pass.",
        "Provisional: the lane groups were measured on gfx950 by others and are used by two compilers, not confirmed "
        "here.",
    ]
    write = wavefronts("ds_write_b64", lane * 32, arch="gfx950").explain()
    assert "4 phases of 16 lanes: 16 lanes x 8 bytes can fill 32 banks, of 64, once." in write
    assert "Addresses that differ by a multiple of 128 bytes lie in the same bank" in write
    assert "Provisional: one source says that gfx950 serves writes of 8 bytes 16 lanes at a time" in write
    assert "no gfx950 has confirmed" in wavefronts("ds_write_b128", lane * 16, arch="gfx950").explain()


@pytest.mark.parametrize("pitch", [64, 80, 128, 144, 160])
def test_phases_that_collide_alike_are_told_once(pitch: int) -> None:
    """Law: in a phase whose lanes are no neighbours, who collides is told by places in the phase."""
    lane = np.arange(64)
    found = wavefronts("ds_read_b128", lane % 16 * pitch + lane // 16 * 16, arch="gfx950")
    lines = [line for line in found.explain().splitlines() if line.startswith("Phase ")]
    assert [line.split(")")[0] for line in lines][:1] == ["Phase 0 (lanes 0-3, 12-15 and 20-27"][: len(lines)]
    assert (len(lines) > 0) == (found.conflicts > 0)


def test_ds_read_tr16_b64_phases() -> None:
    lane = np.arange(64)
    assert wavefronts("ds_read_tr16_b64", lane * 8, arch="gfx950").wavefronts == 2
    with pytest.raises(ValueError, match="ds_read_tr16_b64' does not exist on gfx942, which has no ds_read_tr"):
        wavefronts("ds_read_tr16_b64", lane * 8, arch="gfx942")


def test_unmeasured_architectures_say_so() -> None:
    assert not wavefronts("ld.shared.b32", LANE * 4).provisional
    for arch in ARCHS:
        if arch == "sm_90":
            continue
        name = "ld.shared.b32" if arch.startswith("sm") else "ds_read_b32"
        found = wavefronts(name, np.arange(get_arch(arch).warp_size) * 4, arch=arch)
        assert found.provisional
        assert "provisional" in repr(found)
        assert f"Provisional: no {arch} has confirmed this rule." in found.explain()


@pytest.mark.parametrize("arch", [name for name in ARCHS if name.startswith("sm") and name != "sm_90"])
def test_other_nvidia_chips_are_counted_by_the_measured_rule(arch: str) -> None:
    addresses = np.random.default_rng(6).integers(0, 64, (40, 32)) * 16
    for name in get_arch(arch).instructions:
        np.testing.assert_array_equal(count_wavefronts(name, addresses, arch=arch), count_wavefronts(name, addresses))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("arch", ["sm_90", "gfx950", "gfx1100"])
def test_small_accesses_are_counted_by_their_words(arch: str, size: int) -> None:
    """Law, counted on sm_90 (test_truth_accesses.py): lanes that want bytes of one word share its pass, as do lanes
    with one address of 4 bytes.
    """
    machine = get_arch(arch)
    names = [name for name in machine.instructions if INSTRUCTIONS[name].nbytes == size]
    addresses = np.random.default_rng(7).integers(0, 4096, (30, machine.warp_size)) * size
    assert len(names) == 2
    for name in names:
        store = INSTRUCTIONS[name].store
        word = {"nvidia": f"{'st' if store else 'ld'}.shared.b32", "amd": f"ds_{'write' if store else 'read'}_b32"}
        expected = count_wavefronts(word[machine.vendor], addresses // 4 * 4, arch=arch)
        np.testing.assert_array_equal(count_wavefronts(name, addresses, arch=arch), expected)
        found = wavefronts(name, addresses[0], arch=arch)
        assert found.wavefronts == expected[0][0]
        assert found.provisional == (arch != "sm_90")
        assert "a lane asks for the 4-byte word that holds its bytes" in found.explain()


def test_phases_passes_and_collisions_agree() -> None:
    """Law: passes of a phase = 1 + the highest pass of a word in it = the most words that a collision of it has."""
    rng = np.random.default_rng(2)
    for name in ("ld.shared.b32", "ld.shared.b64", "ld.shared.b128", "st.shared.b64", "ldmatrix.x2"):
        mask = None if "matrix" in name else rng.integers(0, 2, 32).astype(bool)
        found = wavefronts(name, rng.integers(0, 64, 32) * 16, mask)
        most = [0] * len(found.phases)
        for collision in found.colliding:
            most[collision.phase] = max(most[collision.phase], len(collision.words))
            assert all(word % 32 == collision.bank for word in collision.words)
            for word, lanes in zip(collision.words, collision.lanes, strict=True):
                wanted = np.flatnonzero((found.phase == collision.phase) & (found.words == word).any(axis=1))
                assert lanes == tuple(wanted.tolist())
        for number, phase in enumerate(found.phases):
            assert phase.passes == max(most[number], int(bool(phase.lanes)))
            assert phase.lanes == tuple(np.flatnonzero(found.phase == number).tolist())


def test_explain_tells_the_banks_of_every_phase() -> None:
    """Phase 1 collides where phase 0 does, the others elsewhere (law: the collisions listed)."""
    lane = np.arange(32)
    found = wavefronts("ldmatrix.x4", lane % 16 * 128 + lane // 16 * 16)
    assert [{c.bank // 4 for c in found.colliding if c.phase == phase} for phase in range(4)] == [{0}, {0}, {1}, {1}]
    assert "Phases 1-3 likewise, 1 in banks 0-3; 2-3 in banks 4-7." in found.explain()


def test_explain_names_lanes_banks_and_reason() -> None:
    text = wavefronts("ldmatrix.x4", np.arange(32) % 8 * 128 + np.arange(32) // 8 * 16).explain()
    assert text.splitlines() == [
        "ldmatrix.x4 on sm_90: 32 wavefronts, ideal 4, 28 conflicts.",
        "4 phases, one for each 8x8 matrix: its 8 rows of 16 bytes can fill all 32 banks once.",
        "Phase 0 (lanes 0-7) takes 8 passes: banks 0-3 each have to deliver 8 different words. Bank 0: bytes 0 "
        "(lane 0), 128 (lane 1), 256 (lane 2), 384 (lane 3), 512 (lane 4), 640 (lane 5), 768 (lane 6), 896 (lane 7).",
        "Phases 1-3 likewise, in banks 4-7; 8-11; 12-15.",
        "Addresses that differ by a multiple of 128 bytes lie in the same bank; a bank delivers one word a pass.",
    ]


def test_masks_as_bits_and_as_booleans() -> None:
    rng = np.random.default_rng(3)
    addresses, bits = rng.integers(0, 500, (40, 32)) * 8, rng.integers(0, 2**32, 40)
    booleans = (bits[:, None] >> LANE & 1).astype(bool)
    by_bits, by_booleans = (count_wavefronts("ld.shared.b64", addresses, mask) for mask in (bits, booleans))
    np.testing.assert_array_equal(by_bits, by_booleans)
    top = wavefronts("ds_read_b32", np.arange(64) * 256, mask=1 << 63, arch="gfx950")
    assert top.phases[0].lanes == (63,)


def test_leading_axes_are_kept() -> None:
    total, ideal, conflicts = count_wavefronts("st.shared.b32", np.zeros((2, 3, 32), int))
    assert total.shape == ideal.shape == conflicts.shape == (2, 3)
    assert count_wavefronts("st.shared.b32", np.zeros((0, 32), int))[0].shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ld.shared.b96", LANE), "instruction is 'ld.shared.b96': must be, on sm_90, one of ld.shared.b8, "),
        (("ds_read_b32", LANE), "instruction is 'ds_read_b32': must be, on sm_90, one of"),
        (("ld.shared.b64", LANE * 4), "address is 4: must be a multiple of 8 bytes"),
        (("ld.shared.b32", -4 * LANE), "address -124 is negative"),
        (("ld.shared.b32", LANE[:16]), r"not integers \[..., 32\]"),
        (("ld.shared.b32", LANE * 4.0), r"float64 are not integers"),
        (("ld.shared.b32", LANE * 4, 1 << 32), "bits past lane 31"),
        (("ld.shared.b32", LANE * 4, [True, False]), "does not fit"),
        (("ldmatrix.x1", LANE * 16, 0xFF), "every lane takes part"),
        (("ld.shared.b32", LANE * 4, None, "sm_70"), "arch is 'sm_70': must be one of sm_80"),
        (("ld.shared.b32", np.zeros((2, 32), int)), "use count_wavefronts"),
    ],
)
def test_bad_input(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wavefronts(*arguments)  # type: ignore[arg-type]


@pytest.mark.timing
def test_ten_thousand_instructions_are_fast() -> None:
    addresses = np.random.default_rng(4).integers(0, 4096, (10_000, 32)) * 16
    best = min(_seconds(addresses) for _ in range(5))
    assert best < 0.2


def _seconds(addresses: np.ndarray) -> float:
    """Of this process: the test may share the machine."""
    start = time.process_time()
    count_wavefronts("ldmatrix.x4", addresses)
    count_wavefronts("ld.shared.b128", addresses)
    return time.process_time() - start
