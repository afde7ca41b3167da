"""The compiled MLA decode kernel on a CUDA device, against the float64 reference, in the tolerance of yardsticks.

Every case poisons what must not be read (NaN slots and pages, table entries that are no pages), deals its pages at
random, and has canaries around what it writes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from listed_cases import Listed
from mla_cases import Case
from yardsticks import assert_accurate, bits, on

from kvlab.attention import mla_decode_paged
from kvlab.attention.masks import ChunkedMask, MaterializedMask
from kvlab.common.arrays import to_torch

pytestmark = pytest.mark.gpu

FULL = (512, 64)
BIAS = np.where(np.random.default_rng(1).random((2, 1, 1, 600)) < 0.5, -np.inf, 0.25).astype(np.float32)
SIZES = [
    Case((1,), H=1, columns=FULL),
    Case((4096, 20, 0, 140), H=128, columns=FULL, page=64),
    Case((1000, 999), H=16, columns=FULL, page=48),
    Case((257, 65), H=63, columns=FULL, page=1, S=2),
    Case((129, 3, 2, 1, 0), H=9, columns=FULL, page=128, S=4, storage="layers"),
    Case((600, 5), H=20, columns=FULL, page=64, S=16),
    Case((600, 0, 129), H=64, columns=FULL, splits=2, storage="wide"),
    Case((20, 1, 0), H=3, columns=(256, 32), splits=16, storage="head"),
    Case((300, 17), H=126, columns=(96, 16)),
    Case((1, 0, 0, 1), H=16, columns=FULL, page=64),
    Case((300, 65), H=128, columns=(512, 128), page=64),  # the widest rows, in tiles of fewer keys
]
FEATURES = [
    Case((1000, 0, 300), H=16, columns=FULL, page=64, row="rope-aware", k_scale="token", sinks=True, splits=4),
    Case((500, 65), H=128, columns=FULL, page=64, row="rope-aware", k_scale="head"),
    Case((500, 65), H=9, columns=FULL, page=16, row="fp8", k_scale="number", dtype="fp16", softcap=5.0, S=3),
    Case((500, 65), H=40, columns=FULL, page=64, row="fp8", k_scale="head", dtype="fp8", S=2, splits=3),
    Case((300, 17), H=16, columns=FULL, page=64, row="rope-aware", k_scale="token", dtype="fp8"),
    Case((900, 65), H=128, columns=FULL, page=64, row="scaled", splits=3),
    Case((300, 17), H=16, columns=(384, 64), page=16, row="scaled", dtype="fp16", S=2),
    Case((2000, 150), H=128, columns=FULL, page=64, window=300, S=2, splits=3, slopes=True),
    Case((600, 90), H=20, columns=FULL, page=48, mask=ChunkedMask(256), sinks=True, S=4),
    Case((700, 33), H=20, columns=FULL, page=64, softcap=4.0, sinks=True, slopes=True, temperature=True, S=2),
    Case((600, 90), H=40, columns=FULL, page=64, mask=MaterializedMask(BIAS), sinks=True, splits=2),
]
GRID = [
    Case(c.lens, c.H, c.columns, c.page, dtype, c.S, c.splits, c.storage)
    for i, c in enumerate(SIZES)
    for dtype in (("bf16", "fp32") if i % 2 else ("bf16", "fp16"))
]


@pytest.mark.parametrize("case", GRID + FEATURES, ids=str)
def test_grid(case: Case) -> None:
    x = case.build()
    out, lse = mla_decode_paged(*x.torch("cuda"), return_lse=True, num_splits=case.splits, **x.options_on("cuda"))
    assert_accurate(x, out.cpu(), lse.cpu())


@pytest.mark.parametrize("case, topk", [
    (Case((900, 300, 700), H=128, columns=FULL, page=64, S=3), 2048),
    (Case((900, 300), H=16, columns=FULL, page=64, row="scaled", sinks=True), 500),
    (Case((90, 300), H=20, columns=FULL, page=5, dtype="fp16", splits=4), 100),
], ids=str)
def test_lists_of_slots(case: Case, topk: int) -> None:
    """What names no slot is not read: integers far outside of the pool among them, as values are not looked at."""
    listed = Listed(case, topk)
    x, wrong = listed.x, listed.indices.astype(np.int64)
    wrong[wrong < 0] = np.resize([1 << 40, -1, -(1 << 40), x.rows.shape[0] * case.page], int((wrong < 0).sum()))
    q, kv, indices = (on(to_torch(a), "cuda") for a in (listed.q, x.kv, wrong))
    options = {"indices": indices, "num_splits": case.splits, **x.options_on("cuda")}
    out, lse = mla_decode_paged(q, kv, return_lse=True, **options)
    assert_accurate(listed.dense, out[:, None].cpu(), lse[:, None].cpu())
    assert {bits(mla_decode_paged(q, kv, **options).cpu()) for _ in range(3)} == {bits(out.cpu())}


BALANCED = [
    Case((20000, *(100 + 7 * i for i in range(40)), 0), H=16, columns=FULL, page=64),
    Case((3000, 0, 64, 65, 1), H=128, columns=FULL, page=64, S=2),
    Case((1000, 5), H=20, columns=FULL, page=16, S=16, row="rope-aware", k_scale="token", sinks=True),
]


@pytest.mark.parametrize("case", BALANCED, ids=str)
def test_balanced(case: Case) -> None:
    x = case.build()
    out, lse = mla_decode_paged(*x.torch("cuda"), balanced=True, return_lse=True, **x.options_on("cuda"))
    assert_accurate(x, out.cpu(), lse.cpu())


def test_a_captured_graph_balances_other_lengths() -> None:
    x = Case((3000, 500, 700, 1), H=16, columns=FULL, page=64).build()
    q, kv, table, lens = x.torch("cuda")
    out = torch.empty_like(q[..., :512])
    with torch.cuda.stream(torch.cuda.Stream()):
        mla_decode_paged(q, kv, table, lens, balanced=True, out=out, **x.options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_decode_paged(q, kv, table, lens, balanced=True, out=out, **x.options)
    for lengths in ((0, 0, 0, 0), (10, 500, 0, 1), (2999, 1, 700, 0)):
        other = x.with_(lens=np.array(lengths, np.int32))
        lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert_accurate(other, out.cpu())


@pytest.mark.parametrize("H", [16, 128])
def test_repeats_agree_bit_for_bit_and_nothing_is_written_beside_out(H: int) -> None:
    x = Case((1500, 0, 17), H=H, columns=FULL, page=64, S=2, splits=4).build()
    tensors = x.torch("cuda")
    before = [bits(t.cpu()) for t in tensors]
    buffer = torch.full((5, 4, H + 2, 768), 7, dtype=torch.bfloat16, device="cuda")
    out = buffer[1:4, 1:3, 1 : H + 1, 128:640]
    out.fill_(float("nan"))
    assert mla_decode_paged(*tensors, out=out, num_splits=4, **x.options) is out
    assert_accurate(x, out.cpu())
    first = bits(out.cpu())
    repeats = {bits(mla_decode_paged(*tensors, num_splits=4, **x.options).cpu()) for _ in range(10)}
    assert repeats == {first}
    assert [bits(t.cpu()) for t in tensors] == before
    out.fill_(7)
    assert bool((buffer == 7).all())


def test_graph_replay_with_other_lengths() -> None:
    """Known failure graph-replay-new-lengths, for MLA; the host does not wait in between."""
    x = Case((2048,) * 4, H=16, columns=FULL, page=64).build()
    q, kv, table, lens = x.torch("cuda")
    out = torch.empty(x.shape, dtype=q.dtype, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        mla_decode_paged(q, kv, table, lens, out=out, **x.options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_decode_paged(q, kv, table, lens, out=out, **x.options)
    for new in ([1, 16, 2048, 0], [0, 0, 0, 0], [2047, 1, 129, 128]):
        lens.copy_(torch.tensor(new, dtype=lens.dtype))
        out.fill_(float("nan"))
        graph.replay()
        assert_accurate(x.with_(lens=np.array(new, np.int32)), out.cpu())


def test_batch_invariance() -> None:
    """Rests on the definition: a sequence alone and in a batch gives the same bits."""
    x = Case((600, 20, 4500), H=128, columns=FULL, page=64).build()
    q, kv, table, lens = x.torch("cuda")
    whole = mla_decode_paged(q, kv, table, lens, batch_invariant=True, **x.options)
    for b in range(3):
        one = mla_decode_paged(q[b : b + 1], kv, table[b : b + 1], lens[b : b + 1], batch_invariant=True, **x.options)
        assert bits(one[0].cpu()) == bits(whole[b].cpu())
