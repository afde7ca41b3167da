"""Cases that went wrong elsewhere (tests/data/attention_cases_decode.json), on the emulator and the interpreted kernel.

The parameters come from the file, which names the basis of each. High page numbers are in test_memory_untouched, graph
replay and the large pools in tests/gpu.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from decode_cases import Case
from yardsticks import HUGE, assert_accurate, bits

from kvlab.attention import mha_decode_paged
from kvlab.attention.machines import ARCHS

FILE = Path(__file__).parents[2] / "data" / "attention_cases_decode.json"
INPUT = {case["id"]: case["input"] for case in json.loads(FILE.read_text())["cases"]}

kernel = pytest.param({"backend": "triton"}, id="triton", marks=pytest.mark.interpreter)
emulated = [pytest.param({"arch": arch}, id=arch) for arch in ARCHS]
every_backend = pytest.mark.parametrize("backend", [*emulated, kernel])
on_nvidia = pytest.mark.parametrize("backend", emulated[:2])


@every_backend
def test_nan_tail_of_last_page(backend: dict[str, str]) -> None:
    given = INPUT["nan-tail-of-last-page"]
    x = Case((given["seq_len"],), heads=(2, 1), page=given["page_size"]).build()
    tail = x.table[0, 1], slice(1, None)
    assert np.isnan(x.k[tail].astype(np.float32)).all()
    assert np.isnan(x.v[tail].astype(np.float32)).all()
    assert_accurate(x, mha_decode_paged(*x.arrays, **backend))


@every_backend
def test_page_table_one_page_too_many(backend: dict[str, str]) -> None:
    """The third page is a real one, of large values: the length decides."""
    given = INPUT["page-table-one-page-too-many"]
    x = Case((given["seq_len"],), heads=(2, 1), page=given["page_size"]).build()
    x.table[0, 2] = next(page for page in range(len(x.k)) if page not in x.table[0, :2])
    x.k[x.table[0, 2]], x.v[x.table[0, 2]] = 100, 100
    assert_accurate(x, mha_decode_paged(*x.arrays, **backend))


@every_backend
@pytest.mark.parametrize("name", ["split-kv-empty-splits", "more-splits-than-tiles"])
def test_empty_splits(name: str, backend: dict[str, str]) -> None:
    given = INPUT[name]
    lens = given["context"][:2] if "backend" in backend else given["context"]
    x = Case(tuple(lens), heads=(1, 1), dtype="fp32").build()
    out, lse = mha_decode_paged(*x.arrays, num_splits=given["num_splits"], return_lse=True, **backend)
    assert_accurate(x, out, lse)
    whole = mha_decode_paged(*x.arrays, num_splits=1, **backend)
    np.testing.assert_allclose(out, whole, rtol=0, atol=1e-6)


@every_backend
@pytest.mark.parametrize("queries, keys", INPUT["causal-mask-alignment"]["shapes"])
def test_causal_mask_alignment(queries: int, keys: int, backend: dict[str, str]) -> None:
    """What a query sees, read out by values that are one-hot in the key: bottom-right aligned. Decode takes up to 4."""
    queries = min(queries, 4)
    x = Case((keys,), heads=(1, 1), S=queries, D=64, dtype="fp32").build()
    at = x.table[0, 0], np.arange(keys)
    x.k[at], x.v[at] = 0, np.eye(keys, 64)[:, None]
    out, lse = mha_decode_paged(*x.arrays, return_lse=True, **backend)
    visible = np.tri(queries, keys, keys - queries)
    seen = visible.sum(1)
    np.testing.assert_allclose(out[0, :, 0, :keys], visible / np.maximum(seen, 1)[:, None], atol=1e-6)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[0, :, 0], np.log(seen), atol=1e-6)


@pytest.mark.parametrize("backend", emulated)
@pytest.mark.parametrize(
    "heads",
    INPUT["gqa-tiles-cross-groups"]["(Hq,Hkv)"] + INPUT["gqa-group-not-power-of-two"]["Hq,Hkv"],
    ids=lambda h: f"H{h[0]}x{h[1]}",
)
def test_groups(heads: list[int], backend: dict[str, str]) -> None:
    for S in (1, 3):
        x = Case((40, 7), heads=(heads[0], heads[1]), D=128, S=S).build()
        assert_accurate(x, mha_decode_paged(*x.arrays, **backend))


DEPTHS = INPUT["head-dim-not-power-of-two"]["head_dim"] + INPUT["padded-head-lanes-not-stored"]["head_dim"]


@pytest.mark.parametrize("depth", sorted(set(DEPTHS)))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@on_nvidia
def test_padded_lanes_are_neither_read_nor_stored(depth: int, dtype: str, backend: dict[str, str]) -> None:
    """Rows of K and V stand between NaN, rows of the output between canaries."""
    given = INPUT["padded-head-lanes-not-stored"]
    x = Case((40, 3), heads=(given["Hq"], given["Hkv"]), D=depth, dtype=dtype, storage="wide").build()
    buffer = np.full((2, 1, 4, 2 * depth), 7, x.q.dtype)
    out = buffer[..., :depth]
    mha_decode_paged(*x.arrays, out=out, **backend)
    assert_accurate(x, out)
    assert (buffer[..., depth:] == 7).all()


@every_backend
def test_kv_halves_of_one_buffer(backend: dict[str, str]) -> None:
    page, heads, depth = INPUT["kv-halves-of-one-buffer"]["buffer"][2:]
    x = Case((20,), heads=(heads, heads), D=depth, page=page, storage="halves").build()
    assert x.k.strides[0] == INPUT["kv-halves-of-one-buffer"]["stride0"] * x.k.itemsize
    packed = x.with_(k=x.k.copy(), v=x.v.copy())
    assert bits(mha_decode_paged(*x.arrays, **backend)) == bits(mha_decode_paged(*packed.arrays, **backend))


@every_backend
def test_unused_and_negative_table_entries(backend: dict[str, str]) -> None:
    """A row of length 0 holds nothing but such entries."""
    assert set(INPUT["unused-table-entries-huge"]["table_tail"]) == {-1, HUGE}
    x = Case((17, 0, 16), heads=(1, 1)).build()
    assert not ((x.table[1] >= 0) & (x.table[1] < len(x.k))).any()
    assert_accurate(x, mha_decode_paged(*x.arrays, **backend))
