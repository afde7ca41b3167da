"""What bad arguments of MLA decode get: a ValueError naming argument, value and what is accepted, nothing written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from bad_arguments import Change, change, in_use
from mla_cases import Case

from kvlab.attention import explain, mla_decode, mla_decode_paged
from kvlab.cache import from_dense
from kvlab.common.arrays import to_torch
from kvlab.memory import float8_e4m3fn
from kvlab.triton_support.versions import holds_wgmma_rows

NAMES = ("q", "kv_cache", "block_table", "seq_lens")


def arguments() -> dict[str, Any]:
    """A good call: B 2, S 1, H 4, 128 + 64 columns, pages of 16, an out full of sevens."""
    x = Case((20, 17), dtype="fp32").build()
    return dict(zip(NAMES, x.arrays, strict=True)) | {"out": np.full(x.shape, 7, np.float32), **x.options}


CASES: dict[str, tuple[Change, str]] = {
    "q is a list": (change("q", lambda q: q.tolist()), "q is a list: must be a NumPy array or torch tensor"),
    "q of rank 2": (change("q", lambda q: q[0, 0]), r"q has shape .*: must be \[B, H, D\] or \[B, S, H, D\]"),
    "17 tokens": (change("q", lambda q: q.repeat(17, 1)), "q has 17 new tokens a sequence: must be 1 to 16"),
    "129 heads": (change("q", lambda q: q.repeat(33, 2)), "q has 132 heads: must be 1 to 128"),
    "float64": (change("q", lambda q: q.astype(np.float64)), "q has dtype float64: must be bfloat16, float16 or"),
    "other dtype": (
        change("kv_cache", lambda k: k.astype(np.float16)),
        "kv_cache has dtype float16: must be that of q",
    ),
    "rank 2": (change("kv_cache", lambda k: k[0]), r"kv_cache has shape .*: must be \[pages, page_size, D\] or"),
    "two heads": (change("kv_cache", lambda k: k[:, :, None].repeat(2, 2)), "kv_cache has 2 heads: must be 1"),
    "other columns": (
        change("kv_cache", lambda k: k[..., :160]),
        "kv_cache has rows of 160 float32: must be 192, or",
    ),
    "v_dim": (change("v_dim", lambda v: 100), "v_dim is 100: must be a multiple of 16 from 32 to 512"),
    "no rope": (change("v_dim", lambda v: 192), "leave 0 for rope: must be a multiple of 16 from 16 to 128"),
    "table": (change("block_table", lambda t: t[:1]), r"block_table has shape .*: must be \[B = 2, columns\]"),
    "lengths": (change("seq_lens", lambda n: n[:1]), r"seq_lens has shape \(1,\): must be \[B = 2\]"),
    "float lengths": (change("seq_lens", lambda n: n.astype("f4")), "seq_lens has dtype float32: must be a 32- or 64-"),
    "too long": (change("seq_lens", lambda n: n + 100), r"seq_lens\[0\] is 120: must be 0 to 64"),
    "no such page": (change("block_table", lambda t: in_use(t, 99)), r"block_table\[1, 0\] is 99: a page in use must"),
    "out's shape": (change("out", lambda o: o[..., :64]), r"out has shape .*: must be \(2, 1, 4, 128\)"),
    "out's dtype": (change("out", lambda o: o.astype("f2")), "out has dtype float16: must be that of q"),
    "q strided": (change("q", lambda q: q.repeat(2, 3)[..., ::2]), "q has strides .*: must be contiguous in the last"),
    "out repeats": (
        change("out", lambda o: np.lib.stride_tricks.as_strided(o, o.shape, (0, 0, 0, 4))),
        "out has strides .*: must be without elements that share memory",
    ),
    "scale": (change("scale", lambda s: np.nan), "scale is nan: must be finite"),
    "scale beyond float32": (change("scale", lambda s: 1e39), r"scale is 1e\+39: must be finite in float32"),
    "scale of text": (change("scale", lambda s: "0.1"), "scale is '0.1': must be finite in float32"),
    "no scale": (
        change("scale", lambda s: None),
        r"scale None with rows of 128 \+ 64 columns: must be given; only 512",
    ),
    "out in q": (lambda a: a.update(out=a["q"][..., :128]), "out shares memory with q: must be memory of its own"),
    "splits": (lambda a: a.update(num_splits=65), "num_splits is 65: must be an integer from 1 to 64"),
    "a float of splits": (lambda a: a.update(num_splits=2.0), r"num_splits is 2\.0: must be an integer from 1 to 64"),
    "mask": (lambda a: a.update(mask_value=np.inf), "mask_value is inf: must be less than infinity"),
    "no mask": (lambda a: a.update(mask_value=None), "mask_value is None: must be less than infinity"),
    "traffic": (lambda a: a.update(traffic=3), r"traffic is 3: must be a kvlab\.staging\.Traffic or None"),
    "arch": (lambda a: a.update(arch="gfx942"), "arch is 'gfx942': must be one of sm_80, sm_90, gfx950"),
    "gfx950 of fp32": (lambda a: a.update(arch="gfx950"), "float32 on gfx950: must be 128, 256 or 512 .* of 16 bits"),
    "layout": (lambda a: a.update(kv_layout="NDH"), "kv_layout is 'NDH': must be 'NHD' or 'HND'"),
    "a cache of fp8": (
        change("kv_cache", lambda k: k.astype(float8_e4m3fn)),
        "q has dtype float32 with a cache of float8_e4m3fn: must be bfloat16, float16 or float8_e4m3fn",
    ),
    "scales": (
        lambda a: a.update(
            k_scale=np.ones(3, np.float32),
            q=a["q"].astype("f2"),
            out=None,
            kv_cache=a["kv_cache"].astype(float8_e4m3fn),
        ),
        r"k_scale has shape \(3,\): must be a number",
    ),
    "uint8 without scales": (
        change("kv_cache", lambda k: np.zeros(k.shape, "u1")), "kv_cache has rows of 192 uint8: must be 192, or"
    ),
    "scales beside those of rows": (
        lambda a: a.update(k_scale=0.5, q=a["q"].astype("f2"), out=None, kv_cache=np.zeros((6, 16, 260), np.uint8)),
        "k_scale is given with rows of 260 bytes: must be None: they have their scales",
    ),
    "softcap": (lambda a: a.update(softcap=np.inf), "softcap is inf: must be a finite number"),
    "window": (lambda a: a.update(window=-1), "window is -1: must be at least 1"),
    "a mask of text": (lambda a: a.update(mask="causal"), "mask is 'causal': must be a"),
    "sinks": (lambda a: a.update(sinks=np.zeros(5, "f4")), r"sinks has shape \(5,\): must be \[Hq = 4\]"),
    "slopes": (lambda a: a.update(alibi_slopes=np.zeros(4)), "alibi_slopes has dtype float64: must be float32"),
    "backend": (lambda a: a.update(backend="cuda"), "backend is 'cuda': must be one of auto"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_arguments(case: str) -> None:
    good = arguments()
    out = good["out"]
    spoil, message = CASES[case]
    spoil(good)
    with pytest.raises(ValueError, match=message):
        mla_decode_paged(**good)
    assert (out == 7).all()
    with pytest.raises(ValueError, match=message):
        explain(mla_decode_paged, **good)


@pytest.mark.parametrize("page_stride, first", [(2001, 0), (2000, 1)])
def test_rows_whose_rope_part_is_at_odd_bytes(page_stride: int, first: int) -> None:
    """bfloat16 behind fp8: torch views no odd byte as the first of two."""
    cache = torch.zeros(4000).to(torch.float8_e4m3fn).as_strided((2, 3, 640), (page_stride, 640, 1), first)
    q, table, lens = torch.zeros(1, 4, 576, dtype=torch.bfloat16), torch.tensor([[0]]), torch.tensor([2])
    with pytest.raises(
        ValueError, match=r"kv_cache has rows \(20.., 640\) bytes apart, bfloat16 . past a multiple of 2"
    ):
        mla_decode_paged(q, cache, table, lens)


def test_explain_knows_no_other_arguments_than_the_call() -> None:
    with pytest.raises(TypeError, match="colour"):
        explain(mla_decode_paged, **arguments(), colour=3)


def test_gradients_mixed_libraries_and_caches_with_v() -> None:
    x = Case((20,), dtype="fp32").build()
    q, *others = x.torch()
    with pytest.raises(ValueError, match="q requires grad: must be detached"):
        mla_decode_paged(q.requires_grad_(), *others, **x.options)
    with pytest.raises(ValueError):
        mla_decode_paged(x.q, *others, **x.options)
    cache = from_dense(np.zeros((1, 1, 20, 1, 64), "f4"), np.zeros((1, 1, 20, 1, 64), "f4"), [20], page_size=16)
    with pytest.raises(ValueError, match="cache stores K and V"):
        mla_decode(np.zeros((1, 1, 64), "f4"), cache)
    with pytest.raises(ValueError, match="cache is a list"):
        mla_decode(x.q, [])


def test_rows_that_are_not_multiples_of_16_bytes_apart() -> None:
    """Cannot be emulated; the kernel and the reference take them."""
    x = Case((5,), dtype="fp16").build()
    wide = np.full((*x.kv.shape[:2], 193), np.nan, np.float16)
    wide[..., :192] = x.kv
    arrays = x.q, wide[..., :192], x.table, x.lens
    with pytest.raises(ValueError, match=r"kv_cache has strides of .*: must be multiples of 16"):
        mla_decode_paged(*arrays, **x.options)
    assert np.isfinite(mla_decode_paged(*arrays, backend="reference", **x.options)).all()


def test_explain_of_tensors() -> None:
    x = Case((20,), H=128, columns=(512, 64)).build()
    plan = explain(mla_decode_paged, *(to_torch(a) for a in x.arrays))
    rows = 64 if holds_wgmma_rows() else 32
    assert (plan.backend, plan.config.BM, plan.grid) == ("triton", rows, (128 // rows, 1))
    assert isinstance(x.torch()[0], torch.Tensor)
