"""Kernels as tutorials write them, with the arguments to compile each: what a stranger brings."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def vector_add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


@triton.jit
def softmax(x_ptr, out_ptr, stride, n, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    mask = columns < n
    x = tl.load(x_ptr + row * stride + columns, mask=mask, other=-float("inf"))
    numerator = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * stride + columns, numerator / tl.sum(numerator, axis=0), mask=mask)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, K, stride_a, stride_b, stride_c, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    a = a_ptr + rows[:, None] * stride_a + depth[None, :]
    b = b_ptr + depth[:, None] * stride_b + columns[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(a), tl.load(b), acc)
        a += BK
        b += BK * stride_b
    tl.store(c_ptr + rows[:, None] * stride_c + columns[None, :], acc.to(c_ptr.dtype.element_ty))


@triton.jit
def matmul_descriptors(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    b = tl.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BK, BN])
    c = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BM, BN])
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a.load([row, k]), b.load([k, column]), acc)
    c.store([row, column], acc.to(tl.float16))


@triton.jit
def layer_norm(x_ptr, out_ptr, w_ptr, b_ptr, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + row * stride + start + tl.arange(0, BLOCK)).to(tl.float32)
        total += x
        squares += x * x
    mean = tl.sum(total) / N
    rstd = 1 / tl.sqrt(tl.sum(squares) / N - mean * mean + eps)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + columns).to(tl.float32)
        y = (x - mean) * rstd * tl.load(w_ptr + columns) + tl.load(b_ptr + columns)
        tl.store(out_ptr + row * stride + columns, y.to(out_ptr.dtype.element_ty))


@triton.jit
def flash_attention(
    q_ptr, k_ptr, v_ptr, out_ptr, stride, keys, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * stride + columns[None, :])
    m = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for start in range(0, keys, BN):
        where = (start + tl.arange(0, BN))[:, None] * stride + columns[None, :]
        s = tl.dot(q, tl.trans(tl.load(k_ptr + where))) * scale
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(m - new)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + where)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        m = new
    tl.store(out_ptr + rows[:, None] * stride + columns[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty))


@triton.jit
def paged_decode(
    q_ptr, cache_ptr, table_ptr, out_ptr, keys, scale, PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
):
    heads, columns = tl.arange(0, HEADS), tl.arange(0, D)
    q = tl.load(q_ptr + heads[:, None] * D + columns[None, :])
    m = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, D], tl.float32)
    for page in range(keys // PAGE):
        block = tl.load(table_ptr + page).to(tl.int64)
        where = block * PAGE * D + tl.arange(0, PAGE)[:, None] * D + columns[None, :]
        k = tl.load(cache_ptr + where)
        s = tl.dot(q, tl.trans(k)) * scale
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        total = total * tl.exp2(m - new) + tl.sum(p, 1)
        acc = tl.dot(p.to(k.dtype), k, acc * tl.exp2(m - new)[:, None])
        m = new
    tl.store(out_ptr + heads[:, None] * D + columns[None, :], acc / total[:, None])


@triton.jit
def transpose(x_ptr, out_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    x = tl.load(x_ptr + rows[:, None] * N + columns[None, :])
    tl.store(out_ptr + columns[:, None] * M + rows[None, :], tl.trans(x))


@triton.jit
def row_sums(x_ptr, out_ptr, stride, BM: tl.constexpr, BN: tl.constexpr):
    rows, columns = tl.arange(0, BM), tl.arange(0, BN)
    x = tl.load(x_ptr + rows[:, None] * stride + columns[None, :])
    tl.store(out_ptr + rows, tl.sum(x, axis=1))


@triton.jit
def scan(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.cumsum(tl.load(x_ptr + offsets), axis=0))


@triton.jit
def gather(table_ptr, index_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(table_ptr + tl.load(index_ptr + offsets)))


@triton.jit
def atomics(x_ptr, counts_ptr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts_ptr + offsets % BINS, tl.load(x_ptr + offsets))


@triton.jit
def row_weights(x):
    m = tl.max(x, axis=0)
    p = tl.exp(x - m)
    total = tl.sum(p, axis=0)
    return p / total


@triton.autotune([triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] == args["BLOCK"]})
@triton.jit
def tuned_softmax(x_ptr, out_ptr, stride, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Two rows a program, their arithmetic in a helper."""
    columns = tl.arange(0, BLOCK)
    for step in range(2):
        where = (2 * tl.program_id(0) + step) * stride + columns
        if EVEN:
            x = tl.load(x_ptr + where)
        else:
            x = tl.load(x_ptr + where, mask=columns < n, other=-float("inf"))
        weights = row_weights(x)
        tl.store(out_ptr + where, weights, mask=columns < n)


@triton.jit
def scaled_matmul(
    a_ptr, b_ptr, c_ptr, row_scale_ptr, column_scale_ptr, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    """A product of float8 with a scale for each row of A and each column of B."""
    rows, columns, depth = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_ptr + rows[:, None] * K + (k + depth)[None, :])
        b = tl.load(b_ptr + (k + depth)[:, None] * BN + columns[None, :])
        acc = tl.dot(a, b, acc)
    rows_by, columns_by = tl.load(row_scale_ptr + rows), tl.load(column_scale_ptr + columns)
    scaled = acc * rows_by[:, None] * columns_by[None, :]
    tl.store(c_ptr + rows[:, None] * BN + columns[None, :], scaled)


F16 = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp16"}
STRIDES = {"K": "i32:16", "stride_a": "i32:16", "stride_b": "i32:16", "stride_c": "i32:16"}
TILES = {"BM": 64, "BN": 64, "BK": 64}

#: name -> kernel, signature, targets that have what it needs
TUTORIALS: dict[str, tuple[Any, dict[str, Any]]] = {
    "vector_add": (vector_add, {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32:16", "BLOCK": 1024}),
    "softmax": (softmax, {"x_ptr": "*fp32", "out_ptr": "*fp32", "stride": "i32:16", "n": "i32:16", "BLOCK": 1024}),
    "matmul": (matmul, {**F16, **STRIDES, **TILES}),
    "matmul_descriptors": (matmul_descriptors, {**F16, "M": "i32:16", "N": "i32:16", "K": "i32:16", **TILES}),
    "layer_norm": (layer_norm, {
        "x_ptr": "*fp16", "out_ptr": "*fp16", "w_ptr": "*fp32", "b_ptr": "*fp32", "stride": "i32:16", "N": "i32:16",
        "eps": 1e-5, "BLOCK": 1024,
    }),
    "flash_attention": (flash_attention, {
        "q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "out_ptr": "*bf16", "stride": "i32:16", "keys": "i32:16",
        "scale": 0.125, "BM": 64, "BN": 64, "D": 64,
    }),
    "paged_decode": (paged_decode, {
        "q_ptr": "*bf16", "cache_ptr": "*bf16", "table_ptr": "*i32", "out_ptr": "*fp32", "keys": "i32:16",
        "scale": 0.125, "PAGE": 32, "HEADS": 16, "D": 64,
    }),
    "transpose": (transpose, {"x_ptr": "*fp32", "out_ptr": "*fp32", "M": "i32:16", "N": "i32:16", "BM": 64, "BN": 64}),
    "matmul_fp8": (matmul, {"a_ptr": "*fp8e4nv", "b_ptr": "*fp8e4nv", "c_ptr": "*fp16", **STRIDES, **TILES}),
    "row_sums": (row_sums, {"x_ptr": "*fp32", "out_ptr": "*fp32", "stride": "i32:16", "BM": 32, "BN": 128}),
    "scan": (scan, {"x_ptr": "*fp32", "out_ptr": "*fp32", "BLOCK": 512}),
    "gather": (gather, {"table_ptr": "*fp32", "index_ptr": "*i32", "out_ptr": "*fp32", "BLOCK": 512}),
    "atomics": (atomics, {"x_ptr": "*i32", "counts_ptr": "*i32", "BLOCK": 512, "BINS": 64}),
}
