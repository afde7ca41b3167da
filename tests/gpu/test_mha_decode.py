"""The compiled decode kernel on a CUDA device, against the float64 reference, in the tolerance of yardsticks.

Every case poisons what must not be read (NaN slots and pages, table entries that are no pages), deals its pages at
random, and has canaries around what it writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from decode_cases import Case, Inputs
from feature_cases import DEPTHS, FEATURES, FP8, FeatureCase
from four_bit_cases import FourBits, exact
from yardsticks import HUGE, assert_accurate, bits, nothing_waits

from kvlab.attention import attend_paged, explain, mha_decode, mha_decode_paged, mha_decode_streaming_paged
from kvlab.cache import from_dense
from kvlab.common.arrays import to_torch
from kvlab.data import load_smollm2

pytestmark = pytest.mark.gpu

SIZES = [
    Case((1,)),
    Case((4096, 16, 0, 1), heads=(32, 8), D=128),
    Case((1000, 999), heads=(9, 3), page=48),
    Case((257, 64, 63, 65), heads=(5, 1), page=64),
    Case((700, 3), heads=(8, 8), page=1),
    Case((150, 5, 4, 6), heads=(3, 3), page=5, D=128),
    Case((520, 128), heads=(16, 2), page=128, D=256),
    Case((1441, 480, 479), heads=(10, 2), page=480),
    Case((1000,), heads=(48, 1), D=64),
    Case((70, 40), heads=(48, 1), D=64, S=2),
    Case((129, 3, 2, 1, 0), heads=(6, 2), D=64, S=4),
    Case((40, 300), heads=(40, 2), D=128, S=3),
    Case((600, 0, 128, 129), heads=(8, 2), D=64, splits=2),
    Case((20, 9, 5, 1, 0), heads=(4, 2), D=64, splits=64),
    Case((20000,), heads=(8, 1), D=128, splits=16),
    *(Case((200, 17), heads=(4, 2), D=D) for D in (16, 24, 40, 72, 80, 96, 112, 120, 160, 192)),
    *(Case((200, 17), heads=(4, 2), D=128, storage=kind) for kind in ("halves", "hnd", "wide", "head-major")),
]
GRID = [
    Case(c.lens, c.heads, c.D, c.page, dtype, c.S, c.splits, c.storage)
    for c in SIZES
    for dtype in ("bf16", "fp16", "fp32")
]


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """``torch.empty`` gives NaN: what a kernel leaves unwritten and later reads would show."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def run(x: Inputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of the portable kernel, on the CPU."""
    out, lse = mha_decode_paged(*x.torch("cuda"), return_lse=True, backend="triton", **options)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(case: Case) -> None:
    x = case.build()
    with nan_in_new_memory():
        out, lse = run(x, num_splits=case.splits)
    assert_accurate(x, out, lse)


LARGER = [
    FeatureCase((4096, 0, 777), heads=(32, 8), D=128, kv=FP8, scales=scales, page=page, splits=splits)
    for scales, page, splits in (("number", 64, None), ("head", 16, 1), ("token", 128, 7))
] + [
    FeatureCase((4096, 100), heads=(32, 8), D=128, window=600, sinks=True, splits=4, page=64),
    FeatureCase((3000, 17), heads=(32, 8), D=128, softcap=4.0, sinks=True, alibi="head", temperature=True, S=3),
    FeatureCase((3000, 1), heads=(16, 2), D=128, mask="chunked causal", S=4, kv=FP8),
    FeatureCase((1000, 999), heads=(12, 4), D=192, Dv=128, softcap=5.0, alibi="head", S=2),
]


@pytest.mark.parametrize("case", [*FEATURES, *DEPTHS, *LARGER], ids=str)
def test_features(case: FeatureCase) -> None:
    """Poison before a window, too; new memory is NaN."""
    x = case.build()
    with nan_in_new_memory():
        out, lse = mha_decode_paged(
            *x.torch("cuda"), **x.torch_options("cuda"), num_splits=case.splits, return_lse=True
        )
    assert_accurate(x, out.cpu(), lse.cpu())


@pytest.mark.parametrize("case", [case for case in FEATURES if case.D in (64, 128, 256, 512)], ids=str)
def test_streaming(case: FeatureCase) -> None:
    x = case.build()
    options = x.torch_options("cuda") | {"num_splits": case.splits, "return_lse": True}
    with nan_in_new_memory():
        out, lse = mha_decode_streaming_paged(*x.torch("cuda"), **options)
    assert_accurate(x, out.cpu(), lse.cpu())


@pytest.mark.parametrize("kv", [None, FP8])
def test_a_sequence_alone_and_in_a_batch(kv: str | None) -> None:
    """Batch invariance: the same bits whatever the batch."""
    x = FeatureCase((9000, 17, 4100), heads=(32, 8), page=64, D=128, kv=kv).build()
    q, k, v, table, lens = x.torch("cuda")
    whole = mha_decode_paged(q, k, v, table, lens, batch_invariant=True)
    for b in range(3):
        alone = mha_decode_paged(q[b : b + 1], k, v, table[b : b + 1], lens[b : b + 1], batch_invariant=True)
        assert bits(alone.cpu()) == bits(whole[b : b + 1].cpu())


@pytest.mark.parametrize("kv", [None, FP8])
def test_graph_replay_of_features(kv: str | None) -> None:
    """A window, a sink and splits: captured with one set of lengths, replayed with others."""
    x = FeatureCase((2048,) * 3, heads=(16, 4), D=128, page=64, kv=kv, sinks=True).build()
    q, k, v, table, lens = x.torch("cuda")
    options = x.torch_options("cuda") | {"window": 300, "num_splits": 4}
    out = torch.empty_like(q)
    mha_decode_paged(q, k, v, table, lens, **options, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mha_decode_paged(q, k, v, table, lens, **options, out=out)
    for new in ([1, 300, 2048], [0, 0, 0], [301, 299, 64]):
        lens.copy_(torch.tensor(new, dtype=lens.dtype))
        out.fill_(float("nan"))
        graph.replay()
        replayed = bits(out.cpu())
        assert bool(torch.isfinite(out).all())
        assert replayed == bits(mha_decode_paged(q, k, v, table, lens, **options).cpu())


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_repeats_agree_bit_for_bit_and_inputs_stay(dtype: str) -> None:
    x = Case((3000, 0, 17, 129), heads=(16, 4), D=128, S=2, splits=8, dtype=dtype).build()
    tensors = x.torch("cuda")
    before = [bits(t.cpu()) for t in tensors]
    runs = [mha_decode_paged(*tensors, num_splits=8, return_lse=True) for _ in range(20)]
    assert len({bits(out.cpu()) for out, _ in runs}) == 1
    assert len({bits(lse.cpu()) for _, lse in runs}) == 1
    assert [bits(t.cpu()) for t in tensors] == before


def test_garbage_in_unused_slots_changes_no_bit() -> None:
    x = Case((150, 0, 17), heads=(8, 2), D=64, splits=2).build()
    expected = bits(run(x)[0])
    for cache in (x.k, x.v):
        cache[np.isnan(cache.astype(np.float32))] = 1e30
    x.table[(x.table < 0) | (x.table == HUGE)] = 2**31 - 1
    assert bits(run(x)[0]) == expected


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_is_written_beside_out(splits: int, dtype: torch.dtype) -> None:
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    x = Case((1500, 0, 2), heads=(6, 2), D=80, S=2, dtype=name).build()
    buffer = torch.full((5, 4, 8, 128), 7, dtype=dtype, device="cuda")
    out = buffer[1:4, 1:3, 1:7, 32:112]
    out.fill_(float("nan"))
    assert mha_decode_paged(*x.torch("cuda"), out=out, num_splits=splits) is out
    assert_accurate(x, out.cpu())
    out.fill_(7)
    assert bool((buffer == 7).all())


def test_strided_queries_lengths_and_tables() -> None:
    x = Case((150, 3, 0), heads=(6, 2), D=64, S=2).build()
    q, k, v, table, lens = x.torch("cuda")
    expected = bits(mha_decode_paged(q, k, v, table, lens).cpu())
    wide = torch.full((3, 2, 8, 192), float("nan"), dtype=q.dtype, device="cuda")
    wide[:, :, 1:7, 64:128] = q
    long_lens = torch.stack([lens.long(), torch.full_like(lens, -7).long()], 1)[:, 0]
    long_table = torch.cat([table, torch.full_like(table, -7)], 1).long()[:, : table.shape[1]]
    got = mha_decode_paged(wide[:, :, 1:7, 64:128], k, v, long_table, long_lens)
    assert bits(got.cpu()) == expected


@pytest.mark.parametrize("splits", [None, 1, 8])
def test_graph_replay_with_other_lengths(splits: int | None) -> None:
    """Known failure graph-replay-new-lengths: captured with 1024 keys each, replayed with others."""
    longest, page, columns = 4096, 16, 256
    x = Case((longest,) * 4, heads=(32, 8), D=128, page=page).build()
    q, k, v, table, lens = x.torch("cuda")
    out = torch.empty_like(q)

    def call() -> torch.Tensor:
        return mha_decode_paged(q, k, v, table, lens, out=out, num_splits=splits, return_lse=True)[1]

    lens.fill_(1024)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lse = call()
    assert table.shape[1] >= columns
    for new in ([1, 16, 4096, 0], [1024] * 4, [0, 0, 0, 0], [4095, 1, 129, 128]):
        lens.copy_(torch.tensor(new, dtype=lens.dtype))
        out.fill_(float("nan"))
        graph.replay()
        replayed, replayed_lse = out.cpu(), lse.cpu()
        eager_lse = call()
        assert bits(replayed) == bits(out.cpu())
        assert bits(replayed_lse) == bits(eager_lse.cpu())
        assert_accurate(x.with_(lens=np.array(new, np.int32)), replayed, replayed_lse)


@pytest.mark.parametrize("splits", [None, 1, 8])
def test_the_host_does_not_wait(splits: int | None) -> None:
    x = Case((300, 0, 17, 1), heads=(8, 2), D=64).build()
    tensors = x.torch("cuda")
    mha_decode_paged(*tensors, num_splits=splits)
    torch.cuda.synchronize()
    with nothing_waits():
        out = mha_decode_paged(*tensors, num_splits=splits)
        shape = explain(mha_decode_paged, *tensors, num_splits=splits).grid
        empty = explain(mha_decode_paged, *tensors[:4], torch.zeros_like(tensors[4]), num_splits=splits).grid
    assert shape == empty
    assert_accurate(x, out.cpu())


def test_collection_on_the_device_does_not_wait() -> None:
    rng = np.random.default_rng(0)
    k, v = to_torch(rng.standard_normal((2, 2, 3, 70, 2, 64)).astype(np.float16))
    cache = from_dense(k, v, [70, 2, 33], page_size=16, new_tokens=2, shuffle=0)
    q = rng.standard_normal((3, 2, 4, 64)).astype(np.float16)
    on_gpu, q_gpu = cache.to("cuda"), to_torch(q).to("cuda")
    mha_decode(q_gpu, on_gpu, 1)
    torch.cuda.synchronize()
    with nothing_waits():
        out = mha_decode(q_gpu, on_gpu, 1)
    exact = mha_decode(q.astype(np.float16), cache, 1, backend="reference")
    np.testing.assert_allclose(out.cpu().float().numpy(), exact.astype(np.float32), rtol=2e-3, atol=2e-3)


def test_checks_on_request() -> None:
    """Values are looked at only when asked for, since that waits for the device; nothing is written then."""
    x = Case((20, 17), heads=(4, 2)).build()
    q, k, v, table, lens = x.torch("cuda")
    out = torch.full_like(q, 7)
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 65: must be 0 to 64"):
        mha_decode_paged(q, k, v, table, lens + 45, out=out, check=True)
    table[1, 0] = len(x.k)
    with pytest.raises(ValueError, match=r"block_table\[1, 0\] is .*: a page in use must be 0 to"):
        mha_decode_paged(q, k, v, table, lens, out=out, check=True)
    with pytest.raises(ValueError, match="one library on one device"):
        mha_decode_paged(q, k.cpu(), v, table, lens, out=out)
    with pytest.raises(ValueError, match="backend is 'emulator' with tensors on cuda"):
        mha_decode_paged(q, k, v, table, lens, out=out, backend="emulator")
    assert bool((out == 7).all())


@pytest.mark.parametrize("layer", range(3))
def test_captured_model(layer: int) -> None:
    """The model's own output of the eight decode steps: inputs, P and output rounded to bf16, 2^-9 each."""
    capture = load_smollm2()
    for step in range(capture.decode_steps):
        at = capture.prompt_tokens + step
        k, v = ([array[None, : at + 1] for array in values] for values in (capture.k, capture.v))
        cache = from_dense(k, v, [at + 1], page_size=16, new_tokens=1, shuffle=step, spare_pages=2).to("cuda")
        q = to_torch(capture.q[layer, at][None].copy()).to("cuda")
        out = mha_decode(q, cache, layer, scale=capture.scale)[0].float().cpu().numpy()
        theirs = capture.o[layer, at].astype(np.float32)
        step_of = 2.0**-8 * (np.abs(capture.v[layer].astype(np.float32)).max() + np.abs(theirs).max())
        assert np.abs(out - theirs).max() <= step_of


def test_high_pages_of_a_large_pool() -> None:
    """Known failure gqa-decode-high-block-ids: block * stride passes 2^31 from block 2384 on."""
    pages, page, heads, depth = 2600, 880, 4, 256
    if torch.cuda.mem_get_info()[0] < 2 * 2 * pages * page * heads * depth + 2**31:
        pytest.skip("a pool of 2 x 4.9 GB does not fit")
    assert 2383 * page * heads * depth < 2**31 <= 2384 * page * heads * depth
    context, used = 20000, np.arange(2577, 2600)
    k, v = (
        torch.full((pages, page, heads, depth), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    generator = torch.Generator("cuda").manual_seed(0)
    for cache in (k, v):
        cache[2577:] = torch.randn(23, page, heads, depth, generator=generator, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, 16, depth, generator=generator, device="cuda", dtype=torch.bfloat16)
    order = np.random.default_rng(0).permutation(used)
    far, near = (torch.from_numpy(t[None].astype(np.int32)).cuda() for t in (order, order - 2577))
    lens = torch.tensor([context], dtype=torch.int32, device="cuda")
    out = mha_decode_paged(q, k, v, far, lens)
    torch.cuda.synchronize()
    assert bits(out.cpu()) == bits(mha_decode_paged(q, k[2577:].clone(), v[2577:].clone(), near, lens).cpu())
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("axis", ["page", "slot", "head"])
def test_strides_beyond_32_bits(axis: str) -> None:
    """K and V span more than 2^31 elements between pages, slots or heads."""
    shape = {"page": (5, 2, 2, 64), "slot": (2, 5, 2, 64), "head": (2, 2, 5, 64)}[axis]
    big = 2**29 + 64
    strides = {"page": (big, 128, 64, 1), "slot": (128, big, 64, 1), "head": (128, 64, big, 1)}[axis]
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if torch.cuda.mem_get_info()[0] < 2 * span + 2**30:
        pytest.skip("a buffer of 4.3 GB does not fit")
    assert span > 2**31
    buffer = torch.full((span,), float("nan"), dtype=torch.float16, device="cuda")
    kv = buffer.as_strided(shape, strides)
    kv.copy_(torch.randn(shape, device="cuda"))
    pages, page, heads, _ = shape
    q = torch.randn(1, heads, 64, device="cuda", dtype=torch.float16)
    table = torch.arange(pages, device="cuda", dtype=torch.int32).flip(0)[None]
    lens = torch.tensor([pages * page], device="cuda", dtype=torch.int32)
    packed = kv.contiguous()
    assert bits(mha_decode_paged(q, kv, kv, table, lens).cpu()) == bits(
        mha_decode_paged(q, packed, packed, table, lens).cpu()
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_tensors_on_another_device_than_the_current_one() -> None:
    x = Case((300, 17), heads=(8, 2), D=64, splits=2).build()
    with torch.cuda.device(0):
        out = mha_decode_paged(*x.torch("cuda:1"), num_splits=2)
    assert out.device.index == 1
    assert_accurate(x, out.cpu())


@pytest.mark.parametrize("case", [
    FourBits("e2m1", (700, 33, 1), heads=(32, 8)), FourBits("e2m1", (70, 40), D=160, Dv=64, page=5, S=3),
    FourBits("int4", (700, 33, 1), heads=(32, 8), page=64), FourBits("int4", (129,), D=64, dtype=np.dtype(np.float16)),
    FourBits("words", (700, 33, 1), heads=(32, 8)), FourBits("words", (70, 40), D=64, page=8, S=2),
    FourBits("uint4", (700, 33, 1), heads=(32, 8), page=64), FourBits("halves", (129, 7), D=96, Dv=160, page=5),
], ids=str)
def test_four_bits(case: FourBits) -> None:
    """K and V of 4 bits, by splits, by a work list and as chunks, in the tolerance of the emulator's test; NVFP4's
    global scales in memory give the same bits, and the code of NaN among scales NaN.
    """
    arrays, options = case.build()
    expected = exact(arrays, options)
    bound = 2.0**-8 * np.abs(expected) + 2.0**-9 * np.abs(expected).max()
    on_gpu = [to_torch(x).cuda() for x in arrays]
    by = {name: to_torch(x).cuda() if isinstance(x, np.ndarray) else x for name, x in options.items()}
    q, *rest = on_gpu
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device="cuda") * case.S
    ways: list[dict[str, Any]] = [{"num_splits": 1}, {"num_splits": 3}, {"balanced": True}]
    found = [mha_decode_paged(*on_gpu, **by, **more) for more in ways]
    found.append(attend_paged(q.flatten(0, 1), *rest, starts, **by).reshape(found[0].shape))
    assert all((np.abs(out.float().cpu().numpy() - expected) <= bound).all() for out in found)
    if case.kind == "e2m1":
        there = {n: torch.tensor([x], device="cuda") if isinstance(x, float) else x for n, x in by.items()}
        assert torch.equal(mha_decode_paged(*on_gpu, **there, num_splits=1), found[0])
        by["v_block_scale"].view(torch.uint8)[int(arrays[3][0, 0]), 0, 0, 0] = 127
        lost = mha_decode_paged(*on_gpu, **by, num_splits=1).isnan()
        assert lost.any(-1).flatten().tolist() == lost[..., 0].flatten().tolist()
        assert not lost[1:].any()
        assert lost[0, :, : case.heads[0] // case.heads[1], :16].all()
