"""flash-attention's calls. Rests on a float64 reference with their meaning, and on torch's own indexing of caches.

The grid is one of their test's axes, each value of each at least once: on the CPU by the emulator in float32, on a GPU,
larger, by the compiled kernels.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from exact_torch import close, exact, randn
from sampled_grids import Case, label, sampled
from torch import Tensor

from kvlab.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

AXES: dict[str, tuple[Any, ...]] = {
    "S": (1, 3, 6), "causal": (False, True), "window": ((-1, -1), (4, 2), (-1, 0), (7, -1)),
    "rotary": (None, "pairs", "halves"), "new": (None, "as q", "fewer"),
    "cache": ("dense", "picked", "paged"), "alibi": (None, "heads", "sequences"), "softcap": (0.0, 15.0),
    "heads": ((6, 6), (6, 2), (6, 1)), "num_splits": (0, 1), "leftpad": (None, (5, 2)),
}


STILL: Case = {"S": 3, "causal": False, "window": (-1, -1), "rotary": "halves", "new": "fewer", "cache": "picked",
               "alibi": None, "softcap": 0.0, "heads": (6, 2), "num_splits": 0, "leftpad": None}
"""All queries at the position of the first."""


def turns_what_is_new(case: Case) -> bool:
    return bool(case["new"] or not case["rotary"])


def turned(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, pairs: bool) -> Tensor:
    """``x`` ``[S, H, D]`` as complex numbers times the unit numbers of their positions."""
    R = 2 * cos.shape[1]
    unit = torch.complex(cos.double(), sin.double())[positions][:, None]
    part = x[..., :R].double()
    a, b = (part[..., 0::2], part[..., 1::2]) if pairs else (part[..., : R // 2], part[..., R // 2 :])
    z = torch.complex(a, b) * unit
    both = torch.stack((z.real, z.imag), -1).flatten(-2) if pairs else torch.cat((z.real, z.imag), -1)
    return torch.cat((both, x[..., R:].double()), -1).to(x.dtype)


def run_cache_case(case: Case, *, length: int, D: int, page: int, dtype: torch.dtype, device: str, **more: Any) -> None:
    """One call of flash_attn_with_kvcache against the reference, of each sequence on its own."""
    S, (Hq, Hkv), B = case["S"], case["heads"], 2
    place: dict[str, Any] = {"dtype": dtype, "device": device}
    q, number = randn(B, S, Hq, D, **place), {"as q": S, "fewer": max(1, S - 1)}.get(case["new"], 0)
    new = [randn(B, number, Hkv, D, tag=i, **place) for i in (1, 2)] if number else [None, None]
    lens = torch.tensor([length - S - 1, length // 3], dtype=torch.int32, device=device)
    columns = length // page
    table = torch.randperm(B * columns, generator=torch.Generator().manual_seed(7)).view(B, columns).int()
    picked = torch.tensor([3, 1], dtype=torch.int32)
    where: Case = {}
    if case["cache"] == "paged":
        caches = [randn(B * columns, page, Hkv, D, tag=i, **place) for i in (3, 4)]
        where = {"block_table": table.to(device)}
        read = lambda cache, b: cache[table[b].long()].flatten(0, 1)  # noqa: E731
    else:
        caches = [randn(4, length, Hkv, D, tag=i, **place) for i in (3, 4)]
        where = {"cache_batch_idx": picked.to(device)} if case["cache"] == "picked" else {}
        read = lambda cache, b: cache[picked[b] if case["cache"] == "picked" else b]  # noqa: E731
    if case["leftpad"]:
        where["cache_leftpad"] = torch.tensor(case["leftpad"], dtype=torch.int32, device=device)
    before = [cache.clone() for cache in caches]
    cos = sin = None
    if case["rotary"]:
        angle = torch.rand(length, D // 4, generator=torch.Generator().manual_seed(5)) * 2 * math.pi
        cos, sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
    slopes = {"heads": torch.rand(Hq, generator=torch.Generator().manual_seed(9)) * 0.3,
              "sequences": torch.rand(B, Hq, generator=torch.Generator().manual_seed(9)) * 0.3}.get(case["alibi"])
    out, lse = flash_attn_with_kvcache(
        q, *caches, *new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lens, causal=case["causal"],
        window_size=case["window"], softcap=case["softcap"], rotary_interleaved=case["rotary"] == "pairs",
        alibi_slopes=None if slopes is None else slopes.to(device), return_softmax_lse=True,
        num_splits=case["num_splits"], **where, **more,
    )
    assert lse.shape == (B, Hq, S)
    moving = case["causal"] or case["window"] != (-1, -1)
    written = 0
    for b in range(B):
        n = int(lens[b])
        qb, k, v = q[b], read(before[0], b)[:n], read(before[1], b)[:n]
        if number:
            added = [x[b] for x in new]
            if case["rotary"]:
                at = torch.arange(n, n + number)
                added[0] = turned(added[0].cpu(), cos.cpu(), sin.cpu(), at, case["rotary"] == "pairs").to(device)
                at = torch.arange(n, n + S) if moving else torch.full((S,), n)
                qb = turned(qb.cpu(), cos.cpu(), sin.cpu(), at, case["rotary"] == "pairs").to(device)
            for cache, old, x in zip(caches, before, added, strict=True):
                close(read(cache, b)[n : n + number], x.cpu(), dtype)
                assert torch.equal(read(cache, b)[:n], read(old, b)[:n])
                assert torch.equal(read(cache, b)[n + number :], read(old, b)[n + number :])
                written += number
            k, v = torch.cat((k, added[0])), torch.cat((v, added[1]))
        of_b = slopes if slopes is None or slopes.ndim == 1 else slopes[b]
        expected, expected_lse = exact(qb, k, v, causal=case["causal"], window=case["window"], softcap=case["softcap"],
                                       slopes=of_b, first=case["leftpad"][b] if case["leftpad"] else 0)
        close(out[b], expected, dtype)
        close(lse[b].T, expected_lse.masked_fill(expected_lse == -math.inf, math.inf), dtype)
    changed = sum(int((cache != old).flatten(2).any(-1).sum()) for cache, old in zip(caches, before, strict=True))
    assert changed == written


@pytest.mark.parametrize("case", sampled(AXES, 10, 1, [STILL], turns_what_is_new), ids=label)
def test_with_kvcache(case: Case) -> None:
    run_cache_case(case, length=24, D=32, page=8, dtype=torch.float32, device="cpu", backend="emulator")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("case", sampled(AXES, 120, 2, [STILL], turns_what_is_new), ids=label)
def test_with_kvcache_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    run_cache_case(case, length=768, D=128, page=16, dtype=dtype, device="cuda")


@pytest.mark.parametrize("causal", [False, True])
def test_with_kvcache_of_ragged_queries(causal: bool) -> None:
    """Version 3: q and the new keys of any lengths one after the other; lse ``[Hq, total]``."""
    starts, news = torch.tensor([0, 3, 3, 8]), torch.tensor([0, 3, 4, 9])
    lens, table = torch.tensor([5, 2, 11], dtype=torch.int32), torch.tensor([[4, 1], [0, 7], [2, 5]])
    q, k, v = randn(8, 6, 32), randn(9, 2, 32), randn(9, 2, 32, tag=1)
    caches = [randn(8, 8, 2, 32, tag=i) for i in (2, 3)]
    before = [cache.clone() for cache in caches]
    angle = torch.rand(32, 8) * 6
    out, lse = flash_attn_with_kvcache(
        q, *caches, k, v, angle.cos(), angle.sin(), lens, page_table=table, cu_seqlens_q=starts, max_seqlen_q=5,
        cu_seqlens_k_new=news, causal=causal, rotary_seqlens=lens + 4, return_softmax_lse=True, backend="emulator",
    )
    for b, (n, (i, j), (x, y)) in enumerate(zip(lens.tolist(), itertools.pairwise(starts.tolist()),
                                                itertools.pairwise(news.tolist()), strict=True)):
        at = torch.arange(n + 4, n + 4 + max(j - i, y - x))
        added = turned(k[x:y], angle.cos(), angle.sin(), at[: y - x], True)
        old = [cache[table[b]].flatten(0, 1)[:n] for cache in before]
        close(caches[0][table[b]].flatten(0, 1)[n : n + y - x], added, torch.float32)
        query = turned(q[i:j], angle.cos(), angle.sin(), at[: j - i] if causal else at[:1].expand(j - i), True)
        expected, expected_lse = exact(query, torch.cat((old[0], added)), torch.cat((old[1], v[x:y])), causal=causal)
        close(out[i:j], expected, torch.float32)
        close(lse[:, i:j].T, expected_lse, torch.float32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "chunk"), [((-1, -1), 0), ((2, 1), 0), ((-1, -1), 4)])
def test_dense_and_ragged(causal: bool, window: tuple[int, int], chunk: int) -> None:
    """Bottom right alignment, more queries than keys among them; rows without a key give 0 and lse +inf."""
    q, k, v = randn(2, 7, 6, 32), randn(2, 5, 2, 32), randn(2, 5, 2, 48)
    more: Case = {"causal": causal, "window_size": window, "attention_chunk": chunk, "backend": "emulator"}
    out, lse, probabilities = flash_attn_func(q, k, v, 0.0, 0.2, return_attn_probs=True, **more)
    assert probabilities is None
    starts, starts_k = torch.tensor([0, 7, 14]), torch.tensor([0, 5, 10])
    ragged = flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts, starts_k, 7, 5, 0.0, 0.2,
                                    return_attn_probs=True, **more)
    for b in range(2):
        expected, expected_lse = exact(q[b], k[b], v[b], causal=causal, window=window, chunk=chunk, scale=0.2)
        infinite = expected_lse.masked_fill(expected_lse == -math.inf, math.inf)
        close(out[b], expected, torch.float32)
        close(lse[b].T, infinite, torch.float32)
        close(ragged[0][7 * b : 7 * b + 7], expected, torch.float32)
        close(ragged[1][:, 7 * b : 7 * b + 7].T, infinite, torch.float32)
    assert not causal or (lse == math.inf).any()


def fp8(*shape: int, tag: int = 0) -> Tensor:
    return randn(*shape, tag=tag).to(torch.float8_e4m3fn)


def test_descales() -> None:
    """One for each sequence and KV head, of all three calls; two sequences with two keys in all among them."""
    B, Hkv, more = 2, 2, {"backend": "emulator"}
    by = [0.5 + torch.arange(4.0).reshape(B, Hkv) * step for step in (0.25, 0.5, 0.125)]
    scales = dict(zip(("q_descale", "k_descale", "v_descale"), by, strict=True))
    of_q = by[0].repeat_interleave(2, 1)
    q, k, v = fp8(B, 3, 4, 32), fp8(B, 5, Hkv, 32), fp8(B, 5, Hkv, 32, tag=1)

    def check(out: Tensor, b: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        plain = (x.float() * scale for x, scale in zip((query, key, value), (of_q[b], by[1][b], by[2][b]), strict=True)
                 for scale in [scale[:, None]])
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), exact(*plain)[0], atol=0.1, rtol=0.1)

    dense = flash_attn_func(q, k, v, **scales, **more)
    cached = flash_attn_with_kvcache(q, k, v, **scales, **more)
    one = {name: scale[:1, :1].expand(B, Hkv) for name, scale in scales.items()}
    assert torch.equal(flash_attn_with_kvcache(q, k, v, **one, **more), flash_attn_with_kvcache(
        q, k, v, **{name: scale.contiguous() for name, scale in one.items()}, **more))
    ends, starts, starts_k = 3, torch.tensor([0, 3, 6]), torch.tensor([0, 2, 2])
    ragged = flash_attn_varlen_func(q.flatten(0, 1), k[0, :2], v[0, :2], starts, starts_k, 3, 2, **scales, **more)
    for b in range(B):
        check(dense[b], b, q[b], k[b], v[b])
        check(cached[b], b, q[b], k[b], v[b])
    check(ragged[:ends], 0, q[0], k[0, :2], v[0, :2])
    assert not ragged[ends:].any()


@pytest.mark.parametrize(("D", "Dv"), [(59, 59), (40, 111), (12, 8)])
def test_columns_of_any_number(D: int, Dv: int) -> None:
    q, k, v = randn(2, 3, 4, D), randn(2, 5, 2, D), randn(2, 5, 2, Dv, tag=1)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, backend="emulator")
    starts, starts_k = torch.tensor([0, 3, 6]), torch.tensor([0, 5, 10])
    ragged = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), starts, starts_k, 3, 5, causal=True,
                                    backend="emulator")
    for b in range(2):
        expected, expected_lse = exact(q[b], k[b], v[b], causal=True)
        close(out[b], expected, torch.float32)
        close(lse[b].T, expected_lse, torch.float32)
        close(ragged[3 * b : 3 * b + 3], expected, torch.float32)


def test_ragged_queries_over_pages() -> None:
    q, caches = randn(5, 4, 32), [randn(6, 8, 2, 32, tag=i) for i in (1, 2)]
    table, starts = torch.tensor([[5, 2], [0, 3]]), torch.tensor([0, 2, 5])
    lens = torch.tensor([11, 8], dtype=torch.int32)
    by_starts = flash_attn_varlen_func(q, *caches, starts, torch.tensor([0, 11, 19]), 3, 11, causal=True,
                                       block_table=table, backend="emulator")
    by_used = flash_attn_varlen_func(q, *caches, starts, None, 3, 11, causal=True, block_table=table, seqused_k=lens,
                                     backend="emulator")
    assert torch.equal(by_starts, by_used)
    for b, (i, j) in enumerate(itertools.pairwise(starts.tolist())):
        k, v = (cache[table[b]].flatten(0, 1)[: lens[b]] for cache in caches)
        close(by_used[i:j], exact(q[i:j], k, v, causal=True)[0], torch.float32)


@pytest.mark.parametrize("name", ["sinks", "s_aux"])
def test_sinks(name: str) -> None:
    """A logit of each head, of all three calls, by the name of SGLang's and of vLLM's; versions choose nothing."""
    q, k, v, sinks = randn(2, 6, 4, 32), randn(2, 9, 2, 32), randn(2, 9, 2, 32, tag=1), torch.linspace(-1.0, 3.0, 4)
    more: Case = {name: sinks, "causal": True, "backend": "emulator", "ver" if name == "sinks" else "fa_version": 3}
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **more)
    few, _ = flash_attn_with_kvcache(q[:, :2], k, v, cache_seqlens=9, return_softmax_lse=True, **more)
    many = flash_attn_with_kvcache(q, k, v, **more)
    ragged = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), torch.tensor([0, 6, 12]),
                                    torch.tensor([0, 9, 18]), 6, 9, **more)
    for b in range(2):
        expected, expected_lse = exact(q[b], k[b], v[b], causal=True, sinks=sinks)
        close(lse[b].T, expected_lse, torch.float32)
        for found in (out[b], many[b], ragged[6 * b : 6 * b + 6]):
            close(found, expected, torch.float32)
        close(few[b], exact(q[b, :2], k[b], v[b], causal=True, sinks=sinks)[0], torch.float32)


@pytest.mark.parametrize("S", [2, 6])
def test_qv(S: int) -> None:
    """A query of V, too, of all three calls: as of keys that have V behind them, by their own scale."""
    q, k, v = randn(2, S, 4, 32), randn(2, 9, 2, 32), randn(2, 9, 2, 256)
    qv = randn(2, S, 4, 256, tag=1)
    more: Case = {"causal": True, "backend": "emulator"}
    out, lse, _ = flash_attn_func(q, k, v, qv=qv, return_attn_probs=True, **more)
    table, lens = torch.tensor([[1], [0]]), torch.tensor([9, 7], dtype=torch.int32)
    cached = flash_attn_with_kvcache(q, k, v, page_table=table, cache_seqlens=lens, qv=qv, **more)
    starts = torch.tensor([0, S, 2 * S])
    ragged = flash_attn_varlen_func(q.flatten(0, 1), k, v, starts, None, S, 9, block_table=table,
                                    seqused_k=lens, qv=qv.flatten(0, 1), **more)
    for b in range(2):
        both = [torch.cat(x, -1) for x in ((q[b], qv[b]), (k[b], v[b]), (k[1 - b][: lens[b]], v[1 - b][: lens[b]]))]
        expected, expected_lse = exact(both[0], both[1], v[b], causal=True)
        close(out[b], expected, torch.float32)
        close(lse[b].T, expected_lse, torch.float32)
        expected, _ = exact(both[0], both[2], v[1 - b][: lens[b]], causal=True)
        close(cached[b], expected, torch.float32)
        close(ragged[S * b : S * b + S], expected, torch.float32)


@pytest.mark.interpreter
def test_backend_auto_is_the_kernel() -> None:
    q, cache = randn(1, 2, 4, 32, dtype=torch.float16), randn(1, 20, 2, 32, dtype=torch.float16)
    out = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=17, causal=True)
    close(out[0], exact(q[0], cache[0, :17], cache[0, :17], causal=True)[0], torch.float16)


def test_a_whole_graph() -> None:
    """A law: compiled without a break, the cache call gives what it gives by itself, and writes what it writes."""
    def step(q: Tensor, k_cache: Tensor, v_cache: Tensor, new: Tensor, lens: Tensor, cos: Tensor) -> Tensor:
        found = flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cos, 1 - cos, cache_seqlens=lens, causal=True,
                                        return_softmax_lse=True, backend="emulator")
        return found[0] + found[1].transpose(1, 2)[..., None]

    q, new, caches = randn(2, 1, 4, 32), randn(2, 1, 2, 32), randn(2, 2, 16, 2, 32)
    rest = new, torch.tensor([4, 7], dtype=torch.int32), torch.rand(16, 8)
    alone, compiled = caches.clone(), caches.clone()
    expected = step(q, *alone, *rest)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(q, *compiled, *rest), expected)
    assert torch.equal(alone, compiled)
    assert int((alone != caches).any(-1).any(-1).sum()) == 4


SINKS = torch.ones(4)
Q, KV, CACHE = torch.zeros(1, 2, 4, 32), torch.zeros(1, 5, 2, 32), torch.zeros(3, 8, 2, 32)
LACKING: dict[str, tuple[Any, Case]] = {
    "dropout_p is 0.1": (flash_attn_func, {"dropout_p": 0.1}),
    "dropout_p is None": (flash_attn_func, {"dropout_p": None}),
    "deterministic is True": (flash_attn_func, {"deterministic": True}),
    "num_splits is 3": (flash_attn_with_kvcache, {"qv": Q, "num_splits": 3}),
    "num_splits is 2": (flash_attn_func, {"num_splits": 2}),
    "pack_gqa is False": (flash_attn_func, {"pack_gqa": False}),
    "sm_margin is 8": (flash_attn_func, {"sm_margin": 8}),
    "scheduler_metadata is a tensor": (flash_attn_with_kvcache, {"scheduler_metadata": Q}),
    "k and v are given with a k_cache of torch.float8_e4m3fn": (
        flash_attn_with_kvcache, {"k": Q, "v": Q, "k_cache": CACHE.to(torch.float8_e4m3fn)},
    ),
    "rotary_seqlens is a tensor": (flash_attn_with_kvcache, {"rotary_seqlens": Q}),
}
WRONG: dict[str, tuple[Any, Case]] = {
    "softmax_scale is True: must be finite": (flash_attn_func, {"softmax_scale": True}),
    "window_size is 4: must be a pair": (flash_attn_func, {"window_size": 4}),
    "causal is 1: must be True or False": (flash_attn_func, {"causal": 1}),
    "q_descale is given, q is of torch.float32": (flash_attn_func, {"q_descale": torch.ones(1, 2)}),
    "sinks has shape (3,): must be": (flash_attn_func, {"sinks": torch.ones(3)}),
    "s_aux has shape (3,): must be": (flash_attn_with_kvcache, {"s_aux": torch.ones(3)}),
    "s_aux is a float: must be a torch tensor": (flash_attn_func, {"s_aux": 1.0}),
    "sinks and s_aux are given: must be one of them": (flash_attn_func, {"sinks": SINKS, "s_aux": SINKS}),
    "ver is 1: must be at least 2": (flash_attn_func, {"ver": 1}),
    "fa_version is '3': must be an integer": (flash_attn_with_kvcache, {"fa_version": "3"}),
    "k has head dimension 16: must be that of q": (flash_attn_func, {"k": KV[..., :16]}),
    "cache_seqlens[0] is 9: must be 0 to 8": (flash_attn_with_kvcache, {"cache_seqlens": 9}),
    "cache_seqlens[0] is 7: must be 0 to 6": (flash_attn_with_kvcache, {"cache_seqlens": 7, "k": Q, "v": Q}),
    "cache_seqlens is None with k": (flash_attn_with_kvcache, {"k": Q, "v": Q}),
    "rotary_cos is given without k": (flash_attn_with_kvcache, {"rotary_cos": Q[0, 0], "rotary_sin": Q[0, 0]}),
    "cache_leftpad is [4]: must be 0 to [3]": (
        flash_attn_with_kvcache, {"cache_seqlens": 3, "cache_leftpad": torch.tensor([4])},
    ),
    "cache_leftpad of 2 sequences: must be": (flash_attn_with_kvcache, {"cache_leftpad": torch.tensor([0, 0])}),
    "cache_batch_idx is [3]": (flash_attn_with_kvcache, {"cache_batch_idx": torch.tensor([3])}),
    "cache_batch_idx has dtype torch.float32": (flash_attn_with_kvcache, {"cache_batch_idx": torch.tensor([0.5])}),
    "cache_seqlens has dtype torch.float32": (flash_attn_with_kvcache, {"cache_seqlens": torch.tensor([3.0])}),
    "block_table has shape (1,): must be [B = 1, columns]": (
        flash_attn_with_kvcache, {"page_table": torch.tensor([0])},
    ),
    "cu_seqlens_k_new is [0, 1]: must be numbers from 0 to 2": (
        flash_attn_with_kvcache,
        {"k": Q[0], "v": Q[0], "cache_seqlens": 3, "cu_seqlens_k_new": torch.tensor([0, 1])},
    ),
    "rotary_seqlens has shape (2,): must be [B = 1]": (
        flash_attn_with_kvcache, {"k": Q, "v": Q, "cache_seqlens": 3, "rotary_cos": Q[0, 0], "rotary_sin": Q[0, 0],
                                  "rotary_seqlens": torch.tensor([0, 0])},
    ),
    "rotary_seqlens is [-1]: must be": (
        flash_attn_with_kvcache, {"k": Q, "v": Q, "cache_seqlens": 3, "rotary_cos": Q[0, 0], "rotary_sin": Q[0, 0],
                                  "rotary_seqlens": torch.tensor([-1])},
    ),
    "rotary_cos has 4 positions": (
        flash_attn_with_kvcache, {"k": Q, "v": Q, "cache_seqlens": 3, "rotary_cos": Q[0, 0], "rotary_sin": Q[0, 0]},
    ),
    "qv beside head dimensions 32 of K and 32 of V": (flash_attn_func, {"qv": Q}),
    "q requires grad": (flash_attn_func, {"q": Q.clone().requires_grad_()}),
    "k is None: must be a torch tensor": (flash_attn_func, {"k": None}),
    "q is a nested tensor: must be a dense one": (flash_attn_func, {"q": torch.nested.nested_tensor([Q[0]])}),
}


def call(function: Any, changed: Case) -> Any:
    keys = {"k_cache": CACHE, "v_cache": CACHE} if function is flash_attn_with_kvcache else {"k": KV, "v": KV}
    return function(**{"q": Q, **keys, "backend": "emulator", **changed})


@pytest.mark.parametrize("message", LACKING)
def test_what_kvlab_lacks_is_not_ignored(message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        call(*LACKING[message])


@pytest.mark.parametrize("message", WRONG)
def test_bad_arguments_are_named(message: str) -> None:
    with pytest.raises(ValueError) as raised:
        call(*WRONG[message])
    assert str(raised.value).startswith(message)


def test_unknown_keywords_are_no_options() -> None:
    with pytest.raises(TypeError, match="windw_size"):
        flash_attn_func(Q, KV, KV, windw_size=(1, 1))  # type: ignore[call-arg]


def test_nothing_is_written_by_a_call_that_is_refused() -> None:
    caches = [CACHE.clone(), CACHE.clone()]
    new = torch.ones(1, 1, 2, 32)
    with pytest.raises(ValueError, match="alibi_slopes"):
        flash_attn_with_kvcache(Q[:, :1], *caches, new, new, cache_seqlens=3, alibi_slopes=torch.ones(3),
                                backend="emulator")
    assert not any(cache.any() for cache in caches)


def test_inputs_that_require_grad_are_taken_without_grad_mode() -> None:
    with torch.no_grad():
        assert call(flash_attn_func, {"q": Q.clone().requires_grad_()}).shape == Q.shape


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (0, 7)])
def test_a_call_without_queries_gives_none(shape: tuple[int, int]) -> None:
    """Rests on a law: without sequences, or without new tokens, there is nothing to store, to turn or to attend to."""
    q, new, cache = (torch.ones(*of, 64) for of in ((*shape, 4), (*shape, 2), (3, 8, 2)))
    angles, seen = torch.ones(9, 8), torch.zeros(3, 8, 2, 64)
    for more in ((), (new, new), (new, new, angles, angles)):
        out, lse = flash_attn_with_kvcache(
            q, seen, cache, *more, cache_seqlens=1, causal=True, return_softmax_lse=True, backend="emulator"
        )
        assert (out.shape, lse.shape) == (q.shape, (shape[0], 4, shape[1]))
    assert not seen.any()
