"""Columns of rows, loaded and stored in pieces, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_columns(ptr, at, exists, first, columns, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Columns ``[first, first + WIDTH)`` of the rows at ``ptr + at``, 0 for rows that do not exist and at or past
    ``columns`` (``WHOLE``: there are none).
    """
    column = first + tl.arange(0, WIDTH)
    mask = exists[:, None] if WHOLE else exists[:, None] & (column < columns)[None, :]
    return tl.load(ptr + at[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_columns(ptr, at, exists, first, columns, o):
    """A piece of the output rows."""
    column = first + tl.arange(0, o.shape[1])
    mask = exists[:, None] & (column < columns)[None, :]
    tl.store(ptr + at[:, None] + column[None, :], o.to(ptr.dtype.element_ty), mask=mask)
