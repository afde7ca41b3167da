"""Shared-memory images of tiles: a Gluon kernel fills an allocation, stores a tile into it and reads it back as bytes.

A tile holds the number of each of its bytes, the low half in one run and the high half in another; a third run over
another filling shows which bytes nobody wrote. The record says for every byte of shared memory which byte of the tile
stands there.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlab.layout.encodings import NVMMASharedLayout, PaddedSharedLayout, SharedEncoding, SwizzledSharedLayout

from . import records

__all__ = ["UNTOUCHED", "ImageCase", "cases", "expected", "record"]

Array = np.ndarray[Any, Any]
UNTOUCHED = -1
SHAPES = ((64, 64), (32, 128))


@dataclass(frozen=True)
class ImageCase:
    """A tile of ``shape``, elements of ``bits``, in an encoding, by a ``route``: registers, cp.async or tma."""

    layout: SharedEncoding
    bits: int
    shape: tuple[int, int]
    route: str

    @property
    def nbytes(self) -> int:
        """Bytes that are read back: the allocation, rounded up to a power of two."""
        last = int(self.layout.offsets(self.shape).max()) + 1
        return 1 << (last * self.bits // 8 - 1).bit_length()

    def __str__(self) -> str:
        fields = {k: v for k, v in vars(self.layout).items() if v not in ((), False) and k not in ("rank", "shape")}
        fields.pop("offset_bases", None)
        words = ", ".join(f"{k}={v}".replace(" ", "") for k, v in fields.items() if k != "element_bitwidth")
        rows, cols = self.shape
        return f"{type(self.layout).__name__}({words}) {rows}x{cols} of {self.bits} bits, {self.route}"


def cases() -> Iterator[ImageCase]:
    """Every encoding with every type and the routes that it has."""
    for bits in (8, 16, 32):
        vector = 128 // bits
        for shape in SHAPES:
            for order in ((1, 0), (0, 1)):
                swizzles = (1, 1, 1), (vector, 1, 8), (vector, 2, 4), (vector // 2, 1, 4), (4, 4, 2)
                for vec, per_phase, max_phase in swizzles:
                    layout = SwizzledSharedLayout(vec, per_phase, max_phase, order)
                    yield ImageCase(layout, bits, shape, "registers")
                    if order == (1, 0) and vec * bits >= 32:
                        yield ImageCase(layout, bits, shape, "cp.async")
            for interval, padding in ((shape[1], vector), (2 * shape[1], 2 * vector), (2 * vector, vector)):
                padded = PaddedSharedLayout.with_identity_for([(interval, padding)], shape, (1, 0))
                yield ImageCase(padded, bits, shape, "registers")
            for width in (0, 32, 64, 128):
                for transposed in (False, True):
                    contiguous, rows = shape[::-1] if not transposed else shape
                    if contiguous * bits // 8 < width or rows < 8 or (transposed and width == 0):
                        continue
                    nvmma = NVMMASharedLayout(width, bits, transposed=transposed)
                    yield ImageCase(nvmma, bits, shape, "registers")
                    if not transposed:
                        yield ImageCase(nvmma, bits, shape, "tma")
                        yield ImageCase(nvmma, bits, shape, "cp.async")


def expected(case: ImageCase) -> Array:
    """The emulator's image: for every byte of the allocation the number of the tile's byte there, -1 for none."""
    size = case.bits // 8
    image = np.full(case.nbytes, UNTOUCHED, np.int32)
    where = case.layout.offsets(case.shape, triton_version="3.6.0")[..., None] * size + np.arange(size)
    image[where] = np.arange(where.size).reshape(where.shape)
    return image


def record(step: records.Steps) -> dict[str, Any]:
    """Every case on the chip, in several processes: their compilers take longer than their kernels."""
    chosen = list(cases())
    missing = [case for case in chosen if str(case) not in step.done]
    with ProcessPoolExecutor(8, multiprocessing.get_context("spawn")) as processes:
        for case, image in zip(missing, processes.map(_packed, missing), strict=True):
            step.keep(str(case), image)
    return {"cases": {str(case): step.done[str(case)] for case in chosen}}


def _packed(case: ImageCase) -> str:
    from .images_gluon import run

    return records.pack(run(case))
