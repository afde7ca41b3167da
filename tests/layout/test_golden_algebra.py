"""The algebra and swizzle factories as the Mojo layout package computes them. Rests on values printed by compiled
programs (tests/data/layout_mojo.json names the versions), with ``rule="legacy"`` where that package is not CuTe."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvlab import layout as kl
from kvlab.layout import ComposedLayout, Layout, Swizzle
from kvlab.layout.algebra.int_tuple import int_tuple
from kvlab.layout.algebra.tree_ops import shape_div

CASES = json.loads((Path(__file__).parent.parent / "data" / "layout_mojo.json").read_text())["cases"]


def tree(value):
    return Layout(int_tuple(value["shape"]), int_tuple(value["stride"]))


def parts(inputs):
    return [tree(part) for part in inputs["tiler"]]


OPERATIONS = {
    "coalesce": lambda i: kl.coalesce(tree(i["a"])),
    "coalesce_keep_rank": lambda i: kl.coalesce(tree(i["a"]), keep_rank=True),
    "composition": lambda i: kl.composition(tree(i["a"]), tree(i["b"])),
    "complement": lambda i: kl.complement(tree(i["a"]), i["n"]),
    "logical_divide": lambda i: kl.logical_divide(tree(i["a"]), tree(i["b"])),
    "logical_divide_bymode": lambda i: kl.logical_divide(tree(i["a"]), parts(i), rule="legacy"),
    "zipped_divide": lambda i: kl.zipped_divide(tree(i["a"]), tree(i["b"]), rule="legacy"),
    "zipped_divide_bymode": lambda i: kl.zipped_divide(tree(i["a"]), parts(i), rule="legacy"),
    "logical_product": lambda i: kl.logical_product(tree(i["a"]), tree(i["b"])),
    "blocked_product": lambda i: kl.blocked_product(tree(i["a"]), tree(i["b"])),
    "tile_to_shape": lambda i: kl.tile_to_shape(
        tree(i["a"]), int_tuple(i["shape"]), int_tuple(i["order"]) if "order" in i else None
    ),
    "right_inverse": lambda i: kl.right_inverse(tree(i["a"]), rule="legacy"),
    "make_ordered_layout": lambda i: kl.make_ordered_layout(int_tuple(i["shape"]), int_tuple(i["order"])),
    "upcast": lambda i: kl.upcast(tree(i["a"]), i["factor"]),
    "downcast": lambda i: kl.downcast(tree(i["a"]), i["factor"], rule="legacy"),
    "zip_modes": lambda i: kl.zip_modes(tree(i["a"]), tree(i["b"])),
    "make_layout": lambda i: kl.make_layout(tree(i["a"]), tree(i["b"])),
}


def cases(*ops):
    return [pytest.param(c, id=f"{c['op']}-{c['id']}") for c in CASES if c["op"] in ops]


@pytest.mark.parametrize("case", cases(*OPERATIONS))
def test_algebra(case):
    expected, result = case["expected"], OPERATIONS[case["op"]](case["inputs"])
    assert result == tree(expected["layout"])
    assert (result.size, kl.cosize(result, rule="legacy")) == (expected["size"], expected["cosize"])
    assert result(np.arange(result.size)).tolist() == expected["colex_offsets"]


@pytest.mark.parametrize("case", cases("composed_layout"))
def test_composed_layout(case):
    i, expected = case["inputs"], case["expected"]
    composed = ComposedLayout(tree(i["layout"]), Swizzle(i["bits"], i["base"], i["shift"], "byte"), i["offset"])
    assert (composed.size, kl.cosize(composed, rule="legacy")) == (expected["size"], expected["cosize"])
    assert composed(np.arange(composed.size)).tolist() == expected["colex_offsets"]


@pytest.mark.parametrize("case", cases("make_swizzle_2d", "make_swizzle_tma", "make_ldmatrix_swizzle"))
def test_swizzle_factories(case):
    i, expected = case["inputs"], case["expected"]
    if "mode" in i:
        swizzle = kl.make_tma_swizzle(i["mode"], i["dtype"])
        assert swizzle == kl.make_tma_swizzle(i["mode_int"], i["dtype"])
    elif "num_rows" in i:
        swizzle = kl.make_swizzle(i["num_rows"], i["row_size"], i["access_size"], "byte")
    else:
        swizzle = kl.make_ldmatrix_swizzle(i["dtype"], i["row_size"], i["log2_vector_width"])
    assert {name: getattr(swizzle, name) for name in ("bits", "base", "shift")} == expected


@pytest.mark.parametrize("case", cases("shape_div"))
def test_shape_div(case):
    assert shape_div(int_tuple(case["inputs"]["a"]), case["inputs"]["b"]) == int_tuple(case["expected"]["tuple"])
