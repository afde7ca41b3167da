"""The chart of a budget. Law: widths are as the bytes, and what is written is what the budget says."""

from __future__ import annotations

import re

import pytest

from kvlab.formats import kv_budget
from kvlab.viz import draw_kv_budget


def test_bars_are_as_wide_as_their_bytes(sound, overlaps) -> None:
    budget = kv_budget("nemotron-h-8b", uniform_pages=True, align=1 << 21)
    picture = draw_kv_budget(budget, tokens=1000)
    sound(picture)
    assert not overlaps(picture)
    found = re.findall(r'<rect [^>]*width="([\d.]+)"[^>]*><title>[^<]*: ([\d,]+) bytes of', picture.svg)
    found = [(wide, size.replace(",", "")) for wide, size in found]
    parts = [size for group in budget.groups for size in budget.request(1000, group)[1:] if size]
    assert [int(size) for _, size in found] == parts
    assert len(parts) == 5  # a state has no slots
    scale = max(float(wide) for wide, _ in found) / max(parts)
    for wide, size in found:
        assert float(wide) == pytest.approx(scale * int(size), abs=0.06)
    assert f"holds {budget.request(1000).nbytes:,} bytes on one rank" in picture.title


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="tokens is -1"):
        draw_kv_budget(kv_budget("llama-3.1-8b"), tokens=-1)
