"""Decode with every feature against the float64 reference, in the tolerance of yardsticks: emulator and kernel.

Every case poisons what must not be read: unused slots and pages, those before a window too, are NaN, unused entries of
the page table are no pages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feature_cases import DEPTHS, FEATURES, FP8, MASKS, FeatureCase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yardsticks import assert_accurate, bits

from kvlab.attention import masks as M
from kvlab.attention import mha_decode_paged, mha_decode_streaming_paged
from kvlab.attention.features.scales import resolve_scales
from kvlab.common.arrays import to_torch

FILE = Path(__file__).parents[2] / "data" / "attention_cases_decode.json"
INPUT = {case["id"]: case["input"] for case in json.loads(FILE.read_text())["cases"]}


def check(case: FeatureCase, function: Any = mha_decode_paged, **options: Any) -> None:
    x = case.build()
    out, lse = function(*x.arrays, **x.options, num_splits=case.splits, return_lse=True, **options)
    assert_accurate(x, out, lse)


@pytest.mark.parametrize("arch", ["sm_90", "gfx950"])
@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_features(case: FeatureCase, arch: str) -> None:
    check(case, arch=arch)


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_features_of_streaming(case: FeatureCase) -> None:
    check(case, mha_decode_streaming_paged)


@pytest.mark.parametrize("case", DEPTHS, ids=str)
def test_depths(case: FeatureCase) -> None:
    check(case, arch="sm_90")


@st.composite
def cases(draw: st.DrawFn) -> FeatureCase:
    group, kv_heads = draw(st.sampled_from([(1, 2), (3, 2), (8, 1), (17, 1)]))
    kv = draw(st.sampled_from([None, FP8]))
    depths = st.sampled_from([16, 64, 80, 96, 128] if kv else [16, 24, 64, 96, 128, 192])
    mask = draw(st.sampled_from(["", *MASKS]))
    return FeatureCase(
        lens=tuple(draw(st.lists(st.sampled_from([0, 1, 2, 5, 17, 64, 129, 200]), min_size=1, max_size=3))),
        heads=(group * kv_heads, kv_heads),
        D=draw(depths),
        Dv=draw(depths),
        page=draw(st.sampled_from([1, 5, 16, 64])),
        dtype=draw(st.sampled_from(["bf16", "fp16", FP8] if kv else ["bf16", "fp16", "fp32"])),
        kv=kv,
        S=draw(st.integers(1, 4)),
        splits=draw(st.one_of(st.none(), st.integers(1, 5))),
        storage=draw(st.sampled_from(["apart", "halves", "hnd", "wide"])),
        window=draw(st.sampled_from([None, 1, 30] if not mask else [None, (30, 3)])),
        mask=mask,
        softcap=draw(st.sampled_from([0.0, 2.0])),
        sinks=draw(st.booleans()),
        alibi=draw(st.sampled_from(["", "head", "sequence"])),
        temperature=draw(st.booleans()),
        scales=draw(st.sampled_from(["", "number", "head", "token"])) if kv else "",
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(case=cases())
def test_drawn(case: FeatureCase) -> None:
    """The same cases each time: the yardstick compares maxima and means of few roundings, which one key alone, whose
    weight is rounded with its scale, can exceed by chance."""
    check(case, arch="sm_90")
    if case.D == case.Dv and case.D in ((128,) if case.kv else (64, 128)):
        check(case, arch="gfx950")


@pytest.mark.parametrize("D", [64, 128, 256, 512])
def test_depths_of_gfx950(D: int) -> None:
    check(FeatureCase(D=D), arch="gfx950")
    if D > 64:
        check(FeatureCase(D=D, kv=FP8), arch="gfx950")


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "case",
    [
        FeatureCase(
            (70, 0), mask="bias", window=40, softcap=3.0, sinks=True, alibi="head", temperature=True, S=2, splits=2,
            heads=(2, 1)
        ),
        FeatureCase((70, 9), mask="chunked", alibi="sequence", heads=(2, 1), dtype="fp32"),
        FeatureCase((70, 3), D=192, Dv=128, heads=(2, 2), kv=FP8, scales="token", splits=2),
        FeatureCase((40,), D=80, Dv=96, heads=(2, 1), mask="padding", dtype="fp16"),
        FeatureCase((40,), D=576, heads=(2, 2), kv=FP8, dtype=FP8, scales="head"),
        FeatureCase((40, 9), D=128, heads=(2, 1), mask="both", S=2, sinks=True),
    ],
    ids=str,
)
def test_kernel(case: FeatureCase) -> None:
    check(case, backend="triton")


@pytest.mark.interpreter
def test_kernel_of_streaming() -> None:
    first = FeatureCase((70, 0), D=128, window=40, softcap=3.0, sinks=True, S=2, splits=2, heads=(2, 1))
    other = FeatureCase((40, 9), mask="both", alibi="sequence", S=2, heads=(2, 1))
    fp8 = [
        FeatureCase((70, 3), D=128, S=2, splits=2, dtype=FP8, kv=FP8, scales="head", heads=(4, 2)),
        FeatureCase((40, 3), dtype="fp16", kv=FP8, scales="token", heads=(4, 2)),
        FeatureCase((40,), dtype=FP8, kv=FP8, scales="number", heads=(2, 1)),
    ]
    for case in (first, other, *fp8):
        check(case, mha_decode_streaming_paged, backend="triton")


def test_hnd_is_nhd_transposed() -> None:
    """Rests on a law: a layout changes no bit."""
    case = FeatureCase(D=128, kv=FP8, scales="token", storage="hnd")
    x = case.build()
    expected = bits(mha_decode_paged(*x.arrays, **x.options))
    swapped = {name: value.swapaxes(1, 2) if name[1:] == "_scale" else value for name, value in x.options.items()}
    q, k, v, *rest = x.arrays
    got = mha_decode_paged(q, k.swapaxes(1, 2), v.swapaxes(1, 2), *rest, **swapped, kv_layout="HND")
    assert bits(got) == expected


def test_base2() -> None:
    x = FeatureCase(splits=2).build()
    natural, binary = (mha_decode_paged(*x.arrays, return_lse=True, base2=base2)[1] for base2 in (False, True))
    np.testing.assert_allclose(binary, natural / np.log(2), rtol=1e-6)


@pytest.mark.parametrize("kv", [None, FP8])
def test_batch_invariance(kv: str | None) -> None:
    """Rests on a law: a sequence gives the same bits alone and in any batch; the others' number changes the splits."""
    x = FeatureCase((5000, 17, 4100), heads=(4, 1), page=64, D=128, kv=kv).build()
    q, k, v, table, lens = x.arrays
    whole = mha_decode_paged(q, k, v, table, lens, batch_invariant=True)
    for b in range(3):
        alone = mha_decode_paged(q[[b]], k, v, table[[b]], lens[[b]], batch_invariant=True)
        assert bits(alone) == bits(whole[[b]])
    plan = mha_decode_paged.explain  # type: ignore[attr-defined]
    splits = [plan(q[:n], k, v, table[:n], lens[:n], batch_invariant=True).config.num_splits for n in (1, 3)]
    assert splits == [2, 2]


def test_scales_of_an_unquantised_cache_are_refused() -> None:
    """Known failure scale-ignored-for-bf16-cache; with fp8 the same scale counts."""
    scale = INPUT["scale-ignored-for-bf16-cache"]["k_scale"]
    arrays = FeatureCase(D=128).build().arrays
    for asked in (scale, np.float32([scale]), to_torch(np.float32([1.0]))):
        with pytest.raises(ValueError, match=r"k_scale is .* with k of dtype bfloat16: must be left out"):
            mha_decode_paged(*arrays, k_scale=asked)
    assert bits(mha_decode_paged(*arrays, k_scale=1)) == bits(mha_decode_paged(*arrays))
    arrays = FeatureCase(D=128, kv=FP8).build().arrays
    assert bits(mha_decode_paged(*arrays, k_scale=scale)) != bits(mha_decode_paged(*arrays))


@pytest.mark.parametrize("name", ["fp8-kv-scales-applied-once", "fp8-query-keeps-kv-scales"])
def test_fp8_scales(name: str) -> None:
    """Known failures: each scale counts once, with a query of fp8 too."""
    sizes = INPUT[name]
    scales = {
        "k_scale": sizes.get("k_scale", sizes.get("k_descale")),
        "v_scale": sizes.get("v_scale", sizes.get("v_descale")),
    }
    for dtype in ("bf16", FP8):
        x = FeatureCase(D=128, kv=FP8, dtype=dtype).build()
        x.options |= scales | ({"q_scale": 0.5} if dtype == FP8 else {})
        out, lse = mha_decode_paged(*x.arrays, **x.options, return_lse=True)
        assert_accurate(x, out, lse)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx950"])
def test_a_sink_is_counted_once(arch: str) -> None:
    """Known failure sink-counted-once-with-splits: the window's range starts in a later split, and without a key."""
    splits = INPUT["sink-counted-once-with-splits"]["num_splits"]
    x = FeatureCase((300, 0, 2), sinks=True, window=20, dtype="fp32").build()
    whole, whole_lse = mha_decode_paged(*x.arrays, **x.options, num_splits=1, arch=arch, return_lse=True)
    out, lse = mha_decode_paged(*x.arrays, **x.options, num_splits=splits, arch=arch, return_lse=True)
    assert_accurate(x, out, lse)
    np.testing.assert_allclose(out, whole, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-6)
    np.testing.assert_allclose(lse[1, 0], x.options["sinks"], rtol=1e-6)


def test_window_skips_poisoned_pages() -> None:
    """Known failure window-skips-poisoned-pages; the pages before the window are no pages at all."""
    sizes = INPUT["window-skips-poisoned-pages"]
    case = FeatureCase((sizes["context"],), window=sizes["window_left"] + 1, page=sizes["page_size"], heads=(4, 1))
    x = case.build()
    _, k, v, table, _ = x.arrays
    table[0, : (sizes["context"] - sizes["window_left"] - 1) // sizes["page_size"]] = 0
    k[0], v[0] = np.nan, np.nan
    for options in ({"arch": "sm_90"}, {"arch": "gfx950"}, {"num_splits": 3}):
        assert_accurate(x, mha_decode_paged(*x.arrays, **x.options, **options))


@pytest.mark.parametrize("splits", [1, 3])
def test_nan_in_a_key_that_is_seen(splits: int) -> None:
    """Law: NaN in a key is NaN in the rows that see it, with any number of splits; they are no rows without keys."""
    x = FeatureCase((300, 20), heads=(2, 1)).build()
    x.arrays[1][x.arrays[3][0, 0], 3] = np.nan
    for arch in ("sm_90", "gfx950"):
        out, lse = mha_decode_paged(*x.arrays, **x.options, num_splits=splits, arch=arch, return_lse=True)
        assert np.isnan(out.astype(np.float32)).all((1, 2, 3)).tolist() == [True, False]
        assert np.isnan(lse).all((1, 2)).tolist() == [True, False]


@pytest.mark.interpreter
def test_nan_in_a_mask_is_no_masked_key() -> None:
    """Law: score + NaN is NaN. A bias computed as ``0 * -inf`` holds NaN where it should hide nothing."""
    x = FeatureCase((70, 20), heads=(2, 1), S=2).build()
    bias = np.zeros((2, 1, 2, 70), np.float32)
    bias[0, 0, 1, 5] = np.nan
    for options in ({"arch": "sm_90"}, {"arch": "gfx950"}, {"backend": "triton"}, {"backend": "reference"}):
        out, lse = mha_decode_paged(*x.arrays, mask=M.MaterializedMask(bias), return_lse=True, **options)
        assert np.isnan(out.astype(np.float32)).all((2, 3)).tolist() == [[False, True], [False, False]]
        assert np.isnan(lse).all(2).tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize("arch", ["sm_90", "gfx950"])
def test_softcap_saturates(arch: str) -> None:
    """Known failure softcap-saturates: one key for each score."""
    sizes = INPUT["softcap-saturates"]
    scores = np.array(sizes["scores"], np.float32)
    x = FeatureCase((len(scores),), heads=(1, 1), softcap=sizes["softcap"], dtype="fp32").build()
    q, k, _, table, _ = x.arrays
    q[:], k[table[0, 0], : len(scores)] = 0, 0
    q[..., 0], k[table[0, 0], : len(scores), 0, 0] = x.case.D**0.5, scores
    out, lse = mha_decode_paged(*x.arrays, **x.options, arch=arch, return_lse=True)
    assert np.isfinite(out).all()
    capped = sizes["softcap"] * np.tanh(scores / sizes["softcap"])
    np.testing.assert_allclose(lse[0, 0, 0], np.log(np.exp(capped - 50).sum()) + 50, rtol=1e-6)


@pytest.mark.interpreter
@pytest.mark.parametrize("softcap", [50.0, 3e3, 2.0**126])
def test_scores_far_below_a_softcap(softcap: float) -> None:
    """Rests on the float64 reference: the larger the cap, the less it changes."""
    x = FeatureCase((70, 20), softcap=softcap, dtype="fp32").build()
    for options in ({"arch": "sm_90"}, {"arch": "gfx950"}, {"backend": "triton"}):
        assert_accurate(x, mha_decode_paged(*x.arrays, **x.options, **options))


def test_head_dimensions_that_differ() -> None:
    """Known failure qk-and-v-head-dims-differ."""
    for sizes in INPUT["qk-and-v-head-dims-differ"]["cases"]:
        D = sizes.get("D", sizes.get("Dqk"))
        check(FeatureCase(D=D, Dv=sizes.get("Dv", D), heads=(8, 2)))


def test_a_large_query_meets_fp8_keys() -> None:
    """Rests on the float64 reference: q past what float16 holds, and far below it, beside ordinary rows."""
    x = FeatureCase((40,), heads=(4, 1), D=128, kv=FP8, S=1).build()
    q = x.arrays[0]
    q[0, 0, 0], q[0, 0, 1] = q[0, 0, 0] * 2.0**40, q[0, 0, 1] * 2.0**-60
    x.options["k_scale"] = 2.0**-40
    assert_accurate(x, mha_decode_paged(*x.arrays, **x.options))
    assert_accurate(x, mha_decode_paged(*x.arrays, **x.options, arch="gfx950"))


@pytest.mark.interpreter
def test_a_large_query_in_the_last_piece() -> None:
    """Rests on the float64 reference: a row of q is divided by its largest number in any piece of its columns."""
    x = FeatureCase((40,), heads=(2, 1), D=192, kv=FP8).build()
    x.arrays[0][0, 0, 0, 128:] *= 2.0**20
    x.options["k_scale"] = 2.0**-20
    for options in ({"arch": "sm_90"}, {"backend": "triton"}):
        assert_accurate(x, mha_decode_paged(*x.arrays, **x.options, **options))


def test_a_scale_of_one_element_is_that_of_every_head() -> None:
    x = FeatureCase(D=128, kv=FP8).build()
    number, array = (mha_decode_paged(*x.arrays, k_scale=s, v_scale=s) for s in (0.5, np.array([0.5], np.float32)))
    assert bits(array) == bits(number)
    k, one = x.torch()[1], torch.tensor([0.5])
    assert resolve_scales(k, k, k, 4, k_scale=one).k.heads.tolist() == [0.5, 0.5]


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"kv": FP8, "D": 128}, {"arch": "sm_80"}, "float8_e4m3fn on sm_80: must be on sm_90 or gfx950"),
    ({"kv": FP8}, {"arch": "gfx950"}, "head dimensions 64 and 64 on gfx950: must be both 128, 256 or 512"),
    ({"kv": FP8, "D": 24}, {}, "head dimension 24: must be a multiple of 16 from 16 to 576"),
    ({"kv": FP8, "dtype": "fp32"}, {}, "k_cache has dtype float8_e4m3fn: must be that of q, float32"),
    ({}, {"window": 0}, "window is 0: must be at least 1"),
    ({}, {"mask": "causal"}, "mask is 'causal': must be a kvlab.attention.masks.Mask"),
    ({}, {"softcap": -1.0}, "softcap is -1.0: must be 0 or more"),
    ({}, {"softcap": 1e-39}, r"softcap is 1e-39: must be 0, or 2\^-126 to 2\^126"),
    ({}, {"sinks": np.zeros(5, np.float32)}, r"sinks has shape \(5,\): must be \[Hq = 6\]"),
    ({}, {"alibi_slopes": np.zeros(5, np.float32)}, r"alibi_slopes has shape \(5,\): must be \[Hq = 6\]"),
    ({"kv": FP8}, {"k_scale": np.zeros(3, np.float32)}, r"k_scale has shape \(3,\): must be a number, \[Hkv = 2\]"),
    ({}, {"kv_layout": "DHN"}, "kv_layout is 'DHN': must be 'NHD' or 'HND'"),
    (
        {},
        {"mask": M.CausalPaddingMask(np.zeros(3, np.int32))},
        "valid_lengths of 3 sequences: must be those of the call, 4",
    ),
]


@pytest.mark.parametrize("case, options, message", BAD, ids=[m[:40] for _, _, m in BAD])
def test_bad_features(case: dict[str, Any], options: dict[str, Any], message: str) -> None:
    x = FeatureCase(**case).build()
    out = np.full((4, 1, 6, x.case.D), 7, x.q.dtype)
    with pytest.raises(ValueError, match=message):
        mha_decode_paged(*x.arrays, **options, out=out)
    assert (out == 7).all()


def test_streaming_of_a_sequence_alone_and_in_a_batch() -> None:
    x = FeatureCase((4100, 17), heads=(2, 1), page=64).build()
    q, k, v, table, lens = x.arrays
    whole = mha_decode_streaming_paged(q, k, v, table, lens, batch_invariant=True)
    alone = mha_decode_streaming_paged(q[:1], k, v, table[:1], lens[:1], batch_invariant=True)
    assert bits(alone) == bits(whole[:1])


def test_streaming_on_another_machine() -> None:
    with pytest.raises(ValueError, match="arch is 'sm_90': must be 'gfx950'"):
        mha_decode_streaming_paged(*FeatureCase().build().arrays, arch="sm_90")
