"""Rotary embedding: the angles by which pairs of dims are turned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.common.checks import count, flag, require
from kvlab.common.opaque import opaque_methods
from kvlab.common.torch_here import is_torch


@opaque_methods
@dataclass(frozen=True, eq=False)
class Rope:
    """``cos, sin`` ``[positions, R / 2]`` (any strides, NumPy or torch), and which dims of a head they turn.

    A pair ``(x, y)`` becomes ``(x cos - y sin, y cos + x sin)``. interleaved: pairs (2j, 2j + 1) of the R dims; else
    pairs (j, j + R / 2). first: the first of these dims. It has to be given where R is less than the head: 0 as
    flash-attention and vLLM have it, the head less R as MAX has it.

    >>> Rope.of_base(4, 32).cos.shape
    (4, 16)
    """

    cos: Any
    sin: Any
    interleaved: bool = False
    first: int | None = None

    def __post_init__(self) -> None:
        flag("interleaved", self.interleaved)
        for name, array in (("cos", self.cos), ("sin", self.sin)):
            known = isinstance(array, np.ndarray) or is_torch(array)
            require(known, f"{name} is a {type(array).__name__}", "a NumPy array or torch tensor")
            require(array.ndim == 2, f"{name} has shape {tuple(array.shape)}", "[positions, R / 2]")
        if self.first is not None:
            count("first", self.first)

    @property
    def dim(self) -> int:
        """R, the dims that are turned."""
        return 2 * int(self.cos.shape[-1])

    def first_dim(self, head_size: int) -> int:
        """The first roped dim of a head. ValueError where it has to be given and is not."""
        what = f"rope of {self.dim} of a head's {head_size} dims without first"
        require(
            self.first is not None or self.dim >= head_size, what,
            f"a Rope with first=0 (the first dims are turned) or first={head_size - self.dim} (the last)",
        )
        return self.first or 0

    @classmethod
    def of_base(cls, positions: int, dim: int, base: float = 10000.0, **more: Any) -> Rope:
        """The usual angles ``position * base ** (-2 j / dim)``, float32."""
        angle = np.arange(positions)[:, None] * base ** (-np.arange(0, dim, 2) / dim)
        return cls(np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32), **more)

    @classmethod
    def of_freqs(cls, freqs: Any, *, interleaved: bool = True, first: int | None = None) -> Rope:
        """From ``freqs[position, 2j] = cos, freqs[position, 2j + 1] = sin`` (MAX), a view.

        >>> rope = Rope.of_freqs(np.arange(8.0).reshape(2, 4))
        >>> rope.cos.tolist(), rope.sin.tolist()
        ([[0.0, 2.0], [4.0, 6.0]], [[1.0, 3.0], [5.0, 7.0]])
        """
        return cls(freqs[:, 0::2], freqs[:, 1::2], interleaved, first)

    @classmethod
    def of_halves(cls, cos_sin: Any, *, interleaved: bool = False, first: int | None = None) -> Rope:
        """From ``[positions, R]`` with all cosines before all sines (vLLM's cos_sin_cache), a view."""
        half = cos_sin.shape[1] // 2
        return cls(cos_sin[:, :half], cos_sin[:, half:], interleaved, first)
