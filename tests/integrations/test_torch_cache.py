"""Caches of serving stacks. Rests on torch's own indexing: a collection reads and writes the tensor's own memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlab.attention import kv_store, mha_decode
from kvlab.integrations import from_torch

PAGES, PAGE, HEADS, D = 6, 4, 3, 16
TABLE, LENGTHS = torch.tensor([[4, 1, 5], [0, 3, 2]]), torch.tensor([6, 9])


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape).to(dtype)


FORMS = {
    "[2, pages, page, heads, D]": (numbered(2, PAGES, PAGE, HEADS, D), {}, lambda t: t),
    "[pages, 2, page, heads, D]": (numbered(PAGES, 2, PAGE, HEADS, D), {}, lambda t: t.transpose(0, 1)),
    "[2, pages, heads, page, D]": (numbered(2, PAGES, HEADS, PAGE, D), {"layout": "HND"}, lambda t: t.transpose(2, 3)),
    "[pages, 2, heads, page, D]": (
        numbered(PAGES, 2, HEADS, PAGE, D), {"layout": "HND"}, lambda t: t.transpose(0, 1).transpose(2, 3),
    ),
}


def tokens(cache: torch.Tensor, b: int, n: int) -> torch.Tensor:
    """``[n, heads, D]`` of a sequence, by torch's own indexing of ``[pages, page, heads, D]``."""
    t = torch.arange(n)
    return cache[TABLE[b, t // PAGE], t % PAGE]


@pytest.mark.parametrize("form", FORMS)
def test_reads_and_writes_the_same_memory(form: str) -> None:
    tensor, options, nhd = FORMS[form]
    tensor = tensor.clone()
    cache = from_torch(tensor, LENGTHS, TABLE, **options)
    for view, half in zip((cache.get_key_cache(0), cache.get_value_cache(0)), nhd(tensor), strict=True):
        assert view.blocks.data_ptr() == half.data_ptr()
        for b, n in enumerate((6, 9)):
            got = view.numpy().load(b, np.arange(HEADS), np.arange(n)[:, None], 0, width=D)
            assert torch.equal(torch.from_numpy(got), tokens(half, b, n))
    cache.get_value_cache(0).numpy().store(1, 2, 8, 0, np.full(D, -1, np.float32))
    assert (nhd(tensor)[1, 2, 0, 2] == -1).all()
    assert int((tensor == -1).sum()) == D


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_of_views(form: str) -> None:
    tensor, options, nhd = FORMS[form]
    halves = nhd(tensor)
    pair = tuple(half.transpose(1, 2) if options else half for half in halves)
    cache = from_torch(pair, LENGTHS, TABLE, **options)
    assert cache.get_value_cache(0).blocks.data_ptr() == halves[1].data_ptr()
    assert torch.equal(cache.get_value_cache(0).blocks, halves[1])
    assert torch.equal(cache.get_key_cache(0).blocks, halves[0])


def test_doubled_page_stride() -> None:
    cache = from_torch(numbered(PAGES, 2, PAGE, HEADS, D, dtype=torch.bfloat16), LENGTHS, TABLE)
    assert cache.get_key_cache(0).strides == (2 * PAGE * HEADS * D, HEADS * D, D, 1)
    assert cache.get_value_cache(0).row_idx(0, 0) == 4 * 2 * PAGE


def test_mla() -> None:
    rows = numbered(PAGES, PAGE, 576, dtype=torch.bfloat16)
    for tensor, options in ((rows, {}), (rows[:, :, None], {}), (rows[:, None], {"layout": "HND"})):
        cache = from_torch(tensor, LENGTHS, TABLE, **options)
        assert cache.kv_params.is_mla
        assert cache.get_key_cache(0).blocks.data_ptr() == rows.data_ptr()
        assert cache.get_key_cache(0).strides[1:] == (576, cache.get_key_cache(0).strides[2], 1)


def test_scales() -> None:
    tensor = torch.zeros(2, PAGES, PAGE, HEADS, D).to(torch.float8_e4m3fn)
    scales = numbered(2, PAGES, PAGE, HEADS, 2)
    view = from_torch(tensor, LENGTHS, TABLE, scales=scales, quantization_granularity=8).get_value_cache(0).numpy()
    assert view.load_scale(0, 2, 5, 15)[0] == scales[1, 1, 1, 2, 1]


@pytest.mark.interpreter
@pytest.mark.parametrize("form", FORMS)
def test_store_then_decode(form: str) -> None:
    """A store into the tensor, then attention over it: the new token's value is what decode finds."""
    tensor, options, _ = FORMS[form]
    cache = from_torch(torch.zeros_like(tensor), LENGTHS * 0, TABLE, **options)
    k, v = torch.ones(2, 1, HEADS, D), torch.full((2, 1, HEADS, D), 7.0)
    kv_store(k, v, cache)
    out = mha_decode(torch.ones(2, HEADS, D), cache)
    assert torch.equal(out, torch.full((2, HEADS, D), 7.0))


@pytest.mark.parametrize(
    "tensor, options, message",
    [
        (torch.zeros(2, 2, 4, 1, 8), {}, "kv_axis=0 or 1, as both are 2"),
        (torch.zeros(2, 3, 4, 1, 8), {"kv_axis": False}, "kv_axis is False: must be 0, 1 or None"),
        (torch.zeros(3, 4, 2, 8), {}, r"shape \(3, 4, 2, 8\), 2 heads: must be of one head"),
        (torch.zeros(3, 2, 4, 8), {"layout": "HND"}, r"shape \(3, 2, 4, 8\), 2 heads: must be of one head"),
        (torch.zeros(3, 4, 4, 1, 8), {}, r"kv_axis is None: must be \[2, pages, page_size, heads, D\]"),
        (torch.zeros(2, 4, 4, 1, 8), {"kv_axis": 1}, "kv_axis is 1: must be"),
        (torch.zeros(2, 4), {}, r"kv_cache has shape \(2, 4\): must be"),
        (np.zeros((2, 4, 4, 1, 8)), {}, "kv_cache is a ndarray"),
        (torch.zeros(2, 4, 4, 1, 8), {"layout": "DHN"}, "layout is 'DHN': must be NHD"),
        ((torch.zeros(4, 4, 1, 8), torch.zeros(4, 4, 1, 8)), {}, "must be alike and lie in one allocation"),
        (torch.zeros(2, 4, 4, 1, 8, requires_grad=True), {}, "requires grad"),
        ((torch.zeros(4, 4, 1, 8),), {}, r"kv_cache is a tuple of \(Tensor\): must be a tensor or a pair \(k, v\)"),
        ((torch.zeros(4, 4, 1, 8), None), {}, r"kv_cache is a tuple of \(Tensor, NoneType\)"),
    ],
)
def test_errors(tensor, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        from_torch(tensor, LENGTHS, TABLE, **options)


def test_a_list_is_no_tensor() -> None:
    for lengths, table, name in (([3], TABLE, "cache_lengths"), (LENGTHS, [[0]], "block_table")):
        with pytest.raises(ValueError, match=f"{name} is a list: must be a torch tensor"):
            from_torch(torch.zeros(2, 3, 4, 1, 8), lengths, table)


def test_ambiguous_extents_are_resolved_by_the_caller() -> None:
    tensor = numbered(2, 2, PAGE, 1, D)
    first, second = (from_torch(tensor, LENGTHS, TABLE * 0, kv_axis=axis) for axis in (0, 1))
    assert first.get_value_cache(0).blocks.data_ptr() == tensor[1].data_ptr()
    assert second.get_value_cache(0).blocks.data_ptr() == tensor[:, 1].data_ptr()
