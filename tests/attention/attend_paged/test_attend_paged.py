"""New tokens of any number of each sequence in one call. Rests on float64 references in the tolerance of yardsticks; on
decode over a schedule, of which it has the bits where each sequence has as many tokens; on the compilers' artefacts.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from caught import Caught, as_launched, ptx_of
from prefill_cases import Case, Inputs
from yardsticks import assert_accurate, bits

from kvlab.attention import attend_paged, explain, mha_decode_paged, mha_prefill_paged, plan
from kvlab.attention.attend_paged import emulator
from kvlab.attention.attend_paged.config import (
    AttendProblem,
    WalkConfig,
    choose_walks,
    ragged_problem,
    register_limit,
)
from kvlab.attention.attend_paged.step import walks_of_plan
from kvlab.memory import float8_e4m3fn
from kvlab.mirror import lockstep
from kvlab.triton_support import child

KERNEL = "kvlab.attention.attend_paged.kernel:launch"


def paged(*lens: tuple[int, int], **sizes: Any) -> Case:
    """(new tokens, keys) of each sequence."""
    return Case(lens, form="paged", **sizes)


def launch_form(
    x: Inputs, processors: int, unit: int = 0, q: Any = None, **more: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(arrays, arguments) of the launch functions, on so many processors; ``q``: instead of the case's."""
    _, arrays, options = x.arguments(**more)
    arrays = arrays if q is None else (q, *arrays[1:])
    call = attend_paged.planned(*arrays, **options, backend="reference")
    problem = ragged_problem(*call.arrays[:4], call.arrays[5])
    config = choose_walks(problem, call.longest, processors=processors, batch_invariant=unit > 0)
    walks = [replace(walk, schedule=replace(walk.schedule, unit=unit)) for walk in config.walks]
    config = WalkConfig(tuple(walks))
    return call.arrays, {"scale": call.plan.scale, "features": call.features, "config": config}


MIXED = [
    (paged((1, 300), (2, 2), (0, 17), (40, 64), (130, 900), (4, 200), (9, 9), heads=(8, 2)), 2),
    (paged((1, 130), (0, 0), (0, 40), (1, 1), heads=(4, 2), D=128), 1),
    (paged((33, 33), (70, 500), (1, 600), heads=(4, 4), D=96, dtype="fp16", page=64), 3),
    (paged((5, 200), (16, 16), (1, 0), heads=(6, 1), D=80, DV=48, dtype="fp32"), 2),
    (paged((1, 400), (90, 300), (3, 170), heads=(6, 2), window=70, softcap=3.0, sinks=True, alibi="head"), 2),
    (paged((1, 90), (20, 33), heads=(2, 1), mask="striped", temperature=True), 2),
    (paged((1, 200), (60, 120), heads=(2, 1), mask="chunked causal", causal=False, page=5), 2),
    (paged((20, 90), (9, 70), (1, 300), heads=(6, 2), D=128, kv="fp8", scales="head"), 2),
    (paged((1, 90), (50, 70), heads=(4, 2), kv="fp8", scales="token", window=40, hnd=True), 2),
    (paged((1, 90), (12, 70), heads=(6, 2), D=128, dtype="fp8", scales="head", softcap=20.0, sinks=True), 2),
    (paged((130, 140), (1, 7), heads=(5, 1), alibi="sequence", causal=False, hnd=True), 3),
]


@pytest.mark.parametrize("case, processors", MIXED, ids=str)
def test_emulated(case: Case, processors: int) -> None:
    x = case.build()
    arrays, named = launch_form(x, processors)
    out, lse = emulator.launch(*arrays, **named)
    assert_accurate(x, out[0], lse[0])


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("case, processors", [MIXED[i] for i in (0, 1, 3, 4, 8)], ids=str)
def test_interpreted(case: Case, processors: int) -> None:
    """Results go over NaN; partial results that nobody wrote are what memory held."""
    x = case.build()
    arrays, named = launch_form(x, processors)
    out = np.full((*arrays[0].shape[:3], arrays[2].shape[3]), np.nan, arrays[0].dtype)
    made, lse = child.run(KERNEL, *map(torch_of, arrays), **named | {"out": torch_of(out), "features": of_torch(named)})
    assert_accurate(x, made[0], lse[0])


def torch_of(array: Any) -> Any:
    from kvlab.common.arrays import to_torch

    return to_torch(array)


def of_torch(named: dict[str, Any]) -> Any:
    """The features with torch tensors."""
    from kvlab.attention.call.backends import _each

    return _each(torch_of, (named["features"],), {})[0][0]


@pytest.mark.interpreter
def test_lockstep() -> None:
    """Every output of every step, of sequences that have chunks and of those cut in parts."""
    x = paged((40, 64), (60, 300), (0, 9), (33, 33), heads=(4, 2), window=100, sinks=True).build()
    arrays, named = launch_form(x, 2)
    named["config"] = WalkConfig((choose_walks(ragged_problem(*arrays[:4], None), 1, processors=2).walks[0],))
    names = "q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens"
    result = lockstep("attend_paged", dict(zip(names, arrays, strict=True)) | named)
    assert result.ok, str(result.first_difference)


@pytest.mark.parametrize("seed", range(40))
def test_random_batches(seed: int) -> None:
    rnd = random.Random(seed)
    lens = []
    for _ in range(rnd.randint(1, 6)):
        keys = rnd.choice([0, 1, 15, 16, 17, rnd.randint(0, 90), rnd.randint(0, 400)])
        lens.append((min(keys, rnd.choice([0, 1, 1, rnd.randint(0, 9), rnd.randint(0, 100)])), keys))
    kv_heads, group = rnd.choice([(1, 4), (2, 3), (1, 1)])
    x = paged(*lens, heads=(kv_heads * group, kv_heads), page=rnd.choice([5, 16]), dtype=rnd.choice(["bf16", "fp32"]),
              window=rnd.choice([None, None, 30]), seed=seed).build()
    arrays, named = launch_form(x, rnd.choice([1, 2, 3]))
    out, lse = emulator.launch(*arrays, **named)
    assert_accurate(x, out[0], lse[0])


@pytest.mark.parametrize("S", [1, 5])
def test_of_as_many_tokens_each_it_has_the_bits_of_decode_over_a_schedule(S: int) -> None:
    x = paged(*((S, n) for n in (300, 40, 900, 5)), heads=(8, 2)).build()
    _, (q, *cache, starts), _ = x.arguments()
    ours = attend_paged(q, *cache, starts, return_lse=True)
    theirs = mha_decode_paged(q.reshape(4, S, 8, 64), *cache, balanced=True, return_lse=True)
    assert [bits(a) for a in ours] == [bits(a.reshape(b.shape)) for a, b in zip(theirs, ours, strict=True)]


INVARIANT = [
    (MIXED[0][0], 2, 3),
    (paged((3, 400), (40, 300), (0, 90), (2, 2), (1, 0), heads=(4, 2), window=100, sinks=True), 1, 2),
    (paged((3, 200), (1, 0), (2, 20), heads=(2, 1), D=16, sinks=True), 2, 4),
]
"""With units of so many key blocks, counted from the first that an item's rows see."""


def alone(arrays: tuple[Any, ...], b: int) -> tuple[Any, ...]:
    """Arrays of a call of sequence ``b`` alone."""
    q, k, v, table, lens, starts = arrays
    own = slice(int(starts[b]), int(starts[b + 1]))
    return q[:, own], k, v, table[b : b + 1], lens[b : b + 1], starts[b : b + 2] - starts[b]


@pytest.mark.parametrize("case, processors, unit", INVARIANT, ids=str)
def test_batch_invariant_sequences_have_the_same_bits_alone(case: Case, processors: int, unit: int) -> None:
    x = case.build()
    arrays, named = launch_form(x, processors, unit)
    out, lse = emulator.launch(*arrays, **named)
    assert_accurate(x, out[0], lse[0])
    for b in np.flatnonzero(np.diff(x.cu_q)):
        own = alone(arrays, b)
        more = launch_form(x, processors + 3, unit)[1]
        found = emulator.launch(*own, **named | {"config": more["config"]})
        rows = slice(int(x.cu_q[b]), int(x.cu_q[b + 1]))
        assert [bits(a) for a in found] == [bits(a[:, rows]) for a in (out, lse)]


@pytest.mark.interpreter
def test_batch_invariant_interpreted() -> None:
    """Results go over NaN; accurate, and a sequence of several units has the same bits alone."""
    case, processors, unit = INVARIANT[2]
    x = case.build()
    arrays, named = launch_form(x, processors, unit)
    named["config"] = WalkConfig(named["config"].walks[:1])
    found = []
    for each in (arrays, alone(arrays, 0)):
        out = torch_of(np.full((*each[0].shape[:3], each[2].shape[3]), np.nan, each[0].dtype))
        found.append(child.run(KERNEL, *map(torch_of, each), **named | {"out": out, "features": of_torch(named)}))
    assert_accurate(x, *(a[0] for a in found[0]))
    assert [bits(a[:, :3]) for a in found[0]] == [bits(a) for a in found[1]]


@pytest.mark.interpreter
def test_batch_invariant_lockstep() -> None:
    """Every output of every step, of the walk and of the join, with units of a fixed size."""
    case, processors, unit = INVARIANT[2]
    x = case.build()
    arrays, named = launch_form(x, processors, unit)
    named["config"] = WalkConfig(named["config"].walks[:1])
    names = "q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens"
    result = lockstep("attend_paged", dict(zip(names, arrays, strict=True)) | named)
    assert result.ok, str(result.first_difference)


@pytest.mark.interpreter
def test_a_list_without_items_in_lockstep() -> None:
    """Every output of every step, of two walks: the first has no sequence, the second has more programs."""
    x = paged((20, 30), (17, 17), heads=(4, 2), D=16).build()
    arrays, named = launch_form(x, 2, unit=2)
    names = "q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens"
    result = lockstep("attend_paged", dict(zip(names, arrays, strict=True)) | named)
    assert result.ok, str(result.first_difference)
    assert result.grids["walk", 0] < result.grids["walk", 1]


@pytest.mark.interpreter
def test_positions_in_lockstep() -> None:
    """Every output of every step, of tokens anywhere: before their keys, behind them, at the same place; of keys behind
    padding.
    """
    x = paged((3, 200), (1, 0), (4, 20), heads=(2, 1), D=16, window=70, alibi="head").build()
    position = np.array([150, -3, 150, 0, 25, 3, 7, 1000])
    arrays, named = launch_form(x, 2, q_positions=position, leftpad_k=np.array([37, 0, 3]))
    names = "q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens"
    result = lockstep("attend_paged", dict(zip(names, arrays, strict=True)) | named)
    assert result.ok, str(result.first_difference)


@pytest.mark.parametrize("unit", [0, 3])
@pytest.mark.parametrize("case, processors", [MIXED[0], MIXED[4]], ids=str)
def test_tokens_in_another_order_with_their_positions(case: Case, processors: int, unit: int) -> None:
    """Law: they have their results in that order, whatever the units."""
    x = case.build()
    token = np.concatenate([rows[::-1] for rows in np.split(np.arange(len(x.q)), x.cu_q[1:-1])])
    new = np.diff(x.cu_q)
    position = np.repeat(x.seq_lens - new - x.cu_q[:-1], new) + np.arange(len(token))
    arrays, named = launch_form(x, processors, unit, x.q[token], q_positions=position[token])
    out, lse = (made[0][np.argsort(token)] for made in emulator.launch(*arrays, **named))
    assert_accurate(x, out, lse)


def test_what_others_have_decides_no_tile_of_a_batch_invariant_call() -> None:
    """A law of the choice: tiles and units are the same whatever the batch and the most new tokens of a sequence."""
    one, other = (
        choose_walks(ragged_problem(*launch_form(x, 1)[0][:4], x.cu_q), longest, batch_invariant=True).walks
        for x, longest in ((paged((1, 30), heads=(8, 2)).build(), 1), (MIXED[0][0].build(), 130))
    )
    assert one == other
    assert [walk.schedule.unit * walk.schedule.block for walk in one] == [2048, 32768]


def test_of_chunks_it_agrees_with_prefill() -> None:
    x = MIXED[0][0].build()
    _, arrays, _ = x.arguments()
    assert_accurate(x, *attend_paged(*arrays, return_lse=True))
    assert_accurate(x, *mha_prefill_paged(*arrays, return_lse=True))


def test_a_plan_serves_all_layers_and_changes_no_bit() -> None:
    x, lens = MIXED[0][0].build(), MIXED[0][0].lens
    _, arrays, _ = x.arguments()
    new = [n for n, _ in lens]
    plans = [plan(x.seq_lens, how, q_heads=8, kv_heads=2, head_dim=64) for how in (new, (x.cu_q, sum(new)))]
    expected = attend_paged(*arrays, return_lse=True)
    for one in plans:
        assert one.rest is not None
        made = attend_paged(*arrays, plan=one, return_lse=True)
        assert [bits(a) for a in made] == [bits(a) for a in expected]
        prefill = mha_prefill_paged(*arrays, plan=one, return_lse=True)
        assert [bits(a) for a in prefill] == [bits(a) for a in expected]
        assert explain(mha_prefill_paged, *arrays, plan=one).schedule is one
        layer = attend_paged(-arrays[0], *arrays[1:], plan=one, softcap=5.0)
        assert bits(layer) == bits(attend_paged(-arrays[0], *arrays[1:], softcap=5.0))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_a_call_with_a_plan_has_the_tiles_that_it_has_without(head_dim: int) -> None:
    """A law: the plan changes no bit whatever the rows of a tile, of which several have as many in wide heads."""
    for itemsize, group, new in itertools.product((1, 2, 4), (1, 3, 8), (1, 3, 5, 9, 17, 40)):
        sizes = {"head_dim": head_dim, "itemsize": itemsize, "q_heads": 2 * group, "kv_heads": 2}
        step = plan([90, 60, 70, 80], (np.array([0, new, new, new, new]), new), **sizes)
        problem = AttendProblem(4, new, 2 * group, 2, head_dim, head_dim, itemsize, 16, 4096, ragged=True)
        target = {"processors": 132, "arch": "sm_90", "shared": None}
        own = choose_walks(problem, new, **target)
        assert walks_of_plan(step, problem, new, batch_invariant=False, **target) == own


def test_calls_with_plans_of_other_lengths_are_of_one_kind() -> None:
    """They share what the first call has worked out; one with a plan of other sizes does not, nor one without."""
    x = MIXED[0][0].build()
    _, arrays, _ = x.arguments("cpu")
    q, *others, lens, starts = arrays
    fewer = torch.maximum(lens - 1, starts.diff())
    made = []
    for keys, heads, more in ((lens, 8, {}), (fewer, 8, {}), (lens, 8, {"programs": 8}), (lens, 8, None)):
        step = None if more is None else plan(keys, (starts, len(q)), q_heads=heads, kv_heads=2, head_dim=64, **more)
        options = {"plan": step, "max_seqlen_q": 130, "backend": "reference"}
        made.append(attend_paged.planned(q, *others, keys, starts, **options).plan)
    assert made[0] is made[1]
    assert len({id(one) for one in made}) == 3


def test_explain_tells_units_programs_and_the_busiest() -> None:
    x = MIXED[0][0].build()
    _, arrays, _ = x.arguments()
    told = explain(attend_paged, *arrays)
    assert told.schedule.busiest == max(told.schedule.costs) / told.schedule.costs.mean()
    assert "units on 396 programs, the busiest" in str(told)
    assert ", then Schedule(" in str(told)


STEP = {"q_heads": 8, "kv_heads": 2, "head_dim": 64}
BAD_PLANS: list[tuple[Any, str]] = [
    (7, "plan is 7: must be what kvlab.attention.plan gives"),
    (([300, 40], 1, {}), "plan is of 2 sequences: must be of the call's, 3"),
    (([300, 40, 9], 2, {}), "plan is of 2 new tokens: must be of the call's, 1"),
    (([300, 40, 9], 1, {"q_heads": 4}), "plan is of 2 query heads to a KV head: must be of the call's, 4"),
    (([300, 40, 9], 1, {"q_heads": 4, "kv_heads": 1}), "plan is of 1 KV heads: must be of the call's, 2"),
    (([300, 40, 9], 1, {"window": 8}), "plan is of 7 keys seen before a query's own: must be of the call's, all"),
    (([300, 40, 9], [1, 1, 1], {}), "plan is of ragged new tokens: True: must be of the call's, False"),
    (([300, 40, 9], 1, {"unit": 4}), "plan has units of a fixed size"),
    (([300, 41, 9], 1, {}), r"plan was made of seq_lens\[1\] 41: must be the call's, 40"),
]


@pytest.mark.parametrize("given, words", BAD_PLANS, ids=lambda value: str(value)[:40])
def test_a_plan_of_another_call_is_refused(given: Any, words: str) -> None:
    x = paged((1, 300), (1, 40), (1, 9), heads=(8, 2)).build()
    _, (q, *cache, _), _ = x.arguments()
    if isinstance(given, tuple):
        lens, new, more = given
        given = plan(lens, new, **STEP | more)
    out = np.full(q.shape, 7, q.dtype)
    with pytest.raises(ValueError, match=words):
        mha_decode_paged(q, *cache, plan=given, out=out)
    assert (out == 7).all()


def test_bad_calls() -> None:
    x = paged((1, 30), (2, 9), heads=(4, 2)).build()
    _, (q, *cache, starts), _ = x.arguments()
    for option, value, words in (("max_seqlen_q", 1, "is 1: must"), ("backend", "cuda", "backend is 'cuda'")):
        with pytest.raises(ValueError, match=words):
            attend_paged(q, *cache, starts, **{option: value})
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        attend_paged(q, *cache, starts[::-1].copy())


def compiled(longest: int, dtype: str, target: str = "sm_90", kv: str | None = None) -> Any:
    """The last walk of a mixed batch as a call compiles it."""
    from kvlab.attention.attend_paged import kernel

    x = paged((1, 5), (longest, longest), heads=(32, 8), D=128, dtype=dtype, kv=kv).build()
    arrays, named = launch_form(x, 132)
    caught = {name: Caught(getattr(kernel, name)) for name in ("walk", "join")}
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in caught.items():
            patch.setattr(kernel, name, stub)
        patch.setattr(kernel, "make_list", lambda *args, **more: (torch.zeros(4096, dtype=torch.int32),))
        kernel.launch(*map(torch_of, arrays), **named)
    stub, tiles = caught["walk"], named["config"].walks[-1].tiles
    arguments = stub.calls[-1][1]
    arguments["C"] = arguments["C"]._replace(PTX=ptx_of(target))
    arguments |= register_limit(tiles, ragged_problem(*arrays[:4], arrays[5]))
    return as_launched(stub.fn, arguments, target)


@pytest.mark.compile
@pytest.mark.parametrize("longest", [4, 12, 40])
def test_compiled(longest: int) -> None:
    """Tiles of 16 rows leave room for three programs on an SM, of 64 for two, of 128 for one."""
    made = compiled(longest, "bf16")
    assert made.registers <= (168 if longest == 4 else 255)
    assert made.spills <= (160 if longest == 4 else 0)
    assert ("HGMMA" in made.sass) == (longest > 4)
    ctas = {4: 3, 12: 2, 40: 1}[longest]
    assert ctas * (made.shared + 1024) <= 233472


@pytest.mark.compile
def test_large_tiles_of_e4m3_compiled() -> None:
    """Two products of even and odd columns each; registers hold all of a tile of 128 rows."""
    made = compiled(40, "bf16", kv="fp8")
    assert made.spills == 0
    loop = made.sass[made.sass.index("HGMMA") : made.sass.rindex("HGMMA")]
    assert made.instructions["HGMMA"] == 2 * (4 + 4)
    assert loop.count("\n") < 900


@pytest.mark.interpreter
def test_lockstep_of_large_tiles_of_e4m3() -> None:
    """Every output of every step; the twin takes rows whole where the kernel has even and odd columns apart."""
    x = paged((70, 90), heads=(1, 1), kv="fp8", scales="head").build()
    arrays, named = launch_form(x, 2)
    (walk,) = named["config"].walks
    assert walk.tiles.BM == 128
    names = "q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens"
    result = lockstep("attend_paged", dict(zip(names, arrays, strict=True)) | named)
    assert result.ok, str(result.first_difference)


OTHERS: dict[str, dict[str, Any]] = {
    "window before the query": {"window": (20, -3), "causal": False},
    "window behind the query": {"window": (-2, 9), "causal": False},
    "window without a left bound": {"window": (None, -2)},
    "left padding": {"leftpad_k": np.array([3, 17, 0, 250, 9])},
    "left padding and a window": {"leftpad_k": np.array([3, 17, 0, 250, 9]), "window": (20, -3)},
    "scales of sequences": {"k_scale": 0.5, "v_scale": 0.25},
    "all of e4m3": {"k_scale": 0.5, "v_scale": 0.25, "q_scale": 0.125},
}


@pytest.mark.parametrize("name", OTHERS)
def test_mixed_batches_of_other_sights_and_scales(name: str) -> None:
    """None, one, a chunk and drafts of a sequence, with a plan and without: the float64 reference's results."""
    x = paged((1, 40), (40, 70), (0, 0), (2, 300), (9, 9), heads=(4, 2)).build()
    _, arrays, _ = x.arguments()
    options, fp8 = OTHERS[name], "scale" in " ".join(OTHERS[name])
    sight = {"window": options.get("window"), "causal": options.get("causal", True)}
    if fp8:  # [B, Hkv], as flash-attention's descales
        by = np.linspace(0.5, 2, 10, dtype=np.float32).reshape(5, 2)
        options = {n: by + np.float32(step) for n, step in options.items()}
        narrow = [a.astype(float8_e4m3fn) for a in arrays[:3]]
        arrays = (narrow[0] if "q_scale" in options else arrays[0], *narrow[1:], *arrays[3:])
    if "leftpad_k" in options:
        sight = {"causal": False}
    step = plan(x.seq_lens, (x.cu_q, len(x.q)), q_heads=4, kv_heads=2, head_dim=64, itemsize=arrays[1].itemsize,
                **sight)
    exact, exact_lse = attend_paged(*arrays, **options, return_lse=True, backend="reference")
    plain = attend_paged(*arrays, backend="reference")
    assert np.abs(exact.astype(np.float64) - plain.astype(np.float64)).max() > 0.1
    for one in (None, step):
        out, lse = attend_paged(*arrays, **options, return_lse=True, plan=one)
        np.testing.assert_allclose(out.astype(np.float64), exact.astype(np.float64), rtol=2**-6, atol=2**-8)
        np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)


def test_batch_invariant_with_a_plan() -> None:
    """Law: a sequence of several units has the same bits alone and among others, with a plan of its step and without; a
    plan of other units is refused.
    """
    x = paged((3, 4500), (40, 60), (0, 5), (1, 20), heads=(4, 2), D=16, dtype="fp32").build()
    _, arrays, _ = x.arguments()
    sizes = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "itemsize": 4}
    made = []
    for chosen in (arrays, (x.q[:3], *arrays[1:3], x.table[:1], x.seq_lens[:1], x.cu_q[:2])):
        rows = chosen[5], len(chosen[0])
        for given in ({}, {"plan": plan(chosen[4], rows, **sizes, batch_invariant=True)}):
            made.append(attend_paged(*chosen, batch_invariant=True, **given)[:3])
    assert len({bits(one) for one in made}) == 1
    assert bits(attend_paged(*arrays)[:3]) != bits(made[0])
    other = plan(x.seq_lens, (x.cu_q, len(x.q)), **sizes)
    with pytest.raises(ValueError, match="plan has units that follow from all lengths"):
        attend_paged(*arrays, batch_invariant=True, plan=other)
    halves, sizes = [a.astype(np.float16) for a in arrays[:3]], sizes | {"itemsize": 2, "batch_invariant": True}
    other = plan(x.seq_lens, (x.cu_q, len(x.q)), **sizes)  # for an H100
    with pytest.raises(ValueError, match=r"plan has tiles or units of another machine .* made for sm_80"):
        attend_paged(*halves, *arrays[3:], batch_invariant=True, plan=other, arch="sm_80")
