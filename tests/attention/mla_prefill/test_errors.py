"""Bad arguments of MLA prefill: a ValueError that repeats the input and says what is accepted, nothing written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mla_prefill_cases import Case, Inputs

from kvlab.attention import explain, mla_prefill_paged
from kvlab.memory import float8_e4m3fn

CASE = Case(((5, 20), (2, 3)), page=4)

BAD: dict[str, tuple[Any, str]] = {
    "q of two axes": (lambda x: x.with_(q=x.q[0]), r"q has shape \(2, 192\): must be \[total, H, columns\]"),
    "heads": (lambda x: x.with_(k=x.k[:, :1]), "k has 1 heads: must be those of q, 2"),
    "rows of v": (lambda x: x.with_(v=x.v[1:]), "v has 22 rows: must be those of k, 23"),
    "dtype of v": (lambda x: x.with_(v=x.v.astype(np.float16)), "v has dtype float16: must be that of q, bfloat16"),
    "columns": (lambda x: x.with_(k=x.k[..., :120]), r"kv_cache has rows of 128 bfloat16: must be 136"),
    "rope": (lambda x: x.with_(k=x.k[..., :60]), "60 columns of k: must be a multiple of 8 from 16 to 256"),
    "starts of q": (lambda x: x.with_(cu_q=x.cu_q[:2]), r"cu_seqlens_k has shape \(3,\): must be that of cu_seqlens_q"),
    "the end of k": (lambda x: x.with_(cu_k=x.cu_k - 1), r"cu_seqlens_k is \[-1, 19, 22\]: must be numbers"),
    "keys held": (lambda x: x.with_(seq_lens=x.seq_lens - 1), "k and v hold 20 keys of sequence 0 from key -1 on"),
    "keys held, unsigned": (
        lambda x: x.with_(seq_lens=x.seq_lens.astype("u4") - 1, cu_k=x.cu_k.astype("u4")),
        "k and v hold 20 keys of sequence 0 from key -1 on",
    ),
    "keys from": (lambda x: x.with_(starts=np.array([1, 0])), "from key 1 on: must be among its 20 keys"),
    "starts' shape": (lambda x: x.with_(starts=np.array([0])), r"k_starts has shape \(1,\): must be \[B = 2\]"),
    "fp8 with float32": (
        lambda x: x.with_(
            q=x.q.astype("f4"), k=x.k.astype("f4"), v=x.v.astype("f4"), cache=x.cache.astype(float8_e4m3fn)
        ),
        "q has dtype float32 with a cache of float8_e4m3fn: must be bfloat16 or float16",
    ),
    "k of e4m3 alone": (
        lambda x: x.with_(k=x.k.astype(float8_e4m3fn)),
        "v has dtype bfloat16: must be that of k, float8_e4m3fn",
    ),
    "v of e4m3 alone": (
        lambda x: x.with_(v=x.v.astype(float8_e4m3fn)),
        "v has dtype float8_e4m3fn: must be that of q, bfloat16",
    ),
    "q of e4m3 alone": (
        lambda x: x.with_(q=x.q.astype(float8_e4m3fn)),
        "k has dtype bfloat16: must be that of q, float8_e4m3fn",
    ),
    "e4m3 beside float32": (
        lambda x: x.with_(q=x.q.astype("f4"), k=x.k.astype(float8_e4m3fn), v=x.v.astype(float8_e4m3fn)),
        "k has dtype float8_e4m3fn: must be that of q, float32",
    ),
    "columns of e4m3": (
        lambda x: x.with_(k=x.k.astype(float8_e4m3fn), v=x.v[..., :120].astype(float8_e4m3fn)),
        "120 columns of v: must be a multiple of 16 from 16 to 256",
    ),
    "pages": (lambda x: x.with_(table=x.table + 1000), "a page in use must be 0 to"),
    "table": (
        lambda x: x.with_(table=x.table.astype(np.int16)),
        "block_table has dtype int16: must be a 32- or 64-bit",
    ),
}
OPTIONS = {
    "latent": ({"latent_dim": 65}, "kv_cache has rows of 128"),
    "layout": ({"kv_layout": "DHN"}, "kv_layout is 'DHN': must be 'NHD' or 'HND'"),
    "arch": ({"arch": "sm_70"}, "arch is 'sm_70': must be one of sm_80, sm_90, gfx950"),
    "backend": ({"backend": "fast"}, "backend is 'fast': must be one of"),
    "scale": ({"scale": np.inf}, "scale is inf: must be finite"),
    "softcap": ({"softcap": -1.0}, "softcap is -1.0: must be 0 or more"),
    "window": ({"window": 0}, "window is 0: must be at least 1"),
    "mask": ({"mask": "causal"}, "mask is 'causal': must be a"),
    "sinks": ({"sinks": np.zeros(3, np.float32)}, r"sinks has shape \(3,\): must be \[Hq = 2\]"),
    "longest": ({"max_seqlen_q": 4}, "max_seqlen_q is 4: must be at least 5"),
    "traffic": ({"traffic": 3}, "traffic is 3: must be a"),
}


def refused(x: Inputs, words: str, **options: Any) -> None:
    out = np.full((len(x.q) if x.q.ndim == 3 else 7, 2, 128), 7, x.q.dtype)
    with pytest.raises(ValueError, match=words):
        x.call(out=out, **options)
    assert (out == 7).all()
    arrays = x.q, x.k, x.v, x.cache, x.table, x.seq_lens, x.cu_q, x.cu_k
    with pytest.raises(ValueError, match=words):
        explain(mla_prefill_paged, *arrays, **{"k_starts": x.starts, "latent_dim": 64, **options})


@pytest.mark.parametrize("name", BAD)
def test_bad_arrays(name: str) -> None:
    change, words = BAD[name]
    refused(change(CASE.build()), words)


@pytest.mark.parametrize("name", OPTIONS)
def test_bad_options(name: str) -> None:
    options, words = OPTIONS[name]
    refused(CASE.build(), words, **options)


@pytest.mark.parametrize("arch, words", [
    ("sm_80", "the rope part of kv_cache in float8_e4m3fn on sm_80: must be on sm_90 or gfx950"),
    ("gfx950", "32 columns of the rope part of kv_cache in float8_e4m3fn on gfx950: must be more than 32"),
])
def test_e4m3_rope_parts_that_a_machine_does_not_take(arch: str, words: str) -> None:
    refused(Case(((3, 5),), row="fp8", columns=(64, 32, 128)).build(), words, arch=arch)


def test_e4m3_keys_on_sm_80() -> None:
    refused(Case(((3, 5),), kv="fp8").build(), "k in float8_e4m3fn on sm_80: must be on sm_90 or gfx950", arch="sm_80")


@pytest.mark.parametrize("options, words", [
    ({"k_scale": np.ones(3, np.float32)}, r"k_scale has shape \(3,\): must be a number, \[Hkv = 2\]"),
    ({"v_scale": np.ones((4, 2), np.float32)}, r"v_scale has shape \(4, 2\): .* \(23, 2\)"),
    ({"v_scale": np.ones(2)}, "v_scale has dtype float64: must be float32"),
    ({"k_scale": np.inf}, "k_scale is inf: must be a finite number"),
])
def test_bad_scales(options: dict[str, Any], words: str) -> None:
    refused(Case(((5, 20), (2, 3)), page=4, kv="fp8").build(), words, **options)


def test_bad_rope_scales() -> None:
    x = Case(((5, 20), (2, 3)), page=4, row="fp8").build()
    for name in ("k_scale", "rope_scale"):
        refused(x, rf"{name} has shape \(3,\): must be a number, \[Hkv = 1\]", **{name: np.ones(3, np.float32)})


def test_bad_out() -> None:
    x = CASE.build()
    for out, words in (
        (np.zeros((7, 2, 64), x.q.dtype), r"out has shape \(7, 2, 64\): must be \(7, 2, 128\)"),
        (np.zeros((7, 2, 128), np.float32), "out has dtype float32"),
        (x.q[..., :128], "out shares memory with q"),
    ):
        with pytest.raises(ValueError, match=words):
            x.call(out=out)


def test_unknown_arguments_are_refused_by_explain_too() -> None:
    x = CASE.build()
    with pytest.raises(TypeError, match="colour"):
        explain(mla_prefill_paged, x.q, x.k, x.v, x.cache, x.table, x.seq_lens, x.cu_q, x.cu_k, colour=1)


@pytest.mark.parametrize("minor", [0, 6, 9])
def test_the_plan_of_a_call_on_a_gpu(minor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is that of the device: here one before sm_90 that torch is made to describe. Those before
    sm_89 convert no e4m3.
    """
    import torch

    from kvlab.attention.call import backends, kinds
    from kvlab.attention.machines import gpu
    from kvlab.common.arrays import to_torch

    monkeypatch.setattr(kinds, "_kinds", {})  # nothing is known from this machine
    here = SimpleNamespace(major=8, minor=minor, multi_processor_count=108)
    gpu.machine.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: here)
    for module in (backends, gpu):
        monkeypatch.setattr(module, "on_gpu", lambda array: True)
    x = CASE.build()
    arrays = [to_torch(a) for a in (x.q, x.k, x.v, x.cache, x.table, x.seq_lens, x.cu_q, x.cu_k)]
    assert explain(mla_prefill_paged, *arrays, latent_dim=64).config.BM == 64
    arrays[3] = to_torch(x.cache.astype(float8_e4m3fn))
    if minor < 9:
        with pytest.raises(ValueError, match=f"float8_e4m3fn on sm_8{minor}: must be on sm_89 or later"):
            explain(mla_prefill_paged, *arrays, latent_dim=64)
    else:
        assert explain(mla_prefill_paged, *arrays, latent_dim=64).config.BM == 64
    gpu.machine.cache_clear()
