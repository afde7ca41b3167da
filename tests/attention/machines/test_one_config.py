"""Twins take one configuration: what the emulator of a machine takes is what the Triton kernel would take there.

Rests on the law that twins are the same steps on the same tiles. For each operation, dtype, head dimension and machine
both are asked for their plans, and the emulator then works on the tiles it was given.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvlab.attention import (
    explain,
    mha_decode_paged,
    mha_decode_streaming_paged,
    mha_prefill,
    mla_decode_paged,
    mla_prefill_paged,
    mla_prefill_ragged,
)
from kvlab.attention.call import kinds
from kvlab.attention.machines.gpu import target_of
from kvlab.common.arrays import to_torch
from kvlab.memory import as_dtype

ARCHS = ("sm_80", "sm_90", "gfx950")
KINDS = {"bf16": ("bf16", "bf16"), "fp32": ("fp32", "fp32"), "e4m3 keys": ("bf16", "fp8"), "e4m3": ("fp8", "fp8")}
"""dtypes of q, and of K and V."""
FOLDERS = {"mla_prefill_paged": "mla_prefill"}
"""Those of operations that are not called so."""


def random(rng: np.random.Generator, dtype: str, *shape: int) -> Any:
    return (rng.standard_normal(shape) / 2).astype(as_dtype(dtype))


def prefill(kind: str, D: int, rows: int) -> tuple[Any, ...]:
    rng, (q, kv) = np.random.default_rng(0), KINDS[kind]
    return random(rng, q, 1, rows, 2, D), random(rng, kv, 1, rows, 1, D), random(rng, kv, 1, rows, 1, D)


def decode(kind: str, D: int, rows: int) -> tuple[Any, ...]:
    rng, (q, kv) = np.random.default_rng(0), KINDS[kind]
    pages = [random(rng, kv, 2, 64, 1, D) for _ in "kv"]
    return random(rng, q, 1, rows, D), *pages, np.array([[1, 0]], np.int32), np.array([70], np.int32)


def latent_prefill(kind: str, D: int, rows: int) -> tuple[Any, ...]:
    """Over pages."""
    *arrays, rope, starts = latent_ragged(kind, D, rows)[:-1]
    pages, latents = -(-rows // 64), np.zeros((1, 64, 512), rope.dtype)
    cache = np.concatenate([np.repeat(latents, pages, 0), np.resize(rope, (pages, 64, 64))], 2)
    return *arrays, cache, np.arange(pages)[None], np.array([rows]), starts, starts


def latent_ragged(kind: str, D: int, rows: int) -> tuple[Any, ...]:
    rng, (q, kv) = np.random.default_rng(0), KINDS[kind]
    k, v, rope = random(rng, kv, rows, 1, D), random(rng, kv, rows, 1, D), random(rng, q, rows, 64)
    starts = np.array([0, rows])
    return random(rng, q, rows, 1, D + 64), k, v, rope, starts, starts


def latent_decode(kind: str, D: int, rows: int) -> tuple[Any, ...]:
    rng, (q, kv) = np.random.default_rng(0), KINDS[kind]
    rows_of_cache = random(rng, kv, 2, 64, D + 64)
    return random(rng, q, 1, rows, D + 64), rows_of_cache, np.array([[1, 0]], np.int32), np.array([70], np.int32)


OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., tuple[Any, ...]], tuple[int, ...], tuple[int, ...]]] = {
    "mha_prefill": (mha_prefill, prefill, (16, 80, 256, 576), (40, 130)),
    "mha_decode": (mha_decode_paged, decode, (16, 80, 256, 576), (1, 20)),
    "mha_decode_streaming": (mha_decode_streaming_paged, decode, (64, 256), (8,)),
    "mla_prefill_paged": (mla_prefill_paged, latent_prefill, (64, 128, 192), (100,)),
    "mla_prefill": (mla_prefill_ragged, latent_ragged, (128, 192), (100,)),
    "mla_decode": (mla_decode_paged, latent_decode, (128, 512), (16, 32, 64)),
}
"""Operation -> function, arrays of (kind, head dimension, query rows), dimensions, rows."""
REFUSED = {
    "mha_prefill": ("sm_80 e4m3",), "mha_decode": ("sm_80 e4m3", "gfx950 not of 64, 128, 256, 512"),
    "mha_decode_streaming": ("sm_80", "sm_90"), "mla_prefill": ("sm_80 e4m3",), "mla_prefill_paged": ("sm_80 e4m3",),
    "mla_decode": ("sm_80 e4m3", "gfx950 e4m3", "gfx950 fp32"),
}
"""What is not emulated, as the functions' documentation says: sm_80 has no e4m3, gfx950 has MAX's machines."""


def refused(operation: str, kind: str, D: int, arch: str) -> bool:
    return any(
        arch == words.split()[0]
        and (" not of " not in words or str(D) not in words.split(" not of ")[1].split(", "))
        and all(name not in words or name in kind for name in ("e4m3", "fp32"))
        for words in REFUSED[operation]
    )


def has_tiles_of_max(operation: str, kind: str, D: int) -> bool:
    """Whether the emulator of gfx950 has MAX's tile, or that of the strips of float32, where the compiled kernel has a
    smaller one, since it would spill that (tests of its compilation).
    """
    wide = operation == "mha_prefill" and (D > 256 or (kind == "fp32" and D > 64))
    return wide or operation == "mla_decode"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_emulator_takes_the_configuration_of_the_kernel(
    operation: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same plan, but where MAX's is another; in it the emulator gives what the float64 reference does: weights are
    rounded once, to the dtype of the product, and the output once.
    """
    function, build, dimensions, rows = OPERATIONS[operation]
    home = importlib.import_module(f"kvlab.attention.{FOLDERS.get(operation, operation)}.call")
    half = {"bf16": 2.0**-9, "fp32": 2.0**-24, "e4m3 keys": 2.0**-9, "e4m3": 2.0**-4}[kind]  # of a last place
    for D, n, arch in itertools.product(dimensions, rows, ARCHS):
        arrays = build(kind, D, n)
        options = {"v_dim": D, "scale": 0.1} if operation == "mla_decode" else {}
        on_arch = options | {"backend": "emulator", "arch": arch}
        if refused(operation, kind, D, arch):
            with pytest.raises(ValueError, match=f"{arch}|multiples|gfx950"):
                explain(function, *arrays, **on_arch)
            continue
        plan = explain(function, *arrays, **on_arch)
        with monkeypatch.context() as patch:
            patch.setattr(home, "target_of", lambda array, _, arch=arch: target_of(array, arch))
            patch.setattr(kinds, "_kinds", {})  # nothing is known from another machine
            kernel = explain(function, *map(to_torch, arrays), backend="triton", **options)
        same = (plan.config, plan.grid) == (kernel.config, kernel.grid)
        assert same == (arch != "gfx950" or not has_tiles_of_max(operation, kind, D)), (D, n, arch)
        if n == rows[-1]:
            out, exact = (np.float64(function(*arrays, **how)) for how in (on_arch, options | {"backend": "reference"}))
            most = float(np.abs(np.float64(arrays[1 if operation == "mla_decode" else 2])).max())
            np.testing.assert_allclose(out, exact, rtol=0, atol=1e-5 + 1.1 * (half + min(half, 2.0**-9)) * most)
