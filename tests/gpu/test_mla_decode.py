"""The compiled MLA decode kernel on a CUDA device, against the float64 reference, in the tolerance of mla_cases.

Every case poisons what must not be read (NaN slots and pages, table entries that are no pages), deals its pages at
random, and has canaries around what it writes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mla_cases import Case
from yardsticks import assert_accurate, bits

from kvlab.attention import mla_decode_paged

pytestmark = pytest.mark.gpu

FULL = (512, 64)
SIZES = [
    Case((1,), H=1, columns=FULL),
    Case((4096, 20, 0, 140), H=128, columns=FULL, page=64),
    Case((1000, 999), H=16, columns=FULL, page=48),
    Case((257, 65), H=63, columns=FULL, page=1, S=2),
    Case((129, 3, 2, 1, 0), H=9, columns=FULL, page=128, S=4, storage="layers"),
    Case((600, 0, 129), H=64, columns=FULL, splits=2, storage="wide"),
    Case((20, 1, 0), H=3, columns=(256, 32), splits=16, storage="head"),
    Case((300, 17), H=126, columns=(96, 16)),
]
GRID = [
    Case(c.lens, c.H, c.columns, c.page, dtype, c.S, c.splits, c.storage)
    for c in SIZES
    for dtype in ("bf16", "fp16", "fp32")
]


@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(case: Case) -> None:
    x = case.build()
    out, lse = mla_decode_paged(*x.torch("cuda"), return_lse=True, num_splits=case.splits, **x.options_on("cuda"))
    assert_accurate(x, out.cpu(), lse.cpu())


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
