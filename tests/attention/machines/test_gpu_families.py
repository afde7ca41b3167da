"""GPUs that torch is made to describe: whose tiles a call gets there, and which of them take e4m3.

Rests on NVIDIA's tables: products are mma.sync's alone before sm_90 and on sm_120; e4m3 comes with sm_89.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvlab.attention import explain  # noqa: E402
from kvlab.attention.call import backends, kinds  # noqa: E402
from kvlab.attention.machines import gpu as gpu_facts  # noqa: E402
from kvlab.attention.machines.gpu import shared_limit  # noqa: E402
from kvlab.attention.mha_prefill.config import PrefillProblem, choose_config  # noqa: E402
from kvlab.attention.tiles.tile_bytes import tile_bytes  # noqa: E402

PREFIX = "kvlab.attention."
TABLE, LENS, CU = torch.tensor([[1, 0]]), torch.tensor([20]), torch.tensor([0, 20])


def function(name: str) -> Any:
    return getattr(importlib.import_module(PREFIX + name.removesuffix("_paged").removesuffix("_ragged")), name)


def rows(*shape: int, dtype: Any) -> Any:
    return torch.ones(shape).to(dtype)


def mha(name: str, *more: Any) -> Callable[[Any, Any], Any]:
    def call(dtype: Any, kv: Any) -> Any:
        q = rows(1, 4, 64, dtype=dtype) if not more else rows(20, 4, 64, dtype=dtype)
        caches = (rows(2, 16, 1, 64, dtype=kv) for _ in "kv")
        return explain(function(name), q, *caches, TABLE, LENS, *more)

    return call


def mla_decode(dtype: Any, kv: Any) -> Any:
    q, cache = rows(1, 4, 576, dtype=dtype), rows(2, 16, 576, dtype=kv)
    return explain(function("mla_decode_paged"), q, cache, TABLE, LENS)


def mla_prefill(dtype: Any, kv: Any) -> Any:
    q, k = rows(20, 2, 192, dtype=dtype), rows(20, 2, 128, dtype=dtype)
    return explain(function("mla_prefill_paged"), q, k, k, rows(2, 16, 576, dtype=kv), TABLE, LENS, CU, CU)


def mla_prefill_of_e4m3(dtype: Any, kv: Any) -> Any:
    """K and V of another dtype than the cache's."""
    q, k = rows(20, 2, 192, dtype=dtype), rows(20, 2, 128, dtype=kv)
    return explain(function("mla_prefill_paged"), q, k, k, rows(2, 16, 576, dtype=dtype), TABLE, LENS, CU, CU)


CALLS = {
    "mha_prefill": mha("mha_prefill_paged", CU), "mha_decode": mha("mha_decode_paged"),
    "mla_decode": mla_decode, "mla_prefill": mla_prefill, "mla_prefill_of_e4m3": mla_prefill_of_e4m3,
    "mha_decode_streaming": mha("mha_decode_streaming_paged"),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes every tensor one of a GPU of an architecture, for plans."""

    def become(arch: str) -> None:
        monkeypatch.setattr(gpu_facts, "machine", lambda device: (arch, 100))
        monkeypatch.setattr(kinds, "_kinds", {})  # nothing is known from the one before

    for module in (backends, gpu_facts):
        monkeypatch.setattr(module, "on_gpu", lambda array: True)
    return become


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_tiles_are_those_of_the_family(name: str, dtype: Any, gpu: Callable[[str], None]) -> None:
    found = {}
    for arch in ("sm_80", "sm_86", "sm_89", "sm_120", "sm_90"):
        gpu(arch)
        found[arch] = CALLS[name](dtype, dtype).config
    assert found["sm_86"] == found["sm_89"] == found["sm_120"] == found["sm_80"]
    if (name, dtype) in (("mla_prefill", torch.bfloat16), ("mla_decode", torch.float32)):  # the others share tiles
        assert found["sm_90"] != found["sm_80"]
    if name == "mha_decode_streaming":  # whose tiles are MAX's on gfx950 alone
        gpu("gfx950")
        assert CALLS[name](dtype, dtype).config.BN > found["sm_90"].BN


def test_stages_are_those_that_a_gpu_has_shared_memory_for(gpu: Callable[[str], None]) -> None:
    """Rests on NVIDIA's tables: 163 KB a CTA on sm_80, 99 on sm_86, sm_89 and sm_120. Bytes of a tile as compiled."""
    q, rows_of_kv = rows(20, 4, 576, dtype=torch.bfloat16), rows(2, 16, 1, 576, dtype=torch.bfloat16)
    wide = rows(1, 4, 576, dtype=torch.float32), *(rows(2, 16, 1, 576, dtype=torch.float32) for _ in "kv")
    found = {}
    for arch in ("sm_80", "sm_86", "sm_89", "sm_120", "sm_121"):
        gpu(arch)
        prefill = explain(function("mha_prefill_paged"), q, rows_of_kv, rows_of_kv, TABLE, LENS, CU).config
        decode = explain(function("mha_decode_paged"), *wide, TABLE, LENS).config
        assert tile_bytes(prefill.BM, prefill.BN, (576, 576), 2, prefill.num_stages) <= shared_limit(arch)
        assert tile_bytes(decode.BM, decode.BN, (576, 576), 4, decode.num_stages) <= shared_limit(arch)
        found[arch] = prefill.num_stages, decode.num_stages
    assert found == {"sm_80": (2, 2)} | dict.fromkeys(("sm_86", "sm_89", "sm_120", "sm_121"), (1, 1))


SIZES = [(D, DV) for D in range(16, 577, 56) for DV in range(16, 577, 80)]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_every_prefill_tile_before_hopper_fits(arch: str) -> None:
    """Rests on ``tile_bytes``, which compiled kernels confirm, for all head dimensions; and 255 registers a thread:
    none holds more than 96 accumulators of the output.
    """
    for (D, DV), itemsize, biased in itertools.product(SIZES, (1, 2), (False, True)):
        problem = PrefillProblem(1, 300, 2, 1, D, DV, itemsize, itemsize, biased=biased, heavy=biased)
        c = choose_config(problem, arch="sm_80", shared=shared_limit(arch))
        columns = c.D0 + c.D1, c.V0 + c.V1
        assert tile_bytes(c.BM, c.BN, columns, itemsize, c.num_stages) <= shared_limit(arch), (problem, c)
        warps = min(c.BM // 16, 8) if c.BM >= (c.V1 or c.V0) else 8
        assert c.BM * columns[1] // (32 * warps) <= 96, (problem, c)


@pytest.mark.parametrize("name", CALLS)
def test_e4m3_from_sm_89_on(name: str, gpu: Callable[[str], None]) -> None:
    for arch in ("sm_80", "sm_86", "gfx90a"):
        gpu(arch)
        accepted = "on sm_89 or later, or gfx942 or gfx950"
        with pytest.raises(ValueError, match=f"float8_e4m3fn on {arch}: must be {accepted}"):
            CALLS[name](torch.bfloat16, torch.float8_e4m3fn)
    for arch in ("sm_89", "sm_90", "sm_120", "gfx942", "gfx950"):
        gpu(arch)
        assert CALLS[name](torch.bfloat16, torch.float8_e4m3fn).backend == "triton"


def test_products_of_e4m3_need_gfx950_on_amd(gpu: Callable[[str], None]) -> None:
    gpu("gfx942")
    with pytest.raises(ValueError, match="float8_e4m3fn on gfx942: must be on sm_89 or later, or gfx950"):
        CALLS["mha_prefill"](torch.float8_e4m3fn, torch.float8_e4m3fn)
