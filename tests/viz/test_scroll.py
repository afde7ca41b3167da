"""The scroll of a byte. Rests on the path's own numbers and on the sources of kernel and emulator."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kvlab.viz import BytePath, ByteScroll

PATH = BytePath(
    name="K", sequence=0, token=17, head=0, element=3, element_bytes=2, page_table=(4, 2), page_size=16, depth=64,
    dram_byte=4230, tile=(64, 64), tile_at=(17, 3), shared_byte=2198, plain_byte=2182, warp=2, lane=5, register=1,
    lanes=32, registers=4, atom="mma.sync.m16n8k16.bf16", shape=(16, 8, 16), operand="b", operand_at=(3, 1), packed=2,
)


def test_six_places_each_with_the_byte(tmp_path: Path) -> None:
    scroll = ByteScroll(PATH, ml_dtypes.bfloat16(-1.46875))
    text = scroll.save(tmp_path / "scroll.html").read_text(encoding="utf-8")
    headings = re.findall(r'aria-level="3">(\d)&ensp;(.*?)</div>', text)
    assert headings == [(str(n), name) for n, (name, _, _) in enumerate(scroll.places, 1)]
    assert len(re.findall(r"0xbfbc = -1\.46875", text)) == 5
    assert "<p>Byte 2,198, bank 5. Without the swizzle: byte 2,182, bank 1 (dashed).</p>" in text
    assert "<p>B[3, 1] of mma.sync.m16n8k16 .bf16.</p>" in text
    assert scroll._repr_html_() in text


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="value is of float32: must have the 2 bytes"):
        ByteScroll(PATH, np.float32(1))
    with pytest.raises(ValueError, match=r"must end in \.html"):
        ByteScroll(PATH).save(tmp_path / "scroll.png")
