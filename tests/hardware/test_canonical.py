"""Canonical layouts. Rests on values printed by compiled programs (tests/data/mojo_canonical.json.gz) and on laws."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlab.hardware import (
    TensorMapSwizzle,
    internal_k_major,
    st_matrix_n_atom,
    tile_layout_k_major,
    tile_layout_mn_major,
    tile_sf_layout_k_major,
)
from kvlab.layout import Layout

RECORD = (Path(__file__).parents[1] / "data" / "mojo_canonical.json.gz").read_bytes()
GOLDEN = json.loads(gzip.decompress(RECORD))["cases"]


def of(op: str) -> Any:
    cases = [case for case in GOLDEN if case["op"] == op]
    return pytest.mark.parametrize("case", cases, ids=[f"{case['id']}" for case in cases])


def tree(nested: Any) -> Any:
    return tuple(map(tree, nested)) if isinstance(nested, list) else nested


@of("make_swizzle_tma")
def test_modes_are_the_compiled_swizzles(case: dict) -> None:
    mode = TensorMapSwizzle.of(case["inputs"]["mode"])
    swizzle = mode.swizzle(case["inputs"]["dtype"])
    assert (int(mode), mode.bytes) == (case["inputs"]["mode_int"], case["inputs"]["mode_bytes"])
    assert {key: getattr(swizzle, key) for key in case["expected"]} == case["expected"]


@of("tile_layout_k_major")
def test_k_major_is_the_compiled_one(case: dict) -> None:
    check(case, tile_layout_k_major)


@of("tile_layout_mn_major")
def test_mn_major_is_the_compiled_one(case: dict) -> None:
    check(case, tile_layout_mn_major)


def check(case: dict, function: Any) -> None:
    i, expected = case["inputs"], case["expected"]
    layout = function(i["dtype"], i["mn_dim"], i["k_dim"], i["swizzle"])
    assert (layout.shape, layout.stride) == (tree(expected["layout"]["shape"]), tree(expected["layout"]["stride"]))
    assert (layout.size, layout.cosize) == (expected["size"], expected["cosize"])
    offsets = layout(np.arange(layout.size))
    assert offsets.tolist() == expected["colex_offsets"]
    swizzle = TensorMapSwizzle.of(i["swizzle"]).swizzle(i["dtype"])
    assert [swizzle.bits, swizzle.base, swizzle.shift] == expected["swizzle_fn"]
    assert swizzle(offsets).tolist() == expected["swizzled_colex_offsets"]


@of("internal_k_major")
def test_internal_k_major_is_the_compiled_one(case: dict) -> None:
    i = case["inputs"]
    if i["BK"] > i["swizzle_bytes"] // {"bfloat16": 2, "float8_e4m3fn": 1}[i["dtype"]]:
        with pytest.warns(UserWarning, match="addresses the first one only"):
            layout = internal_k_major(**i)
    else:
        layout = internal_k_major(**i)
    assert (layout.shape, layout.stride) == (tree(case["expected"]["shape"]), tree(case["expected"]["stride"]))


def test_worked_layouts() -> None:
    """bf16 64 x 128: the specification's four."""
    assert [str(tile_layout_k_major("bf16", 64, 128, mode)) for mode in range(4)] == [
        "((8,8),(8,16)):((8,64),(1,512))",
        "((8,8),(16,8)):((16,128),(1,1024))",
        "((8,8),(32,4)):((32,256),(1,2048))",
        "((8,8),(64,2)):((64,512),(1,4096))",
    ]


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp8", "bf16", "float32"])
def test_layouts_are_dense(mode: int, dtype: str) -> None:
    """Law: every offset once; MN-major is K-major of the transposed matrix."""
    for page_dense in (False, True) if mode == 3 else (False,):
        k = tile_layout_k_major(dtype, 32, 256, mode, page_dense)
        assert (np.sort(k.offsets(), axis=None) == np.arange(k.size)).all()
        mn = tile_layout_mn_major(dtype, 256, 32, mode, page_dense)
        np.testing.assert_array_equal(mn.offsets(), k.offsets().T)


def test_scale_factors() -> None:
    """512-scalar atoms (32,(4,4)):(16,(1,4)), along K first, then M."""
    layout = tile_sf_layout_k_major(256, 256, 16)
    assert str(layout) == "((32,2),((4,4),4)):((16,2048),((1,4),512))"
    assert (np.sort(layout.offsets(), axis=None) == np.arange(layout.size)).all()


def test_stmatrix_rows() -> None:
    layout = st_matrix_n_atom(4)
    t = np.arange(128)
    np.testing.assert_array_equal(layout(t), (t % 16 + 16 * (t // 32)) * 8 + t // 16 % 2)
    assert isinstance(layout, Layout)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="BM 12 is not a multiple of 8"):
        tile_layout_k_major("bf16", 12, 64, "128B")
    with pytest.raises(ValueError, match="BK 48 of bfloat16 = 96 B is not a multiple of 128 B"):
        tile_layout_k_major("bf16", 64, 48, "128B")
    with pytest.raises(ValueError, match="MN 48 of bfloat16 = 96 B is not a multiple of 64 B"):
        tile_layout_mn_major("bf16", 48, 16, "64B")
    with pytest.raises(ValueError, match="page_dense needs swizzle 128B, not 64B"):
        tile_layout_k_major("bf16", 64, 64, "64B", page_dense=True)
    with pytest.raises(ValueError, match="swizzle_bytes is 48: must be 16, 32, 64 or 128"):
        internal_k_major("bf16", 64, 64, 48)
    with pytest.raises(ValueError, match="BM is 60: must be a multiple of 8 and BK 64 one of 32"):
        internal_k_major("bf16", 60, 64, 64)
    with pytest.raises(ValueError, match=r"BM is 64: must be a multiple of 128, BK 64 one of 4 \* SF = 64"):
        tile_sf_layout_k_major(64, 64, 16)
    with pytest.raises(ValueError, match="num_stmatrix is 0: must be at least 1"):
        st_matrix_n_atom(0)
