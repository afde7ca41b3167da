"""Operators of torch on a GPU: compiled layers, and CUDA graphs of them that are replayed with other lengths.

Rests on the eager call, bit for bit, and for the operators on ``torch.library.opcheck``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opchecks import assert_opcheck
from operation_calls import OPERATIONS, call_of

from kvlab import attention
from kvlab.attention.call import torch_ops
from kvlab.common.arrays import to_torch

pytestmark = pytest.mark.gpu


def on_gpu(array: Any) -> torch.Tensor:
    return to_torch(array).cuda()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_opcheck(operation: str) -> None:
    """Fake results have the strides of those of kernels, too."""
    assert_opcheck(operation, call_of(operation, on_gpu))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_layer(mode: str) -> None:
    """Store and decode of steps whose lengths and slots differ, in one graph; ``reduce-overhead`` is a CUDA graph."""
    torch.manual_seed(3)
    caches = [torch.zeros(8, 16, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    table = torch.tensor([[3, 1, 6], [0, 5, 2]], device="cuda", dtype=torch.int32)

    def layer(q: Any, k: Any, v: Any, kc: Any, vc: Any, slots: Any, lens: Any) -> Any:
        attention.kv_store_paged(k, v, kc, vc, slots)
        return attention.mha_decode_paged(q * 2, kc, vc, table, lens) + 1

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, graphs = torch.compile(layer, fullgraph=True, mode=mode), torch._dynamo.utils.counters
    kept = [cache.clone() for cache in caches]
    for length in (1, 17, 40):
        q, k, v = (torch.randn(2, n, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
        position, lens = length - 1, torch.tensor([length, length], device="cuda", dtype=torch.int32)
        slots = table[:, position // 16].long() * 16 + position % 16
        found = compiled(q, k, v, *caches, slots, lens).clone()
        assert torch.equal(found, layer(q, k, v, *kept, slots, lens))
        assert all(map(torch.equal, caches, kept))
    assert graphs["stats"]["unique_graphs"] == 1


def test_captured_operator() -> None:
    """An operator in a CUDA graph, replayed with other lengths."""
    arguments = call_of("mha_decode_paged", on_gpu)
    arguments.pop("out")
    lens = arguments["seq_lens"]
    values = torch_ops.OPERATORS["mha_decode_paged"].carried((), arguments)
    assert values is not None
    torch.ops.kvlab.mha_decode_paged(**values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = torch.ops.kvlab.mha_decode_paged(**values)
    for lengths in ([33, 20], [1, 48], [0, 17]):
        lens.copy_(torch.tensor(lengths))
        graph.replay()
        expected = attention.mha_decode_paged(**arguments, return_lse=True)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
