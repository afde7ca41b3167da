"""Operations inside what torch.compile is given: the numbers of the eager call, and nothing of theirs is traced.

Rests on the eager call of the same module, bit for bit, and on the graphs that Dynamo hands to its backend.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from operation_calls import OPERATIONS, call_of

from kvlab import attention
from kvlab.attention import Rope
from kvlab.cache import PagedKVCacheCollection
from kvlab.common.arrays import to_torch


class Around(torch.nn.Module):
    """A bigger module: arithmetic of its own before and behind each of two calls of an operation."""

    def __init__(self, operation: str, arguments: dict[str, Any], first: str) -> None:
        super().__init__()
        self.function, self.arguments, self.first = getattr(attention, operation), arguments, first
        self.behind = torch.nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        x = x * 1.0
        once = self.function(**self.arguments, **{self.first: x})
        x = x + 1
        twice = self.function(**self.arguments, **{self.first: x})
        return once, twice, self.behind(x.reshape(-1)[:3]).relu()


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, tuple):
        return [t for part in value for t in tensors_of(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def written(arguments: dict[str, Any]) -> list[torch.Tensor]:
    """What a call may write."""
    cache = arguments.get("cache")
    given = [arguments.get(name) for name in ("out", "k_cache", "v_cache")]
    return [t for t in (*given, cache if isinstance(cache, torch.Tensor) else getattr(cache, "blocks", None))
            if t is not None]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_compiled(operation: str) -> None:
    """With the emulator: what runs inside does not matter to Dynamo."""
    first = next(name for name in ("q", "k", "latent", "outs") if name in call_of(operation))
    results, graphs = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([node.stack_trace or "" for node in graph.graph.nodes])
        return graph.forward

    for compiled in (False, True):
        torch.manual_seed(1)
        torch._dynamo.reset()
        arguments = call_of(operation, to_torch) | {"backend": "emulator"}
        if "streaming" in operation:
            arguments |= {"arch": "gfx950"}
        if "store" not in operation:
            arguments["return_lse"] = True
        x = arguments.pop(first)
        module = Around(operation, arguments, first)
        call = torch.compile(module, backend=backend) if compiled else module
        with torch.no_grad():
            found = call(x)
        results.append([t.clone() for t in (*tensors_of(found), *written(arguments))])
    assert len(results[0]) == len(results[1]) >= 1
    for eager, got in zip(*results, strict=True):
        assert torch.equal(eager.view(torch.uint8), got.view(torch.uint8))
    assert len(graphs) == 3, "before, between and behind the two calls"
    assert not [trace for graph in graphs for trace in graph if "kvlab/attention" in trace]


def test_objects_made_inside() -> None:
    """Caches and angles that the compiled function itself makes."""
    graphs: list[list[str]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([node.stack_trace or "" for node in graph.graph.nodes])
        return graph.forward

    decode, store = call_of("mha_decode", to_torch), call_of("kv_store_paged", to_torch)
    cache, turn = decode["cache"], store["rope"]

    def step(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        pool = PagedKVCacheCollection(cache.blocks, cache.cache_lengths, cache.lookup_table, 1, 33)
        out = attention.mha_decode(q * 1.0, pool.with_lengths(cache.cache_lengths + 0, 1), backend="emulator")
        rope = Rope(turn.cos, turn.sin)
        attention.kv_store_paged(
            k * 1.0, store["v"], store["k_cache"], store["v_cache"], store["slot_mapping"], rope=rope,
            positions=store["positions"], backend="emulator",
        )
        return out + 1

    expected = step(decode["q"], store["k"]), store["k_cache"].clone()
    store["k_cache"][...] = call_of("kv_store_paged", to_torch)["k_cache"]
    torch._dynamo.reset()
    got = torch.compile(step, backend=backend)(decode["q"], store["k"])
    assert torch.equal(got, expected[0])
    assert torch.equal(store["k_cache"], expected[1])
    assert graphs
    assert not [trace for graph in graphs for trace in graph if "kvlab/attention/" in trace or "kvlab/cache" in trace]


def test_importing_kvlab_does_not_import_torch() -> None:
    code = "import sys, kvlab.attention, kvlab.viz, kvlab.mirror; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
