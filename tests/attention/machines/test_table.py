"""The table of machines is true: what an emulated call runs, how P moves, what is refused; and so is its page.

Rests on the calls themselves: the CTA models that begin in them, and the traffic that they count.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kvlab.attention import (
    attend_paged,
    mha_decode_paged,
    mha_decode_streaming_paged,
    mha_prefill,
    mla_decode_paged,
    mla_prefill_ragged,
)
from kvlab.attention.features.resolve import Features
from kvlab.attention.machines import ARCHS, MACHINES, Machine, choose, table
from kvlab.attention.mla_decode import config as mla_config
from kvlab.attention.mla_decode.emulator import launch as mla_emulator
from kvlab.memory import bfloat16, float8_e4m3fn
from kvlab.staging import Traffic
from kvlab.staging.gfx950.mfma_cta import MfmaCTA
from kvlab.staging.tile.launched_cta import LaunchedCTA
from tools import machines

DTYPES = {"4 bits": np.dtype(np.uint8), "16 bits": bfloat16, "e4m3": float8_e4m3fn, "float32": np.dtype(np.float32)}
TABLE, LENS = np.array([[1, 0], [2, 3]]), np.array([41, 50])


class Noted(Traffic):
    """Keeps the CTA models that begin."""

    def begin(self, cta: Any) -> None:
        vars(self).setdefault("ctas", []).append(cta)
        super().begin(cta)


def rows(dtype: Any, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    if dtype == np.uint8:  # two columns a byte
        return rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def call(operation: str, dtype: Any, least: int, traffic: Traffic | None, **options: Any) -> np.ndarray:
    """A call whose tiles have at least so many query rows; beside 16-bit queries where K and V are e4m3 or 4 bits."""
    q = bfloat16 if dtype.itemsize == 1 else dtype
    options |= {"traffic": traffic}
    if operation == "mha_decode" and least and options["arch"] == "sm_90":  # chunks have large tiles
        caches = (rows(dtype, 4, 32, 2, 128) for _ in "kv")
        return attend_paged(rows(q, 80, 4, 128), *caches, TABLE, LENS, np.array([0, 40, 80]), **options)
    if operation in ("mha_decode", "mha_decode_streaming"):
        function = mha_decode_paged if operation == "mha_decode" else mha_decode_streaming_paged
        return function(rows(q, 2, 4, 128), *(rows(dtype, 4, 32, 2, 128) for _ in "kv"), TABLE, LENS, **options)
    if operation == "mha_prefill":
        n = 80 if least else 20  # few rows beyond 256 columns take small tiles
        D = 64 if least else 320
        return mha_prefill(rows(q, 1, n, 2, D), *(rows(dtype, 1, 90, 1, D) for _ in "kv"), **options)
    if operation == "mla_prefill":
        arrays = rows(q, 80, 2, 192), rows(dtype, 90, 2, 128), rows(dtype, 90, 2, 128), rows(q, 90, 64)
        return mla_prefill_ragged(*arrays, np.array([0, 80]), np.array([0, 90]), **options)
    heads = 40 if least else 8
    latents = rows(q, 2, 1, heads, 576), rows(dtype, 4, 32, 576), TABLE, LENS
    return mla_decode_paged(*latents, v_dim=512, **options)


def wide_latents(traffic: Traffic) -> None:
    """MLA decode with the tile that it has where the compiler holds its rows."""
    q, cache = rows(bfloat16, 2, 1, 40, 576), rows(bfloat16, 4, 64, 576)
    arrays = q, cache[..., :512], cache[..., 512:], TABLE, LENS
    problem = mla_config.MLADecodeProblem.of(*arrays)
    config = mla_config.choose_config(problem, arch="sm_90", emulated=True, wgmma=True)
    mla_emulator(*arrays, scale=0.1, features=Features(), config=config, arch="sm_90", traffic=traffic)


def reached(row: Machine, arch: str, operation: str) -> bool:
    """MLA prefill has no small tiles of 16 bits or e4m3 on sm_90."""
    return (arch, operation, row.cta.__name__) != ("sm_90", "mla_prefill", "MmaSyncCTA")


EVERY = [
    pytest.param(row, arch, operation, kind, id=f"{arch} {operation} {kind} {row.cta.__name__}")
    for row in MACHINES for arch in row.archs for operation in row.operations for kind in row.kinds
    if reached(row, arch, operation)
]


@pytest.mark.parametrize("row, arch, operation, kind", EVERY)
def test_a_call_runs_what_its_row_says(row: Machine, arch: str, operation: str, kind: str) -> None:
    """Its CTA and no other; P goes through shared memory, or where the row says so in registers; buffers of MAX's."""
    traffic = Noted()
    if row.rows and operation == "mla_decode":
        wide_latents(traffic)
    else:
        call(operation, DTYPES[kind], row.rows or 64 * (arch != "sm_90"), traffic, arch=arch)
    ctas = vars(traffic)["ctas"]
    assert {type(cta) for cta in ctas} == {row.cta}
    moved = "p write" in traffic.wavefronts
    assert row.p_path.startswith("shared memory" if moved else "registers") or (not moved and "registers" in row.p_path)
    for cta in ctas:
        held = [type(vars(cta)[role]).__name__ for role in "kv" if role in vars(cta)]
        assert all(name in (row.buffer.partition(",")[0], "WarpSlices") for name in held), held
        assert row.buffer.startswith("cp.async") is ("copies" in vars(cta))


@pytest.mark.parametrize("row, arch, operation, kind", EVERY)
def test_choose_gives_the_row(row: Machine, arch: str, operation: str, kind: str) -> None:
    assert choose(arch, DTYPES[kind], operation, rows=row.rows) is row


def test_every_cta_says_how_it_moves() -> None:
    for cta in {row.cta for row in (*table.LISTED, *machines.HOPPER)}:
        assert issubclass(cta, LaunchedCTA)
        assert cta.buffer
        assert cta.p_path


def test_a_row_and_a_class_are_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that the table has not: an operation takes it, refuses what the row does not take, and names it.

    Rests on the float64 reference.
    """

    class Strips(MfmaCTA):
        """Another machine's."""

    q, k, v = rows(np.float32, 2, 4, 64), rows(np.float32, 4, 32, 2, 64), rows(np.float32, 4, 32, 2, 64)
    with pytest.raises(ValueError, match="arch is 'gfx942': must be one of sm_80, sm_90, gfx950"):
        mha_decode_paged(q, k, v, TABLE, LENS, arch="gfx942")
    row = Machine(("mha_decode",), ("gfx942",), ("float32",), Strips)
    monkeypatch.setattr(table, "MACHINES", (*MACHINES, row))
    traffic = Noted()
    out = mha_decode_paged(q, k, v, TABLE, LENS, arch="gfx942", traffic=traffic)
    assert {type(cta) for cta in vars(traffic)["ctas"]} == {Strips}
    exact = mha_decode_paged(q, k, v, TABLE, LENS, backend="reference")
    assert np.abs(out - exact).max() < 1e-5
    k, v = (x.astype(bfloat16) for x in (k, v))
    with pytest.raises(ValueError, match="k_cache in bfloat16 on gfx942: must be on sm_80, sm_90 or gfx950"):
        mha_decode_paged(q.astype(bfloat16), k, v, TABLE, LENS, arch="gfx942")
    with pytest.raises(ValueError, match="arch is 'sm_70': must be one of sm_80, sm_90, gfx942, gfx950"):
        mha_decode_paged(q, k.astype(np.float32), v.astype(np.float32), TABLE, LENS, arch="sm_70")


E4M3, NO_E4M3 = float8_e4m3fn, "must be on sm_90 or gfx950: sm_80 has no e4m3"
REFUSED = [
    ("mha_decode", "gfx950", DTYPES["4 bits"], "k_cache in uint8 on gfx950: must be on sm_80 or sm_90"),
    ("mha_decode", "sm_80", E4M3, f"k_cache in float8_e4m3fn on sm_80: {NO_E4M3}"),
    ("mha_prefill", "sm_80", E4M3, f"k in float8_e4m3fn on sm_80: {NO_E4M3}"),
    ("mla_prefill", "sm_80", E4M3, f"k in float8_e4m3fn on sm_80: {NO_E4M3}"),
    ("mla_decode", "sm_80", E4M3, "kv_cache in float8_e4m3fn on sm_80: must be on sm_90: sm_80 has no e4m3"),
    ("mla_decode", "gfx950", E4M3, "kv_cache in float8_e4m3fn on gfx950: must be on sm_90"),
    ("mla_decode", "gfx950", DTYPES["float32"],
     "512 + 64 columns of float32 on gfx950: must be 128, 256 or 512 + 32 or 64 of 16 bits; a tile of 128 keys in "
     "float32 does not fit into LDS; sm_80 and sm_90 take the others"),
    ("mha_decode_streaming", "sm_90", bfloat16, "arch is 'sm_90': must be 'gfx950'"),
]


@pytest.mark.parametrize("operation, arch, dtype, words", REFUSED)
def test_what_no_row_takes_is_refused(operation: str, arch: str, dtype: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        call(operation, dtype, 0, None, arch=arch)


@pytest.mark.parametrize("D, Dv", [(64, 128), (96, 96)])
def test_head_dimensions_that_no_row_takes_are_refused(D: int, Dv: int) -> None:
    words = f"head dimensions {D} and {Dv} on gfx950: must be both 64, 128, 256 or 512, as MAX's decode"
    caches = rows(bfloat16, 4, 32, 2, D), rows(bfloat16, 4, 32, 2, Dv)
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        mha_decode_paged(rows(bfloat16, 2, 4, D), *caches, TABLE, LENS, arch="gfx950")


def test_archs_are_those_of_the_rows() -> None:
    assert ARCHS == ("sm_80", "sm_90", "gfx950")


def test_the_page_is_up_to_date() -> None:
    assert machines.PAGE.read_text() == machines.page(), "run python tools/machines.py"


def test_a_new_machine_touches_three_files() -> None:
    """Those that begin the recipe's steps; the one above needed no more than a class and the table."""
    page = (machines.PAGE.parent / "recipes.md").read_text()
    recipe = page.partition("## A machine that is emulated\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d\..*?`(kvlab/[\w/.]+)`", recipe, re.MULTILINE)
    assert steps == ["kvlab/hardware/arch_table.py", "kvlab/staging/", "kvlab/attention/machines/table.py"]
