"""A temperature for each query head, in every operation and backend.

Rests on the float64 references of queries that are multiplied by it: scores are linear in the query, and softcap, ALiBi
and sinks come after.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from operation_calls import OPERATIONS, call_of, floats

from kvlab import attention
from kvlab.attention.call.backends import function_at
from kvlab.attention.call.call import Call
from kvlab.attention.mha_decode.call import MHADecode
from kvlab.attention.mha_decode_streaming.call import StreamingDecode
from kvlab.attention.mha_prefill.call import DensePrefill, PagedPrefill
from kvlab.attention.mla_decode.call import MLADecode
from kvlab.attention.mla_prefill.call import PagedMLAPrefill, RaggedMLAPrefill
from kvlab.common.arrays import to_torch
from kvlab.mirror import lockstep

ATTENTION = [name for name in OPERATIONS if not name.endswith(("store", "store_paged")) and name != "merge_states"]
TEMPERATURE = np.float32([0.5, -2.0, 0.0, 1.5])
BESIDE: dict[str, dict[str, Any]] = {
    "alone": {"sinks": None, "alibi_slopes": None},
    "softcap": {"sinks": None, "softcap": 0.7},
    "all": {"softcap": 0.7},
}


def asked(name: str, beside: str, tokens: int) -> dict[str, Any]:
    """The keywords of a call with features of ``BESIDE``; decodes with more than one new token have ``tokens``."""
    found = call_of(name) | BESIDE[beside]
    del found["out"]
    if "decode" in name and tokens > 1 and "cache" not in found:
        found["q"] = floats(2, tokens, *found["q"].shape[1:])
    return found


@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("name", ATTENTION)
def test_it_multiplies_the_scores(name: str, beside: str, backend: str) -> None:
    call, given = getattr(attention, name), asked(name, beside, 3)
    heated = given | {"q": given["q"] * TEMPERATURE[:, None]}
    found = call(**given, temperature=TEMPERATURE, backend=backend, return_lse=True)
    exact = call(**heated, backend="reference", return_lse=True)
    other = call(**given, backend="reference", return_lse=True)
    for result, expected, without in zip(found, exact, other, strict=True):
        np.testing.assert_allclose(result, expected, rtol=2e-6, atol=2e-6)
        assert (np.abs(expected - without) > 1e-3).any(), "the case tells nothing"


@pytest.mark.interpreter
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow][: name == "attend_paged"])
    for name in ATTENTION if name.endswith(("paged", "ragged", "prefill"))
])  # fmt: skip
def test_the_kernels(name: str) -> None:
    call, given = getattr(attention, name), asked(name, "all", 3)
    exact = call(**given | {"q": given["q"] * TEMPERATURE[:, None]}, backend="reference", return_lse=True)
    if "cache" in given:
        pytest.skip("its form over arrays runs the same kernel")
    tensors = {n: to_torch(a) if isinstance(a, np.ndarray) else a for n, a in given.items()}
    found = call(**tensors, temperature=to_torch(TEMPERATURE), return_lse=True)
    for result, expected in zip(found, exact, strict=True):
        np.testing.assert_allclose(result.numpy(), expected, rtol=2e-6, atol=2e-6)


BAD = [
    (np.ones(3, np.float32), r"temperature has shape \(3,\): must be \[Hq = 4\]"),
    (np.ones((1, 4), np.float32), r"temperature has shape \(1, 4\): must be \[Hq = 4\]"),
    (np.ones(4), "temperature has dtype float64: must be float32"),
    (np.ones(8, np.float32)[::2], "temperature is strided: must be contiguous in its last dimension"),
    (0.5, "temperature"),
    (to_torch(np.ones(4, np.float32)), "temperature"),
]


@pytest.mark.parametrize("value, message", BAD, ids=[str(i) for i in range(len(BAD))])
@pytest.mark.parametrize("name", ATTENTION)
def test_a_bad_one_is_named_before_anything_is_written(name: str, value: Any, message: str) -> None:
    given = call_of(name)
    given["out"][...] = 7
    with pytest.raises(ValueError, match=message):
        getattr(attention, name)(**given, temperature=value)
    assert (given["out"] == 7).all()


CALLS: dict[str, type[Call[Any]]] = {
    "mha_decode_paged": MHADecode, "mha_decode_streaming_paged": StreamingDecode, "mla_decode_paged": MLADecode,
    "mha_prefill": DensePrefill, "mha_prefill_paged": PagedPrefill, "mla_prefill_paged": PagedMLAPrefill,
    "mla_prefill_ragged": RaggedMLAPrefill,
}


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CALLS)
def test_lockstep(name: str) -> None:
    """Every output of every step agrees between the interpreted kernel and the emulator."""
    call = CALLS[name](**asked(name, "all", 3), temperature=TEMPERATURE, backend="emulator").planned()
    sibling = inspect.signature(function_at(call.plan.sibling)).parameters
    arguments = dict(zip(sibling, call.arrays, strict=False)) | call.named()
    emulator = {"arch": call.plan.explanation.arch}
    given = {name: value for name, value in arguments.items() if value is not None}
    result = lockstep(call.operation, given, emulator=emulator)
    assert result.ok, str(result.first_difference)
