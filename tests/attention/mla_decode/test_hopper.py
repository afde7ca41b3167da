"""Hopper's MLA decode kernel where there is no GPU: what the compiler makes of it, its emulator, when it is chosen."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from caught import SHARED, Caught, as_if_on, as_launched
from hopper_launches import mla_arguments, stored_by_tma
from mla_cases import FULL, Case, EvenKeys
from seeded_faults import HOPPER, is_found
from simulated import simulating
from yardsticks import assert_accurate, bits

from kvlab.attention import explain, mla_decode_paged
from kvlab.attention.masks import CausalPaddingMask, ChunkedMask
from kvlab.attention.mla_decode import hopper_emulator
from kvlab.attention.mla_decode.hopper_config import HopperMLAConfig, shared_bytes
from kvlab.common.arrays import to_torch
from kvlab.staging import Traffic
from kvlab.triton_support.compile import Compiled
from kvlab.triton_support.sass import unwritten
from kvlab.triton_support.versions import gluon_lacks

CASES = [
    Case((200, 0, 65), H=128, columns=FULL, page=64, splits=1),
    Case((193, 2, 63), H=16, S=4, columns=FULL, page=16, splits=1, storage="wide"),
    Case((300, 1), H=63, S=2, columns=FULL, page=128, splits=3, dtype="fp16"),
    Case((129,), H=5, S=16, columns=FULL, page=32, splits=2, storage="layers"),
    Case((66,), H=80, columns=FULL, page=192, storage="head"),
    Case((1, 0, 0, 1), H=16, columns=FULL, page=64, splits=2),
    Case((200, 0, 65), H=80, columns=FULL, page=48, row="scaled", splits=1),
    Case((193, 2, 63), H=16, S=4, columns=FULL, page=5, row="scaled", storage="wide", splits=2),
]



@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_emulator_is_accurate(case: Case) -> None:
    """Against the float64 reference. All that must not be read is NaN, as ``out`` is, and shared memory is poisoned."""
    x = case.build()
    options = x.options | {"num_splits": case.splits, "out": np.full_like(x.q[..., : FULL[0]], np.nan)}
    out, lse = mla_decode_paged(*x.arrays, return_lse=True, backend="hopper", **options)
    assert_accurate(x, out, lse)


@pytest.mark.parametrize("splits", [1, 2])
def test_nan_in_a_key_that_is_seen(splits: int) -> None:
    """Law: NaN in a latent that a row sees is NaN in that row, with any number of splits; it is no row without keys."""
    x = Case((140, 20), H=2, columns=(512, 64), page=64).build()
    x.kv[x.table[0, 0], 3, 0] = np.nan
    out, lse = mla_decode_paged(*x.arrays, num_splits=splits, return_lse=True, backend="hopper", **x.options)
    assert np.isnan(out.astype(np.float32)).all((1, 2, 3)).tolist() == [True, False]
    assert np.isnan(lse).all((1, 2)).tolist() == [True, False]


def test_bytes_of_an_item() -> None:
    """Rests on arithmetic: 64 rows of Q and two blocks of 64 keys come once; Q K^T takes both, P V the keys' 512 latent
    columns, in halves, and P once more.
    """
    traffic, x = Traffic(), Case((128,), H=64, columns=FULL, page=64).build()
    mla_decode_paged(*x.arrays, backend="hopper", num_splits=1, traffic=traffic, **x.options)
    row, p = 576 * 2, 64 * 64 * 2
    assert traffic.moved["DRAM->SMEM"] == (64 + 128) * row
    assert traffic.moved["SMEM->tensor cores"] == 2 * ((64 + 64) * row + 64 * 512 * 2 + p)


@pytest.mark.parametrize("programs", [1, 3])
def test_which_program_takes_an_item_changes_nothing(programs: int) -> None:
    arrays, named = mla_arguments(Case((330, 70), H=80, columns=FULL, page=64, splits=2))
    config = named.pop("config")
    assert config.items == config.programs == 8
    before = tuple(map(bits, hopper_emulator.launch(*arrays, **named, config=config)))
    other = dataclasses.replace(config, programs=programs)
    assert tuple(map(bits, hopper_emulator.launch(*arrays, **named, config=other))) == before


@pytest.mark.parametrize(
    "side, before, after",
    [
        ("kernel", "            #: send    P and alpha", "            #: sends    P and alpha"),
        ("emulator", "for i in range(blocks - 1):", "for i in range(blocks):"),
        ("emulator", "            #: load_right -> it ", "            #: load_right -> b "),
    ],
)
def test_a_seeded_fault_is_found(side: str, before: str, after: str) -> None:
    """The static check of the twins; that they are twins, test_mirror checks."""
    assert is_found("mla_decode", "produce,produce_half,lead,follow", side, before, after, HOPPER)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("H", "S"), [(40, 1), (16, 3), (100, 2)])
def test_nothing_is_written_beside_out(monkeypatch: pytest.MonkeyPatch, H: int, S: int, splits: int) -> None:
    """A store by TMA overwrites what stands behind a row, up to a multiple of 16 bytes (measured on an H100): every
    tensor that is stored to ends with one, and no byte beside ``out`` changes.
    """
    stored = stored_by_tma(monkeypatch)
    x = Case((130, 0, 17), H=H, S=S, columns=FULL, page=64, splits=splits).build()
    buffer = np.full((5, S + 2, H + 2, FULL[0] + 24), 7, x.q.dtype)
    out = buffer[1:4, 1 : S + 1, 1 : H + 1, 8 : 8 + FULL[0]]
    out[...] = np.nan
    result = mla_decode_paged(*x.arrays, backend="hopper", num_splits=splits, out=out, **x.options)
    assert result is out
    assert_accurate(x, out)
    out[...] = 7
    assert (buffer == 7).all()
    assert stored
    assert all(d.shape[-1] == d.stored_extent for d in stored)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"row": "scaled", "dtype": "fp16"}, "q of dtype float16 and a cache of float8_e4m3fn"),
        ({"dtype": "fp32"}, "q of dtype float32"),
        ({"row": "rope-aware", "k_scale": "number"}, "q of dtype bfloat16 and a cache of float8_e4m3fn"),
        ({"columns": (256, 64)}, r"256 \+ 64 columns"),
        ({"window": 20}, "a mask other than the causal one"),
        ({"mask": ChunkedMask(8)}, "a mask other than the causal one"),
        ({"mask": CausalPaddingMask(np.array([3]))}, "a mask other than the causal one"),
        ({"mask": EvenKeys(), "window": 1 << 31}, "a mask other than the causal one"),
        ({"softcap": 5.0}, "softcap"),
        ({"sinks": True}, "sinks"),
        ({"slopes": True}, "alibi_slopes"),
        ({"page": 48}, "page size 48"),
        ({"page": 8}, "page size 8"),
        ({"lens": ()}, "no sequences"),
    ],
)
def test_hopper_says_what_it_supports(changes: dict[str, Any], message: str) -> None:
    x = Case(**{"lens": (5,), "columns": FULL, **changes}).build()
    with pytest.raises(ValueError, match=f"backend is 'hopper' with {message}.*: must be bf16 or fp16 with a cache"):
        mla_decode_paged(*x.arrays, backend="hopper", **x.options)


def test_numbers_and_strides_that_it_does_not_take() -> None:
    x = Case((5,), columns=FULL).build()
    with pytest.raises(ValueError, match=r"scale -0\.5: must be"):
        mla_decode_paged(*x.arrays, backend="hopper", **x.options | {"scale": -0.5})
    kv = np.zeros((*x.kv.shape[:2], 580), x.kv.dtype)[..., 4:]
    with pytest.raises(ValueError, match="the strides or the alignment of kv_cache: must be"):
        mla_decode_paged(x.q, kv, x.table, x.lens, backend="hopper", **x.options)
    q = np.zeros((*x.q.shape[:-1], 580), x.q.dtype)[..., 4:]
    with pytest.raises(ValueError, match="the strides or the alignment of q: must be"):
        mla_decode_paged(q, x.kv, x.table, x.lens, backend="hopper", **x.options)
    out = np.zeros((*x.q.shape[:-1], 516), x.q.dtype)[..., 4:]
    with pytest.raises(ValueError, match="the strides or the alignment of out: must be"):
        mla_decode_paged(*x.arrays, backend="hopper", out=out, **x.options)
    with pytest.raises(ValueError, match="num_splits is 65: must be an integer from 1 to 64"):
        mla_decode_paged(*x.arrays, backend="hopper", num_splits=65, **x.options)


@pytest.mark.parametrize(
    "arch, changes, backend, reason",
    [
        ("sm_90", {}, "hopper", "torch tensors on sm_90"),
        ("sm_90", {"row": "scaled"}, "hopper", "torch tensors on sm_90"),
        ("sm_100", {}, "triton", "not the Hopper kernel: a GPU of sm_100"),
        ("sm_90", {"sinks": True}, "triton", "not the Hopper kernel: sinks"),
    ],
)
def test_when_auto_takes_it(
    monkeypatch: pytest.MonkeyPatch, arch: str, changes: dict[str, Any], backend: str, reason: str
) -> None:
    as_if_on(monkeypatch, arch)
    x = Case((300,), H=128, columns=FULL, page=64, **changes).build()
    found = explain(mla_decode_paged, *x.torch(), **x.options_on())
    assert found.backend == backend
    assert reason in found.reason


def test_the_grid_does_not_depend_on_lengths_and_splits_are_those_asked_for() -> None:
    x = Case((300, 4096), H=128, columns=FULL, page=64).build()
    short = x.with_(lens=np.array([1, 0], np.int32))

    def plan(x: Any, **options: Any) -> HopperMLAConfig:
        found: HopperMLAConfig = explain(mla_decode_paged, *x.arrays, backend="hopper", **x.options, **options).config
        return found

    assert plan(x) == plan(short)
    assert plan(x, num_splits=5).num_splits == 5
    assert plan(x, batch_invariant=True).num_splits == 2


MATRIX = [
    Case((70,), H=128, columns=FULL, page=64),
    Case((70,), H=16, S=4, columns=FULL, page=128, splits=2),
    Case((70,), H=63, S=2, columns=FULL, page=16, dtype="fp16"),
    Case((70,), H=128, columns=FULL, page=32, splits=2),
    Case((70,), H=16, columns=FULL, page=64),
]


def compiled(case: Case) -> Compiled:
    """The kernel as a call compiles it."""
    from kvlab.attention.mla_decode import hopper

    arrays, named = mla_arguments(case)
    with pytest.MonkeyPatch.context() as patch:
        caught = Caught(hopper.attend)
        patch.setattr(hopper, "attend", caught)
        patch.setattr(hopper, "merge", lambda *_, **__: None)
        q, *windows = (to_torch(a) for a in arrays)
        hopper.launch(q, *windows, **named)
    return as_launched(caught.fn, caught.arguments, "sm_90")


@pytest.mark.compile
@pytest.mark.skipif(gluon_lacks() is not None, reason="a release of Triton for which it is not chosen")
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_compiled(case: Case) -> None:
    """No spills, shared memory that a CTA has, and wgmma that runs beside other work: where the compiler had to wait
    for each product there would be an arrival and a wait for every HGMMA.
    """
    made = compiled(case)
    count, box = made.instructions, min(case.page, 64)
    assert made.spills == 0
    assert made.stack == 0
    assert made.shared <= shared_bytes(mla_arguments(case)[1]["config"].constants) <= SHARED["sm_90"]
    assert made.num_warps == 12
    shapes = re.findall(r"HGMMA\.(\d+x\d+x\d+)", made.sass)
    assert shapes.count("64x64x16") == 2 * (576 // 16)  # Q K^T before the loop and in it
    assert shapes.count("64x256x16") == 4 * (64 // 16)  # P V of two halves, in the loops and behind them
    config = mla_arguments(case)[1]["config"]
    late = config.constants.LATE
    assert count["UBLKPF"] == late == (case.H * case.S > 32 and case.page >= 64)
    assert count["HGMMA"] == len(shapes)
    assert count["WARPGROUP"] <= 18
    assert count["UTMALDG"] == 9 + 9 * (64 // box)
    boxed = config.constants.BOXED
    assert count["STSM"] == 2 * 4 + (2 * 16 if boxed and config.num_splits == 1 else 0)  # P, and O of 16 bits
    assert boxed == (case.H * case.S > 32)
    assert count["UTMASTG"] == 2 * boxed  # O, half by half
    assert count["STG"] == 2 + (0 if boxed else 2 * 64)  # lse of 8 + 8 rows; O, 2 of 8 columns at a time
    assert_every_role_is_checked(made)


@pytest.mark.compile
@pytest.mark.skipif(gluon_lacks() is not None, reason="a release of Triton for which it is not chosen")
def test_the_compiled_kernel_attends_to_rows_with_scales() -> None:
    """Its PTX, run without a GPU: keys that end in a page and in a block, in pages of any size. No two warps race.
    Rests on float64.
    """
    from kvlab.attention.mla_decode import hopper

    case = Case((130, 0), H=3, S=2, columns=FULL, page=48, row="scaled", splits=1)
    x, ((q, kv, *others), named) = case.build(), mla_arguments(case)
    tensors = [to_torch(a) for a in (q, x.rows.view(kv.dtype), *others)]
    out = torch.full((2, 2, 3, 512), float("nan"), dtype=tensors[0].dtype)
    with simulating((hopper, "attend"), races=True):
        made = hopper.launch(*tensors, **named | {"row_scales": None, "out": out})
    assert_accurate(x, *made)


def assert_every_role_is_checked(made: Compiled) -> None:
    """Rests on the jump table of the binary: a register that nothing has written is found in every role, each of which
    begins where the table says.
    """
    ((branch, roles),) = made.jump_tables.items()
    assert len(roles) >= 3, "producer, follower, the end"
    faulty = made.sass
    for at in roles:
        faulty, n = re.subn(rf"(/\*{at:04x}\*/\s+).*? ;", r"\1STS [UR62+0x10], R7 ;", faulty)
        assert n == 1
    assert sum(found.startswith("STS [UR62") for found in unwritten(faulty, made.jump_tables)) == len(roles)
    with pytest.raises(ValueError, match=f"at {branch:#x}: must be among the branches of tables"):
        unwritten(faulty)
