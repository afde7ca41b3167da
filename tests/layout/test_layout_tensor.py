"""LayoutTensor: the legacy rules by default. Rests on the values that compiled programs printed for LayoutTensor
(tests/data/layout_mojo.json) and on a law: with ``legacy=False`` it is a TileTensor."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from kvlab.layout import Layout, LayoutTensor, Swizzle, TileTensor
from kvlab.layout.algebra.int_tuple import int_tuple
from kvlab.memory import Memory

CASES = json.loads((Path(__file__).parent.parent / "data" / "layout_mojo.json").read_text())["cases"]
LEGACY = [case for case in CASES if case["op"] in ("lt_vectorize", "lt_distribute")]


def tree(value):
    return Layout(int_tuple(value["shape"]), int_tuple(value["stride"]))


def numbered(layout):
    memory = Memory(4 * 4096)
    memory.store(np.arange(4096) * 4, np.arange(4096, dtype=np.int32)[:, None])
    return TileTensor(memory, "int32", layout).to_layout_tensor()


@pytest.mark.parametrize("case", LEGACY, ids=lambda case: f"{case['op']}-{case['id']}")
def test_equals_the_compiled_programs(case):
    given, expected = case["inputs"], case["expected"]
    t = numbered(tree(given["layout"]))
    if math.prod(given["vector"]) > 1:
        t = t.vectorize(*given["vector"])
    if "thread_layout" in given:
        threads, swizzle = tree(given["thread_layout"]), given["swizzle"]
        if swizzle:
            swizzle = Swizzle(swizzle[0], swizzle[1] + int(math.log2(t.element_size)), swizzle[2], "int32")
        t = t.distribute(threads, np.arange(threads.size), swizzle)
    assert isinstance(t, LayoutTensor)
    values = t.load()
    lead = values.shape[: values.ndim - t.rank - 1]
    values = values.reshape(*lead, -1, t.element_size)
    want = expected.get("values", expected.get("per_thread_values"))
    assert (values[..., 0] if t.element_size == 1 else values).tolist() == want


def test_tiles_are_clipped_and_copies_do_not_cast():
    t = numbered(Layout.row_major(5, 8))
    assert t.tile((4, 8), (1, 0)).shape == (1, 8)
    with pytest.raises(ValueError, match="5, the extent of mode 0"):
        t.tile((4, 8), (1, 0), legacy=False)
    with pytest.raises(ValueError, match="a LayoutTensor does not cast"):
        t.copy_from(TileTensor.from_numpy(np.zeros((5, 8))))
    t.copy_from(TileTensor.from_numpy(np.full((5, 8), 3, np.int32)))
    assert (t.to_numpy() == 3).all()


def test_both_share_the_bytes():
    tile = TileTensor.from_numpy(np.zeros((4, 8), np.float32)).make_dynamic(0).with_valid_rows(3)
    legacy = tile.to_layout_tensor()
    assert legacy.memory is tile.memory
    assert (legacy.valid_rows, legacy.static_shape) == (3, (-1, 8))
    back = legacy.to_tile_tensor()
    assert (type(back), back.layout, back.valid_rows) == (TileTensor, tile.layout, 3)
    assert legacy.vectorize(1, 4, legacy=False).to_tile_tensor().element_size == 4
    with pytest.raises(ValueError, match="its vectors are gathered"):
        legacy.vectorize(4, 1).to_tile_tensor()
