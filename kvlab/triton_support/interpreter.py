"""Triton's CPU interpreter, corrected: bfloat16, fp8, NaN rules, loop bounds.

:func:`install` applies every correction once. The idea behind most of them: the interpreter keeps bfloat16 and fp8
values as unsigned integers and then computes with the integers. Here their arrays have the ml-dtypes dtype instead,
so that NumPy itself rounds, compares and selects them rightly; only where bytes move (loads, stores) or a result must
be wider than its operands (dot, sum, fma) is more needed. ``tensor.handle.data`` of an interpreted bf16 tensor is
thus a NumPy array of dtype ``bfloat16``.

What is computed, and after whom:

===================== ===============================================================================================
f32 -> bf16, f16      round to nearest even, overflow to infinity; ``fp_downcast_rounding="rtz"`` truncates
f32, f16, bf16 -> fp8 round to nearest even, then saturated: what is past the largest finite value, an infinity too,
                      becomes that value; NaN stays NaN. So does ``cvt.rn.satfinite``, Triton's cast from sm_89 on
integer -> bf16       through float32, as on sm_80 and AMD (sm_90 rounds integers past 2^24 once, not twice)
fp8 -> wider          exact, infinities and NaNs too (compiled for sm_90, e5m2 -> bf16 makes finite numbers of them)
NaN                   kept; its sign and payload are not those of any particular machine
bf16 ``+ - * /``      each operation rounded once (the products and sums are exact enough in float32)
``fma``               rounded once
``sum``, ``cumsum``   of 8- and 16-bit floats: added in float32, rounded once; compiled kernels round after every
                      addition, in an order of their own
``dot``               exact products of the stored values, float32 accumulation in the order of BLAS
``maximum, minimum``  and ``clamp`` without ``propagate_nan`` return the operand that is a number, as ``max.f32`` does
===================== ===============================================================================================
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import ml_dtypes
import numpy as np

#: Triton's names of the formats that NumPy lacks; fp8e4b15 has no counterpart and stays as Triton has it
_DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp8e4b8": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "fp8e5b16": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_STORED = frozenset(_DTYPES.values())
_NARROW = _STORED | {np.dtype(np.float16)}


class NotInterpreted(RuntimeError):
    """Triton was imported for compiling; the interpreter's corrections have nothing to act on."""


def is_interpreted() -> bool:
    """Tells whether kernels of this process are interpreted (an import of Triton decides it for the whole process).

    Before Triton is imported the answer is what an import would do: the environment variable TRITON_INTERPRET.
    """
    standard = sys.modules.get("triton.language.standard")
    if standard is not None and hasattr(standard, "sum"):
        return type(standard.sum).__name__ == "InterpretedFunction"
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "y", "yes", "on", "true")


def install() -> None:
    """Correct Triton's interpreter in this process; a second call does nothing.

    Raises :class:`NotInterpreted` when Triton was imported without ``TRITON_INTERPRET=1``: import it in a process
    that has the variable, for instance through :func:`kvlab.triton_support.child.run`.
    """
    if not is_interpreted():
        raise NotInterpreted(
            "Triton is not interpreted in this process: set TRITON_INTERPRET=1 before the first import of triton, "
            "or run the kernel with kvlab.triton_support.child.run"
        )
    from triton.runtime import interpreter

    if getattr(interpreter, "kvlab_corrected", False):
        return
    _correct_storage(interpreter)
    _correct_casts(interpreter)
    _correct_arithmetic(interpreter)
    _correct_reductions(interpreter)
    _correct_launch(interpreter)
    interpreter.kvlab_corrected = True


def _bits(data: np.ndarray) -> np.ndarray:
    """The same elements as unsigned integers."""
    return data.view(f"u{data.itemsize}")


def _wide(data: np.ndarray) -> np.ndarray:
    """Floats of 16 and 8 bits as float32, which holds them exactly; others unchanged."""
    return data.astype(np.float32) if data.dtype in _NARROW else data


def _to_odd(near: np.ndarray, error: np.ndarray) -> np.ndarray:
    """``near``, the nearest to ``near + error``, rounded to odd instead: to round that further is to round once."""
    bits = _bits(near)
    chopped = np.where(np.sign(near) * error < 0, bits - 1, bits).astype(bits.dtype)
    return np.where((error == 0) | np.isnan(error), bits, chopped | 1).astype(bits.dtype).view(near.dtype)


def _round(data: np.ndarray, dtype: np.dtype[Any], toward_zero: bool = False) -> np.ndarray:
    """Floats as ``dtype``: nearest even or toward zero; fp8 saturates.

    >>> _round(np.float32([1 + 2**-8, 1 + 3 * 2**-8]), _DTYPES["bf16"]).astype(float).tolist()
    [1.0, 1.015625]
    >>> _round(np.float32([31.6, 500, -np.inf, np.nan]), _DTYPES["fp8e4nv"]).astype(float).tolist()
    [32.0, 448.0, -448.0, nan]
    """
    if data.dtype == np.float64 and dtype.itemsize < 4:  # ml-dtypes goes through float32
        near = data.astype(np.float32)
        data = _to_odd(near, data - near)
    if dtype.itemsize == 1:
        largest = float(ml_dtypes.finfo(dtype).max)
        data = np.clip(_wide(data), -largest, largest)  # NaN passes
    out = data.astype(dtype)
    if toward_zero:
        away = np.abs(out.astype(np.float64)) > np.abs(data.astype(np.float64))
        out = (_bits(out) - away.astype(f"u{dtype.itemsize}")).view(dtype)
    return out


def _correct_storage(interpreter: Any) -> None:
    """The arrays of bf16 and fp8 tensors carry their own dtype; memory sees their bits."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    numpy_dtype, store = interpreter._get_np_dtype, builder.create_masked_store
    load = builder.create_masked_load

    def get_np_dtype(tt_dtype: Any) -> np.dtype[Any]:
        return _DTYPES.get(getattr(tt_dtype.scalar, "name", "")) or numpy_dtype(tt_dtype)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        element = ptrs.get_element_ty()
        dtype = get_np_dtype(element)
        if dtype not in _STORED:
            return load(self, ptrs, mask, other, *rest, **named)
        fill = np.zeros_like(ptrs.data, dtype) if other is None else other.data
        bits = interpreter._interpreter.load(ptrs.data, mask.data, _bits(fill), _bits(fill).dtype)
        return handle(bits.view(dtype), element)

    def create_masked_store(self: Any, ptrs: Any, value: Any, *rest: Any, **named: Any) -> Any:
        if value.data.dtype in _STORED:
            value = handle(_bits(value.data), value.dtype)
        return store(self, ptrs, value, *rest, **named)

    interpreter._get_np_dtype = get_np_dtype
    builder.create_masked_load = create_masked_load
    builder.create_masked_store = create_masked_store
    builder.get_bf16 = lambda self, value: handle(
        np.array([value], np.float32).astype(_DTYPES["bf16"]), interpreter.tl.bfloat16
    )


def _correct_casts(interpreter: Any) -> None:
    """Every cast from or to a float rounds as the table of this module says."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, convert = builder.cast_impl, builder.create_fp_to_fp
    toward_zero = interpreter._ir.ROUNDING_MODE.RTZ

    def unknown(*types: Any) -> bool:
        return any(t.scalar.name == "fp8e4b15" for t in types)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        dtype = interpreter._get_np_dtype(dst_type)
        if src.data.dtype not in _STORED and dtype not in _STORED:
            return cast(self, src, dst_type)
        data = src.data if src.data.dtype.kind == "f" else src.data.astype(np.float32)
        floating = dst_type.scalar.is_floating()
        return handle(_round(data, dtype) if floating else data.astype(dtype), dst_type.scalar)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if unknown(src.dtype, dst_type):
            return convert(self, src, dst_type, rounding_mode)
        dtype = interpreter._get_np_dtype(dst_type)
        return handle(_round(src.data, dtype, rounding_mode == toward_zero), dst_type.scalar)

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    if hasattr(interpreter, "_mxfp_value_handle_to_float32"):  # operands of dot_scaled
        value_of = interpreter._mxfp_value_handle_to_float32
        interpreter._mxfp_value_handle_to_float32 = lambda value: (
            value.data.astype(np.float32) if value.dtype.is_floating() else value_of(value)
        )


def _correct_arithmetic(interpreter: Any) -> None:
    """Truth values are int1; max and min prefer numbers; fma rounds once; dot multiplies values and adds in float32."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    binary, fma, dot = builder.binary_op, builder.create_fma, builder.create_dot

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        out = binary(self, lhs, rhs, op)
        return handle(out.data, interpreter.tl.int1) if out.data.dtype == bool else out

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype not in _NARROW | {np.dtype(np.float32)}:
            return fma(self, x, y, z)
        product, addend = x.data.astype(np.float64) * y.data.astype(np.float64), z.data.astype(np.float64)
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)  # exact: Knuth's two-sum
        return handle(_round(_to_odd(total, error), z.data.dtype), z.dtype.scalar)

    def create_clampf(self: Any, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
        if propagate_nans != interpreter._ir.PROPAGATE_NAN.NONE:
            return self.create_minimumf(self.create_maximumf(arg, lo), hi)
        return self.create_minnumf(self.create_maxnumf(arg, lo), hi)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if not d.dtype.scalar.is_floating():
            return dot(self, a, b, d, *rest)
        wide = [handle(_wide(t.data), interpreter.tl.float32) if t.data.dtype in _NARROW else t for t in (a, b, d)]
        out = dot(self, *wide, *rest).data
        return handle(out if out.dtype == d.data.dtype else _round(out, d.data.dtype), d.dtype.scalar)

    builder.binary_op, builder.create_fma, builder.create_dot = binary_op, create_fma, create_dot
    builder.create_clampf = create_clampf
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)


def _correct_reductions(interpreter: Any) -> None:
    """Sums of 8- and 16-bit floats, running ones too, are taken in float32."""
    reduce, scan = interpreter.ReduceOps, interpreter.ScanOps
    total, running = reduce.sum, scan.cumsum

    def sum_of(self: Any, input: Any) -> Any:
        data = input.handle.data
        if data.dtype not in _NARROW:
            return total(self, input)
        wide = np.sum(data, axis=self.axis, keepdims=self.keep_dims, dtype=np.float32)
        return self.to_tensor(_round(wide, data.dtype), input.dtype)

    def cumsum(self: Any, input: Any) -> Any:
        data = input.handle.data
        if data.dtype not in _NARROW:
            return running(self, input)
        return [self.to_tensor(_round(np.cumsum(data, self.axis, np.float32), data.dtype), input.dtype)]

    reduce.sum, scan.cumsum = sum_of, cumsum


def _correct_launch(interpreter: Any) -> None:
    """Tensors serve as loop bounds under any NumPy; a kernel's infinities and NaNs do not warn."""
    patch, call = interpreter._patch_lang_tensor, interpreter.GridExecutor.__call__

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    @functools.wraps(call)
    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return call(self, *args, **kwargs)

    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.GridExecutor.__call__ = launch
