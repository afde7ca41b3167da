"""Which arithmetic float32 operations of an emulator have: NumPy's, or that of an H100.

The choice is a context, as a decimal context or ``np.errstate`` is: what runs inside ``with arithmetic("chip")`` takes
the operations below from there, however deep it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arch import Arch, get_arch
from . import functions
from .products import SUMS, mma_sum

__all__ = ["ARITHMETICS", "Arithmetic", "arithmetic", "check_arithmetic", "current_arithmetic"]

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
        or step by step (:func:`~kvlab.hardware.mma_sum`), float32 operands one fused operation after another.
        """
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
}  # fmt: skip
_current: ContextVar[Arithmetic] = ContextVar("arithmetic", default=ARITHMETICS["float32"])


def current_arithmetic() -> Arithmetic:
    """The arithmetic of the innermost :func:`arithmetic`, or float32's.

    >>> current_arithmetic().exact
    False
    """
    return _current.get()


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
    ValueError: arithmetic 'exact': must be one of float32, chip
    >>> check_arithmetic("chip", "gfx950")
    Traceback (most recent call last):
        ...
    ValueError: arithmetic 'chip' on gfx950: must be 'float32'; the chip's is known of sm_90
    """
    if not isinstance(name, str) or name not in ARITHMETICS:
        raise ValueError(f"arithmetic {name!r}: must be one of {', '.join(ARITHMETICS)}")
    found = ARITHMETICS[name]
    if found.exact and arch is not None and get_arch(arch).vendor != "nvidia":
        where = get_arch(arch).name
        raise ValueError(f"arithmetic {name!r} on {where}: must be 'float32'; the chip's is known of sm_90")
    return found
