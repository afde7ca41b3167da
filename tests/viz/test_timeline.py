"""Timelines (law: a copy is in flight from its issue to its landing; what is read in between is a mistake)."""

from __future__ import annotations

import pytest

from kvlab.staging.record.hazard_words import Hazard, Side
from kvlab.viz import draw_timeline

SVG = "{http://www.w3.org/2000/svg}"
W = (0, 1, 2, 3)
PIPELINE = [
    ("copy", "k copy", 0, W, 8192),
    ("copy", "k copy", 1, W, 8192),
    ("wait", "s_waitcnt vmcnt(2)", None, W),
    ("landed", "k copy", 0, W, 8192),
    ("barrier", "barrier 0", None, W),
    ("read", "k read", 0, W, 8192),
    ("barrier", "barrier 0", None, W),
    ("copy", "k copy", 0, W, 8192),
]


def bars(root, word: str) -> list[tuple[float, float]]:
    """Left and right of the rects whose hover ends with ``word``."""
    found = []
    for rect in root.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and (title.text or "").endswith(word):
            left = float(rect.get("x"))
            found.append((left, left + float(rect.get("width"))))
    return found


def test_copies_are_dashed_until_they_land(sound, overlaps) -> None:
    picture = draw_timeline(PIPELINE)
    root = sound(picture)
    flying, landed = bars(root, "\nin flight"), bars(root, "\nlanded")
    assert (len(flying), len(landed)) == (3, 1)
    first, second, third = flying
    assert first[1] == landed[0][0]  # lands at the wait
    assert landed[0][1] == third[0]  # until the next copy into the stage
    assert second[1] >= third[1]  # never landed
    assert picture.title == "3 copies, 1 read: every read comes after its copy has landed"
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"K, stage 0", "K, stage 1", "all warps"} <= set(texts)
    assert not overlaps(picture)


def test_a_read_in_flight_is_seen_without_being_told(sound) -> None:
    wrong = [*PIPELINE, ("read", "k read", 1, W, 8192)]
    picture = draw_timeline(wrong)
    root = sound(picture)
    assert picture.title == "3 copies, 2 reads: 1 read before the copy has landed"
    assert len(bars(root, "the copy has not landed")) == 1
    right = [*PIPELINE, ("wait", "s_waitcnt vmcnt(0)", None, W), ("landed", "k copy", 1, W, 8192), wrong[-1]]
    assert "every read" in draw_timeline(right).title


def test_a_hazard_is_drawn_and_told(sound) -> None:
    hazard = Hazard("read in flight", "memory", Side("k copy", 2, 1), Side("k read", 0, 1), (0, 64), "a wait")
    picture = draw_timeline(PIPELINE, hazard=hazard)
    root = sound(picture)
    assert picture.title == "read in flight: k read by warp 0, stage 1"
    assert any("missing: a wait" in (t.text or "") for t in root.iter(f"{SVG}text"))
    assert bars(root, "missing: a wait")


def test_long_timelines_show_a_part(sound, overlaps) -> None:
    loop = [*PIPELINE[::2][:1], *PIPELINE[2:7]]  # copy, wait, landed, barrier, read, barrier
    picture = draw_timeline(loop * 40, start=50, count=60)
    assert "40 copies, 40 reads: every read" in picture.title
    texts = " ".join(t.text or "" for t in sound(picture).iter(f"{SVG}text"))
    assert "50 events before" in texts
    assert f"{5 * 40 - 110} more" in texts
    assert not overlaps(picture)


@pytest.mark.parametrize(("event", "message"), [(("copy",), "must be"), (("jump", "k", 0, W), "kind is 'jump'")])
def test_bad_events_are_refused(event: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_timeline([event])


@pytest.mark.parametrize("count", [10, 500, 5000])
def test_a_hazard_is_never_folded_away(count: int, sound) -> None:
    """However many events come before it, and whether they all fit."""
    events = [("copy", "k copy", 0, (0,), 64), ("wait", "wait_group(0)", None, (0,)), ("landed", "k copy", 0, (0,), 64)]
    hazard = Hazard("read in flight", "memory", Side("k copy", 0, 0), Side("k read", 0, 0), (0, 64), "a wait")
    picture = draw_timeline(events * count, hazard=hazard)
    assert bars(sound(picture), "missing: a wait")
