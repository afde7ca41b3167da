"""Layouts, swizzles and views as the Mojo layout package computes them. Rests on values printed by compiled programs
(tests/data/layout_mojo.json names the versions); the storage holds its own element numbers, so values are offsets."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest

from kvlab.layout import Layout, Swizzle, TileTensor
from kvlab.layout.algebra.int_tuple import crd2idx, idx2crd, int_tuple, prefix_product
from kvlab.memory import AddressSpace, Memory

CASES = json.loads((Path(__file__).parent.parent / "data" / "layout_mojo.json").read_text())["cases"]
# Undefined behaviour in the original: a tile past the end (55), tiles of nested modes that are larger than the inner
# mode or past the outer one (59, 60, 61), vectors down a column, whose accesses are not aligned (72, 74, 93).
UNDEFINED = {55, 59, 60, 61, 72, 74, 93}


def cases(*ops):
    return [pytest.param(case["inputs"], case["expected"], id=f"{case['op']}-{case['id']}") for case in of(*ops)]


def of(*ops):
    return [case for case in CASES if case["op"] in ops]


def numbered(layout, unsafe):
    """A tensor of int32 whose element at offset k is k."""
    memory = Memory(4 * 4096, space=AddressSpace.GLOBAL, unsafe=unsafe)
    memory.image(np.int32)[:] = np.arange(4096)
    memory.written[:] = True
    return TileTensor(memory, np.int32, layout)


def view(inputs, unsafe=True):
    """The view that the inputs of a case describe, for all its threads at once where it distributes."""
    tensor = numbered(Layout(int_tuple(inputs["layout_shape"]), int_tuple(inputs["layout_stride"])), unsafe)
    if "tile" in inputs:
        strides = inputs.get("stride_layout_shape")
        tensor = tensor.tile(inputs["tile"], inputs["coord"], stride_layout=strides)
    if inputs.get("vector"):
        tensor = tensor.vectorize(*inputs["vector"])
    if "thread_shape" in inputs:
        threads = Layout(int_tuple(inputs["thread_shape"]), int_tuple(inputs["thread_stride"]))
        swizzle = inputs["swizzle"]
        if swizzle:
            bits, base, shift = swizzle
            # The original counts logical elements; here the unit is the scalar: vectors of w raise the base by log2 w.
            swizzle = Swizzle(bits, base + int(math.log2(tensor.element_size)), shift, np.int32)
        tensor = tensor.distribute(threads, np.arange(threads.size), swizzle)
    return tensor


def values(loaded, element_size):
    """As the cases list them: elements in lexicographic order, vectors as lists."""
    return loaded[..., 0].tolist() if element_size == 1 else loaded.tolist()


def flat(tensor, lead=0):
    loaded = tensor.load()
    return values(loaded.reshape(*loaded.shape[:lead], -1, tensor.element_size), tensor.element_size)


@pytest.mark.parametrize("inputs, expected", cases("layout"))
def test_layout(inputs, expected):
    layout = Layout(int_tuple(expected["shape"]), int_tuple(expected["stride"]))
    assert (layout.size, layout.cosize) == (expected["size"], expected["static_cosize"])
    assert layout(np.arange(layout.size)).tolist() == expected["colex_offsets"]
    assert layout.offsets().T.reshape(-1).tolist() == expected["colex_offsets"]
    ctor, _, extents = inputs["ctor"].rstrip("]").partition("[")
    if ctor in ("row_major", "col_major") and extents.replace(",", "").isdecimal():
        assert getattr(Layout, ctor)(*map(int, extents.split(","))) == layout


@pytest.mark.parametrize(
    "inputs, expected", cases("values", "tile", "tile_stride_layout", "tile_with_offset", "vectorize")
)
@pytest.mark.filterwarnings("ignore:vectorize")
def test_view(inputs, expected):
    tensor = view(inputs)
    if "shape" in expected:
        assert tensor.layout == Layout(int_tuple(expected["shape"]), int_tuple(expected["stride"]))
        assert tensor.offset == expected.get("base_offset", expected.get("offset", 0))
        assert tensor.element_size == expected.get("element_size", 1)
    assert flat(tensor) == expected["values"]


@pytest.mark.parametrize("inputs, expected", cases("transpose"))
def test_transpose(inputs, expected):
    tensor = view(inputs).transpose()
    assert tensor.layout == Layout(int_tuple(expected["shape"]), int_tuple(expected["stride"]))
    assert flat(tensor) == expected["values"]


@pytest.mark.parametrize("inputs, expected", cases("distribute", "tile_vectorize_distribute"))
@pytest.mark.filterwarnings("ignore:vectorize")
def test_distribute(inputs, expected):
    tensor = view(inputs)
    assert tensor.layout == Layout(int_tuple(expected["shape"]), int_tuple(expected["stride"]))
    assert flat(tensor, lead=1) == expected["per_thread_values"]


@pytest.mark.parametrize("inputs, expected", cases("distribute_with_offset"))
def test_distribute_offsets(inputs, expected):
    assert view(inputs).offset.tolist() == expected["offsets"]


@pytest.mark.parametrize("inputs, expected", cases("swizzle"))
def test_swizzle(inputs, expected):
    swizzle = Swizzle(inputs["bits"], inputs["base"], inputs["shift"], "byte")
    assert (swizzle.yyy_mask, swizzle.zzz_mask, swizzle.period) == (
        expected["yyy_mask"],
        expected["zzz_mask"],
        expected["size"],
    )
    assert swizzle(np.arange(inputs["n"])).tolist() == expected["values"]
    assert [swizzle(i) for i in range(inputs["n"])] == expected["values"]


@pytest.mark.parametrize("inputs, expected", cases("crd2idx", "idx2crd", "prefix_product"))
def test_int_tuple(inputs, expected):
    shape = int_tuple(inputs["shape"])
    if "crd" in inputs:
        assert crd2idx(int_tuple(inputs["crd"]), shape, int_tuple(inputs["stride"])) == expected["idx"]
    elif "idx" in inputs:
        assert idx2crd(inputs["idx"], shape) == int_tuple(expected["crd"])
    else:
        assert prefix_product(shape) == int_tuple(expected["tuple"])


def test_safe_memory_refuses_undefined_behaviour_and_nothing_else():
    """A law: on a safe memory every case either gives the same values or raises, and those that raise are listed."""
    refused = set()
    for case in of("values", "tile", "tile_stride_layout", "vectorize", "distribute", "tile_vectorize_distribute"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tensor = view(case["inputs"], unsafe=False)
                tensor.load()
            except ValueError:
                refused.add(case["id"])
    assert refused == UNDEFINED
