"""Compile-time parameters of the wrong kind. Rests on the rule that an error begins with the caller's argument."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from kvlab.layout import Layout, Swizzle
from kvlab.staging import DecodeKVBufferParams, KVBufferParams, KVMmaOpParams, TiledMmaOp, TiledTensorCore

SIZES = {"BN": 128, "WN": 32, "BK": 32, "num_threads": 256, "depth": 64}
CORE: dict[str, Any] = {"out_type": "fp32", "in_type": "bf16", "shape": (16, 16, 32), "transpose_b": True}
GOOD: dict[type, dict[str, Any]] = {
    KVBufferParams: {"dtype": "bf16", "mma_shape": (16, 16, 32), "swizzle": None, **SIZES, "kv_num_heads": 1,
                     "transpose": True},
    DecodeKVBufferParams: {"dtype": "bf16", "kv_tile_layout": Layout.row_major(128, 64), "swizzle": None, **SIZES,
                           "tensor_core_mma": TiledTensorCore(**CORE, group_size=1)},
    KVMmaOpParams: {"in_type": "bf16", "mma_shape": (16, 16, 32), "num_mmas": 2, "num_k_mmas": 1, "num_k_tiles": 1,
                    "BN": 128, "BK": 32},
    TiledMmaOp: CORE,
    TiledTensorCore: {**CORE, "group_size": 1},
}
NONE = {"swizzle", "cache_depth", "reg_chunk_depth", "smem_depth", "reg_chunk_keys", "bk_smem", "config", "out_type"}
BAD = ["x", 1.5, [1], None, object, True, -1, np.float32(3), Swizzle(3, 0, 3, "fp64"), (16, 16), (16, 16.0, 32)]
CASES = [(kind, field.name) for kind in GOOD for field in fields(kind)]


@pytest.mark.parametrize("kind,name", CASES, ids=[f"{kind.__name__}.{name}" for kind, name in CASES])
def test_what_is_of_the_wrong_kind_is_named(kind: Any, name: str) -> None:
    assert isinstance(kind(**GOOD[kind]), kind)
    good = getattr(kind(**GOOD[kind]), name)
    refused = 0
    for bad in BAD:
        if (bad is None and name in NONE) or (isinstance(bad, bool) and isinstance(good, bool)):
            continue
        if isinstance(bad, Swizzle) and name == "swizzle":
            bad = Swizzle(3, 0, 3, "byte") if kind is KVBufferParams else 3
        with pytest.raises((TypeError, ValueError)) as error:
            kind(**{**GOOD[kind], name: bad})
        said = str(error.value)
        assert said.startswith(name), said
        refused += 1
    assert refused >= len(BAD) - 1


def test_numbers_of_numpy_are_taken() -> None:
    plain = KVBufferParams(**GOOD[KVBufferParams])
    sizes = {name: np.int32(size) for name, size in SIZES.items()}
    numpy = KVBufferParams(**{**GOOD[KVBufferParams], **sizes, "mma_shape": [16, 16, np.int64(32)]})
    assert numpy == plain
    assert hash(numpy) == hash(plain)
    assert type(numpy.BN) is int
