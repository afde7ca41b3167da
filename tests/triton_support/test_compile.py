"""Kernels compiled for every target without a GPU. Rests on what the compiler itself says of its output."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from kvlab.triton_support import versions
from kvlab.triton_support.compile import TARGETS, compile_kernel, signature_of

pytestmark = pytest.mark.compile

NVIDIA = [t for t in TARGETS if t.startswith("sm_")]
AMD = [t for t in TARGETS if t.startswith("gfx")]
MATMUL = {"a": "*bf16", "b": "*bf16", "c": "*bf16", "K": "i32", "stride": "i32"}


@pytest.fixture(scope="module")
def kernels(kernels_on_path):
    import compiled_kernels

    return compiled_kernels


def matmul(kernels, target, **options):
    blocks = {"BM": 64, "BN": 64, "BK": 32}
    return compile_kernel(
        kernels.matmul_kernel, MATMUL, blocks, target, divisible=["a", "b", "c", "K", "stride"], **options
    )


@pytest.mark.parametrize("target, unit", [("sm_80", "HMMA"), ("sm_90", "HGMMA"), ("sm_100", "UTCHMMA")])
def test_a_matrix_product_on_nvidia(kernels, target, unit):
    k = matmul(kernels, target, num_stages=3)
    assert {"ttir", "ttgir", "llir", "ptx", "cubin"} <= set(k.asm)
    assert k.sass_counts[unit] > 0
    assert k.sass_counts["LDGSTS"] > 0  # pipelined: global memory to shared memory without registers
    if target == "sm_80":
        assert k.sass_counts["LDSM"] > 0  # mma.sync takes its operands through ldmatrix
    assert 32 <= k.registers <= 255
    assert k.spills == 0
    # two of three stages at least hold an A and a B tile
    assert k.shared >= 2 * 2 * (64 * 32 + 32 * 64)
    assert k.num_warps == 4


@pytest.mark.parametrize("target", AMD)
def test_a_matrix_product_on_amd(kernels, target):
    k = matmul(kernels, target)
    assert {"ttgir", "llir", "amdgcn", "hsaco"} <= set(k.asm)
    assert any(name.startswith("v_mfma_f32_") and "bf16" in name for name in k.instructions)
    assert any(name.startswith("ds_read") for name in k.instructions)
    assert 16 <= k.registers <= 512
    assert k.spills == 0
    assert k.stack == 0
    with pytest.raises(ValueError, match="has no SASS"):
        _ = k.sass_counts


def test_spills_are_seen(kernels):
    """A 64 x 64 float32 accumulator on four warps is 32 registers a thread; with 40 allowed the rest has no place."""
    k = matmul(kernels, "sm_80", maxnreg=40)
    assert k.registers <= 40
    assert k.spills > 0
    assert k.stack > 0


@pytest.mark.parametrize("target", TARGETS)
def test_divisibility_widens_loads(kernels, target):
    """16 bytes a lane where the addresses are known to be multiples of 16, 2 bytes where nothing is known."""
    wide = {"sm": "ld.global.v4", "gf": "buffer_load_dwordx4|global_load_dwordx4"}[target[:2]].split("|")
    text = {"sm": "ptx", "gf": "amdgcn"}[target[:2]]
    signature, block = {"x": "*bf16", "y": "*bf16", "n": "i32"}, {"B": 2048}
    told = compile_kernel(kernels.copy_kernel, signature, block, target, divisible=["x", "y", "n"]).asm[text]
    untold = compile_kernel(kernels.copy_kernel, signature, block, target, divisible=[]).asm[text]
    assert any(w in told for w in wide)
    assert not any(w in untold for w in wide)


def test_a_signature_is_derived_from_arguments(kernels):
    x = np.zeros(64, ml_dtypes.bfloat16)
    aligned = x[-x.ctypes.data % 16 // 2 :]
    derived = signature_of(kernels.copy_kernel, x=aligned, y=aligned[1:], n=32, B=16)
    assert derived["signature"] == {"x": "*bf16", "y": "*bf16", "n": "i32"}
    assert derived["constexprs"] == {"B": 16}
    assert derived["divisible"] == ["x", "n"]
    derived = signature_of(kernels.copy_kernel, x=np.zeros(1, np.uint8), y=None, n=1, B=16)
    assert derived["signature"] == {"x": "*u8"}
    assert derived["constexprs"] == {"y": None, "n": 1, "B": 16}
    assert signature_of(kernels.copy_kernel, n=24)["divisible"] == []  # Triton notes multiples of 16
    assert signature_of(kernels.copy_kernel, n=2**40)["signature"] == {"n": "i64"}
    assert signature_of(kernels.copy_kernel, n=0.5)["signature"] == {"n": "fp32"}
    with pytest.raises(ValueError, match="x='what'"):
        signature_of(kernels.copy_kernel, x="what")


def test_a_derived_signature_compiles(kernels):
    x = np.zeros(256, np.float32)
    derived = signature_of(kernels.copy_kernel, x=x, y=x, n=256, B=128)
    assert "ret" in compile_kernel(kernels.copy_kernel, **derived).asm["ptx"]


def test_bad_input_is_named(kernels):
    with pytest.raises(ValueError, match="target is 'sm_70': must be one of sm_80, sm_86"):
        compile_kernel(kernels.copy_kernel, {}, {}, "sm_70")
    with pytest.raises(ValueError, match=r"missing: \['n'\], unknown: \['m'\]"):
        compile_kernel(kernels.copy_kernel, {"x": "*i32", "y": "*i32", "m": "i32"}, {"B": 16})
    with pytest.raises(ValueError, match=r"as type: \['n'\]"):
        compile_kernel(kernels.copy_kernel, {"x": "*i32", "y": "*i32", "n": "i32"}, {"B": 16, "n": 1})
    with pytest.raises(ValueError, match=r"divisible \['B'\]"):
        compile_kernel(kernels.copy_kernel, {"x": "*i32", "y": "*i32", "n": "i32"}, {"B": 16}, divisible=["B"])
    types = {"x": "*i32", "y": "*i32", "n": "i32"}
    for target, option in (("sm_90", "num_wraps"), ("sm_90", "waves_per_eu"), ("gfx942", "maxnreg")):
        with pytest.raises(ValueError, match=rf"{option} is 2: {target} has no such option, must be .*num_warps"):
            compile_kernel(kernels.copy_kernel, types, {"B": 16}, target, **{option: 2})


@pytest.mark.parametrize("order", [AMD, AMD[::-1]], ids="-then-".join)
def test_an_amd_target_does_not_change_the_next(kernels, order):
    """Rests on the instruction sets: gfx950 casts two e4m3 at once, gfx942 has no such instruction."""
    for target in order:
        made = compile_kernel(kernels.widen_kernel, {"x": "*fp8e4nv", "y": "*bf16"}, {"B": 1024}, target)
        assert ("v_cvt_scalef32_pk_bf16_fp8" in made.asm["amdgcn"]) == (target == "gfx950"), target


@pytest.mark.parametrize("target", TARGETS)
def test_the_compilers_errors_pass(kernels, target):
    with pytest.raises(Exception, match="B is not 0"):
        compile_kernel(kernels.refused_kernel, {"x": "*i8"}, {"B": 1}, target)


def test_the_cache_is_private(kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compile_kernel(kernels.copy_kernel, {"x": "*i8", "y": "*i8", "n": "i32"}, {"B": 64})
    assert not list(tmp_path.iterdir())
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)


def test_an_interpreted_process_cannot_compile():
    program = "from kvlab.triton_support.compile import compile_kernel; compile_kernel(None, {})"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "RuntimeError: Triton is interpreted in this process" in done.stderr


def test_old_and_missing_versions_are_told(monkeypatch):
    assert versions.require() == versions.installed()
    monkeypatch.setattr(versions, "installed", lambda: "3.5.1")
    with pytest.raises(ImportError, match=r"3\.5\.1 is installed; kvlab needs 3\.6\.0 or newer"):
        versions.require()
    monkeypatch.setattr(versions, "installed", lambda: None)
    with pytest.raises(ImportError, match="not installed"):
        versions.require()
