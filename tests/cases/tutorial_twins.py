"""NumPy twins of the kernels of ``tutorial_kernels``, one program at a time, without markers, by the same names."""

from __future__ import annotations

from typing import Any

import numpy as np

F32 = np.float32


def vector_add(x_ptr: Any, y_ptr: Any, out_ptr: Any, n: int, BLOCK: int, pid: int) -> None:
    offsets = pid * BLOCK + np.arange(BLOCK)
    mask = offsets < n
    inside = offsets[mask]
    x, y = np.zeros(BLOCK, F32), np.zeros(BLOCK, F32)
    x[mask], y[mask] = x_ptr[inside], y_ptr[inside]
    out_ptr[inside] = (x + y)[mask]


def softmax(x_ptr: Any, out_ptr: Any, stride: int, n: int, BLOCK: int, pid: int) -> None:
    row, columns = pid, np.arange(BLOCK)
    mask = columns < n
    x = np.where(mask, x_ptr.reshape(-1)[row * stride + columns], -np.inf).astype(F32)
    numerator = np.exp(x - x.max())
    out_ptr.reshape(-1)[(row * stride + columns)[mask]] = (numerator / numerator.sum())[mask]


def matmul(a_ptr: Any, b_ptr: Any, c_ptr: Any, K: int, BM: int, BN: int, BK: int, pid: tuple[int, int]) -> None:
    rows = pid[0] * BM + np.arange(BM)
    columns = pid[1] * BN + np.arange(BN)
    depth = np.arange(BK)
    acc = np.zeros((BM, BN), F32)
    for k in range(0, K, BK):
        acc = acc + a_ptr[rows][:, k + depth].astype(F32) @ b_ptr[k + depth][:, columns].astype(F32)
    c_ptr[np.ix_(rows, columns)] = acc.astype(c_ptr.dtype)


def matmul_descriptors(a_ptr: Any, b_ptr: Any, c_ptr: Any, K: int, BM: int, BN: int, BK: int, pid: Any) -> None:
    row, column = pid[0] * BM, pid[1] * BN
    acc = np.zeros((BM, BN), F32)
    for k in range(0, K, BK):
        acc = acc + a_ptr[row : row + BM, k : k + BK].astype(F32) @ b_ptr[k : k + BK, column : column + BN].astype(F32)
    c_ptr[row : row + BM, column : column + BN] = acc.astype(np.float16)


def layer_norm(
    x_ptr: Any, out_ptr: Any, w_ptr: Any, b_ptr: Any, stride: int, N: int, eps: float, BLOCK: int, pid: int,
) -> None:
    row, flat = pid, x_ptr.reshape(-1)
    total = np.zeros(BLOCK, F32)
    squares = np.zeros(BLOCK, F32)
    for start in range(0, N, BLOCK):
        x = flat[row * stride + start + np.arange(BLOCK)].astype(F32)
        total = total + x
        squares = squares + x * x
    mean = total.sum() / F32(N)
    rstd = 1 / np.sqrt(squares.sum() / F32(N) - mean * mean + F32(eps))
    for start in range(0, N, BLOCK):
        columns = start + np.arange(BLOCK)
        x = flat[row * stride + columns].astype(F32)
        y = (x - mean) * rstd * w_ptr[columns] + b_ptr[columns]
        out_ptr.reshape(-1)[row * stride + columns] = y.astype(out_ptr.dtype)


def flash_attention(
    q_ptr: Any, k_ptr: Any, v_ptr: Any, out_ptr: Any, keys: int, scale: float, BM: int, BN: int, D: int, pid: int,
) -> None:
    rows, columns = pid * BM + np.arange(BM), np.arange(D)
    q = q_ptr[rows]
    m = np.full(BM, -np.inf, F32)
    total = np.zeros(BM, F32)
    acc = np.zeros((BM, D), F32)
    for start in range(0, keys, BN):
        tile = start + np.arange(BN)
        s = q.astype(F32) @ k_ptr[tile].astype(F32).T * F32(scale)
        new = np.maximum(m, s.max(1))
        p = np.exp2(s - new[:, None])
        shrink = np.exp2(m - new)
        total = total * shrink + p.sum(1)
        v = v_ptr[tile]
        acc = p.astype(v.dtype).astype(F32) @ v.astype(F32) + acc * shrink[:, None]
        m = new
    out_ptr[np.ix_(rows, columns)] = (acc / total[:, None]).astype(out_ptr.dtype)


def paged_decode(
    q_ptr: Any, cache_ptr: Any, table_ptr: Any, out_ptr: Any, keys: int, scale: float, PAGE: int, HEADS: int, D: int,
    pid: int,
) -> None:
    heads, columns = np.arange(HEADS), np.arange(D)
    q = q_ptr[heads]
    m = np.full(HEADS, -np.inf, F32)
    total = np.zeros(HEADS, F32)
    acc = np.zeros((HEADS, D), F32)
    for page in range(keys // PAGE):
        block = np.int64(table_ptr[page])
        k = cache_ptr[block]
        s = q.astype(F32) @ k.astype(F32).T * F32(scale)
        new = np.maximum(m, s.max(1))
        p = np.exp2(s - new[:, None])
        total = total * np.exp2(m - new) + p.sum(1)
        acc = p.astype(k.dtype).astype(F32) @ k.astype(F32) + acc * np.exp2(m - new)[:, None]
        m = new
    out_ptr[np.ix_(heads, columns)] = acc / total[:, None]


def transpose(x_ptr: Any, out_ptr: Any, BM: int, BN: int, pid: tuple[int, int]) -> None:
    rows, columns = pid[0] * BM + np.arange(BM), pid[1] * BN + np.arange(BN)
    x = x_ptr[np.ix_(rows, columns)]
    out_ptr[np.ix_(columns, rows)] = x.T


def row_sums(x_ptr: Any, out_ptr: Any, BM: int, BN: int, pid: int) -> None:
    rows, columns = np.arange(BM), np.arange(BN)
    x = x_ptr[np.ix_(rows, columns)]
    out_ptr[rows] = x.sum(1)


def row_sums_any(x_ptr: Any, out_ptr: Any, stride: int, BM: int, BN: int, pid: int) -> None:
    rows, columns = np.arange(BM), np.arange(BN)
    x = x_ptr[rows[:, None] * stride + columns]
    out_ptr[rows] = x.sum(1)


def scan(x_ptr: Any, out_ptr: Any, BLOCK: int, pid: int) -> None:
    offsets = pid * BLOCK + np.arange(BLOCK)
    out_ptr[offsets] = np.cumsum(x_ptr[offsets])


def gather(table_ptr: Any, index_ptr: Any, out_ptr: Any, BLOCK: int, pid: int) -> None:
    offsets = pid * BLOCK + np.arange(BLOCK)
    out_ptr[offsets] = table_ptr[index_ptr[offsets]]


def atomics(x_ptr: Any, counts_ptr: Any, BLOCK: int, BINS: int, pid: int) -> None:
    offsets = pid * BLOCK + np.arange(BLOCK)
    np.add.at(counts_ptr, offsets % BINS, x_ptr[offsets])


def row_weights(x: Any) -> Any:
    m = x.max()
    p = np.exp(x - m)
    total = p.sum()
    return p / total


def tuned_softmax(x_ptr: Any, out_ptr: Any, stride: int, n: int, BLOCK: int, EVEN: bool, pid: int) -> None:
    columns = np.arange(BLOCK)
    assert EVEN == (n == BLOCK)
    for step in range(2):
        where = (2 * pid + step) * stride + columns
        x = np.full(BLOCK, -np.inf, F32)
        x[:n] = x_ptr.reshape(-1)[where[:n]]
        weights = row_weights(x)
        out_ptr.reshape(-1)[where[:n]] = weights[:n]


def scaled_matmul(
    a_ptr: Any, b_ptr: Any, c_ptr: Any, row_scale_ptr: Any, column_scale_ptr: Any, K: int, BK: int, pid: int,
) -> None:
    acc = np.zeros(c_ptr.shape, F32)
    for k in range(0, K, BK):
        a, b = a_ptr[:, k : k + BK], b_ptr[k : k + BK]
        acc = acc + a.astype(F32) @ b.astype(F32)
    rows_by, columns_by = row_scale_ptr, column_scale_ptr
    scaled = acc * rows_by[:, None] * columns_by
    c_ptr[:] = scaled


def late_tile(a_ptr: Any, b_ptr: Any, c_ptr: Any, K: int, BM: int, BN: int, BK: int, pid: tuple[int, int]) -> None:
    """As matmul, a tile of K too far."""
    rows = pid[0] * BM + np.arange(BM)
    columns = pid[1] * BN + np.arange(BN)
    depth = np.arange(BK)
    acc = np.zeros((BM, BN), F32)
    for k in range(0, K, BK):
        at = (k + BK) % K + depth
        acc = acc + a_ptr[rows][:, at].astype(F32) @ b_ptr[at][:, columns].astype(F32)
    c_ptr[np.ix_(rows, columns)] = acc.astype(c_ptr.dtype)


def no_mask(x_ptr: Any, out_ptr: Any, stride: int, n: int, BLOCK: int, pid: int) -> None:
    """As softmax, its mask forgotten where it loads."""
    row, columns = pid, np.arange(BLOCK)
    mask = columns < n
    x = x_ptr.reshape(-1)[row * stride + columns]
    numerator = np.exp(x - x.max())
    out_ptr.reshape(-1)[(row * stride + columns)[mask]] = (numerator / numerator.sum())[mask]


def no_scale(
    q_ptr: Any, k_ptr: Any, v_ptr: Any, out_ptr: Any, keys: int, scale: float, BM: int, BN: int, D: int, pid: int,
) -> None:
    """As flash_attention, without the scale of the scores."""
    rows, columns = pid * BM + np.arange(BM), np.arange(D)
    q = q_ptr[rows]
    m = np.full(BM, -np.inf, F32)
    for start in range(0, keys, BN):
        s = q.astype(F32) @ k_ptr[start : start + BN].astype(F32).T
        new = np.maximum(m, s.max(1))
        m = new
    out_ptr[np.ix_(rows, columns)] = 0


def not_turned(x_ptr: Any, out_ptr: Any, BM: int, BN: int, pid: tuple[int, int]) -> None:
    """As transpose, the tile read the other way round."""
    rows, columns = pid[0] * BM + np.arange(BM), pid[1] * BN + np.arange(BN)
    x = x_ptr[np.ix_(columns, rows)].T
    out_ptr[np.ix_(columns, rows)] = x.T
