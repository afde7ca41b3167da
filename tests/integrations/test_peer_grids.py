"""The axes of the peers' own public tests, sampled: each value of each at least once. Rests on a float64 reference with
their meaning. On a GPU their values, by the compiled kernels; on the CPU small ones, by the emulator.

What their grids have and the adapters refuse by name is in the tests of these: rotation in FlashInfer's kernels,
dropout and gradients of flash-attention, e5m2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_torch import close, exact, randn
from sampled_grids import Case, label, sampled
from torch import Tensor

from kvlab.integrations import flashinfer, vllm
from kvlab.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

HALF = torch.float16


def pages_of(case: Case, device: str, pages: int) -> tuple[Any, Tensor, Tensor]:
    """A cache of FlashInfer's, and K and V of it as ``[pages, page, Hkv, D]``."""
    page, (_, heads), D = case["page"], case["heads"], case["D"]
    inner = (page, heads) if case["layout"] == "NHD" else (heads, page)
    whole = randn(pages, 2, *inner, D).to(device, case["kv"])
    if not case["contiguous"]:  # between rows that count lie others
        apart = torch.full((pages, 2, 2, 2, inner[0], 2, inner[1], 2, D), math.nan, device=device).to(case["kv"])
        apart = apart[:, 1, :, 1, :, 1, :, 1]
        whole = apart.copy_(whole)
    k, v = whole.unbind(1) if case["layout"] == "NHD" else whole.transpose(2, 3).unbind(1)
    return ((whole[:, 0], whole[:, 1]) if case["pair"] else whole), k, v


SHARED: dict[str, tuple[Any, ...]] = {
    "layout": ("NHD", "HND"), "contiguous": (True, False), "pair": (False, True), "softcap": (0.0, 30.0),
}
DECODE = {"kv": (HALF, torch.float8_e4m3fn), **SHARED}
ON_CPU: dict[str, dict[str, tuple[Any, ...]]] = {
    "flashinfer_decode": {"batch": (2, 3), "keys": (5, 16, 27), "page": (1, 5, 8), "heads": ((4, 4), (8, 2)),
                          "D": (32, 48), **DECODE},
    "flashinfer_prefill": {"batch": (2,), "keys": (6, 21), "new": (3, 9), "causal": (False, True), "page": (1, 5, 8),
                           "heads": ((2, 2), (4, 1)), "D": (32, 48), "kv": (HALF,), **SHARED},
    "vllm_unified": {"new": ((1, 5, 9), (1, 1, 1)), "keys": ((33, 6, 20),), "heads": ((4, 4), (8, 2), (5, 1)),
                     "D": (32,), "window": (None, 4, 16), "softcap": (None, 50.0), "q": (None, torch.float8_e4m3fn)},
    "flash_attn": {"new": ((3, 7), (8, 5), (6, 6)), "heads": ((6, 6), (6, 2), (6, 1)), "D": (32, 40, 59),
                   "causal": (False, True), "window": ((-1, -1), (4, 2)), "softcap": (0.0, 30.0),
                   "alibi": (False, True), "varlen": (False, True), "dtype": (HALF, torch.bfloat16)},
}
ON_GPU: dict[str, dict[str, tuple[Any, ...]]] = {
    "flashinfer_decode": {"batch": (12, 17), "keys": (54, 97, 512, 2048), "page": (1, 8, 16),
                          "heads": ((4, 4), (32, 4)), "D": (128, 256, 512), **DECODE},
    "flashinfer_prefill": {"batch": (12, 17), "keys": (54, 97, 512, 2048), "new": (37, 17, 127, 577),
                           "causal": (False, True), "page": (1, 5, 16), "heads": ((4, 4), (32, 4)), "D": (128, 256),
                           "kv": (HALF,), **SHARED},
    "vllm_unified": {"new": ((1, 5, 129), (1, 1, 1)), "keys": ((1328, 18, 463), (523, 37, 2011)),
                     "heads": ((4, 4), (8, 2), (5, 1)), "D": (128, 256), "window": (None, 64, 128, 256),
                     "softcap": (None, 50.0), "q": (None, torch.float8_e4m3fn)},
    "flash_attn": {"new": ((113, 203), (128, 217), (108, 256), (256, 512), (512, 256), (1023, 1024), (1024, 1023)),
                   "heads": ((6, 6), (6, 2), (6, 1)), "D": (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256),
                   "causal": (False, True), "window": ((-1, -1), (37, 21)), "softcap": (0.0, 50.0),
                   "alibi": (False, True), "varlen": (False, True), "dtype": (HALF, torch.bfloat16)},
}


def looked_at(batch: int) -> list[int]:
    return sorted({0, batch // 2, batch - 1})


def flashinfer_decode(case: Case, device: str, **more: Any) -> None:
    batch, n, page, (heads, kv_heads), D = (case[name] for name in ("batch", "keys", "page", "heads", "D"))
    held = -(-n // page)
    cache, k, v = pages_of(case, device, batch * held)
    q = randn(batch, heads, D, dtype=HALF, device=device)
    listed = torch.randperm(batch * held, generator=torch.Generator().manual_seed(n)).int()
    lists = torch.arange(batch + 1).int() * held, listed, torch.full((batch,), (n - 1) % page + 1).int()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, case["layout"], **more)
    wrapper.plan(*(x.to(device) for x in lists), heads, kv_heads, D, page, logits_soft_cap=case["softcap"],
                 data_type=case["kv"], q_data_type=HALF)
    out, lse = wrapper.run(q, cache, return_lse=True)
    own = torch.empty_like(out)
    assert torch.equal(wrapper.run(q, cache, out=own), out)
    for b in looked_at(batch):
        at = listed[b * held : b * held + held].long().to(device)
        expected, expected_lse = exact(q[b : b + 1], *(x[at].flatten(0, 1)[:n].float() for x in (k, v)),
                                       softcap=case["softcap"])
        close(out[b : b + 1], expected, HALF)
        close(lse[b : b + 1], expected_lse / math.log(2), HALF)


def flashinfer_prefill(case: Case, device: str, **more: Any) -> None:
    batch, n, new, page, (heads, kv_heads), D = (case[name] for name in ("batch", "keys", "new", "page", "heads", "D"))
    held = -(-n // page)
    cache, k, v = pages_of(case, device, batch * held)
    q = randn(batch * new, heads, D, dtype=HALF, device=device)
    listed = torch.randperm(batch * held, generator=torch.Generator().manual_seed(n)).int()
    lists = torch.arange(batch + 1).int() * held, listed, torch.full((batch,), (n - 1) % page + 1).int()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(None, case["layout"], **more)
    wrapper.plan(*(x.to(device) for x in (torch.arange(batch + 1).int() * new, *lists)), heads, kv_heads, D, page,
                 causal=case["causal"], logits_soft_cap=case["softcap"])
    out, lse = wrapper.run(q, cache, return_lse=True)
    for b in looked_at(batch):
        at, rows = listed[b * held : b * held + held].long().to(device), slice(b * new, b * new + new)
        expected, expected_lse = exact(q[rows], *(x[at].flatten(0, 1)[:n] for x in (k, v)), causal=case["causal"],
                                       softcap=case["softcap"])
        close(out[rows], expected, HALF)
        close(lse[rows], expected_lse / math.log(2), HALF)


def vllm_unified(case: Case, device: str, **more: Any) -> None:
    """Their tolerance for queries of fp8 is 0.15."""
    new, lens, (heads, kv_heads), D = (case[name] for name in ("new", "keys", "heads", "D"))
    columns, place = -(-max(lens) // 16), {"dtype": torch.bfloat16, "device": device}
    table = torch.randperm(3 * columns, generator=torch.Generator().manual_seed(D)).int().view(3, columns)
    caches = [randn(3 * columns, 16, kv_heads, D, tag=i, **place) for i in (1, 2)]
    q = randn(sum(new), heads, D, **place)
    arrays = [x if case["q"] is None else x.to(case["q"]) for x in (q, *caches)]
    out, descale = torch.empty_like(q), torch.ones(3, kv_heads, device=device) if case["q"] else None
    starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
    left = -1 if case["window"] is None else case["window"] - 1
    used = torch.tensor(lens, dtype=torch.int32, device=device)
    vllm.unified_attention(
        *arrays, out, starts.to(device), max(new), used, max(lens), None, True,
        (left, 0 if left >= 0 else -1), table.to(device), case["softcap"], None, descale, descale, **more,
    )
    for b, (i, j) in enumerate(itertools.pairwise(starts.tolist())):
        k, v = (cache[table[b].long().to(device)].flatten(0, 1)[: lens[b]].float() for cache in arrays[1:])
        expected, _ = exact(arrays[0][i:j].float(), k, v, causal=True, window=(left, -1),
                            softcap=case["softcap"] or 0.0)
        if case["q"] is None:
            close(out[i:j], expected, torch.bfloat16)
        else:
            torch.testing.assert_close(out[i:j].double().cpu(), expected, atol=0.1, rtol=0.1)


def flash_attn(case: Case, device: str, **more: Any) -> None:
    (S, n), (heads, kv_heads), D, dtype = (case[name] for name in ("new", "heads", "D", "dtype"))
    draw = torch.Generator().manual_seed(S)
    batch, place = 2, {"dtype": dtype, "device": device}
    slopes = torch.rand(batch, heads, generator=draw) * 0.3 if case["alibi"] else None
    given: Case = {"causal": case["causal"], "window_size": case["window"], "softcap": case["softcap"],
                   "alibi_slopes": None if slopes is None else slopes.to(device), "return_attn_probs": True, **more}
    counts = [[S, max(1, S - S // 3)], [n, max(1, n - n // 4)]] if case["varlen"] else [[S] * batch, [n] * batch]
    starts = [torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in counts]
    rows = [int(x[-1]) for x in starts]
    q, k = randn(rows[0], heads, D, **place), randn(rows[1], kv_heads, D, tag=1, **place)
    v = k.flip(0)
    if case["varlen"]:
        out, lse, _ = flash_attn_varlen_func(q, k, v, *(x.to(device) for x in starts), S, n, **given)
    else:
        out, lse, _ = flash_attn_func(*(x.unflatten(0, (batch, -1)) for x in (q, k, v)), **given)
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    for b in range(batch):
        (i, j), (x, y) = (tuple(s[b : b + 2].tolist()) for s in starts)
        expected, expected_lse = exact(q[i:j], k[x:y], v[x:y], causal=case["causal"], window=case["window"],
                                       softcap=case["softcap"], slopes=None if slopes is None else slopes[b])
        close(out[i:j], expected, dtype)
        close(lse[:, i:j].T, expected_lse.masked_fill(expected_lse == -math.inf, math.inf), dtype)


RUN: dict[str, Callable[..., None]] = {
    f.__name__: f for f in (flashinfer_decode, flashinfer_prefill, vllm_unified, flash_attn)
}


def cases(grids: dict[str, dict[str, tuple[Any, ...]]], count: int) -> list[Any]:
    return [pytest.param(name, case, id=f"{name}-{label(case)}")
            for seed, (name, axes) in enumerate(grids.items()) for case in sampled(axes, count, seed)]


@pytest.mark.parametrize(("name", "case"), cases(ON_CPU, 5))
def test_small_values(name: str, case: Case) -> None:
    RUN[name](case, "cpu", backend="emulator")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "case"), cases(ON_GPU, 14))
def test_their_values_on_a_gpu(name: str, case: Case) -> None:
    RUN[name](case, "cuda")
