"""The compiled MLA prefill kernel on a CUDA device, against the float64 reference, in the tolerance of yardsticks.

Every case poisons what must not be read (NaN slots, latents and pages, table entries that are no pages) and deals its
pages at random.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from mla_prefill_cases import Case
from yardsticks import assert_accurate, bits, nothing_waits

from kvlab.attention import mla_prefill_paged, plan
from kvlab.attention.masks import AndMask, ChunkedCausalMask, ChunkedMask, MaterializedMask, SlidingWindowCausalMask
from kvlab.common.arrays import to_torch

pytestmark = pytest.mark.gpu

BIAS = np.where(np.random.default_rng(3).random((1, 1, 300, 400)) < 0.3, -np.inf, 0.5).astype(np.float32)
SIZES = [
    Case(((300, 500), (0, 9), (5, 3), (4, 0), (130, 130)), page=64, latent=512),
    Case(((200, 257), (1, 70)), row="", H=3),
    Case(((20, 700), (3, 70)), page=7, row="rope-aware", strided=True),
    Case(((60, 800), (9, 30)), starts=(100, 0), held=(300, 30), page=1),
    Case(((150, 400),), columns=(192, 64, 192), page=16),
    Case(((90, 100),), columns=(80, 32, 48), page=48),
    Case(((1, 300), (0, 0), (0, 9), (1, 1)), page=64, latent=512),
]
GRID = SIZES + [replace(c, dtype=dtype) for c, dtype in zip(SIZES, ("fp32", "fp16", "fp16", "fp32"), strict=False)]
CHUNKS_AND_WINDOW = AndMask(ChunkedCausalMask(60), SlidingWindowCausalMask(40))
"""A bias, beside tiles that fill the shared memory."""
FEATURES = [
    Case(((300, 900),), held=(300,), sinks=True, softcap=5.0, slopes=True, H=3),
    Case(((290, 700), (9, 30)), window=40, mask=ChunkedMask(128), causal=True),
    Case(((170, 180),), causal=False, window=(20, 7)),
    Case(((300, 400),), mask=MaterializedMask(BIAS), sinks=True),
    *(Case(((150, 200), (3, 7)), row="", dtype="fp16", columns=(128, R, 128), softcap=20.0, mask=CHUNKS_AND_WINDOW)
      for R in (48, 128)),
    Case(((200, 300),), row="fp8", k_scale="token", page=64),
    Case(((200, 300),), row="fp8", k_scale="head", page=64, dtype="fp16"),
    Case(((300, 500), (0, 9), (5, 3), (4, 0)), kv="fp8", scales="head", page=64, latent=512, H=5),
    Case(((200, 300), (3, 70)), kv="fp8", scales="token", row="rope-aware", page=7, strided=True, dtype="fp16"),
    Case(((200, 300),), kv="fp8", scales="token", row="fp8", k_scale="token", columns=(192, 64, 192), page=64),
    Case(((60, 400), (9, 30)), starts=(100, 0), held=(200, 30), kv="fp8", scales="token", columns=(80, 32, 48)),
    Case(((200, 300),), kv="fp8", scales="head", row="fp8", k_scale="token", dtype="fp8", page=64),
    Case(((200, 257), (1, 70)), kv="fp8", scales="number", row="", H=3, softcap=5.0),
]


@pytest.mark.parametrize("case", GRID + FEATURES, ids=str)
def test_grid(case: Case) -> None:
    x = case.build()
    out, lse = x.call(device="cuda", return_lse=True)
    assert_accurate(x, out.cpu(), lse.cpu())


def test_repeats_agree_bit_for_bit_and_nothing_is_written_beside_out() -> None:
    x = Case(((300, 500), (0, 9), (130, 200)), page=64, H=5).build()
    buffer = torch.full((len(x.q) + 2, 7, 256), 7, dtype=torch.bfloat16, device="cuda")
    out = buffer[1:-1, 1:6, 64:192]
    out.fill_(float("nan"))
    assert x.call(device="cuda", out=out) is out
    assert_accurate(x, out.cpu())
    first = bits(out.cpu())
    assert {bits(x.call(device="cuda").cpu()) for _ in range(5)} == {first}
    out.fill_(7)
    assert bool((buffer == 7).all())


def test_the_host_does_not_wait() -> None:
    x = Case(((20, 50),), page=64).build()
    arrays = [to_torch(a).cuda() for a in (x.q, x.k, x.v, x.cache, x.table, x.seq_lens, x.cu_q, x.cu_k)]
    mla_prefill_paged(*arrays, latent_dim=64, window=30, softcap=3.0)
    with nothing_waits():
        mla_prefill_paged(*arrays, latent_dim=64, window=30, softcap=3.0)


@pytest.mark.parametrize("case", GRID + FEATURES, ids=str)
def test_over_a_plan(case: Case) -> None:
    """The programs of the GPU share units of the lengths, which lie there."""
    x = case.build()
    if not case.lens:
        return
    nope, rope, value = case.columns
    placed = case.starts is not None
    causal = not placed and (case.mask is None if case.causal is None else case.causal)
    held, cu_q = (to_torch(a).cuda() for a in (np.diff(x.cu_k), x.cu_q))
    step = plan(
        held, (cu_q, len(x.q)), q_heads=case.H, kv_heads=case.H, head_dim=(max(nope, value), rope), causal=causal,
        itemsize=x.k.itemsize, window=None if placed else case.window,
    )
    out, lse = x.call(device="cuda", plan=step, return_lse=True)
    assert_accurate(x, out.cpu(), lse.cpu())
    assert {bits(x.call(device="cuda", plan=step).cpu()) for _ in range(3)} == {bits(out.cpu())}


def test_a_captured_plan_is_made_anew_by_each_replay() -> None:
    x = Case(((300, 500), (100, 900), (0, 9)), page=64, H=5).build()
    arrays = [to_torch(a).cuda() for a in (x.q, x.k, x.v, x.cache, x.table, x.seq_lens, x.cu_q, x.cu_k)]
    held = torch.diff(arrays[7])

    def call() -> torch.Tensor:
        step = plan(held, (arrays[6], len(x.q)), q_heads=5, kv_heads=5, head_dim=(128, 64))
        return mla_prefill_paged(*arrays, latent_dim=64, plan=step)

    expected = bits(call().cpu())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for used in (1.0, 0.0, 1.0):  # no keys at all in the second
        out.fill_(float("nan"))
        held.copy_((torch.diff(torch.from_numpy(x.cu_k)) * used).cuda())
        arrays[7].copy_((torch.from_numpy(x.cu_k) * used).cuda())
        arrays[5].copy_((torch.from_numpy(x.seq_lens) * used).cuda())
        graph.replay()
        found = out.cpu()
        assert bits(found) == expected if used else bool((found == 0).all())
