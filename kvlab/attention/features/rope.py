"""Rotary embedding: pairs of dims turned by the angles of a position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlab.attention.call.checks import DTYPES, check_array, check_dtype
from kvlab.attention.tiles.masked import load, load_elements
from kvlab.common.arrays import dtype_of
from kvlab.common.checks import count, flag, require
from kvlab.common.torch_here import is_torch

if TYPE_CHECKING:
    import triton.language as tl

Array = np.ndarray[Any, Any]


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
        """From ``[positions, R]`` with all cosines before all sines (vLLM's cos_sin_cache), a view.

        >>> rope = Rope.of_halves(np.arange(8.0).reshape(2, 4), first=0)
        >>> rope.cos.tolist(), rope.sin.tolist(), rope.interleaved
        ([[0.0, 1.0], [4.0, 5.0]], [[2.0, 3.0], [6.0, 7.0]], False)
        """
        half = cos_sin.shape[1] // 2
        return cls(cos_sin[:, :half], cos_sin[:, half:], interleaved, first)


def check_rope(rope: Rope, name: str, source: Any, cos: str = "rope.cos", sin: str = "rope.sin") -> None:
    """ValueError unless ``rope`` turns dims of the heads of ``source`` ``[.., H, D]``, which is called ``name``."""
    D, first = int(source.shape[-1]), rope.first_dim(int(source.shape[-1]))
    for label, array in ((cos, rope.cos), (sin, rope.sin)):
        check_array(label, array)
        fits = array.ndim == 2 and tuple(array.shape) == tuple(rope.cos.shape) and min(array.shape) > 0
        require(fits, f"{label} has shape {tuple(array.shape)}", "[positions, R / 2], cos and sin alike")
        check_dtype(label, array)
    inside = 0 <= first and first + rope.dim <= D
    require(inside, f"rope of {rope.dim} dims from {first} on", f"inside the head of {D}")
    require(not rope.interleaved or first % 2 == 0, f"interleaved rope from dim {first} on", "from an even one: pairs")
    kind = dtype_of(source, name)
    require(kind in DTYPES, f"{name} has dtype {kind}", "bfloat16, float16 or float32 to be rotated")


def rotate_exactly(x: Array, cos: Array, sin: Array, first: int, interleaved: bool) -> Array:
    """Heads ``[n, H, D]`` in float64, the dims from ``first`` on turned by ``cos, sin`` ``[n, R / 2]``."""
    out, half = x.copy(), cos.shape[-1]
    j = np.arange(half)
    one, two = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
    a, b, c, s = x[..., first + one], x[..., first + two], cos[:, None], sin[:, None]
    out[..., first + one], out[..., first + two] = a * c - b * s, b * c + a * s
    return out


def rotate(
    x: Array, x_array: Array, row: Array, dim: Array, inside: Array, position: Array, new: Array, cos_array: Array,
    sin_array: Array, config: Any,
) -> Array:
    """``x`` ``[P, BR, BG]`` in float32: rows of dims from ``dim`` on of heads at the offsets ``row`` of ``x_array``,
    turned by the angles of the token's position. ``config`` has ``rope_dim``, ``rope_first`` and ``interleaved``.
    """
    R, FIRST, BG, angles = config.rope_dim, config.rope_first, x.shape[-1], len(cos_array)  #- launch
    x = x.astype(np.float32)
    known = (new & (position >= 0) & (position < angles))[..., None]
    if config.interleaved:
        one, two = split(x)
        pair = (dim[..., None] - FIRST) // 2 + np.arange(BG // 2)
        roped = known & (pair >= 0) & (pair < R // 2)
    else:
        j = dim[..., None] - FIRST + np.arange(BG)
        pair = j % (R // 2)
        roped = known & (j >= 0) & (j < R)
    cos = load(cos_array, (position[..., None], pair), mask=roped, other=1.0).astype(np.float32)
    sin = load(sin_array, (position[..., None], pair), mask=roped, other=0.0).astype(np.float32)
    if config.interleaved:
        turned_one = np.where(roped, one * cos - two * sin, one)
        turned_two = np.where(roped, two * cos + one * sin, two)
        return join(turned_one, turned_two)
    near = j < R // 2
    partner_at = row[..., None] + (FIRST - dim)[..., None] + (j + R // 2) % R
    partner = load_elements(x_array, partner_at, mask=roped & inside).astype(np.float32)
    return np.where(roped & inside, x * cos + partner * np.where(near, -sin, sin), x)


def split(x: Array) -> tuple[Array, Array]:
    """The even and the odd columns."""
    return x[..., 0::2], x[..., 1::2]


def join(even: Array, odd: Array) -> Array:
    """The columns that :func:`split` took apart."""
    return np.stack([even, odd], -1).reshape(*even.shape[:-1], 2 * even.shape[-1])


def rotate_kernel(x, x_ptr, row, dim, inside, position, new, cos_ptr, sin_ptr, angles, strides, config):
    """``x`` ``[BR, BG]`` as of ``rotate``."""
    R: tl.constexpr = config.rope_dim  #- launch
    FIRST: tl.constexpr = config.rope_first  #- launch
    BG: tl.constexpr = x.shape[1]  #- launch
    x = x.to(tl.float32)
    known = (new & (position >= 0) & (position < angles))[:, None]
    if config.interleaved:
        one, two = tl.split(tl.reshape(x, [x.shape[0], BG // 2, 2]))
        pair = (dim[:, None] - FIRST) // 2 + tl.arange(0, BG // 2)[None, :]
        roped = known & (pair >= 0) & (pair < R // 2)
    else:
        j = dim[:, None] - FIRST + tl.arange(0, BG)[None, :]
        pair = j % (R // 2)
        roped = known & (j >= 0) & (j < R)
    cos_at = position[:, None] * strides.cos_row + pair * strides.cos_column  #- address
    cos = tl.load(cos_ptr + cos_at, mask=roped, other=1.0).to(tl.float32)
    sin_at = position[:, None] * strides.sin_row + pair * strides.sin_column  #- address
    sin = tl.load(sin_ptr + sin_at, mask=roped, other=0.0).to(tl.float32)
    if config.interleaved:
        turned_one = tl.where(roped, one * cos - two * sin, one)
        turned_two = tl.where(roped, two * cos + one * sin, two)
        return tl.reshape(tl.join(turned_one, turned_two), x.shape)
    else:
        near = j < R // 2
        partner_at = row[:, None] + (FIRST - dim)[:, None] + (j + R // 2) % R
        partner = tl.load(x_ptr + partner_at, mask=roped & inside, other=0.0).to(tl.float32)
        return tl.where(roped & inside, x * cos + partner * tl.where(near, -sin, sin), x)
