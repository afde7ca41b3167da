"""The kernel compiled for an H100 that is not there. Rests on the compiler's own artefacts: SASS, registers, spills."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from caught import Caught, as_launched
from store_cases import Step

from kvlab.attention.kv_store.config import CosSin, StoreTables
from kvlab.triton_support.versions import installed

pytestmark = pytest.mark.compile


def compiled(name: str) -> tuple[Any, Counter[str], Any]:
    """The kernel as a call of :data:`CALLS` would launch it, its memory instructions, and the configuration."""
    import torch

    from kvlab.attention import Rope, kv_store_paged

    tokens, D, cache, more = {
        "copy": (4096, 128, torch.bfloat16, {}),
        "copy-T64": (64, 128, torch.bfloat16, {}),
        "copy-D80": (4096, 80, torch.bfloat16, {}),
        "number": (4096, 128, torch.float8_e4m3fn, {"k_scale": 1.0, "v_scale": 1.0}),
        "tensor": (4096, 128, torch.float8_e4m3fn, {x: torch.ones(1) for x in ("k_scale", "v_scale")}),
        "own": (4096, 128, torch.float8_e4m3fn, {x: torch.ones(256, 16, 8, 2) for x in ("k_scale", "v_scale")}),
        "rope-halves": (4096, 128, torch.bfloat16, {"positions": torch.arange(4096)}),
        "rope-pairs": (4096, 128, torch.bfloat16, {"positions": torch.arange(4096)}),
    }[name]
    if "positions" in more:
        more["rope"] = Rope(torch.ones(4096, 64), torch.ones(4096, 64), name == "rope-pairs")
    k, v = torch.zeros(2, tokens, 8, D, dtype=torch.bfloat16)
    pages = torch.zeros(256, 2, 16, 8, D, dtype=cache)
    call = kv_store_paged.planned(k, v, pages[:, 0], pages[:, 1], torch.arange(tokens), **more)
    config = call.plan.explanation.config
    made = made_of(call.inputs, config)
    return made, Counter(re.findall(r"\b((?:LDG|STG|FFMA)[.\w]*)", made.sass)), config


def made_of(x: Any, config: Any, target: str = "sm_90") -> Any:
    """The kernel as ``launch`` specialises it for these arguments."""
    from kvlab.attention.kv_store import kernel

    caught = Caught(kernel.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "append", caught)
        kernel.launch(
            x.k, x.v, x.k_cache, x.v_cache, StoreTables(x.where, x.lens, x.table, x.positions), config=config,
            pages=x.pages, cos_sin=CosSin(x.cos, x.sin), k_scale=x.k_scale, v_scale=x.v_scale,
        )
    return as_launched(caught.fn, caught.arguments, target)


STEPS = {
    "ragged-few": Step((5, 0, 3), (3, 1, 4)),
    "padded-few": Step((5, 2, 0), (3, 1, 4), padded=True),
    "padded-prefill": Step((9,) * 16, (300,) * 16, heads=8, D=128, page=16, padded=True),
    "padded-decode": Step((9,) * 16, (1,) * 16, heads=8, D=128, page=16, padded=True),
    "ragged-fp8": Step((9,) * 16, (99,) * 16, heads=8, D=128, page=16, dtype="fp8", scale_dtype="fp32", granularity=64),
}


@pytest.mark.parametrize("rope", [None, "halves", "pairs"])
@pytest.mark.parametrize("name", STEPS)
def test_tables_of_a_collection(name: str, rope: str | None) -> None:
    """Ragged and padded steps, through page tables: nothing spilled on an H100 (8 bytes with Triton 3.9), and they
    compile for AMD.
    """
    import torch

    from kvlab.attention import Rope, kv_store
    from kvlab.common.arrays import to_torch

    step = STEPS[name]
    k, v = (to_torch(x) for x in step.tokens())
    where = {name: to_torch(a.astype("int32")) for name, a in step.where().items()}
    turn = rope and Rope(torch.ones(512, step.D // 2), torch.ones(512, step.D // 2), rope == "pairs")
    call = kv_store.planned(k, v, step.paged().torch(), 1, **where, rope=turn)
    x, config = call.inputs, call.plan.explanation.config
    assert made_of(x, config).spills <= (8 if str(installed()).startswith("3.9.") else 0)
    if rope is None and step.dtype != "fp8":
        made_of(x, config, "gfx942")


NAMES = ["copy", "copy-T64", "copy-D80", "number", "tensor", "own", "rope-halves", "rope-pairs"]


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", ["rope-halves", "rope-pairs"])
def test_rope_is_not_fused_into_fma(name: str) -> None:
    """Each product and sum is rounded, so that a GPU gives the bits of the emulator."""
    _, count, _ = compiled(name)
    assert not any(op.startswith("FFMA") for op in count), count


@pytest.mark.parametrize("name", ["copy", "tensor", "rope-halves", "rope-pairs"])
def test_no_shared_memory(name: str) -> None:
    """A dim stays in the thread that loads it; pairs are neighbours in one thread."""
    made, _, config = compiled(name)
    assert (made.shared, config.programs) == (0, 4096)


def test_kernel_is_reached_without_triton_in_numpy_rooms() -> None:
    """``import kvlab.attention`` brings no torch and no triton with the new operation."""
    code = "import sys, kvlab.attention.kv_store; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
