"""Odd input of every function of ``kvlab.formats``: a ValueError that names the argument and says what is accepted.

Rests on the rule of CONTRIBUTING.md for bad input."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kvlab.formats import (
    Format,
    Watch,
    audit,
    convert,
    heads_of_ranks,
    identify,
    known_format,
    kv_budget,
    markers,
    transfer,
)

MADE = Format.parse("page:4 kv:2 slot:16 head:2 dim:32 kv.bf16")
RAW = np.zeros(MADE.nbytes, np.uint8)
VALUES = np.zeros(MADE.shape("k"), np.float32)
PLAN = transfer(MADE, MADE, degrees=(1, 2))
CACHE = np.ones((4, 4, 2, 8), np.float16)
MODEL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 9, "num_experts": 4}


def budget(**fields: Any) -> Any:
    return kv_budget({**MODEL, "intermediate_size": 8, **fields}).weights


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: Format.parse("k.bf16", name=3), "name is 3: must be text"),
        (lambda: Format.parse("slot:٤ k.bf16"), "text cannot be read from 'slot:٤ k.bf16'"),
        (lambda: MADE.where("k", page=[0, 1]), "page is [0, 1]: must be one integer"),
        (lambda: MADE.at([0, 1]), "byte is [0, 1]: must be one integer"),
        (lambda: MADE.draw(page="x"), "page is 'x': must be one of the 4 pages"),
        (lambda: MADE.draw(layer=None), "layer is None: must be one of the 1 layers"),
        (lambda: MADE.encode([[1], [1, 2]], VALUES), "k is [[1], [1, 2]]: must be numbers, in rows of one length"),
        (lambda: MADE.encode(VALUES.astype("datetime64[s]"), VALUES), "k has dtype datetime64[s]: must be numbers"),
        (lambda: MADE.decode([[1], [1, 2]]), "buffer is [[1], [1, 2]]: must be numbers, in rows of one length"),
        (lambda: MADE.decode(np.ma.zeros(MADE.nbytes, np.uint8)), "buffer is a MaskedArray: must be a plain array"),
        (lambda: convert(MADE, MADE).apply(np.ma.zeros(MADE.nbytes, np.uint8)), "buffer is a MaskedArray"),
        (lambda: MADE.pack(None), "codes are None: must be arrays by the names of the fields"),
        (lambda: known_format(["mla.656"]), "name is ['mla.656']: must be one of vllm.LBHNC"),
        (lambda: markers(None), "shape is None: must be the extents"),
        (lambda: markers(()), "shape is (): must be the extents"),
        (lambda: markers((1 << 20, 1 << 20)), "shape is (1048576, 1048576): must be of at most 67108864 elements"),
        (lambda: markers((2, 4), None), "part is None: must be an integer of at least 0"),
        (lambda: identify(RAW, candidates="mla.656"), "candidates[0] is 'm': must be a Format"),
        (lambda: identify(RAW, candidates=[MADE, None]), "candidates[1] is None: must be a Format"),
        (lambda: identify(RAW, candidates={}), "candidates is {}: must be a sequence of formats"),
        (lambda: identify(RAW, pages=0), "pages is 0: must be at least 1"),
        (lambda: identify(RAW, heads="x"), "heads is 'x': must be an integer"),
        (lambda: identify(RAW, tensor_scale="x"), "tensor_scale is 'x': must be a number above 0"),
        (lambda: transfer(MADE, MADE, source_heads=3), "source_heads is 3: must be the heads of each rank"),
        (lambda: transfer(MADE, MADE, target_heads=[3]), "target_heads is [3]: must be the heads of each rank"),
        (lambda: transfer(MADE, MADE, target_heads=[[0, 1]], degrees=(1, 2)),
         "degrees is (1, 2), target_heads are of 1 ranks: must be of as many, or left out"),
        (lambda: transfer(MADE, MADE, source_pages=3), "source_pages is 3: must be different pages in [0, 4)"),
        (lambda: transfer(MADE, MADE, degrees=(1, 10**6)), "degree is 1000000: must be of at most 12 bits"),
        (lambda: heads_of_ranks(10**9, 1), "heads is 1000000000: must be of at most 20 bits"),
        (lambda: PLAN.message([0, 1], RAW), "pair is [0, 1]: must be one of (0, 0), (0, 1)"),
        (lambda: PLAN.apply(None), "sources is None: must be a list of 1 buffers, one a rank"),
        (lambda: PLAN.apply([None]), "sources[0] has dtype object: must be numbers"),
        (lambda: PLAN.apply([RAW], 3), "targets is 3: must be a list of 2 buffers, one a rank"),
        (lambda: PLAN.receive((0, 1), np.ma.zeros(8192, np.uint8), RAW), "message is a MaskedArray"),
        (lambda: audit(RAW, [[0]], [1], format="page:4 k.bf16"), "format is 'page:4 k.bf16': must be a Format"),
        (lambda: audit(CACHE.tolist(), [[0]], [1]), "cache is a list: must be an array of NumPy or torch"),
        (lambda: audit(CACHE, [[0]], [1], scale_range=3), "scale_range is 3: must be two magnitudes"),
        (lambda: audit(CACHE, [[0]], [1], scale_range=(1,)), "scale_range is (1,): must be two magnitudes"),
        (lambda: audit(CACHE, [[0]], [1], scale_range=("a", "b")), "scale_range is ('a', 'b'): must be two"),
        (lambda: audit(CACHE, [[0]], [1], padding="x"), "padding is 'x': must be an entry of the table, or None"),
        (lambda: audit(CACHE, [[0]], [1], shared_prefix="no"), "shared_prefix is 'no': must be True or False"),
        (lambda: audit(CACHE, [[0]], [1], poisoned=2), "poisoned is 2: must be True, False, or bools [4, 4]"),
        (lambda: audit(CACHE, [[0]], [1], poisoned=np.zeros((3, 4), np.bool_)), "must be True, False, or bools [4, 4]"),
        (lambda: Watch(CACHE.tolist(), [[0]], [1], format=MADE), "cache is a list: must be an array of NumPy or torch"),
        (lambda: Watch(CACHE, [[0]], [1], format={}), "format is {}: must be a Format"),
        (lambda: budget(intermediate_size=[8, None]), "intermediate_size[1] is None: must be an integer"),
        (lambda: budget(mlp_only_layers=3), "mlp_only_layers is 3: must be a list of layers"),
        (lambda: budget(mlp_only_layers=["x"]), "mlp_only_layers[0] is 'x': must be an integer"),
    ],
)  # fmt: skip
def test_odd_input_is_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        call()
    assert not RAW.any()
    assert (CACHE == 1).all()


@pytest.mark.filterwarnings("error")
def test_numbers_past_float32_are_no_warning() -> None:
    """float32 has infinity for them; a limit of scales past it is none."""
    k, _ = MADE.decode(MADE.encode(VALUES.astype(np.float64) + 1e300, VALUES))
    assert np.isposinf(k).all()
    scaled = Format.parse("page:2 slot:4 (dim:4 k.s8, k_scale.f32)")
    stored = scaled.encode(np.full((2, 4, 4), 3.0))
    assert audit(stored, [[0, 1]], [8], format=scaled, scale_range=(0, 1e39))
    assert audit(stored, [[0, 1]], [8], format=scaled, scale_range=(1.0, 2.0)).counts == {"scale": 8}


def test_formats_of_several_kinds_may_be_candidates_in_a_tuple() -> None:
    k = markers(MADE.shape("k"))
    stored = MADE.encode(k, markers(MADE.shape("v"), 1))
    found = identify(stored, candidates=(MADE.resized(slot=8), MADE))
    assert found.matches == ((MADE,),)
