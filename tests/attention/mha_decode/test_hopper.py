"""Hopper's decode kernel where there is no GPU: what the compiler makes of it, its emulator, when it is chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from caught import SHARED, Caught, as_if_on, as_launched, as_tensors
from decode_cases import Case
from feature_cases import ENDS, FP8, FeatureCase
from hopper_launches import decode_arguments
from seeded_faults import HOPPER, is_found
from yardsticks import assert_accurate, bits

from kvlab.attention import explain, mha_decode_paged
from kvlab.attention.mha_decode import hopper_emulator
from kvlab.attention.mha_decode.config import HOPPER_ROLES, DecodeProblem
from kvlab.attention.mha_decode.hopper_config import HopperDecodeConfig, choose_hopper, shared_bytes
from kvlab.staging import Traffic
from kvlab.triton_support.versions import gluon_lacks

CASES = [
    Case((200, 0, 65), heads=(32, 8), D=128),
    Case((129, 3, 2, 1, 0), heads=(8, 8), D=128, page=48, S=4, splits=3),
    Case((300, 299), heads=(9, 3), D=64, page=64, dtype="fp16"),
    Case((257, 64, 63, 65), heads=(16, 1), D=64, page=8),
    Case((150, 20), heads=(6, 2), D=128, S=2, page=24, storage="hnd", splits=2),
    Case((90, 17), heads=(28, 4), D=128, page=128, storage="halves"),
    Case((40, 17), heads=(4, 2), D=64, storage="wide", dtype="fp16"),
    Case((130, 0, 65), heads=(12, 4), D=80),
    Case((90, 17), heads=(6, 3), D=112, S=2, page=24, storage="hnd", splits=2),
    Case((130, 0, 65), heads=(8, 2), D=192),
    Case((200, 17), heads=(6, 3), D=256, S=2, page=24, storage="hnd", splits=2, dtype="fp16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_emulator_is_accurate(case: Case) -> None:
    """Against the float64 reference. All that must not be read is NaN, as ``out`` is, and shared memory is poisoned."""
    x = case.build()
    out = np.full_like(x.q, np.nan)
    out, lse = mha_decode_paged(*x.arrays, backend="hopper", num_splits=case.splits, return_lse=True, out=out)
    assert_accurate(x, out, lse)


PAIRS = [
    FeatureCase(lens=(150, 0, 17), heads=(8, 4), D=128, kv=FP8, scales="head"),
    FeatureCase(lens=(70, 3), heads=(6, 3), D=128, S=2, page=8, kv=FP8, scales="number", splits=2),
    FeatureCase(lens=(100,), heads=(8, 8), D=128, dtype="fp16", page=64, kv=FP8, storage="hnd"),
    FeatureCase(lens=(150, 0, 17), heads=(8, 4), D=64, kv=FP8, scales="head"),
    FeatureCase(lens=(150, 3), heads=(6, 2), D=80, S=2, page=8, kv=FP8, scales="number", splits=2),
    FeatureCase(lens=(100,), heads=(3, 3), D=112, dtype="fp16", page=64, kv=FP8, storage="hnd"),
]


@pytest.mark.parametrize("case", [*PAIRS, *ENDS], ids=str)
def test_the_emulator_is_accurate_with_e4m3_and_at_the_ends(case: FeatureCase) -> None:
    x = case.build()
    out, lse = mha_decode_paged(*x.arrays, backend="hopper", num_splits=case.splits, return_lse=True, **x.options)
    assert_accurate(x, out, lse)


def test_bytes_of_an_item() -> None:
    """Rests on arithmetic: four KV heads of 128 keys are eight blocks of 64 rows of K and of V; they come once, and
    go to registers once.
    """
    traffic, x = Traffic(), Case((128,), heads=(16, 4), D=128).build()
    mha_decode_paged(*x.arrays, backend="hopper", num_splits=1, traffic=traffic)
    both = 2 * 128 * 4 * 128 * 2
    assert traffic.moved["DRAM->SMEM"] == traffic.moved["SMEM->registers"] == both
    assert traffic.moved["registers->DRAM"] == 16 * (128 * 2 + 4)



def with_constants(config: HopperDecodeConfig, **changes: Any) -> HopperDecodeConfig:
    return dataclasses.replace(config, constants=config.constants._replace(**changes))


@pytest.mark.parametrize("changes", [{"LONGEST_FIRST": 8}, {"NB": 3}, {"NB": 5}], ids=str)
def test_the_order_of_programs_and_the_depth_change_nothing(changes: dict[str, int]) -> None:
    arrays, named = decode_arguments(Case((70, 300, 0, 129, 5), heads=(8, 2), splits=1))
    config = named.pop("config")
    before = tuple(map(bits, hopper_emulator.launch(*arrays, **named, config=config)))
    other = with_constants(config, **changes)
    assert tuple(map(bits, hopper_emulator.launch(*arrays, **named, config=other))) == before


SPLIT = [
    Case((150, 20, 0, 3), heads=(8, 8), D=64, S=4, page=8, splits=5),
    Case((700,), heads=(4, 1), D=128, splits=23),
    Case((300, 0, 40), heads=(6, 2), D=96, splits=5, dtype="fp16"),
    Case((200, 0, 70), heads=(6, 3), D=192, splits=3),
    FeatureCase((100, 1), heads=(8, 4), D=128, S=2, kv=FP8, scales="head", splits=3),
    FeatureCase((100, 1), heads=(8, 4), D=96, kv=FP8, splits=3),
]


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_who_comes_last_does_not_matter(case: Case | FeatureCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts are taken in the order of the keys, and the counters are 0 again. Partial results that no program
    writes are NaN.
    """
    arrays, named = decode_arguments(case)
    made, launch = [], hopper_emulator.HopperDecodeLaunch

    def noted(*args: Any) -> hopper_emulator.HopperDecodeLaunch:
        made.append(launch(*args))
        return made[-1]

    monkeypatch.setattr(hopper_emulator, "HopperDecodeLaunch", noted)
    before = tuple(map(bits, hopper_emulator.launch(*arrays, **named)))
    run_roles = hopper_emulator.run_roles
    monkeypatch.setattr(hopper_emulator, "run_roles", lambda roles: run_roles(roles[::-1]))
    assert tuple(map(bits, hopper_emulator.launch(*arrays, **named))) == before
    assert not any(x.counters.any() for x in made)
    assert np.isnan(made[0].out).any()
    assert_accurate(case.build(), made[0].joined, made[0].joined_lse)


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_joined_or_merged(case: Case | FeatureCase) -> None:
    """One launch in place of two; float32 sums in another order."""
    arrays, named = decode_arguments(case)
    config = named.pop("config")
    assert config.constants.PARTS > 0
    counted = Traffic(), Traffic()
    joined = hopper_emulator.launch(*arrays, **named, config=config, traffic=counted[0])
    merged = hopper_emulator.launch(*arrays, **named, config=with_constants(config, PARTS=0), traffic=counted[1])
    np.testing.assert_allclose(joined[1], merged[1], rtol=1e-5, atol=1e-6)
    for result in joined, merged:
        assert_accurate(case.build(), *result)
    assert counted[0].moved["DRAM->SMEM"] == counted[1].moved["DRAM->SMEM"]


@pytest.mark.parametrize(
    "side, before, after",
    [
        ("kernel", "#: arrive -> last ", "#: arrive -> first "),
        ("emulator", "for first in range(0, splits, C.PARTS):", "for first in range(splits):"),
        ("kernel", "#: load -> b, key, found ", "#: loads -> b, key, found "),
        ("emulator", "        #: load_v -> v ", "        #: load_v -> v, k "),
        ("emulator", "        #: load_k -> b, key ", "        #: load_k -> b "),
    ],
)
def test_a_seeded_fault_is_found(side: str, before: str, after: str) -> None:
    """The static check of the twins; that they are twins, test_mirror checks."""
    assert is_found("mha_decode", HOPPER_ROLES, side, before, after, HOPPER)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dtype": "fp32"}, "q of dtype float32"),
        ({"D": 72}, "head dimensions 72 and 72"),
        ({"D": 128, "Dv": 64}, "head dimensions 128 and 64"),
        ({"D": 48, "kv": FP8}, "head dimensions 48 and 48"),
        ({"dtype": FP8, "kv": FP8, "D": 128}, "q of dtype float8_e4m3fn"),
        ({"heads": (40, 2)}, "1 new tokens of 20 query heads a KV head"),
        ({"heads": (12, 2), "S": 3}, "3 new tokens of 6 query heads a KV head"),
        ({"window": 20}, "a mask other than the causal one"),
        ({"mask": "chunked causal"}, "a mask other than the causal one"),
        ({"mask": "padding"}, "a mask other than the causal one"),
        ({"mask": "bias"}, "a mask other than the causal one"),
        ({"softcap": 5.0}, "softcap"),
        ({"sinks": True}, "sinks"),
        ({"alibi": "head"}, "alibi_slopes"),
        ({"kv": FP8, "D": 128, "scales": "token"}, "scales of tokens"),
        ({"page": 12}, "page size 12"),
    ],
)
def test_hopper_says_what_it_supports(changes: dict[str, Any], message: str) -> None:
    x = FeatureCase(**changes).build()
    with pytest.raises(ValueError, match=f"backend is 'hopper' with {message}.*: must be bf16 or fp16 with a cache"):
        mha_decode_paged(*x.arrays, backend="hopper", **x.options)


def test_arrays_that_it_does_not_take() -> None:
    x = Case((5,)).build()
    k = np.zeros((*x.k.shape[:3], 68), x.k.dtype)[..., 4:]
    with pytest.raises(ValueError, match="the strides or the alignment of k_cache: must be"):
        mha_decode_paged(x.q, k, x.v, x.table, x.lens, backend="hopper")
    with pytest.raises(ValueError, match="no sequences or no pages: must be"):
        mha_decode_paged(x.q[:0], x.k, x.v, x.table[:0], x.lens[:0], backend="hopper")
    with pytest.raises(ValueError, match="num_splits is 65: must be an integer from 1 to 64"):
        mha_decode_paged(*x.arrays, backend="hopper", num_splits=65)


@pytest.mark.parametrize(
    "arch, changes, backend, reason",
    [
        ("sm_90", {}, "hopper", "torch tensors on sm_90"),
        ("sm_90", {"D": 256}, "hopper", "torch tensors on sm_90"),
        ("sm_100", {}, "triton", "not the Hopper kernel: a GPU of sm_100"),
        ("sm_90", {"sinks": True}, "triton", "not the Hopper kernel: sinks"),
        ("sm_90", {"page": 8}, "triton", "not the Hopper kernel: pages of 8 tokens, whose boxes are many"),
    ],
)
def test_when_auto_takes_it(
    monkeypatch: pytest.MonkeyPatch, arch: str, changes: dict[str, Any], backend: str, reason: str
) -> None:
    as_if_on(monkeypatch, arch)
    x = FeatureCase(**changes).build()
    found = explain(mha_decode_paged, *x.torch(), **x.torch_options())
    assert found.backend == backend
    assert reason in found.reason


def test_the_grid_does_not_depend_on_lengths_and_splits_are_those_asked_for() -> None:
    x = Case((300, 4096), heads=(32, 8), D=128).build()
    short = x.with_(lens=np.array([1, 0], np.int32))

    def plan(x: Any, **options: Any) -> HopperDecodeConfig:
        found: HopperDecodeConfig = explain(mha_decode_paged, *x.arrays, backend="hopper", **options).config
        return found

    assert plan(x) == plan(short)
    assert plan(x, num_splits=5).num_splits == 5
    assert plan(x, batch_invariant=True).num_splits == 2


@pytest.mark.parametrize(
    "batch, keys, heads, tokens, itemsize, chosen",
    [
        (1, 4096, (32, 8), 1, 2, (1, 3, 16, 16)),
        (1, 131072, (32, 8), 1, 2, (1, 3, 16, 16)),
        (4, 4096, (32, 8), 1, 2, (1, 2, 8, 16)),
        (32, 4096, (32, 8), 1, 2, (1, 2, 1, 0)),
        (64, 4096, (32, 8), 1, 2, (2, 2, 1, 0)),
        (1, 16384, (32, 8), 1, 1, (1, 4, 16, 16)),
        (8, 16384, (32, 8), 1, 1, (1, 2, 4, 16)),
        (64, 16384, (32, 8), 1, 1, (2, 2, 1, 0)),
        (1, 8192, (32, 8), 4, 2, (1, 3, 16, 0)),
        (1, 1, (32, 8), 1, 2, (1, 3, 1, 0)),
    ],
)
def test_heads_of_a_block_stages_splits_and_who_puts_them_together(
    batch: int, keys: int, heads: tuple[int, int], tokens: int, itemsize: int, chosen: tuple[int, ...]
) -> None:
    """Rests on the measured times in benchmarks/NOTES.md: a launch that merges where the join took longer."""
    problem = DecodeProblem(batch, tokens, *heads, 128, 128, itemsize, 16, keys)
    config = choose_hopper(problem)
    C = config.constants
    assert (C.HEADS, C.NB, config.num_splits, C.PARTS) == chosen


@pytest.mark.parametrize("batch, keys, D, itemsize, chosen", [
    (64, 4096, 112, 2, (4, 2, 2, 4)), (32, 4096, 96, 2, (4, 2, 4, 4)), (8, 4096, 112, 2, (2, 2, 8, 8)),
    (1, 131072, 112, 2, (1, 2, 16, 16)), (64, 4096, 112, 1, (2, 2, 1, 0)), (64, 4096, 64, 1, (2, 4, 1, 0)),
    (1, 131072, 64, 2, (1, 4, 16, 16)), (32, 4096, 64, 2, (1, 2, 1, 0)),
])
def test_heads_whose_rows_share_lines(batch: int, keys: int, D: int, itemsize: int, chosen: tuple[int, ...]) -> None:
    """As above: four heads of rows that are not whole lines, where the programs put the splits together."""
    config = choose_hopper(DecodeProblem(batch, 1, 32, 8, D, D, itemsize, 16, keys))
    C = config.constants
    assert (C.HEADS, C.NB, config.num_splits, C.PARTS) == chosen


def test_what_is_batch_invariant_is_merged_by_a_launch() -> None:
    """A capture that has no counters merges: whether it has must not change the bits."""
    for batch in 1, 3, 300:
        problem = DecodeProblem(batch, 1, 32, 8, 128, 128, 2, 16, 8192)
        config = choose_hopper(problem, batch_invariant=True)
        assert (config.constants.HEADS, config.num_splits, config.constants.PARTS) == (2, 4, 0)


MATRIX: list[Case | FeatureCase] = [
    Case((70,) * 3, heads=(32, 8), D=128, splits=1),
    Case((1,) * 300, heads=(32, 8), D=128, splits=1),
    Case((70,), heads=(32, 8), D=128, page=64, splits=2),
    Case((70,) * 3, heads=(8, 8), D=64, S=4, page=8, dtype="fp16", splits=1),
    Case((600,), heads=(9, 1), D=128, page=48),
    Case((1100,), heads=(32, 8), D=128),
    Case((70,) * 3, heads=(32, 8), D=80, splits=1),
    Case((1100,), heads=(32, 8), D=112),
    Case((70,) * 3, heads=(16, 4), D=192, page=64, splits=1),
    Case((1100,), heads=(16, 4), D=256),
    FeatureCase((70,) * 3, heads=(32, 8), D=128, kv=FP8, scales="head", splits=1),
    FeatureCase((70,), heads=(3, 3), D=128, kv=FP8, S=2, splits=2, dtype="fp16"),
    FeatureCase((70,) * 3, heads=(32, 8), D=64, kv=FP8, scales="head", splits=1),
    FeatureCase((1100,), heads=(32, 8), D=112, kv=FP8),
]


@pytest.mark.compile
@pytest.mark.skipif(gluon_lacks() is not None, reason="a release of Triton for which it is not chosen")
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_compiled(case: Case | FeatureCase) -> None:
    """No spills, two CTAs on an SM (one of 256 columns), every 16 bytes read once by ldmatrix, and as many products as
    a block needs.
    """
    import torch

    from kvlab.attention.mha_decode import hopper

    arrays, named = decode_arguments(case)
    caught = Caught(hopper.attend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "attend", caught)
        patch.setattr(hopper, "arrivals", lambda count, device: torch.zeros(count, dtype=torch.int32, device=device))
        hopper.launch(*map(as_tensors, arrays), **as_tensors_of(named))
    made, C = as_launched(caught.fn, caught.arguments, "sm_90"), named["config"].constants
    count, W = made.instructions, C.W
    assert made.spills == 0
    assert made.stack == 0
    ctas = 2 if W <= 128 else 1
    assert made.registers * made.num_warps * ctas <= 2048
    assert made.shared <= shared_bytes(C)
    assert ctas * (shared_bytes(C) + 1024) <= SHARED["sm_90"] + 1024
    sums = 8 if W == 32 else 0  # of the warps, which come so where a lane has one column of them
    assert count["LDSM"] == 2 * C.BN // 4 * W // 256 + sums  # x4: 512 bytes a warp
    assert count["HMMA"] == 2 * (2 if C.PAIRS else 1) * C.BN // 4 * W // 128
    assert count["UTMALDG"] == 2 * -(-W // 64) * (C.BT // C.BOX)


def as_tensors_of(named: dict[str, Any]) -> dict[str, Any]:
    return named | {"features": as_tensors(named["features"])}
