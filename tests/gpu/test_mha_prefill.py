"""The compiled prefill kernel on a CUDA device, against the float64 reference, in the tolerance of yardsticks.

Every case poisons what must not be read (NaN slots, pages and neighbours, table entries that are no pages), deals its
pages at random, and has canaries around what it writes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hopper_chip import NO_HOPPER
from on_device import on_device
from prefill_cases import ENDS, FEATURES, ODD_DEPTHS, Case, Inputs
from yardsticks import assert_accurate, bits, nothing_waits

from kvlab.attention.mha_prefill import mha_prefill_paged

pytestmark = pytest.mark.gpu
BACKENDS = ["triton", pytest.param("hopper", marks=pytest.mark.skipif(NO_HOPPER, reason="a kernel for sm_90"))]

SHAPES = [(1, 1), (64, 128), (128, 192), (239, 1), (799, 3), (113, 203), (108, 256), (384, 256), (640, 128)]
SIZES = [
    *(Case((shape,) * 2, heads=(6, 2), D=128) for shape in SHAPES),
    *(Case((shape,) * 2, heads=(4, 4), D=64, causal=False, strided=True) for shape in SHAPES),
    Case(((1024, 1023),), heads=(8, 1), D=128),
    Case(((1023, 1024),), heads=(3, 1), D=256),
    Case(((2048, 2048),), heads=(4, 1), D=128),
    Case(((300, 300), (0, 40), (7, 900), (129, 64), (5, 0)), heads=(7, 1), D=128, form="ragged"),
    *(
        Case(((300, 700), (1, 1), (0, 50), (64, 2000), (3, 799), (8, 4)), heads=(5, 1), D=128, form="paged", page=page)
        for page in (1, 5, 16, 64, 128, 480)
    ),
    Case(((130, 600),), heads=(4, 2), form="paged", strided=True, window=100),
    Case(((300, 333),), heads=(4, 2), window=(40, 7), causal=False, sinks=True),
    Case(((300, 333),), heads=(4, 2), softcap=15.0, D=128),
    Case(((200, 500), (9, 0)), heads=(4, 2), form="paged", sinks=True, softcap=30.0, window=64),
    *(Case(((150, 200),), heads=(4, 2), D=D) for D in (16, 24, 40, 72, 80, 96, 112, 120, 160, 192, 256)),
]
GRID = [replace(case, dtype=dtype) for case in SIZES for dtype in ("bf16", "fp16", "fp32")]


@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(case: Case) -> None:
    x = case.build()
    out, lse = x.call(device="cuda", backend="triton", return_lse=True)
    assert_accurate(x, out.cpu(), lse.cpu())


LONGER = [
    Case(((300, 700), (1, 1), (0, 50), (64, 900)), heads=(6, 2), D=128, form="paged", page=64, **more)
    for more in (
        {"kv": "fp8", "scales": "token"}, {"kv": "fp8", "scales": "head", "window": 200, "dtype": "fp16"},
        {"dtype": "fp8", "scales": "head"}, {"dtype": "fp8", "scales": "token", "hnd": True},
        {"mask": "striped", "alibi": "head"}, {"mask": "chunked", "sinks": True, "softcap": 9.0}, {"DV": 64},
        {"temperature": True, "softcap": 9.0, "alibi": "head"}, {"temperature": True, "dtype": "fp8", "scales": "head"},
    )
]


CONVERTED = [
    Case(((150, 200),), heads=(4, 2), D=D, DV=DV, kv="fp8", dtype=dtype, scales="token" if D == 96 else "")
    for D, DV in ((16, None), (48, None), (80, None), (96, None), (112, None), (160, None), (192, None), (320, 48),
                  (576, 512))
    for dtype in ("bf16", "fp16")
] + [
    Case(((20, 90), (9, 70), (300, 700)), form="paged", heads=(6, 2), D=D, kv="fp8", scales="head", page=16)
    for D in (80, 96, 192)
]
"""K and V of e4m3 beside a q of 16 bits: head dimensions in pieces and padded, several tiles."""

TOKENS = [
    Case(((38, 38), (2, 2)), heads=(4, 2), D=D, DV=DV, form="ragged", dtype="fp8", scales="token", mask=mask,
         sinks=bool(mask))
    for D, DV in (*((D, None) for D in range(16, 257, 16)), (16, 80), (80, 144), (256, 96))
    for mask in ("sliding", "")
]
"""V of e4m3 that is converted beside a q of e4m3, as it has scales of tokens."""


@pytest.mark.parametrize("case", [*FEATURES, *ENDS, *ODD_DEPTHS, *LONGER, *CONVERTED, *TOKENS], ids=str)
def test_features(case: Case) -> None:
    """Twice: the bits repeat. Hopper's tensor cores sum products of e4m3 in 14 digits: the lse where q is e4m3 is
    that of scores so summed, to the rounding of float32.
    """
    x = case.build()
    out, lse = x.call(device="cuda", backend="triton", return_lse=True)
    if case.dtype == "fp8":
        assert_accurate(x, out.cpu())
        summed = x.call(backend="emulator", return_lse=True, arithmetic="chip")[1]
        np.testing.assert_allclose(lse.cpu().numpy(), summed, rtol=1e-5, atol=1e-5)
    else:
        assert_accurate(x, out.cpu(), lse.cpu())
    assert bits(x.call(device="cuda", backend="triton").cpu()) == bits(out.cpu())


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch() -> None:
    """Rests on the promise of batch_invariant; short and long neighbours."""
    x = Case(((40, 300), (300, 700), (1, 90)), heads=(6, 2), D=128, form="paged").build()
    options = {"backend": "triton", "batch_invariant": True, "return_lse": True}
    together, lse = x.call(device="cuda", **options)
    for b in range(3):
        rows = slice(int(x.cu_q[b]), int(x.cu_q[b + 1]))
        one = x.with_(
            q=x.q[rows], cu_q=x.cu_q[b : b + 2] - x.cu_q[b], table=x.table[b : b + 1], seq_lens=x.seq_lens[b : b + 1]
        )
        alone, its = one.call(device="cuda", **options)
        assert bits(alone.cpu()) == bits(together[rows].cpu())
        assert bits(its.cpu()) == bits(lse[rows].cpu())


@pytest.mark.parametrize("form", ["dense", "ragged", "paged"])
def test_nothing_waits_repeats_and_writes_beside_out(form: str) -> None:
    x = Case(((150, 200), (150, 200)), heads=(6, 2), D=80, form=form).build()
    buffer = torch.full((*x.q.shape[:-2], 8, 128), 7, dtype=torch.bfloat16, device="cuda")
    out = buffer[..., 1:7, 16:96]
    x.call(device="cuda", out=out)  # compiles
    assert_accurate(x, out.cpu())
    before = bits(out.cpu())
    arrays = on_device(x)
    with nothing_waits():
        arrays.call(out=out)
    assert bits(out.cpu()) == before
    out[...] = 7
    assert bool((buffer == 7).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_graph_is_replayed_with_other_lengths(backend: str) -> None:
    """Known failure graph-replay-new-lengths, for prefill: lengths and offsets change, sizes do not."""
    first = Case(((100, 300), (28, 200)), heads=(4, 2), D=128, form="paged").build()
    others = [
        Case(lens, heads=(4, 2), D=128, form="paged", seed=1) for lens in (((1, 64), (127, 127)), ((128, 200), (0, 9)))
    ]
    q, k, v = (
        torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in ((128, 4, 128), *((64, 16, 2, 128),) * 2)
    )
    table, lens, starts = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in ((2, 40), 2, 3))
    out = torch.empty_like(q)

    def fill(x: Inputs) -> None:
        given: Any = on_device(x)
        q.copy_(given.q)
        k[: len(x.k)], v[: len(x.v)] = given.k, given.v
        table[:, : x.table.shape[1]] = given.table
        lens.copy_(given.seq_lens)
        starts.copy_(given.cu_q)

    fill(first)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        mha_prefill_paged(q, k, v, table, lens, starts, out=out, backend=backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mha_prefill_paged(q, k, v, table, lens, starts, out=out, backend=backend)
    for case in others:
        x = case.build()
        fill(x)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_accurate(x, out.cpu())


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_past_32_bits(backend: str) -> None:
    """Rests on a law: where a page lies does not change the result. The cache has 2^31 elements and more."""
    x = Case(((30, 100),), heads=(2, 1), D=128, form="paged", page=16).build()
    expected = bits(x.call(device="cuda", backend=backend).cpu())
    given: Any = on_device(x)
    pages = 2**31 // (16 * 128) + len(x.k)
    far = []
    for cache in (given.k, given.v):
        big = torch.empty((pages, 16, 1, 128), dtype=torch.bfloat16, device="cuda")
        big[-len(x.k) :] = cache
        far.append(big)
    used = torch.from_numpy((x.table >= 0) & (x.table < len(x.k))).cuda()
    table = torch.where(used, given.table + pages - len(x.k), given.table)
    moved = mha_prefill_paged(given.q, *far, table, given.seq_lens, given.cu_q, backend=backend)
    assert bits(moved.cpu()) == expected
