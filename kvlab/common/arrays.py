"""One cache, two array libraries: NumPy arrays and torch tensors over the same bytes, without importing torch."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any, Protocol, TypeAlias

import numpy as np

from kvlab.common.dtypes import as_dtype
from kvlab.common.torch_here import is_torch

INFERENCE = "detached, or the call under torch.no_grad(); kvlab is for inference"

# torch has dtypes that NumPy lacks, and the other way round: those cross as integers of the same size.
_BITS = {1: "uint8", 2: "int16"}


class Tensor(Protocol):
    """Torch tensor, as type checkers know it without torch."""

    @property
    def shape(self) -> Any: ...
    @property
    def device(self) -> Any: ...
    def data_ptr(self) -> int: ...
    def is_contiguous(self) -> bool: ...


Array: TypeAlias = np.ndarray[Any, Any] | Tensor
"""Arrays that operations take, of either library."""


def wants_grad(array: Any) -> bool:
    """Tells whether a gradient would have to flow through ``array``: it requires grad, and grad mode is on (which it is
    not under ``torch.no_grad()`` and ``torch.inference_mode()``).
    """
    return bool(getattr(array, "requires_grad", False)) and bool(sys.modules["torch"].is_grad_enabled())


def on_gpu(array: Any) -> bool:
    """Tells whether ``array`` is a tensor in the memory of a GPU."""
    return is_torch(array) and array.device.type == "cuda"


def in_cpu_memory(array: Any) -> Any:
    """A copy in CPU memory of a tensor on a GPU; anything else as it is."""
    return array.detach().cpu() if on_gpu(array) else array


def as_array(array: Any) -> Any:
    """A torch tensor or a NumPy array as it is, anything else as a NumPy array."""
    return array if is_torch(array) else np.asanyarray(array)


def dtype_of(array: Any, name: str) -> np.dtype[Any]:
    """The NumPy dtype of an array of either library. ``name`` is the argument's, for the message.

    ValueError for a dtype that kvlab does not know, and for bytes in another order than this machine's.
    """
    _check_byte_order(array, name)
    try:
        return as_dtype(array.dtype if is_torch(array) else array.dtype.name)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def addressing_strides(shape: tuple[int, ...], strides: tuple[int, ...], unit: int = 1) -> tuple[int, ...]:
    """``strides``, with those of a contiguous array for axes of extent 1, whose strides address nothing.

    unit : the stride of neighbours in a contiguous last axis.

    >>> addressing_strides((4, 1, 8), (24, -3, 1))
    (24, 8, 1)
    """
    if 1 not in shape:
        return tuple(strides)
    addressing, span = [], unit
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        addressing.append(span if extent == 1 else stride)
        span = extent * addressing[-1]
    return tuple(reversed(addressing))


def element_strides(array: Any, name: str = "array") -> tuple[int, ...]:
    """The strides in elements; of axes of extent 1, which address nothing, those of a contiguous array. ValueError
    where a stride is not a whole number of elements.

    >>> element_strides(np.zeros((5, 2, 4), np.float32)[:, 1])
    (8, 1)
    >>> element_strides(np.zeros((5, 2, 4), np.float32)[:, ::-2])
    (8, 4, 1)
    """
    if is_torch(array):
        return addressing_strides(tuple(array.shape), tuple(array.stride()))
    strides = addressing_strides(array.shape, array.strides, array.itemsize)
    if any(stride % array.itemsize for stride in strides):
        raise ValueError(f"{name} has strides of {array.strides} bytes, not whole elements of {array.itemsize} bytes")
    return tuple(stride // array.itemsize for stride in strides)


def with_addressing_strides(array: Any) -> Any:
    """The array itself, or a view of it where the strides of axes of extent 1 are not those of a contiguous array.

    >>> with_addressing_strides(np.zeros((5, 2, 4), np.float32)[:, ::-2]).strides
    (32, 16, 4)
    """
    if is_torch(array):
        strides = addressing_strides(tuple(array.shape), tuple(array.stride()))
        return array if strides == array.stride() else array.as_strided(array.shape, strides)
    strides = addressing_strides(array.shape, array.strides, array.itemsize)
    if strides == array.strides:
        return array
    plain = array.view(f"u{array.itemsize}")  # a view with other strides is not made of every dtype of ml-dtypes
    return np.lib.stride_tricks.as_strided(plain, array.shape, strides).view(array.dtype)


def same_place(**arrays: Any) -> None:
    """ValueError unless all arrays are plain and belong to one library and one device."""
    for name, array in arrays.items():
        _check_plain(array, name)
    places = {name: f"torch ({array.device})" if is_torch(array) else "NumPy" for name, array in arrays.items()}
    if len(set(places.values())) > 1:
        said = ", ".join(f"{name}: {place}" for name, place in places.items())
        raise ValueError(f"{said}; a cache holds the arrays of one library on one device")


def _check_plain(array: Any, name: str) -> None:
    """ValueError for an array whose values are not simply its bytes, which are all that a cache looks at."""
    if not is_torch(array):
        if isinstance(array, (np.ma.MaskedArray, np.matrix)):
            kind = type(array).__name__
            raise ValueError(f"{name} is a {kind}: must be a plain array, as np.asarray(...) or .filled() give")
        _check_byte_order(array, name)
    elif array.layout is not sys.modules["torch"].strided:
        raise ValueError(f"{name} has the layout {array.layout}: must be a dense tensor, as .to_dense() gives")
    elif array.is_neg() or array.is_conj():
        raise ValueError(f"{name} is a lazy negative or conjugate: must be .resolve_neg() or .resolve_conj() of it")


def _check_byte_order(array: Any, name: str) -> None:
    if not is_torch(array) and not array.dtype.isnative:
        raise ValueError(
            f"{name} has dtype {array.dtype}, another byte order than this machine's: convert it with "
            ".astype(array.dtype.newbyteorder('='))"
        )


def add_axis(array: Any, axis: int) -> Any:
    """View with an axis of extent 1 more; None of None."""
    if array is None:
        return None
    return array.unsqueeze(axis) if is_torch(array) else np.expand_dims(array, axis)


def drop_axis(array: Any, axis: int) -> Any:
    """View of the first along an axis.

    >>> drop_axis(add_axis(np.zeros((4, 8)), 1), 1).shape
    (4, 8)
    """
    return array.select(axis, 0) if is_torch(array) else array[(slice(None),) * axis + (0,)]


def numbered(counts: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(i, n): each i as often as ``counts[i]`` says, with its number n.

    >>> numbered(np.array([2, 0, 1]))
    (array([0, 0, 2]), array([0, 1, 0]))
    """
    i = np.repeat(np.arange(counts.size), counts)
    return i, np.arange(i.size) - np.repeat(np.cumsum(counts) - counts, counts)


def address_of(array: Any) -> int:
    """The address of the first element, a tensor's or that of a NumPy array.

    >>> x = np.zeros(4, np.float32)
    >>> address_of(x[1:]) - address_of(x)
    4
    """
    return int(array.data_ptr() if is_torch(array) else array.ctypes.data)


def overlaps(a: Any, b: Any) -> bool:
    """Tells whether two arrays of one library and device have a byte in common.

    >>> x = np.zeros((4, 8), np.float32)
    >>> overlaps(x[:, :4], x[:, 4:]), overlaps(x[:2], x[1:])
    (False, True)
    """
    if not is_torch(a):
        return np.shares_memory(a, b)
    ((first, end), (other_first, other_end)) = _span(a), _span(b)
    return first < other_end and other_first < end and np.shares_memory(_extent(a), _extent(b))


def _span(tensor: Any) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the one behind its last; tensors have no negative strides."""
    first, size = tensor.data_ptr(), tensor.element_size()
    if not tensor.numel():
        return first, first
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * size


def _extent(tensor: Any) -> np.ndarray[Any, Any]:
    """An array with the addresses of a tensor on any device. Its elements must not be touched."""
    size = tensor.element_size()

    class Extent:
        __array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in element_strides(tensor)),
        }

    return np.asarray(Extent())


def to_numpy(array: Any, name: str = "array") -> np.ndarray[Any, Any]:
    """The NumPy view of an array: the same bytes, with the strides of ``element_strides``; bf16 and fp8 become the
    dtypes of ml_dtypes.

    ValueError for a tensor that is not in CPU memory, for one that requires grad where grad mode is on, and for masked
    arrays and matrices.
    """
    if not is_torch(array):
        array = np.asanyarray(array)
        _check_plain(array, name)
        return with_addressing_strides(array)
    if array.device.type != "cpu":
        raise ValueError(f"{name} is on {array.device}: only CPU memory has a NumPy view; copy it with .to('cpu')")
    if wants_grad(array):
        raise ValueError(f"{name} requires grad: must be {INFERENCE}")
    _check_plain(array, name)
    dtype, array = dtype_of(array, name), with_addressing_strides(array.detach())
    bits = array if dtype.isbuiltin == 1 else array.view(getattr(sys.modules["torch"], _BITS[dtype.itemsize]))
    try:
        view: np.ndarray[Any, Any] = bits.numpy().view(dtype)
    except RuntimeError:  # of a tracer
        raise ValueError(f"{name} is a {type(array).__name__}: must be a tensor that has values") from None
    return view


def to_torch(array: Any, name: str = "array") -> Any:
    """The torch view of an array: the same bytes, with the strides of ``element_strides``; the inverse of
    :func:`to_numpy`.

    torch knows no read-only tensors: do not write through the view of a read-only array.
    """
    if is_torch(array):
        return with_addressing_strides(array)
    dtype, array = dtype_of(array, name), with_addressing_strides(array)
    torch = importlib.import_module("torch")
    bits = array if dtype.isbuiltin == 1 else array.view(_BITS[dtype.itemsize])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        return torch.from_numpy(bits).view(getattr(torch, dtype.name))
