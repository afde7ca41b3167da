"""The Hopper prefill kernel on its GPU, against the float64 reference, in the tolerance of yardsticks.

Every case poisons what must not be read (NaN slots, pages and neighbours, table entries that are no pages), deals its
pages at random, and has canaries around what it writes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hopper_chip import ON_HOPPER, assert_alike, assert_right
from on_device import on_device
from prefill_cases import ENDS, Case
from yardsticks import assert_accurate, bits, nothing_waits

from kvlab.attention import explain, mha_prefill

pytestmark = ON_HOPPER

SHAPES = [(1, 1), (64, 128), (128, 192), (239, 1), (799, 3), (113, 203), (384, 256), (640, 128), (513, 1024)]
RAGGED = ((300, 300), (0, 40), (7, 900), (129, 64), (5, 0), (192, 200))
PAGED = ((300, 700), (1, 1), (0, 50), (64, 2000), (3, 799), (8, 4), (5, 0), (256, 256))
SIZES = [
    *(Case((shape,) * 2, heads=(6, 2), D=128) for shape in SHAPES),
    *(Case((shape,) * 2, heads=(4, 4), D=64, causal=False, strided=True) for shape in SHAPES),
    *(Case((shape,) * 2, heads=(3, 1), D=64) for shape in SHAPES),
    *(Case((shape,), heads=(3, 1), D=256) for shape in SHAPES),
    Case(((1024, 1024),) * 2, heads=(6, 2), D=128, causal=False),
    Case(((1024, 1024),) * 2, heads=(6, 2), D=64),
    Case(((2048, 2048),), heads=(4, 1), D=128),
    *(Case(RAGGED, heads=(7, 1), D=D, form="ragged", causal=causal) for D in (64, 128) for causal in (True, False)),
    Case(RAGGED, heads=(2, 1), D=256, form="ragged"),
    *(Case((shape,) * 2, heads=(4, 2), D=192, DV=128) for shape in SHAPES[4:]),
    Case(PAGED, heads=(4, 2), D=192, DV=128, form="paged", page=64),
    *(Case((shape,) * 2, heads=(6, 2), D=D) for D in (80, 96, 112) for shape in SHAPES[2::2]),
    *(Case(((rows, keys),), heads=(6, 2), D=D, causal=False)
      for D in (80, 96) for rows, keys in ((1024, 1024), (2048, 2048), (2100, 700))),
    *(Case((shape,), heads=(4, 2), D=D, DV=DV) for D, DV in ((128, 64), (192, 192)) for shape in SHAPES[3::2]),
    Case(RAGGED, heads=(7, 1), D=80, form="ragged"),
    Case(RAGGED, heads=(2, 1), D=192, DV=192, form="ragged", causal=False),
    Case(RAGGED, heads=(2, 1), D=192, form="ragged"),
    *(Case(PAGED, heads=(6, 2), D=192, form="paged", page=page) for page in (16, 64)),
    Case(((300, 333), (640, 1024)), heads=(4, 2), D=192, form="paged", page=64, window=100, sinks=True),
    Case(PAGED, heads=(6, 2), D=96, form="paged", page=16, strided=True),
    Case(PAGED, heads=(4, 2), D=112, form="paged", page=64, window=100, sinks=True),
    *(Case(PAGED, heads=(6, 2), D=128, form="paged", page=page) for page in (16, 64, 128, 384)),
    *(Case(PAGED, heads=(6, 2), D=64, form="paged", page=page, causal=False, strided=True) for page in (16, 64)),
    Case(PAGED, heads=(2, 2), D=256, form="paged", page=32),
    Case(PAGED, heads=(4, 2), D=128, form="paged", strided=True, window=100),
    Case(((300, 333),), heads=(4, 2), D=128, window=(40, 7), causal=False, sinks=True),
    Case(((300, 333),), heads=(4, 2), D=64, window=129, sinks=True),
    Case(((300, 333),), heads=(4, 2), softcap=15.0, D=128),
    Case(((300, 333),), heads=(4, 2), softcap=60.0, D=128, causal=False),
    Case(((300, 333),), heads=(4, 2), softcap=50.0, D=64),
    Case(((200, 500), (9, 0), (100, 64)), heads=(4, 2), D=128, form="paged", sinks=True, softcap=30.0, window=64),
]
FP8 = [
    Case(((300, 333),) * 2, heads=(4, 2), D=128, dtype="fp8", scales="number"),
    Case(((640, 1024),), heads=(4, 2), D=128, dtype="fp8", scales="head", causal=False),
    Case(RAGGED, heads=(4, 2), D=128, dtype="fp8", scales="head", form="ragged", softcap=20.0),
    Case(((640, 1024),), heads=(4, 2), D=128, kv="fp8", scales="number", causal=False),
    Case(RAGGED, heads=(4, 2), D=128, dtype="fp16", kv="fp8", scales="head", form="ragged", softcap=20.0, window=100),
    *(Case(PAGED, heads=(6, 2), D=128, kv="fp8", scales="head", form="paged", page=page) for page in (16, 64)),
    *(Case(PAGED, heads=(6, 2), D=128, dtype="fp8", scales="number", form="paged", page=page) for page in (16, 64)),
]
GRID = [*SIZES, *(replace(case, dtype="fp16") for case in SIZES[:1] + SIZES[-10:]), *FP8, *ENDS]
GRID += [replace(ENDS[0], D=64, causal=False), replace(ENDS[2], D=256)]


@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(case: Case) -> None:
    x = case.build()
    assert_right(x, *x.call(device="cuda", return_lse=True, backend="hopper"))


WINDOWS = [
    Case(((30, 400), (150, 300), (4, 3000)), heads=(6, 2), form="paged", D=128, window=100),
    Case(((200, 500),) * 2, heads=(4, 2), D=64, window=33),
    Case(((3, 300), (140, 150), (70, 5)), heads=(2, 1), form="ragged", D=128, window=(40, 9), causal=False),
    Case(((1, 129), (300, 700)), heads=(2, 2), form="paged", page=64, D=256, window=1, sinks=True),
    Case(((30, 400),), heads=(2, 1), D=128, dtype="fp8", window=33),
]


@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_keys_before_every_window_are_not_multiplied(case: Case) -> None:
    """They hold NaN."""
    x = case.build()
    expected = x.call(device="cuda", return_lse=True, backend="hopper")
    assert_right(x, *expected)
    x.poison_before_window()
    found = x.call(device="cuda", return_lse=True, backend="hopper")
    assert [bits(t.cpu()) for t in found] == [bits(t.cpu()) for t in expected]


@pytest.mark.parametrize("window", range(1, 7))
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("form", ["ragged", "paged"])
def test_consumers_clean_both_ends_of_an_only_block_in_any_order(form: str, D: int, window: int) -> None:
    """Rows of V that no row sees hold NaN on both sides of those that are seen, within the same eight rows. Which
    consumer comes first differs from call to call: 200 calls of 1024 tiles.
    """
    x = Case(((1, 23),) * 64, heads=(16, 16), D=D, form=form, window=window).build()
    expected, _ = x.call(device="cuda", return_lse=True, backend="hopper")
    assert_accurate(x, expected.cpu())
    x.poison_before_window()
    arrays = on_device(x)
    differ = [(arrays.call(backend="hopper") != expected).any() for _ in range(200)]  # NaN differs from all
    assert not torch.stack(differ).any()


@pytest.mark.parametrize("case", [SIZES[5], *SIZES[-6:]], ids=str)
def test_the_emulator_gives_what_the_chip_gives(case: Case) -> None:
    """Both round P and the output to 16 bits; a tie may fall on either side. Softcap's tanh has 2^-11 on the chip."""
    x = case.build()
    ours = x.call(return_lse=True, backend="hopper")
    out, lse = (t.cpu().float().numpy() for t in x.call(device="cuda", return_lse=True, backend="hopper"))
    if case.softcap:
        assert_alike(ours, (out, lse), error=2.0**-5, lse_error=0.01)
    else:
        assert_alike(ours, (out, lse))


@pytest.mark.parametrize(
    ("form", "D", "DV"),
    [("dense", 128, 128), ("ragged", 128, 128), ("paged", 128, 128), ("dense", 64, 64), ("ragged", 192, 128),
     ("dense", 256, 256), ("dense", 80, 80), ("paged", 96, 96), ("ragged", 192, 192)],
)
def test_nothing_waits_repeats_and_writes_beside_out(form: str, D: int, DV: int) -> None:
    """Stores by TMA end with whole chunks of 16 bytes: those of a head do."""
    x = Case(((150, 200), (150, 200)), heads=(6, 2), D=D, DV=DV, form=form).build()
    buffer = torch.full((*x.q.shape[:-2], 8, DV + 64), 7, dtype=torch.bfloat16, device="cuda")
    out = buffer[..., 1:7, 16 : 16 + DV]
    x.call(device="cuda", out=out, backend="hopper")  # compiles
    assert_accurate(x, out.cpu())
    before = bits(out.cpu())
    arrays = on_device(x)
    with nothing_waits():
        arrays.call(out=out, backend="hopper")
    assert bits(out.cpu()) == before
    out[...] = 7
    assert bool((buffer == 7).all())


def test_nan_in_a_key_that_is_seen() -> None:
    """Law: NaN in a key is NaN in the rows that see it; they are no rows without keys."""
    q, k, v = (torch.randn(1, 200, 1, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    k[0, 150] = float("nan")
    out, lse = mha_prefill(q, k, v, causal=True, return_lse=True, backend="hopper")
    assert out[0, :, 0].isnan().all(-1).tolist() == lse[0, :, 0].isnan().tolist() == [False] * 150 + [True] * 50


def test_auto_takes_it_where_it_applies() -> None:
    q = torch.zeros((1, 300, 4, 128), dtype=torch.bfloat16, device="cuda")
    assert explain(mha_prefill, q, q, q).backend == "hopper"
    assert explain(mha_prefill, q.float(), q.float(), q.float()).backend == "triton"
    odd = torch.zeros((1, 300, 4, 132), dtype=torch.bfloat16, device="cuda")[..., 4:]
    assert "strides or the alignment of q" in explain(mha_prefill, odd, q, q).reason
    with pytest.raises(ValueError, match="backend is 'hopper' with scale 0"):
        mha_prefill(q, q, q, scale=0, backend="hopper")
