"""Shared memory as TMA writes it and wgmma and tcgen05 read it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvlab.layout.encodings.base import Ints, Matrix, cover, dims, is_at_least, need, shape_per_cta
from kvlab.layout.encodings.shared import SharedEncoding
from kvlab.layout.linear.linear_layout import LinearLayout

TMA_BOX = 256  # the longest side of a TMA box, in elements


@dataclass(frozen=True)
class NVMMASharedLayout(SharedEncoding):
    """Panels of ``swizzle_byte_width`` bytes along the contiguous dimension, one behind the other; in a panel the
    16-byte vectors of a row are XORed with bits 7.. of the byte offset (spec of the TMA image).

    swizzle_byte_width : 0 (no panels, no swizzle), 32, 64 or 128.
    transposed : the first dimension is the contiguous one.
    fp4_padded : after 8 bytes of packed fp4 pairs 8 bytes stay empty.

    ``swizzle_byte_width=0, transposed=True`` is row-major before Triton 3.9.0, which ignored ``transposed`` there, and
    column-major since (of rank 3, 3.9.0 leaves gaps: bits of the offset that move nothing). A transposed panel of rank
    3 has the last dimension as rows and the first two as columns, split row-major into (1, 2, 0), as the compilers do.

    >>> NVMMASharedLayout(32, 16).offsets((8, 16))[4, ::8].tolist()
    [72, 64]
    >>> plain = NVMMASharedLayout(0, 16, transposed=True)
    >>> [plain.offsets((2, 2), triton_version=version).tolist() for version in ("3.6.0", "3.9.0")]
    [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    >>> NVMMASharedLayout(64, 16).offsets((8, 16))
    Traceback (most recent call last):
        ...
    ValueError: NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2, transposed=False, \
fp4_padded=False, cga_layout=()): block shape (8, 16) along the contiguous dimension 1 is too small for the swizzle \
byte size 64, got 16: must be at least 32
    """

    swizzle_byte_width: int
    element_bitwidth: int
    rank: int = 2
    transposed: bool = False
    fp4_padded: bool = False
    cga_layout: Matrix = ()

    def verify(self) -> None:
        need(self.swizzle_byte_width in (0, 32, 64, 128), self, "swizzle_byte_width must be 0, 32, 64 or 128")
        need(self.element_bitwidth in (8, 16, 32, 64), self, "element_bitwidth must be 8, 16, 32 or 64")
        padded = not self.fp4_padded or (self.swizzle_byte_width, self.element_bitwidth) == (128, 8)
        need(padded, self, "fp4_padded needs a swizzle of 128 bytes and elements of 8 bits")

    @property
    def alignment_bytes(self) -> int:
        return 8 * max(16, self.swizzle_byte_width)

    def pattern_shape(self) -> Ints:
        """A panel and a half of its period in rows, 16 at least."""
        columns = 8 * (self.swizzle_byte_width or 128) // self.element_bitwidth // (1 + self.fp4_padded)
        if self.transposed:
            return (columns, *(1,) * (self.rank - 2), 16)[: self.rank]
        return (*(1,) * (self.rank - 2), 16, columns)[-self.rank :]

    def _on(self, shape: Ints, triton_version: str) -> LinearLayout:
        rank = len(shape)
        need(rank == self.rank, self, f"shape is {tuple(shape)}: must be of rank {self.rank}")
        sizes = shape_per_cta(self.cga_layout, shape)
        if self.swizzle_byte_width == 0:
            tile = self._dense([min(size, TMA_BOX) for size in sizes], is_at_least(triton_version, 3, 9))
        else:
            tile = self._panels(sizes)
        names = dims(rank)
        return cover(tile.fit(dict(zip(names, sizes, strict=True))), self.cga_layout, shape)

    def _dense(self, box: list[int], honour_transposed: bool) -> LinearLayout:
        """One box, row-major; the dimensions of a transposed box are turned and named as 3.9.0 does."""
        names = dims(len(box))
        if self.transposed and honour_transposed:
            box, names = [*box[1:], *box[:1]], [*names[-1:], *names[:-1]]
        tile = LinearLayout({"offset": []}, {})
        for size, name in zip(reversed(box), reversed(names), strict=True):
            tile *= LinearLayout.identity1d(size, "offset", name)
        return tile.transpose(*reversed(dims(len(box))))

    def _panels(self, sizes: Ints) -> LinearLayout:
        """One TMA box: a panel of the swizzle's width, its rows the other dimensions."""
        rank, width, bits = len(sizes), self.swizzle_byte_width, self.element_bitwidth
        need(rank >= 2, self, "a tensor of rank 1 is not swizzled: use swizzle_byte_width=0")
        contiguous = 0 if self.transposed else rank - 1
        stored, needed = sizes[contiguous] * (2 if self.fp4_padded else 1), 8 * width // bits
        need(
            min(stored, TMA_BOX) >= needed,
            self,
            f"block shape {sizes} along the contiguous dimension {contiguous} is too small for the swizzle byte size "
            f"{width}, got {stored}: must be at least {needed}",
        )
        box = {name: min(size, TMA_BOX) for name, size in zip(dims(rank), sizes, strict=True)}
        box[f"dim{contiguous}"] = needed // 2 if self.fp4_padded else needed
        last = box[f"dim{rank - 1}"]
        rest = math.prod(box.values()) // last
        rows, cols = (last, rest) if self.transposed else (rest, last)
        need(rows >= 8, self, f"block shape {sizes} has panels of {rows} rows: must be 8 or more")
        turned = {**dict(list(box.items())[1:]), "dim0": box["dim0"]} if self.transposed else box
        return self._core(needed).fit({"dim0": rows, "dim1": cols}).reshape(turned).transpose(*dims(rank))

    def _core(self, cols: int) -> LinearLayout:
        """8 rows of a panel, swizzled."""
        width, vec = self.swizzle_byte_width, 128 // self.element_bitwidth
        steps = [(0, 1 << bit) for bit in range(cols.bit_length() - 1)]
        steps += [(row, vec * (row // (128 // width) % (width // 16))) for row in (1, 2, 4)]
        if self.fp4_padded:
            return LinearLayout({"offset": [(row, col // 16 * 8 + col % 8) for row, col in steps]}, (8, cols // 2))
        return LinearLayout({"offset": steps}, (8, cols))
