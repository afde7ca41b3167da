"""Attention over a schedule on a GPU. Rests on float64 references in the tolerance of yardsticks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from decode_cases import Case, Inputs
from hopper_chip import ON_HOPPER, assert_right, run_apart
from prefill_cases import Case as MixedCase
from replays import assert_replayed
from workspaces import poison
from yardsticks import assert_accurate, nothing_waits

from kvlab.attention import attend_paged, explain, mha_decode_paged, plan
from kvlab.attention.attend_paged.config import WalkConfig, choose_walks
from kvlab.attention.attend_paged.kernel import launch
from kvlab.attention.mha_decode.config import problem_of

pytestmark = pytest.mark.gpu


FIRST = (
    "import torch; from kvlab.attention import attend_paged; "
    "q, k = torch.ones(44, 32, 128), torch.ones(180, 16, 8, 128); table = torch.arange(180).view(3, 60); "
    "args = (q.bfloat16(), k.bfloat16(), k.bfloat16(), table.int(), torch.tensor([900, 30, 700]).int()); "
    "args = [t.cuda() for t in (*args, torch.tensor([0, 1, 4, 44]).int())]; "
    "attend_paged(*args); torch.cuda.synchronize()"
)


@pytest.fixture(scope="module", autouse=True)
def it_ends() -> None:
    """Launches that wait for each other would hang the suite: the first mixed batch has a process of its own."""
    run_apart(FIRST)


def config_of(x: Inputs) -> WalkConfig:
    problem = problem_of(*x.arrays[:4])
    return choose_walks(problem, problem.tokens)


def random_case(seed: int) -> Case:
    rnd = random.Random(seed)
    kv_heads, group = rnd.choice([1, 2, 8]), rnd.choice([1, 3, 4, 8])
    longest = rnd.choice([40, 3000, 20_000])
    batch = rnd.randint(1, 12)
    lens = [rnd.choice([0, 1, 15, 16, 17, rnd.randint(0, 500), rnd.randint(0, longest)]) for _ in range(batch)]
    return Case(tuple(lens), (kv_heads * group, kv_heads), rnd.choice([64, 128, 256]), rnd.choice([5, 16, 64]),
                rnd.choice(["bf16", "fp16", "fp32"]), rnd.choice([1, 1, 2, 4, 8]),
                storage=rnd.choice(["apart", "halves", "hnd"]), seed=seed)


@pytest.mark.parametrize("seed", range(100))
def test_random_decodes(seed: int) -> None:
    """Results go over NaN; memory of partial results was NaN, too."""
    x = random_case(seed).build()
    arrays = x.torch("cuda")
    poison()
    out = torch.full_like(arrays[0], float("nan"))
    with nothing_waits():
        made, lse = launch(*arrays, scale=x.scale, config=config_of(x), out=out)
    assert_accurate(x, made.cpu(), lse.cpu())


def mixed_case(seed: int) -> MixedCase:
    rnd = random.Random(seed)
    kv_heads, group = rnd.choice([1, 2, 8]), rnd.choice([1, 3, 4, 8])
    lens = []
    for _ in range(rnd.randint(1, 12)):
        keys = rnd.choice([0, 1, 15, 16, 17, rnd.randint(0, 500), rnd.randint(0, rnd.choice([600, 6000]))])
        lens.append((min(keys, rnd.choice([0, 1, 1, rnd.randint(0, 9), rnd.randint(0, 300)])), keys))
    return MixedCase(tuple(lens), (kv_heads * group, kv_heads), rnd.choice([64, 96, 128, 256]),
                     rnd.choice(["bf16", "fp16", "fp32"]), "paged", rnd.choice([5, 16, 64]),
                     window=rnd.choice([None, None, 100]), hnd=rnd.random() < 0.3, seed=seed)


@pytest.mark.parametrize("seed", range(200))
def test_random_mixed_batches(seed: int) -> None:
    """Over NaN, twice with the same bits, and with a plan made before, with the same bits where its lists are the
    call's: Hopper's kernel has other programs than the portable one.
    """
    x = mixed_case(seed).build()
    _, arrays, options = x.arguments("cuda")
    q, k, starts, lens = arrays[0], arrays[1], arrays[5], arrays[4]
    heads = {"q_heads": x.case.heads[0], "kv_heads": x.case.heads[1], "head_dim": x.case.D, "itemsize": k.itemsize}
    poison()
    outs = [torch.full_like(q, float("nan")) for _ in range(3)]
    with nothing_waits():
        room = int(arrays[3].shape[1]) * x.case.page
        step = plan((lens, room), (starts, int(q.shape[0])), window=x.case.window, **heads) if q.shape[0] else None
        made = [attend_paged(*arrays, **options | {"out": outs[i], "plan": step if i == 2 else None},
                             return_lse=True) for i in range(3)]
    for found in (made[0], made[2]):
        assert_accurate(x, *(array.cpu() for array in found))
    walks = explain(attend_paged, *arrays, **options).config.walks
    same = step is None or [walk.schedule for walk in walks] == [one.config for one in step.walks]
    for other in made[1 : 3 if same else 2]:
        assert all(map(torch.equal, made[0], other))


@pytest.mark.parametrize("seed", range(40))
def test_random_mixed_batches_of_e4m3(seed: int) -> None:
    """K and V of e4m3: chunks by tiles of 64 and 128 rows on Hopper, scales of numbers, heads and tokens."""
    case = replace(mixed_case(1000 + seed), dtype=("bf16", "fp16")[seed % 2], kv="fp8")
    x = replace(case, scales=("number", "head", "token")[seed % 3]).build()
    _, arrays, options = x.arguments("cuda")
    poison()
    out = torch.full_like(arrays[0], float("nan"))
    with nothing_waits():
        made, lse = attend_paged(*arrays, **options, out=out, return_lse=True)
    assert_accurate(x, made.cpu(), lse.cpu())


CHUNKS = [
    MixedCase(((130, 900), (64, 700), (1, 3000), (0, 40), (33, 33), (512, 512), (9, 20)), (8, 2), 128, form="paged"),
    MixedCase(((300, 6000), (17, 17), (129, 4000), (3, 0), (70, 20)), (8, 1), 128, form="paged", page=64, hnd=True),
    MixedCase(((300, 2000), (90, 90)), (4, 4), 64, form="paged", page=128, dtype="fp16", causal=False),
    MixedCase(((300, 2000), (90, 900), (200, 300)), (8, 2), 64, form="paged", window=100),
    MixedCase(((300, 5000), (90, 900)), (8, 2), 128, form="paged", window=1000, softcap=20.0, strided=True),
    MixedCase(((300, 2000), (90, 900)), (8, 2), 128, DV=64, form="paged", page=32),
    MixedCase(((40, 20_000), (40, 100)), (64, 1), 128, form="paged", page=16),
    MixedCase(tuple((128, 128 + 900 * i) for i in range(12)), (32, 8), 128, form="paged", page=16),
    MixedCase(((300, 6000), (17, 17), (129, 4000), (3, 0)), (8, 1), 128, form="paged", kv="fp8", scales="head"),
    MixedCase(((130, 900), (33, 3000), (1, 800)), (32, 8), 128, "fp16", form="paged", page=64, kv="fp8", window=1000),
    MixedCase(((300, 2000), (90, 900)), (8, 2), 128, form="paged", kv="fp8", scales="number", softcap=20.0, page=32),
    MixedCase(((300, 2000), (64, 70), (129, 400)), (8, 1), 128, "fp8", form="paged", kv="fp8", scales="head", page=64),
    MixedCase(((300, 2000), (90, 900)), (8, 2), 128, "fp8", form="paged", kv="fp8", window=700),
    MixedCase(((300, 6000), (17, 17), (129, 4000), (3, 0), (70, 20)), (28, 4), 128, form="paged", sinks=True),
    MixedCase(((300, 2000), (90, 900), (40, 41)), (10, 2), 112, "fp16", form="paged", page=32, window=300),
    MixedCase(((300, 2000), (90, 900), (40, 41)), (24, 8), 128, form="paged", kv="fp8", scales="head", hnd=True),
    MixedCase(((130, 900), (64, 700), (1, 3000), (0, 40), (33, 33), (6, 20)), (8, 2), 192, form="paged"),
    MixedCase(((300, 2000), (90, 900), (40, 41)), (6, 2), 192, form="paged", page=64),
    MixedCase(((300, 6000), (17, 17), (129, 4000), (3, 0), (70, 20)), (8, 1), 256, "fp16", form="paged", page=64),
    MixedCase(((300, 2000), (90, 900)), (6, 2), 256, form="paged", page=32, causal=False, softcap=20.0),
    MixedCase(((300, 2000), (90, 900), (40, 41)), (8, 2), 192, DV=128, form="paged", sinks=True),
]


@ON_HOPPER[1]
@pytest.mark.parametrize("case", CHUNKS, ids=str)
def test_chunks_by_tiles_of_hopper(case: MixedCase) -> None:
    """Over NaN, twice with the same bits; NaN lies in all keys that no row sees; what "auto" takes."""
    x = case.build()
    x.poison_before_window()
    _, arrays, options = x.arguments("cuda")
    assert explain(attend_paged, *arrays, **options).backend == "hopper"
    poison()
    dtype = torch.bfloat16 if x.case.dtype == "fp8" else arrays[0].dtype
    outs = [torch.full((*arrays[0].shape[:2], x.v.shape[3]), float("nan"), dtype=dtype, device="cuda")
            for _ in range(2)]
    with nothing_waits():
        made = [attend_paged(*arrays, **options | {"out": out}, return_lse=True, backend="hopper") for out in outs]
    (assert_right if case.dtype == "fp8" else assert_accurate)(x, *(array.cpu() for array in made[0]))
    assert all(map(torch.equal, *made))


ONE_LIST = [
    MixedCase(((1, 480), (0, 17), (130, 300), (9, 128), (1, 1), (2, 0)), (8, 2), 128, form="paged"),
    MixedCase(((1, 300), (200, 200), (3, 384)), (4, 1), 80, form="paged", page=64, sinks=True),
    MixedCase(((70, 90), (1, 300), (1, 16), (8, 17)), (8, 8), 112, "fp16", form="paged", page=32),
]


@ON_HOPPER[1]
@pytest.mark.parametrize("case", ONE_LIST, ids=str)
def test_short_sequences_have_one_list(case: MixedCase) -> None:
    """Of at most 512 keys: tiles for all of them, sequences of one new token and of none, too. Over NaN, twice with the
    same bits.
    """
    x = case.build()
    _, arrays, options = x.arguments("cuda")
    told = explain(attend_paged, *arrays, **options)
    assert [walk.module for walk in told.config.walks] == ["wide.hopper"]
    poison()
    outs = [torch.full_like(arrays[0], float("nan")) for _ in range(2)]
    with nothing_waits():
        made = [attend_paged(*arrays, **options | {"out": out}, return_lse=True) for out in outs]
    assert_accurate(x, *(array.cpu() for array in made[0]))
    assert all(map(torch.equal, *made))


def test_a_captured_graph_is_replayed_with_other_lengths() -> None:
    """Of decode: lengths are written after the capture; the same lengths give the same bits."""
    x = Case((900, 4000, 70, 2500, 16), heads=(32, 8), D=128).build()
    arrays = x.torch("cuda")
    lens = arrays[4]
    out = torch.empty_like(arrays[0])
    config = config_of(x)
    launch(*arrays, scale=x.scale, config=config, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = launch(*arrays, scale=x.scale, config=config, out=out)
    assert_replayed(x, graph, lens, out, lse)


@pytest.mark.parametrize("planned", [True, False])
def test_a_graph_of_layers_is_replayed_with_other_lengths(planned: bool) -> None:
    """Both lengths and new tokens are written after the capture, and rows that no sequence has are left alone. Walks
    that share the processors have lists without an item, the second, the first, and both of them. The same lengths give
    the same bits.
    """
    batches = [((1, 900), (200, 4000), (0, 70), (4, 2500), (1, 0)), ((206, 300), (0, 0), (0, 9), (0, 4000), (0, 5)),
               ((1, 1), (1, 4000), (100, 100), (1, 3), (50, 700)), ((1, 900), (2, 70), (1, 4000), (4, 4), (0, 9)),
               ((0, 900), (0, 0), (0, 70), (0, 4000), (0, 1))]
    cases = [MixedCase(lens, (8, 2), 128, form="paged") for lens in batches]
    widest = MixedCase(tuple((41, 4000) for _ in range(5)), (8, 2), 128, form="paged").build()
    rows = 206
    q = torch.empty((rows, 8, 128), dtype=torch.bfloat16, device="cuda")
    k, v = (torch.zeros(x.shape, dtype=torch.bfloat16, device="cuda") for x in (widest.k, widest.v))
    table = torch.zeros((5, 256), dtype=torch.int32, device="cuda")
    lens, starts = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (5, 6))
    out = torch.empty_like(q)

    def step() -> Any:
        made = plan(lens, (starts, rows), q_heads=8, kv_heads=2) if planned else None
        for _ in range(2):
            result = attend_paged(q, k, v, table, lens, starts, plan=made, out=out, return_lse=True)
        return result

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = step()
    for case in cases:
        x = case.build()
        _, arrays, _ = x.arguments("cuda")
        n = len(x.q)
        for whole, part in ((q, arrays[0]), (k, arrays[1]), (v, arrays[2])):
            whole.fill_(float("nan"))
            whole[: len(part)] = part
        table.zero_()
        table[:, : arrays[3].shape[1]] = arrays[3]
        lens.copy_(arrays[4])
        starts.copy_(arrays[5])
        seen = []
        for _ in range(2):
            out.fill_(7)
            graph.replay()
            seen.append(out.clone())
        assert torch.equal(*seen)
        assert_accurate(x, out[:n].cpu(), lse[:n].cpu())
        assert bool((out[n:] == 7).all())


def test_steps_without_new_tokens() -> None:
    """No row is written, nothing is launched that waits, whatever the lengths, and however many there might be."""
    x = MixedCase(((0, 900), (0, 0), (0, 17)), (8, 2), 128, form="paged").build()
    _, arrays, options = x.arguments("cuda")
    with nothing_waits():
        for most in (1, 8, 300):
            out, lse = attend_paged(*arrays, **options, max_seqlen_q=most, return_lse=True)
            assert (tuple(out.shape), tuple(lse.shape)) == ((0, 8, 128), (0, 8))


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


@ON_HOPPER[1]
def test_mixed_batches_on_two_streams_at_once() -> None:
    """Walks that run at the same time, of calls that do, too: each has its own lists and partial results."""
    lens = tuple((new, 900 * (i % 5) + new) for i, new in enumerate([300, 1, 1, 8, 1, 4, 130, 0, 6, 1, 500, 1]))
    cases = [MixedCase(lens, (32, 8), 128, form="paged", seed=i).build() for i in range(2)]
    calls = [x.arguments("cuda")[1:] for x in cases]
    told = explain(attend_paged, *calls[0][0], **calls[0][1])
    assert told.config.beside
    assert [walk.module for walk in told.config.walks] == ["hopper", "hopper", "wide.hopper"]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    made: list[list[Any]] = [[], []]
    for _ in range(20):
        for found, stream, (arrays, options) in zip(made, streams, calls, strict=True):
            with torch.cuda.stream(stream):
                found.append(attend_paged(*arrays, **options, return_lse=True))
    torch.cuda.synchronize()
    for x, found in zip(cases, made, strict=True):
        assert_accurate(x, *(array.cpu() for array in found[0]))
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("batch", [1, 64, 1024, 4096])
def test_batches_of_many_sizes(batch: int) -> None:
    """One long sequence among short and empty ones, also with a plan of the step."""
    lens = np.random.default_rng(batch).integers(0, 60, batch)
    lens[0], lens[1::3] = 30_000, 0
    x = Case(tuple(lens.tolist()), heads=(2, 1), D=64).build()
    arrays = x.torch("cuda")
    out, lse = launch(*arrays, scale=x.scale, config=config_of(x))
    assert_accurate(x, out.cpu(), lse.cpu())
    step = plan(arrays[4], q_heads=2, kv_heads=1, head_dim=64)
    assert_accurate(x, mha_decode_paged(*arrays, plan=step).cpu())


def test_decode_of_a_pool_too_small_for_equal_lengths_has_a_schedule() -> None:
    """Without a word of the caller, and with the bits of ``balanced=True``."""
    x = Case((4000, 70, 16, 200, 0, 33, 129, 90), heads=(32, 8), D=128).build()
    arrays = x.torch("cuda")
    used = sorted({int(page) for b, n in enumerate(x.lens) for page in x.table[b, : -(-int(n) // 16)]})
    places = {page: i for i, page in enumerate(used)}
    table = torch.tensor([[places.get(int(page), 0) for page in row] for row in x.table], dtype=torch.int32).cuda()
    arrays = (arrays[0], *(cache[used].contiguous() for cache in arrays[1:3]), table, arrays[4])
    out, lse = mha_decode_paged(*arrays, return_lse=True)
    balanced = mha_decode_paged(*arrays, balanced=True, return_lse=True)
    assert all(map(torch.equal, (out, lse), balanced))
    assert_accurate(x, out.cpu(), lse.cpu())
    assert mha_decode_paged.planned(*arrays).over_schedule
