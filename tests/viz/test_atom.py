"""Atoms: every element carries the lane and register of the atom's own maps (proved by products in tests/hardware)."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvlab.hardware import get_atom
from kvlab.viz import draw, draw_atom

NAMES = ["mma.sync.m16n8k16.bf16", "mfma.16x16x32.bf16", "mfma.16x16x4.f32"]


def shown(titles: list[str]) -> dict[tuple[str, int, int], tuple[int, int]]:
    """(operand, row, column) -> (lane, register), as the hover texts say."""
    pattern = re.compile(r"([ABC])\[[mk] (\d+), [kn] (\d+)\]\n(?:lane|thread) (\d+), element [abc](\d+)(?:\n.*)*")
    found = {}
    for title in titles:
        operand, *numbers = pattern.fullmatch(title).groups()
        row, column, lane, register = map(int, numbers)
        found[operand, row, column] = (lane, register)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_element_names_its_lane_and_register(name: str, sound, hovers, overlaps) -> None:
    atom = get_atom(name)
    picture = draw(atom)
    m, n, k = atom.shape
    found = shown(hovers(sound(picture)))
    assert len(found) == m * k + k * n + m * n
    for operand, registers in (("a", atom.regs_a), ("b", atom.regs_b), ("c", atom.regs_c)):
        for lane, register in np.ndindex(atom.warp_size, registers):
            row, column = getattr(atom, operand)(lane, register)
            assert found[operand.upper(), row, column] == (lane, register)
    assert not overlaps(picture)


@pytest.mark.parametrize("name", NAMES)
def test_boxes_are_labelled_once(name: str, sound) -> None:
    atom = get_atom(name)
    texts = [t.text for t in sound(draw(atom)).iter("{http://www.w3.org/2000/svg}text")]
    for lane in range(atom.warp_size):
        assert any(text == f"T{lane}" or text.startswith(f"T{lane} ") for text in texts)


def test_one_lane_is_outlined(sound) -> None:
    atom = get_atom("mma.sync.m16n8k16.bf16")
    picture = draw_atom(atom, lane=13)
    sound(picture)
    plain = draw_atom(atom)
    boxes = 4 + 2 + 2  # pairs of registers: A 8, B 4, C 4
    assert picture.svg.count('stroke="var(--kvlab-accent') - plain.svg.count('stroke="var(--kvlab-accent') == boxes
    assert picture.title == "mma.sync.m16n8k16.bf16: lane 13 holds 8 elements of A, 4 of B, 4 of C"


class Warpgroup:
    """An atom in the form of wgmma: B in shared memory, 128 lanes, a tall C."""

    name, shape, warp_size = "warpgroup", (64, 64, 16), 128
    regs_a, regs_b, regs_c = 8, 0, 32
    b = None

    @staticmethod
    def a(lane, register):
        row = 16 * (lane // 32) + lane % 32 // 4 + 8 * (register // 2 % 2)
        return row, 2 * (lane % 4) + 8 * (register // 4) + register % 2

    @staticmethod
    def c(lane, register):
        row = 16 * (lane // 32) + lane % 32 // 4 + 8 * (register // 2 % 2)
        return row, 8 * (register // 4) + 2 * (lane % 4) + register % 2


def test_operands_in_shared_memory_and_large_ones_that_fold(sound, hovers, overlaps) -> None:
    picture = draw_atom(Warpgroup(), lane=40)
    found = shown(hovers(sound(picture)))
    assert "no register holds it" in picture.svg
    assert {row for operand, row, _ in found if operand == "C"} == {*range(16), 18, 26, *range(56, 64)}
    assert found["C", 18, 0] == (40, 0)
    assert not overlaps(picture)
    assert "of B" not in picture.title


@pytest.mark.parametrize("lane", [-1, 32])
def test_a_lane_that_is_none_is_refused(lane: int) -> None:
    with pytest.raises(ValueError, match=rf"lane is {lane}: must be a lane of mma.sync.m16n8k16.bf16, 0\.\.31"):
        draw_atom(get_atom("mma.sync.m16n8k16.bf16"), lane=lane)
