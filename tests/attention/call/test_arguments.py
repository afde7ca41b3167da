"""Every argument of every public operation, bad in every way: the error names it, and nothing is written.

Rests on the names in the signatures. Values that another argument contradicts are not here: either may be named.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from operation_calls import OPERATIONS, call_of, floats

from kvlab import attention
from kvlab.attention import Rope, explain
from kvlab.attention.call.operation import FLAGS, NAMES
from kvlab.common.arrays import to_numpy, to_torch
from kvlab.common.torch_here import is_torch

Bad = dict[str, Any]
"""By name: a value, or a function that makes one of the good value."""

ARRAYS: Bad = {
    "a list": lambda a: a.tolist(), "text": lambda a: "x", "an object": lambda a: object(),
    "no axis": lambda a: a.reshape(-1)[0].reshape(()), "seven axes": lambda a: a.reshape((1,) * (7 - a.ndim) + a.shape),
    "complex": lambda a: a.astype(complex), "bool": lambda a: a > 0, "int8": lambda a: a.astype(np.int8),
    "objects": lambda a: a.astype(object), "long double": lambda a: a.astype(np.longdouble),
    "bytes swapped": lambda a: a.astype(a.dtype.newbyteorder()), "masked": np.ma.masked_array,
    "of another library": torch.from_numpy,
}
TENSORS: Bad = {
    "a list": lambda t: t.tolist(), "no axis": lambda t: t.reshape(-1)[0], "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.bool(), "seven axes": lambda t: t.reshape((1,) * (7 - t.ndim) + tuple(t.shape)),
    "sparse": lambda t: t.to_sparse(), "on meta": lambda t: t.to("meta"), "of another library": to_numpy,
    "float64": lambda t: t.double(),
}
NUMBERS: Bad = {
    "text": "x", "bytes": b"1", "NaN": float("nan"), "infinity": float("inf"), "huge": 10**400, "vast": 10**9999,
    "complex": 1j, "an object": object(), "a list": [1], "bool": True, "an array": np.ones(2),
}
WHOLE: Bad = {
    "text": "2", "half": 1.5, "bool": True, "below": -1, "vast": 10**9999, "an array": np.arange(3), "a list": [1],
    "an object": object(), "NaN": float("nan"),
}
OBJECTS: Bad = {"text": "x", "an object": object(), "an array": np.ones(2), "vast": 10**9999, "one half": 0.5}
TEXTS: Bad = {
    "an array": np.array(["auto", "x"]), "three": 3, "none": None, "unknown": "unknown", "bytes": b"auto",
    "a list": ["auto"],
}
SWITCHES: Bad = {
    "an array": np.ones(2), "no axis": np.array(True), "a tensor": torch.ones(1), "no": "no", "one": 1, "zero": 0.0,
    "a list": [],
}
SCALES: Bad = NUMBERS | {
    "five axes": np.ones((3,) * 5, np.float32), "float64": np.ones(1), "of another library": torch.ones(1),
}
WHOLE_NAMES = ("layer", "num_splits", "latent_dim", "v_dim", "k_granularity", "v_granularity", "max_seqlen_q")


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(attention, name)).parameters)


def bad_values(name: str, good: Any, parameter: inspect.Parameter) -> Bad:
    if name in NAMES:
        return TEXTS
    if name in FLAGS:
        return SWITCHES if FLAGS[name] else SWITCHES | {"none": None}
    if name in WHOLE_NAMES:
        return WHOLE
    if name.endswith("_scale") or (name == "scale" and parameter.annotation == "Any"):
        return SCALES
    if name in ("scale", "softcap", "mask_value"):
        return {what: x for what, x in NUMBERS.items() if (name, what) != ("mask_value", "infinity") or x > 0}
    return TENSORS if is_torch(good) else ARRAYS if isinstance(good, np.ndarray) else OBJECTS


def cases(make: Callable[[Any], Any]) -> Iterator[Any]:
    for operation in OPERATIONS:
        good = call_of(operation, make)
        for name, parameter in parameters(operation).items():
            if make is to_torch and not is_torch(good.get(name)):
                continue
            yield pytest.param(operation, name, bad_values(name, good.get(name), parameter), id=f"{operation}-{name}")


def contents(value: Any) -> Any:
    """The bytes of all arrays in it."""
    if isinstance(value, dict):
        return {name: contents(part) for name, part in value.items()}
    if isinstance(value, np.ndarray) or is_torch(value):
        return to_numpy(value.detach() if is_torch(value) else value).tobytes()
    return contents(vars(value)) if type(value).__module__.startswith("kvlab.cache.") else None


def refused(operation: str, name: str, bad: Bad, make: Callable[[Any], Any]) -> None:
    function = getattr(attention, operation)
    for what, new in bad.items():
        a = call_of(operation, make, fp8=bad is SCALES)
        before = contents(a)
        changed = a | {name: new(a[name]) if callable(new) else new}
        for call in (function, lambda **kwargs: explain(function, **kwargs)):
            if call is not function and what == "an array" and bad is NUMBERS:
                continue
            with pytest.raises((ValueError, IndexError)) as caught:
                call(**changed)
            said = str(caught.value)
            assert re.search(rf"\b{name}\b", said), f"{name} {what}: {said}"
            assert type(caught.value) in (ValueError, IndexError), f"{name} {what}: {caught.value!r}"
            assert "truth value" not in said, f"{name} {what}"
        assert contents(a) == before, f"{name} {what}: something was written"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_good_calls_are_good(operation: str) -> None:
    for fp8 in (False, True):
        getattr(attention, operation)(**call_of(operation, fp8=fp8))


@pytest.mark.parametrize(("operation", "name", "bad"), list(cases(lambda array: array)))
def test_bad_argument(operation: str, name: str, bad: Bad) -> None:
    refused(operation, name, bad, lambda array: array)


@pytest.mark.parametrize(("operation", "name", "bad"), list(cases(to_torch)))
def test_bad_tensor(operation: str, name: str, bad: Bad) -> None:
    refused(operation, name, bad, to_torch)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_flags_are_known(operation: str) -> None:
    """Every parameter that is annotated as a bool is among the flags that are looked at, with or without None."""
    annotated = {n: "None" in p.annotation for n, p in parameters(operation).items() if "bool" in str(p.annotation)}
    assert annotated == {name: FLAGS[name] for name in annotated}


def test_flags_of_numpy_are_taken() -> None:
    a = call_of("mha_prefill")
    _, lse = attention.mha_prefill(**a, return_lse=np.True_, base2=np.True_, causal=np.False_, check=np.True_)
    _, plain = attention.mha_prefill(**a, return_lse=True, base2=True, causal=False, check=True)
    np.testing.assert_array_equal(lse, plain)


@pytest.mark.parametrize("flag", SWITCHES.values(), ids=SWITCHES)
def test_interleaved(flag: Any) -> None:
    with pytest.raises(ValueError, match=r"^interleaved .*: must be True or False"):
        Rope(floats(4, 8), floats(4, 8), interleaved=flag)


LANES = (
    ("mha_decode_paged", "k_cache", "k_cache"), ("mha_decode_streaming_paged", "v_cache", "v_cache"),
    ("mha_prefill", "k", "k"), ("mha_prefill_paged", "k_cache", "k_cache"), ("mha_prefill_paged", "v_cache", "v_cache"),
    ("mla_decode_paged", "kv_cache", "kv_cache"), ("mla_prefill_paged", "v", "v"),
    ("mla_prefill_paged", "kv_cache", "the rope part of kv_cache"), ("mla_prefill_ragged", "k_rope", "k_rope"),
)


@pytest.mark.parametrize(("operation", "name", "said"), LANES)
def test_rows_that_no_lane_copies_are_named(operation: str, name: str, said: str) -> None:
    a = call_of(operation)
    room = np.zeros((*a[name].shape[:-1], a[name].shape[-1] + 1), np.float32)
    with pytest.raises(ValueError, match=rf"^{said} has strides of .* bytes: must be multiples of 16"):
        getattr(attention, operation)(**a | {name: room[..., :-1]})
