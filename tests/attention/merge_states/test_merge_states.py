"""Merging of partial attention: against float64, its laws, and what must not be read.

Rests on: a float64 reference, attention over the union of the keys (a law), and bug reports about empty parts.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention import explain, merge_states, mha_decode_paged
from kvlab.attention.merge_states.config import chunk_of
from kvlab.mirror import check, lockstep

BF16 = np.dtype(ml_dtypes.bfloat16)
EMPTY = (-np.inf, np.inf)


def parts(n: int, tokens: int, heads: int, depth: int, dtype: Any = np.float32, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    lses = rng.normal(0, 3, (n, tokens, heads)).astype(np.float32)
    return rng.standard_normal((n, tokens, heads, depth)).astype(dtype), lses


def softmax_mean(outs: Any, lses: Any) -> tuple[Any, Any]:
    """float64, part by part, written apart from the reference."""
    n, tokens, heads, depth = outs.shape
    out, lse = np.zeros((tokens, heads, depth)), np.full((tokens, heads), -np.inf)
    for t in range(tokens):
        for h in range(heads):
            full = [i for i in range(n) if np.isfinite(lses[i, t, h])]
            if full:
                weights = np.exp(lses[full, t, h].astype(np.float64) - lses[full, t, h].max())
                out[t, h] = sum(w * outs[i, t, h].astype(np.float64) for w, i in zip(weights, full, strict=True))
                out[t, h] /= weights.sum()
                lse[t, h] = lses[full, t, h].max() + np.log(weights.sum())
    return out, lse


@pytest.mark.parametrize("backend", ["reference", "emulator", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 3, 4, 64), (17, 2, 3, 80), (40, 1, 2, 128)], ids=str)
def test_against_float64(shape: tuple[int, int, int, int], backend: str) -> None:
    outs, lses = parts(*shape)
    lses[0, 0, 0] = -np.inf
    lses[-1, -1, -1] = np.inf
    outs[~np.isfinite(lses)] = np.nan  # what an empty part left behind
    merged, lse = merge_states(outs, lses, backend=backend)
    exact, exact_lse = softmax_mean(outs, lses)
    np.testing.assert_allclose(merged, exact, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "emulator", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("depth", [32, 128])
def test_two_empty_parts_give_nothing(depth: int, backend: str) -> None:
    """The reported case: about a quarter of the rows empty in both parts, some by the other convention."""
    rng = np.random.default_rng(depth)
    outs, lses = parts(2, 64, 8, depth, seed=1)
    rows = rng.random((64, 8)) < 0.25
    lses[:, rows] = rng.choice(EMPTY, (2, rows.sum()))
    outs[:, rows] = np.nan
    merged, lse = merge_states(outs, lses, backend=backend)
    assert (merged[rows] == 0).all()
    assert np.isneginf(lse[rows]).all()
    assert np.isfinite(merged).all()
    assert np.isfinite(lse[~rows]).all()


@pytest.mark.parametrize("backend", ["reference", "emulator", pytest.param("triton", marks=pytest.mark.interpreter)])
def test_a_part_that_is_not_a_number_is_not_an_empty_one(backend: str) -> None:
    """Law: NaN among the keys of any part gives NaN, as it does where the keys are not split."""
    outs, lses = parts(3, 1, 2, 16)
    lses[1, 0, 1] = np.nan
    merged, lse = merge_states(outs, lses, backend=backend)
    assert np.isnan(merged).all(-1).tolist() == np.isnan(lse).tolist() == [[False, True]]


@settings(max_examples=25)
@given(st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_the_order_of_parts_and_neutral_parts_do_not_matter(n: int, seed: int) -> None:
    outs, lses = parts(n, 2, 2, 16, seed=seed)
    merged, lse = merge_states(outs, lses)
    order = np.random.default_rng(seed).permutation(n)
    again, lse_again = merge_states(outs[order], lses[order])
    np.testing.assert_allclose(again, merged, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse_again, lse, rtol=0, atol=2e-6)
    neutral = np.full((1, 2, 2), -np.inf, np.float32)
    more, lse_more = merge_states(
        np.concatenate([outs, np.full_like(outs[:1], np.nan)]), np.concatenate([lses, neutral])
    )
    np.testing.assert_allclose(more, merged, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse_more, lse, rtol=0, atol=2e-6)


def test_sums_are_compensated() -> None:
    """Law: adding many small parts to a large one loses nothing that a float32 result can show."""
    n = 32 * chunk_of(64)
    lses = np.zeros((n, 1, 1), np.float32)
    outs = np.full((n, 1, 1, 1), 1e-4, np.float32)
    outs[0] = 1e4
    merged, _ = merge_states(outs, lses)
    exact = outs.astype(np.float64).mean()
    assert abs(merged.item() - exact) <= 2 * np.spacing(np.float32(exact))


@pytest.mark.parametrize("tokens", [1, 3])
def test_halves_of_the_keys_merge_to_the_whole(tokens: int) -> None:
    """Law: attention over two caches merged equals attention over both; [N, B, S, H] as mha_decode returns it."""
    rng = np.random.default_rng(4)
    k, v = rng.standard_normal((2, 8, 16, 2, 64)).astype(np.float32)
    q = rng.standard_normal((2, tokens, 4, 64)).astype(np.float32)
    table = np.array([[0, 1, 2, 3], [4, 5, 6, 7]])
    whole = mha_decode_paged(q, k, v, table, np.array([64, 50]), return_lse=True)
    # The new tokens lie in the second half; the first half is seen whole by every token.
    first = [mha_decode_paged(q[:, i], k, v, table[:, :2], np.array([32, 32]), return_lse=True) for i in range(tokens)]
    out0 = np.stack([out for out, _ in first], axis=1)
    lse0 = np.stack([lse for _, lse in first], axis=1)
    out1, lse1 = mha_decode_paged(q, k, v, table[:, 2:], np.array([32, 18]), return_lse=True)
    merged, lse = merge_states(np.stack([out0, out1]), np.stack([lse0, lse1]))
    np.testing.assert_allclose(merged, whole[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, whole[1], rtol=0, atol=1e-5)


def test_out_and_its_neighbours() -> None:
    outs, lses = parts(3, 4, 2, 32, BF16)
    frame = np.full((4, 2, 48), 7, BF16)
    returned = merge_states(outs, lses, out=frame[..., 8:40], return_lse=False)
    assert returned.base is frame
    assert (frame[..., :8] == 7).all()
    assert (frame[..., 40:] == 7).all()
    assert np.array_equal(frame[..., 8:40], merge_states(outs, lses, return_lse=False))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "n, depth, dtype",
    [
        (1, 48, np.float32),
        (5, 48, np.float32),
        (33, 48, np.float32),
        (2, 128, BF16),
        (7, 80, BF16),
        (70, 16, np.float16),
    ],
)
def test_twins_in_lockstep(n: int, depth: int, dtype: Any) -> None:
    outs, lses = parts(n, 2, 3, depth, dtype)
    lses[0, 0] = -np.inf
    run = lockstep("merge_states", {"outs": outs[:, :, None], "lses": lses[:, :, None]})
    assert run.ok, run.first_difference


def test_the_twins_mirror_each_other() -> None:
    assert check("merge_states").ok


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"outs": np.zeros((2, 3, 8), np.float32)}, "outs has shape (2, 3, 8)"),
        ({"outs": np.zeros((0, 3, 2, 8), np.float32)}, "outs has 0 parts"),
        ({"outs": np.zeros((2, 3, 2, 8))}, "outs has dtype float64"),
        ({"lses": np.zeros((2, 2, 3), np.float32)}, "lses has shape (2, 2, 3)"),
        ({"lses": np.zeros((2, 3, 2))}, "lses has dtype float64"),
        ({"outs": [[1.0]]}, "outs is a list"),
        ({"out": np.zeros((3, 2, 4), np.float32)}, "out has shape (3, 2, 4)"),
        ({"outs": np.zeros((2, 3, 2, 16), np.float32)[..., ::2]}, "contiguous in the last dimension"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
    ],
)
def test_bad_input_is_told(change: dict[str, Any], said: str) -> None:
    good = {"outs": np.zeros((2, 3, 2, 8), np.float32), "lses": np.zeros((2, 3, 2), np.float32)}
    with pytest.raises(ValueError) as error:
        merge_states(**{**good, **change})
    assert said in str(error.value)


def test_out_is_floats_in_memory_of_its_own() -> None:
    outs, lses = parts(3, 4, 2, 32)
    before = outs.copy()
    integers = np.zeros((4, 2, 32), np.int64)
    for out, said in [(outs[0], "out shares memory with outs: must be"), (integers, "out has dtype int64: must be")]:
        with pytest.raises(ValueError, match=said):
            merge_states(outs, lses, out=out)
    assert np.array_equal(outs, before)


def test_explained() -> None:
    outs, lses = parts(3, 4, 2, 32)
    assert explain(merge_states, outs, lses).backend == "emulator"


def test_the_tokens_of_a_prefill_fit_the_grid() -> None:
    """Rests on CUDA's limits of a grid: 2^31 - 1 programs along its first axis, 65535 along its second."""
    outs = np.broadcast_to(np.zeros((2, 1, 1, 1, 64), np.float32), (2, 2, 8192, 32, 64))
    lses = np.broadcast_to(np.float32(0), (2, 2, 8192, 32))
    grid = explain(merge_states, outs, lses).grid
    assert (np.prod(grid), grid[1] <= 65535) == (2 * 8192 * 32, True)


def test_tokens_and_heads_of_sequences_keep_their_places() -> None:
    """Law: merging ``[N, B, S, H, D]`` is merging its tokens one by one."""
    outs, lses = parts(3, 10, 3, 32)
    merged, lse = merge_states(outs.reshape(3, 2, 5, 3, 32), lses.reshape(3, 2, 5, 3))
    one, one_lse = merge_states(outs, lses)
    assert np.array_equal(merged.reshape(one.shape), one)
    assert np.array_equal(lse.reshape(one_lse.shape), one_lse)


EVERY = ["reference", "emulator", pytest.param("triton", marks=pytest.mark.interpreter)]


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("shape", [(3, 0, 4, 64), (3, 0, 2, 4, 64), (2, 5, 0, 64), (2, 5, 4, 0)], ids=str)
def test_nothing_to_merge(shape: tuple[int, ...], backend: str) -> None:
    """NumPy gives arrays without elements strides of 0."""
    merged, lse = merge_states(np.zeros(shape, np.float32), np.zeros(shape[:-1], np.float32), backend=backend)
    assert merged.shape == shape[1:]
    assert lse.shape == shape[1:-1]
    assert merged.size == 0


@pytest.mark.parametrize("backend", EVERY)
def test_any_strides_that_are_read(backend: str) -> None:
    """Rests on the call with contiguous copies, bit for bit; gaps are NaN."""
    outs, lses = parts(3, 5, 4, 16)
    expected, expected_lse = merge_states(outs, lses, backend=backend)
    wide = np.full((4, 5, 3, 40), np.nan, np.float32)
    wide[..., 8:24] = outs.transpose(2, 1, 0, 3)
    apart = np.full((5, 4, 7), np.nan, np.float32)
    apart[..., 1::2] = lses.transpose(1, 2, 0)
    room = np.full((4, 5, 20), 7, np.float32)
    given = room[..., 2:18].swapaxes(0, 1)
    views = wide.transpose(2, 1, 0, 3)[..., 8:24], apart.transpose(2, 0, 1)[1::2]
    merged, lse = merge_states(*views, out=given, backend=backend)
    assert merged is given
    np.testing.assert_array_equal(merged, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    assert (room[..., :2] == 7).all()
    assert (room[..., 18:] == 7).all()


@pytest.mark.parametrize("backend", EVERY)
def test_strides_backwards(backend: str) -> None:
    """Tensors, which the kernel takes, have no negative strides; the others read and write backwards."""
    outs, lses = parts(3, 5, 4, 16)
    back, room = outs[::-1, ::-1].copy()[::-1, ::-1], np.zeros((5, 4, 16), np.float32)
    if backend == "triton":
        for bad, name in (({"outs": back, "lses": lses}, "outs"), ({"outs": outs, "lses": lses[::-1]}, "lses"),
                          ({"outs": outs, "lses": lses, "out": room[::-1]}, "out")):
            with pytest.raises(ValueError, match=rf"{name} has strides .*: must be not negative"):
                merge_states(**bad, backend=backend)
        return
    expected, _ = merge_states(outs, lses, backend=backend)
    merged, _ = merge_states(back, lses, out=room[::-1], backend=backend)
    np.testing.assert_array_equal(merged, expected)
