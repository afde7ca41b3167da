"""The twins of MHA decode. Rests on a law (kernel and emulator compute the same, step by step) and on single changes
of the real sources, each of which the check must report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvlab
from kvlab.attention.mha_decode.config import DecodeProblem, choose_config
from kvlab.mirror import check, check_sources, lockstep

FOLDER = Path(kvlab.__file__).parent / "attention" / "mha_decode"
KERNEL, EMULATOR = ((FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in ("kernel", "emulator"))


def test_the_twins_mirror() -> None:
    report = check("mha_decode")
    steps = {name: [step.marker.name for step in kernel.steps] for name, kernel, _ in report.twins}
    assert steps["attend"][:2] == ["setup", "load_k"]
    assert steps["attend"][-1] == steps["merge"][-1] == "store"


def swap(text: str, first: str, second: str) -> str:
    """Two marker lines of ``attend`` exchanged."""
    lines = text.splitlines()
    a, b = (next(i for i, line in enumerate(lines) if line.lstrip().startswith(f"#: {n}")) for n in (first, second))
    lines[a], lines[b] = lines[b], lines[a]
    return "\n".join(lines)


@pytest.mark.parametrize("side", ["kernel", "emulator"])
@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("#: load_v ", "#: fetch_v ", 1),
        lambda text: swap(text, "load_k", "load_v"),
        lambda text: text.replace("p, alpha, m, l = weigh", "p, alpha, m_new, l = weigh", 1),
        lambda text: text.replace("range(lo, hi, BN)", "range(lo, hi, 2 * BN)", 1),
    ],
    ids=["marker", "order", "name", "header"],
)
def test_one_change_is_reported(side: str, change: Any) -> None:
    sources = {"kernel": KERNEL, "emulator": EMULATOR}
    changed = change(sources[side])
    assert changed != sources[side]
    sources[side] = changed
    report = check_sources(sources["kernel"], sources["emulator"], "attend", "attend")
    assert report.violations
    assert all(":" in v.kernel and ":" in v.emulator for v in report.violations)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("arch", "dtype", "depth", "splits"),
    [
        ("sm_90", ml_dtypes.bfloat16, 64, 2),
        ("sm_90", np.float32, 64, 1),
        ("gfx950", ml_dtypes.bfloat16, 128, 1),
    ],
    ids=["sm_90-bfloat16-D64-splits2", "sm_90-float32-D64", "gfx950-bfloat16-D128"],
)
def test_no_step_differs(arch: str, dtype: Any, depth: int, splits: int) -> None:
    """Ragged lengths, one of them 0, shuffled pages."""
    r = np.random.default_rng(0)
    pages, page, columns, heads, kv_heads = 40, 16, 18, 4, 2
    k, v = (r.standard_normal((pages, page, kv_heads, depth)).astype(dtype) for _ in range(2))
    q = r.standard_normal((2, 1, heads, depth)).astype(dtype)
    problem = DecodeProblem(2, 1, heads, kv_heads, depth, depth, q.itemsize, page, columns * page)
    case = {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "block_table": r.permutation(pages)[: 2 * columns].reshape(2, columns).astype(np.int32),
        "seq_lens": np.array([270, 0], np.int32),
        "scale": depth**-0.5,
        "config": choose_config(problem, num_splits=splits, arch=arch),
    }
    run = lockstep("mha_decode", case, emulator={"arch": arch})
    assert run.ok, str(run)
    assert {m.twin for m in run.maxima} == {"attend", "launch"} | ({"merge"} if splits > 1 else set())
    assert max(row.iteration for row in run.rows if row.twin == "attend") >= (1,)
