"""Hopper's prefill kernel where there is no GPU: what the compiler makes of it, its emulator, when it is chosen."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from caught import SHARED, Caught, as_if_on, as_launched, as_tensors
from hopper_launches import prefill_arguments, stored_by_tma
from prefill_cases import ENDS, Case, Inputs
from yardsticks import assert_accurate, bits

from kvlab.attention import explain, mha_prefill, mha_prefill_paged
from kvlab.attention.hopper.cta import accumulator
from kvlab.attention.hopper.turns import run_roles
from kvlab.attention.mha_prefill import hopper_emulator
from kvlab.attention.mha_prefill.hopper_config import FIXED_MOST, FP8_DIMS, HEAD_DIMS, TANH, shared_bytes
from kvlab.attention.mha_prefill.hopper_emulator import HopperPrefillLaunch
from kvlab.common.arrays import to_torch
from kvlab.hardware import BarrierDeadlock
from kvlab.memory import Memory, bfloat16
from kvlab.staging import Fragments, Hazards
from kvlab.triton_support.compile import Compiled
from kvlab.triton_support.versions import gluon_lacks

RAGGED = ((70, 200), (0, 5), (3, 0), (65, 130))
CASES = [
    Case(((130, 200),) * 2, heads=(4, 2), strided=True),
    Case(((300, 260),), heads=(2, 1), D=128, window=(100, 3), causal=False, dtype="fp16"),
    Case(RAGGED, heads=(2, 1), D=256, form="ragged", softcap=15.0),
    Case(RAGGED, heads=(4, 2), D=128, form="paged", sinks=True, window=50),
    Case(((70, 129),), heads=(1, 1), form="paged", page=128, causal=False),
    Case(((70, 129), (200, 5)), heads=(2, 1), D=192, DV=128, form="ragged", base2=True),
    Case(RAGGED, heads=(2, 1), D=128, form="paged", softcap=50.0, sinks=True, window=150),
    Case(((130, 300),), heads=(2, 1), softcap=5.0, causal=False),
    Case(((130, 200),) * 2, heads=(4, 2), D=192, strided=True),
    Case(RAGGED, heads=(2, 1), D=192, form="ragged", window=50, sinks=True),
    Case(((130, 200),), heads=(2, 1), D=128, softcap=20.0, dtype="fp16"),
    Case(((130, 200),), heads=(2, 1), D=128, softcap=60.0),
    Case(((200, 256),), heads=(2, 1), D=256, sinks=True),
    Case(((200, 64), (70, 129), (0, 9)), heads=(2, 1), D=256, form="ragged"),
    Case(((200, 260),), heads=(2, 1), D=64, causal=False),
    Case(((2, 129), (1, 5), (130, 257), (1, 1), (200, 130)), heads=(2, 1), D=128, form="ragged", sinks=True),
    Case(((130, 400),), heads=(4, 2), D=128, dtype="fp8", scales="number", strided=True),
    Case(((130, 200),), heads=(2, 1), D=128, dtype="fp8", causal=False, softcap=20.0),
    Case(RAGGED, heads=(4, 2), D=128, dtype="fp8", scales="head", form="ragged", window=150),
    Case(RAGGED, heads=(4, 2), D=128, dtype="fp8", scales="head", form="paged", sinks=True),
    Case(((130, 400),), heads=(4, 2), D=128, kv="fp8", scales="number", strided=True, softcap=20.0),
    Case(RAGGED, heads=(4, 2), D=128, dtype="fp16", kv="fp8", scales="head", form="ragged", window=150),
    Case(RAGGED, heads=(4, 2), D=128, kv="fp8", scales="head", form="paged", sinks=True),
    *ENDS,
    dataclasses.replace(ENDS[0], D=64, causal=False),
    Case(((130, 200),) * 2, heads=(4, 2), D=80, strided=True),
    Case(RAGGED, heads=(2, 1), D=80, form="paged", sinks=True, window=150),
    Case(RAGGED, heads=(2, 1), D=96, form="paged", sinks=True, window=50),
    Case(((2048, 300),), heads=(1, 1), D=96, causal=False),
    Case(((2048, 256),), heads=(1, 1), D=80, dtype="fp16", sinks=True, causal=False),
    Case(((70, 129), (200, 5)), heads=(2, 1), D=112, form="ragged", dtype="fp16", base2=True),
    Case(((130, 200),), heads=(2, 1), D=128, DV=64, causal=False),
    Case(((70, 129), (0, 9)), heads=(2, 1), D=192, DV=192, form="paged", page=32, softcap=15.0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_emulator_is_accurate(case: Case) -> None:
    """Against the float64 reference. All that must not be read is NaN, and shared memory is poisoned."""
    x = case.build()
    out, lse = x.call(return_lse=True, backend="hopper")
    fixed = prefill_arguments(case)[1]["config"].constants.FIXED  # tanh is a polynomial
    assert_accurate(x, out, None if fixed else lse)
    seen = np.isfinite(x.exact()[1])
    assert (np.isfinite(lse) == seen).all()
    assert np.abs(lse[seen] - x.exact()[1][seen]).max() <= max(case.softcap * 2.0**-15, 2e-5)


def test_nan_in_a_key_that_is_seen() -> None:
    """Law: NaN in a key is NaN in the rows that see it; they are no rows without keys."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 200, 1, 128)).astype(np.float16) for _ in range(3))
    k[0, 150] = np.nan
    out, lse = mha_prefill(q, k, v, causal=True, return_lse=True, backend="hopper")
    assert np.isnan(out[0, :, 0]).all(-1).tolist() == np.isnan(lse[0, :, 0]).tolist() == [False] * 150 + [True] * 50


def test_scores_at_both_ends_of_a_softcap() -> None:
    """50 as in Gemma 2: rows whose keys score about -44 or 44, all or in part; V up to 2^40."""
    x = Case(((64, 300),), heads=(1, 1), D=128, softcap=50.0, causal=False).build()
    assert prefill_arguments(x.case)[1]["config"].constants.FIXED
    x.q[...], x.k[...] = 1, x.k + x.k.dtype.type(6)
    x.q[0, :20] = -1
    x.v[...] = x.v * x.v.dtype.type(2.0**40)
    assert_accurate(x, x.call(backend="hopper"))
    x.k[0, 140:] *= -1
    assert_accurate(x, x.call(backend="hopper"))


@pytest.mark.parametrize("k", [5.3, 0.31, -0.31, -5.3])
def test_equal_scores_of_a_softcap(k: float) -> None:
    """At both ends of the cap and far from them: no rounding of P, as where the largest weight is 1."""
    x = Case(((64, 256),), heads=(1, 1), D=128, softcap=30.0, causal=False).build()
    x.q[...], x.k[...] = 1, k
    assert_accurate(x, x.call(backend="hopper"))


@pytest.mark.parametrize("most", [0.499, 0.501, 6.0])
def test_capped_weights(most: float) -> None:
    """Law: 2^(scale tanh(y) - top), from y = s * inner, by a polynomial up to 1/2; 0 of hidden keys."""
    y = np.linspace(-most, most, 64 * 128, dtype=np.float32).reshape(1, 128, 1, 64)
    y[0, :, 0, 5] = -np.inf
    y[0, 32:, 0, 5] = 0.25  # three warps have no hidden key
    s, scale = Fragments.zeros(1, accumulator(128)).with_values(y / np.float32(0.25)), np.float32(FIXED_MOST)
    top = hopper_emulator.fixed_top(np.tanh(s.tile()[0].max(1) * np.float32(0.25)) * scale, scale)
    weights = hopper_emulator.capped_weights(s, top, np.float32(0.25), scale).values
    power = np.where(np.isneginf(y), -np.inf, np.tanh(y.astype(np.float64)) * scale - s.by_row(top[None]))
    exact, error = np.exp2(power), 80 * 0.47 * 2.0**-15
    assert power.max() < 56 + error
    assert (np.abs(weights - exact) <= exact * error).all()


@pytest.mark.parametrize("grown", [0.5, 7.9, 8.1, 20.0, 3000.0])
def test_a_top_that_stays_costs_nothing(grown: float) -> None:
    """Rests on the float64 reference: the keys of the second block weigh 2^grown as much as those of the first; whether
    their maximum becomes the top, which it does beyond 2^8, changes no more than rounding. fp16 holds 2^16 at most.
    """
    x = Case(((1, 128),), heads=(1, 1), D=256, dtype="fp16").build()
    assert prefill_arguments(x)[1]["config"].constants.LAZY
    x.q[...] = 0
    x.q[..., 0] = 16  # the scale is 1 / 16
    x.k[0, 64:, 0, 0] = 0
    x.k[0, :64, 0, 0] = grown * np.log(2)
    assert_accurate(x, *x.call(return_lse=True, backend="hopper"))


def test_the_polynomial_of_tanh() -> None:
    """Law: relative error 2^-15.4 up to 1/2, in the kernel's float32, too."""
    y = np.linspace(2.0**-20, 0.5, 10001)
    a, b, c = TANH
    assert np.abs(y * (a + y**2 * (b + y**2 * c)) / np.tanh(y) - 1).max() < 2.0**-15.4


WINDOWS = [
    Case(((30, 400), (150, 300)), heads=(2, 1), form="paged", D=128, window=100),
    Case(((200, 500),), heads=(2, 1), D=128, window=33),
    Case(((3, 300), (140, 150), (70, 5)), heads=(2, 1), form="ragged", window=(40, 9), causal=False),
    Case(((1, 129),), heads=(2, 2), form="paged", page=64, D=256, window=1, sinks=True),
    Case(((9, 300),), heads=(2, 1), D=128, dtype="fp8", window=33),
]


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_keys_before_every_window_are_not_multiplied(case: Case) -> None:
    """They hold NaN; the bits are those where they hold numbers."""
    x = case.build()
    expected = x.call(return_lse=True, backend="hopper")
    assert_accurate(x, *expected)
    x.poison_before_window()
    assert list(map(bits, x.call(return_lse=True, backend="hopper"))) == list(map(bits, expected))


MANY = tuple((7 * i * i % 301, 11 * i * i * i % 397 + (i > 3)) for i in range(24))
TILES = [
    *(Case(MANY, heads=(2, 1), D=D, DV=DV, form=form)
      for D, DV, form in ((128, 128, "paged"), (64, 64, "ragged"), (192, 128, "ragged"))),
    *(Case(((300, keys),), heads=(1, 1), D=D) for D in (64, 128, 256) for keys in (256, 300, 333)),
    Case(((300, 333),), heads=(2, 1), D=64, causal=False),
]


@pytest.mark.parametrize("case", TILES, ids=str)
def test_tiles_hold_each_row_once_and_blocks_without_a_mask_are_seen_by_all(case: Case) -> None:
    """Laws."""
    arrays, numbers = prefill_arguments(case)
    q, k, _, (cu_q, cu_k, table, lens, _) = arrays
    config, C, mask = numbers["config"], numbers["config"].constants, numbers["features"].mask
    x: Any = SimpleNamespace(**numbers, cu_q=cu_q, cu_k=cu_k, table=table, lens=lens, max_k=k.shape[1])
    assert not C.MASKED
    seen = np.zeros((q.shape[0], q.shape[2], q.shape[1]), int)
    rows = C.BM if C.SKIP else C.NC * C.BM
    for t in range(config.tiles):
        batch, head, tile_row, q_first, num_q, _, num_keys = HopperPrefillLaunch.find_tile(x, t)
        _, hi = HopperPrefillLaunch.key_blocks(x, tile_row, num_q, num_keys, mask.left, mask.right)
        for row in range(tile_row, tile_row + C.NC * C.BM, rows):
            some = slice(max(row, 0), min(row + rows, num_q))
            if some.start >= some.stop:
                continue
            seen[0 if C.RAGGED_Q else batch, head, q_first + some.start : q_first + some.stop] += 1
            first = some.start + num_keys - num_q  # where the first row stands, which sees the fewest keys
            if C.SKIP:
                hi = max(-(-min(row + rows + num_keys - num_q, num_keys) // C.BN), 1)
            assert not case.causal or (hi - 1) * C.BN <= max(first + 1, 0)
    assert (seen == 1).all()


def test_which_program_takes_a_tile_changes_nothing() -> None:
    arrays, numbers = prefill_arguments(Case(((330, 400),) * 2, heads=(4, 2)))
    assert numbers["config"].constants.NC == 3
    assert numbers["config"].tiles == 16
    launch = functools.partial(hopper_emulator.launch, *arrays, **numbers)
    one, five = (tuple(map(bits, launch(processors=n))) for n in (1, 5))
    assert one == five


@pytest.mark.parametrize("D, rows, causal, consumers", [
    (64, 256, True, 2), (64, 384, True, 3), (64, 1024, True, 2), (64, 4096, True, 3), (64, 256, False, 2),
    (64, 1024, False, 3), (96, 4096, False, 3), (80, 2048, False, 3), (96, 1536, False, 3), (96, 768, False, 2),
    (96, 4096, True, 2), (112, 4096, False, 2), (128, 4096, False, 2),
])
def test_a_third_consumer_where_its_rows_are_not_mostly_absent(D: int, rows: int, causal: bool, consumers: int) -> None:
    """Rests on the measured times in benchmarks/NOTES.md."""
    case = Case(((rows, rows),), heads=(1, 1), D=D, causal=causal)
    assert prefill_arguments(case)[1]["config"].constants.NC == consumers


@pytest.mark.parametrize("changes, keys", [
    ({}, 64), ({"lens": ((300, 513),)}, 128), ({"causal": False}, 128), ({"D": 112}, 64), ({"D": 64}, 128),
    ({"D": 64, "lens": ((256, 512),)}, 64), ({"D": 128, "DV": 64}, 128), ({"window": 200}, 128),
    ({"softcap": 9.0}, 128), ({"form": "ragged"}, 128), ({"dtype": "fp8"}, 128),
], ids=str)
def test_blocks_of_64_keys_where_rows_see_few(changes: dict[str, Any], keys: int) -> None:
    """Rests on the measured times in benchmarks/NOTES.md."""
    case = Case(**{"lens": ((300, 512),), "heads": (2, 1), "D": 128} | changes)
    assert prefill_arguments(case)[1]["config"].constants.BN == keys


def test_roles_that_wait_for_each_other_are_told() -> None:
    hazards = Hazards(Memory(16), warps=2)
    bars = [hazards.mbarrier(f"bar[{i}]") for i in range(2)]

    def role(i: int) -> Any:
        yield bars[i], 0
        bars[1 - i].arrive((i,))

    with pytest.raises(BarrierDeadlock, match=r"all 2 roles wait: bar\[0\]: warps \[0\] wait for phase 0 for ever"):
        run_roles([((0,), role(0)), ((1,), role(1))])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"alibi": "head"}, "alibi_slopes"),
        ({"mask": "chunked"}, "a mask other than causal and windows around the query"),
        ({"kv": "fp8"}, "head dimensions 64 of q and 64 of v"),
        ({"kv": "fp8", "D": 128, "scales": "token"}, "scales of tokens"),
        ({"dtype": "fp8"}, "head dimensions 64 of q and 64 of v"),
        ({"dtype": "fp8", "D": 128, "scales": "token"}, "scales of tokens"),
        ({"D": 88}, "head dimensions 88 of q and 88 of v"),
        ({"dtype": "fp32"}, "dtype float32"),
        ({"form": "paged", "page": 48}, "page size 48"),
        ({"lens": ((3, 0),)}, "no queries or no keys"),
    ],
)
def test_hopper_says_what_it_supports(changes: dict[str, Any], message: str) -> None:
    x = Case(**{"lens": ((3, 5),), **changes}).build()
    with pytest.raises(ValueError, match=f"backend is 'hopper' with {message}: must be bf16 or fp16, no mask but"):
        x.call(backend="hopper")


@pytest.mark.parametrize("form", ["dense", "ragged", "paged"])
@pytest.mark.parametrize(("D", "DV"), HEAD_DIMS)
def test_nothing_is_written_beside_out(monkeypatch: pytest.MonkeyPatch, D: int, DV: int, form: str) -> None:
    """A store by TMA overwrites what stands behind a row, up to a multiple of 16 bytes (measured on an H100): every
    tensor that is stored to ends with one, and no byte beside ``out`` changes.
    """
    stored = stored_by_tma(monkeypatch)
    x = Case(((130, 150), (70, 9)), heads=(2, 1), D=D, DV=DV, form=form).build()
    if form == "dense":
        x = Case(((130, 150),), heads=(2, 1), D=D, DV=DV).build()
    shape = (*x.q.shape[:-1], DV)
    buffer = np.full((*(n + 2 for n in shape[:-1]), DV + 24), 7, bfloat16)
    out = buffer[(*(slice(1, -1) for _ in shape[:-1]), slice(8, 8 + DV))]
    out[...] = np.nan
    assert x.call(out=out, backend="hopper") is out
    assert_accurate(x, out)
    out[...] = 7
    assert (buffer == 7).all()
    assert stored
    assert all(d.shape[-1] == d.stored_extent == DV for d in stored)


@pytest.mark.parametrize("D", [20, 65, 72, 100])
def test_rows_that_end_inside_16_bytes_or_a_panel_are_not_stored_by_tma(D: int) -> None:
    q = np.zeros((1, 3, 2, D), np.float16)
    with pytest.raises(ValueError, match=f"head dimensions? {D}.*: must be"):
        mha_prefill(q, q, q, out=np.zeros_like(q), backend="hopper")


def test_strides_that_tma_does_not_take() -> None:
    q = np.zeros((1, 3, 2, 68), np.float16)
    with pytest.raises(ValueError, match="the strides or the alignment of q: must be"):
        mha_prefill(q[..., 4:], q[..., :64].copy(), q[..., :64].copy(), backend="hopper")
    with pytest.raises(ValueError, match=r"scale 0\.0: must be"):
        mha_prefill(*(q[..., :64].copy() for _ in "qkv"), scale=0, backend="hopper")


@pytest.mark.parametrize(
    "arch, version, length, backend, reason, changes",
    [
        ("sm_90", "3.6.0", 300, "hopper", "torch tensors on sm_90", {}),
        ("sm_90", "3.6.0", 20, "triton", "not the Hopper kernel: the heads of a KV head fit one tile together", {}),
        ("sm_90", "4.1.0", 300, "triton", "not the Hopper kernel: Triton 4.1.0; its Gluon is used with 3.6", {}),
        ("sm_100", "3.6.0", 300, "triton", "not the Hopper kernel: a GPU of sm_100", {}),
        ("sm_90", "3.6.0", 300, "hopper", "torch tensors on sm_90", {"window": 200}),
        ("sm_90", "3.6.0", 300, "hopper", "torch tensors on sm_90", {"D": 128, "dtype": torch.float8_e4m3fn}),
        ("sm_90", "3.6.0", 300, "triton", "a window with heads of 256", {"D": 256, "window": 200}),
        ("sm_90", "3.6.0", 20, "hopper", "torch tensors on sm_90", {"batch_invariant": True}),
        (
            "sm_90",
            "3.6.0",
            20,
            "triton",
            "a window with heads of 256",
            {"D": 256, "window": 200, "batch_invariant": True},
        ),
        ("sm_90", "3.7.1", 20, "triton", "Triton 3.7", {"D": 256, "batch_invariant": True}),
        ("sm_90", "3.7.1", 300, "hopper", "torch tensors on sm_90", {"D": 192}),
    ],
)
def test_when_auto_takes_it(
    monkeypatch: pytest.MonkeyPatch, arch: str, version: str, length: int, backend: str, reason: str,
    changes: dict[str, Any],
) -> None:
    as_if_on(monkeypatch, arch, version)
    options = dict(changes)
    D, dtype = options.pop("D", 64), options.pop("dtype", torch.bfloat16)
    q, kv = (torch.zeros((1, length, heads, D), dtype=dtype) for heads in (4, 1))
    found = explain(mha_prefill, q, kv, kv, **options)
    assert found.backend == backend
    assert reason in found.reason


CHUNKS = ((128, 600), (20, 40), (1, 300))


@pytest.mark.parametrize("lens, sizes, options, listed", [
    (CHUNKS, {}, {}, True),
    (CHUNKS, {"D": 96, "softcap": 9.0, "window": 200}, {}, True),
    (CHUNKS, {"D": 192}, {}, True),
    (((6, 300), (6, 100)), {"D": 192}, {}, True),
    (((600, 700),), {}, {}, False),
    (((600, 600), (600, 9000)), {}, {}, True),
    (((600, 600), (600, 600), (1, 1)), {}, {}, True),
    (CHUNKS, {"page": 48}, {}, False),
    (CHUNKS, {"kv": "fp8", "D": 128}, {}, False),
    (CHUNKS, {"alibi": "head"}, {}, False),
    (CHUNKS, {}, {"batch_invariant": True}, False),
    (CHUNKS, {}, {"backend": "triton"}, False),
], ids=str)
def test_chunks_go_over_a_list(
    lens: Any, sizes: dict[str, Any], options: dict[str, Any], listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On sm_90 alone, by kernels written for it where these take the list."""
    x = Case(lens, form="paged", **{"heads": (8, 2)} | sizes).build()
    _, arrays, named = x.arguments("cpu")
    monkeypatch.setattr("kvlab.attention.mha_prefill.call.on_gpu", lambda array: True)
    for arch in ("sm_90", "sm_80"):
        as_if_on(monkeypatch, arch)
        found = explain(mha_prefill_paged, *arrays, **named | options, max_seqlen_q=max(new for new, _ in lens))
        assert found.operation == ("attend_paged" if listed and arch == "sm_90" else "mha_prefill")
    if listed:
        as_if_on(monkeypatch, "sm_90")
        assert explain(mha_prefill_paged, *arrays, **named | options).backend == "hopper"


NEIGHBOURS = [
    Case(((20, 90), (130, 200), (1, 40)), heads=(3, 1), form="paged"),
    Case(((20, 90), (130, 200), (5, 0), (1, 40)), heads=(2, 1), D=128, form="ragged", sinks=True, window=60),
    Case(((130, 200), (3, 40)), heads=(2, 1), D=128, dtype="fp8", scales="head", form="ragged"),
    Case(((20, 90), (130, 200)), heads=(2, 1), D=256, form="ragged", window=60),
]


@pytest.mark.parametrize("case", NEIGHBOURS, ids=str)
def test_a_sequence_has_the_same_kernel_and_bits_alone_and_in_a_batch(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rests on the promise of batch_invariant, on a GPU and in the emulator of the kernel that it gets there."""

    def called(x: Inputs) -> Any:
        with monkeypatch.context() as patch:
            as_if_on(patch, "sm_90")
            backend = x.explain(batch_invariant=True).backend
        return backend, *x.call(backend=backend, batch_invariant=True, return_lse=True)

    x = case.build()
    backend, together, lse = called(x)
    assert backend == ("emulator" if case.D == 256 else "hopper")
    for b, (start, stop) in enumerate(itertools.pairwise(x.cu_q)):
        at: dict[str, Any] = {"q": x.q[start:stop], "cu_q": x.cu_q[b : b + 2] - start}
        if case.form == "paged":
            at |= {"table": x.table[[b]], "seq_lens": x.seq_lens[[b]]}
        else:
            keys = slice(*x.cu_k[b : b + 2])
            at |= {"k": x.k[keys], "v": x.v[keys], "cu_k": x.cu_k[b : b + 2] - keys.start}
        its, alone, its_lse = called(x.with_(**at))
        assert its == backend or case.lens[b][1] == 0  # TMA takes no tensor without keys
        assert bits(alone) == bits(together[start:stop])
        assert bits(its_lse) == bits(lse[start:stop])


def test_every_configuration_has_room() -> None:
    """Law: buffers, stages and the output are at most the shared memory of a CTA, for all that the kernel takes."""
    dims: list[tuple[int, int, str, str | None]] = [(*both, "bf16", None) for both in HEAD_DIMS]
    dims += [(*both, dtype, "fp8") for both in FP8_DIMS for dtype in ("bf16", "fp8")]
    asked: list[dict[str, Any]] = [{}, {"causal": False}, {"window": 70}, {"softcap": 20.0, "sinks": True}]
    for (D, DV, dtype, kv), form, more in itertools.product(dims, ("dense", "ragged", "paged"), asked):
        case = Case(((150, 200),) * 2, heads=(2, 1), D=D, DV=DV, dtype=dtype, kv=kv, form=form, **more)
        assert shared_bytes(prefill_arguments(case)[1]["config"].constants) <= SHARED["sm_90"], case


LENS = ((150, 200), (150, 200))
MATRIX = [
    Case(LENS, heads=(4, 2), D=64),
    Case(LENS, heads=(4, 2), D=64, causal=False),
    Case(((256, 256),), heads=(4, 2), D=64),  # two consumers
    *(Case(((256, keys),), heads=(4, 2), D=128) for keys in (256, 2048)),
    *(Case(((256, 512),), heads=(4, 2), D=D) for D in (80, 96)),
    Case(LENS, heads=(4, 2), D=128, form="ragged", dtype="fp16"),
    Case(LENS, heads=(4, 2), D=128, form="paged", page=16, sinks=True, softcap=20.0, window=100),
    Case(LENS, heads=(4, 2), D=64, form="ragged", softcap=50.0),
    Case(LENS, heads=(4, 2), D=128, form="paged", page=16),
    Case(LENS, heads=(4, 2), D=192, DV=128),
    Case(LENS, heads=(4, 2), D=192, DV=128, form="paged", page=16, sinks=True),
    Case(LENS, heads=(4, 2), D=256),
    Case(LENS, heads=(4, 2), D=256, form="paged", page=16),
    Case(((256, 256),), heads=(4, 2), D=256, softcap=50.0),
    Case(LENS, heads=(4, 2), D=80),
    Case(LENS, heads=(4, 2), D=80, form="paged", page=16),
    Case(LENS, heads=(4, 2), D=96, form="paged", page=16, window=60),
    *(Case(((2048, keys),), heads=(4, 2), D=D, causal=False) for D in (80, 96) for keys in (256, 300)),  # three of them
    Case(LENS, heads=(4, 2), D=192, DV=192, causal=False),
    Case(LENS, heads=(4, 2), D=192),
    Case(LENS, heads=(4, 2), D=192, form="paged", page=16, sinks=True, softcap=20.0),
    Case(LENS, heads=(4, 2), D=192, form="paged", page=16, window=100),
    Case(LENS, heads=(4, 2), D=128, dtype="fp8", scales="head"),
    Case(LENS, heads=(4, 2), D=128, dtype="fp8", scales="head", form="paged", page=16),
    Case(LENS, heads=(4, 2), D=128, dtype="fp8", scales="head", form="paged", page=64, softcap=20.0, window=100),
    Case(LENS, heads=(4, 2), D=128, kv="fp8", scales="number", causal=False),
    Case(LENS, heads=(4, 2), D=128, kv="fp8", scales="head", form="paged", page=16),
    Case(LENS, heads=(4, 2), D=128, dtype="fp16", kv="fp8", form="ragged", softcap=20.0, window=100),
]


def compiled(case: Case) -> Compiled:
    """The kernel as a call compiles it."""
    from kvlab.attention.mha_prefill import hopper

    arrays, numbers = prefill_arguments(case)
    with pytest.MonkeyPatch.context() as patch:
        caught = Caught(hopper.attend)
        patch.setattr(hopper, "attend", caught)
        patch.setattr(hopper, "machine", lambda device: ("sm_90", 132))
        tensors = *(to_torch(np.ascontiguousarray(a)) for a in arrays[:3]), as_tensors(arrays[3])
        hopper.launch(*tensors, **numbers | {"features": as_tensors(numbers["features"])})
    return as_launched(caught.fn, caught.arguments, "sm_90")


@pytest.mark.compile
@pytest.mark.skipif(gluon_lacks() is not None, reason="a release of Triton for which it is not chosen")
@pytest.mark.parametrize("causal", [True, False])
def test_row_maxima_do_not_wait_for_each_other(causal: bool) -> None:
    """Of 64 columns. Rests on the SASS: a thread has 32 scores of a row; in one register each of 31 comparisons would
    wait for the one before it. In four it is 7, 3 between these, 2 of the quad and 1 with the maximum before.
    """
    depth: dict[str, int] = {}
    most = 0
    pattern = r"^\s+/\*[0-9a-f]{4,}\*/\s+([A-Z][\w.]*) ((?:PT, )?R\d+, [^;]*);"
    code = compiled(Case(((130, 258),) * 2, heads=(4, 2), causal=causal)).sass
    for name, operands in re.findall(pattern, code, re.M):
        if name.startswith("HGMMA"):  # scores of another block
            depth.clear()
            continue
        written, *read = re.findall(r"\bR\d+", operands)
        above = max((depth.get(register, 0) for register in read), default=0)
        depth[written] = above + 1 if name == "FMNMX" else above if name == "SHFL.BFLY" else 0
        most = max(most, depth[written])
    assert 1 < most <= 7 + 3 + 2 + 1


@pytest.mark.compile
@pytest.mark.skipif(gluon_lacks() is not None, reason="a release of Triton for which it is not chosen")
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_compiled(case: Case) -> None:
    """No spills, shared memory that a CTA has, and wgmma that runs beside other work: where the compiler had to wait
    for each product there would be an arrival and a wait for every HGMMA.
    """
    if lacks := gluon_lacks(wide=(case.DV or case.D) > 192):
        pytest.skip(f"not chosen: {lacks}")
    made, C = compiled(case), prefill_arguments(case)[1]["config"].constants
    count = made.instructions
    once = 32 if C.FIXED and C.D == 128 else 16 if C.PAGE == 16 and (C.ITEM == 1 or C.PRODUCTS > 1) else 0
    once = 16 if C.PRODUCTS == 3 and C.SKIP and not C.PAGE else once
    once = 80 if C.APART and C.FIRST else once
    assert made.spills <= once, "what a tile needs once may wait in local memory: no loop has it"
    assert made.stack <= once // 2
    assert made.shared <= shared_bytes(C) <= SHARED["sm_90"]
    assert made.num_warps == 4 * C.NC + (8 if C.STORED == 1 else 4)
    steps = (C.DEPTH + C.PRODUCTS * C.BN) * C.ITEM // 32
    assert count["HGMMA"] + count["QGMMA"] == 2 * steps * C.NC  # in the loop and around it
    assert count["WARPGROUP"] <= (8 + 2 * C.D // 64 + 2 * C.PRODUCTS) * C.NC
    assert count["UTMALDG"] > 0
    assert count["UTMASTG"] > 0
    assert_order(made.asm["ptx"])


STATEMENTS = {
    "init": r"mbarrier\.init", "expect": r"mbarrier\.arrive\.expect_tx", "arrive": r"mbarrier\.arrive\.shared",
    "all meet": r"barrier\.sync", "meet": r"bar(?:\.warp)?\.sync", "fence": r"fence\.proxy\.async",
    "product": r"wgmma\.wait_group", "wait for store": r"cp\.async\.bulk\.wait_group\.read",
    "store": r"cp\.async\.bulk\.tensor\S*\.global\.shared", "write": r"stmatrix|st\.shared",
}


def assert_order(ptx: str) -> None:
    """What the twin states of barriers, fences and waits is what the compiler has made of the kernel."""
    found = re.finditer("|".join(f"(?P<x{i}>{p})" for i, p in enumerate(STATEMENTS.values())), ptx)
    names = list(STATEMENTS)
    order = [names[int(str(one.lastgroup)[1:])] for one in found]

    def since(at: int, *which: str) -> list[str]:
        """The statements from the last of these kinds up to ``at``."""
        first = max(i for i in range(at) if order[i] in which)
        return order[first:at]

    first = order.index("all meet")
    assert "fence" in since(first, "init"), "TMA arrives at barriers that were initialised by ordinary stores"
    for at, what in enumerate(order):
        if what == "arrive":  # all warps have waited and stored
            assert since(at, "product", "write", "meet", "all meet")[0] == "meet"
        if what == "expect":  # all lanes have stored
            assert "write" not in since(at, "meet")
        if what == "store":
            assert "fence" in since(at, "write")
            assert since(at, "fence")[1] == "meet"
        if what == "wait for store":  # all warps know
            assert order[at + 1] == "meet"
