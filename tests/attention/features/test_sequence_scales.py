"""Scales ``[B, Hkv]`` of e4m3 queries, keys and values, in every operation and backend.

Rests on a law: a sequence has the bits that it has where its own scales ``[Hkv]`` are those of all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from operation_calls import CU_Q, OPERATIONS, call_of

from kvlab import attention
from kvlab.common.arrays import to_torch
from kvlab.memory import float8_e4m3fn

ATTENTION = [name for name in OPERATIONS if name.endswith(("paged", "ragged", "prefill")) and "store" not in name]
ATTENTION.remove("mla_prefill")  # its form over a collection
HEADS = {"mla_decode_paged": 1, "mla_prefill_paged": 4, "mla_prefill_ragged": 4}
NAMES = ("q_scale", "k_scale", "v_scale", "rope_scale")


def scaled(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call of e4m3, and its scales ``[2, Hkv]``, no two alike; those of columns of rope have one head."""
    call, rng = call_of(name, fp8=True), np.random.default_rng(5)
    names = NAMES[:2] if name == "mla_decode_paged" else NAMES if name.startswith("mla") else NAMES[:3]
    heads = {n: 1 if n == "rope_scale" else HEADS.get(name, 2) for n in names}
    return call | {"out": None}, {n: (0.5 + rng.random((2, heads[n]))).astype(np.float32) for n in names}


def assert_each_has_its_own(call: Any, given: dict[str, Any], scales: dict[str, Any], starts: Any, **how: Any) -> None:
    """``starts``: of the sequences in the results, ``[B + 1]``."""
    found = call(**given, **scales, return_lse=True, **how)
    for b in range(len(starts) - 1):
        rows, others = slice(starts[b], starts[b + 1]), [n for n in range(len(starts) - 1) if n != b]
        for of in ([b], others[:1]):
            alone = call(**given, **{n: array[of[0]] for n, array in scales.items()}, return_lse=True, **how)
            for result, expected in zip(found, alone, strict=True):
                bits, same = (np.ascontiguousarray(x[rows]).view(np.uint8) for x in (result, expected))
                assert (bits == same).all() == (of == [b] or not len(bits)), (b, of)


@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize("name", ATTENTION)
def test_each_sequence_has_its_own(name: str, backend: str) -> None:
    given, scales = scaled(name)
    starts = np.arange(3) if "decode" in name else CU_Q
    assert_each_has_its_own(getattr(attention, name), given, scales, starts, backend=backend)


@pytest.mark.parametrize("name", ["mha_decode_paged", "mha_prefill_paged"])
def test_hopper(name: str) -> None:
    given, scales = scaled(name)
    dtype = float8_e4m3fn if "prefill" in name else np.float16
    wide = {n: np.concatenate([given[n], given[n]], -1) for n in ("q", "k_cache", "v_cache")}
    given |= wide | {"q": wide["q"].astype(dtype), "alibi_slopes": None, "sinks": None}
    if "decode" in name:
        del scales["q_scale"]
    starts = np.arange(3) if "decode" in name else CU_Q
    assert_each_has_its_own(getattr(attention, name), given, scales, starts, backend="hopper")


@pytest.mark.interpreter
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow][: name in ("attend_paged", "balanced")])
    for name in (*ATTENTION, "balanced")
])  # fmt: skip
def test_the_kernels(name: str) -> None:
    """Beside the reference; results are of bfloat16, P of e4m3."""
    how = {"balanced": True} if name == "balanced" else {}
    name = "mha_decode_paged" if how else name
    given, scales = scaled(name)
    exact = getattr(attention, name)(**given, **scales, backend="reference", return_lse=True)
    tensors = {n: to_torch(a) if isinstance(a, np.ndarray) else a for n, a in (given | scales).items()}
    out, lse = getattr(attention, name)(**tensors, **how, return_lse=True)
    np.testing.assert_allclose(out.float().numpy(), exact[0].astype(np.float32), rtol=2**-3, atol=2**-4)
    np.testing.assert_allclose(lse.numpy(), exact[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (2, 1), (1, 2), (2, 2, 2)])
def test_another_shape_is_named(shape: tuple[int, ...]) -> None:
    given, _ = scaled("mha_decode_paged")
    for name, more in (("q", r" or \[B = 2, 2\]$"), ("v", r", \[B = 2, 2\] or, of each token and head, \(6, 16, 2\)$")):
        with pytest.raises(ValueError, match=rf"{name}_scale has shape .*: must be a number, \[Hkv = 2\]{more}"):
            attention.mha_decode_paged(**given, **{f"{name}_scale": np.ones(shape, np.float32)})


def test_of_tokens_where_a_shape_could_be_both() -> None:
    """Two sequences of two keys in all: a scale ``[2, Hkv]`` is of each key, wherever the sequences begin."""
    q, k = (np.ones((2, 2, 64), np.float32).astype(float8_e4m3fn) for _ in range(2))
    cu_q, cu_k = np.array([0, 1, 2]), np.array([0, 0, 2])
    scale = np.float32([[1, 1], [3, 3]])
    out = attention.mha_prefill(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=False, v_scale=scale)
    assert out.astype(np.float32).tolist() == [[[0.0] * 64] * 2, [[2.0] * 64] * 2]
