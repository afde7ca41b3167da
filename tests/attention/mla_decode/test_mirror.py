"""The twins of MLA decode: the static check on the real sources, with faults seeded in them, and the lockstep run."""

from __future__ import annotations

from typing import Any

import pytest
from mla_cases import Case
from seeded_faults import is_found

from kvlab.attention import explain, mla_decode_paged
from kvlab.attention.masks import ChunkedMask
from kvlab.mirror import check, lockstep


def test_the_twins_mirror_each_other() -> None:
    report = check("mla_decode")
    assert report.ok
    names = {name: [step.marker.name for step in kernel.steps] for name, kernel, _ in report.twins}
    inner = ["load_k", "scores", "mask", "softmax", "load_v", "accumulate"]
    assert names["attend"] == ["setup", *inner, "normalise", "store"]


FAULTS = {
    "a word of a marker": (
        "emulator",
        "#: mask -> s    keys that a row",
        "#: mask -> s    keys a row",
    ),
    "an output left out": ("kernel", "#: load_k -> k, k_rope ", "#: load_k -> k "),
    "a bound name": ("emulator", "        v = cta.load_v(", "        values = cta.load_v("),
    "a bound of the loop": ("kernel", "for start in range(lo, hi, BN):", "for start in range(0, hi, BN):"),
    "a scale": ("emulator", "latent * scale, key.shape", "latent, key.shape"),
    "a comparison": ("kernel", "exists = key < hi", "exists = key <= hi"),
    "a helper": ("kernel", "s = hide(s,", "s = adjust(s,"),
    "an operator": ("kernel", "o * (latent / l)", "o * (latent * l)"),
    "a condition": ("emulator", "if features.scales.v.tokens is not None:", "if features.scales.v.heads is not None:"),
    "a constant": ("kernel", "sees = l != 0", "sees = l != 1"),
    "an operand": ("kernel", "o = accumulate(p, v, o)", "o = accumulate(s, v, o)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found(fault: str) -> None:
    assert is_found("mla_decode", "attend", *FAULTS[fault])


CASES = [
    (Case((70, 0), H=4, columns=(512, 64)), "sm_90"),
    (Case((130, 0), H=64, columns=(512, 64), page=64), "sm_90"),
    (Case((70, 3), H=9, S=4, columns=(96, 16), page=5, dtype="fp16", splits=2, sinks=True), "sm_90"),
    (Case((50,), H=9, S=2, page=5, dtype="fp16", splits=2), "sm_80"),
    (Case((40, 2), H=3, columns=(96, 16), S=4, page=48), "sm_90"),
    (Case((66,), H=3, columns=(256, 32), dtype="fp32", storage="layers"), "sm_90"),
    (Case((200,), H=16, columns=(512, 64), splits=2), "gfx950"),
    (Case((140, 3), H=7, S=3, page=64, dtype="fp16", storage="wide"), "gfx950"),
    (Case((90, 3), H=5, row="rope-aware", k_scale="token", softcap=4.0, splits=2, sinks=True), "sm_90"),
    (Case((70,), H=3, S=2, row="fp8", k_scale="number", dtype="fp16", window=33, slopes=True), "sm_90"),
    (Case((70, 3), H=3, row="fp8", k_scale="head", dtype="fp8", splits=2), "sm_90"),
    (Case((70, 3), H=3, row="scaled", columns=(512, 64), splits=2), "sm_90"),
    (Case((150,), H=3, S=2, mask=ChunkedMask(70), sinks=True, splits=2), "gfx950"),
]


@pytest.mark.interpreter
@pytest.mark.parametrize("case, arch", CASES, ids=[f"{case}-{arch}" for case, arch in CASES])
def test_lockstep(case: Case, arch: str) -> None:
    """Every output of every step agrees between the interpreted kernel and the emulator."""
    x = case.build()
    config = explain(mla_decode_paged, *x.arrays, arch=arch, num_splits=case.splits or 1, **x.options).config
    names = ("q", "kv_cache", "k_rope", "block_table", "seq_lens")
    arguments: dict[str, Any] = dict(
        zip(names, (x.q, *x.windows, x.table, x.lens), strict=True), config=config, features=x.features, scale=x.scale
    )
    arguments |= {} if x.row_scales is None else {"row_scales": x.row_scales}
    result = lockstep("mla_decode", arguments, emulator={"arch": arch})
    assert result.ok, str(result.first_difference)
