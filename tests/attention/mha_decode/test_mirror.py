"""The twins of decode: the static check on the real sources, with faults seeded in them, and the lockstep run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from decode_cases import Case
from feature_cases import FP8, FeatureCase
from seeded_faults import is_found, sources_of
from yardsticks import bits

from kvlab.attention import explain, mha_decode_paged, mha_decode_streaming_paged
from kvlab.attention.mha_decode import emulator
from kvlab.mirror import check, check_sources, lockstep


def test_the_twins_mirror_each_other() -> None:
    report = check("mha_decode")
    assert report.ok
    names = {name: [step.marker.name for step in kernel.steps] for name, kernel, _ in report.twins}
    inner = ["load_k", "scores", "mask", "softmax", "load_v", "accumulate"]
    assert names["attend"] == ["setup", *inner, "normalise", "store"]
    assert names["merge"] == ["setup", "total", "weights", "load_parts", "add", "combine", "store"]


def swap(text: str, one: str, other: str) -> str:
    """Two marker lines changed for each other."""
    return text.replace(one, "\0").replace(other, one).replace("\0", other)


FAULTS = {
    "a word of a marker": ("emulator", "#: mask -> s    keys that a row", "#: mask -> s    keys a row"),
    "a name of a marker": ("kernel", "#: load_k -> k ", "#: fetch_k -> k "),
    "a marker left out": ("emulator", "        #: load_v -> v    the V tile of the same pages\n", ""),
    "an output left out": ("kernel", "#: softmax -> p, m, l, o ", "#: softmax -> p, m, l "),
    "a bound name": ("emulator", "        v = cta.load_v(", "        values = cta.load_v("),
    "a bound name of the kernel": ("kernel", "p, alpha, m, l = weigh", "p, alpha, m_new, l = weigh"),
    "a loop": ("emulator", "in ragged_range(lo, hi, BN):", "in ragged_range(lo, hi, config.BN):"),
    "a bound of the loop": ("kernel", "for start in range(lo, hi, BN):", "for start in range(0, hi, BN):"),
    "code between steps": (
        "emulator",
        "    #: normalise -> l, lse ",
        "    o = o.times(l)\n    #: normalise -> l, lse ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found(fault: str) -> None:
    assert is_found("mha_decode", "attend", *FAULTS[fault])


def test_another_order_is_found() -> None:
    sources = sources_of("mha_decode")
    moved = swap(
        sources["emulator"],
        "#: scores -> s    S = Q K^T in float32, in units of log2",
        "#: mask -> s    keys that a row does not see",
    )
    assert moved != sources["emulator"]
    assert not check_sources(sources["kernel"], moved, "attend", "attend").ok


@pytest.mark.parametrize("fault", ["a bound name of the kernel", "a loop", "a bound of the loop"])
def test_the_twins_of_streaming(fault: str) -> None:
    report = check("mha_decode_streaming")
    assert report.ok
    names = {name: [step.marker.name for step in kernel.steps] for name, kernel, _ in report.twins}
    tile = ["tile", "load_k", "scores", "scale", "mask", "softmax", "load_v", "accumulate"]
    assert names["attend"] == ["setup", *tile, "normalise", "store"]
    assert is_found("mha_decode_streaming", "attend", *FAULTS[fault])


CASES = [
    (Case((150, 0), heads=(2, 1), D=64, splits=2), "sm_90"),
    (Case((70,), heads=(3, 1), D=128, S=3, page=48, dtype="fp16"), "sm_80"),
    (Case((130, 2), heads=(2, 1), D=64, S=4, page=5, dtype="fp32"), "sm_90"),
    (Case((40,), heads=(17, 1), D=80, storage="halves"), "sm_90"),
    (Case((150,), heads=(2, 2), D=64, dtype="bf16", storage="hnd", splits=3), "gfx950"),
    (Case((33,), heads=(2, 1), D=128, dtype="fp32"), "gfx950"),
]


@pytest.mark.interpreter
@pytest.mark.parametrize("case, arch", CASES, ids=[f"{case}-{arch}" for case, arch in CASES])
def test_lockstep(case: Case, arch: str) -> None:
    """Every output of every step agrees between the interpreted kernel and the emulator."""
    x = case.build()
    config = explain(mha_decode_paged, *x.arrays, arch=arch, num_splits=case.splits).config
    arguments: dict[str, Any] = dict(
        zip(("q", "k_cache", "v_cache", "block_table", "seq_lens"), x.arrays, strict=True),
        scale=x.scale,
        config=config,
    )
    result = lockstep("mha_decode", arguments, emulator={"arch": arch})
    assert result.ok, str(result.first_difference)


@pytest.mark.interpreter
def test_lockstep_longest_first() -> None:
    """The order of programs is the same on both sides, and changes nothing in what a sequence gives."""
    x = Case((70, 3, 130, 0, 64, 128), heads=(2, 1), D=64).build()
    config = explain(mha_decode_paged, *x.arrays, num_splits=1).config
    assert config.longest_first == 0
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens")
    arguments: dict[str, Any] = dict(zip(names, x.arrays, strict=True), scale=x.scale)
    ordered = replace(config, longest_first=8)
    result = lockstep("mha_decode", arguments | {"config": ordered})
    assert result.ok, str(result.first_difference)
    before, after = (emulator.launch(**arguments, config=c) for c in (config, ordered))
    assert [bits(a) for a in before] == [bits(a) for a in after]


HEAVY: dict[str, Any] = {"softcap": 3.0, "sinks": True, "alibi": "head"}
FEATURES = [
    (FeatureCase((150, 0), heads=(2, 1), window=70, splits=2, S=2, **HEAVY), "sm_90"),
    (FeatureCase((70,), heads=(2, 1), D=192, Dv=128, mask="bias", dtype="fp16"), "sm_80"),
    (FeatureCase((70,), heads=(2, 1), D=80, Dv=48, mask="chunked", S=3, page=5, dtype="fp32"), "sm_90"),
    (FeatureCase((70, 2), heads=(2, 1), D=96, kv=FP8, scales="token", mask="padding"), "sm_90"),
    (FeatureCase((40,), heads=(2, 1), D=576, kv=FP8, dtype=FP8, scales="head"), "sm_90"),
    (FeatureCase((150,), heads=(2, 1), D=128, kv=FP8, scales="token", splits=2), "gfx950"),
]
STREAMING = [
    FeatureCase((150, 0), heads=(2, 1), splits=2),
    FeatureCase((70,), heads=(2, 1), D=128, S=4, dtype="fp32", **HEAVY),
    FeatureCase((70,), heads=(2, 1), D=256, dtype="fp16", mask="bias", page=5),
    FeatureCase((150,), heads=(2, 2), window=20, storage="halves", S=2),
    FeatureCase((130,), heads=(17, 1), mask="chunked causal"),
    FeatureCase((33, 2), heads=(2, 1), D=512, mask="padding", sinks=True),
    FeatureCase((150, 3), heads=(2, 1), kv=FP8, scales="token", splits=2),
    FeatureCase((40,), heads=(4, 2), D=128, kv=FP8, dtype=FP8, scales="head", S=2),
]


def features_agree(op: str, function: Any, case: FeatureCase, arch: str) -> None:
    x, call = case.build(), case.build().resolved
    arguments = dict(zip(("q", "k_cache", "v_cache", "block_table", "seq_lens"), call.arrays, strict=True))
    config = explain(function, *x.arrays, **x.options, arch=arch, num_splits=case.splits).config
    arguments |= {"scale": x.scale, "config": config, "features": call.features}
    result = lockstep(op, arguments, emulator={"arch": arch})
    assert result.ok, str(result.first_difference)


@pytest.mark.interpreter
@pytest.mark.parametrize("case, arch", FEATURES, ids=[f"{case}-{arch}" for case, arch in FEATURES])
def test_lockstep_of_features(case: FeatureCase, arch: str) -> None:
    features_agree("mha_decode", mha_decode_paged, case, arch)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", STREAMING, ids=str)
def test_lockstep_of_streaming(case: FeatureCase) -> None:
    features_agree("mha_decode_streaming", mha_decode_streaming_paged, case, "gfx950")
