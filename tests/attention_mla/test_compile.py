"""The MLA decode kernel compiled for GPUs that are not there: what the compiler made of it, and the emulator beside it.

Rests on the compiler's own artefacts: PTX, SASS, register, spill and shared-memory counts.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from mla_cases import Case

from kvlab.attention.mla_decode import kernel
from kvlab.attention.mla_decode.config import MLADecodeConfig, MLADecodeProblem, choose_config
from kvlab.memory import as_dtype
from kvlab.staging.mma_sync_plan import MmaSyncShape
from kvlab.triton_support.compile import TARGETS, Compiled, compile_kernel, signature_of

pytestmark = pytest.mark.compile

SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "gfx950": 163840}


class _Caught:
    """In place of the kernel: notes the arguments of its launch."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def note(*args: Any, **named: Any) -> None:
            self.arguments = dict(zip(FN.arg_names, args, strict=False)) | named

        return note


FN = kernel.attend


@functools.cache
def compiled(H: int, dtype: str, target: str, emulated: bool = False) -> tuple[Compiled, MLADecodeConfig]:
    """The kernel as a call of one sequence, 512 + 64 columns and pages of 64 compiles it."""
    x = Case((5,), H=H, columns=(512, 64), page=64, dtype=dtype).build()
    problem = MLADecodeProblem(1, 1, H, 512, 64, x.q.itemsize, 4096)
    config = choose_config(problem, arch=target, num_splits=1, emulated=emulated)
    caught = _Caught()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "attend", caught)
        kernel.launch(*x.torch(), config=config, **x.options)
    arguments = caught.arguments
    options = {key: arguments.pop(key) for key in ("num_warps", "num_stages")}
    return compile_kernel(FN, target=target, **signature_of(FN, **arguments), **options), config


MATRIX = [(H, dtype, target) for H, dtype in [(16, "bf16"), (128, "bf16"), (16, "fp32")] for target in TARGETS]
SLOW = [("fp32", "sm_100"), ("fp32", "gfx942")]  # as sm_90 and gfx950
MATRIX = [case for case in MATRIX if case[1:] not in SLOW]


@pytest.mark.parametrize("H, dtype, target", [*MATRIX, (128, "fp16", "sm_90")], ids=lambda v: str(v))
def test_attend(H: int, dtype: str, target: str) -> None:
    made, _ = compiled(H, dtype, target)
    assert made.shared <= SHARED[target]
    assert made.spills == 0
    count = made.instructions
    if target.startswith("gfx"):
        assert any(name.startswith("v_mfma") for name in count)
    elif dtype == "fp32":
        assert not {"HMMA", "HGMMA"} & set(count), "tf32 would round the inputs"
    else:
        assert count["HMMA"] > 0, "mma.sync"
        assert count["LDSM"] > 0, "ldmatrix"
        assert count["LDGSTS"] > 0, "cp.async"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_emulator_issues_the_instructions_of_the_compiled_loop(arch: str) -> None:
    """ldmatrix, mma and P's stores of one tile, counted in PTX and in the emulator's plans of the two tiles."""
    made, config = compiled(16, "bf16", arch, emulated=True)
    ptx, dtype = made.asm["ptx"], as_dtype("bf16")
    latent, rope = (MmaSyncShape(config.BM, config.BN, D, D, dtype, arch, v_in_k=True) for D in (config.BV, config.BR))
    reads = {(part, role): shape.read_addresses(role)[1].shape[0]
             for part, shape in (("latent", latent), ("rope", rope)) for role in "qkvp"}  # fmt: skip
    plain = sum(reads[part, role] for part in ("latent", "rope") for role in "qk") + reads["latent", "p"]
    assert len(re.findall(r"ldmatrix\S*x4\.shared", ptx)) == plain
    last = ptx.rindex("mma.sync")  # what follows reorders the output for its store
    assert len(re.findall(r"ldmatrix\S*x4\.trans\.shared", ptx[:last])) == reads["latent", "v"]
    steps = (config.BV + config.BR) // 16 * (config.BN // 32) + config.BN // 16 * (config.BV // 32)
    assert len(re.findall(r"mma\.sync", ptx)) == steps
    write = latent.access("p write")
    if arch == "sm_90":
        assert write.name == "stmatrix.x2"
        assert len(re.findall(r"stmatrix\S*x2", ptx)) == write.address.shape[0] == 1


def test_v_has_no_memory_of_its_own() -> None:
    """Two buffers of the K tile at most, Q and what the epilogue needs: no room for a V tile beside them."""
    made, config = compiled(16, "bf16", "sm_90")
    tile = config.BN * 576 * 2
    query = config.BM * 576 * 2
    assert made.shared < query + 2 * tile
    assert torch.finfo(torch.bfloat16).bits == 16
