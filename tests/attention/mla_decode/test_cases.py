"""MLA cases that went wrong elsewhere (tests/data/attention_cases_mla.json), on the emulator and the kernel.

The parameters come from the file, which names the basis of each. High page numbers are in test_kernel.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from mla_cases import Case
from yardsticks import assert_accurate, bits

from kvlab.attention import mla_decode_paged
from kvlab.attention.machines import ARCHS

FILE = Path(__file__).parents[2] / "data" / "attention_cases_mla.json"
INPUT = {case["id"]: case["input"] for case in json.loads(FILE.read_text())["cases"]}

kernel = pytest.param({"backend": "triton"}, id="triton", marks=pytest.mark.interpreter)
every_backend = pytest.mark.parametrize("backend", [*(pytest.param({"arch": a}, id=a) for a in ARCHS), kernel])


@every_backend
@pytest.mark.parametrize("given", INPUT["mla-nan-tail-of-last-page"]["cases"], ids=lambda g: f"page{g['page_size']}")
def test_nan_tail_of_last_page(given: dict[str, int], backend: dict[str, str]) -> None:
    """Slots past the length are NaN, in the columns of V, too."""
    x = Case((given["kv_len"],), H=2, page=given["page_size"]).build()
    assert np.isnan(x.kv[x.table[0, given["kv_len"] // given["page_size"]], -1].astype(np.float32)).all()
    assert_accurate(x, *mla_decode_paged(*x.arrays, return_lse=True, **backend, **x.options))


@every_backend
@pytest.mark.parametrize("splits", [1, 2])
def test_nan_in_a_key_that_is_seen(splits: int, backend: dict[str, str]) -> None:
    """Law: NaN in a latent that a row sees is NaN in that row, with any number of splits; it is no row without keys."""
    x = Case((140, 20), H=2).build()
    x.kv[x.table[0, 0], 3, 0] = np.nan
    out, lse = mla_decode_paged(*x.arrays, num_splits=splits, return_lse=True, **backend, **x.options)
    assert np.isnan(out.astype(np.float32)).all((1, 2, 3)).tolist() == [True, False]
    assert np.isnan(lse).all((1, 2)).tolist() == [True, False]


@every_backend
@pytest.mark.parametrize("context", INPUT["more-splits-than-tiles"]["context"])
def test_more_splits_than_tiles(context: int, backend: dict[str, str]) -> None:
    """Empty splits have no weight: one tile of keys, the same bits as with one split up to float32's last place."""
    dtype = "fp32" if backend.get("arch", "sm_90") == "sm_90" else "fp16"  # in tiles that hold all of these keys
    x = Case((context,), H=2, dtype=dtype).build()
    splits = INPUT["more-splits-than-tiles"]["num_splits"]
    many = mla_decode_paged(*x.arrays, num_splits=splits, return_lse=True, **backend, **x.options)
    one = mla_decode_paged(*x.arrays, num_splits=1, **backend, **x.options)
    assert_accurate(x, *many)
    assert bits(many[0]) == bits(one)
