"""A tensor twice: in the host's memory and on a device, with copies between the two."""

from __future__ import annotations

from typing import Any

from kvlab.layout.algebra.layout import Layout
from kvlab.layout.tensor.tile_tensor import TileTensor
from kvlab.memory import AddressSpace, Memory, as_dtype


class HostDeviceTileTensor:
    """Two allocations of ``layout.cosize`` scalars, both poisoned: the host's and, with a context, the device's.

    layout   of both
    dtype    of a scalar
    ctx      whose memory the device's part is: any object, such as its name; None: there is no device

    >>> import numpy as np
    >>> pair = HostDeviceTileTensor(Layout("(2,3):(4,1)"), "fp32", ctx="gpu:0")
    >>> pair.host_tensor().fill(7)
    TileTensor(float32, (2,3):(4,1), offset 0, generic)
    >>> pair.to_device()
    >>> pair.device_tensor()[1, 2].item()
    7.0
    >>> HostDeviceTileTensor(Layout(4), "fp32").device_tensor()
    Traceback (most recent call last):
        ...
    ValueError: device_tensor of HostDeviceTileTensor(float32, 4:1, no device): made without ctx=, it has no device
    """

    __slots__ = ("_device", "_host", "ctx", "dtype", "layout")

    def __init__(self, layout: Layout, dtype: Any, ctx: Any = None) -> None:
        if not isinstance(layout, Layout):
            raise ValueError(f"layout {layout!r} of a HostDeviceTileTensor: must be a Layout")
        self.layout, self.dtype, self.ctx = layout, as_dtype(dtype), ctx
        nbytes = layout.cosize * self.dtype.itemsize
        self._host = Memory(nbytes, space=AddressSpace.GENERIC, name="host memory")
        self._device = None if ctx is None else Memory(nbytes, space=AddressSpace.GLOBAL, name=f"memory of {ctx}")

    def __repr__(self) -> str:
        where = "no device" if self.ctx is None else f"on {self.ctx}"
        return f"HostDeviceTileTensor({self.dtype}, {self.layout}, {where})"

    def host_tensor(self) -> TileTensor:
        """The host's part."""
        return TileTensor(self._host, self.dtype, self.layout)

    def device_tensor(self) -> TileTensor:
        """The device's part. ValueError without a device."""
        return TileTensor(self._on_device("device_tensor"), self.dtype, self.layout)

    def to_device(self) -> None:
        """Copy the host's bytes to the device, those that nobody wrote too; done when this returns."""
        _copy(self._host, self._on_device("to_device"))

    def to_host(self) -> None:
        """Copy the device's bytes to the host; done when this returns."""
        _copy(self._on_device("to_host"), self._host)

    def _on_device(self, what: str) -> Memory:
        if self._device is None:
            raise ValueError(f"{what} of {self!r}: made without ctx=, it has no device")
        return self._device


def _copy(source: Memory, target: Memory) -> None:
    target.bytes[...] = source.bytes
    assert source.written is not None  # both are allocations of ours
    assert target.written is not None
    target.written[...] = source.written
