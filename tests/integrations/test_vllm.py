"""vLLM's calls. Rests on a float64 reference with their meaning, on torch's own indexing of blocks, and on torch's
rounding to fp8.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from exact_torch import close, exact, randn
from torch import Tensor
from yardsticks import nothing_waits

from kvlab.integrations import vllm

Case = dict[str, Any]
HQ, HKV, D, PAGE = 6, 2, 32, 16
TABLE = torch.tensor([[3, 1, 7], [0, 5, 0], [6, 0, 0]], dtype=torch.int32)


def caches_of(kind: str, dtype: torch.dtype, *, blocks: int = 9, D: int = D, device: str = "cpu") -> tuple[Tensor, ...]:
    """K and V ``[blocks, PAGE, HKV, D]`` as vLLM has them: halves of one allocation, whose bytes lie as ``kind``."""
    if kind == "NHD":
        return torch.zeros(2, blocks, PAGE, HKV, D, dtype=dtype, device=device).unbind(0)
    return torch.zeros(blocks, 2, HKV, PAGE, D, dtype=dtype, device=device).transpose(2, 3).unbind(1)


def slots_of(lens: tuple[int, ...], table: Tensor = TABLE) -> Tensor:
    tokens = [(b, t) for b, n in enumerate(lens) for t in range(n)]
    return torch.tensor([int(table[b, t // PAGE]) * PAGE + t % PAGE for b, t in tokens])


@pytest.mark.parametrize("kind", ["NHD", "HND"])
@pytest.mark.parametrize("name", ["auto", "bfloat16", "fp8", "fp8_e5m2"])
def test_store(name: str, kind: str) -> None:
    """Values over their scales, rounded as torch rounds them; padding tokens and slots of -1 are skipped."""
    formats = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    of = formats.get(name, torch.float32)
    k_cache, v_cache = caches_of(kind, torch.uint8 if "fp8" in name else of)
    lens, scales = (19, 3), (torch.tensor(0.5), torch.tensor([2.0]))
    slots = slots_of(lens)
    slots[4] = -1
    key, value = (randn(30, HKV, D, tag=i).to(torch.bfloat16 if name == "bfloat16" else torch.float32) for i in (0, 1))
    vllm.reshape_and_cache_flash(key, value, k_cache, v_cache, slots, name, *scales, backend="emulator")
    for cache, new, scale in zip((k_cache, v_cache), (key, value), scales, strict=True):
        found, kept = cache.view(of) if "fp8" in name else cache, torch.arange(len(slots)) != 4
        expected = (new[: len(slots)] / scale if "fp8" in name else new[: len(slots)]).to(of)
        at = slots[kept]
        assert torch.equal(found[at // PAGE, at % PAGE].float(), expected[kept].float())
        assert int(cache.view(torch.uint8).any(-1).any(-1).sum()) == len(at)


BATCHES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Case]] = {
    "decodes": ((1, 1, 1), (40, 18, 1), {}),
    "mixed": ((1, 5, 0), (33, 7, 0), {}),
    "mixed, a long one": ((17, 1, 0), (20, 18, 0), {}),
    "mixed, window, sinks": ((6, 1, 2), (40, 18, 3), {"window_size": (7, 0), "sinks": 1.0}),
    "decodes, soft cap, alibi": ((1, 1, 1), (40, 18, 5), {"softcap": 6.0, "alibi_slopes": 0.1}),
}


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "uint8"])
@pytest.mark.parametrize("kind", ["NHD", "HND"])
@pytest.mark.parametrize("name", BATCHES)
def test_unified_attention(name: str, kind: str, fp8: bool) -> None:
    """What was stored is what is attended to; scales of each sequence and head, one number for all among them."""
    new, lens, options = BATCHES[name]
    dtype, named = torch.bfloat16, "fp8" if fp8 else "auto"
    caches = caches_of(kind, torch.uint8 if fp8 else dtype)
    one = torch.tensor(0.25)
    keys = [randn(sum(lens), HKV, D, tag=i).to(dtype) for i in (2, 3)]
    vllm.reshape_and_cache_flash(*keys, *caches, slots_of(lens), named, one, one, backend="emulator")
    q, starts = randn(sum(new), HQ, D).to(dtype), torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
    given = {n: x if n in ("softcap", "window_size") else torch.arange(1.0, HQ + 1) * x for n, x in options.items()}
    descale = one.expand(len(lens), HKV)
    out = torch.empty_like(q)
    vllm.unified_attention(
        **{"q": q, "k": caches[0], "v": caches[1], "out": out, "cu_seqlens_q": starts, "max_seqlen_q": max(new),
           "seqused_k": torch.tensor(lens, dtype=torch.int32), "max_seqlen_k": max(lens), "softmax_scale": 0.2,
           "causal": True, "window_size": (-1, -1), "block_table": TABLE, "softcap": 0.0, "q_descale": None,
           "k_descale": descale if fp8 else 1.0, "v_descale": descale if fp8 else None,
           "kv_cache_dtype": named, "backend": "emulator", "softmax_segm_max": torch.zeros(1), **given})
    ends = torch.tensor([0, *itertools.accumulate(lens)])
    for b, (i, j) in enumerate(itertools.pairwise(starts.tolist())):
        k, v = (x[ends[b] : ends[b + 1]] for x in keys)
        if fp8:
            k, v = ((x.float() / one).to(torch.float8_e4m3fn).float() * one for x in (k, v))
        expected, _ = exact(q[i:j], k, v, causal=True, scale=0.2, window=given.get("window_size", (-1, -1)),
                            softcap=given.get("softcap", 0.0), slopes=given.get("alibi_slopes"),
                            sinks=given.get("sinks"))
        close(out[i:j], expected, dtype)


@pytest.mark.parametrize("new", [(1, 1), (2, 3)])
def test_rows_behind_the_last_sequence_are_padding(new: tuple[int, int]) -> None:
    """A batch that is filled up to the size of a graph gives what it gives without: the same calls, by their bits."""
    caches = [randn(9, PAGE, HKV, D, tag=i) for i in (1, 2)]
    q, starts = randn(8, HQ, D), torch.tensor([0, new[0], sum(new)])

    def attended(rows: int) -> Tensor:
        out = torch.full_like(q[:rows], 7.0)
        vllm.unified_attention(q[:rows], *caches, out, starts, max(new), torch.tensor([20, 4]), 20, None, True,
                               (-1, -1), TABLE[:2], 0.0, None, None, 1.0, backend="emulator")
        return out[: sum(new)]

    assert torch.equal(attended(8), attended(sum(new)))


@pytest.mark.parametrize("different", [False, True])
def test_descales_of_each_sequence(different: bool) -> None:
    caches = [torch.ones(9, PAGE, HKV, D).to(torch.float8_e4m3fn) for _ in range(2)]
    by = torch.tensor([[0.5, 2.0], [4.0, 8.0]]) if different else torch.full((2, HKV), 0.5)
    q, out = torch.ones(2, HQ, D).half(), torch.empty(2, HQ, D).half()
    vllm.unified_attention(q, *caches, out, torch.tensor([0, 1, 2]), 1, torch.tensor([20, 3]), 20, None, True, (-1, -1),
                           TABLE[:2], 0.0, None, by, by, backend="emulator")
    assert torch.equal(out, by.repeat_interleave(HQ // HKV, 1)[..., None].expand(2, HQ, D).half())


def test_rows_of_mla() -> None:
    """Plain rows, and DeepSeek's rows of bytes, whose parts are where kvlab's attention looks for them."""
    new = randn(3, 512), randn(3, 64)
    rows, slots = torch.zeros(2, PAGE, 576), torch.tensor([5, -1, 17])
    vllm.concat_and_cache_mla(*new, rows, slots, "auto", torch.tensor(1.0), backend="emulator")
    assert torch.equal(rows[0, 5], torch.cat((new[0][0], new[1][0])))
    assert torch.equal(rows[1, 1], torch.cat((new[0][2], new[1][2])))
    assert int(rows.any(-1).sum()) == 2
    packed = torch.zeros(2, PAGE, 656, dtype=torch.uint8)
    vllm.concat_and_cache_mla(*new, packed, slots, "fp8_ds_mla", torch.tensor(1.0), backend="emulator")
    row = packed[0, 5]
    scales = row[512:528].view(torch.float32)
    torch.testing.assert_close(scales, new[0][0].view(4, 128).abs().amax(1) / 448, atol=0, rtol=1e-6)
    latent = row[:512].view(torch.float8_e4m3fn).float().view(4, 128) * scales[:, None]
    torch.testing.assert_close(latent.flatten(), new[0][0], atol=0.01, rtol=0.0625)
    assert torch.equal(row[528:].view(torch.bfloat16), new[1][0].to(torch.bfloat16))


@pytest.mark.parametrize("context", [None, 2])
def test_merge(context: int | None) -> None:
    """A law: outputs over disjoint keys merge to that over all; past the context the suffix is all."""
    q, k, v = randn(3, HQ, D), randn(12, HKV, D), randn(12, HKV, D, tag=1)
    parts = [exact(q, k[i:j], v[i:j]) for i, j in ((0, 5), (5, 12))]
    out, lse = torch.empty(3, HQ, D), torch.empty(HQ, 3)
    flat = [x for o, s in parts for x in (o.float(), s.float().T.contiguous())]
    vllm.merge_attn_states(out, *flat, lse, context, backend="emulator")
    expected, expected_lse = exact(q, k, v)
    if context is not None:
        expected[context:], expected_lse[context:] = parts[1][0][context:], parts[1][1][context:]
    close(out, expected, torch.float32)
    close(lse.T, expected_lse, torch.float32)


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "ragged"])
def test_flash_attn_varlen_func(paged: bool) -> None:
    """Its arguments in the order of vLLM's build, as they are printed there; scales of 1 are given beside any cache."""
    new, lens, one = (3, 1), (20, 9), torch.ones(()).expand(2, HKV)
    keys = [randn(sum(lens), HKV, D, tag=i) for i in (2, 3)]
    starts, ends = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in (new, lens))
    q, out = randn(sum(new), HQ, D), torch.empty(sum(new), HQ, D)
    held = [torch.zeros(9, PAGE, HKV, D) for _ in keys] if paged else keys
    if paged:
        vllm.reshape_and_cache_flash(*keys, *held, slots_of(lens), "auto", 1.0, 1.0, backend="emulator")
    of_keys = (None, torch.tensor(lens, dtype=torch.int32)) if paged else (ends, None)
    _, lse = vllm.flash_attn_varlen_func(
        q, *held, 3, starts, 20, *of_keys, None, 0.0, 0.2, True, [7, 0], 6.0, None, False, False,
        TABLE[:2] if paged else None, True, out, None, q_descale=one, k_descale=one, v_descale=one, num_splits=0,
        fa_version=3, s_aux=torch.arange(1.0, HQ + 1), cp_world_size=1, cp_rank=0, backend="emulator")
    for b, (i, j) in enumerate(itertools.pairwise(starts.tolist())):
        expected, expected_lse = exact(q[i:j], *(x[ends[b] : ends[b + 1]] for x in keys), causal=True, scale=0.2,
                                       window=(7, 0), softcap=6.0, sinks=torch.arange(1.0, HQ + 1))
        close(out[i:j], expected, torch.float32)
        close(lse[:, i:j].T, expected_lse.reshape(j - i, HQ), torch.float32)


def test_what_has_no_order_is_given_by_name() -> None:
    q, cache = torch.ones(2, HQ, D), torch.ones(9, PAGE, HKV, D)
    given = [q, cache, cache, torch.empty_like(q), torch.tensor([0, 1, 2]), 1, torch.tensor([20, 3]), 20]
    given += [None, True, (-1, -1), TABLE[:2], 0.0, None, None, None]
    with pytest.raises(TypeError, match=r"has 17 positional arguments: must be 16, to v_descale"):
        vllm.unified_attention(*given, None)


def flash(**changed: Any) -> None:
    q, cache = torch.zeros(2, HQ, D), torch.zeros(9, PAGE, HKV, D)
    vllm.flash_attn_varlen_func(**{
        "q": q, "k": cache, "v": cache, "max_seqlen_q": 1, "cu_seqlens_q": torch.tensor([0, 1, 2]), "max_seqlen_k": 20,
        "seqused_k": torch.tensor([20, 3]), "block_table": TABLE[:2], "backend": "emulator", **changed})


def attend(**changed: Any) -> None:
    q, cache = torch.zeros(2, HQ, D), torch.zeros(9, PAGE, HKV, D)
    vllm.unified_attention(**{
        "q": q, "k": cache, "v": cache, "out": torch.empty_like(q), "cu_seqlens_q": torch.tensor([0, 1, 2]),
        "max_seqlen_q": 1, "seqused_k": torch.tensor([20, 3]), "max_seqlen_k": 20, "softmax_scale": None,
        "causal": True, "window_size": (-1, -1), "block_table": TABLE[:2], "softcap": 0.0, "q_descale": None,
        "k_descale": None, "v_descale": None, "backend": "emulator", **changed})


SPLIT = torch.zeros(9, HKV, D // 8, PAGE, 8)
NEW = torch.zeros(1, HKV, D)
LACKING: dict[str, Any] = {
    "key_cache has shape .*, keys split by x columns": lambda: vllm.reshape_and_cache_flash(
        NEW, NEW, SPLIT, SPLIT, torch.tensor([0]), "auto", 1.0, 1.0),
    "k has shape .*, keys split by x columns": lambda: attend(k=SPLIT),
    "reshape_and_cache stores keys split by x columns": lambda: vllm.reshape_and_cache(NEW, NEW, SPLIT, SPLIT),
    "k is of torch.float8_e5m2": lambda: attend(k=SPLIT[:, :, 0].byte(), v=SPLIT[:, :, 0].byte(),
                                                kv_cache_dtype="fp8_e5m2"),
    "qq_bias is a tensor": lambda: attend(qq_bias=NEW),
    "output_scale is a tensor": lambda: attend(output_scale=NEW),
    "use_alibi_sqrt is True": lambda: attend(use_alibi_sqrt=True),
    "return_attn_probs is True": lambda: flash(return_attn_probs=True),
    "cp_world_size is 2": lambda: flash(cp_world_size=2),
    "scheduler_metadata is a tensor": lambda: flash(scheduler_metadata=NEW),
}
WRONG: dict[str, Any] = {
    "k is of uint8 with kv_cache_dtype 'auto': must be told": lambda: attend(k=torch.zeros(9, PAGE, HKV, D).byte()),
    "k has dtype torch.float32: must be uint8 or torch.float8_e4m3fn": lambda: attend(kv_cache_dtype="fp8"),
    "kv_cache_dtype is 'int4': must be one of auto": lambda: attend(kv_cache_dtype="int4"),
    "seqused_k[0] is 50: must be 0 to 48": lambda: attend(seqused_k=torch.tensor([50, 3])),
    "k_descale is 0.5, k is of torch.float32: must be 1 but for fp8": lambda: attend(k_descale=0.5),
    "v_descale is '1', v is of torch.float32: must be 1 but for fp8": lambda: attend(v_descale="1"),
    "v_descale is a tensor (2, 2), v is of torch.float32: must be 1": lambda: attend(v_descale=torch.zeros(2, 2)),
    "cu_seqlens_q is [0, 2, 2]: must be one token apart": lambda: attend(cu_seqlens_q=torch.tensor([0, 2, 2])),
    "softmax_scale is nan": lambda: attend(softmax_scale=float("nan")),
    "window_size is None": lambda: attend(window_size=None),
    "k_descale is a tensor (2, 2), k is of torch.float32: must be 1": lambda: flash(k_descale=torch.zeros(2, 2)),
    "out has shape (1, 6, 32): must be (2, 6, 32)": lambda: flash(out=torch.zeros(1, HQ, D)),
    "q_v has shape": lambda: flash(q_v=torch.zeros(2, HQ, 5)),
    "q requires grad": lambda: attend(q=torch.zeros(2, HQ, D, requires_grad=True)),
    "key has 1 tokens: must be at least 2": lambda: vllm.reshape_and_cache_flash(
        NEW, NEW, *[torch.zeros(9, PAGE, HKV, D)] * 2, torch.tensor([0, 1]), "auto", 1.0, 1.0),
    "key_cache has shape (9, 16, 2, 32): must be of the 2 heads of 16": lambda: vllm.reshape_and_cache_flash(
        NEW[..., :16], NEW, *[torch.zeros(9, PAGE, HKV, D)] * 2, torch.tensor([0]), "auto", 1.0, 1.0),
}


@pytest.mark.parametrize("message", LACKING)
def test_what_kvlab_lacks_is_not_ignored(message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        LACKING[message]()


@pytest.mark.parametrize("message", WRONG)
def test_bad_arguments_are_named(message: str) -> None:
    with pytest.raises(ValueError) as raised:
        WRONG[message]()
    assert str(raised.value).startswith(message)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["NHD", "HND"])
@pytest.mark.parametrize("fp8", [False, True], ids=["fp16", "uint8"])
@pytest.mark.parametrize("new", [(1, 1, 1), (1, 300, 7)], ids=["decodes", "mixed"])
def test_a_step_on_a_gpu(new: tuple[int, ...], fp8: bool, kind: str) -> None:
    """A store and an attention over it, which wait for nothing."""
    dtype, named, lens = torch.float16, "fp8" if fp8 else "auto", (999, 300, 7)
    table = torch.randperm(200, generator=torch.Generator().manual_seed(2)).int()[: 3 * 63].view(3, 63)
    caches = caches_of(kind, torch.uint8 if fp8 else dtype, blocks=200, D=128, device="cuda")
    keys = [randn(sum(lens), HKV, 128, tag=i, dtype=dtype, device="cuda") for i in (2, 3)]
    q, one = randn(sum(new), HQ, 128, dtype=dtype, device="cuda"), torch.tensor(0.25, device="cuda")
    starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
    used, slots, places = (x.cuda() for x in (torch.tensor(lens, dtype=torch.int32), slots_of(lens, table), table))
    out, begin, descale = torch.empty_like(q), starts.cuda(), one.expand(3, HKV)

    def step() -> None:
        vllm.reshape_and_cache_flash(*keys, *caches, slots, named, one, one)
        vllm.unified_attention(q, *caches, out, begin, max(new), used, max(lens), None, True, (-1, -1), places, 0.0,
                               None, descale, descale, kv_cache_dtype=named)

    step()
    torch.cuda.synchronize()
    with nothing_waits():
        step()
    ends = torch.tensor([0, *itertools.accumulate(lens)])
    for b, (i, j) in enumerate(itertools.pairwise(starts.tolist())):
        k, v = (x[ends[b] : ends[b + 1]] for x in keys)
        if fp8:
            k, v = ((x.float() / one).to(torch.float8_e4m3fn).float() * one for x in (k, v))
        close(out[i:j], exact(q[i:j], k, v, causal=True)[0], dtype)
