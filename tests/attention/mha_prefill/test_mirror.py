"""The twins of prefill: the static check, and the lockstep run of the interpreted kernel and the emulator."""

from __future__ import annotations

from typing import Any

import pytest
from prefill_cases import Case

from kvlab.mirror import check, lockstep


def test_the_twins_mirror_each_other() -> None:
    report = check("mha_prefill")
    assert report.ok
    (_, kernel, _), *_ = report.twins
    tile = ["load_k", "scores", "mask", "softmax", "load_v", "accumulate"]
    assert [step.marker.name for step in kernel.steps] == ["setup", *tile, "normalise", "store"]


CASES = [
    (Case(((150, 200),)), "sm_90"),
    (Case(((140, 300), (3, 70)), form="paged", page=16, D=128, dtype="fp16"), "sm_90"),
    (Case(((70, 90), (0, 3), (5, 2)), form="ragged", dtype="fp32"), "sm_90"),
    (Case(((150, 170),), window=(40, 7), causal=False, sinks=True, softcap=5.0, heads=(1, 1)), "sm_90"),
    (Case(((150, 200),), heads=(1, 1)), "sm_80"),
    (Case(((140, 170), (3, 70)), form="paged", heads=(2, 1), page=16, D=128, dtype="fp16", sinks=True), "sm_80"),
    (Case(((70, 90), (0, 3), (5, 2)), form="ragged", dtype="fp32", window=40), "sm_80"),
    (Case(((70, 90),), D=80, DV=40, mask="striped", alibi="head", base2=True, softcap=9.0), "sm_80"),
    (Case(((40, 50),), D=256, heads=(1, 1), strided=True), "sm_80"),
    (Case(((40, 50),), D=192, DV=128, form="paged", page=48, heads=(1, 1), causal=False), "sm_80"),
    (Case(((150, 200), (9, 0)), form="ragged", heads=(1, 1)), "gfx950"),
    (Case(((20, 150),), form="paged", page=48, heads=(3, 1), strided=True), "gfx950"),
    (Case(((70, 90),), dtype="fp32", sinks=True), "gfx950"),
    (Case(((70, 90),), D=80, DV=48, mask="chunked", alibi="head", base2=True), "sm_90"),
    (Case(((40, 50),), heads=(2, 1), D=288, mask="striped"), "sm_90"),
    (Case(((70, 90), (9, 20)), form="paged", kv="fp8", scales="token", window=40, hnd=True), "sm_90"),
    (Case(((70, 90),), form="ragged", dtype="fp8", scales="head", heads=(2, 2)), "sm_90"),
    (Case(((70, 90),), D=192, DV=128, kv="fp8", scales="number", alibi="head"), "gfx950"),
    (Case(((70, 90), (9, 20)), form="paged", page=48, D=80, DV=40, dtype="fp16", window=40), "gfx950"),
    (Case(((30, 50),), D=576, DV=112, heads=(1, 1), mask="striped"), "gfx950"),
    (Case(((40, 50),), D=48, DV=96, kv="fp8", scales="token", heads=(2, 1)), "gfx950"),
    (Case(((40, 50),), D=40, DV=72, dtype="fp32", sinks=True), "gfx950"),
    (Case(((20, 40),), D=320, DV=24, dtype="fp32", heads=(1, 1)), "gfx950"),
    (Case(((70, 90),), dtype="fp8", scales="token", mask="chunked causal"), "gfx950"),
    (Case(((20, 90), (9, 70)), form="paged", heads=(6, 2), temperature=True, softcap=4.0, sinks=True), "sm_90"),
    (Case(((70, 90), (5, 9)), form="ragged", heads=(2, 1), temperature=True, alibi="head", dtype="fp32"), "sm_80"),
    (Case(((40, 60),), heads=(4, 2), temperature=True, kv="fp8", scales="head", mask="striped"), "gfx950"),
]



@pytest.mark.interpreter
@pytest.mark.parametrize("case, arch", CASES, ids=[f"{case}-{arch}" for case, arch in CASES])
def test_lockstep(case: Case, arch: str) -> None:
    """Every output of every step agrees between the interpreted kernel and the emulator."""
    call = case.build().plan(backend="emulator", arch=arch)
    plan = call.plan
    arguments: dict[str, Any] = dict(zip(("q", "k", "v", "sequences"), call.arrays, strict=True))
    arguments |= {"scale": plan.scale, "problem": plan.problem, "config": plan.explanation.config}
    arguments["features"] = call.features
    result = lockstep("mha_prefill", arguments, emulator={"arch": arch})
    assert result.ok, str(result.first_difference)
