"""Decode over a schedule on a GPU. Rests on float64 references in the tolerance of yardsticks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from decode_cases import Case, Inputs
from yardsticks import assert_accurate, nothing_waits

from kvlab.attention.mha_decode.balanced.config import BalancedConfig, balanced_config
from kvlab.attention.mha_decode.balanced.kernel import launch
from kvlab.attention.mha_decode.config import choose_config, problem_of

pytestmark = pytest.mark.gpu


def config_of(x: Inputs, **more: Any) -> BalancedConfig:
    problem = problem_of(*x.arrays[:4])
    return balanced_config(choose_config(problem, num_splits=1), problem, **more)


def random_case(seed: int) -> Case:
    rnd = random.Random(seed)
    kv_heads, group = rnd.choice([1, 2, 8]), rnd.choice([1, 3, 4, 8])
    longest = rnd.choice([40, 3000, 20_000])
    batch = rnd.randint(1, 12)
    lens = [rnd.choice([0, 1, 15, 16, 17, rnd.randint(0, 500), rnd.randint(0, longest)]) for _ in range(batch)]
    return Case(tuple(lens), (kv_heads * group, kv_heads), rnd.choice([64, 128, 256]), rnd.choice([5, 16, 64]),
                rnd.choice(["bf16", "fp16", "fp32"]), rnd.choice([1, 1, 2, 4, 8]),
                storage=rnd.choice(["apart", "halves", "hnd"]), seed=seed)


@pytest.mark.parametrize("seed", range(200))
def test_random_batches(seed: int) -> None:
    """Results go over NaN; memory of partial results was NaN, too."""
    x = random_case(seed).build()
    arrays = x.torch("cuda")
    poison = torch.full((1 << 24,), float("nan"), device="cuda")
    del poison  # the allocator gives it to what comes next
    out = torch.full_like(arrays[0], float("nan"))
    with nothing_waits():
        made, lse = launch(*arrays, scale=x.scale, config=config_of(x), out=out)
    assert_accurate(x, made.cpu(), lse.cpu())


def test_a_captured_graph_is_replayed_with_other_lengths() -> None:
    """Lengths are written after the capture; the same lengths give the same bits."""
    x = Case((900, 4000, 70, 2500, 16), heads=(32, 8), D=128).build()
    arrays = x.torch("cuda")
    lens = arrays[4]
    out = torch.empty_like(arrays[0])
    config = config_of(x)
    launch(*arrays, scale=x.scale, config=config, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = launch(*arrays, scale=x.scale, config=config, out=out)
    for new in ((0, 0, 0, 0, 0), (900, 1, 70, 0, 16), (1, 4000, 0, 2500, 3), (900, 4000, 70, 2500, 16)):
        lens.copy_(torch.tensor(new, dtype=lens.dtype))
        seen = []
        for _ in range(2):
            out.fill_(float("nan"))
            lse.fill_(float("nan"))
            graph.replay()
            seen.append(out.clone())
        assert torch.equal(*seen)
        assert_accurate(x.with_(lens=np.array(new, np.int32)), out.cpu(), lse.cpu())


def test_two_streams_at_once() -> None:
    cases = [Case((900, 4000, 70), heads=(8, 2), D=128, seed=i).build() for i in range(2)]
    streams = [torch.cuda.Stream() for _ in cases]
    on_gpu = [x.torch("cuda") for x in cases]
    torch.cuda.synchronize()
    made: list[Any] = [None, None]
    for _ in range(20):
        for i, (x, stream) in enumerate(zip(cases, streams, strict=True)):
            with torch.cuda.stream(stream):
                made[i] = launch(*on_gpu[i], scale=x.scale, config=config_of(x))
    torch.cuda.synchronize()
    for x, (out, lse) in zip(cases, made, strict=True):
        assert_accurate(x, out.cpu(), lse.cpu())


@pytest.mark.parametrize("batch", [1, 64, 1024, 4096])
def test_batches_of_many_sizes(batch: int) -> None:
    """One long sequence among short and empty ones."""
    lens = np.random.default_rng(batch).integers(0, 60, batch)
    lens[0], lens[1::3] = 30_000, 0
    x = Case(tuple(lens.tolist()), heads=(2, 1), D=64).build()
    out, lse = launch(*x.torch("cuda"), scale=x.scale, config=config_of(x))
    assert_accurate(x, out.cpu(), lse.cpu())
