"""What ranks do in tests/integrations/test_distributed.py, a process each: ``python distributed_ranks.py DEVICE RANKS``
forks them, runs all cases, and prints JSON: case -> what each rank says, "ok" or how it failed. Without RANKS: what the
first of two says of the other's loss.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_torch import close
from torch import Tensor
from torch import distributed as dist

from kvlab.attention import (
    kv_store_paged,
    mha_decode_paged,
    mha_prefill,
    mha_prefill_paged,
    mla_decode_paged,
    mla_store_paged,
)
from kvlab.attention.masks import BandMask, CausalPaddingMask, ChunkedCausalMask, NullMask
from kvlab.integrations import distributed as own

HQ, HKV, D, DV, PAGE, COLUMNS = 8, 2, 32, 16, 4, 3
PATIENCE = 1.0
"""Seconds that a group waits for a rank."""
CASES: dict[str, Callable[[Any], None]] = {}


class Ranks:
    """Where a case runs: the rank, how many there are, the device, and the backend of calls on it."""

    def __init__(self, device: str, rank: int, ranks: int) -> None:
        self.device = f"cuda:{rank}" if device == "cuda" else "cpu"
        self.backend, self.rank, self.ranks = "auto" if device == "cuda" else "emulator", rank, ranks

    def here(self, *shape: int, tag: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(tag)).to(dtype).to(self.device)

    def agreed(self, found: Tensor) -> None:
        """The same bits at all ranks."""
        for other in own._gathered(found, own.membership(None)):
            assert torch.equal(other.nan_to_num(), found.nan_to_num())


def case(function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    CASES[function.__name__] = function
    return function


def pages(at: Ranks, lens: list[int], placement: str, layout: str = "NHD", dtype: torch.dtype = torch.float32) -> Any:
    """K and V of whole sequences in pages that follow each other, and a rank's own: (whole, mine), each (K, V, table).
    What the rank does not have is NaN.
    """
    capacity = at.ranks * COLUMNS * PAGE
    whole = [at.here(len(lens), capacity, HKV, n, tag=n, dtype=dtype) for n in (D, DV)]
    table = torch.arange(len(lens) * COLUMNS).flip(0).view(len(lens), COLUMNS).to(at.device)
    shard = own.context_shard(table, PAGE, placement=placement)
    tokens = torch.arange(capacity, device=at.device).repeat(len(lens), 1)
    stored = torch.where(tokens < torch.tensor(lens, device=at.device)[:, None], shard.slots(table, tokens), -1)
    caches = [torch.full((table.numel() + 1, PAGE, HKV, n), torch.nan, dtype=dtype, device=at.device) for n in (D, DV)]
    new = [x.flatten(0, 1).contiguous() for x in whole]
    kv_store_paged(*new, *caches, stored.flatten(), backend=at.backend)
    count = int((stored >= 0).sum())
    assert count == int(shard.before(torch.tensor(lens)).sum()) == int(caches[0].isfinite().all(-1)[..., 0].sum())
    if layout == "HND":
        caches = [cache.transpose(1, 2).contiguous() for cache in caches]
    in_pages = [x.view(-1, PAGE, HKV, x.shape[-1]) for x in whole]
    rows = torch.arange(len(lens) * at.ranks * COLUMNS, device=at.device).view(len(lens), -1)
    return (*in_pages, rows), (*caches, table)


def moved(options: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}


def exactly(operation: Any, *arrays: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The float64 reference of one process."""
    cpu = [array.cpu() for array in arrays]
    return operation(*cpu, **moved(options, "cpu"), backend="reference", return_lse=True)


def check_decode(at: Ranks, placement: str, new: int, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Lengths: nearly all pages, a boundary between ranks just crossed, one page, none."""
    lens = [at.ranks * COLUMNS * PAGE - 1, COLUMNS * PAGE + 1, 3, 0]
    whole, mine = pages(at, lens, placement, options.get("kv_layout", "NHD"), dtype)
    q = at.here(len(lens), *([new] if new else []), HQ, D, tag=7, dtype=dtype)
    lengths = torch.tensor(lens, dtype=torch.int32, device=at.device)
    sight = {name: value for name, value in options.items() if name != "kv_layout"}
    expected = exactly(mha_decode_paged, q, *whole, lengths, **sight)
    options = moved(options, at.device)
    out = torch.empty(*q.shape[:-1], DV, dtype=dtype, device=at.device)
    found, lse = own.context_parallel_decode(
        q, *mine, lengths, placement=placement, out=out, return_lse=True, backend=at.backend, **options
    )
    assert found is out
    close(found, expected[0], dtype)
    close(lse, expected[1], torch.float32 if dtype == torch.float32 else dtype)
    at.agreed(found)


@case
def decode(at: Ranks) -> None:
    for placement in own.PLACEMENTS:
        check_decode(at, placement, 0)
        check_decode(at, placement, 3, softcap=3.0, sinks=torch.arange(HQ) * 0.5, base2=True)
        check_decode(at, placement, 2, mask=NullMask(), kv_layout="HND")


@case
def decode_in_bfloat16(at: Ranks) -> None:
    check_decode(at, "round_robin", 1, torch.bfloat16)


@case
def decode_of_windows(at: Ranks) -> None:
    """Positions are those of the whole sequence: distances from rank to rank."""
    check_decode(at, "contiguous", 0, window=5)
    check_decode(at, "contiguous", 0, alibi_slopes=torch.arange(1.0, HQ + 1) / HQ)
    check_decode(at, "contiguous", 3, window=(6, None), temperature=torch.arange(1.0, HQ + 1) / HQ)
    check_decode(at, "contiguous", 3, mask=ChunkedCausalMask(6))
    check_decode(at, "contiguous", 2, mask=BandMask(8, -1))


@case
def decode_of_given_positions(at: Ranks) -> None:
    """Drafts of a tree: two tokens at one position, and one behind the sequence."""
    given = torch.tensor([[20, 20, 23], [12, 12, 13], [0, 1, 9], [-1, 0, 1]], dtype=torch.int32)
    for placement in own.PLACEMENTS:
        check_decode(at, placement, 3, q_positions=given)
        check_decode(at, placement, 0, q_positions=given[:, 0].contiguous())


@case
def mla_decode(at: Ranks) -> None:
    """Latent rows: DeepSeek's 512 + 64 in bfloat16 with its scale; e4m3 with scales of 128 latents; and small ones."""
    lens = [at.ranks * COLUMNS * PAGE - 1, COLUMNS * PAGE + 1, 3, 0]
    lengths = torch.tensor(lens, dtype=torch.int32, device=at.device)
    rows: list[tuple[str, int, int, int, torch.dtype, dict[str, Any]]] = [
        ("round_robin", 0, 512, 64, torch.bfloat16, {}),
        ("contiguous", 2, 512, 64, torch.float8_e4m3fn, {}),
        ("contiguous", 3, 32, 16, torch.float32, {"window": 5, "scale": 0.2, "base2": True}),
        ("round_robin", 2, 32, 16, torch.float32, {"sinks": torch.arange(HQ) * 0.5, "scale": 0.2}),
    ]
    for placement, new, latent, rope, dtype, options in rows:
        fp8 = dtype == torch.float8_e4m3fn
        narrow, width = (torch.bfloat16, latent + 4 * (latent // 128) + 2 * rope) if fp8 else (dtype, latent + rope)
        table = torch.arange(len(lens) * COLUMNS).flip(0).view(len(lens), COLUMNS).to(at.device)
        capacity = at.ranks * COLUMNS * PAGE
        tokens = torch.arange(capacity, device=at.device).repeat(len(lens), 1)
        slots = own.context_shard(table, PAGE, placement=placement).slots(table, tokens)
        slots = torch.where(tokens < lengths[:, None], slots, -1).flatten()
        whole = at.here(len(lens) * capacity, latent + rope, tag=latent, dtype=narrow)
        pages_of = [torch.zeros(n, PAGE, width, dtype=dtype, device=at.device)
                    for n in (len(lens) * COLUMNS, len(whole) // PAGE)]
        for cache, where in zip(pages_of, (slots, torch.arange(len(whole), device=at.device)), strict=True):
            mla_store_paged(whole[:, :latent], whole[:, latent:], cache, where, backend=at.backend)
        order = torch.arange(len(lens) * at.ranks * COLUMNS, device=at.device).view(len(lens), -1)
        q = at.here(len(lens), *([new] if new else []), HQ, latent + rope, tag=7, dtype=narrow)
        shared: dict[str, Any] = {"v_dim": latent, **options}
        expected = exactly(mla_decode_paged, q, pages_of[1], order, lengths, **shared)
        out, lse = own.context_parallel_mla_decode(
            q, pages_of[0], table, lengths, placement=placement, return_lse=True, backend=at.backend,
            **moved(shared, at.device),
        )
        close(out, expected[0], narrow)
        close(lse, expected[1], narrow)
        at.agreed(out)
    refused(lambda: own.context_parallel_mla_decode(q, pages_of[0], table, lengths, indices=table),
            "indices over pages of ranks: must be left out")
    refused(lambda: own.context_parallel_mla_decode(q, pages_of[0][0], table, lengths), "kv_cache has shape (4, 48)")


@case
def prefill(at: Ranks) -> None:
    new, lens = [9, 1, 0, 3], [at.ranks * COLUMNS * PAGE - 1, COLUMNS * PAGE + 1, 5, 3]
    starts = torch.tensor([0, 9, 10, 10, 13], dtype=torch.int32, device=at.device)
    q, lengths = at.here(sum(new), HQ, D, tag=8), torch.tensor(lens, dtype=torch.int32, device=at.device)
    rows: list[tuple[str, dict[str, Any]]] = [(placement, {}) for placement in own.PLACEMENTS]
    rows += [("contiguous", {"window": (7, None)}), ("round_robin", {"causal": False, "sinks": torch.arange(HQ) * 0.5})]
    for placement, options in rows:
        whole, mine = pages(at, lens, placement)
        expected = exactly(mha_prefill_paged, q, *whole, lengths, starts, **options)
        found = own.context_parallel_prefill(
            q, *mine, lengths, starts, placement=placement, return_lse=True, backend=at.backend,
            **moved(options, at.device),
        )
        for one, other in zip(found, expected, strict=True):
            close(one, other, torch.float32)
        at.agreed(found[0])


@case
def prefill_of_gathered_keys(at: Ranks) -> None:
    new, keys = 3, 5
    q, k, v = (at.here(2, at.ranks * n, heads, width, tag=width)
               for n, heads, width in ((new, HQ, D), (keys, HKV, D), (keys, HKV, DV)))
    share = [x[:, at.rank * n : (at.rank + 1) * n] for x, n in ((q, new), (k, keys), (v, keys))]
    for options in ({}, {"window": 4}, {"causal": False}, {"mask": CausalPaddingMask(torch.tensor([4, 9]))}):
        expected, lse = exactly(mha_prefill, q, k, v, **options)
        if "mask" in options:
            options = {"mask": CausalPaddingMask(torch.tensor([4, 9], device=at.device))}
        found = own.all_gather_prefill(*share, return_lse=True, backend=at.backend, **options)
        for one, other in zip(found, (expected, lse), strict=True):
            close(one, other[:, at.rank * new : (at.rank + 1) * new], torch.float32)


def check_heads(at: Ranks, context: Any, heads_group: Any) -> None:
    lens = [at.ranks * COLUMNS * PAGE - 1, 3]
    q, lengths = at.here(2, 2, HQ, D, tag=9), torch.tensor(lens, dtype=torch.int32, device=at.device)
    heads = own.tensor_parallel_heads(HQ, HKV, group=heads_group)
    whole, mine = pages(at, lens, "contiguous")
    sinks = torch.arange(HQ) * 0.25
    expected, _ = exactly(mha_decode_paged, q, *whole, lengths, sinks=sinks)
    slices = q[:, :, heads.q], *(cache[:, :, heads.kv] for cache in (mine if context else whole)[:2])
    options = {"sinks": sinks[heads.q].to(at.device), "backend": at.backend}
    if context is None:
        part = mha_decode_paged(*slices, whole[2], lengths, **options)
    else:
        part = own.context_parallel_decode(*slices, mine[2], lengths, group=context, **options)
    close(own.all_gather_heads(part, group=heads_group), expected, torch.float32)


@case
def tensor_parallel(at: Ranks) -> None:
    """4 ranks share 2 KV heads: two have a copy each."""
    check_heads(at, None, None)


@case
def device_mesh(at: Ranks) -> None:
    """Heads over one dimension, pages over the other: what a rank has of both is decided by the dimension alone."""
    kind = at.device.partition(":")[0]
    mesh = dist.device_mesh.init_device_mesh(kind, (at.ranks // 2, 2), mesh_dim_names=("h", "c"))
    refused(lambda: own.membership(mesh), "group is a DeviceMesh of dimensions ('h', 'c'): must be one of them")
    member = own.membership(mesh["c"])
    assert (member.rank, member.ranks) == (at.rank % 2, 2)
    q, lengths = at.here(1, HQ, D, tag=3), torch.tensor([19], device=at.device)
    k, v = at.here(6, PAGE, HKV, D, tag=1), at.here(6, PAGE, HKV, DV, tag=2)
    expected, _ = exactly(mha_decode_paged, q, k, v, torch.arange(6)[None], lengths)
    heads, table = own.tensor_parallel_heads(HQ, HKV, group=mesh["h"]), torch.arange(6, device=at.device)[None]
    mine = table[:, member.rank * 3 : member.rank * 3 + 3].contiguous()
    part = own.context_parallel_decode(q[:, heads.q], k[:, :, heads.kv], v[:, :, heads.kv], mine, lengths,
                                       group=mesh["c"], backend=at.backend)
    close(own.all_gather_heads(part, group=mesh["h"].get_group()), expected, torch.float32)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that this rank sends to others in collectives."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, sent = getattr(dist, name), [0]

    def counting(found: Tensor, mine: Tensor, group: Any = None) -> Any:
        assert found.numel() == mine.numel() * dist.get_world_size(group)
        sent[0] += mine.numel() * mine.element_size() * (dist.get_world_size(group) - 1)
        return gather(found, mine, group=group)

    setattr(dist, name, counting)
    try:
        yield sent
    finally:
        setattr(dist, name, gather)


@case
def bytes_of_calls(at: Ranks) -> None:
    """What collectives got, of each call, is what the formula tells."""
    q, k, v = (at.here(2, 3, heads, n, dtype=torch.bfloat16) for heads, n in ((HQ, D), (HKV, D), (HKV, DV)))
    _, mine = pages(at, [5, 9], "round_robin", dtype=torch.bfloat16)
    lengths, starts = torch.tensor([5, 9], device=at.device), torch.tensor([0, 3, 6], device=at.device)
    lse = torch.empty(2, 3, HQ)
    shared: dict[str, Any] = {"placement": "round_robin", "backend": at.backend}
    queries, rows = (at.here(*shape, 48, dtype=torch.bfloat16) for shape in ((2, 3, HQ), (2 * COLUMNS + 1, PAGE)))
    calls: list[tuple[Callable[[bool], Any], Callable[[Any], tuple[Tensor, ...]]]] = [
        (lambda check: own.context_parallel_decode(q, *mine, lengths, check=check, **shared), lambda out: (out, lse)),
        (lambda check: own.context_parallel_prefill(q.flatten(0, 1), *mine, lengths, starts, check=check, **shared),
         lambda out: (out, lse)),
        (lambda check: own.context_parallel_mla_decode(queries, rows, mine[2], lengths, v_dim=32, scale=0.2,
                                                       check=check, **shared), lambda out: (out, lse)),
        (lambda check: own.all_gather_prefill(q, k, v, check=check, backend=at.backend), lambda out: (k, v)),
        (lambda check: own.all_gather_heads(q, check=check), lambda out: (q,)),
    ]
    for call, tensors in calls:
        for check in (True, False):
            with counted() as sent:
                out = call(check)
            assert sent[0] == own.bytes_sent(at.ranks, *tensors(out), check=check) > 0
    assert own.bytes_sent(at.ranks, q, check=False) == (at.ranks - 1) * 2 * 3 * HQ * D * 2


def refused(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        call()


@case
def refusals(at: Ranks) -> None:
    """At all ranks, before anything is sent."""
    _, mine = pages(at, [5, 9], "contiguous")
    q, lengths = at.here(2, 3, HQ, D), torch.tensor([5, 9], device=at.device)

    def call(**options: Any) -> Any:
        given = {"q": q, "seq_lens": lengths, "block_table": mine[2], **options}
        arrays = [given.pop("q"), *mine[:2], given.pop("block_table"), given.pop("seq_lens")]
        return own.context_parallel_decode(*arrays, backend=at.backend, **given)

    around = {"placement": "round_robin"}
    rows: list[tuple[dict[str, Any], str]] = [
        ({"placement": "ring"}, "placement is 'ring': must be one of contiguous, round_robin"),
        (around | {"window": 4}, "window 4 with placement 'round_robin'"),
        (around | {"mask": ChunkedCausalMask(4)}, "mask is ChunkedCausalMask(chunk=4)"),
        (around | {"alibi_slopes": torch.ones(HQ, device=at.device)}, "alibi_slopes with placement"),
        ({"mask": ChunkedCausalMask(5)}, "with 12 tokens at each rank: must be of chunks that are whole"),
        ({"mask": CausalPaddingMask(lengths)}, "must be None or an interval of positions"),
        ({"leftpad_k": lengths}, "leftpad_k over pages of ranks"),
        ({"balanced": True}, "balanced over pages of ranks"),
        ({"out": q}, "out has shape (2, 3, 8, 32): must be (2, 3, 8, 16)"),
        ({"return_lse": 1}, "return_lse is 1"),
        ({"q": q.clone().requires_grad_(True)}, "q requires grad"),
        ({"q": q[0, 0]}, "q has shape (8, 32)"),
        ({"seq_lens": lengths[:1]}, "seq_lens has shape (1,): must be (2,)"),
        ({"q": q[:1]}, "seq_lens has shape (2,): must be (1,), the sequences of q"),
        ({"block_table": mine[2][:1]}, "seq_lens has shape (2,): must be (1,)"),
        ({"q_positions": torch.zeros(2, 3, device=at.device)}, "q_positions has dtype"),
        ({"block_table": mine[2][0]}, "block_table has shape (3,)"),
        ({"group": "world"}, "group is 'world'"),
    ]
    with counted() as sent:
        for options, words in rows:
            refused(lambda options=options: call(**options), words)
        if at.backend == "emulator":
            most = at.ranks * COLUMNS * PAGE
            refused(lambda: call(seq_lens=lengths + most), f"seq_lens[0] is {5 + most}: must be 0 to {most}")
        q4 = q[:, :, :4].contiguous()
        scales = {"k_scale": torch.ones(2, 3, 4, device=at.device)}
        refused(lambda: own.all_gather_prefill(q4, q4, q4, **scales), "k_scale is a tensor (2, 3, 4)")
        refused(lambda: own.all_gather_prefill(q4, q4, q4, q_positions=lengths), "q_positions over tokens of all ranks")
        refused(lambda: own.tensor_parallel_heads(HQ + 1, HKV), "q_heads is 9: must be a multiple of kv_heads, 2")
        refused(lambda: own.tensor_parallel_heads(9, 3), "q_heads is 9: must be a multiple of the")
        assert sent[0] == 0
    one = dist.new_group([0])
    if at.rank:
        refused(lambda: own.membership(one), "that this rank belongs to")
    else:
        assert own.membership(one)[1:] == (0, 1)


@case
def what_differs_is_told_by_all(at: Ranks) -> None:
    _, mine = pages(at, [5, 9], "contiguous")
    q, mask = at.here(2, HQ, D), NullMask()
    lengths, last = torch.tensor([5, 9], device=at.device), at.rank == at.ranks - 1
    options: dict[str, Any] = {"mask": mask, "backend": at.backend, "check": True}
    table = mine[2][:, : COLUMNS - last].contiguous()
    where = f"at rank {at.ranks - 1}: must be the same at all ranks"
    refused(lambda: own.context_parallel_decode(q, *mine[:2], table, lengths, **options),
            "columns of block_table is 3 at rank 0 and 2", where)
    placement = own.PLACEMENTS[last]
    refused(lambda: own.context_parallel_decode(q, *mine, lengths, placement=placement, **options), "placement", where)
    refused(lambda: own.context_parallel_decode(q, *mine, lengths - int(last), **options), "seq_lens", where)
    refused(lambda: own.all_gather_heads(q[:, : HQ - last], check=True), "elements of out", where)
    long = at.here(1, 4 - last, HKV, D)
    refused(lambda: own.all_gather_prefill(long, long, long, check=True), "k.shape[1] is 4 at rank 0 and 3", where)


@case
def benchmark(at: Ranks) -> None:
    """benchmarks/context_parallel.py over a few keys: it raises for a result that is not the float64 one."""
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    import context_parallel

    told = dist.new_group(backend="gloo")
    record = context_parallel.one(256, at.ranks, None, told, at.device)
    assert 0 < record["difference_of_contiguous_replayed"] < 0.01
    assert all(record[name] > 0 for name in ("one", "part", "gather", "eager", *own.PLACEMENTS))


def left_alone(at: Ranks, last: Callable[[], None]) -> None:
    """The last rank does not come: the others get an error, no later than the group waits."""
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE))
    out = at.here(2, 3, D)
    own.all_gather_heads(out, group=group)
    if at.rank == at.ranks - 1:
        last()
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        own.all_gather_heads(out, group=group)
    assert time.monotonic() - start < PATIENCE + 10


def dies(at: Ranks) -> None:
    left_alone(at, lambda: os._exit(0))


def does_not_come(at: Ranks) -> None:
    left_alone(at, lambda: time.sleep(60))


def run(
    device: str, ranks: int, cases: dict[str, Callable[[Ranks], None]], killed: int | None = None
) -> dict[str, list[str]]:
    """What each of the ranks says of each case; one that says nothing has died. Rank ``killed`` is ended after those
    before it.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                said, name = {}, "start"
                try:
                    if sys.platform == "linux":
                        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
                    if device == "cuda":
                        torch.cuda.set_device(rank)
                    backend = "nccl" if device == "cuda" else "gloo"
                    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
                                            timeout=timedelta(seconds=60))
                    at = Ranks(device, rank, ranks)
                    for name, function in cases.items():
                        function(at)
                        said[name] = "ok"
                except BaseException:
                    said[name] = traceback.format_exc()
                Path(folder, f"said{rank}").write_text(json.dumps(said))
                os._exit(0)
            children.append(child)
        for rank, child in enumerate(children):
            if rank == killed:
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        files = [Path(folder, f"said{rank}") for rank in range(ranks)]
        told = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    return {name: [one.get(name, one.get("start", "not run")) for one in told] for name in cases}


def main(device: str, worlds: list[int]) -> dict[str, list[str]]:
    if not worlds:
        return {f.__name__: run(device, 2, {f.__name__: f}, killed=1)[f.__name__][:1] for f in (dies, does_not_come)}
    return {f"{case}, {ranks} ranks": words for ranks in worlds for case, words in run(device, ranks, CASES).items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(sys.argv[1], [int(n) for n in sys.argv[2:]])))
