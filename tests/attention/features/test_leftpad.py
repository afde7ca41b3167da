"""Left padding: keys before the first valid one of each sequence.

Rests on softmax in float64 over the keys behind the padding (``hidden_keys``), which is NaN, in pages that are no
pages.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from caught import as_if_on
from hidden_keys import OPERATIONS, PAGE, HiddenCall, assert_seen_alone, is_refused

from kvlab import attention
from kvlab.attention.masks import ChunkedCausalMask, Mask
from kvlab.common.arrays import to_torch

PADS = (17, 5, 40)


class Odd(Mask):
    """Odd positions, of the keys behind the padding."""

    def visible(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return (k_pos % 2 == 1) & (k_pos <= q_pos)


class PaddedCall(HiddenCall):
    """A call whose sequences have padding. Its sights, besides those of others: chunks of 8 keys, and odd keys."""

    @property
    def pads(self) -> tuple[int, ...]:
        return (21,) * 3 if self.form == "dense" else PADS

    def visible(self, b: int) -> Any:
        seen, n = super().visible(b), self.lens[b]
        p, key = np.arange(self.S)[:, None, None] + n - self.S, np.arange(n)
        also = {"chunked": p // 8 == key // 8, "odd": key % 2 == 1}
        return seen & also.get(self.sight, True)

    def options(self) -> dict[str, Any]:
        masks = {"chunked": ChunkedCausalMask(8), "odd": Odd()}
        return super().options() | ({"mask": masks[self.sight]} if self.sight in masks else {})

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        whole: Any = copy.copy(self)
        whole.lens = tuple(n + pad for n, pad in zip(self.lens, self.pads, strict=True))
        for name in ("k", "v"):
            rows = zip(getattr(self, name), self.pads, strict=True)
            padded = [np.concatenate([np.full((pad, *x.shape[1:]), np.nan, x.dtype), x]) for x, pad in rows]
            setattr(whole, name, padded)
        whole.options = self.options
        args, named = HiddenCall.arguments(whole)
        for array in args:
            if array.ndim == 2 and array.dtype.kind == "i":  # the table
                array[[0, 2, 2], [0, 0, 1]] = 1 << 30
        return args, named | {"leftpad_k": np.array(self.pads)}


@pytest.mark.parametrize("sight", ["causal", "window", "bias", "chunked"])
@pytest.mark.parametrize("backend", ["reference", "emulator", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("op", OPERATIONS)
def test_keys_behind_it_alone_have_weight(op: str, backend: str, sight: str) -> None:
    call = PaddedCall(op, sight)
    assert_seen_alone(call, *call(backend=backend))


@pytest.mark.parametrize("sight", ["causal", "window", "bias", "chunked"])
@pytest.mark.parametrize("op, options", [
    ("attend_paged", {}), ("attend_paged", {"batch_invariant": True}), ("mha_decode_paged", {"balanced": True}),
    ("attend_paged", {"backend": "reference"}),
])
def test_over_a_schedule_they_alone_have_weight(op: str, options: dict[str, Any], sight: str) -> None:
    call = PaddedCall(op, sight)
    assert_seen_alone(call, *call(**options))


@pytest.mark.parametrize("op", ["mha_decode_paged", "mla_decode_paged"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx950"])
def test_splits_of_16_bits(op: str, arch: str) -> None:
    """The machines that walk pages by themselves, of which padding fills no whole tile."""
    call = PaddedCall(op, "causal", wide=True)
    assert_seen_alone(call, *call(arch=arch, num_splits=2))


@pytest.mark.parametrize("op", OPERATIONS)
def test_positions_of_masks_count_from_the_first_valid_key(op: str) -> None:
    call = PaddedCall(op, "odd")
    assert_seen_alone(call, *call(backend="emulator"))


@pytest.mark.parametrize("how", [{"num_splits": 1}, {"balanced": True}], ids=str)
def test_alibi_and_scales_of_tokens_are_those_of_the_keys(how: dict[str, Any]) -> None:
    """Law: a sequence in pages has the bits that it has where its padding is cut off."""
    from kvlab.memory import bfloat16, float8_e4m3fn

    rng = np.random.default_rng(3)
    k, v = rng.standard_normal((2, 8, PAGE, 2, 64)).astype(np.float32).astype(float8_e4m3fn)
    q, table = rng.standard_normal((2, 4, 64)).astype(bfloat16), np.array([[6, 1, 3], [2, 7, 0]])
    named: dict[str, Any] = {
        "alibi_slopes": rng.random((2, 4)).astype(np.float32), "k_scale": rng.random(k.shape[:3]).astype(np.float32),
        "v_scale": rng.random(k.shape[:3]).astype(np.float32), "return_lse": True, **how,
    }
    lens, pad = np.array([40, 33]), np.array([PAGE, 2 * PAGE])
    cut = np.array([[1, 3, 3], [0, 0, 0]])
    found = attention.mha_decode_paged(q, k, v, table, lens, leftpad_k=pad, **named)
    exact = attention.mha_decode_paged(q, k, v, cut, lens - pad, **named)
    for ours, theirs in zip(found, exact, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_all_of_a_sequence_and_more() -> None:
    call = HiddenCall("mha_decode_paged")
    args, named = call.arguments()
    out, lse = attention.mha_decode_paged(*args, **named, leftpad_k=np.array([3, 0, 99]))
    assert np.isneginf(lse).all((1, 2)).tolist() == [True, False, True]
    assert (out[[0, 2]] == 0).all()


def test_calls_of_one_kind_have_their_own() -> None:
    call = HiddenCall("mha_prefill ragged")
    args, named = call.arguments()
    tensors = {n: to_torch(a) if isinstance(a, np.ndarray) else a for n, a in named.items()} | {"max_seqlen_q": 3}
    for pad in ([1, 2, 3], [0, 9, 30], None):
        mine = {} if pad is None else {"leftpad_k": np.array(pad)}
        exact, _ = attention.mha_prefill(*args, **named, **mine, backend="reference")
        theirs = {n: to_torch(a) for n, a in mine.items()}
        found, _ = attention.mha_prefill(*map(to_torch, args), **tensors, **theirs, backend="reference")
        np.testing.assert_array_equal(found.numpy(), exact)


BAD = [
    ({"leftpad_k": np.array([1, 2])}, "leftpad_k of 2 sequences: must be those of the call, 3"),
    ({"leftpad_k": np.array([1.0, 2, 3])}, "leftpad_k has dtype float64: must be an integer"),
    ({"leftpad_k": np.zeros((3, 1), int)}, r"leftpad_k has shape \(3, 1\): must be \[B\]"),
    ({"leftpad_k": np.arange(6)[::2]}, "leftpad_k is strided: must be contiguous"),
    ({"leftpad_k": [1, 2, 3]}, "leftpad_k is a list: must be a NumPy array or torch tensor"),
    ({"leftpad_k": np.array([1, -2, 3])}, r"leftpad_k\[1\] is -2: must be a number of keys, at least 0"),
    ({"leftpad_k": np.array([1, 2, 3]), "backend": "hopper"}, "backend is 'hopper' with leftpad_k"),
]


@pytest.mark.parametrize("options, message", BAD, ids=[m[:30] for _, m in BAD])
def test_bad_padding(options: dict[str, Any], message: str) -> None:
    is_refused(options, message)


@pytest.mark.parametrize("name", ["leftpad_k", "q_positions"])
def test_explain_says_why_hopper_goes_to_the_portable_kernel(name: str) -> None:
    tensors = [to_torch(np.zeros(shape, np.float16)) for shape in ((2, 8, 128), *((4, 16, 2, 128),) * 2)]
    table, lens = to_torch(np.array([[0, 1], [2, 3]])), to_torch(np.array([20, 30]))
    with pytest.MonkeyPatch.context() as patch:
        as_if_on(patch, "sm_90")
        plain = attention.explain(attention.mha_decode_paged, *tensors, table, lens)
        found = attention.explain(attention.mha_decode_paged, *tensors, table, lens, **{name: lens})
    assert plain.backend == "hopper"
    assert found.backend == "triton"
    assert found.reason.endswith(f"not the Hopper kernel: {name}")
