"""The Hopper MLA decode kernel on its GPU, against the float64 reference, in the tolerance of yardsticks.

Every case poisons what must not be read (NaN slots and pages, table entries that are no pages), deals its pages at
random, and has canaries around what it writes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hopper_chip import ON_HOPPER, assert_alike, run_apart
from listed_cases import Listed
from mla_cases import Case, Inputs
from yardsticks import assert_accurate, bits, nothing_waits, on

from kvlab.attention import explain, mla_decode_paged
from kvlab.common.arrays import to_torch

pytestmark = ON_HOPPER

FULL = (512, 64)
SIZES = [
    Case((1,), H=1, columns=FULL, page=64),
    Case((4096, 20, 0, 140), H=128, columns=FULL, page=64),
    Case((4096, 20, 0, 140), H=128, columns=FULL, page=64, splits=1),
    Case((1000, 999, 64, 63, 65), H=16, columns=FULL, page=16),
    Case((257, 65), H=63, columns=FULL, page=32, S=2),
    Case((129, 3, 2, 1, 0), H=9, columns=FULL, page=128, S=4, storage="layers"),
    Case((600, 0, 129), H=64, columns=FULL, page=192, splits=2, storage="wide"),
    Case((20, 1, 0), H=3, columns=FULL, page=64, splits=16, storage="head"),
    Case((300, 17), H=126, columns=FULL, page=64, S=3),
    Case((70, 2000), H=128, columns=FULL, page=16, S=4, splits=7),
    Case((300, 9, 2000), H=20, columns=FULL, page=64, S=16),
    Case((200,) * 150, H=128, columns=FULL, page=64),
    Case((1, 0, 0, 1), H=16, columns=FULL, page=64),
]
SCALED = [
    Case((1,), H=1, columns=FULL, page=64, row="scaled"),
    Case((4096, 20, 0, 140), H=128, columns=FULL, page=48, row="scaled", splits=1),
    Case((129, 3, 2, 1, 0), H=9, columns=FULL, page=5, S=4, row="scaled", storage="wide"),
    Case((257, 2000), H=63, columns=FULL, page=64, S=2, row="scaled", splits=3),
]
GRID = [*SIZES, *(replace(case, dtype="fp16") for case in SIZES[1:5]), *SCALED]


CALLS = (
    "mla_decode_paged(*args, backend='hopper')",
    "mla_decode_paged(*args, backend='hopper', balanced=True)",
    "slots = torch.arange(-200, 200).clamp(-1).view(2, 200).cuda(); "
    "mla_decode_paged(*args[:2], indices=slots, backend='hopper')",
    "args[1] = torch.zeros(9, 64, 656, dtype=torch.uint8).cuda(); mla_decode_paged(*args, backend='hopper')",
    "slots = torch.arange(-200, 200).clamp(-1).view(2, 200).cuda(); "
    "rows = torch.zeros(9, 64, 656, dtype=torch.uint8).cuda(); "
    "mla_decode_paged(args[0], rows, indices=slots, backend='hopper')",
)


@pytest.fixture(scope="module", autouse=True)
def it_ends() -> None:
    """Roles that wait for each other on the chip would hang the suite: the first launch of each form has a process of
    its own.
    """
    program = (
        "import torch; from kvlab.attention import mla_decode_paged; "
        "q, kv = torch.ones(2, 128, 576), torch.ones(9, 64, 576); table = torch.arange(8).view(2, 4); "
        "args = [t.cuda() for t in (q.bfloat16(), kv.bfloat16(), table.int(), torch.tensor([200, 9]).int())]; "
    )
    for call in CALLS:
        run_apart(f"{program}{call}; torch.cuda.synchronize()")


def call(case: Case, x: Inputs, *arrays: Any, **options: Any) -> Any:
    return mla_decode_paged(*arrays, num_splits=case.splits, backend="hopper", **x.options, **options)


@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(case: Case) -> None:
    x = case.build()
    out, lse = call(case, x, *x.torch("cuda"), return_lse=True)
    assert_accurate(x, out.cpu(), lse.cpu())


LISTED = [
    (Case((900, 300, 700), H=128, columns=FULL, page=64, S=3), 2048),
    (Case((900, 300, 0), H=64, columns=FULL, page=64, splits=1), 129),
    (Case((90, 300), H=20, columns=FULL, page=5, dtype="fp16", splits=4), 100),
    (Case((2000,) * 150, H=128, columns=FULL, page=16), 513),
    (Case((900, 300, 700), H=128, columns=FULL, page=64, S=3, row="scaled"), 2048),
    (Case((90, 300, 0), H=16, columns=FULL, page=5, splits=4, row="scaled", storage="wide"), 100),
    (Case((2000,) * 150, H=64, columns=FULL, page=64, row="scaled"), 513),
]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("case, topk", LISTED, ids=str)
def test_lists_of_slots(case: Case, topk: int, wide: bool) -> None:
    """Integers of 64 bits far outside of the pool name no slot, either. The same call gives the same bits."""
    listed = Listed(case, topk)
    x, indices = listed.x, listed.indices
    if wide:
        indices = indices.astype(np.int64)
        indices[indices < 0] = np.resize([1 << 40, -1, -(1 << 40), len(x.rows) * case.page], int((indices < 0).sum()))
    q, kv, slots = (on(to_torch(a), "cuda") for a in (listed.q, x.kv, indices))
    options = {"indices": slots, "num_splits": case.splits, "backend": "hopper", "return_lse": True, **x.options}
    out, lse = mla_decode_paged(q, kv, check=False, **options)
    assert_accurate(listed.dense, out[:, None].cpu(), lse[:, None].cpu())
    assert {bits(mla_decode_paged(q, kv, check=False, **options)[0].cpu()) for _ in range(3)} == {bits(out.cpu())}


@pytest.mark.parametrize("topk", [1, 130, 2047])
@pytest.mark.parametrize("splits", [1, 3])
def test_slots_at_the_ends(topk: int, splits: int) -> None:
    """The same slot again and again, the first and the last of a page and of the pool, tokens that see nothing; all
    other bytes of the pool are NaN, and the rows beside ``out`` stay.
    """
    listed = Listed(Case((90, 70, 33, 20), H=20, columns=FULL, page=16, splits=splits), topk)
    rows, last = listed.x.rows, len(listed.x.rows) * 16 - 1
    ends = np.array([0, 15, 16, last - 15, last])
    rows[ends // 16, ends % 16] = np.random.default_rng(topk).standard_normal((5, 576)).astype(rows.dtype)
    listed.indices[0] = last
    listed.indices[1, -5:] = ends[:topk]
    buffer = torch.full((6, 20, 512), 7, dtype=torch.bfloat16, device="cuda")
    q, kv, slots = (on(to_torch(a), "cuda") for a in (listed.q, listed.x.kv, listed.indices))
    out, lse = mla_decode_paged(
        q, kv, indices=slots, num_splits=splits, backend="hopper", return_lse=True, out=buffer[1:5], **listed.x.options
    )
    assert_accurate(listed.dense, out[:, None].cpu(), lse[:, None].cpu())
    assert bool((buffer[[0, 5]] == 7).all())


@pytest.mark.parametrize("case", [*SIZES[2:8], *SCALED[1:]], ids=str)
def test_the_emulator_gives_what_the_chip_gives(case: Case) -> None:
    """Both round P and the output to 16 bits; a tie may fall on either side."""
    x = case.build()
    ours = call(case, x, *x.arrays, return_lse=True)
    out, lse = (t.cpu().float().numpy() for t in call(case, x, *x.torch("cuda"), return_lse=True))
    assert_alike(ours, (out, lse))


BALANCED = [
    Case((20000, *(100 + 7 * i for i in range(40)), 0), H=16, columns=FULL, page=64),
    Case((3000, 0, 64, 65, 1), H=128, columns=FULL, page=64, S=2),
    Case((500, 9, 1300), H=64, columns=FULL, page=16),
    Case((700, 33, 129) * 60, H=20, columns=FULL, page=32),
    Case((5000, 3), H=16, columns=FULL, page=64, S=4),
]


@pytest.mark.parametrize("case", BALANCED, ids=str)
def test_balanced(case: Case) -> None:
    x = case.build()
    options = {"balanced": True, "backend": "hopper", "return_lse": True, **x.options}
    told = explain(mla_decode_paged, *x.torch("cuda"), **options)
    assert told.config.ring.OVERHEAD == (2 if case.H * case.S <= 16 else 3)
    out, lse = mla_decode_paged(*x.torch("cuda"), **options)
    assert_accurate(x, out.cpu(), lse.cpu())
    assert {bits(mla_decode_paged(*x.torch("cuda"), **options)[0].cpu()) for _ in range(3)} == {bits(out.cpu())}


@pytest.mark.parametrize("splits", [1, 4])
def test_nothing_waits_repeats_and_writes_beside_out(splits: int) -> None:
    case = Case((1500, 0, 17), H=100, columns=FULL, page=64, S=2, splits=splits)
    x = case.build()
    tensors = x.torch("cuda")
    buffer = torch.full((5, 4, 102, 768), 7, dtype=torch.bfloat16, device="cuda")
    out = buffer[1:4, 1:3, 1:101, 128:640]
    call(case, x, *tensors, out=out)  # compiles
    assert_accurate(x, out.cpu())
    before = bits(out.cpu())
    with nothing_waits():
        for _ in range(20):
            call(case, x, *tensors, out=out)
    assert bits(out.cpu()) == before
    out[...] = 7
    assert bool((buffer == 7).all())


@pytest.mark.parametrize("splits", [1, 2])
def test_nan_in_a_key_that_is_seen(splits: int) -> None:
    """Law: NaN in a latent that a row sees is NaN in that row, with any number of splits; it is no row without keys."""
    case = Case((140, 20), H=2, columns=FULL, page=64, splits=splits)
    x = case.build()
    x.kv[x.table[0, 0], 3, 0] = np.nan
    out, lse = call(case, x, *x.torch("cuda"), return_lse=True)
    assert out.isnan().flatten(1).all(1).tolist() == lse.isnan().flatten(1).all(1).tolist() == [True, False]


def test_graph_replay_with_other_lengths() -> None:
    """Known failure graph-replay-new-lengths; the host does not wait in between."""
    case = Case((2048,) * 4, H=128, columns=FULL, page=64)
    x = case.build()
    q, kv, table, lens = x.torch("cuda")
    out = torch.empty(x.shape, dtype=q.dtype, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(case, x, q, kv, table, lens, out=out)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(case, x, q, kv, table, lens, out=out)
    for new in ([1, 16, 2048, 0], [0, 0, 0, 0], [2047, 1, 129, 128]):
        lens.copy_(torch.tensor(new, dtype=lens.dtype))
        out.fill_(float("nan"))
        graph.replay()
        assert_accurate(x.with_(lens=np.array(new, np.int32)), out.cpu())


def test_batch_invariance() -> None:
    """Rests on the definition: a sequence alone and in a batch gives the same bits."""
    case = Case((600, 20, 4500), H=128, columns=FULL, page=64)
    x = case.build()
    q, kv, table, lens = x.torch("cuda")
    whole = call(case, x, q, kv, table, lens, batch_invariant=True)
    for b in range(3):
        one = call(case, x, q[b : b + 1], kv, table[b : b + 1], lens[b : b + 1], batch_invariant=True)
        assert bits(one[0].cpu()) == bits(whole[b].cpu())


@pytest.mark.parametrize("row", ["plain", "scaled"])
def test_auto_takes_it(row: str) -> None:
    x = Case((300,), H=128, columns=FULL, page=64, row=row).build()
    assert explain(mla_decode_paged, *x.torch("cuda"), **x.options).backend == "hopper"
    with pytest.raises(ValueError, match="backend is 'hopper' with softcap"):
        mla_decode_paged(*x.torch("cuda"), backend="hopper", **x.options | {"softcap": 1.0})
