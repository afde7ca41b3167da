"""Calls as programs make them: strided, permuted and shifted views, no tokens, no sequences, pages of 1 to 1024 tokens,
groups of 1 to 17, entries of tables that name no page, lengths of all integer dtypes.

Rests on the float64 reference over plain copies in which each unseen row is 0, and on a law: what lies between the
elements of a view, in pages behind a sequence's end and before what its rows see changes no result, and only ``out`` is
written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ml_dtypes import bfloat16, float8_e4m3fn

from kvlab import attention
from kvlab.common.arrays import to_numpy, to_torch

Array = np.ndarray[Any, Any]
EPSILON = {np.dtype(bfloat16): 2**-8, np.dtype(np.float16): 2**-11, np.dtype(np.float32): 2**-20}
OPERATIONS = ("mha_decode_paged", "mha_prefill_paged", "attend_paged")


class View:
    """The elements of an array as a view of a buffer that is poison everywhere else; ``step``: elements that the gaps
    are multiples of.
    """

    def __init__(self, rng: Any, array: Array, step: int) -> None:
        outer = rng.permutation(array.ndim - 1) if array.ndim > 1 else []
        strides, span = [1] * array.ndim, array.shape[-1] + step * int(rng.integers(3))
        span = -(-span // step) * step
        for axis in outer:
            strides[axis] = span
            span = span * max(array.shape[axis], 1) + step * int(rng.integers(3))
        first, size = step * int(rng.integers(4)), array.itemsize
        bits = np.full(first + span, -1, f"i{size}")  # NaN of any float, a page and a length that there are not
        view = np.lib.stride_tricks.as_strided(bits[first:], array.shape, [size * stride for stride in strides])
        view[...] = np.ascontiguousarray(array).view(bits.dtype)
        self.array: Array = view.view(array.dtype)
        self.bits, self.before, self.inside = bits, bits.copy(), view

    def is_unchanged(self, *, but_for_itself: bool) -> bool:
        """Whether the buffer is as it was."""
        if but_for_itself:
            self.inside[...] = -1
        return bool((self.bits == (self.before if not but_for_itself else -1)).all())


def calls(seed: int) -> tuple[str, dict[str, Array], dict[str, Array], dict[str, Any]]:
    """An operation, its arrays, the same with NaN where no row looks, and its options."""
    rng = np.random.default_rng(seed)
    name, dtype = OPERATIONS[seed % 3], rng.choice([bfloat16, np.float16, np.float32])
    stored = float8_e4m3fn if dtype != np.float32 and rng.random() < 0.4 else dtype
    B, heads, group = int(rng.integers(4)), int(rng.integers(1, 3)), int(rng.choice([1, 2, 3, 5, 8, 17]))
    D, DV = (int(n) for n in rng.choice([16, 32, 48, 64, 80, 128], 2))
    page, window = int(rng.choice([1, 2, 7, 16, 1024])), [None, 5, (3, None)][int(rng.integers(3))]
    lens = rng.integers(0, 70, B)
    new = np.full(B, rng.integers(1, 5)) if name == "mha_decode_paged" else rng.integers(0, 9, B)
    used = -(-lens // page)
    pages, columns = int(used.sum()) + 1, int(used.max(initial=0)) + int(rng.integers(2))
    table, ids = rng.choice([-1, 2**31 - 1, -(2**31)], (B, columns)), rng.permutation(pages)
    seen = np.zeros((pages, page), bool)
    left = None if window is None else window - 1 if isinstance(window, int) else window[0]
    for b, n in enumerate(lens):
        table[b, : used[b]], ids = ids[: used[b]], ids[used[b] :]
        first = 0 if left is None else max(n - new[b] - left, 0)
        key = np.arange(first, n if new[b] else first)
        seen[table[b, key // page], key % page] = True
    starts = np.concatenate([[0], np.cumsum(new)])
    shape = (B, int(new[0]) if B else 2) if name == "mha_decode_paged" else (int(starts[-1]),)
    some = {"q": (*shape, heads * group, D), "k_cache": (pages, page, heads, D), "v_cache": (pages, page, heads, DV)}
    plain = {key: rng.standard_normal(of).astype(dtype if key == "q" else stored) for key, of in some.items()}
    options: dict[str, Any] = {"window": window, "softcap": float(rng.choice([0, 5])), "return_lse": True}
    if stored == float8_e4m3fn:
        forms = [(heads,), (B, heads), (1,), (pages, page, heads)]
        plain |= {key: rng.uniform(0.5, 2, forms[int(rng.integers(4))]).astype(np.float32) for key in
                  ("k_scale", "v_scale")}
    plain |= {key: rng.standard_normal(of).astype(np.float32) for key, of in
              (("sinks", (heads * group,)), ("alibi_slopes", (B, heads * group))) if rng.random() < 0.3}
    dead = {key: array.copy() for key, array in plain.items()}
    for key in ("k_cache", "v_cache", "k_scale", "v_scale"):
        if key in plain and plain[key].shape[:2] == seen.shape and plain[key].ndim > 2:
            plain[key][~seen], dead[key][~seen] = 0, np.nan
    counted = {"block_table": table.astype(rng.choice([np.int32, np.int64])),
               "seq_lens": lens.astype(rng.choice([np.int32, np.int64, np.uint32, np.uint64]))}
    if name != "mha_decode_paged":
        counted["cu_seqlens_q"] = starts.astype(rng.choice([np.int32, np.int64]))
    return name, plain | counted, dead | counted, options


def check(seed: int, *, torch_tensors: bool) -> None:
    """Compare the emulator, or with tensors the kernel, over odd views with the reference over plain arrays."""
    name, plain, dead, options = calls(seed)
    rng, call = np.random.default_rng(seed), getattr(attention, name)
    exact, exact_lse = call(**plain, **options, backend="reference")
    dead["out"] = np.zeros_like(exact)
    if torch_tensors:  # which has no arithmetic for others
        dead["seq_lens"] = dead["seq_lens"].astype(np.int32)
    views = {key: View(rng, a, 1 if torch_tensors and a.itemsize > 1 else 16 // a.itemsize) for key, a in dead.items()}
    arrays: dict[str, Any] = {key: view.array for key, view in views.items()}
    if torch_tensors:
        arrays = {key: to_torch(array) for key, array in arrays.items()}
    out, lse = call(**arrays, **options)
    assert out is arrays["out"]
    np.testing.assert_allclose(to_numpy(lse), exact_lse, rtol=1e-3, atol=1e-3)
    reach = 4 * EPSILON[exact.dtype] * (1 + np.abs(exact.astype(np.float64)).max(initial=0))
    np.testing.assert_allclose(to_numpy(out).astype(np.float64), exact.astype(np.float64), rtol=0, atol=reach)
    for key, view in views.items():
        assert view.is_unchanged(but_for_itself=key == "out"), key


@pytest.mark.parametrize("seed", range(24))
def test_the_emulator(seed: int) -> None:
    check(seed, torch_tensors=False)


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", [24, 25, 27, 28])  # attend_paged is interpreted in its own tests
def test_the_kernel(seed: int) -> None:
    with torch.no_grad():
        check(seed, torch_tensors=True)
