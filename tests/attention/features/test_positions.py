"""Positions of query tokens that are given.

Rests on softmax in float64 over the keys that the positions show (``hidden_keys``), where each hidden key would
outweigh all of them, and on a law: tokens and their positions in another order give the same results in that order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hidden_keys import OPERATIONS, HiddenCall, assert_seen_alone, is_refused

from kvlab import attention
from kvlab.attention.masks import ChunkedCausalMask, Mask
from kvlab.common.arrays import to_torch

POSITIONS = np.array([[2, 0, -4], [13, 69, 40], [200, 20, 31]])
ORDER = {2: [1, 0], 3: [2, 0, 1]}


class SameParity(Mask):
    """Keys at positions as odd or even as the query's, none behind it."""

    def visible(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return ((q_pos + k_pos) % 2 == 0) & (k_pos <= q_pos)


class PlacedCall(HiddenCall):
    """A call whose tokens are at ``POSITIONS``."""

    def visible(self, b: int) -> Any:
        p, key = POSITIONS[b, : self.S, None, None], np.arange(self.lens[b])
        also = {"window": key > p - 20, "chunked": p // 8 == key // 8, "parity": (p + key) % 2 == 0}
        return np.broadcast_to((key <= p) & also.get(self.sight, True), (self.S, 4, len(key)))

    def options(self) -> dict[str, Any]:
        masks = {"chunked": ChunkedCausalMask(8), "parity": SameParity()}
        given = {"mask": masks[self.sight]} if self.sight in masks else super().options()
        return given | {"q_positions": self._rows(POSITIONS[:, : self.S])}


@pytest.mark.parametrize("sight", ["causal", "window", "chunked", "parity"])
@pytest.mark.parametrize("backend", ["reference", "emulator", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("op", OPERATIONS)
def test_they_tell_what_is_seen(op: str, backend: str, sight: str) -> None:
    call = PlacedCall(op, sight)
    assert_seen_alone(call, *call(backend=backend))


SCHEDULED: list[tuple[str, dict[str, Any]]] = [
    ("attend_paged", {}), ("attend_paged", {"batch_invariant": True}), ("mha_decode_paged", {"balanced": True}),
]


@pytest.mark.parametrize("op, options, sight, backend", [
    *((*one, sight, "emulator") for one in SCHEDULED for sight in ("causal", "window", "chunked", "parity")),
    ("attend_paged", {}, "window", "reference"),
])
def test_over_a_schedule_they_tell_what_is_seen(op: str, options: dict[str, Any], sight: str, backend: str) -> None:
    call = PlacedCall(op, sight)
    assert_seen_alone(call, *call(backend=backend, **options))


def test_a_plan_with_positions_is_of_all_keys() -> None:
    """A plan without bounds serves the call and changes no bit; one of a causal call is refused."""
    call = PlacedCall("mha_decode_paged")
    sizes: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "itemsize": 4}
    whole, causal = (attention.plan(np.array(call.lens), 2, causal=causal, **sizes) for causal in (False, True))
    for ours, theirs in zip(call(plan=whole), call(balanced=True), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match="plan is of 0 keys seen behind a query's own"):
        call(plan=causal)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx950"])
def test_splits_of_16_bits(arch: str) -> None:
    call = PlacedCall("mha_decode_paged", "window", wide=True)
    assert_seen_alone(call, *call(arch=arch, num_splits=2))


@pytest.mark.parametrize("op", OPERATIONS)
def test_tokens_in_another_order(op: str) -> None:
    """With ALiBi, softcap, a window, and padding before the keys: bit for bit."""
    call = HiddenCall(op, "window")
    pad = np.array([1, 5, 8])
    order = ORDER[call.S]
    keys = (np.array(call.lens) - pad)[:, None]
    named: dict[str, Any] = {"alibi_slopes": np.float32([0.5, 1, 2, 4]), "softcap": 200.0, "leftpad_k": pad}
    plain = call(**named)
    call.q = np.ascontiguousarray(call.q[:, order])
    positions = np.ascontiguousarray((keys - call.S + np.arange(call.S))[:, order])
    found = call(**named, q_positions=call._rows(positions))
    flat = not (call.decodes or call.form == "dense")
    for ours, theirs in zip(found, plain, strict=True):
        a, b = (x.reshape(3, call.S, *x.shape[1:]) if flat else x for x in (ours, theirs))
        np.testing.assert_array_equal(a, b[:, order])


def test_one_token_of_each_sequence() -> None:
    """Law: a sequence whose token is at p gives what one of p + 1 keys does."""
    args, named = HiddenCall("mha_decode_paged").arguments()
    q, position = np.ascontiguousarray(args[0][:, 0]), np.array([1, 40, 32])
    found = attention.mha_decode_paged(q, *args[1:], **named, q_positions=position)
    same = attention.mha_decode_paged(q[:, None], *args[1:], **named, q_positions=position[:, None])
    assert (same[0][:, 0] == found[0]).all()
    exact = attention.mha_decode_paged(q, *args[1:-1], position + 1, **named)
    for ours, theirs in zip(found, exact, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6)


def test_calls_of_one_kind_have_their_own() -> None:
    args, named = HiddenCall("mha_prefill ragged").arguments()
    tensors = {n: to_torch(a) if isinstance(a, np.ndarray) else a for n, a in named.items()} | {"max_seqlen_q": 3}
    for shift in (0, 2):
        positions = POSITIONS.reshape(-1) - shift
        exact, _ = attention.mha_prefill(*args, **named, q_positions=positions, backend="reference")
        found, _ = attention.mha_prefill(
            *map(to_torch, args), **tensors, q_positions=to_torch(positions), backend="reference"
        )
        np.testing.assert_array_equal(found.numpy(), exact)


BAD = [
    ({"q_positions": np.zeros((3, 3), int)}, r"q_positions has shape \(3, 3\): must be \(3, 2\), that of q"),
    ({"q_positions": np.zeros(3, int)}, r"q_positions has shape \(3,\): must be \(3, 2\)"),
    ({"q_positions": np.zeros((3, 2))}, "q_positions has dtype float64: must be a 32- or 64-bit integer"),
    ({"q_positions": np.zeros((3, 4), int)[:, ::2]}, "q_positions has strides"),
    ({"q_positions": [[0, 1]] * 3}, "q_positions is a list: must be a NumPy array or torch tensor"),
    ({"q_positions": np.full((3, 2), 1 << 40)}, r"q_positions\[0, 0\] is 1099511627776: must be -536870912 to 53687"),
    ({"q_positions": np.zeros((3, 2), int), "backend": "hopper"}, "backend is 'hopper' with q_positions"),
]


@pytest.mark.parametrize("options, message", BAD, ids=[m[:30] for _, m in BAD])
def test_bad_positions(options: dict[str, Any], message: str) -> None:
    is_refused(options, message)
