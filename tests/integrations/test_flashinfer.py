"""FlashInfer's calls. Rests on a float64 reference with their meaning, on torch's own indexing of pages, and on laws:
states of disjoint keys merge to that of all, a plan of a captured graph leaves its arrays where they are.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from exact_torch import close, exact, randn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from yardsticks import nothing_waits

from kvlab.integrations import flashinfer
from kvlab.integrations.flashinfer import pages

Case = dict[str, Any]
HQ, HKV, D, PAGE = 6, 2, 32, 8
INDPTR, INDICES, LAST = torch.tensor([0, 3, 3, 5]), torch.tensor([7, 0, 4, 2, 6]), torch.tensor([3, 0, 8])
LENS = (19, 0, 16)
SLOPES = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
"""ALiBi's of six heads: those of four, then every other one of eight."""


def cache_of(kv_layout: str, paired: bool, dtype: torch.dtype = torch.float32) -> tuple[Any, Tensor, Tensor]:
    """A cache as FlashInfer has it, and its K and V as ``[pages, page, Hkv, D]``."""
    whole = randn(9, 2, PAGE, HKV, D) if kv_layout == "NHD" else randn(9, 2, HKV, PAGE, D)
    whole = whole.to(dtype)
    k, v = whole.unbind(1) if kv_layout == "NHD" else whole.transpose(2, 3).unbind(1)
    return ((whole[:, 0], whole[:, 1]) if paired else whole), k, v


def keys_of(b: int, *halves: Tensor) -> tuple[Tensor, ...]:
    """The keys of a sequence, by torch's own indexing of its pages."""
    own = INDICES[INDPTR[b] : INDPTR[b + 1]]
    return tuple(half[own].flatten(0, 1)[: LENS[b]].float() for half in halves)


DECODES: dict[str, tuple[str, bool, int, Case, Case]] = {
    "NHD": ("NHD", False, 1, {}, {}),
    "HND pair, soft cap, scale": ("HND", True, 1, {"logits_soft_cap": 8.0, "sm_scale": 0.3}, {}),
    "window, sinks, one split": ("NHD", True, 1, {"window_left": 5, "disable_split_kv": True}, {"sinks": 0.5}),
    "three new tokens": ("HND", False, 3, {"q_len_per_req": 3, "window_left": 6}, {}),
    "scales of 32 bits": ("NHD", False, 1, {}, {"q_scale": 0.5, "k_scale": 1.5, "v_scale": 0.25}),
    "alibi": ("NHD", False, 2, {"pos_encoding_mode": "ALIBI", "q_len_per_req": 2}, {}),
    "table": ("NHD", False, 1, {"block_tables": torch.tensor([[7, 0, 4], [0, 0, 0], [2, 6, 0]])}, {}),
}


@pytest.mark.parametrize("name", DECODES)
def test_decode(name: str) -> None:
    layout, paired, S, planned, given = DECODES[name]
    cache, k, v = cache_of(layout, paired)
    q, alibi = randn(3 * S, HQ, D), "pos_encoding_mode" in planned
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, layout, backend="emulator")
    wrapper.plan(INDPTR, INDICES, LAST, HQ, HKV, D, PAGE, q_data_type="float32", **planned)
    sinks = torch.arange(1.0, HQ + 1) * given["sinks"] if "sinks" in given else None
    given = given if sinks is None else given | {"sinks": sinks}
    out, lse = (wrapper.run(q, cache, **given), None) if alibi else wrapper.run_return_lse(q, cache, **given)
    for b in range(3):
        rows = slice(b * S, b * S + S)
        scale = planned.get("sm_scale", D**-0.5) * given.get("q_scale", 1) * given.get("k_scale", 1)
        expected, expected_lse = exact(
            q[rows], *keys_of(b, k, v), causal=True, window=(planned.get("window_left", -1), -1), scale=scale,
            softcap=planned.get("logits_soft_cap", 0.0), sinks=sinks, slopes=SLOPES if alibi else None,
        )
        close(out[rows], expected * given.get("v_scale", 1), torch.float32)
        if lse is not None:
            close(lse[rows], expected_lse / math.log(2), torch.float32)


def test_decode_of_fp8_writes_where_it_is_told() -> None:
    cache, k, v = cache_of("NHD", False, torch.float8_e4m3fn)
    q = randn(3, HQ, D, dtype=torch.float16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(8), backend="emulator")
    wrapper.plan(INDPTR, INDICES, LAST, HQ, HKV, D, PAGE, kv_data_type="float8_e4m3fn", non_blocking=False)
    out, lse = torch.empty_like(q), torch.empty(3, HQ)
    found = wrapper.run(q, cache, k_scale=0.5, v_scale=torch.tensor([2.0, 0.25]), out=out, lse=lse, return_lse=True)
    assert found[0] is out
    assert found[1] is lse
    for b in range(3):
        key, value = keys_of(b, k, v)
        by = torch.tensor([2.0, 0.25])[:, None]
        expected, expected_lse = exact(q[b : b + 1], key, value * by, scale=0.5 * D**-0.5)
        close(out[b : b + 1], expected, torch.float16)
        close(lse[b : b + 1], expected_lse / math.log(2), torch.float16)


PREFILLS: dict[str, Case] = {
    "all keys": {}, "causal, window": {"causal": True, "window_left": 4},
    "soft cap": {"causal": True, "logits_soft_cap": 5.0}, "mask": {"mask": "bool"},
    "packed mask, window": {"mask": "packed", "window_left": 6},
}
STARTS = torch.tensor([0, 4, 4, 9])


def masks_of(kind: str | None) -> tuple[list[Tensor | None], Case]:
    """Masks of the three sequences, and the keywords that give them."""
    if kind is None:
        return [None] * 3, {}
    draw = np.random.default_rng(3)
    arrays = [draw.random((n, m)) < 0.6 for n, m in zip((4, 0, 5), LENS, strict=True)]
    tensors: list[Tensor | None] = [torch.from_numpy(array) for array in arrays]
    if kind == "bool":
        return tensors, {"custom_mask": torch.cat([torch.from_numpy(array).flatten() for array in arrays])}
    packed = [np.packbits(array.flatten(), bitorder="little") for array in arrays]
    return tensors, {"packed_custom_mask": torch.from_numpy(np.concatenate(packed))}


@pytest.mark.parametrize("ragged", [False, True], ids=["pages", "ragged"])
@pytest.mark.parametrize("name", PREFILLS)
def test_prefill(name: str, ragged: bool) -> None:
    options = dict(PREFILLS[name])
    masks, given = masks_of(options.pop("mask", None))
    cache, k, v = cache_of("HND", True)
    q, more = randn(9, HQ, D), {"q_data_type": torch.float32, **given, **options}
    if ragged:
        own = [keys_of(b, k, v) for b in range(3)]
        keys, values = (torch.cat([pair[i] for pair in own]) for i in (0, 1))
        wrapper: Any = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None, backend="emulator")
        wrapper.plan(STARTS, torch.tensor([0, 19, 19, 35]), HQ, HKV, D, **more)
        out, lse = wrapper.run(q, keys, values, return_lse=True)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(None, "HND", backend="emulator")
        wrapper.plan(STARTS, INDPTR, INDICES, LAST, HQ, HKV, D, PAGE, **more)
        out, lse = wrapper.run(q, cache, return_lse=True)
    for b, (i, j) in enumerate(itertools.pairwise(STARTS.tolist())):
        expected, expected_lse = exact(
            q[i:j], *keys_of(b, k, v), causal=options.get("causal", False), window=(options.get("window_left", -1), -1),
            softcap=options.get("logits_soft_cap", 0.0), seen=masks[b],
        )
        close(out[i:j], expected, torch.float32)
        close(lse[i:j], expected_lse / math.log(2), torch.float32)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_single_calls(kv_layout: str) -> None:
    q, k, v = randn(4, HQ, D), randn(11, HKV, D), randn(11, HKV, 48)
    seen = torch.from_numpy(np.random.default_rng(0).random((4, 11)) < 0.5)
    laid = (k, v) if kv_layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
    more: Case = {"kv_layout": kv_layout, "return_lse": True, "backend": "emulator"}
    packed = torch.from_numpy(np.packbits(seen.numpy().flatten(), bitorder="little"))
    masks = {"custom_mask": seen}, {"packed_custom_mask": packed}
    for given, mask in (({"causal": True}, None), *((given, seen) for given in masks)):
        out, lse = flashinfer.single_prefill_with_kv_cache(q, *laid, **given, **more)
        expected, expected_lse = exact(q, k, v, causal=mask is None, seen=mask)
        close(out, expected, torch.float32)
        close(lse, expected_lse / math.log(2), torch.float32)
    out, lse = flashinfer.single_decode_with_kv_cache(q[0], *laid, window_left=3, **more)
    expected, expected_lse = exact(q[:1], k, v, window=(3, -1))
    close(out, expected[0], torch.float32)
    close(lse, expected_lse[0] / math.log(2), torch.float32)


@pytest.mark.parametrize(("S", "causal"), [(1, False), (2, True), (2, False)])
def test_mla(S: int, causal: bool) -> None:
    """Latent rows as K and as V, in float64."""
    latents, rope, heads = 64, 16, 3
    rows, q = randn(9, PAGE, latents + rope), randn(3 * S, heads, latents + rope)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(None, backend="emulator")
    wrapper.plan(torch.arange(4) * S, INDPTR, INDICES, torch.tensor(LENS), heads, latents, rope, PAGE, causal, 0.2,
                 torch.float32, torch.float32)
    parts = q[..., :latents], q[..., latents:].clone(), rows[..., :latents], rows[..., latents:]
    out, lse = wrapper.run(*parts, return_lse=True)
    natural = wrapper.run(*parts, return_lse=True, return_lse_base_on_e=True)[1]
    for b in range(3):
        (own,), at = keys_of(b, rows), slice(b * S, b * S + S)
        expected, expected_lse = exact(q[at], own[:, None], own[:, None, :latents], causal=causal, scale=0.2)
        close(out[at], expected, torch.float32)
        close(lse[at], expected_lse / math.log(2), torch.float32)
        close(natural[at], expected_lse, torch.float32)
    with pytest.raises(NotImplementedError, match="ckv_cache and kpe_cache lie apart: must be the columns of one"):
        wrapper.run(*parts[:3], parts[3].clone())


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_append(kv_layout: str) -> None:
    """The last tokens of each sequence, and nothing else; a token of index -1 is skipped."""
    cache, k, v = cache_of(kv_layout, False)
    before = [k.clone(), v.clone()]
    lens = flashinfer.get_seq_lens(INDPTR, LAST, PAGE)
    assert lens.tolist() == list(LENS)
    new = randn(7, HKV, D), randn(7, HKV, D, tag=1)
    rows, positions = flashinfer.get_batch_indices_positions(torch.tensor([0, 2, 2, 6]), lens, 7)
    flashinfer.append_paged_kv_cache(*new, rows, positions, cache, INDICES, INDPTR, LAST, kv_layout, backend="emulator")
    for half, old, x in zip((k, v), before, new, strict=True):
        for b, (i, j) in ((0, (0, 2)), (2, (2, 6))):
            own, kept = keys_of(b, half, old)
            n = LENS[b] - (j - i)
            assert torch.equal(own[n:], x[i:j])
            assert torch.equal(own[:n], kept[:n])
        assert int((half != old).flatten(2).any(-1).sum()) == 6


def test_append_of_latent_rows() -> None:
    cache = torch.zeros(9, PAGE, 80)
    new = randn(2, 64), randn(2, 16)
    flashinfer.append_paged_mla_kv_cache(*new, torch.tensor([0, 2]), torch.tensor([17, 9]), cache[..., :64],
                                         cache[..., 64:], INDICES, INDPTR, LAST, backend="emulator")
    assert torch.equal(cache[4, 1], torch.cat((new[0][0], new[1][0])))
    assert torch.equal(cache[6, 1], torch.cat((new[0][1], new[1][1])))
    assert int(cache.any(-1).sum()) == 2


def test_states_of_disjoint_keys_merge_to_that_of_all() -> None:
    q, k, v = randn(3, HQ, D), randn(12, HKV, D), randn(12, HKV, D, tag=1)
    parts = [exact(q, k[i:j], v[i:j]) for i, j in ((0, 5), (5, 5), (5, 12))]
    outs, lses = [out.float() for out, _ in parts], [(lse / math.log(2)).float() for _, lse in parts]
    expected, expected_lse = exact(q, k, v)
    own = outs[0].clone(), lses[0].clone()
    flashinfer.merge_state_in_place(*own, outs[2], lses[2], torch.tensor([True, False, True]), backend="emulator")
    for out, lse in (
        flashinfer.merge_states(torch.stack(outs, 1), torch.stack(lses, 1), backend="emulator"),
        flashinfer.merge_state(outs[0], lses[0], outs[2], lses[2], backend="emulator"),
        [torch.where(torch.tensor([True, False, True]).view(-1, *[1] * (whole.ndim - 1)), x, whole.float())
         for x, whole in zip(own, (expected, expected_lse / math.log(2)), strict=True)],
    ):
        close(out, expected, torch.float32)
        close(lse, expected_lse / math.log(2), torch.float32)
    assert torch.equal(own[0][1], outs[0][1])
    assert torch.equal(own[1][1], lses[0][1])


def test_cascade_equals_one_level() -> None:
    """Two sequences share pages 1 and 5; causal in what is their own."""
    cache, k, v = cache_of("NHD", False)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, None, backend="emulator")
    own = torch.tensor([0, 2, 5])
    wrapper.plan([torch.tensor([0, 5]), own], [torch.tensor([0, 2]), torch.tensor([0, 1, 3])],
                 [torch.tensor([1, 5]), torch.tensor([3, 8, 0])], [torch.tensor([8]), torch.tensor([4, 6])],
                 HQ, HKV, D, PAGE, causal=True, q_data_type="float32")
    q = randn(5, HQ, D)
    out = wrapper.run(q, cache)
    for (i, j), listed, n in zip(itertools.pairwise(own.tolist()), ([1, 5, 3], [1, 5, 8, 0]), (20, 30), strict=True):
        expected, _ = exact(q[i:j], *(half[listed].flatten(0, 1)[:n] for half in (k, v)), causal=True)
        close(out[i:j], expected, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize(("dtype", "cap", "left"), list(itertools.product(
    (torch.float16, torch.bfloat16), (None, 20.0), (-1, 100))))
def test_wrappers_on_a_gpu(kv_layout: str, dtype: torch.dtype, cap: float | None, left: int) -> None:
    """Plans and runs wait for nothing; decode and prefill over the same lists, all of them on the GPU."""
    page, lens, new = 16, (1000, 0, 333, 17), (5, 0, 64, 17)
    held = [-(-n // page) for n in lens]
    indptr, starts = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (held, new))
    listed = torch.randperm(100, generator=torch.Generator().manual_seed(4))[: sum(held)].int()
    last = torch.tensor([n - (h - 1) * page if h else 0 for n, h in zip(lens, held, strict=True)], dtype=torch.int32)
    shape = (100, 2, page, 4, 128) if kv_layout == "NHD" else (100, 2, 4, page, 128)
    cache = randn(*shape, dtype=dtype, device="cuda")
    halves = cache.unbind(1) if kv_layout == "NHD" else cache.transpose(2, 3).unbind(1)
    q, queries = (randn(n, 16, 128, dtype=dtype, device="cuda") for n in (len(lens), sum(new)))
    lists = [x.cuda() for x in (indptr, listed, last)]
    options: Case = {"logits_soft_cap": cap, "window_left": left, "q_data_type": dtype}
    decoding = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, kv_layout)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(None, kv_layout)
    begin = starts.cuda()

    def step() -> tuple[Any, Any]:
        decoding.plan(*lists, 16, 4, 128, page, **options)
        prefill.plan(begin, *lists, 16, 4, 128, page, causal=True, **options)
        return decoding.run(q, cache, return_lse=True), prefill.run(queries, cache, return_lse=True)

    step()
    torch.cuda.synchronize()
    with nothing_waits():
        decoded, prefilled = step()
    for b, n in enumerate(lens):
        own = [half[listed[indptr[b] : indptr[b + 1]].long()].flatten(0, 1)[:n] for half in halves]
        for found, query, at in ((decoded, q, slice(b, b + 1)), (prefilled, queries, slice(starts[b], starts[b + 1]))):
            expected, lse = exact(query[at], *own, causal=True, window=(left, -1), softcap=cap or 0.0)
            close(found[0][at], expected, dtype)
            close(found[1][at], lse / math.log(2), torch.float16)


class NothingWaits(TorchDispatchMode):
    """Refuses what reads a value of a tensor, for which a GPU would be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        assert func is not torch.ops.aten.nonzero.default
        return func(*args, **(kwargs or {}))


def test_lists_on_a_gpu_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "in_sight", lambda *tensors: False)
    lists = pages.PageLists(None)
    with NothingWaits():
        lists.hold(INDPTR, INDICES, LAST, PAGE, None)
        slots = pages._slots(torch.tensor([0, 0, 2, 2, 7, -1]), torch.tensor([18, 24, 9, 16, 0, 0]), INDICES, INDPTR,
                             LAST, PAGE)
    assert lists.lens.tolist() == list(LENS)
    assert lists.table.shape == (3, 8)
    assert lists.columns(INDPTR, torch.zeros(65), PAGE, None) == 128
    assert lists.columns(INDPTR, torch.zeros(65), PAGE, 33 * PAGE) == 40
    assert all(lists.table[b, c] == INDICES[INDPTR[b] + c] for b, n in ((0, 3), (2, 2)) for c in range(n))
    assert slots.tolist() == [4 * PAGE + 2, -1, 6 * PAGE + 1, -1, -1, -1]
    with pytest.raises(AssertionError), NothingWaits():
        int(LAST.max())


def test_a_captured_graph_sees_later_plans() -> None:
    """The arrays of the first plan hold the lists of the second."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        None, use_cuda_graph=True, paged_kv_indices_buffer=torch.zeros(6, dtype=torch.int32), backend="emulator")
    sizes: Case = {"q_data_type": "float32"}
    wrapper.plan(torch.tensor([0, 1, 2]), torch.tensor([3, 5]), torch.tensor([1, 8]), HQ, HKV, D, PAGE, **sizes)
    table, lens = wrapper.lists.table, wrapper.lists.lens
    wrapper.plan(torch.tensor([0, 3, 4]), torch.tensor([1, 2, 8, 0]), torch.tensor([2, 4]), HQ, HKV, D, PAGE, **sizes)
    assert wrapper.lists.table is table
    assert wrapper.lists.lens is lens
    assert (table[0, :3].tolist(), table[1, 0].item(), lens.tolist()) == ([1, 2, 8], 0, [18, 4])
    with pytest.raises(ValueError, match="in a CUDA graph: must be that of the first plan"):
        wrapper.plan(torch.tensor([0, 1]), torch.tensor([3]), torch.tensor([1]), HQ, HKV, D, PAGE, **sizes)


def decode(planned: Case | None = None, given: Case | None = None, **made: Any) -> Any:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, backend="emulator", **made)
    lists = {"indptr": INDPTR, "indices": INDICES, "last_page_len": LAST, "num_qo_heads": HQ, "num_kv_heads": HKV}
    wrapper.plan(**{**lists, "head_dim": D, "page_size": PAGE, "q_data_type": "float32", **(planned or {})})
    return wrapper.run(**{"q": randn(3, HQ, D), "paged_kv_cache": cache_of("NHD", False)[0], **(given or {})})


def prefill_of(starts: torch.Tensor) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(None, backend="emulator")
    wrapper.plan(starts, INDPTR, INDICES, LAST, HQ, HKV, D, PAGE, q_data_type="float32")
    return wrapper


def prefill(**given: Any) -> Any:
    return prefill_of(torch.arange(4)).run(randn(3, HQ, D), cache_of("NHD", False)[0], **given)


def test_a_table_of_pages_stands_for_the_lists_in_a_graph() -> None:
    """It has as many columns as the plan's ``block_tables``, which later plans copy into."""
    table = torch.tensor([[7, 0, 4], [8, 8, 8], [2, 1, 1]])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(None, use_cuda_graph=True, backend="emulator")
    q, cache = randn(3, HQ, D), cache_of("NHD", False)[0]
    for tables in (table, table.flip(0)):
        wrapper.plan(INDPTR, INDICES, LAST, HQ, HKV, D, PAGE, q_data_type="float32", block_tables=tables)
        assert wrapper.lists.table.tolist() == tables.tolist()
        kept = wrapper.lists.table
    assert wrapper.lists.table is kept
    assert wrapper.run(q, cache).shape == q.shape


@pytest.mark.parametrize("given", [{"lse": torch.empty(3, 1), "return_lse": True}, {"return_lse": 3}])
def test_nothing_is_written_by_a_call_that_is_refused(given: Case) -> None:
    for call in (lambda **more: decode(given=more), prefill):
        out = torch.full((3, HQ, D), 9.0)
        with pytest.raises(ValueError, match="lse is"):
            call(out=out, **given)
        assert bool((out == 9).all())


LACKING: dict[str, Any] = {
    "pos_encoding_mode is 'ROPE_LLAMA'": lambda: decode({"pos_encoding_mode": "ROPE_LLAMA"}),
    "rope_theta is 10000.0": lambda: decode({"rope_theta": 1e4}),
    "fixed_split_size is 4": lambda: decode({"fixed_split_size": 4}),
    "window_right is 3": lambda: decode({"window_right": 3}),
    "logits_soft_cap is 8.0": lambda: decode({"pos_encoding_mode": "ALIBI", "logits_soft_cap": 8.0}),
    "return_lse is True": lambda: decode({"pos_encoding_mode": "ALIBI"}, {"return_lse": True}),
    "enable_pdl is True": lambda: decode(given={"enable_pdl": True}),
    "k_scale is a tensor": lambda: decode(given={"k_scale": torch.ones(HKV)}),
    "jit_args is": lambda: decode(jit_args=["x"]),
    "qo_indptr has sequences of": lambda: flashinfer.BatchMLAPagedAttentionWrapper(None).plan(
        torch.tensor([0, 1, 3]), INDPTR, INDICES, LAST, 1, 64, 16, PAGE, True, 1.0, "float16", "float16"),
    "scale_q is a tensor": lambda: flashinfer.single_prefill_with_kv_cache(
        randn(2, HQ, D), randn(2, HKV, D), randn(2, HKV, D), scale_q=torch.ones(HQ)),
}
WRONG: dict[str, Any] = {
    "q has dtype torch.float32: must be q_data_type": lambda: decode({"q_data_type": "float16"}),
    "q has shape (3, 6, 32): must be [tokens, num_qo_heads = 4": lambda: decode({"num_qo_heads": 4}),
    "paged_kv_cache has pages of 8 tokens and 2 heads": lambda: decode({"page_size": 16}),
    "paged_kv_cache is of shape (9, 8, 2, 32)": lambda: decode(given={"paged_kv_cache": cache_of("NHD", True)[1]}),
    "last_page_len[0] is 9: must be 1 to 8": lambda: decode({"last_page_len": LAST + torch.tensor([6, 0, 0])}),
    "indices[1, 1] is 9": lambda: decode({"indices": torch.tensor([7, 0, 4, 2, 9]), "indptr": torch.tensor([0, 3, 5]),
                                          "last_page_len": torch.tensor([3, 8])}, {"q": randn(2, HQ, D)}),
    "indices[1] is -1: must be 0 to 2147483647": lambda: decode({"indices": INDICES - INDICES[1] - 1}),
    "paged_kv_indptr has shape (4,): must be that of qo_indptr, (3,)": lambda: prefill_of(torch.arange(3)),
    "sm_scale is 'x'": lambda: decode({"sm_scale": "x"}),
    "window_left is 2: must be None or the plan's, -1": lambda: decode(given={"window_left": 2}),
    "kv_layout is 'HDN'": lambda: decode(kv_layout="HDN"),
    "positions[0] is 19: must be 0 to 18": lambda: flashinfer.append_paged_kv_cache(
        *[randn(1, HKV, D)] * 2, torch.tensor([0]), torch.tensor([19]), cache_of("NHD", False)[0], INDICES, INDPTR,
        LAST),
    "custom_mask tells of 3 pairs: must be of 4": lambda: flashinfer.single_prefill_with_kv_cache(
        *[randn(2, 2, D)] * 3, custom_mask=torch.ones(3, dtype=torch.bool), backend="emulator"),
    "q requires grad": lambda: decode(given={"q": randn(3, HQ, D).requires_grad_()}),
    "out has shape (2, 6, 32): must be (3, 6, 32)": lambda: decode(given={"out": randn(2, HQ, D)}),
    "block_tables has dtype torch.float32": lambda: decode({"block_tables": torch.zeros(3, 3)}),
    "window_left is 'a': must be None, or": lambda: prefill(window_left="a"),
    "positions has dtype torch.float32": lambda: flashinfer.append_paged_kv_cache(
        *[randn(1, HKV, D)] * 2, torch.tensor([0]), torch.tensor([1.5]), cache_of("NHD", False)[0], INDICES, INDPTR,
        LAST),
    "qo_indptr has shape (3,): must be (4,)": lambda: flashinfer.BatchMLAPagedAttentionWrapper(None).plan(
        torch.tensor([0, 1, 2]), INDPTR, INDICES, LAST, 1, 64, 16, PAGE, True, 1.0, "float16", "float16"),
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


@pytest.mark.parametrize("name", [name for name in flashinfer.__all__ if name.endswith("Wrapper")])
def test_a_run_needs_a_plan_that_was_taken(name: str) -> None:
    made = (1, None) if name.startswith("Multi") else (None,)
    wrapper = getattr(flashinfer, name)(*made, backend="emulator")
    arrays = [torch.ones(1)] * (4 if "MLA" in name else 3 if "Ragged" in name else 2)
    message = f"run of a {name} without a plan: must be after plan\\(\\)"
    with pytest.raises(ValueError, match=message):
        wrapper.run(*arrays)
    wrapper.planned = True
    with pytest.raises((TypeError, ValueError, NotImplementedError)):
        wrapper.plan("x")
    with pytest.raises(ValueError, match=message):
        wrapper.run(*arrays)


def test_unknown_keywords_are_no_options() -> None:
    with pytest.raises(TypeError, match="windo_left"):
        decode({"windo_left": 2})
