"""The kernel compiled for an H100 that is not there. Rests on the compiler's own artefacts: SASS, registers, spills."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.compile


def compiled(name: str) -> tuple[Any, Counter[str], Any]:
    """The kernel as a call of :data:`CALLS` would launch it, its memory instructions, and the configuration."""
    import torch

    from kvlab.attention import Rope
    from kvlab.attention.kv_store import kernel
    from kvlab.attention.kv_store.plan import paged_plan
    from kvlab.triton_support.compile import compile_kernel, signature_of

    tokens, D, cache, more = {
        "copy": (4096, 128, torch.bfloat16, {}),
        "copy-T64": (64, 128, torch.bfloat16, {}),
        "copy-D80": (4096, 80, torch.bfloat16, {}),
        "number": (4096, 128, torch.float8_e4m3fn, {"k_scale": 1.0, "v_scale": 1.0}),
        "tensor": (4096, 128, torch.float8_e4m3fn, {x: torch.ones(1) for x in ("k_scale", "v_scale")}),
        "own": (4096, 128, torch.float8_e4m3fn, {x: torch.ones(256, 16, 8, 2) for x in ("k_scale", "v_scale")}),
        "rope": (4096, 128, torch.bfloat16, {"positions": torch.arange(4096)}),
    }[name]
    if "positions" in more:
        more["rope"] = Rope(torch.ones(4096, 64), torch.ones(4096, 64))
    k, v = torch.zeros(2, tokens, 8, D, dtype=torch.bfloat16)
    pages = torch.zeros(256, 2, 16, 8, D, dtype=cache)
    x, plan = paged_plan(k, v, pages[:, 0], pages[:, 1], torch.arange(tokens), **more)
    launched: dict[str, Any] = {}

    class Launch:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: launched.update(zip(jit.arg_names, args, strict=False), **options)

    jit, kernel.append = kernel.append, Launch()
    try:
        kernel.launch(
            x.k, x.v, x.k_cache, x.v_cache, x.where, config=plan.config, pages=x.pages, positions=x.positions,
            cos=x.cos, sin=x.sin, k_scale=x.k_scale, v_scale=x.v_scale,
        )  # fmt: skip
    finally:
        kernel.append = jit
    options = {name: launched.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    made = compile_kernel(jit, target="sm_90", **signature_of(jit, **launched), **options)
    return made, Counter(re.findall(r"\b((?:LDG|STG|FFMA)[.\w]*)", made.sass)), plan.config


@pytest.mark.parametrize("name", ["copy", "copy-T64", "copy-D80", "number", "tensor", "own", "rope"])
def test_wide_accesses_and_no_spills(name: str) -> None:
    """16 bytes a lane on both sides: as many as the bytes need, none narrower but slots, scales and angles."""
    made, count, config = compiled(name)
    assert made.spills == 0
    assert made.registers <= 128
    elements = config.k.BR * config.k.BG // (32 * config.num_warps)  # a thread's, of K
    per_store = 16 if config.k.limit else 8
    assert sum(n for op, n in count.items() if op.startswith("STG") and "128" in op) == 2 * elements // per_store
    assert sum(n for op, n in count.items() if op.startswith("LDG") and "128" in op) >= 2 * elements // 8
    assert not any("U8" in op or "U16" in op for op in count)


def test_rope_is_not_fused_into_fma() -> None:
    """Each product and sum is rounded, so that a GPU gives the bits of the emulator."""
    _, count, _ = compiled("rope")
    assert not any(op.startswith("FFMA") for op in count), count


def test_copies_need_no_shared_memory() -> None:
    made, _, config = compiled("copy")
    assert (made.shared, config.programs) == (0, 1024)


def test_kernel_is_reached_without_triton_in_numpy_rooms() -> None:
    """``import kvlab.attention`` brings no torch and no triton with the new operation."""
    code = "import sys, kvlab.attention.kv_store; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
