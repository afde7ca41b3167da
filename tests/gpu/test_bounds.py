"""What no call may read or weigh, on a GPU, where no values are looked at: keys past a row of the page table, and
hidden keys. Portable and Hopper's kernels, against float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hidden_keys import FAR, HiddenCall, assert_seen_alone
from hidden_keys import OPERATIONS as HIDDEN
from hopper_chip import ON_HOPPER
from table_bounds import OPERATIONS, TableCall, assert_held

from kvlab.attention import masks
from kvlab.common.arrays import to_torch

pytestmark = pytest.mark.gpu
HOPPER = pytest.param("hopper", marks=ON_HOPPER)


def on_gpu(x: Any) -> Any:
    """Arrays in the memory of the GPU."""
    if isinstance(x, masks.MaterializedMask):
        return masks.MaterializedMask(on_gpu(x.array))
    return to_torch(np.ascontiguousarray(x)).cuda() if isinstance(x, np.ndarray) else x


def on_cpu(results: Any) -> tuple[Any, Any]:
    """Output and lse, in float64."""
    out, lse = (x.double().cpu().numpy() for x in results)
    return out, lse


def takes(backend: str, op: str, sight: str = "causal") -> bool:
    """Whether Hopper's kernels do that."""
    if backend == "triton":
        return True
    if "streaming" in op or op.startswith("mla_prefill"):
        return False
    return sight == "causal" or (sight == "window" and "mha_prefill" in op)


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("backend", ["triton", HOPPER])
@pytest.mark.parametrize("op", OPERATIONS)
def test_keys_past_the_row_are_not_read(op: str, backend: str, new: int) -> None:
    """The rows beside each row of the table name a page of NaN. ``check`` is left as it is: no values are looked at."""
    if not takes(backend, op):
        pytest.skip("no kernel of Hopper's")
    call = TableCall(op, hopper=backend == "hopper", new=new)
    arrays, wide, lens, named = call.arguments()
    del named["check"]
    table = on_gpu(wide)[1:-1]
    named = {name: on_gpu(x) for name, x in named.items()}
    call_again = (*map(on_gpu, arrays), table, on_gpu(lens))
    for splits in [{}] if "prefill" in op else [{"num_splits": 1}, {"num_splits": 3}, {}]:
        assert_held(call, *on_cpu(call.function(*call_again, **named, **splits, backend=backend)), atol=1e-5)
    torch.cuda.synchronize()


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("sight", ["causal", "window", "bias"])
@pytest.mark.parametrize("backend", ["triton", HOPPER])
@pytest.mark.parametrize("op", HIDDEN)
def test_seen_keys_alone_have_weight(op: str, backend: str, sight: str, far: str) -> None:
    if not takes(backend, op, sight):
        pytest.skip("no kernel of Hopper's")
    call = HiddenCall(op, sight, far, wide=backend == "hopper")
    args, named = call.arguments()
    args, named = tuple(map(on_gpu, args)), {name: on_gpu(x) for name, x in named.items()}
    values = (None, 0.0, -5e4) if call.decodes else (None,)
    for value in values:
        more = {} if value is None else {"mask_value": value}
        assert_seen_alone(call, *on_cpu(call.function(*args, **named, **more, backend=backend)))
