"""The twins of MLA prefill: the static check, and the lockstep run of the interpreted kernel and the emulator."""

from __future__ import annotations

from typing import Any

import pytest
from mla_prefill_cases import Case
from seeded_faults import is_found

from kvlab.attention.masks import ChunkedMask
from kvlab.attention.mla_prefill.config import choose_config
from kvlab.mirror import check, lockstep


def test_the_twins_mirror_each_other() -> None:
    report = check("mla_prefill")
    assert report.ok
    (_, kernel, _), *_ = report.twins
    tile = ["load_k", "load_rope", "scores", "mask", "softmax", "load_v", "accumulate"]
    assert [step.marker.name for step in kernel.steps] == ["setup", *tile, "normalise", "store"]


FAULTS = {
    "an output left out": ("kernel", "#: setup -> q, q_rope, lo,", "#: setup -> q, lo,"),
    "a bound of the loop": ("emulator", "in ragged_range(bounds[MASKED],", "in ragged_range(bounds[0],"),
    "a scale": ("kernel", "by_key = nope *", "by_key = factor *"),
    "a comparison": ("emulator", "sees = l != 0", "sees = l > 0"),
    "a helper": ("kernel", "lse = log_sum(", "lse = weigh("),
    "an operator": ("emulator", "position = token + total", "position = token - total"),
    "a condition": (
        "kernel", "if numbers.rope is not None:\n                by_rope",
        "if numbers.nope is not None:\n                by_rope",
    ),
    "a constant": ("kernel", "num_q - 1) + total", "num_q - 2) + total"),
    "an operand": ("emulator", "by_rope = rope *", "by_rope = nope *"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found(fault: str) -> None:
    assert is_found("mla_prefill", "attend", *FAULTS[fault])


CASES = [
    (Case(((150, 200),)), "sm_90"),
    (Case(((40, 140), (3, 70)), page=48, row="rope-aware", columns=(80, 32, 96)), "sm_90"),
    (Case(((70, 90), (0, 3), (5, 2)), row="", dtype="fp16", H=1), "sm_90"),
    (Case(((30, 90),), dtype="fp32", columns=(64, 32, 64), H=1, sinks=True), "sm_90"),
    (Case(((60, 200),), starts=(70,), held=(100,), softcap=5.0, slopes=True, H=1), "sm_90"),
    (Case(((30, 90),), row="fp8", k_scale="token", H=1), "sm_90"),
    (Case(((30, 90), (3, 20)), kv="fp8", scales="token", row="rope-aware", page=48), "sm_90"),
    (
        Case(((30, 90),), kv="fp8", scales="head", row="fp8", k_scale="token", dtype="fp8", columns=(64, 32, 64)),
        "sm_90",
    ),
    (Case(((30, 60),), kv="fp8", scales="token", row="", columns=(192, 64, 144), H=1), "sm_90"),
    (Case(((70, 200), (9, 0)), H=1, window=90), "sm_80"),
    (Case(((40, 60),), page=48, row="rope-aware", columns=(80, 32, 64), dtype="fp16", H=1, softcap=5.0), "sm_80"),
    (Case(((30, 60),), dtype="fp32", columns=(64, 32, 64), H=1, slopes=True), "sm_80"),
    (Case(((40, 60),), row="", columns=(192, 64, 256), H=1, sinks=True), "sm_80"),
    (Case(((150, 200), (9, 0)), H=1), "gfx950"),
    (Case(((20, 150),), page=48, window=40, mask=ChunkedMask(64), causal=True, strided=True), "gfx950"),
    (Case(((70, 90),), dtype="fp32", columns=(64, 64, 128), H=1, page=64), "gfx950"),
    (Case(((40, 140), (3, 70)), page=48, row="rope-aware", columns=(80, 32, 96), H=1), "gfx950"),
    (Case(((30, 90),), row="fp8", k_scale="head", columns=(112, 48, 40), H=1), "gfx950"),
    (Case(((30, 90),), kv="fp8", scales="token", dtype="fp16", columns=(112, 32, 48)), "gfx950"),
]


@pytest.mark.interpreter
@pytest.mark.parametrize("case, arch", CASES, ids=[f"{case}-{arch}" for case, arch in CASES])
def test_lockstep(case: Case, arch: str) -> None:
    """Every output of every step agrees between the interpreted kernel and the emulator."""
    x = case.build()
    arguments: dict[str, Any] = dict(zip(("q", "k", "v", "k_rope", "sequences"), x.launch_form(), strict=True))
    problem = x.problem()
    arguments |= {"scale": sum(case.columns[:2]) ** -0.5, "features": x.features(), "problem": problem}
    arguments["config"] = choose_config(problem, arch=arch, emulated=True)
    result = lockstep("mla_prefill", arguments, emulator={"arch": arch})
    assert result.ok, str(result.first_difference)
