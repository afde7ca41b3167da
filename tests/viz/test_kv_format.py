"""Pictures of formats, transfers and audits. Rests on addresses: a cell tells what lies at its byte."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kvlab.formats import Format, agree, audit, known_format, transfer
from kvlab.viz import draw


def test_a_row_shows_every_byte_and_what_lies_there(sound: Any) -> None:
    row = known_format("mla.656", layers=1, page_size=4)
    picture = row.draw(row=True)
    told = dict(re.findall(r"<title>byte (\d+): ([^<]+)</title>", picture.svg))
    sound(picture)
    assert len(told) == 656
    assert told["511"] == "latent e4m3, slot 0, dim 511"
    assert told["516"] == "latent_scale f32, slot 0, dim 128"
    assert told["655"] == "rope bf16, slot 0, dim 63"


def test_a_page_begins_at_its_own_bytes_and_its_padding_is_hatched(sound: Any) -> None:
    page = known_format("mla.584", layers=2, pages=2, page_size=2)
    picture = page.draw(page=1, layer=1)
    sound(picture)
    first = page.where("latent", layer=1, page=1)
    assert f"byte {first}: latent" in picture.svg
    assert ">padding<" in picture.svg
    tail = page.where("latent_scale", layer=1, page=1, slot=0, dim=384)
    assert f"byte {tail}: latent_scale e8m0, slot 0, dim 384" in picture.svg
    assert f"byte {tail + 1}: padding" in picture.svg
    assert f"byte {first + page.nbytes // 4 - 1}: padding" in picture.svg  # up to the next page


def test_bytes_that_lie_apart_are_listed_beside_each_other(sound: Any) -> None:
    heads_first = Format.parse("head:2 layer:8 page:4 slot:2 dim:4 k.bf16")
    picture = heads_first.draw(page=3, layer=5)
    sound(picture)
    shown = {int(byte) for byte in re.findall(r"<title>byte (\d+): k", picture.svg)}
    where = {heads_first.where("k", layer=5, page=3, slot=s, head=h, dim=d) for s in (0, 1) for h in (0, 1) for d in
             range(4)}
    assert shown == where | {byte + 1 for byte in where}


def test_a_page_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"page is 4: must be one of the 4 pages"):
        known_format("mla.656").draw(page=4)


def test_an_agreement_shows_both_and_marks_the_first_difference(sound: Any) -> None:
    writer = Format.parse("slot:4 dim/2:4 dim:2 k.s4", name="low first")
    reader = Format.parse("slot:4 dim/2:4 -dim:2 k.s4")
    picture = draw(agree(writer, reader))
    sound(picture)
    assert picture.title == "k of slot 0, dim 0: written to the low half of byte 0, read from the high half of byte 0"
    assert ">writer: low first<" in picture.svg
    same = draw(agree(writer, writer))
    sound(same)
    assert same.title == "Every element lies at the same place"


def test_a_transfer_shows_each_pair_and_says_what_is_lost(sound: Any) -> None:
    one = known_format("vllm.LBNHC", pages=2, heads=3, dim=64)
    plan = transfer(one, one, degrees=(2, 4), tokens=20)
    picture = draw(plan)
    sound(picture)
    assert picture.title.endswith("each byte once")
    for (here, there), copies in plan.pairs.items():
        assert f"rank {here} to rank {there}: {len(copies)} copies, {copies.nbytes} bytes" in picture.svg
    pairs = dict(plan.pairs)
    lost = pairs.popitem()[1]
    wrong = draw(type(plan)(plan.source, plan.target, plan.tokens, pairs))
    assert wrong.title.endswith(f"{lost.nbytes} bytes lost, 0 twice")


def test_a_picture_shows_flaws_where_they_are(sound: Any) -> None:
    cache = np.ones((200, 16, 2, 8), np.float32)
    cache[150, 3] = np.inf
    picture = draw(audit(cache, [[150, 7, -1], [7, 1, -1]], [20, 30]))
    sound(picture)
    assert picture.title == "2 flaws: owners 1, inf 1"
    assert "page 150, slot 3: inf: k of page 150, slot 3, head 0, dim 0, and 15 more of the slot" in picture.svg
    assert "page 7, slot 0: holds a token" in picture.svg
    right = draw(audit(np.ones((2, 4, 1, 8), np.float32), [[1]], [3]))
    sound(right)
    assert right.title == "Nothing is wrong: 3 of 8 slots hold tokens"
