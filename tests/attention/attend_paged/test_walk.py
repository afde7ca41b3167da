"""Decode over a schedule. Rests on float64 references in the tolerance of yardsticks; on decode without splits, whose
bits a sequence has that is not cut; on the compilers' artefacts.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from caught import Caught, as_launched, ptx_of
from decode_cases import Case
from feature_cases import FP8, FeatureCase
from yardsticks import assert_accurate, bits

from kvlab.attention import explain, mha_decode_paged, plan
from kvlab.attention.attend_paged import emulator
from kvlab.attention.attend_paged.config import TWINS, WalkConfig, choose_walks, register_limit, walk_of
from kvlab.attention.mha_decode import call as decode_call
from kvlab.attention.mha_decode import emulator as unsplit
from kvlab.attention.mha_decode.config import choose_config, problem_of
from kvlab.mirror import check, check_sources, lockstep
from kvlab.mirror.twin import module_file
from kvlab.staging import Traffic
from kvlab.triton_support import child

OP = "attend_paged"
KERNEL = "kvlab.attention.attend_paged.kernel:launch"


def config_of(arrays: Any, teams: int, arch: str = "sm_90", **more: Any) -> WalkConfig:
    """Tiles as a call has them, shared by so many teams; units of 16 keys at least."""
    problem = problem_of(*arrays[:4])
    tiles = choose_config(problem, num_splits=1, arch=arch)
    programs = teams * problem.kv_heads * tiles.row_tiles
    return WalkConfig((walk_of(tiles, problem, processors=programs, ctas=1, **{"overhead": 4, "least": 5} | more),))


UNEVEN = [
    (Case((1,)), 3),
    (Case((0,)), 2),
    (Case((0, 0, 0)), 4),
    (Case((300, 0, 17, 64, 65, 900, 1)), 3),
    (Case((1000, 16, 0, 1), heads=(32, 8), D=128), 7),
    (Case((300, 299), heads=(9, 3), page=48), 5),
    (Case((257, 64, 63, 65), heads=(5, 1), page=64, dtype="fp16"), 2),
    (Case((200, 3), heads=(8, 8), page=1, dtype="fp32"), 4),
    (Case((15, 16, 17, 31, 32, 33, 47, 48, 49), heads=(3, 3), D=128, dtype="fp32"), 11),
    (Case((4096, 5, 0, 100), heads=(8, 2), D=128), 9),
    (Case((100, 2000), heads=(48, 1)), 6),
    (Case((129, 3, 2, 1, 0), heads=(6, 2), S=4), 3),
    (Case((500, 70), heads=(8, 1), D=96, S=16, page=64), 5),
    (Case((20, 9, 5, 1, 0), heads=(4, 2)), 64),
    (Case((200, 17), heads=(28, 4), D=128, storage="halves"), 3),
    (Case((200, 17), heads=(4, 2), D=80, storage="hnd", dtype="fp16"), 3),
    (Case((200, 17), heads=(4, 2), D=256, storage="wide", dtype="fp32"), 3),
]


@pytest.mark.parametrize("case, teams", UNEVEN, ids=lambda v: str(v))
def test_emulated(case: Case, teams: int) -> None:
    x = case.build()
    out, lse = emulator.launch(*x.arrays, scale=x.scale, config=config_of(x.arrays, teams))
    assert_accurate(x, out, lse)


@pytest.mark.interpreter
@pytest.mark.parametrize("case, teams", UNEVEN, ids=lambda v: str(v))
def test_interpreted(case: Case, teams: int) -> None:
    """Results go over NaN; partial results that nobody wrote are what memory held."""
    x = case.build()
    out = torch.full_like(x.torch()[0], float("nan"))
    made, lse = child.run(KERNEL, *x.torch(), scale=x.scale, config=config_of(x.arrays, teams), out=out)
    assert_accurate(x, made, lse)


@pytest.mark.parametrize("arch", ["sm_80", "gfx950"])
def test_emulated_elsewhere(arch: str) -> None:
    x = Case((300, 0, 17, 900, 1), D=128).build()
    out, lse = emulator.launch(*x.arrays, scale=x.scale, config=config_of(x.arrays, 3, arch), arch=arch)
    assert_accurate(x, out, lse)


@pytest.mark.parametrize("S", [1, 3])
def test_a_sequence_that_is_not_cut_has_the_bits_of_decode(S: int) -> None:
    """One team does all sequences one after the other."""
    x = Case((300, 0, 17, 129), S=S, D=64).build()
    config = config_of(x.arrays, 1)
    ours = emulator.launch(*x.arrays, scale=x.scale, config=config)
    plain = unsplit.launch(*x.arrays, scale=x.scale, config=replace(config.walks[0].tiles, longest_first=0))
    assert [bits(a) for a in ours] == [bits(a) for a in plain]


def test_batch_invariant_drafts_have_the_same_bits_alone_and_on_other_devices() -> None:
    """Of more than one unit of 2048 keys, of less, and of none; a plan of the call is taken, another is refused."""
    x = Case((4500, 0, 40), heads=(4, 2), D=16, S=2, dtype="fp32").build()
    q, *cache, table, lens = x.arrays
    out, lse = mha_decode_paged(*x.arrays, balanced=True, batch_invariant=True, return_lse=True)
    assert_accurate(x, out, lse)
    for b in range(3):
        own = q[b : b + 1], *cache, table[b : b + 1], lens[b : b + 1]
        assert bits(mha_decode_paged(*own, balanced=True, batch_invariant=True)) == bits(out[b : b + 1])
    sizes = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "itemsize": 4}
    step = plan(lens, 2, **sizes, programs=6, batch_invariant=True)
    assert bits(mha_decode_paged(*x.arrays, plan=step, batch_invariant=True)) == bits(out)
    with pytest.raises(ValueError, match="plan has units of a fixed size"):
        mha_decode_paged(*x.arrays, plan=step)
    with pytest.raises(ValueError, match="plan has units that follow from all lengths"):
        mha_decode_paged(*x.arrays, plan=plan(lens, 2, **sizes), batch_invariant=True)


def test_the_lengths_fix_the_order_of_sums() -> None:
    """The same lengths give the same bits, also over a list that was made before, of a batch whose other sequences have
    other values.
    """
    x = Case((300, 40, 900, 1)).build()
    config = config_of(x.arrays, 5)
    one, other = (emulator.launch(*x.arrays, scale=x.scale, config=config) for _ in range(2))
    q = x.q.copy()
    q[0] = -q[0]
    changed, _ = emulator.launch(q, *x.arrays[1:], scale=x.scale, config=config)
    assert [bits(a) for a in one] == [bits(a) for a in other]
    assert bits(changed[1:]) == bits(one[0][1:])


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("backend", ["emulator", "triton", "reference"])
def test_the_public_call(backend: str) -> None:
    """Drafts of up to 16 tokens, too; the choice is told beforehand."""
    x = Case((300, 0, 40, 129), S=5, D=64).build()
    out, lse = mha_decode_paged(*x.arrays, balanced=True, backend=backend, return_lse=True)
    assert_accurate(x, out, lse)
    told = explain(mha_decode_paged, *x.arrays, balanced=True, backend=backend)
    assert told.config.walks[0].schedule.programs == 396
    assert told.grid == (396,)


def test_where_lengths_must_differ_a_gpu_has_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """By sizes alone: 9 sequences of 4 pages and one of 34, in a pool of 70 of the 340 pages that the table could name.
    What a caller fixed stays; one sequence has no other to wait for.
    """
    monkeypatch.setattr(decode_call, "on_gpu", lambda array: True)
    x = Case((34 * 16, *[64] * 9)).build()
    q, k, v, table, lens = x.arrays
    k, v = (np.concatenate([a] * 9)[:70] for a in (k, v))

    def over(*arrays: Any, **options: Any) -> bool:
        return bool(mha_decode_paged.made(*arrays, **options).over_schedule)

    assert over(q, k, v, table, lens)
    given: tuple[dict[str, Any], ...] = {"balanced": False}, {"num_splits": 2}, {"batch_invariant": True}
    assert not any(over(q, k, v, table, lens, **fixed) for fixed in given)
    assert not over(q, k, v, table[:, :14], lens)
    assert not over(q[:1], k[:9], v[:9], table[:1], lens[:1])
    assert over(q[:2], k[:9], v[:9], table[:2], lens[:2])


@pytest.mark.parametrize("options, words", [
    ({"balanced": 1}, "balanced is 1: must be True, False or None"),
    ({"balanced": True, "num_splits": 2}, "num_splits with balanced=True"),
    ({"balanced": True, "backend": "hopper", "softcap": 3.0}, "backend is 'hopper' with softcap: must be"),
    ({}, "q has 5 new tokens a sequence: must be 1 to 4"),
])
def test_bad_calls(options: dict[str, Any], words: str) -> None:
    x = Case((30,), S=5).build()
    with pytest.raises(ValueError, match=words):
        mha_decode_paged(*x.arrays, **options)


@pytest.mark.parametrize("teams", [1, 3, 7])
def test_each_key_is_read_once(teams: int) -> None:
    """Bytes from DRAM: K and V of every key, and q once for each unit of the plan and sequence without a key."""
    x = Case((300, 0, 17, 900, 1), D=64).build()
    traffic, config = Traffic(), config_of(x.arrays, teams)
    emulator.launch(*x.arrays, scale=x.scale, config=config, traffic=traffic)
    units = len(plan(x.lens, q_heads=8, kv_heads=2, config=config.walks[0].schedule).units)
    units += 2 * int((x.lens == 0).sum())
    keys, queries = 2 * x.k[0, 0].nbytes, x.q[0].nbytes // 2  # of one KV head
    assert traffic.moved["DRAM->SMEM"] == int(x.lens.sum()) * keys + units * queries


HEAVY: dict[str, Any] = {"softcap": 3.0, "sinks": True, "alibi": "head"}
FEATURES = [
    (FeatureCase((150, 0, 400), heads=(2, 1), window=70, S=2, **HEAVY), 4),
    (FeatureCase((70, 300), heads=(2, 1), D=192, Dv=128, mask="bias", dtype="fp16"), 3),
    (FeatureCase((70, 500), heads=(2, 1), D=80, Dv=48, mask="chunked", S=3, page=5, dtype="fp32"), 5),
    (FeatureCase((300, 2), heads=(2, 1), D=96, kv=FP8, scales="token", mask="padding"), 4),
    (FeatureCase((400, 3), heads=(6, 2), D=128, kv=FP8, dtype=FP8, scales="head", sinks=True), 5),
    (FeatureCase((33, 600, 2), heads=(2, 1), mask="chunked causal", alibi="sequence"), 6),
]


def feature_call(case: FeatureCase, teams: int) -> tuple[Any, dict[str, Any], Any]:
    """(arrays, arguments, what the float64 reference and PyTorch are asked of)."""
    x = case.build()
    call = x.resolved
    arguments = {"scale": x.scale, "config": config_of(call.arrays, teams), "features": call.features}
    return call.arrays, arguments, x


@pytest.mark.parametrize("case, teams", FEATURES, ids=lambda v: str(v))
def test_features_emulated(case: FeatureCase, teams: int) -> None:
    arrays, arguments, x = feature_call(case, teams)
    assert_accurate(x, *emulator.launch(*arrays, **arguments))


@pytest.mark.interpreter
@pytest.mark.parametrize("case, teams", FEATURES, ids=lambda v: str(v))
def test_features_in_lockstep(case: FeatureCase, teams: int) -> None:
    """Every output of every step, of the walk and of the join."""
    arrays, arguments, _ = feature_call(case, teams)
    named = dict(zip(("q", "k_cache", "v_cache", "block_table", "seq_lens"), arrays, strict=True))
    result = lockstep(OP, named | arguments)
    assert result.ok, str(result.first_difference)


def test_the_twins_mirror_each_other() -> None:
    report = check(OP)
    assert report.ok
    steps = {name: [step.marker.name for step in kernel.steps] for name, kernel, _ in report.twins}
    inner = ["load_k", "scores", "mask", "softmax", "load_v", "accumulate"]
    assert steps == {
        "walk": ["team", "item", "setup", *inner, "normalise", "store"],
        "join": ["setup", "load_parts", "weights", "add", "combine", "store"],
        "hopper": ["find", "begin", "unit", "begin", "unit", "store"],
    }


@pytest.mark.parametrize("twin, old, new", [
    ("walk", "start = tl.load(starts_ptr + item) + C", "start = tl.load(starts_ptr + item) - C"),
    ("walk", "(opens <= start) & (stop <= closes)", "(opens <= start) | (stop <= closes)"),
    ("walk", "opens = nth_unit * size", "opens = nth_unit * BM"),
    ("walk", "tl.maximum(until - place, 0)", "tl.maximum(until - begin, 0)"),
    ("walk", "2 * program + (start > begin)", "2 * program + (start < begin)"),
    ("join", "tl.maximum(stop - 1, start) // share - team", "tl.maximum(stop, start) // share - team"),
    ("join", "(EACH or team == one)", "(EACH or team <= one)"),
], ids=["start", "whole", "unit", "last unit", "place", "parts", "first part"])
def test_a_seeded_fault_is_found(twin: str, old: str, new: str) -> None:
    kernel, numpy = (Path(module_file(f"kvlab.attention.{OP}.{side}")).read_text() for side in ("kernel", "emulator"))
    assert kernel.count(old) == 1
    (one,) = (each for each in TWINS if each.name == twin)
    faulty = check_sources(kernel.replace(old, new), numpy, twin, twin, synonyms=one.synonyms, held=one.held)
    assert not faulty.ok


def compiled(case: Case, target: str, name: str) -> Any:
    """A kernel as a call on a GPU of ``target`` compiles it."""
    from kvlab.attention.attend_paged import kernel

    x = case.build()
    problem = problem_of(*x.arrays[:4])
    config = choose_walks(problem, problem.tokens, arch=target)
    caught = {kind: Caught(getattr(kernel, kind)) for kind in ("walk", "join")}
    with pytest.MonkeyPatch.context() as patch:
        for kind, stub in caught.items():
            patch.setattr(kernel, kind, stub)
        patch.setattr(kernel, "make_list", lambda *args, **named: (torch.zeros(4096, dtype=torch.int32),))
        kernel.launch(*x.torch(), scale=x.scale, config=config)
    arguments = caught[name].arguments
    if name == "walk":
        ptx = ptx_of(target)
        arguments["C"] = arguments["C"]._replace(PTX=ptx)
        arguments |= register_limit(config.walks[0].tiles, problem) if ptx else {}
    return as_launched(caught[name].fn, arguments, target)


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx950"])
@pytest.mark.parametrize("case", [Case((5,), heads=(32, 8), D=128), Case((5,), heads=(8, 2), S=4),
                                  Case((5,), heads=(16, 8), D=128, dtype="fp16")], ids=str)
def test_walk_compiled(case: Case, target: str) -> None:
    """Three programs fit an SM; what registers do not hold is put aside between units, not in the loop over keys."""
    made = compiled(case, target, "walk")
    if target.startswith("gfx"):
        assert made.spills == 0
        return
    assert made.registers <= 168
    assert made.spills <= 160
    assert 3 * (made.shared + 1024) <= 233472 or target == "sm_80"
    lines = made.sass.splitlines()
    products = [i for i, line in enumerate(lines) if "HMMA" in line]
    inner = "\n".join(lines[products[0] : products[-1]])
    assert not re.search(r"\b(LDL|STL)\b", inner)


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx950"])
def test_join_compiled(target: str) -> None:
    made = compiled(Case((5,), heads=(32, 8), D=128), target, "join")
    assert made.spills == 0
    assert made.shared <= 4 * 128 * made.num_warps  # what each warp has of a row's columns
