"""A temperature of each query head on the GPU, and what the compiler knows of arguments in tuples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from operation_calls import OPERATIONS, call_of, floats

from kvlab import attention
from kvlab.attention.features.arguments import feature_arrays
from kvlab.attention.features.resolve import Features
from kvlab.attention.mha_decode import kernel
from kvlab.common.arrays import to_torch

pytestmark = pytest.mark.gpu
OVER_ARRAYS = [n for n in OPERATIONS if n.endswith(("paged", "ragged", "prefill")) and "store" not in n]
TEMPERATURE = np.float32([0.5, -2.0, 0.0, 1.5])


@pytest.mark.parametrize("name", [name for name in OVER_ARRAYS if "cache" not in call_of(name)])
def test_it_multiplies_the_scores(name: str) -> None:
    """Rests on the float64 reference of queries that are multiplied by it."""
    call, given = getattr(attention, name), call_of(name) | {"softcap": 0.7}
    del given["out"]
    if "decode" in name:
        given["q"] = floats(2, 3, *given["q"].shape[1:])
    exact = call(**given | {"q": given["q"] * TEMPERATURE[:, None]}, backend="reference", return_lse=True)
    tensors = {n: to_torch(a).cuda() if isinstance(a, np.ndarray) else a for n, a in given.items()}
    found = call(**tensors, temperature=to_torch(TEMPERATURE).cuda(), return_lse=True)
    for result, expected in zip(found, exact, strict=True):
        np.testing.assert_allclose(result.cpu().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_multiples_of_16_in_tuples_are_known() -> None:
    """Rests on what Triton compiled: strides in tuples are noted as divisible by 16, absent arrays are constants."""
    found: list[Any] = []

    def seen(*args: Any, **named: Any) -> Any:
        found.append(launched(*args, **named))
        return found[-1]

    launched = kernel.attend.run
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((2, 4, 64), *[(6, 16, 2, 64)] * 2))
    table, lens = torch.tensor([[3, 0], [2, 4]], device="cuda"), torch.tensor([20, 9], device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel.attend, "run", seen)
        attention.mha_decode_paged(q, k, v, table, lens, backend="triton")
    source, names = found[0].src, kernel.attend.arg_names
    divisible = {path for path, attrs in source.attrs.items() if ["tt.divisibility", 16] in [list(a) for a in attrs]}
    for strides in ("q_strides", "k_strides", "v_strides"):
        assert any(path[0] == names.index(strides) for path in divisible if isinstance(path, tuple)), strides
    of = names.index("features")
    absent = [path for path, value in source.constants.items() if path[0] == of and value is None]
    assert len(absent) == len(feature_arrays(Features()))
