"""Calls over a schedule on a GPU: a query of V, plans of prefills, sinks, a million keys, memory beside the workspaces.
Rests on float64 references, in the tolerance of yardsticks.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hopper_chip import ON_HOPPER
from prefill_cases import Case
from queried_values import narrowed, queried
from workspaces import guarded, poison, whole
from yardsticks import assert_accurate, nothing_waits

from kvlab.attention import attend_paged, explain, mha_decode_paged, mha_prefill_paged, plan
from kvlab.common.arrays import to_torch

pytestmark = pytest.mark.gpu


def lens_of(rnd: random.Random, most_new: int) -> tuple[tuple[int, int], ...]:
    """None, one, drafts and chunks of sequences, and none to a few thousand keys."""
    keys = [rnd.choice([0, 1, 16, 17, rnd.randint(0, 500), rnd.randint(0, 6000)]) for _ in range(rnd.randint(1, 10))]
    return tuple((min(n, rnd.choice([0, 1, 1, 4, rnd.randint(0, most_new)])), n) for n in keys)


@pytest.mark.parametrize("seed", range(20))
def test_queries_of_v(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NaN, nothing beside the results and the partial ones; with a plan the same bits; K and V have strides of
    their own.
    """
    rnd = random.Random(seed)
    D, DV = rnd.choice([(64, 512), (64, 256), (48, 320)])
    heads = rnd.choice([(16, 1), (8, 2), (6, 2)])
    x = Case(lens_of(rnd, 60), heads, D + DV, rnd.choice(["bf16", "fp16"]), "paged", rnd.choice([5, 16, 64]), DV=DV,
             window=rnd.choice([None, 100]), seed=seed).build()
    arrays, qv = queried(x, D, "cuda")
    options = {"window": x.case.window, "return_lse": True, "qv": qv}
    edges = guarded(monkeypatch)
    outs = [torch.full((*qv.shape[:2], DV), float("nan"), dtype=qv.dtype, device="cuda") for _ in range(2)]
    with nothing_waits():
        made = [attend_paged(*arrays, **options, out=outs[0])]
        if len(qv):
            room = int(arrays[3].shape[1]) * x.case.page
            step = plan((arrays[4], room), (arrays[5], len(qv)), q_heads=heads[0], kv_heads=heads[1], head_dim=D + DV,
                        window=x.case.window)
            made.append(mha_prefill_paged(*arrays, **options, out=outs[1], plan=step))
    monkeypatch.undo()
    assert not len(qv) or whole(edges)
    for found in made:
        assert_accurate(x, *(t.cpu() for t in found))
    assert all(map(torch.equal, made[0], made[-1]))


@pytest.mark.parametrize("scales", ["number", "head", "sequence", "token"])
@pytest.mark.parametrize("seed", range(3))
def test_queries_of_v_of_e4m3(seed: int, scales: str) -> None:
    """K and V with scales of their own in both products, over the call's own schedule and a plan; the same plan gives
    the same bits.
    """
    rnd = random.Random(seed)
    D, DV = [(64, 512), (64, 256), (48, 320)][seed]
    x = Case(((1, 900), (5, 3000), (0, 17), (40, 64), *lens_of(rnd, 20)), (16, 1), D + DV, form="paged", DV=DV).build()
    wide, second = queried(x, D)
    arrays, by = narrowed(x, wide, D, scales)
    (qs, ks, vs, table, lens, starts), qv = (to_torch(a).cuda() for a in arrays), to_torch(second).cuda()
    options = {n: to_torch(b).cuda() if isinstance(b, np.ndarray) else b for n, b in by.items()}
    options |= {"return_lse": True, "qv": qv}
    step = plan(lens, (starts, len(qs)), q_heads=16, kv_heads=1, head_dim=D + DV, itemsize=1)
    with nothing_waits():
        made = [attend_paged(qs, ks, vs, table, lens, starts, **options, plan=one) for one in (None, step, step)]
    for found in made:
        assert_accurate(x, *(t.cpu() for t in found))
    assert all(map(torch.equal, made[1], made[2]))


def test_decode_with_queries_of_v_in_a_graph() -> None:
    """Replayed with other lengths, none among them."""
    lens = (900, 3000, 70)
    x = Case(tuple((2, n) for n in lens), (16, 1), 576, form="paged", DV=512).build()
    (q, k, v, table, keys, _), qv = queried(x, 64, "cuda")
    q, qv, out = q.view(3, 2, 16, 64), qv.reshape(3, 2, 16, 512), torch.empty((3, 2, 16, 512), dtype=q.dtype).cuda()
    step = lambda: mha_decode_paged(q, k, v, table, keys, qv=qv, out=out)  # noqa: E731
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new in ((0, 3000, 2), (900, 3000, 70)):
        keys.copy_(torch.tensor(new, dtype=keys.dtype))
        out.fill_(float("nan"))
        graph.replay()
        expected = mha_decode_paged(q, k, v, table, keys, qv=qv)
        assert torch.equal(out, expected)
    assert_accurate(x, out.view(6, 16, 512).cpu())


TILES = [
    Case(((130, 900), (64, 700), (1, 3000), (0, 40), (512, 512), (9, 20)), (16, 2), 64, form="paged", sinks=True),
    Case(((300, 2000), (90, 900), (2, 300)), (8, 2), 80, form="paged", sinks=True, window=100),
    Case(((300, 5000), (40, 100), (70, 70)), (8, 8), 96, form="paged", page=64, softcap=20.0),
    Case(((300, 5000), (200, 200)), (8, 1), 112, dtype="fp16", form="paged", page=32, strided=True),
]


@ON_HOPPER[1]
@pytest.mark.parametrize("case", TILES, ids=str)
def test_tiles_of_hopper_beside_their_workspaces(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks and other heads over the list; NaN lies in all keys that no row sees; twice with the same bits."""
    x = case.build()
    x.poison_before_window()
    _, arrays, options = x.arguments("cuda")
    assert explain(attend_paged, *arrays, **options).backend == "hopper"
    edges = guarded(monkeypatch)
    with nothing_waits():
        made = [attend_paged(*arrays, **options, return_lse=True) for _ in range(2)]
    monkeypatch.undo()
    assert whole(edges)
    assert_accurate(x, *(t.cpu() for t in made[0]))
    assert all(map(torch.equal, *made))


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_mixed_batches_on_two_streams(backend: str) -> None:
    """At once, again and again: the results of each alone."""
    lens = ((130, 900), (1, 4000), (0, 40), (4, 700), (33, 33))
    cases = [Case(lens, (8, 2), 128, form="paged", seed=i).build() for i in range(2)]
    streams, calls = [torch.cuda.Stream() for _ in cases], [x.arguments("cuda")[1:] for x in cases]
    alone = [attend_paged(*arrays, **options, backend=backend, return_lse=True) for arrays, options in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        poison()
        made: list[Any] = []
        for stream, (arrays, options) in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                made.append(attend_paged(*arrays, **options, backend=backend, return_lse=True))
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, own) for found, own in zip(made, alone, strict=True))
    for x, found in zip(cases, alone, strict=True):
        assert_accurate(x, *(t.cpu() for t in found))


@pytest.mark.parametrize("new", [(1, 0, 1, 1), (40, 1, 0, 3)])
def test_a_million_keys(new: tuple[int, ...]) -> None:
    """Beside sequences of few and of none; the float64 sums are the GPU's own."""
    lens, page = (1_000_000, 1, 0, 17), 64
    columns = -(-lens[0] // page)
    generator = torch.Generator("cuda").manual_seed(3)
    k, v = (torch.randn((columns + 2, page, 1, 64), generator=generator, device="cuda").bfloat16() for _ in range(2))
    table = torch.full((4, columns), columns + 7, dtype=torch.int32)
    table[0] = torch.randperm(columns, generator=torch.Generator().manual_seed(3)).int()
    table[1, 0], table[3, 0] = columns, columns + 1
    new = tuple(min(pair) for pair in zip(new, lens, strict=True))
    starts = torch.tensor([0, *np.cumsum(new).tolist()], dtype=torch.int32).cuda()
    q = torch.randn((sum(new), 4, 64), generator=generator, device="cuda").bfloat16()
    arrays = q, k, v, table.cuda(), torch.tensor(lens, dtype=torch.int32).cuda(), starts
    out, lse = attend_paged(*arrays, return_lse=True, max_seqlen_q=max(new))
    at = 0
    for b, (S, n) in enumerate(zip(new, lens, strict=True)):
        if S:
            pages = table[b, : -(-n // page)].cuda().long()
            keys, values = (x[pages].flatten(0, 1)[:n, 0].double() for x in (k, v))
            limit = torch.arange(n - S, n, device="cuda")[:, None, None]
            s = torch.einsum("shd,nd->shn", q[at : at + S].double(), keys) / 8
            s = s.masked_fill(torch.arange(n, device="cuda") > limit, -torch.inf)
            torch.testing.assert_close(lse[at : at + S].double(), s.logsumexp(-1), rtol=1e-5, atol=1e-5)
            p = s.softmax(-1)
            exact = p @ values
            noise = (p.square() @ values.square()).sqrt()  # of weights that are rounded to 8 bits, each by itself
            assert ((out[at : at + S].double() - exact).abs() <= 2**-8 * exact.abs() + 2**-7 * noise).all()
        at += S
