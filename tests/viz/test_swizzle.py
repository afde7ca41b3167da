"""A swizzle's picture shows what the swizzle computes (law: the drawn address is the swizzle of the address before)."""

from __future__ import annotations

import re

import pytest

from kvlab.layout import Swizzle
from kvlab.viz import draw, draw_swizzle

SWIZZLES = [
    Swizzle(3, 4, 3, "byte"),
    Swizzle(3, 3, 3, "bf16"),
    Swizzle(3, 0, 4, "vector"),
    Swizzle(2, 1, 3, "float32"),
    Swizzle(2, 0, -3, "vector"),
    Swizzle(0, 0, 0, "byte"),
]


@pytest.mark.parametrize("swizzle", SWIZZLES, ids=str)
def test_every_piece_lies_where_the_swizzle_puts_it(swizzle: Swizzle, sound, hovers, overlaps) -> None:
    picture = draw(swizzle)
    found = hovers(sound(picture))
    in_bytes = swizzle.in_bytes()
    for text in found:
        numbers = [int(n) for n in re.findall(r"byte (\d+)|bank (\d+)", text) for n in n if n]
        before, after, bank = numbers
        assert after == in_bytes(before)
        assert bank == after // 4 % 32
    assert len(found) % 2 == 0  # both panels, the same pieces
    assert not overlaps(picture)


def test_title_counts_bank_groups() -> None:
    assert draw(Swizzle(3, 4, 3, "byte")).title.endswith("lie in 8 different bank groups instead of 1")
    assert "identity" in draw(Swizzle.identity("byte")).title
    # rows of 64 bytes: eight rows are spread over two 16-byte groups before, all eight after
    assert draw_swizzle(Swizzle(2, 0, 3, "vector"), row_bytes=64).title.endswith("8 different bank groups instead of 2")


def test_a_row_that_splits_a_piece_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row_bytes is 40: must be a multiple of the 16 bytes"):
        draw_swizzle(Swizzle(3, 4, 3, "byte"), row_bytes=40)


@pytest.mark.parametrize(
    ("swizzle", "banks", "lanes"),
    [
        (Swizzle(3, 4, 3, "byte"), 32, 8),
        (Swizzle(5, 0, 5, "fp32"), 32, 32),
        (Swizzle(6, 0, 6, "fp32"), 64, 64),
        (Swizzle(4, 0, 4, "vector"), 64, 16),
        (Swizzle(5, 1, 5, "bf16"), 32, 32),
        (Swizzle(4, 3, 4, "byte"), 32, 16),
    ],
    ids=str,
)
def test_as_many_lanes_as_the_banks_serve_at_once(swizzle: Swizzle, banks: int, lanes: int, sound) -> None:
    """Law: all banks deliver 4 * banks bytes in a pass, so that many pieces; a perfect swizzle spreads them all."""
    picture = draw_swizzle(swizzle, banks=banks)
    sound(picture)
    assert re.search(rf"the {lanes} rows of a column lie in {lanes} different [a-z ]+ instead of 1$", picture.title)
    assert f"what {lanes} lanes read together" in picture.caption


def test_a_swizzle_that_is_too_weak_says_so() -> None:
    assert draw(Swizzle(2, 4, 3, "byte")).title.endswith(
        "the 8 rows of a column lie in 4 of 8 bank groups instead of 1"
    )


@pytest.mark.parametrize(
    "swizzle", [Swizzle(20, 4, 20, "byte"), Swizzle(2, 40, 10, "byte"), Swizzle(8, 0, 30, "vector")]
)
def test_large_swizzles_fold(swizzle: Swizzle, sound, overlaps) -> None:
    picture = draw(swizzle)
    sound(picture)
    assert picture.height < 800
    assert not overlaps(picture)
    with pytest.raises(ValueError, match="bits past 62 of an address"):
        draw(Swizzle(30, 4, 40, "byte"))
