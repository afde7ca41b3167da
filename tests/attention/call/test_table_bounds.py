"""Lengths that do not fit the page table, unchecked: keys past what a row's columns hold are not read, and a length
below 0 is 0.

Rests on softmax in float64 over the keys that a row holds, written in ``table_bounds``. The rows beside each row of the
table name a page of NaN, and so do the unused columns of it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from table_bounds import COLUMNS, HELD, LENGTHS, MOST, OPERATIONS, PAGE, TableCall, assert_held

from kvlab.attention import masks
from kvlab.attention.features.intervals import UNLIMITED, key_count, most_keys
from kvlab.attention.mha_decode.config import choose_config, problem_of
from kvlab.attention.mha_decode.emulator import launch, nth_longest
from kvlab.mirror import lockstep

BACKENDS: dict[str, dict[str, Any]] = {
    "reference": {"backend": "reference"}, "sm_90": {}, "sm_80": {"arch": "sm_80"}, "gfx950": {"arch": "gfx950"},
    "triton": {"backend": "triton"}, "hopper": {"backend": "hopper"},
}


def has(op: str, backend: str) -> bool:
    if "streaming" in op:
        return backend in ("reference", "gfx950", "triton")
    if backend == "hopper":
        return op != "mla_prefill_paged"
    return backend != "gfx950" or op != "mla_decode_paged"  # of 16 bits only


PAIRS = [
    pytest.param(op, backend, marks=[pytest.mark.interpreter] if backend == "triton" else [], id=f"{op}-{backend}")
    for op in OPERATIONS for backend in BACKENDS if has(op, backend)
]


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize(("op", "backend"), PAIRS)
def test_keys_past_the_row_are_not_read(op: str, backend: str, new: int) -> None:
    call = TableCall(op, hopper=backend == "hopper", new=new)
    assert_held(call, *call(**BACKENDS[backend]))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("op", "backend"), [pair for pair in PAIRS if "decode" in str(pair.id)])
def test_so_with_the_keys_split(op: str, backend: str, splits: int) -> None:
    call = TableCall(op, hopper=backend == "hopper")
    assert_held(call, *call(num_splits=splits, **BACKENDS[backend]))


class Causal(masks.Mask):
    """A mask of one's own, which is evaluated for the lengths of the call."""

    def visible(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return k_pos <= q_pos


@pytest.mark.parametrize(("op", "backend"), [pair for pair in PAIRS if "hopper" not in str(pair.id)])
def test_so_with_a_mask_of_ones_own(op: str, backend: str) -> None:
    """Law: its positions are those of the keys that are held."""
    call = TableCall(op, new=2)
    named = {"mask": Causal()} if call.decodes else {"mask": Causal(), "causal": False}
    assert_held(call, *call(**named, **BACKENDS[backend]))


@pytest.mark.parametrize(
    "backend", ["reference", "sm_90", "gfx950", pytest.param("triton", marks=pytest.mark.interpreter)]
)
def test_keys_that_mla_prefill_is_given_beyond_the_sequence(backend: str) -> None:
    """K holds three keys more than each sequence has: the last ones are the sequence's, those before it has not."""
    call = TableCall("mla_prefill_paged", new=2)
    expected = call.exact()
    rows = call.heads_k, call.heads_v
    for own in rows:
        own[:] = [np.concatenate([np.full((3, *x.shape[1:]), np.nan, x.dtype), x]) for x in own]
    arrays, wide, lens, named = call.arguments()
    named["cu_seqlens_k"] = np.concatenate([[0], np.cumsum([n + 3 for n in HELD])])
    out, lse = call.function(*arrays, wide[1:-1], lens, **named, **BACKENDS[backend])
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=0, atol=2e-5)
    # the same keys, said to begin at the sequence's first: the last three are past its end
    for own in rows:
        own[:] = [np.concatenate([x[3:], np.full((3, *x.shape[1:]), np.nan, x.dtype)]) for x in own]
    arrays, wide, lens, named = call.arguments()
    named |= {"cu_seqlens_k": np.concatenate([[0], np.cumsum([n + 3 for n in HELD])]), "k_starts": 0 * lens}
    out, lse = call.function(*arrays, wide[1:-1], lens, **named, **BACKENDS[backend])
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_look_at_the_values_still_refuses_them(op: str) -> None:
    call = TableCall(op)
    arrays, wide, lens, named = call.arguments()
    message = re.escape(f"seq_lens[0] is {LENGTHS[0]}: must be 0 to {MOST}, what the {COLUMNS} columns")
    with pytest.raises(ValueError, match=message):
        call.function(*arrays, wide[1:-1], lens, **named | {"check": True})


def test_a_count_has_32_bits() -> None:
    """Law: lengths of 64 bits are cut before they are narrowed, so that 2^32 + 1 is not 1."""
    assert key_count(np.array([2**32 + 1, -(2**32) + 1, 7]), MOST).tolist() == [MOST, 0, 7]
    assert most_keys(1 << 40, PAGE) == UNLIMITED


def test_the_longest_first_holds_every_sequence_once() -> None:
    """Law: the order is a permutation, whatever the lengths."""
    lengths = np.array([5, -(10**9), 10**9, 0, MOST + 1])
    assert nth_longest(lengths, MOST, np.arange(5)).tolist() == [2, 4, 0, 1, 3]


@pytest.mark.interpreter
def test_the_kernel_has_that_order() -> None:
    """All sequences are written where the programs of the longest begin, by kernel and emulator alike."""
    call = TableCall("mha_decode_paged")
    (q, k, v), wide, lens, _ = call.arguments()
    config = choose_config(problem_of(q, k, v, wide[1:-1]), num_splits=1)
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens")
    arguments = dict(zip(names, (q, k, v, wide[1:-1].copy(), lens), strict=True), scale=call.scale)
    arguments["config"] = replace(config, longest_first=8)
    result = lockstep("mha_decode", arguments)
    assert result.ok, str(result.first_difference)
    assert_held(call, *launch(**arguments))
