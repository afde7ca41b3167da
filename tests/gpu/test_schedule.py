"""The work list made on a GPU. Rests on its NumPy twin, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlab.attention.schedule import ScheduleConfig, ScheduleProblem, emulator, kernel

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("unit", [0, 128])
@pytest.mark.parametrize("batch", [1, 64, 1024, 4096])
def test_a_captured_graph_makes_the_list_of_other_lengths(batch: int, unit: int) -> None:
    """Nothing waits for the GPU: the lengths are written after the capture; 0 and 10^6 are among them."""
    problem, config = ScheduleProblem(batch, 1, 4, 8, 1_000_000), ScheduleConfig(396, unit=unit)
    lens = torch.zeros(batch, dtype=torch.int32, device="cuda")
    out = torch.full((config.list_size(problem),), 7, dtype=torch.int32, device="cuda")
    kernel.launch(lens, problem=problem, config=config, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(lens, problem=problem, config=config, out=out)
    rng = np.random.default_rng(batch)
    for most in (1, 3000, 40_000):
        new = rng.integers(0, most, batch).astype(np.int32)
        new[:1] = 1_000_000
        lens.copy_(torch.from_numpy(new))
        graph.replay()
        (expected,) = emulator.launch(new, problem=problem, config=config)
        assert np.array_equal(out.cpu().numpy(), expected)


def test_lists_of_ragged_batches() -> None:
    """Chunks, drafts and sequences without a new token, by ``cu_seqlens``."""
    rng = np.random.default_rng(5)
    new = rng.choice([0, 1, 4, 500], 300)
    lens = (new + rng.integers(0, 9000, 300)).astype(np.int64)
    cu_seqlens = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    problem = ScheduleProblem(300, int(cu_seqlens[-1]), 4, 8, 20_000, True)
    config = ScheduleConfig(132, BM=128, together=4)
    (expected,) = emulator.launch(lens, cu_seqlens, problem=problem, config=config)
    (made,) = kernel.launch(*(torch.from_numpy(x).cuda() for x in (lens, cu_seqlens)), problem=problem, config=config)
    items, most = int(expected[2]), config.most_items(problem)
    used = np.r_[0:4, 4 : 5 + items, 5 + most : 5 + most + items, 5 + 2 * most : 5 + 2 * most + items,
                 5 + 3 * most : len(expected)]
    assert np.array_equal(made.cpu().numpy()[used], expected[used])
