"""Identification of an unknown format: marker values through the engine's own store, and who can read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from kvlab.common.checks import count, require, shown

from .agreement import agree
from .catalogue import CATALOGUE, check_sizes, known_format
from .codec import as_bytes
from .format import MOST_APART, Format, check_formats, check_tensor_scale


def markers(shape: Sequence[int], part: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Marker values to be stored by an engine, float32 of ``shape``: ``[layers, pages, page_size, heads, dims]``, or
    those of the axes that its cache has.

    part    0 for K, or latents; 1 for V, or the rope part

    All are exact in the 8-bit floats: a sign, one of four mantissas and a power of two of each row.

    >>> k = markers((1, 2, 4, 1, 8))
    >>> k.shape, float(np.abs(k).min()) >= 0.5
    ((1, 2, 4, 1, 8), True)
    """
    require(isinstance(shape, Sequence) and len(shape), f"shape is {shown(shape)}", "the extents of a cache's axes")
    sizes = tuple(count("shape", size, 1) for size in shape)
    require(prod(sizes) <= MOST_APART, f"shape is {shown(shape)}", f"of at most {MOST_APART} elements")
    part = count("part", part)
    rng = np.random.default_rng([part, *sizes])
    sign, mantissa = rng.choice([-1, 1], sizes), rng.choice([1, 1.25, 1.5, 1.75], sizes)
    return (sign * mantissa * 2.0 ** rng.integers(-1, 3, (*sizes[:-1], 1))).astype(np.float32)


@dataclass(frozen=True)
class Identified:
    """Answer of :func:`identify`.

    matches     groups of formats that read the markers; those of a group agree, and are one format under several names
    refused     why each of the others is none

    >>> first = known_format("vllm.x_split", pages=2, heads=2, dim=32)
    >>> bytes_of = first.encode(markers(first.shape("k")), markers(first.shape("v"), 1))
    >>> identify(bytes_of, pages=2, heads=2, dim=32)
    Identified(vllm.x_split)
    """

    matches: tuple[tuple[Format, ...], ...]
    refused: dict[str, str]

    def __repr__(self) -> str:
        groups = [" = ".join(one.name or one.print() for one in group) for group in self.matches]
        return f"Identified({', or '.join(groups) or 'none of the candidates'})"

    @property
    def ambiguous(self) -> bool:
        """Tells whether formats that do not agree read the markers: pages or sizes of 1, say, tell too little."""
        return len(self.matches) > 1


def identify(
    buffer: Any, *, candidates: Sequence[Format] | None = None, layers: int = 1, pages: int = 4, page_size: int = 16,
    heads: int = 8, dim: int = 128, tensor_scale: float = 1.0,
) -> Identified:
    """The formats that read :func:`markers` out of ``buffer``, the raw bytes after the engine stored them.

    candidates      formats to try; by default those of :data:`kvlab.formats.CATALOGUE` with the sizes that are given
    tensor_scale    number that the engine keeps outside of the bytes

    A format matches where every value that it reads is the marker, up to the rounding of its own types.

    >>> k = markers((1, 2, 4, 2, 8))
    >>> candidates = [Format.parse(f"layer:1 page:2 {axes} dim:8 k.f16") for axes in ("slot:4 head:2", "head:2 slot:4")]
    >>> found = identify(k.astype(np.float16), candidates=candidates)
    >>> found.matches[0][0].print(), len(found.refused)
    ('layer:1 page:2 slot:4 head:2 dim:8 k.f16', 1)
    """
    flat, number = as_bytes(buffer), check_tensor_scale(tensor_scale)
    if candidates is None:
        sizes = check_sizes(layers=layers, pages=pages, page_size=page_size, heads=heads, dim=dim)
        candidates = [made for name in CATALOGUE if (made := _sized(name, sizes)) is not None]
    require(isinstance(candidates, Sequence) and len(candidates), f"candidates is {shown(candidates)}",
            "a sequence of formats")  # fmt: skip
    check_formats(**{f"candidates[{at}]": made for at, made in enumerate(candidates)})
    refused: dict[str, str] = {}
    groups: list[list[Format]] = []
    for candidate in candidates:
        words = _refused(candidate, flat, number)
        if words:
            refused[candidate.name or candidate.print()] = words
            continue
        for group in groups:
            if agree(group[0], candidate):
                group.append(candidate)
                break
        else:
            groups.append([candidate])
    return Identified(tuple(tuple(group) for group in groups), refused)


def _sized(name: str, sizes: dict[str, int]) -> Format | None:
    """A known format of these sizes, None where it has none of them."""
    try:
        return known_format(name, **sizes)
    except ValueError:
        return None


def _refused(candidate: Format, flat: np.ndarray[Any, Any], tensor_scale: float) -> str:
    """Why a candidate did not write the buffer; "" where it may have."""
    if candidate.nbytes != flat.size:
        return f"has {candidate.nbytes} bytes, the buffer {flat.size}"
    wanted = [markers(part.shape, number) for number, part in enumerate(candidate.parts)]
    ours = candidate.decode(candidate.encode(*wanted, tensor_scale=tensor_scale), tensor_scale=tensor_scale)
    with np.errstate(over="ignore", invalid="ignore"):
        read = candidate.decode(flat, tensor_scale=tensor_scale)
        for part, marker, own, value in zip(candidate.parts, wanted, ours, read, strict=True):
            near = np.abs(value - marker) <= 2 * np.abs(own - marker).max() + 1e-3 * np.abs(marker)
            if not near.all():
                index = ", ".join(f"{a} {i}" for a, i in zip(part.axes, np.argwhere(~near)[0].tolist(), strict=True))
                at = tuple(np.argwhere(~near)[0])
                return f"reads {value[at]:g} as {part.name} of {index}, the marker is {marker[at]:g}"
    return ""
