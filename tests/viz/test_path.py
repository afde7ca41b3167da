"""The path of a byte: six stages, the numbers in words, one mark a stage.

The example takes its numbers from the page table, the swizzled tile of sm_90 and the atom's own map.
"""

from __future__ import annotations

import dataclasses

import pytest

from kvlab.hardware import get_atom
from kvlab.layout import Swizzle
from kvlab.viz import BytePath, draw, draw_path_of_a_byte

ATOM = get_atom("mma.sync.m16n8k16.bf16")


def example(token: int = 250, element: int = 37) -> BytePath:
    """K of 64 bf16 elements a token, pages of 16, a tile of 128 keys in rows of 128 bytes; B = K transposed."""
    table = tuple((7 * i + 3) % 40 for i in range(20))
    row, plain = token % 128, 128 * (token % 128) + 2 * element
    k, n = element % 16, token % 8
    lane, register = next(
        (lane, register) for lane in range(32) for register in range(ATOM.regs_b) if ATOM.b(lane, register) == (k, n)
    )
    return BytePath(
        name="K", sequence=0, token=token, head=1, element=element, element_bytes=2, page_table=table, page_size=16,
        depth=64, dram_byte=(table[token // 16] * 16 + token % 16) * 64 * 2 + 2 * element, tile=(128, 64),
        tile_at=(row, element), shared_byte=Swizzle(3, 4, 3, "byte")(plain), plain_byte=plain, warp=row // 8 % 4,
        lane=lane, register=register, lanes=32, registers=ATOM.regs_b, atom=ATOM.name, shape=ATOM.shape, operand="b",
        operand_at=(k, n),
    )


@pytest.mark.parametrize(("token", "element"), [(0, 0), (250, 37), (319, 63), (128, 8)])
def test_every_stage_is_named_and_marked(token: int, element: int, sound, overlaps) -> None:
    path = example(token, element)
    picture = draw(path)
    root = sound(picture)
    texts = " ".join(t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}text"))
    for words in ("page table", "page in DRAM", "tile", "shared memory", "fragment", "MMA"):
        assert words in texts
    assert f"logical page {token // 16} is page" in texts
    assert f"byte {path.shared_byte:,}, bank {path.shared_byte // 4 % 32}" in texts
    assert f"lane T{path.lane}" in texts
    marks = [
        rect for rect in root.iter("{http://www.w3.org/2000/svg}rect")
        if rect.get("fill", "").startswith("var(--kvlab-accent") and rect.get("stroke") is not None
    ]
    assert len(marks) == 5  # the page table outlines the whole entry instead
    assert not overlaps(picture)


def test_the_unswizzled_place_is_dashed_only_where_it_differs() -> None:
    assert "stroke-dasharray" in draw_path_of_a_byte(example(250)).svg
    assert "stroke-dasharray" not in draw_path_of_a_byte(example(128)).svg
    assert "the same as without" in draw_path_of_a_byte(example(128)).svg


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": 320}, r"token is 320: must be in 0\.\.319"),
        ({"lane": 32}, r"lane is 32: must be in 0\.\.31"),
        ({"operand": "c"}, "operand is 'c': must be 'a' or 'b'"),
        ({"operand_at": (16, 0)}, r"operand_at\[0\] is 16: must be in 0\.\.15"),
        ({"tile_at": (0, 64)}, r"tile_at\[1\] is 64: must be in 0\.\.63"),
    ],
)
def test_numbers_that_contradict_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(example(), **change)
