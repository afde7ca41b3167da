"""Page tables: every page tells its tokens (law: token t of a sequence is in logical page t // size, slot t % size)."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from kvlab.cache import from_dense
from kvlab.viz import draw, draw_page_table
from kvlab.viz.pen.palette import ACCENT

SVG = "{http://www.w3.org/2000/svg}"
TABLE = np.array([[7, 2, 11, -1], [0, -1, -1, -1], [5, 9, 3, 6]])
LENGTHS = [37, 11, 64]


def titles(root) -> list[str]:
    return [rect.find(f"{SVG}title").text for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


def test_every_page_tells_its_tokens(sound, overlaps) -> None:
    picture = draw_page_table(TABLE, LENGTHS, 16, pages=14)
    found = titles(sound(picture))
    assert len(found) == 8 + 14  # assigned logical pages, and the pool
    assert "sequence 0, logical page 2: tokens 32–36, 11 slots empty\nphysical page 11" in found
    assert "page 11\nsequence 0, logical page 2: tokens 32–36, 11 slots empty" in found
    assert found.count("page 13\nfree") == 1
    assert sum(text.endswith("free") for text in found) == 6
    assert picture.title == "3 sequences, 112 tokens in 8 of 14 pages: 16 of their slots hold no token"
    assert not overlaps(picture)


@pytest.mark.parametrize(("sequence", "position"), [(0, 0), (0, 36), (1, 10), (2, 40)])
def test_a_token_is_followed_to_its_slot(sequence: int, position: int, sound, overlaps) -> None:
    picture = draw_page_table(TABLE, LENGTHS, 16, pages=14, token=(sequence, position))
    texts = [t.text for t in sound(picture).iter(f"{SVG}text")]
    page, slot = TABLE[sequence, position // 16], position % 16
    assert picture.title == f"Token {position} of sequence {sequence} lies in page {page}, slot {slot}"
    assert f"slot {slot}" in texts
    assert f"token {position}" in texts
    assert not overlaps(picture)


@pytest.mark.parametrize("pages", [60, 400, 16384])
def test_large_pools_and_long_sequences_fold(pages: int, sound, overlaps) -> None:
    table = np.random.default_rng(0).permutation(pages)[:60].reshape(1, 60)
    picture = draw_page_table(table, [60 * 16], 16, pages=pages, token=(0, 500))
    found = titles(sound(picture))
    assert picture.height < 1100
    assert f"page {table[0, 31]}\nsequence 0, logical page 31: tokens 496–511" in found  # the marked page is shown
    assert not overlaps(picture)


def test_unused_entries_may_be_anything(sound) -> None:
    """Case unused-table-entries-huge: a pool of that many pages is told, and takes no time for each."""
    found = sound(draw_page_table([[3, 2**62, -1]], [4], 4))
    assert "page 3\nsequence 0, logical page 0: tokens 0–3" in titles(found)


def test_a_shared_page_names_everyone(sound) -> None:
    picture = draw_page_table([[1, 0], [1, 2]], [8, 6], 4)
    assert picture.title == "2 sequences, 14 tokens in 3 of 3 pages, 1 of them shared: 2 of their slots hold no token"
    found = titles(sound(picture))
    assert "page 1\nsequence 0, logical page 0: tokens 0–3\nsequence 1, logical page 0: tokens 0–3" in found


def test_a_cache_draws_itself() -> None:
    blocks = np.zeros((14, 2, 1, 16, 2, 8), np.float16)
    cache = SimpleNamespace(lookup_table=TABLE, cache_lengths=np.array(LENGTHS), blocks=blocks)
    assert draw_page_table(cache) == draw_page_table(TABLE, LENGTHS, 16, pages=14)


@pytest.mark.parametrize("spare", [0, 3])
def test_a_sentinel_is_no_page(spare: int) -> None:
    """Rests on from_dense's own numbers: pages of 8 tokens, a null page behind them, sentinels in the table."""
    dense = np.zeros((1, 2, 40, 1, 8), np.float32)
    pool = from_dense(dense, dense, [39, 25], 8, shuffle=1, spare_pages=spare)
    assert pool.blocks.shape[0] == 9 + spare + 1
    want = f"2 sequences, 64 tokens in 9 of {9 + spare} pages: 8 of their slots hold no token"
    for shown in (pool, pool.get_key_cache(0), pool.get_value_cache(0)):
        assert draw(shown).title == want
    assert f"{9 + spare} pages, 9 in use" in draw(pool).svg


def test_fillers_and_pages_for_later_tokens_hold_none(sound) -> None:
    """Law: a page is in use if a token lies in it. Row 1 is filled up with zeros, row 0 with a page for later."""
    picture = draw_page_table([[3, 2, 5], [1, 0, 0]], [8, 3], 4, pages=6)
    assert picture.title == "2 sequences, 11 tokens in 3 of 6 pages: 1 of their slots hold no token"
    found = titles(sound(picture))
    assert {f"page {page}\nfree" for page in (0, 4, 5)} <= set(found)
    assert "sequence 0, logical page 2: no token yet\nphysical page 5" in found


@pytest.mark.parametrize("token", [(0, 20), (0, 36), (2, 63), (1, 0)])
@pytest.mark.parametrize("pages", [14, 400])
def test_the_way_of_a_token_crosses_no_page(token: tuple[int, int], pages: int, sound) -> None:
    """Law of the plane: no piece of the accented line enters a box, but the two that it joins at their edges."""
    root = sound(draw_page_table(TABLE, LENGTHS, 16, pages=pages, token=token))
    boxes = [
        tuple(float(rect.get(name)) for name in ("x", "y", "width", "height"))
        for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None
    ]
    lines = [path.get("d") for path in root.iter(f"{SVG}path") if path.get("stroke") == ACCENT]
    assert lines
    for line in lines:
        points = [tuple(map(float, pair.split())) for pair in line.removeprefix("M").split("L")]
        for (x0, y0), (x1, y1) in pairwise(points):
            for x, y, width, height in boxes:
                apart = max(x0, x1) <= x or min(x0, x1) >= x + width or max(y0, y1) <= y or min(y0, y1) >= y + height
                assert apart


def test_a_table_of_many_sequences_shows_the_first_and_the_last(sound, overlaps) -> None:
    picture = draw_page_table(np.arange(3000).reshape(1000, 3), np.full(1000, 48), 16, token=(700, 20))
    texts = {t.text for t in sound(picture).iter(f"{SVG}text")}
    assert {f"sequence {b}" for b in (*range(8), 700, 999)} <= texts
    assert "⋮  692 more sequences" in texts
    assert picture.title == "Token 20 of sequence 700 lies in page 2101, slot 4"
    assert not overlaps(picture)
    assert picture.height < 1300


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lookup_table": [1, 2], "lengths": [3], "page_size": 4}, r"lookup_table of shape \(2,\)"),
        ({"lookup_table": [[1]], "lengths": [3, 4], "page_size": 4}, r"lengths of shape \(2,\)"),
        ({"lookup_table": np.zeros((0, 3), int), "lengths": [], "page_size": 4}, r"shape \(0, 3\): at least one"),
        ({"lookup_table": np.zeros((1, 0), int), "lengths": [0], "page_size": 4}, r"shape \(1, 0\): at least one"),
        ({"lookup_table": [[1]], "lengths": [1.5], "page_size": 4}, r"lengths \[1.5\] are not numbers of tokens"),
        ({"lookup_table": [[1]], "lengths": [-1], "page_size": 4}, r"lengths \[-1\] are not numbers of tokens"),
        ({"lookup_table": [[1]], "lengths": [3]}, "page_size is None"),
        ({"lookup_table": [[1]], "lengths": [5], "page_size": 4}, "sequence 0 has 5 tokens"),
        ({"lookup_table": [[1, -1]], "lengths": [5], "page_size": 4}, r"pages \[1, -1\]"),
        ({"lookup_table": [[1]], "lengths": [3], "page_size": 4, "token": (0, 3)}, r"token is \(0, 3\): must be one"),
        ({"lookup_table": [[1]], "lengths": [3], "page_size": 4, "names": []}, r"names \[\] are not one for each"),
    ],
)
def test_bad_input_is_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_page_table(**kwargs)
