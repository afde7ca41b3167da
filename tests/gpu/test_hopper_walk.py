"""Decode over a schedule by Hopper's ring on its GPU. Rests on float64 references in the tolerance of yardsticks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from decode_cases import Case
from feature_cases import FP8, FeatureCase
from hopper_chip import ON_HOPPER, assert_alike, run_apart
from prefill_cases import Case as MixedCase
from replays import assert_replayed
from workspaces import guarded, poison, whole
from yardsticks import assert_accurate, nothing_waits

from kvlab.attention import attend_paged, explain, mha_decode_paged, plan

pytestmark = ON_HOPPER


FIRST = (
    "import torch; from kvlab.attention import mha_decode_paged; "
    "q, k = torch.ones(3, 32, 128), torch.ones(39, 16, 8, 128); table = torch.arange(39).view(3, 13); "
    "args = [t.cuda() for t in (q.bfloat16(), k.bfloat16(), k.bfloat16(), table.int(), "
    "torch.tensor([200, 0, 9]).int())]; "
    "mha_decode_paged(*args, balanced=True, backend='hopper'); torch.cuda.synchronize()"
)


@pytest.fixture(scope="module", autouse=True)
def it_ends() -> None:
    """Warps that wait for a copy that never comes would hang the suite: the first launch has a process of its own."""
    run_apart(FIRST)


@pytest.fixture(scope="module")
def wide_ends() -> None:
    """The same of tiles of 32 rows."""
    run_apart(FIRST.replace("3, 32, 128", "3, 8, 32, 128"))


def random_case(seed: int, rows: tuple[int, int]) -> Case | FeatureCase:
    """Uneven lengths, none among them, of sizes that the kernel takes: so many rows of a KV head."""
    rnd = random.Random(seed)
    least, most = rows
    S, group = rnd.choice([(S, n) for S in (1, 1, 2, 4, 8, 16) for n in (1, 3, 4, 8, 16) if least <= n * S <= most])
    kv_heads, longest = rnd.choice([1, 2, 3, 8]), rnd.choice([40, 3000, 20_000])
    lens = tuple(rnd.choice([0, 1, 15, 16, 17, 63, 64, 65, rnd.randint(0, 500), rnd.randint(0, longest)])
                 for _ in range(rnd.choice([1, 5, 12, 40])))
    heads, page = (kv_heads * group, kv_heads), rnd.choice([16, 16, 32, 48, 64])
    if S <= 4 and rnd.random() < 0.4:
        return FeatureCase(lens, heads=heads, D=rnd.choice([64, 80, 112, 128, 128]), S=S, page=page, kv=FP8,
                           scales=rnd.choice(["head", "number"]), sinks=rnd.random() < 0.5, seed=seed)
    if S <= 4 and rnd.random() < 0.4:
        return FeatureCase(lens, heads=heads, D=64, S=S, page=page, sinks=True, seed=seed)
    return Case(lens, heads, rnd.choice([64, 80, 96, 112, 128]), page, rnd.choice(["bf16", "fp16"]), S,
                storage=rnd.choice(["apart", "halves", "hnd"]), seed=seed)


@pytest.mark.parametrize("seed", range(30))
def test_random_decodes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    repeats_and_is_accurate(random_case(seed, (1, 16)), monkeypatch)


@pytest.mark.parametrize("seed", range(8))
def test_random_drafts(seed: int, wide_ends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    repeats_and_is_accurate(random_case(seed, (17, 32)), monkeypatch)


DEPTHS = [
    Case((900, 0, 65, 20_000), (6, 2), 80, S=2), Case((700, 63, 1), (16, 1), 96, page=64, dtype="fp16"),
    Case((3000, 17, 0, 500), (8, 8), 112, page=48, storage="hnd"), Case((3000, 9, 300), (8, 2), 96, S=8),
    Case((700, 0, 5000), (4, 1), 112, S=8, dtype="fp16"), FeatureCase((5000, 0, 33), heads=(4, 2), D=80, sinks=True),
    FeatureCase((5000, 0, 33, 4000), heads=(8, 1), D=112, S=4, sinks=True),
    FeatureCase((9000, 70), heads=(32, 2), D=96, sinks=True, dtype="fp16"),
    FeatureCase((20_000, 0, 65, 900), heads=(8, 2), D=64, kv=FP8, scales="head", sinks=True),
    FeatureCase((3000, 17, 0), heads=(8, 1), D=64, S=4, page=64, kv=FP8, scales="number"),
    FeatureCase((3000, 17, 500), heads=(8, 1), D=96, S=4, kv=FP8, storage="hnd"),
]


@pytest.mark.parametrize("case", DEPTHS, ids=str)
def test_heads_of_other_columns(case: Case | FeatureCase, wide_ends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By boxes filled up with zeros; sequences that many programs share, with sinks that one of them counts."""
    repeats_and_is_accurate(case, monkeypatch)


def repeats_and_is_accurate(case: Case | FeatureCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NaN, nothing beside the results and the partial ones; twice with the same bits, and with a plan."""
    x = case.build()
    arrays, options = x.torch("cuda"), x.torch_options("cuda") if isinstance(case, FeatureCase) else {}
    group, kv_heads = case.heads[0] // case.heads[1], case.heads[1]
    step = plan(arrays[4], case.S, q_heads=group * kv_heads, kv_heads=kv_heads, head_dim=case.D,
                itemsize=arrays[1].itemsize)
    edges = guarded(monkeypatch)
    with nothing_waits():
        made = [mha_decode_paged(*arrays, balanced=True, backend="hopper", return_lse=True, **options)
                for _ in range(2)]
        planned = mha_decode_paged(*arrays, plan=step, backend="hopper", return_lse=True, **options)
    monkeypatch.undo()
    assert whole(edges)
    assert_accurate(x, *(t.cpu() for t in made[0]))
    assert all(map(torch.equal, *made))
    if group * case.S <= 16:
        assert all(map(torch.equal, made[0], planned))
    assert_accurate(x, *(t.cpu() for t in planned))


@pytest.mark.parametrize("most", [1, 4, 8, 300])
def test_ragged_batches(most: int, wide_ends: None) -> None:
    """None to some new tokens each: drafts alone, and beside chunks, which the portable walk has; with a plan, too."""
    rnd = random.Random(most)
    lens = tuple((min(keys, rnd.choice([0, 1, 1, 4, most]), most), keys)
                 for keys in (rnd.choice([0, 3, 300, 9000]) for _ in range(20)))
    x = MixedCase(lens, heads=(8, 2), D=128, form="paged", seed=most).build()
    _, arrays, options = x.arguments("cuda")
    options |= {"backend": "hopper"} | ({} if most == 300 else {"max_seqlen_q": most})
    told = explain(attend_paged, *arrays, **options)
    assert told.backend == "hopper"
    assert told.config.walks[0].ring is not None
    poison()
    with nothing_waits():
        made = [attend_paged(*arrays, **options, return_lse=True) for _ in range(2)]
        step = plan(arrays[4], (arrays[5], int(arrays[0].shape[0])), q_heads=8, kv_heads=2)
        planned = attend_paged(*arrays, **options | {"plan": step}, return_lse=True)
    assert all(map(torch.equal, *made))
    for found in (made[0], planned):
        assert_accurate(x, *(t.cpu() for t in found))


@pytest.mark.parametrize("case", [Case((700, 0, 65, 1), heads=(8, 2), D=128), Case((90, 17), heads=(3, 3), S=4),
                                  FeatureCase((300, 0), heads=(8, 2), D=128, kv=FP8, scales="head")], ids=str)
def test_the_emulator_gives_what_the_chip_gives(case: Case | FeatureCase) -> None:
    """Both round P and the output to 16 bits; a tie may fall on either side."""
    x = case.build()
    options, on_chip = (x.options, x.torch_options("cuda")) if isinstance(case, FeatureCase) else ({}, {})
    asked = {"balanced": True, "backend": "hopper", "return_lse": True}
    ours = mha_decode_paged(*x.arrays, **asked, **options)
    out, lse = (t.cpu().float().numpy() for t in mha_decode_paged(*x.torch("cuda"), **asked, **on_chip))
    assert_alike(ours, (out, lse))


@pytest.mark.parametrize("planned", [False, True])
def test_a_captured_graph_is_replayed_with_other_lengths(planned: bool) -> None:
    """The lengths are written after the capture; the same lengths give the same bits. Queries are copied right before
    each call: a copy, that is no kernel, precedes a launch that may begin early.
    """
    x = Case((900, 4000, 70, 2500, 16), heads=(32, 8), D=128).build()
    given, k, v, table, lens = x.torch("cuda")
    out, q = torch.empty_like(given), torch.empty_like(given)

    def step() -> Any:
        over: Any = {"plan": plan(lens, q_heads=32, kv_heads=8)} if planned else {"balanced": True}
        for _ in range(2):
            q.fill_(float("nan"))
            q.copy_(given)
            found = mha_decode_paged(q, k, v, table, lens, **over, out=out, return_lse=True)
        return found

    assert explain(mha_decode_paged, q, k, v, table, lens, balanced=True).backend == "hopper"
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = step()
    assert_replayed(x, graph, lens, out, lse)


def test_two_streams_at_once() -> None:
    cases = [Case((900, 4000, 70), heads=(8, 2), D=128, seed=i).build() for i in range(2)]
    streams, on_gpu = [torch.cuda.Stream() for _ in cases], [x.torch("cuda") for x in cases]
    torch.cuda.synchronize()
    made: list[Any] = [None, None]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                made[i] = mha_decode_paged(*on_gpu[i], balanced=True, backend="hopper", return_lse=True)
    torch.cuda.synchronize()
    for x, found in zip(cases, made, strict=True):
        assert_accurate(x, *(t.cpu() for t in found))


@pytest.mark.parametrize("batch", [1, 1024, 4096])
def test_batches_of_many_sizes(batch: int) -> None:
    """One long sequence among short and empty ones."""
    lens = np.random.default_rng(batch).integers(0, 60, batch)
    lens[0], lens[1::3] = 30_000, 0
    x = Case(tuple(lens.tolist()), heads=(2, 1), D=64).build()
    out, lse = mha_decode_paged(*x.torch("cuda"), balanced=True, backend="hopper", return_lse=True)
    assert_accurate(x, out.cpu(), lse.cpu())
