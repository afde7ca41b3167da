"""Kernels are compiled as those whose bits were recorded. Rests on ptxas' own code of the day of the record.

Another number of fused operations or sums tells that a kernel rounds otherwise: the record is to be taken anew
(``benchmarks/chip_bits.py``), or what changed to be undone.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from typing import Any

import pytest
from caught import Caught, as_launched, as_tensors

from benchmarks.chip_bits import CALLS
from kvlab.triton_support.versions import installed

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(installed() != "3.6.0", reason="the record is that of Triton 3.6.0"),
]

# FADD, FMUL, FFMA, MUFU.EX2, MUFU.RCP
RECORDED = {
    "decode-triton-bf16-float32": (28, 57, 26, 10, 6), "decode-triton-e4m3-float32": (28, 74, 26, 10, 6),
    "prefill-triton-bf16-float32": (206, 337, 92, 132, 3), "prefill-triton-e4m3-float32": (206, 465, 92, 132, 3),
    "decode-hopper-bf16": (24, 81, 34, 11, 6), "decode-hopper-e4m3": (28, 114, 34, 15, 6),
    "prefill-hopper-bf16": (264, 296, 316, 260, 8), "prefill-hopper-e4m3": (268, 424, 320, 260, 8),
}


@pytest.mark.parametrize("name", RECORDED)
def test_operations_are_those_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = next(call for call in CALLS if str(call) == name)
    home, arrays, named = call.launched()
    module: Any = importlib.import_module(home + ("hopper" if call.backend == "hopper" else "kernel"))
    stub = Caught(module.attend)
    monkeypatch.setattr(module, "attend", stub)
    monkeypatch.setattr(module, "machine", lambda device: ("sm_90", 132), raising=False)
    module.launch(*map(as_tensors, arrays), **named, out=as_tensors(call.output(arrays)))
    arguments = stub.arguments | ({"PTX": True} if "PTX" in stub.arguments else {})
    sass = as_launched(stub.fn, arguments, "sm_90").sass
    count = Counter(re.findall(r"\b(FFMA|FMUL|FADD|MUFU\.\w+)\b", sass))
    assert tuple(count[x] for x in ("FADD", "FMUL", "FFMA", "MUFU.EX2", "MUFU.RCP")) == RECORDED[name]
