"""Attention over ranks of torch.distributed. Rests on the float64 reference of one process, which knows no ranks, on
what collectives were given, and on the timeout that a group was made with. Cases: tests/cases/distributed_ranks.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import distributed_ranks
import pytest
import torch
from torch import distributed as dist

from kvlab.integrations.distributed import (
    ContextShard,
    all_gather_heads,
    context_shard,
    heads_of_rank,
    tensor_parallel_heads,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked")


def failed(device: str, *ranks: int) -> dict[str, list[str]]:
    """What did not go well in so many ranks, one process for each; without a number, in two of which one is lost."""
    file = Path(distributed_ranks.__file__)
    path = os.pathsep.join((str(file.parent), str(file.parents[2])))
    done = subprocess.run(
        [sys.executable, str(file), device, *map(str, ranks)], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": path}, timeout=500,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, list[str]] = json.loads(done.stdout)
    assert said
    return {case: words for case, words in said.items() if set(words) != {"ok"}}


def test_ranks() -> None:
    """All cases of ``distributed_ranks``, in one run: processes are dear."""
    assert failed("cpu", 2, 4) == {}


def test_a_rank_that_is_lost_is_an_error_at_the_others() -> None:
    assert failed("cpu") == {}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_two_gpus() -> None:
    assert failed("cuda", 2) == {}


@pytest.mark.parametrize("placement", ["contiguous", "round_robin"])
def test_ranks_share_out_all_tokens(placement: str) -> None:
    """A law: each token has one slot at one rank, and ranks have as many keys as tokens of theirs came before."""
    shards = [ContextShard(rank, 3, 2, 4, placement) for rank in range(3)]
    tokens, table = torch.arange(-2, 26), torch.tensor([[7, 3]])
    slots = torch.cat([shard.slots(table, tokens[None]) for shard in shards])
    assert ((slots >= 0).sum(0) == ((tokens >= 0) & (tokens < 24))).all()
    for shard, row in zip(shards, slots, strict=True):
        mine = (row >= 0).cumsum(0)
        assert torch.equal(shard.before(tokens + 1), mine)
        assert sorted(row[row >= 0].tolist()) == [*range(12, 16), *range(28, 32)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_heads_read_the_kv_head_that_the_rank_has(ranks: int) -> None:
    """A law: query head h reads KV head h // (32 / 8), and every head has a rank."""
    found = [heads_of_rank(32, 8, rank, ranks) for rank in range(ranks)]
    assert [h for part in found for h in range(part.q.start, part.q.stop)] == list(range(32))
    for part in found:
        heads = range(part.q.start, part.q.stop)
        kept, group = part.kv.stop - part.kv.start, len(heads) // (part.kv.stop - part.kv.start)
        assert [part.kv.start + at // group for at in range(len(heads))] == [h // 4 for h in heads]
        assert kept == max(8 // ranks, 1)


def test_compiled_programs_run_a_call_as_it_is(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        out = torch.arange(24.0).view(3, 2, 4)
        double = torch.compile(lambda x: 2 * all_gather_heads(x + 1), backend="eager")
        assert torch.equal(double(out), 2 * (out + 1))
        with pytest.raises(RuntimeError, match="kvlab runs as it is"):
            torch.compile(lambda x: 2 * all_gather_heads(x), backend="eager", fullgraph=True)(out)
    finally:
        dist.destroy_process_group()


def test_a_call_without_ranks_is_refused() -> None:
    words = "group without a process group: must be after torch.distributed.init_process_group"
    with pytest.raises(ValueError, match=words):
        tensor_parallel_heads(8, 2)
    with pytest.raises(ValueError, match=words):
        context_shard(torch.zeros(1, 2, dtype=torch.int64), 16)
    with pytest.raises(ValueError, match="placement is 'ring': must be one of"):
        ContextShard(0, 1, 2, 16, "ring")
