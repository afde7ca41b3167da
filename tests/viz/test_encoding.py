"""Triton's encodings draw themselves: every cell names what the encoding itself maps there (law: its linear layout, or
its offsets, evaluated everywhere)."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from kvlab.layout.encodings import (
    AMDMFMALayout,
    AMDRotatingSharedLayout,
    AMDWMMALayout,
    BlockedLayout,
    DistributedLinearLayout,
    DotOperandLayout,
    NVMMADistributedLayout,
    NVMMASharedLayout,
    PaddedSharedLayout,
    SharedLinearLayout,
    SliceLayout,
    SwizzledSharedLayout,
)
from kvlab.viz import draw, draw_encoding, save

MMA = NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
BLOCKED = BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
REGISTERS = {  # encoding -> the shape that shows its pattern
    BLOCKED: (8, 64),
    BlockedLayout([1, 1, 4], [2, 4, 4], [1, 2, 2], [2, 1, 0]): (2, 8, 32),
    SliceLayout(1, BLOCKED): (8,),
    SliceLayout(0, BLOCKED): (64,),
    DistributedLinearLayout([[1]], [[2], [4]], [[8]], [], [16]): (16,),
    MMA: (32, 16),
    NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]): (64, 32),
    DotOperandLayout(0, MMA, 2): (32, 16),
    DotOperandLayout(1, MMA, 4): (32, 16),
    DotOperandLayout(0, BLOCKED, 0): (8, 16),
    AMDMFMALayout(4, [32, 32, 16], True, [2, 1]): (64, 32),
    DotOperandLayout(0, AMDMFMALayout(4, [16, 16, 32], False, [1, 2]), 8): (16, 64),
    AMDWMMALayout(2, False, warps_per_cta=[2, 2]): (32, 32),
    AMDWMMALayout(1, True, warp_bases=[[0, 1], [1, 0]]): (32, 32),
    DotOperandLayout(1, AMDWMMALayout(2, False, warps_per_cta=[2, 2]), 8): (32, 32),
}
SHARED = {
    SwizzledSharedLayout(8, 1, 8, [1, 0]): (8, 64),
    SwizzledSharedLayout(4, 2, 4, [0, 1]): (64, 8),
    SwizzledSharedLayout(8, 2, 4, [2, 1, 0]): (1, 8, 64),
    AMDRotatingSharedLayout(4, 1, 4, [1, 0]): (16, 64),
    NVMMASharedLayout(128, 16): (16, 64),
    NVMMASharedLayout(64, 16, transposed=True): (32, 16),
    NVMMASharedLayout(64, 16, rank=3): (1, 16, 32),
    NVMMASharedLayout(128, 8, fp4_padded=True): (16, 64),
    NVMMASharedLayout(0, 32): (16, 32),
    PaddedSharedLayout.with_identity_for([[64, 8]], (16, 64), (1, 0)): (16, 64),
    PaddedSharedLayout.with_identity_for([[32, 4], [128, 2]], (16, 32), (1, 0)): (16, 32),
    SharedLinearLayout([[0, 1], [0, 2], [0, 4], [1, 0], [2, 4], [4, 2]]): (8, 8),
}
NAMES = {"ids": lambda encoding: type(encoding).__name__}


@pytest.mark.parametrize("encoding", REGISTERS, **NAMES)
def test_registers(encoding, sound, hovers, overlaps) -> None:
    """Every lane and warp has its place on the pattern's shape; each cell names the lowest thread and register."""
    assert encoding.pattern_shape() == REGISTERS[encoding]
    layout = encoding.to_linear_layout(encoding.pattern_shape())
    picture = draw(encoding)
    assert not overlaps(picture)
    lanes = layout.in_dims["lane"]
    thread, register = np.indices((lanes * layout.in_dims["warp"], layout.in_dims["register"]))
    place = layout(register=register, lane=thread % lanes, warp=thread // lanes)
    want = {}
    for (t, r), *at in zip(np.ndindex(thread.shape), *(axis.ravel().tolist() for axis in place), strict=True):
        want.setdefault(tuple(at), (t, r))
    found = 0
    for title in hovers(sound(picture)):
        row, column, t, r = map(
            int, re.fullmatch(r"row (\d+), column (\d+)\nthread (\d+), register r(\d+)", title).groups()
        )
        sizes = encoding.pattern_shape()
        at = (column,) if len(sizes) == 1 else (row, *np.unravel_index(column, sizes[1:]))
        assert want[tuple(map(int, at))] == (t, r)
        found += 1
    assert found == len(want) or found > 100  # a large tile folds
    assert encoding._repr_svg_() == picture.svg


@pytest.mark.parametrize("encoding", SHARED, **NAMES)
def test_shared_memory(encoding, sound, hovers, overlaps) -> None:
    """Each cell is at the byte where the encoding puts its first element; gaps are where it puts nothing."""
    shape = encoding.pattern_shape()
    assert shape == SHARED[encoding]
    picture = draw(encoding)
    assert not overlaps(picture)
    size = getattr(encoding, "element_bitwidth", 16) // 8
    offsets = encoding.offsets(shape).reshape([n for n in shape if n > 1])
    if "its transpose" in picture.title:
        offsets = offsets.T
    slots = [
        (int(m[1]), m[2]) for title in hovers(sound(picture)) if (m := re.match(r"byte (\d+), bank \d+\n(.*)", title))
    ]
    run = min(b - a for (a, _), (b, _) in itertools.pairwise(slots) if b > a) // size
    places = set()
    for byte, told in slots:
        if (m := re.match(r"row (\d+) of the tile, (?:vector|piece) (\d+)", told)) is not None:
            assert byte == size * offsets[int(m[1]), run * int(m[2])]
            places.update(range(byte // size, byte // size + run))
        else:
            assert told.startswith(("nobody", "outside"))
    assert places == set(offsets.ravel().tolist())
    assert encoding._repr_svg_() == picture.svg


def test_another_shape_version_thread_and_file(tmp_path) -> None:
    assert (
        draw(BLOCKED, shape=(16, 64)).title == "BlockedLayout on 16 x 64: 64 threads hold 16 each, every element once"
    )
    assert "thread 3" in draw(MMA, thread=3).svg
    plain = NVMMASharedLayout(0, 16, transposed=True)
    titles = [draw_encoding(plain, (16, 64), triton_version=v).title for v in ("3.6.0", "3.9.0")]
    assert ["its transpose" in title for title in titles] == [False, True]
    wide = draw(SwizzledSharedLayout(4, 1, 8, [1, 0]), shape=(8, 32), element_bytes=4)
    assert wide.title == "SwizzledSharedLayout on 8 x 32: vector 0 of its first 8 rows lies in 8 bank groups"
    file = save(MMA, tmp_path / "mma.svg", shape=(64, 64))
    assert "NVMMADistributedLayout on 64 x 64" in file.read_text()


def test_what_cannot_be_drawn(tmp_path) -> None:
    with pytest.raises(ValueError, match="must be of rank 2"):
        draw(BLOCKED, shape=(64,))
    with pytest.raises(ValueError, match="thread is 999: must be one of the 64 threads"):
        draw(BLOCKED, thread=999)
    with pytest.raises(ValueError, match="shape cannot change a finished picture"):
        save(draw(BLOCKED), tmp_path / "a.svg", shape=(8, 8))
