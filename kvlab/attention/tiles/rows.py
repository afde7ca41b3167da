"""Query rows of a decode kernel's program: new tokens x heads of one KV head, packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvlab.staging import ceildiv

if TYPE_CHECKING:
    import triton.language as tl

Array = np.ndarray[Any, Any]


class DecodeSizes(NamedTuple):
    """Numbers that a decode kernel counts by: heads of a KV head, new tokens, splits, most keys, sequences, KV heads;
    strides of the table's rows and of the lengths.
    """

    group: int
    tokens: int
    num_splits: int
    max_keys: int
    batches: int
    kv_heads: int
    table_batch: int
    seq_lens_batch: int


def packed_rows(program: Array, problem: Any, BM: int) -> tuple[Array, Array, Array, Array, Array]:
    """(batch, kv_head ``[P]``, token, head, is_row ``[P, BM]``) of the BM rows of programs: their sequence and KV head,
    and of each row, token-major, its new token and query head, and whether there is such a row.

    problem : has ``group``, ``tokens`` and ``kv_heads``.

    >>> sizes = DecodeSizes(3, 1, num_splits=1, max_keys=64, batches=2, kv_heads=2, table_batch=4, seq_lens_batch=1)
    >>> batch, kv_head, token, head, is_row = packed_rows(np.arange(4), sizes, 4)
    >>> batch.tolist(), kv_head.tolist(), head[1].tolist(), is_row[1].tolist()
    ([0, 0, 1, 1], [0, 1, 0, 1], [3, 4, 5, 3], [True, True, True, False])
    """
    group, tokens, kv_heads = problem.group, problem.tokens, problem.kv_heads
    row_tiles = ceildiv(group * tokens, BM)
    tile, batch = program % (kv_heads * row_tiles), program // (kv_heads * row_tiles)
    kv_head = tile // row_tiles
    row = (tile % row_tiles)[:, None] * BM + np.arange(BM, dtype=np.int32)  # [P, BM], token-major
    head = kv_head[:, None] * group + row % group
    return batch, kv_head, row // group, head, row < group * tokens


def packed_rows_kernel(program, problem, BM):
    """(batch, kv_head, token, head, is_row) of the rows ``[BM]`` of a program, as of ``packed_rows``. ``problem``:
    DecodeSizes.
    """
    row_tiles = tl.cdiv(problem.group * problem.tokens, BM)
    tile, batch = program % (problem.kv_heads * row_tiles), (program // (problem.kv_heads * row_tiles)).to(tl.int64)
    kv_head = (tile // row_tiles).to(tl.int64)
    row = tile % row_tiles * BM + tl.arange(0, BM)  # [BM], token-major
    head = kv_head * problem.group + row % problem.group
    return batch, kv_head, row // problem.group, head, row < problem.group * problem.tokens
