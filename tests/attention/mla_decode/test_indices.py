"""MLA decode over lists of slots (``indices``), in all siblings, against the float64 reference of dense decode.

What no list names is NaN, in unused slots and pages.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from caught import SHARED, Caught, as_launched, as_tensors
from hopper_launches import listed_arguments
from listed_cases import Listed
from mla_cases import FULL, Case
from simulated import simulating
from yardsticks import assert_accurate, bits

from kvlab.attention import mla_decode, mla_decode_paged
from kvlab.attention.mla_decode import hopper_config, kernel
from kvlab.attention.mla_decode.config import MLADecodeProblem
from kvlab.cache import PagedKVCache, PagedKVCacheCollection
from kvlab.common.arrays import to_numpy, to_torch
from kvlab.hardware import TMAGather4Tile
from kvlab.memory import float8_e4m3fn
from kvlab.staging import Hazard, Traffic
from kvlab.staging.nvidia.gather4_cta import Gather4CTA
from kvlab.triton_support.versions import gluon_lacks, installed

ON = {
    "few heads": (Case((90, 70, 40), H=5, page=5, splits=2), 150, ("sm_80", "sm_90", "sm_100", "gfx950")),
    "64 rows": (Case((90, 70, 40), H=40, columns=FULL, page=64, sinks=True, storage="layers"), 100, ("sm_90",)),
    "float32": (Case((40, 33), H=3, dtype="fp32", softcap=4.0, temperature=True, splits=3), 70, ("sm_80",)),
    "scaled": (Case((90, 70), H=3, row="scaled", columns=FULL, sinks=True), 40, ("sm_90",)),
    "rope-aware": (Case((90, 70), H=3, row="rope-aware", k_scale="token", dtype="fp16"), 40, ("sm_90",)),
}


@pytest.mark.parametrize("name, arch", [(name, arch) for name in ON for arch in ON[name][2]])
def test_the_emulator(name: str, arch: Any) -> None:
    case, topk, _ = ON[name]
    listed = Listed(case, topk)
    x, options = listed.x, {"num_splits": case.splits, "return_lse": True, "arch": arch, **listed.x.options}
    out, lse = mla_decode_paged(listed.q, x.kv, indices=listed.indices, **options)
    assert_accurate(listed.dense, out[:, None], lse[:, None])


HOPPER = [
    (Case((90, 70, 40), H=5, columns=FULL, page=5, splits=2), 150),
    (Case((90, 70, 40), H=80, columns=FULL, page=64, splits=1, storage="layers"), 200),
    (Case((90, 70), H=64, S=2, columns=FULL, page=48, dtype="fp16"), 63),
    (Case((90, 70, 40), H=80, columns=FULL, page=5, splits=2, row="scaled"), 150),
    (Case((90, 70), H=16, S=2, columns=FULL, page=64, row="scaled", storage="wide"), 63),
]


@pytest.mark.parametrize("case, topk", HOPPER, ids=str)
def test_the_emulator_of_hopper(case: Case, topk: int) -> None:
    """And arithmetic: only rows that are named come, once for each tile of 64 heads, beside Q. Latents with scales pass
    through registers.
    """
    listed, traffic = Listed(case, topk), Traffic()
    x, options = listed.x, {"num_splits": case.splits or 1, "return_lse": True, "backend": "hopper", **listed.x.options}
    out, lse = mla_decode_paged(listed.q, x.kv, indices=listed.indices, traffic=traffic, **options)
    assert_accurate(listed.dense, out[:, None], lse[:, None])
    tiles, items = -(-case.H // 64), len(listed.q) * -(-case.H // 64) * (case.splits or 1)
    named, scaled = tiles * int((listed.indices >= 0).sum()), case.row == "scaled"
    assert traffic.moved["DRAM->SMEM"] == named * (128 if scaled else 1152) + 64 * items * 1152
    if (case.splits or 1) == 1:  # nothing is merged
        assert traffic.moved.get("DRAM->registers", 0) == named * 528 * scaled


def test_the_reference() -> None:
    """Rests on the reference of dense decode, to float32's rounding."""
    listed = Listed(Case((20, 30), H=2, dtype="fp32"), 25)
    out, lse = mla_decode_paged(
        listed.q, listed.x.kv, indices=listed.indices, backend="reference", return_lse=True, **listed.x.options
    )
    exact, exact_lse = listed.dense.exact()
    np.testing.assert_array_equal(out, exact[:, 0].astype(np.float32))
    np.testing.assert_array_equal(lse, exact_lse[:, 0].astype(np.float32))


def test_rows_come_by_the_descriptors_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rests on ``kvlab.cache``: its gather4 tile, and the row that it has for each slot; on arithmetic: bytes of the
    slots that are named, and nine boxes of four rows.
    """
    found: list[tuple[Any, Any]] = []
    copy = TMAGather4Tile.async_copy_gather4_tile
    monkeypatch.setattr(
        TMAGather4Tile, "async_copy_gather4_tile", lambda self, *at: (found.append((self, at[2])), copy(self, *at))
    )
    case = Case((90, 70, 40), H=20, columns=FULL, page=64, dtype="fp16", storage="layers")
    listed, traffic = Listed(case, 64), Traffic()
    x = listed.x
    kv = np.ascontiguousarray(x.kv)
    out, lse = mla_decode_paged(
        listed.q, kv, indices=listed.indices, arch="sm_100", num_splits=1, return_lse=True, traffic=traffic, **x.options
    )
    assert_accurate(listed.dense, out[:, None], lse[:, None])
    cache = PagedKVCache(kv[:, :, None], [0], [[0]], max_seq_length=1, max_cache_length=1)
    tile = cache.create_gather4_tma_tile(tile_height=32, tile_width=576, swizzle_mode="128B")
    rows = np.concatenate([each for _, each in found], 1)[:, :64]
    named = listed.indices >= 0
    assert {(t.descriptor.shape, t.descriptor.strides, t.descriptor.box, t.tile_height) for t, _ in found} == {
        (tile.descriptor.shape, tile.descriptor.strides, tile.descriptor.box, tile.tile_height)
    }
    assert (rows[named] == cache.get_tma_row(listed.indices[named])).all()
    assert (rows[~named] >= cache.storage.num_rows).all()
    assert traffic.moved["DRAM->SMEM"] == (int(named.sum()) + 3 * 20) * 576 * 2  # K's rows and Q's
    assert traffic.instructions["k gather4"] == int(named.reshape(3, 2, 32).any(2).sum()) * 9 * 32 // 4


def test_a_missing_wait_for_a_gather_is_a_hazard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gather4CTA, "_wait", lambda self, stage: None)
    listed = Listed(Case((90,), H=5), 40)
    with pytest.raises(Hazard, match="of what k copy by warp 0, stage 0, still brings; missing: a wait for k full"):
        mla_decode_paged(listed.q, listed.x.kv, indices=listed.indices, arch="sm_100", **listed.x.options)


@pytest.mark.interpreter
@pytest.mark.parametrize("row, dtype", [("plain", "bf16"), ("rope-aware", "fp16")])
def test_the_kernel_reads_no_slot_that_there_is_not(row: str, dtype: str) -> None:
    """Integers of 64 bits that are neither -1 nor a slot, where values are not looked at, name none."""
    k_scale = "token" if row != "plain" else ""
    listed = Listed(Case((60, 20, 9), H=3, row=row, dtype=dtype, k_scale=k_scale, sinks=True), 75)
    x, slots = listed.x, listed.x.rows.shape[0] * 16
    wide = np.repeat(listed.indices.astype(np.int64), 2, 0)[::2]
    wide[0, wide[0] < 0] = slots
    wide[2, wide[2] < 0] = [(-1) ** i * (1 << 40) for i in range(int((wide[2] < 0).sum()))]
    q, kv, indices = map(to_torch, (listed.q, x.kv, wide))
    out, lse = mla_decode_paged(q, kv, indices=indices, num_splits=2, check=False, return_lse=True, **x.options_on())
    assert_accurate(listed.dense, out[:, None], lse[:, None])


def test_all_slots_in_turn_are_a_dense_decode() -> None:
    """Law: a list of a sequence's slots, in the order of its keys, gives the same bits as its pages; so do tokens of
    q with four axes, and the layer of a collection.
    """
    x = Case((70, 70), H=4, page=16).build()
    key = np.arange(70)
    indices = np.ascontiguousarray(x.table[:, key // 16].astype(np.int64) * 16 + key % 16)
    expected = bits(mla_decode_paged(*x.arrays, num_splits=1, **x.options))
    options = {"indices": indices[:, None], "num_splits": 1, **x.options}
    assert bits(mla_decode_paged(x.q, x.kv, **options)) == expected
    assert bits(mla_decode_paged(x.q.swapaxes(0, 1), x.kv, **options | {"indices": indices[None]})) == expected
    blocks = np.ascontiguousarray(x.kv)[:, None, None, :, None]
    cache = PagedKVCacheCollection(blocks, [69, 69], x.table, max_seq_length=1, max_cache_length=70)
    assert bits(mla_decode(x.q, cache, **options)) == expected


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "past the pool": ({"indices": [[0, 48]]}, r"indices\[0, 1\] is 48: must be a slot, 0 to 47, or -1 for none"),
    "below -1": ({"indices": [[-2, 0]]}, r"indices\[0, 0\] is -2: must be a slot"),
    "other rows": ({"indices": [[0], [1]]}, r"indices has shape \(2, 1\): must be \(1, 'topk'\)"),
    "other axes": ({"indices": [0]}, r"indices has shape \(1,\): must be \(1, 'topk'\)"),
    "floats": ({"indices": [[0.0]]}, "indices has dtype float64: must be a 32- or 64-bit integer"),
    "a window": ({"window": 3}, "window is 3 beside indices: must be None: slots have no positions"),
    "slopes": ({"alibi_slopes": 1}, "alibi_slopes is 1 beside indices: must be None"),
    "no lists on sm_100": ({"arch": "sm_100", "indices": None}, "block_table is a NoneType"),
    "hopper": ({"backend": "hopper", "softcap": 5.0}, "backend is 'hopper' with softcap: must be"),
    "no list and no table": ({"indices": None}, "block_table is a NoneType: must be a NumPy array or torch tensor"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_arguments(name: str) -> None:
    changes, message = ERRORS[name]
    q, kv = np.ones((1, 2, 576), np.float16), np.ones((3, 16, 576), np.float16)
    out = np.full((1, 2, 512), 7, np.float16)
    indices = changes.get("indices", [[0, 1]])
    arguments = {**changes, "indices": indices if indices is None else np.array(indices)}
    with pytest.raises(ValueError, match=message):
        mla_decode_paged(q, kv, out=out, **arguments)
    assert (out == 7).all()


def test_scales_of_sequences_are_those_of_their_tokens() -> None:
    """Law: each sequence alone, with its numbers, has the same values."""
    rng = np.random.default_rng(4)
    shapes = (2, 3, 2, 80), (3, 8, 80)
    q, kv = (rng.standard_normal(shape).astype(np.float32).astype(float8_e4m3fn) for shape in shapes)
    slots = rng.integers(0, 24, (2, 3, 9))
    scales = {"q_scale": np.array([[0.5], [3]], np.float32), "k_scale": np.array([[2], [0.25]], np.float32)}
    named: dict[str, Any] = {"v_dim": 64, "scale": 0.2, "backend": "reference"}
    alone = [
        mla_decode_paged(q[b : b + 1], kv, indices=slots[b : b + 1], **named, **{n: x[b, 0] for n, x in scales.items()})
        for b in (0, 1)
    ]
    found = mla_decode_paged(q, kv, indices=slots, **named, **scales)
    assert bits(found) == bits(np.concatenate(alone))
    tensors = {n: to_torch(x) for n, x in scales.items()}
    for _ in range(2):  # the second call is of the first one's kind
        again = mla_decode_paged(to_torch(q), to_torch(kv), indices=to_torch(slots), **named, **tensors)
        assert bits(to_numpy(again)) == bits(found)


def test_rows_that_gather4_does_not_take() -> None:
    q, kv = np.ones((1, 2, 576), np.float16), np.ones((3, 16, 584), np.float16)[..., :576]
    options: dict[str, Any] = {"arch": "sm_100", "scale": 1.0, "indices": np.zeros((1, 5), np.int32)}
    with pytest.raises(ValueError, match=r"480 \+ 96 columns of float16 on sm_100: must be 128, 256 or 512 \+ 64 or"):
        mla_decode_paged(q, kv, v_dim=480, **options)
    with pytest.raises(ValueError, match=r"kv_cache has strides .* on sm_100: must be rows of gather4, 576 elements"):
        mla_decode_paged(q, kv, **options)


def test_tokens_that_do_not_follow_one_another() -> None:
    q = np.ones((4, 3, 2, 576), np.float16)[:2, :2]
    with pytest.raises(ValueError, match=r"q has strides .* beside indices: must be such that token follows token"):
        mla_decode_paged(q, np.ones((3, 16, 576), np.float16), indices=np.zeros((2, 2, 5), np.int32))


@pytest.mark.compile
@pytest.mark.skipif(gluon_lacks() is not None, reason="a release of Triton for which it is not chosen")
@pytest.mark.parametrize("row", ["plain", "scaled"])
def test_the_compiled_kernel_of_hopper_attends(row: str) -> None:
    """Its PTX, run without a GPU, by two programs that take item after item: lists of no multiple of 64, the same slot
    again and again, slots at the ends of pages and the last of the pool, integers of 64 bits that name none, a token
    that sees nothing. No two warps race. Rests on float64.
    """
    from kvlab.attention.merge_states import kernel as merge_kernel
    from kvlab.attention.mla_decode import hopper

    listed = Listed(Case((90, 70, 33, 20), H=5, columns=FULL, page=16, splits=2, row=row), 130)
    x, slots = listed.x, len(listed.x.rows) * 16
    for slot in (0, 15, 16, slots - 16, slots - 1):
        rng, at = np.random.default_rng(slot), (slot // 16, slot % 16)
        for window in x.windows if x.row_scales is None else (*x.windows, x.row_scales):
            window[at] = rng.standard_normal(window.shape[2]).astype(window.dtype)
    listed.indices[0] = slots - 1
    listed.indices[1, -5:] = 0, 15, 16, slots - 16, slots - 1
    indices, absent = listed.indices.astype(np.int64), listed.indices < 0
    indices[absent] = np.resize([-1, slots, 1 << 40, -(1 << 40)], int(absent.sum()))
    problem = MLADecodeProblem.of(listed.q[:, None], *x.windows, indices, None, x.row_scales)
    config = replace(hopper_config.choose_hopper(problem, num_splits=2), programs=2)
    rows = x.rows if x.row_scales is None else x.rows.view(x.windows[0].dtype)
    arrays = [to_torch(a) for a in (listed.q[:, None], rows, x.windows[1], indices)]
    out = torch.full((4, 1, 5, 512), float("nan"), dtype=arrays[0].dtype)
    with simulating((hopper, "attend"), (merge_kernel, "merge"), races=True):
        made = hopper.launch(*arrays, None, scale=x.scale, features=x.features, config=config, out=out)
    assert_accurate(listed.dense, *made)


@pytest.mark.compile
@pytest.mark.skipif(gluon_lacks() is not None, reason="a release of Triton for which it is not chosen")
@pytest.mark.parametrize("H", [16, 128])
@pytest.mark.parametrize("row", ["plain", "scaled"])
def test_compiled_for_hopper(row: str, H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rests on the compiler's counts: nine boxes of Q come by TMA, rows by 64 x 72 copies of 16 bytes of 128 threads;
    the producer puts two pairs of registers aside, four in Triton 3.6. Of rows with scales 64 x 8 are copies, 64 x 32
    loads of 16 bytes by two producers; latents become float16 two by two. In each of their loops a warp waits for what
    it put aside up to six times: that takes as long as a load.
    """
    from kvlab.attention.mla_decode import hopper

    arrays, named = listed_arguments(Case((50,), H=H, columns=FULL, page=64, row=row), 64)
    monkeypatch.setattr(hopper, "attend", caught := Caught(hopper.attend))
    monkeypatch.setattr(hopper, "merge", lambda *_, **__: None)
    hopper.launch(*map(as_tensors, arrays), **{name: as_tensors(a) for name, a in named.items()})
    made = as_launched(caught.fn, caught.arguments, "sm_90")
    assert made.instructions["UTMALDG"] == 9
    scaled = row == "scaled"
    assert made.instructions["LDGSTS"] == 64 * (8 if scaled else 72) // 128
    assert len(re.findall("ARRIVES.LDGSTSBAR", made.sass)) == 2 - scaled
    assert made.sass.count("LDG.E.128") == 64 * 32 // 128 * scaled
    assert made.sass.count("F2FP.F16.E4M3.UNPACK_B") == 64 * 512 // 2 // 128 * scaled
    assert made.spills <= (264 if scaled else 32 if str(installed()).startswith("3.6") else 16)
    loops = re.findall(r"LDG\.E\.128.*?ARRIVE.*?BRA", made.sass, re.DOTALL)
    assert [one.count("LDG.E.128") for one in loops] == [8, 8] * scaled
    assert all(len(re.findall(r"\bLDL\b", one)) <= 6 for one in loops)
    assert made.shared <= hopper_config.shared_bytes(named["config"].constants) <= SHARED["sm_90"]


@pytest.mark.compile
@pytest.mark.parametrize("H, target", [(16, "sm_90"), (128, "sm_90"), (128, "gfx950")])
def test_compiled(H: int, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rests on the compiler's counts: nothing spills, K comes by cp.async and fits beside Q."""
    from kvlab.attention.mla_decode.config import choose_config
    from kvlab.triton_support.versions import holds_wgmma_rows

    listed = Listed(Case((50,), H=H, columns=FULL, page=64), 64)
    x = listed.x
    tensors = [to_torch(a) for a in (listed.q[:, None], *x.windows, listed.indices)]
    problem = MLADecodeProblem.of(*tensors, None)
    config = choose_config(problem, arch=target, num_splits=1, wgmma=holds_wgmma_rows())
    caught = Caught(kernel.attend)
    monkeypatch.setattr(kernel, "attend", caught)
    kernel.launch(*tensors, None, config=config, features=x.features, scale=x.scale)
    made = as_launched(caught.fn, caught.arguments, target)
    assert made.spills == 0
    assert made.shared <= SHARED[target]
    assert not config.one_page
    if target.startswith("sm"):
        assert made.instructions["LDGSTS"] > 0, "cp.async"
