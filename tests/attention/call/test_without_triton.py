"""Where Triton is not installed, as on macOS and Windows: CPU tensors go to the emulator, hints name what is possible.

Rests on the emulator's own results, bit for bit. A process of its own hides Triton and calls itself another system.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import importlib.metadata, sys
sys.path.insert(0, {folder!r})
sys.modules["triton"] = None  # what an import of it, and a search for it, see
whole = importlib.metadata.version
def version(name):
    if name == "triton":
        raise importlib.metadata.PackageNotFoundError(name)
    return whole(name)
importlib.metadata.version = version

import numpy as np
import torch
from operation_calls import OPERATIONS, call_of
from kvlab import attention, mirror
from kvlab.attention import explain
from kvlab.common.arrays import to_torch

import platform
platform.system = lambda: {platform!r}
HINT = {hint!r}

def fails(kind, call, *words):
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("nothing was raised")

def outcome(a, result):
    parts = list(result) if isinstance(result, tuple) else [] if result is None else [result]
    kept = [getattr(a[n], "blocks", a[n]) for n in ("k_cache", "v_cache", "cache", "out") if n in a]
    return [np.asarray(part).tobytes() for part in parts + kept]

for name in OPERATIONS:
    function, tensors, arrays = getattr(attention, name), call_of(name, to_torch), call_of(name)
    plan = explain(function, **tensors)
    assert (plan.backend, plan.reason) == ("emulator", "torch tensors in CPU memory, without Triton"), plan
    result = function(**tensors)
    assert result is None or all(isinstance(p, torch.Tensor) for p in (result if type(result) is tuple else [result]))
    assert outcome(tensors, result) == outcome(arrays, function(**arrays)), name
    fails(ValueError, lambda: function(**tensors, backend="triton"), "backend is 'triton': must have triton: ", HINT)

from kvlab.demo.__main__ import main
from kvlab.triton_support import versions
fails(ImportError, versions.require, "Triton is not installed", HINT)
fails(ImportError, lambda: mirror.lockstep("merge_states", dict(outs=np.ones((2, 1, 1, 1, 16), np.float32),
      lses=np.ones((2, 1, 1, 1), np.float32))), "Triton is not installed", HINT)
assert main([]) == 2
print("fine")
"""


@pytest.mark.parametrize(
    ("platform", "hint"),
    [
        ("Linux", "pip install -e '.[kernels]', in kvlab's own folder"),
        ("Darwin", "CPU tensors go to the emulator and the reference here"),
        ("Windows", "CPU tensors go to the emulator and the reference here"),
    ],
)
def test_without_triton(platform: str, hint: str) -> None:
    code = CODE.format(folder=str(Path(__file__).parents[2] / "cases"), platform=platform, hint=hint)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "fine", done.stderr[-2000:]
    assert done.stderr.strip() == f"kvlab demo: needs triton: {done.stderr.strip().partition('triton: ')[2]}"
    assert hint in done.stderr
