"""Transfers between ranks. Rests on the law that each byte arrives exactly once, on the encoders of both formats, and
on two processes that talk over gloo.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlab.formats import Copies, Format, Transfer, convert, heads_of_ranks, known_format, markers, transfer

DEGREES, PAGES, TOKENS = (1, 2, 4, 8), (16, 32, 64), 60


def test_all_degrees_pages_and_heads_are_proven() -> None:
    """Degrees 1, 2, 4, 8, pages of 16, 32, 64 and 1 to 16 KV heads on both sides."""
    for heads in range(1, 17):
        nhd, hnd = (
            {page: Format.parse(text.format(64 // page, page, heads)) for page in PAGES}
            for text in ("page:{0} slot:{1} head:{2} dim:2 k.bf16", "page:{0} head:{2} slot:{1} dim:2 k.bf16")
        )
        for page, other in product(PAGES, PAGES):
            for degrees in product(DEGREES, DEGREES):
                plan = transfer(nhd[page], hnd[other], degrees=degrees, tokens=TOKENS)
                owned = sum(map(len, heads_of_ranks(heads, degrees[1])))
                assert plan.proof(), (heads, page, other, degrees)
                assert plan.proof().expected == owned * TOKENS * 2 * 2


def test_a_rank_has_the_heads_of_its_query_heads() -> None:
    for heads, degree in product(range(1, 17), DEGREES):
        group = 8  # query heads of a KV head
        edge = [rank * heads * group // degree for rank in range(degree + 1)]
        want = [sorted({q // group for q in range(first, end)}) for first, end in pairwise(edge)]
        assert [list(mine) for mine in heads_of_ranks(heads, degree)] == want


def test_the_proof_notices_a_byte_that_is_lost_or_doubled() -> None:
    one = known_format("vllm.LBHNC", pages=2, heads=2, dim=8)
    plan = transfer(one, one, degrees=(2, 1))
    (pair, copies), *_ = plan.pairs.items()
    lost = Copies(copies.source[1:], copies.target[1:], copies.length[1:])
    twice = Copies(copies.source, copies.target - np.arange(len(copies)) % 2 * 8, copies.length)
    for wrong in (lost, twice):
        assert not Transfer(plan.source, plan.target, plan.tokens, {**plan.pairs, pair: wrong}).proof()


def moved(source: Format, target: Format, degrees: tuple[int, int], tokens: int) -> None:
    """Run a transfer of marker values and look at each target rank through its own decoder."""
    rng = np.random.default_rng(1)
    sizes = source.sizes["page"], target.sizes["page"]
    lists = [
        rng.permutation(size)[: -(-tokens // one.sizes["slot"])]
        for one, size in zip((source, target), sizes, strict=True)
    ]
    plan = transfer(source, target, degrees=degrees, tokens=tokens, source_pages=lists[0], target_pages=lists[1])
    assert plan.proof()
    whole = [markers((source.sizes.get("layer", 1), tokens, source.sizes.get("head", 1), part.extent("dim")), number)
             for number, part in enumerate(source.parts)]
    ends = []
    for side in (plan.source, plan.target):
        page_size = side.format.sizes["slot"]
        t = np.arange(tokens)
        page, slot = side.pages[t // page_size], t % page_size
        buffers = []
        for rank, heads in enumerate(side.heads):
            local, values = side.local(rank), []
            for part, value in zip(local.parts, whole, strict=True):
                shape = [local.sizes.get(axis, 1) for axis in ("layer", "page", "slot", "head")]
                pool = np.zeros((*shape, part.extent("dim")), np.float32)
                pool[:, page, slot] = value[:, :, list(heads)] if "head" in part.axes else value
                values.append(pool.reshape(part.shape))
            buffers.append(local.encode(*values))
        ends.append(buffers)
    sent, wanted = ends
    kept = [np.full(one.size, 0x5A, np.uint8) for one in wanted]
    for rank, (got, want) in enumerate(zip(plan.apply(sent, kept), wanted, strict=True)):
        local = plan.target.local(rank)
        bits = np.zeros(8 * want.size, bool)
        for (_, to), copies in plan.pairs.items():
            if to == rank:
                for first, length in zip(copies.target.tolist(), copies.length.tolist(), strict=True):
                    bits[first : first + length] = True
        mask = np.packbits(bits, bitorder="little")
        assert np.array_equal(got & mask, want & mask), (source.name, local.name, rank)
        assert np.array_equal(got & ~mask, 0x5A & ~mask)  # nothing else was written


@pytest.mark.parametrize(
    ("one", "other", "heads", "degrees"),
    [
        ("vllm.LBNHC", "vllm.x_split", 6, (2, 4)),
        ("max.paged", "trtllm.pool", 2, (8, 4)),
        ("aiter.shuffle", "flashinfer.nhd", 8, (4, 2)),
        ("vllm.int8_per_token_head", "vllm.int8_per_token_head", 5, (2, 8)),
        ("llama_cpp.q4_0", "llama_cpp.q4_0", 3, (1, 2)),
        ("flashinfer.nvfp4", "flashinfer.nvfp4", 4, (4, 1)),
        ("mla.656", "mla.656", 1, (4, 2)),
        ("mla.584", "mla.584", 1, (1, 4)),
        ("indexer.132", "indexer.132", 1, (2, 2)),
        ("lmdeploy.int4", "lmdeploy.int4", 2, (2, 1)),
    ],
)
def test_values_arrive_where_the_target_reads_them(one: str, other: str, heads: int, degrees: tuple[int, int]) -> None:
    sizes = {"layers": 2, "heads": heads, "dim": 64}
    moved(known_format(one, pages=5, page_size=16, **sizes), known_format(other, pages=4, page_size=32, **sizes),
          degrees, 61 if one not in ("flashinfer.nvfp4",) else 60)


def test_copies_are_as_long_as_both_sides_allow() -> None:
    """Page of 16 to page of 16 in one order, heads of a rank: the run is the heads of a token; of all heads, a page."""
    one = known_format("vllm.blocks_first", pages=4, heads=8, dim=64)
    assert np.unique(transfer(one, one, degrees=(1, 2)).pairs[0, 0].length).tolist() == [8 * 4 * 64 * 2]
    assert transfer(one, one).descriptors == 1  # the whole pool
    assert transfer(one, one, target_pages=[3, 2, 1, 0]).descriptors == 4


def test_replicas_are_served_in_turns() -> None:
    one = known_format("vllm.LBNHC", pages=1, heads=2, dim=8)
    assert sorted(transfer(one, one, degrees=(8, 4)).pairs) == [(0, 0), (2, 1), (4, 2), (6, 3)]
    row = known_format("mla.656", pages=1)
    assert sorted(transfer(row, row, degrees=(2, 4)).pairs) == [(0, 0), (0, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"source_heads": [[0, 1], [2]]}, "source_heads gives head 3 to no rank: must be heads that all have a rank"),
        ({"target_heads": [[1, 0], [2, 3]]}, r"target_heads has \(1, 0\): must be rising numbers below 4"),
        ({"tokens": 65}, "source_pages hold 64 tokens: must be pages for the 65 tokens"),
        ({"target_pages": [0, 0]}, r"target_pages is \[0, 0\]: must be different pages in \[0, 4\)"),
        ({"degrees": (0, 1)}, "degree is 0"),
        ({"source_heads": [[0], [1, 2, 3]]}, "a rank of source has 1 heads: head is 1: must be a multiple of 2"),
    ],
)
def test_bad_transfers_are_refused(how: dict[str, Any], words: str) -> None:
    one = Format.parse("page:4 kv:2 slot:16 head/2:2 head:2 dim:8 kv.bf16")
    with pytest.raises(ValueError, match=words):
        transfer(one, one, **how)


def test_buffers_of_another_type_are_refused_before_anything_is_written() -> None:
    one = Format.parse("head:2 slot:4 k.s8")
    plan, source = transfer(one, one), np.arange(8, dtype=np.uint8)
    with pytest.raises(ValueError, match=r"targets\[0\] has shape \(8,\) and dtype int8"):
        plan.apply([source], [np.zeros(8, np.int8)])
    with pytest.raises(ValueError, match="target is read-only"):
        plan.receive((0, 0), plan.message((0, 0), source), np.frombuffer(bytes(8), np.uint8))
    with pytest.raises(ValueError, match=r"message has shape \(8,\) and dtype int8: must be uint8"):
        plan.receive((0, 0), source.view(np.int8), np.zeros(8, np.uint8))


def test_one_token_is_one_token_with_or_without_its_axes() -> None:
    """A law: axes of one index say nothing; what the transfer copies is what a conversion copies."""
    one, other = Format.parse("head:4 dim:8 k.bf16"), Format.parse("page:1 slot:1 dim:8 head:4 k.bf16")
    source = np.arange(64, dtype=np.uint8)
    assert transfer(one, other).apply([source])[0].tolist() == convert(one, other).apply(source).tolist()


def test_formats_of_other_codes_are_refused() -> None:
    one = known_format("kivi.int4", pages=2, page_size=32)
    other = known_format("kivi.int4", pages=1, page_size=64)
    with pytest.raises(ValueError, match="k_scale is one for 64 tokens in target: must be one for 32"):
        transfer(one, other)
    with pytest.raises(ValueError, match="k is s8 in target: must be bf16"):
        transfer(known_format("vllm.kv_first"), Format.parse(
            known_format("vllm.kv_first").print().replace("bf16", "s8")))
    with pytest.raises(ValueError, match="target has 2 heads: must be 4"):
        transfer(known_format("vllm.hnd", heads=4), known_format("vllm.hnd", heads=2))


GLOO = """
import sys
import numpy as np, torch
import torch.distributed as dist
from kvlab.formats import known_format, markers, transfer

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
source = known_format("vllm.LBNHC", layers=2, pages=4, page_size=16, heads=3, dim=32)
target = known_format("aiter.shuffle", layers=2, pages=2, page_size=32, heads=3, dim=32)
plan = transfer(source, target, degrees=(2, 2), source_pages=[3, 1, 0, 2], target_heads=[[1, 2], [0, 1]])
k, v = markers((2, 64, 3, 32)), markers((2, 64, 3, 32), 1)

def local(side, rank):
    pool = []
    for x in (k, v):
        mine = x[:, :, list(side.heads[rank])].reshape(2, side.pages.size, -1, len(side.heads[rank]), 32)
        pages = np.zeros_like(mine)
        pages[:, side.pages] = mine
        pool.append(pages)
    one = side.local(rank)
    return one.encode(*(x.reshape(part.shape) for x, part in zip(pool, one.parts)))

mine, got = local(plan.source, rank), np.zeros(plan.target.local(rank).nbytes, np.uint8)
for (sender, receiver), copies in plan.pairs.items():
    if sender == receiver == rank:
        plan.receive((rank, rank), plan.message((rank, rank), mine), got)
    elif sender == rank:
        dist.send(torch.from_numpy(plan.message((sender, receiver), mine)), receiver)
    elif receiver == rank:
        message = torch.empty(int(copies.nbytes), dtype=torch.uint8)
        dist.recv(message, sender)
        plan.receive((sender, receiver), message.numpy(), got)
assert sum(sender != receiver for sender, receiver in plan.pairs), "nothing was sent"
assert np.array_equal(got, local(plan.target, rank))
dist.destroy_process_group()
print("arrived")
"""


def test_two_processes_transfer_over_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    root = Path(__file__).resolve().parents[2]
    ranks = [
        subprocess.Popen([sys.executable, "-c", GLOO, str(rank), str(tmp_path / "ranks")], cwd=root,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [out.strip() for out, _ in said] == ["arrived", "arrived"], said
