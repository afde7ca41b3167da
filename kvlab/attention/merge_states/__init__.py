"""Merging of partial attention: outputs over disjoint keys, put together by their lse."""

from __future__ import annotations

from typing import Any

from kvlab.attention.call.backends import check_arithmetic, choose_backend, rounded, run_kernel, run_on_numpy
from kvlab.attention.call.checks import check_arrays, check_dtype, check_strides, check_writeable, given, require
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.kinds import Kind, kind_of
from kvlab.attention.call.operation import PublicOperation
from kvlab.common.arrays import dtype_of, element_strides, overlaps
from kvlab.hardware import chip

from .config import merge_grid
from .emulator import launch as emulate
from .reference import reference as refer

__all__ = ["merge_states"]

MAX_PARTS = 1024


@PublicOperation
def merge_states(
    outs: Any, lses: Any, *, out: Any = None, return_lse: bool = True, backend: str = "auto",
    arithmetic: str = "float32",
) -> Any:
    """The attention over all keys, from N outputs over disjoint sets of them (split keys, cascade, context
    parallelism).

    outs   ``[N, T, H, D]``, or ``[N, B, S, H, D]`` as N calls of ``mha_decode`` give; bfloat16, float16 or float32
    lses   ``[N, T, H]``, or ``[N, B, S, H]``: natural log, float32. -inf (or +inf, as some libraries write) tells that
           a part saw no key; its output is not read and may be anything
    out    where to write, bfloat16, float16 or float32, memory of its own; a new array of outs' dtype by default
    return_lse  return ``(out, lse)`` with lse ``[T, H]`` or ``[B, S, H]``; otherwise out alone
    backend, arithmetic  as in ``mha_decode_paged``

    Weights are relative to the largest lse; sums are compensated. No key in any part gives 0 and -inf; an lse that is
    NaN gives NaN. ValueError on bad arguments, before anything is written.

    >>> import numpy as np
    >>> outs = np.array([1, 3, np.nan], np.float32).reshape(3, 1, 1, 1)  # three parts of one token, one head, D 1
    >>> lses = np.array([np.log(1), np.log(3), -np.inf], np.float32).reshape(3, 1, 1)
    >>> merged, lse = merge_states(outs, lses)
    >>> round(merged.item(), 5), round(float(np.exp(lse.item())), 5)
    (2.5, 4.0)
    """
    kind = _checked(outs, lses, out, backend)
    check_arithmetic(kind.plan, arithmetic)
    drop = len(outs.shape) == 4
    if drop:
        outs, lses, into = outs[:, :, None], lses[:, :, None], None if out is None else out[:, None]
    else:
        into = out
    if kind.plan.backend == "triton":
        path = "kvlab.attention.merge_states.kernel:launch"
        merged, lse = run_kernel(path, outs, lses, out=into, again=kind.launches)
    else:
        side = emulate if kind.plan.backend == "emulator" else _refer
        with chip.arithmetic(arithmetic):
            merged, lse = run_on_numpy(side, outs, lses, out=into)
    merged = out if out is not None else merged[:, 0] if drop else merged
    return (merged, lse[:, 0] if drop else lse) if return_lse else merged


def _refer(outs: Any, lses: Any, *, out: Any) -> tuple[Any, Any]:
    """The reference, rounded to the dtypes of the operation."""
    return rounded(*refer(outs, lses), outs.dtype, out)


def _checked(outs: Any, lses: Any, out: Any, backend: str) -> Kind[Explanation]:
    """The kind of a call, and what each call is asked, others of its kind or not."""
    kind = kind_of("merge_states", (outs, lses, out, backend), lambda: _plan(outs, lses, out, backend))
    if out is not None:
        for name, array in {"outs": outs, "lses": lses}.items():
            require(not overlaps(out, array), f"out shares memory with {name}", "memory of its own")
    return kind


def _plan(outs: Any, lses: Any, out: Any, backend: str) -> Explanation:
    """Backend of a call, whose arrays are as they must be, whatever is in them and where they lie."""
    check_arrays({"outs": outs, "lses": lses, **given(out=out)})
    shape = tuple(int(n) for n in outs.shape)
    require(len(shape) in (4, 5), f"outs has shape {shape}", "[N, T, H, D] or [N, B, S, H, D]")
    require(1 <= shape[0] <= MAX_PARTS, f"outs has {shape[0]} parts", f"1 to {MAX_PARTS}")
    check_dtype("outs", outs)
    require(dtype_of(lses, "lses").name == "float32", f"lses has dtype {lses.dtype}", "float32")
    require(tuple(lses.shape) == shape[:-1], f"lses has shape {tuple(lses.shape)}", f"{shape[:-1]}, as outs is {shape}")
    if out is not None:
        require(tuple(out.shape) == shape[1:], f"out has shape {tuple(out.shape)}", f"{shape[1:]}, a part of outs")
        check_dtype("out", out)
        check_writeable("out", out)
    for name, array in {"outs": outs, **given(out=out)}.items():
        strides = element_strides(array, name)
        fits = 0 in shape or shape[-1] < 2 or strides[-1] == 1
        require(fits, f"{name} has strides {strides}", "contiguous in the last dimension")
    chosen, reason = choose_backend(outs, backend)
    if chosen == "triton":  # tensors have no negative strides
        for name, array in {"outs": outs, "lses": lses, **given(out=out)}.items():
            check_strides(name, array, contiguous=False)
    return Explanation("merge_states", chosen, reason, None, merge_grid(*(*shape[1:-2], 1)[:2], *shape[-2:]))


def _explain(
    outs: Any, lses: Any, *, out: Any = None, backend: str = "auto", arithmetic: str = "float32", **_: Any
) -> Explanation:
    plan = _checked(outs, lses, out, backend).plan
    check_arithmetic(plan, arithmetic)
    return plan


merge_states.explain = _explain
