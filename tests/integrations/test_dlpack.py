"""Arrays of other libraries, by DLPack: no byte is copied, and results are of the caller's library.

Rests on the same call over NumPy arrays or torch tensors, bit for bit, and on the memory that is written. The other
library is a class that exports itself by DLPack and nothing else; JAX and CuPy do the same.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from operation_calls import call_of

from kvlab import attention
from kvlab.attention import explain
from kvlab.common.arrays import to_torch


class Exported:
    """An array that others see by DLPack alone."""

    def __init__(self, inner: Any, device: int | None = None) -> None:
        self.inner, self.device = inner, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self.inner.__dlpack_device__()
        return (kind if self.device is None else self.device), number


class Array(Exported):
    """With a namespace that takes results, as the array API has it."""

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda array: Array(np.from_dlpack(array)))


def exported(kind: type[Exported], arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: kind(x) if hasattr(x, "__dlpack__") else x for name, x in arguments.items()}


def bits(value: Any) -> list[bytes]:
    parts = value if isinstance(value, tuple) else () if value is None else (value,)
    return [np.ascontiguousarray(getattr(part, "inner", part)).tobytes() for part in parts]


@pytest.mark.parametrize("operation", ["mha_decode_paged", "mha_prefill", "mla_prefill_ragged", "merge_states"])
def test_results_are_of_the_callers_library(operation: str) -> None:
    plain, others = call_of(operation), exported(Array, call_of(operation))
    out, lse = getattr(attention, operation)(**others, return_lse=True)
    expected = getattr(attention, operation)(**plain, return_lse=True)
    assert out is others["out"]
    assert type(lse) is Array
    assert bits((out, lse)) == bits(expected)  # out was written where it lies
    del others["out"], plain["out"]
    first, *rest = others.values()
    if operation == "mha_decode_paged":  # by position, too
        fresh = attention.mha_decode_paged(first, *rest[:4])
        assert type(fresh) is Array
        assert bits(fresh) == bits(attention.mha_decode_paged(*list(plain.values())[:5]))
        assert explain(attention.mha_decode_paged, first, *rest[:4]).reason == "NumPy arrays"


def test_a_store_writes_the_callers_memory() -> None:
    plain, others = call_of("kv_store_paged"), call_of("kv_store_paged")
    arrays = exported(Exported, others)
    assert attention.kv_store_paged(**arrays) is None
    attention.kv_store_paged(**plain)
    assert bits(others["k_cache"]) == bits(plain["k_cache"])
    assert bits(others["v_cache"]) == bits(plain["v_cache"])
    others["k_cache"].flags.writeable = False
    with pytest.raises(ValueError, match="k_cache is read-only"):
        attention.kv_store_paged(**arrays)


def test_dtypes_that_numpy_lacks_go_to_torch() -> None:
    """Of a library without ``from_dlpack`` the result is a tensor."""
    arguments = call_of("merge_states", to_torch) | {"backend": "emulator"}
    arguments["outs"] = arguments["outs"].bfloat16()
    del arguments["out"]
    out, lse = attention.merge_states(**exported(Exported, arguments))
    expected = attention.merge_states(**arguments)
    assert type(out) is torch.Tensor
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_what_cannot_be_taken_is_refused() -> None:
    good = exported(Array, call_of("merge_states"))
    good["lses"] = Exported(np.zeros((3, 5, 4), np.float32), device=8)  # Metal
    with pytest.raises(ValueError, match=r"^lses is a Exported on device 8 of DLPack: must be CPU memory"):
        attention.merge_states(**good)
    mixed = call_of("merge_states") | {"lses": good["lses"]}
    with pytest.raises(ValueError, match="lses is a Exported: must be a NumPy array or torch tensor"):
        attention.merge_states(**mixed)


def test_a_plan_of_their_lengths() -> None:
    lengths, starts = np.array([70, 9]), np.array([0, 1, 5])
    found, expected = (
        attention.plan(kind(lengths), (kind(starts), 5), q_heads=4, kv_heads=2) for kind in (Exported, np.asarray)
    )
    assert (found.units == expected.units).all()
