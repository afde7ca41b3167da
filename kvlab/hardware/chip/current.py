"""Arithmetic of an emulator's float32 operations: NumPy's, or that of an H100.

The choice is a context, as a decimal context or ``np.errstate`` is: what runs inside ``with arithmetic("chip")`` takes
the operations below from there, however deep it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.hardware.arch import Arch, get_arch

from . import functions
from .products import SUMS, mma_sum

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Arithmetic:
    """Operations on float32 arrays, and sums of products.

    exp2, log2, exp, log  of an array. divide(x, y)
    fma(a, b, c)          ``a * b + c`` where the compiled kernel has one instruction for both
    exact                 whether they are the chip's, to the bit

    >>> import numpy as np
    >>> current_arithmetic().name, float(current_arithmetic().exp2(np.float32(-0.5)))
    ('float32', 0.7071067690849304)
    >>> with arithmetic("chip"):
    ...     current_arithmetic().name, float(current_arithmetic().exp2(np.float32(-0.5)))
    ('chip', 0.7071067094802856)
    """

    name: str
    exp2: Callable[[Array], Array]
    log2: Callable[[Array], Array]
    exp: Callable[[Array], Array]
    log: Callable[[Array], Array]
    divide: Callable[[Any, Array], Array]
    fma: Callable[[Any, Any, Any], Array]
    exact: bool = False

    def products(self, a: Array, b: Array, c: Array) -> Array:
        """``c + a @ b`` in float32 of ``[..., M, K]``, ``[..., K, N]`` and ``[..., M, N]``: by NumPy's matrix product,
        or step by step (:func:`~kvlab.hardware.mma_sum`), float32 operands one fused operation after another."""
        if self.exact and a.dtype in SUMS:
            return mma_sum(a, b, c)
        a, b = a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
        if not self.exact:
            return np.asarray(c + np.matmul(a, b))
        for k in range(a.shape[-1]):
            c = self.fma(a[..., :, k, None], b[..., None, k, :], c)
        return c


def _fma(a: Any, b: Any, c: Any) -> Array:
    return np.asarray(a * b + c)


ARITHMETICS = {
    x.name: x
    for x in (
        Arithmetic("float32", np.exp2, np.log2, np.exp, np.log, np.divide, _fma),
        Arithmetic(
            "chip", functions.ex2_approx, functions.log2f, functions.expf, functions.logf, functions.div_full,
            functions.fma, exact=True,
        ),
    )
}
_current: ContextVar[Arithmetic] = ContextVar("arithmetic", default=ARITHMETICS["float32"])


def current_arithmetic() -> Arithmetic:
    """The arithmetic of the innermost :func:`arithmetic`, or float32's.

    >>> current_arithmetic().exact
    False
    """
    return _current.get()


def exp2(x: Any) -> Array:
    """2 to the power of x, in the current arithmetic; x float32.

    >>> import numpy as np
    >>> with arithmetic("chip"):
    ...     exp2(np.float32([-0.5])).tolist()
    [0.7071067094802856]
    """
    return _current.get().exp2(x)


def log2(x: Any) -> Array:
    """Base-2 logarithm in the current arithmetic; x float32."""
    return _current.get().log2(x)


def exp(x: Any) -> Array:
    """e to the power of x, in the current arithmetic; x float32."""
    return _current.get().exp(x)


def log(x: Any) -> Array:
    """Natural logarithm in the current arithmetic; x float32."""
    return _current.get().log(x)


def divide(x: Any, y: Any) -> Array:
    """``x / y`` in the current arithmetic; both float32.

    >>> import numpy as np
    >>> divide(np.float32(1), np.float32([3])).tolist()
    [0.3333333432674408]
    """
    return _current.get().divide(x, y)


def multiply_add(a: Any, b: Any, c: Any) -> Array:
    """``a * b + c``, rounded twice in ``"float32"`` and once in ``"chip"``: where the compiled kernel has one
    instruction for both. All float32.

    >>> import numpy as np
    >>> x = np.float32(1 + 2**-12)
    >>> with arithmetic("chip"):
    ...     float(multiply_add(x, x, np.float32(-1)))
    0.0004883408546447754
    """
    return _current.get().fma(a, b, c)


def add_products(a: Array, b: Array) -> Array:
    """The sum of ``a * b`` over the first axis, one :func:`multiply_add` after the other.

    >>> import numpy as np
    >>> add_products(np.float32([1, 2, 3]), np.float32([[4], [5], [6]])).tolist()
    [32.0]
    """
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = multiply_add(x, y, total)
    return np.asarray(total)


@contextmanager
def arithmetic(name: str) -> Iterator[Arithmetic]:
    """A context in which emulators compute with ``"float32"`` as NumPy has it, or as the ``"chip"``, an H100.

    ``chip``: sums of products of tensor cores, exp2, reciprocals, divisions and fused operations as recorded on an H100
    and as Triton 3.6.0 compiles for sm_90. ValueError for other names.

    >>> import numpy as np
    >>> from kvlab.hardware import get_atom
    >>> from kvlab.memory import float8_e4m3fn
    >>> atom = get_atom("wgmma.m64n8k32.e4m3")
    >>> a, b = atom.fragment_a(np.ones((64, 32), float8_e4m3fn)), np.ones((32, 8), float8_e4m3fn)
    >>> with arithmetic("chip"):
    ...     float(atom.mma(a, b, np.full((128, 4), 8193.5, np.float32))[0, 0])  # 14 digits
    8225.0
    """
    token = _current.set(check_arithmetic(name))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def check_arithmetic(name: Any, arch: str | Arch | None = None) -> Arithmetic:
    """The arithmetic called ``name``. ValueError for others, and for ``"chip"`` on an ``arch`` of another vendor.

    On other architectures of NVIDIA the rules of sm_90 are provisional: no such chip has confirmed them.

    >>> check_arithmetic("exact")
    Traceback (most recent call last):
        ...
    ValueError: arithmetic is 'exact': must be one of float32, chip
    >>> check_arithmetic("chip", "gfx950")
    Traceback (most recent call last):
        ...
    ValueError: arithmetic 'chip' on gfx950: must be 'float32'; the chip's is known of sm_90
    """
    if not isinstance(name, str) or name not in ARITHMETICS:
        raise ValueError(f"arithmetic is {name!r}: must be one of {', '.join(ARITHMETICS)}")
    found = ARITHMETICS[name]
    if found.exact and arch is not None and get_arch(arch).vendor != "nvidia":
        where = get_arch(arch).name
        raise ValueError(f"arithmetic {name!r} on {where}: must be 'float32'; the chip's is known of sm_90")
    return found
