"""Tensor memory of Blackwell (sm_100), where tcgen05 keeps accumulators, operands and scales; scales of sm_120."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.layout.encodings.base import Encoding, Ints, Matrix, broadcast_nd, cover, need, shape_per_cta
from kvlab.layout.linear.linear_layout import LinearLayout


@dataclass(frozen=True)
class TensorMemoryLayout(Encoding):
    """Placement of a matrix by Triton in tensor memory: ``row`` (one of 128 lanes), ``col`` (32-bit columns, of packed
    elements as many as a column has) and ``block`` -> coordinates. Blocks behind one another follow along the columns,
    those of dim0 first.

    block : rows and columns of a block, 64 or 128 rows. Of 64 rows, 16 lie in the first half of each warp's 32 lanes;
        the other half has the rows 64 to 127, or the next block of columns, or nothing (zero bases: not defined).
    col_stride : 32-bit columns from one element of a row to the next; 1 packs them.
    two_ctas : 64 rows of a pair of CTAs have all 128 lanes, the second half of the columns in the upper 64.
    fp4_padded : a byte of space beside each of packed fp4 pairs.

    ValueError for tensors smaller than the block's rows, as where the compiler aborts. Rules of Triton 3.7.1 to 3.9.0.

    >>> TensorMemoryLayout((64, 64), 1).to_linear_layout((64, 128)).bases["row"]
    [[1, 0], [2, 0], [4, 0], [8, 0], [0, 64], [16, 0], [32, 0]]
    >>> place = TensorMemoryLayout((128, 64), 1).to_linear_layout((128, 128)).invert()
    >>> place(dim0=5, dim1=70)  # row, col, block
    (5, 70, 0)
    """

    block: Ints
    col_stride: int
    cga_layout: Matrix = ()
    two_ctas: bool = False
    fp4_padded: bool = False

    def verify(self) -> None:
        need(len(self.block) == 2 and self.block[0] in (64, 128), self, "block must be 64 or 128 rows, and columns")
        need(self.block[1] > 0 and not self.block[1] & self.block[1] - 1, self, "block's columns: a power of two")
        need(self.col_stride > 0 and not self.col_stride & self.col_stride - 1, self, "col_stride: a power of two")
        need(not self.fp4_padded or self.col_stride == 1, self, "fp4_padded needs a col_stride of 1")

    def pattern_shape(self) -> Ints:
        """Two blocks, one beside the other."""
        ctas = 1 << len(self.cga_layout) if self.two_ctas else 1
        return (self.block[0] * ctas, 2 * self.block[1])

    def _on(self, shape: Ints, triton_version: str) -> LinearLayout:
        need(len(shape) == 2, self, f"shape is {shape}: must be of rank 2")
        rows, columns = shape_per_cta(self.cga_layout, shape)
        high, wide = self.block[0], min(self.block[1], columns)
        need(rows >= high, self, f"shape is {shape}: must have {high} rows or more for each CTA")
        row = [[1 << bit, 0] for bit in range(high.bit_length() - 1)]
        col = [[0, 1 << bit] for bit in range(wide.bit_length() - 1)]
        reach = {"dim0": high, "dim1": wide}
        if high == 64 and self.two_ctas:
            need(wide > 1, self, f"shape is {shape}: must have 2 columns or more, half of them for the upper lanes")
            row.append(col.pop())
        elif high == 64:
            beside = [64, 0] if rows > 64 else [0, wide] if columns > wide else [0, 0]
            row.insert(4, beside)
            reach = {"dim0": high + beside[0], "dim1": wide + beside[1]}
        gaps = [[0, 0]] * (self.col_stride.bit_length() - 1 + self.fp4_padded)
        tile = LinearLayout({"row": row, "col": gaps + col, "block": []}, reach)
        tile *= LinearLayout.identity1d(rows // reach["dim0"], "col", "dim0")
        tile *= LinearLayout.identity1d(columns // reach["dim1"], "col", "dim1")
        return cover(tile, self.cga_layout, shape)


@dataclass(frozen=True)
class TensorMemoryScalesLayout(Encoding):
    """Placement of the scales of a block-scaled product in tensor memory: ``row``, ``col`` and ``block`` -> (row of the
    operand, scale along K). 32 lanes hold them, the other 96 repeat those; 4 scales along K lie side by side, then the
    next 32 rows. Steps past the tensor are zero bases. Rules of Triton 3.7.1 to 3.9.0.

    >>> TensorMemoryScalesLayout().to_linear_layout((128, 8)).bases["col"]
    [[0, 1], [0, 2], [32, 0], [64, 0], [0, 4]]
    """

    cga_layout: Matrix = ()

    def pattern_shape(self) -> Ints:
        return (128, 8)

    def _on(self, shape: Ints, triton_version: str) -> LinearLayout:
        need(len(shape) == 2, self, f"shape is {shape}: must be of rank 2")
        rows, scales = shape_per_cta(self.cga_layout, shape)
        tile = LinearLayout.identity1d(32, "row", "dim0") * LinearLayout.zeros1d(4, "row", "dim0")
        tile *= LinearLayout.identity1d(4, "col", "dim1")
        tile *= LinearLayout.identity1d(max(2, rows // 32), "col", "dim0")
        tile *= LinearLayout.identity1d(max(1, scales // 4), "col", "dim1")
        return cover(tile * LinearLayout({"block": []}, {"dim0": 1}), self.cga_layout, shape)


def sm120_scales_layout(
    operand_index: int, shape: Sequence[int], warps_per_cta: Sequence[int], cga_layout: Matrix = ()
) -> LinearLayout:
    """Registers of the scales of operand 0 (A) or 1 (B) of a block-scaled ``mma.sync`` of sm_120: ``register``,
    ``lane``, ``warp`` and ``block`` -> (row of A or column of B, scale along K).

    shape : rows of A or columns of B, and scales along K.
    warps_per_cta : warps of the accumulator along M and N.

    Each lane of a quad, and each pair of them for A, holds the scale that one of them provides. ValueError for another
    operand, and for a shape that is not of powers of two. Rule of Triton 3.6.0 to 3.9.0.

    >>> sm120_scales_layout(0, (128, 2), (2, 2)).bases["lane"]
    [[8, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    """
    if operand_index not in (0, 1):
        raise ValueError(f"operand_index is {operand_index!r}: must be 0 or 1")
    if len(shape) != 2 or len(warps_per_cta) != 2:
        raise ValueError(f"shape is {shape!r}, warps_per_cta {warps_per_cta!r}: must be two numbers each")
    first = [8, 0] if operand_index == 0 else [0, 0]
    order, warps = ((1, 0), tuple(warps_per_cta)) if operand_index == 0 else ((0, 1), tuple(warps_per_cta)[::-1])
    tile = LinearLayout.identity1d(shape[1], "register", "dim1")
    tile *= LinearLayout({"lane": [first, [0, 0], [1, 0], [2, 0], [4, 0]]}, (16 >> operand_index, 1))
    tile *= broadcast_nd("warp", warps, order, 1)
    return cover(tile.transpose("dim0", "dim1"), cga_layout, tuple(shape))
