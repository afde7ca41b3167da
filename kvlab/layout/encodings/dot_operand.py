"""Operands of a matrix product, in the registers that its accumulator's encoding asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvlab.layout.encodings.base import NEWEST, Encoding, Ints, need
from kvlab.layout.linear.linear_layout import LinearLayout


class Parent(Protocol):
    """An encoding of an accumulator that knows the encodings of its operands."""

    @property
    def rank(self) -> int:
        """Rank of the accumulator."""

    def pattern_shape(self) -> Ints:
        """The smallest accumulator that shows its pattern."""

    def dot_operand(
        self, operand_index: int, k_width: int, shape: Sequence[int], *, triton_version: str = NEWEST
    ) -> LinearLayout:
        """Registers of an operand of this shape."""


@dataclass(frozen=True)
class DotOperandLayout(Encoding):
    """Operand 0 (A) or 1 (B) of the product whose accumulator has the encoding ``parent``.

    >>> from kvlab.layout.encodings import NVMMADistributedLayout
    >>> b = DotOperandLayout(1, NVMMADistributedLayout([2, 0], [2, 2], [16, 8]), k_width=2)
    >>> b.to_linear_layout((16, 16)).bases["warp"]
    [[0, 8], [0, 0]]
    """

    operand_index: int
    parent: Parent
    k_width: int

    def verify(self) -> None:
        need(self.operand_index in (0, 1), self, "operand_index must be 0 or 1")
        need(hasattr(self.parent, "dot_operand"), self, "parent must be an accumulator: blocked, NVMMA, MFMA or WMMA")

    @property
    def rank(self) -> int:
        """Rank of the tensors that this lays out."""
        return self.parent.rank

    def pattern_shape(self) -> Ints:
        """Two steps of the lanes along K, 16 elements at least."""
        shape, k = list(self.parent.pattern_shape()), self.rank - (1 if self.operand_index == 0 else 2)
        shape[k] = 64 * max(1, self.k_width)
        lanes = self.to_linear_layout(shape).bases["lane"]
        shape[k] = max(16, 4 * max(vector[k] for vector in lanes))
        return tuple(shape)

    def _on(self, shape: Ints, triton_version: str) -> LinearLayout:
        need(len(shape) == self.rank, self, f"shape is {tuple(shape)}: must be of rank {self.rank}")
        return self.parent.dot_operand(self.operand_index, self.k_width, shape, triton_version=triton_version)
