"""Operations in graphs of torch: compiled, exported, on fake tensors.

Rests on the eager call of the same function, bit for bit, on the checks of torch (``torch.library.opcheck``: what a
schema says is written, is; fake results have the shapes and strides of real ones; tracing changes nothing), and on the
graphs that Dynamo hands to its backend.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from opchecks import assert_opcheck
from operation_calls import OPERATIONS, call_of
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from kvlab import attention
from kvlab.attention import Rope, masks
from kvlab.attention.call import torch_ops
from kvlab.cache import ContinuousBatchingKVCacheCollection, PagedKVCacheCollection
from kvlab.common.arrays import to_torch
from kvlab.common.torch_here import is_traced
from kvlab.staging import Traffic

REFUSAL = "in a graph of torch: must be tensors"


def good_call(operation: str, **more: Any) -> dict[str, Any]:
    """Keywords over tensors, with the emulator: what runs inside does not matter to torch."""
    machine = {"arch": "gfx950"} if "streaming" in operation else {}
    return call_of(operation, to_torch) | {"backend": "emulator"} | machine | more


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, tuple):
        return [t for part in value for t in tensors_of(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def written(arguments: dict[str, Any]) -> list[torch.Tensor]:
    """What a call may write."""
    cache = arguments.get("cache")
    given = [arguments.get(name) for name in ("out", "k_cache", "v_cache", "k_scale", "scale")]
    return tensors_of((*given, cache, getattr(cache, "blocks", None), getattr(cache, "scales", None)))


def targets(graph: Any) -> list[str]:
    """Operators of kvlab in a graph."""
    return [str(node.target) for node in graph.nodes if "kvlab" in str(node.target)]


def same(found: Any, expected: Any) -> bool:
    pairs = zip(tensors_of(found), tensors_of(expected), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


class Around(torch.nn.Module):
    """A bigger module: arithmetic of its own around two calls of an operation, one of them with ``out``."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.function, self.arguments = getattr(attention, operation), good_call(operation)
        self.first = next(name for name in ("q", "k", "latent", "outs") if name in self.arguments)
        self.x, self.more = self.arguments.pop(self.first), {}
        if "out" in self.arguments:
            self.more = {"out": self.arguments.pop("out"), "return_lse": True}

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        once = self.function(**self.arguments, **{self.first: x * 1.0})
        return once, self.function(**self.arguments, **{self.first: x + 1}, **self.more), x.reshape(-1)[:3].relu()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_compiled(operation: str) -> None:
    """In one graph, as two operators, which write what the call writes."""
    results, seen = [], []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(targets(graph.graph))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for compiled in (False, True):
        torch._dynamo.reset()
        module = Around(operation)
        call = torch.compile(module, backend=backend, fullgraph=True) if compiled else module
        found = call(module.x)
        results.append([t.clone() for t in (*tensors_of(found), *written(module.arguments | module.more))])
    assert len(results[0]) >= 2
    assert same(*map(tuple, results))
    name = f"kvlab.{operation}.default"
    assert seen == [[name, name.replace("default", "out") if "store" not in operation else name]]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_opcheck(operation: str) -> None:
    assert_opcheck(operation, good_call(operation))


def test_every_keyword_is_carried() -> None:
    """But for records of traffic and schedules."""
    for name in OPERATIONS:
        parts = torch_ops.OPERATORS[name].parts
        left = {one for one, part in parts.items() if isinstance(part, torch_ops.Nothing)}
        assert left <= {"traffic", "plan"}, name
        assert {*parts, "out", "return_lse"} >= set(getattr(attention, name).__signature__.parameters), name


def test_every_mask_is_carried() -> None:
    """Law: masks of kvlab.attention.masks are carried, a band without a bound on one side as the same keys."""
    found = {one for one in vars(masks).values() if isinstance(one, type) and issubclass(one, masks.Mask)}
    assert found - {masks.Mask} == set(torch_ops.PARTS)
    part = torch_ops.MaskParts("mask")
    for sides in ((None, -2), (-3, None), (None, None)):
        back = part.restored(part.carried(masks.BandMask(*sides)) or {})
        assert back.interval() == masks.BandMask(*sides).interval()


def test_arguments_arrive() -> None:
    """Features of every form: what a graph carries gives the eager call's bits."""
    decode, prefill = good_call("mha_decode_paged"), good_call("mha_prefill")
    store, pool = good_call("kv_store"), good_call("kv_store")["cache"]
    decode.pop("out"), prefill.pop("out")
    seen, bias = torch.tensor([30, 11]), torch.linspace(-1, 1, 96).reshape(2, 1, 1, 48)
    chunk = masks.SlidingWindowNonCausalMask(40)
    for mask in (masks.NullMask(), masks.ChunkedMask(8), masks.MaterializedMask(bias),
                 masks.AndMask(masks.SlidingWindowCausalMask(9), masks.CausalPaddingMask(seen)),
                 masks.OrMask(masks.OrMask(masks.MaterializedMask(bias), chunk), masks.BandMask(9, -2))):
        part = torch_ops.MaskParts("mask")
        back, twin = part.restored(part.carried(mask) or {}), repr(mask)
        assert repr(back) == twin
    blocks = ContinuousBatchingKVCacheCollection(
        torch.zeros(3, 2, 1, 48, 2, 64), pool.cache_lengths, torch.tensor([2, 0]), 4, 33
    )

    def calls(q: torch.Tensor, x: torch.Tensor) -> tuple[Any, ...]:
        one = decode | {"q": q}
        found = (
            attention.mha_decode_paged(**one, window=5, softcap=3, scale=1, return_lse=True, base2=True),
            attention.mha_decode_paged(**one, window=(4, None), num_splits=2, temperature=torch.arange(4) + 0.5),
            attention.mha_decode_paged(**one, mask=masks.MaterializedMask(bias), check=True),
            attention.mha_decode_paged(q, *(decode[n] for n in ("k_cache", "v_cache", "block_table", "seq_lens")),
                                       mask=masks.ChunkedMask(16), backend="reference"),
            attention.mha_prefill(**prefill | {"q": x}, window=[3, None], causal=False, max_seqlen_q=4),
        )
        attention.kv_store(**store | {"cache": blocks, "rope": Rope(store["rope"].cos, store["rope"].sin, True, 0)})
        return *found, blocks.blocks * 1

    expected = calls(decode["q"], prefill["q"])
    assert bool(blocks.blocks.any())
    blocks.blocks.zero_()
    torch._dynamo.reset()
    assert same(torch.compile(calls, fullgraph=True, backend="aot_eager")(decode["q"], prefill["q"]), expected)


class EvenKeys(masks.Mask):
    def visible(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return k_pos % 2 == 0


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"mask": EvenKeys(), "traffic": Traffic()}, None), ({"window": "all", "softcap": None}, ValueError),
        ({"head": 1}, TypeError), ({"q": torch.ones(2, 4, 64, requires_grad=True)}, ValueError),
    ],
    ids=["mask", "window", "keyword", "gradient"],
)
def test_what_no_operator_carries(more: dict[str, Any], error: type[Exception] | None) -> None:
    """Is refused where the graph must be whole, and else runs beside it: as the eager call does, with its errors."""
    arguments = good_call("mha_decode_paged")
    arguments.pop("out")

    def decode(x: torch.Tensor) -> Any:
        return attention.mha_decode_paged(**arguments | {"q": x} | more) + 1

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=REFUSAL):
        torch.compile(decode, fullgraph=True, backend="eager")(arguments["q"])
    torch._dynamo.reset()
    broken: Callable[..., Any] = torch.compile(decode, backend="eager")
    if error is None:
        assert same(broken(arguments["q"]), decode(arguments["q"]))
        return
    with pytest.raises(error) as eager:
        decode(arguments["q"])
    with pytest.raises(error) as compiled:
        broken(arguments["q"])
    assert str(compiled.value) == str(eager.value)


def test_errors_of_a_compiled_call() -> None:
    """Those of values and of shapes come from the call, when it runs."""
    arguments = good_call("mha_decode_paged")
    arguments.pop("out")

    def decode(q: torch.Tensor, lens: torch.Tensor) -> Any:
        return attention.mha_decode_paged(**arguments | {"q": q, "seq_lens": lens})

    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    for q, lens in ((arguments["q"], torch.tensor([33, 99])), (arguments["q"][..., :40], arguments["seq_lens"])):
        torch._dynamo.reset()
        with pytest.raises(ValueError) as eager:
            decode(q, lens)
        with pytest.raises(ValueError) as found:
            compiled(q, lens)
        assert str(found.value) == str(eager.value)


def test_lengths_change_without_a_new_graph() -> None:
    """A collection of every step has other lengths: two graphs serve them all."""
    count = []
    arguments = good_call("mha_decode")
    pool, q = arguments["cache"], arguments["q"]

    def backend(graph: Any, inputs: Any) -> Any:
        count.append(graph)
        return graph.forward

    def decode(q: torch.Tensor, cache: PagedKVCacheCollection) -> Any:
        return attention.mha_decode(q, cache, backend="emulator")

    torch._dynamo.reset()
    compiled = torch.compile(decode, fullgraph=True, backend=backend)
    for step in range(4):
        cache = pool.with_lengths(pool.cache_lengths + step, 1)
        assert same(compiled(q, cache), decode(q, cache))
    assert len(count) == 2


def test_collections_made_inside() -> None:
    """They break the graph, and nothing of theirs is traced."""
    graphs: list[list[str]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([node.stack_trace or "" for node in graph.graph.nodes])
        return graph.forward

    decode = call_of("mha_decode", to_torch)
    cache = decode["cache"]

    def step(q: torch.Tensor) -> torch.Tensor:
        pool = PagedKVCacheCollection(cache.blocks, cache.cache_lengths, cache.lookup_table, 1, 33)
        return attention.mha_decode(q * 1.0, pool.with_lengths(cache.cache_lengths + 0, 1), backend="emulator") + 1

    torch._dynamo.reset()
    assert same(torch.compile(step, backend=backend)(decode["q"]), step(decode["q"]))
    assert graphs
    assert not [trace for graph in graphs for trace in graph if "kvlab/cache" in trace]


def test_fake_tensors() -> None:
    """With their mode and without it; what no operator carries is a ValueError there."""
    arguments = good_call("mla_decode_paged")
    arguments.pop("out")
    expected = attention.mla_decode_paged(**arguments, return_lse=True)
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
        inside = attention.mla_decode_paged(**fake, return_lse=True)
        with pytest.raises(ValueError, match=REFUSAL):
            attention.mla_decode_paged(**fake, traffic=Traffic())
        assert same(attention.mha_prefill(*(np.ones((1, 2, 1, 64), np.float32),) * 3), ())  # NumPy's call is eager
    for found in (inside, attention.mla_decode_paged(**fake, return_lse=True)):
        for one, real in zip(found, expected, strict=True):
            assert isinstance(one, FakeTensor)
            assert (one.shape, one.dtype, one.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    """For any batch and any columns of the table: the program runs with others than it was exported with."""
    arguments = good_call("mha_decode_paged")
    names = "q", "k_cache", "v_cache", "block_table", "seq_lens"

    class Decode(torch.nn.Module):
        def forward(self, q: Any, *rest: Any) -> Any:
            return attention.mha_decode_paged(q * 2, *rest, window=4, backend="emulator")

    batch, columns = torch.export.Dim("batch"), torch.export.Dim("columns")
    shapes = {0: batch}, (None, None, {0: batch, 1: columns}, {0: batch})
    inputs = tuple(arguments[name] for name in names)
    program = torch.export.export(Decode(), inputs, dynamic_shapes=shapes, strict=strict)
    assert targets(program.graph) == ["kvlab.mha_decode_paged.default"]
    q, k, v, *_ = inputs
    other = torch.cat([q, q[:1]]), k, v, torch.tensor([[3, 0], [2, 4], [5, 1]]), torch.tensor([18, 32, 7])
    assert same(program.module()(*other), Decode()(*other))


def test_inductor() -> None:
    """A layer: store into the halves of one buffer, decode over it into q; the buffer is written in place."""
    store, decode = good_call("kv_store_paged"), good_call("mha_decode_paged")
    decode.pop("out")

    def layer(k: torch.Tensor, q: torch.Tensor, buffer: torch.Tensor) -> tuple[Any, ...]:
        halves = {"k_cache": buffer[:, 0], "v_cache": buffer[:, 1]}
        attention.kv_store_paged(**store | halves | {"k": k})
        q = q * 2
        return attention.mha_decode_paged(**decode | halves | {"q": q}, out=q), buffer[:, 1]

    eager, compiled = torch.zeros(2, 6, 2, 16, 2, 64)
    torch._dynamo.reset()
    found = torch.compile(layer, fullgraph=True)(store["k"], decode["q"], compiled)
    expected = layer(store["k"], decode["q"], eager)
    assert same((*found, compiled), (*expected, eager))
    assert bool(compiled[:, 0].any())


@pytest.mark.interpreter
def test_interpreted_kernel() -> None:
    arguments = call_of("merge_states", to_torch)
    arguments.pop("out")

    def merge(outs: torch.Tensor, lses: torch.Tensor) -> Any:
        return attention.merge_states(outs, lses, backend="triton")

    torch._dynamo.reset()
    compiled = torch.compile(merge, fullgraph=True, backend="aot_eager")
    assert same(compiled(**arguments), merge(**arguments))


def test_importing_kvlab_does_not_import_torch() -> None:
    code = "import sys, kvlab.attention, kvlab.viz, kvlab.mirror; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.timing
def test_an_eager_call_takes_at_most_ten_microseconds_more() -> None:
    """What a call asks before it runs as it is."""
    x, best = torch.zeros(2, 4, 64), 1.0
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            assert not is_traced(x)
        best = min(best, (time.perf_counter() - start) / 1000)
    assert best < 10e-6


def test_a_cache_within_its_storage_breaks_the_graph_of_an_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11's inductor writes it elsewhere; what a graph must not have is called outside of it, or refused."""
    monkeypatch.setattr(torch_ops, "MISPLACES", True)
    torch._dynamo.reset()
    caches, kept = (torch.zeros(2, 4, 16, 2, 64) for _ in range(2))
    new, slots = torch.randn(3, 2, 64), torch.tensor([5, 17, 40])

    def layer(k: Any, kc: Any, vc: Any) -> Any:
        attention.kv_store_paged(k, 2 * k, kc, vc, slots, backend="emulator")
        return k + 1

    with pytest.raises(Exception, match=r"v_cache of kvlab.attention.kv_store_paged in a graph of torch before 2.13"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(new, *caches)
    assert not caches.any()
    found = torch.compile(layer, backend="aot_eager")(new, *caches)
    assert torch.equal(found, layer(new, *kept))
    assert torch.equal(caches, kept)
