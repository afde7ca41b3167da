"""The Hopper decode kernel on its GPU, against the float64 reference, in the tolerance of yardsticks.

Every case poisons what must not be read (NaN slots and pages, table entries that are no pages), deals its pages at
random, and has canaries around what it writes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from decode_cases import Case
from feature_cases import ENDS, FP8, FeatureCase
from hopper_chip import ON_HOPPER, assert_alike, run_apart
from yardsticks import assert_accurate, bits, nothing_waits

from kvlab.attention import mha_decode_paged
from kvlab.triton_support import arrivals

pytestmark = ON_HOPPER

SIZES = [
    Case((1,), heads=(32, 8), D=128),
    Case((4096, 20, 0, 140), heads=(32, 8), D=128),
    Case((4096, 20, 0, 140), heads=(32, 8), D=128, splits=1),
    Case((1000, 999, 64, 63, 65), heads=(32, 8), D=128, page=64, splits=3),
    Case((129, 3, 2, 1, 0), heads=(8, 8), D=128, page=48, S=4, splits=3),
    Case((300, 299), heads=(9, 3), D=64, page=64),
    Case((257, 64, 63, 65), heads=(16, 1), D=64, page=8),
    Case((150, 20), heads=(6, 2), D=128, S=2, page=24, storage="hnd", splits=2),
    Case((90, 17), heads=(28, 4), D=128, page=128, storage="halves"),
    Case((40, 17), heads=(4, 2), D=64, storage="wide"),
    Case((1000, 20, 0, 140), heads=(32, 8), D=80, splits=3),
    Case((300, 65), heads=(12, 3), D=96, page=24, storage="hnd"),
    Case((2000,), heads=(16, 4), D=112, S=2, page=64),
    Case((1000, 20, 0, 140), heads=(16, 4), D=192, splits=3),
    Case((2000,), heads=(16, 4), D=256, S=2, page=64),
    Case((300, 65), heads=(12, 3), D=256, page=24, storage="hnd"),
    Case((20, 1, 0), heads=(32, 32), D=128, splits=16),
    Case(tuple(np.random.default_rng(0).integers(0, 700, 300).tolist()), heads=(16, 4), D=128, splits=1),
]
GRID = [*SIZES, *(replace(case, dtype="fp16") for case in SIZES[2:8])]
PAIRS = [
    FeatureCase((150, 0, 17), heads=(8, 4), D=128, kv=FP8, scales="head"),
    FeatureCase((4096, 100), heads=(32, 8), D=128, kv=FP8, scales="number", page=64),
    FeatureCase((1070, 3), heads=(6, 3), D=128, S=2, page=8, kv=FP8, scales="number", splits=2),
    FeatureCase((700, 64), heads=(8, 8), D=128, dtype="fp16", page=64, kv=FP8, storage="hnd"),
    FeatureCase((4096, 100, 0), heads=(32, 8), D=64, kv=FP8, scales="head", page=64),
    FeatureCase((1070, 3), heads=(6, 3), D=80, S=2, page=8, kv=FP8, scales="number", splits=2),
    FeatureCase((3000,), heads=(16, 4), D=112, S=2, kv=FP8),
]


@pytest.fixture(scope="module", autouse=True)
def it_ends() -> None:
    """Warps that wait for a copy that never comes would hang the suite: the first launch has a process of its own."""
    program = (
        "import torch; from kvlab.attention import mha_decode_paged; "
        "q, k = torch.ones(2, 32, 128), torch.ones(26, 16, 8, 128); table = torch.arange(26).view(2, 13); "
        "args = [t.cuda() for t in (q.bfloat16(), k.bfloat16(), k.bfloat16(), table.int(), "
        "torch.tensor([200, 9]).int())]; "
        "mha_decode_paged(*args, backend='hopper'); torch.cuda.synchronize()"
    )
    run_apart(program)


def on_chip(case: Case | FeatureCase, x: Any, **options: Any) -> Any:
    """Output and lse on the CPU."""
    options |= x.torch_options("cuda") if isinstance(case, FeatureCase) else {}
    call = mha_decode_paged(*x.torch("cuda"), backend="hopper", num_splits=case.splits, return_lse=True, **options)
    return tuple(t.cpu() for t in call)


@pytest.mark.parametrize("case", [*GRID, *PAIRS, *ENDS], ids=str)
def test_grid(case: Case | FeatureCase) -> None:
    x = case.build()
    assert_accurate(x, *on_chip(case, x))


@pytest.mark.parametrize("case", [*SIZES[3:8], *PAIRS], ids=str)
def test_the_emulator_gives_what_the_chip_gives(case: Case | FeatureCase) -> None:
    """Both round P and the output to 16 bits; a tie may fall on either side."""
    x = case.build()
    options = x.options if isinstance(case, FeatureCase) else {}
    ours = mha_decode_paged(*x.arrays, backend="hopper", num_splits=case.splits, return_lse=True, **options)
    out, lse = (t.float().numpy() for t in on_chip(case, x))
    assert_alike(ours, (out, lse))


@pytest.mark.parametrize("splits", [1, 4])
def test_nothing_waits_repeats_and_writes_beside_out(splits: int) -> None:
    x = Case((1500, 0, 17), heads=(24, 8), D=128, S=2, page=64).build()
    tensors = x.torch("cuda")
    buffer = torch.full((5, 4, 26, 384), 7, dtype=torch.bfloat16, device="cuda")
    out = buffer[1:4, 1:3, 1:25, 128:256]
    options: dict[str, Any] = {"backend": "hopper", "num_splits": splits, "out": out}
    mha_decode_paged(*tensors, **options)  # compiles
    assert_accurate(x, out.cpu())
    before = bits(out.cpu())
    with nothing_waits():
        for _ in range(20):
            mha_decode_paged(*tensors, **options)
    assert bits(out.cpu()) == before
    out[...] = 7
    assert bool((buffer == 7).all())


@pytest.mark.parametrize("splits", [1, None])
def test_graph_replay_with_other_lengths(splits: int | None) -> None:
    """Known failure graph-replay-new-lengths; the host does not wait in between."""
    x = Case((2048,) * 4, heads=(32, 8), D=128, page=64).build()
    q, k, v, table, lens = x.torch("cuda")
    out = torch.empty_like(q)
    options: dict[str, Any] = {"backend": "hopper", "num_splits": splits, "out": out}
    mha_decode_paged(q, k, v, table, lens, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mha_decode_paged(q, k, v, table, lens, **options)
    for new in ([1, 16, 2048, 0], [0, 0, 0, 0], [2047, 1, 129, 128]):
        lens.copy_(torch.tensor(new, dtype=lens.dtype))
        out.fill_(float("nan"))
        graph.replay()
        assert_accurate(x.with_(lens=np.array(new, np.int32)), out.cpu())


def test_launches_side_by_side_count_their_own_arrivals() -> None:
    """Two graphs and launches on a stream, all at once, again and again: the bits of each alone, and counters of 0."""
    cases = [Case(lens, heads=(32, 8), D=128, page=64, splits=8).build() for lens in ((2048, 700), (1500, 0), (64, 3))]
    tensors = [x.torch("cuda") for x in cases]
    outs = [torch.full_like(args[0], float("nan")) for args in tensors]
    graphs, streams = [torch.cuda.CUDAGraph() for _ in range(2)], [torch.cuda.Stream() for _ in cases]

    def call(i: int) -> None:
        mha_decode_paged(*tensors[i], backend="hopper", num_splits=8, out=outs[i])

    for i, x in enumerate(cases):
        call(i)
        assert_accurate(x, outs[i].cpu())
    before = [bits(out.cpu()) for out in outs]
    for i, graph in enumerate(graphs):
        with torch.cuda.graph(graph):
            call(i)
    torch.cuda.synchronize()
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[i].fill_(float("nan"))
                graphs[i].replay() if i < len(graphs) else call(i)
    torch.cuda.synchronize()
    assert [bits(out.cpu()) for out in outs] == before
    kept = [*arrivals.OF_STREAMS.values(), *(chunk for left in arrivals.LEFT.values() for chunk in left)]
    assert len(kept) >= 3
    assert not any(counters.any() for counters in kept)


def test_a_capture_without_counters_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first call of a process may be: nothing has set counters apart."""
    x = Case((2048, 700), heads=(32, 8), D=128, page=64, splits=8).build()
    tensors = x.torch("cuda")
    out = torch.full_like(tensors[0], float("nan"))
    monkeypatch.setattr(arrivals, "LEFT", {})
    with monkeypatch.context() as patch:  # compiles both kernels
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        mha_decode_paged(*tensors, backend="hopper", num_splits=8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mha_decode_paged(*tensors, backend="hopper", num_splits=8, out=out)
    graph.replay()
    assert_accurate(x, out.cpu())


def test_batch_invariance() -> None:
    """Rests on the definition: a sequence alone and in a batch gives the same bits."""
    x = Case((600, 20, 4500), heads=(32, 8), D=128, page=64).build()
    q, k, v, table, lens = x.torch("cuda")
    whole = mha_decode_paged(q, k, v, table, lens, backend="hopper", batch_invariant=True)
    for b in range(3):
        one = slice(b, b + 1)
        alone = mha_decode_paged(q[one], k, v, table[one], lens[one], backend="hopper", batch_invariant=True)
        assert bits(alone.cpu()) == bits(whole[one].cpu())
