"""Tensors that require grad: refused while grad mode is on, parameters of a model taken for inference otherwise.

Rests on the same call with detached tensors, bit for bit; every floating-point argument of every operation in turn.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from operation_calls import OPERATIONS, call_of

from kvlab import attention
from kvlab.attention import Rope
from kvlab.cache import PagedKVCacheCollection
from kvlab.common.arrays import to_torch

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
WRITTEN = ("out", "k_cache", "v_cache", "cache")


def good(operation: str) -> dict[str, Any]:
    a = call_of(operation, to_torch)
    if "rope" in a:
        a["rope"] = Rope(a["rope"].cos, a["rope"].sin)
    return a


def floating(operation: str) -> list[str]:
    """The arguments that are tensors of floats, in objects too."""
    found = [n for n, x in good(operation).items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return found + [n for n, x in good(operation).items() if isinstance(x, PagedKVCacheCollection | Rope)]


def parameter(value: Any) -> Any:
    """The same as what a module holds."""
    if isinstance(value, Rope):
        return Rope(torch.nn.Parameter(value.cos), torch.nn.Parameter(value.sin))
    if isinstance(value, PagedKVCacheCollection):
        value.blocks = torch.nn.Parameter(value.blocks)
        return value
    return torch.nn.Parameter(value)


def outcome(result: Any, a: dict[str, Any]) -> list[torch.Tensor]:
    results = [] if result is None else list(result) if isinstance(result, tuple) else [result]
    kept = [getattr(a[name], "blocks", a[name]) for name in WRITTEN if name in a]
    return [t.detach().clone() for t in results + kept]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(found, expected, strict=True))


PAIRS = [pytest.param(op, name, id=f"{op}-{name}") for op in OPERATIONS for name in floating(op)]


@pytest.mark.parametrize(("operation", "name"), PAIRS)
def test_parameter(operation: str, name: str) -> None:
    function, a = getattr(attention, operation), good(operation)
    expected = outcome(function(**a, backend="emulator"), a)
    for mode in MODES.values():
        a = good(operation)
        a[name] = parameter(a[name])
        with mode():
            got = outcome(function(**a, backend="emulator"), a)
        assert same(got, expected)
    a = good(operation)
    a[name] = parameter(a[name])
    before = outcome(None, a)
    with torch.enable_grad(), pytest.raises(ValueError, match=r"requires grad: must be detached, or the call under"):
        function(**a, backend="emulator")
    assert same(outcome(None, a), before)


@pytest.mark.interpreter
@pytest.mark.parametrize("operation", ["mha_decode_paged", "mha_prefill", "mla_prefill_ragged", "kv_store_paged"])
def test_parameters_of_the_kernel(operation: str) -> None:
    """All of them at once; grad mode is told apart for calls that are otherwise of one kind."""
    function, a = getattr(attention, operation), good(operation)
    expected = outcome(function(**a), a)
    a = good(operation)
    a |= {name: parameter(a[name]) for name in floating(operation)}
    with torch.no_grad():
        got = outcome(function(**a), a)
    assert same(got, expected)
    with pytest.raises(ValueError, match="requires grad"):
        function(**a)


@pytest.mark.parametrize("transform", ["vmap", "jvp"])
@pytest.mark.parametrize("name", ["q", "k_cache", "sinks"])
def test_a_tensor_of_torch_func_is_refused_by_name(name: str, transform: str) -> None:
    """Rests on torch, whose transforms hand functions tensors without memory of their own."""
    a = good("mha_decode_paged")
    given = a.pop(name)

    def call(x: torch.Tensor) -> Any:
        return attention.mha_decode_paged(**a, **{name: x})

    with pytest.raises(ValueError, match=f"{name} is a tensor within torch.func"):
        torch.vmap(call)(given[None]) if transform == "vmap" else torch.func.jvp(call, (given,), (given,))
