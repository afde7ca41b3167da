"""Kernels with one planted cause of slowness each, and what is to be found in them."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from tutorial_kernels import F16, STRIDES, TILES, TUTORIALS, flash_attention, matmul, softmax, vector_add


@triton.jit
def column_load(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + rows * stride + tl.program_id(0))
    tl.store(out_ptr + tl.program_id(0) * BLOCK + rows, x)


@triton.jit
def column_store(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + rows)
    tl.store(out_ptr + rows * stride + tl.program_id(0), x)


@triton.jit
def structs(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + 3 * offsets))


@triton.jit
def shifted(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + 1 + offsets))


@triton.jit
def strided_rows(x_ptr, out_ptr, stride_row, stride_column, BM: tl.constexpr, BN: tl.constexpr):
    rows, columns = tl.arange(0, BM), tl.arange(0, BN)
    where = rows[:, None] * stride_row + columns[None, :] * stride_column
    tl.store(out_ptr + rows[:, None] * BN + columns[None, :], tl.load(x_ptr + where))


@triton.jit
def one_counter(x_ptr, total_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(total_ptr + tl.zeros([BLOCK], tl.int32), x)


@triton.jit
def counters_by_value(x_ptr, counts_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(counts_ptr + x, tl.full([BLOCK], 1, tl.int32))


@triton.jit
def exact_matmul(a_ptr, b_ptr, c_ptr, BM: tl.constexpr):
    rows, columns = tl.arange(0, BM), tl.arange(0, BM)
    where = rows[:, None] * BM + columns[None, :]
    tl.store(c_ptr + where, tl.dot(tl.load(a_ptr + where), tl.load(b_ptr + where), input_precision="ieee"))


@triton.jit
def division(x_ptr, out_ptr, n, width, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + offsets // width * 64 + offsets % width)
    tl.store(out_ptr + tl.arange(0, BLOCK), total)


@triton.jit
def doubles(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, (tl.load(x_ptr + offsets).to(tl.float64) * 1.1).to(tl.float32))


@triton.jit
def turned_each_trip(x_ptr, out_ptr, n, BM: tl.constexpr, BN: tl.constexpr):
    rows, columns = tl.arange(0, BM), tl.arange(0, BN)
    for start in range(0, n, BM):
        x = tl.load(x_ptr + (start + rows)[:, None] * BN + columns[None, :])
        tl.store(out_ptr + columns[:, None] * n + (start + rows)[None, :], tl.trans(x))


@triton.jit
def column_gather(table_ptr, index_ptr, out_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        index = tl.load(index_ptr + start + tl.arange(0, BLOCK))
        total += tl.load(table_ptr + index)
    tl.store(out_ptr + tl.arange(0, BLOCK), total)


@gluon.jit
def through_shared(
    x_ptr, out_ptr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, COPY: gl.constexpr, SHARED: gl.constexpr,
    READ: gl.constexpr,
):
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, COPY)), gl.arange(0, COLUMNS, gl.SliceLayout(0, COPY))
    shared = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [ROWS, COLUMNS], SHARED)
    shared.store(gl.load(x_ptr + row[:, None] * COLUMNS + column[None, :]))
    tile = shared.load(READ)
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, READ)), gl.arange(0, COLUMNS, gl.SliceLayout(0, READ))
    gl.store(out_ptr + row[:, None] * COLUMNS + column[None, :], tile)


ALONG = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
DOWN = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
OPERAND = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2)
PLAIN, SWIZZLED = gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
TURNED = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
NO_HELP = gl.PaddedSharedLayout.with_identity_for([[64, 64]], [64, 64], [1, 0])
BF16 = {"x_ptr": "*bf16", "out_ptr": "*bf16", "ROWS": 64, "COLUMNS": 64}
F32 = {"x_ptr": "*fp32", "out_ptr": "*fp32"}
ATTENTION = TUTORIALS["flash_attention"][1]


class Planted(NamedTuple):
    """A kernel, its arguments, and the finding that is to come first of those of its kind, with words in it."""

    kernel: Any
    arguments: dict[str, Any]
    kind: str
    words: str = ""
    target: str = "sm_90"
    options: dict[str, Any] = {}


PLANTED: dict[str, Planted] = {
    "column load": Planted(column_load, {**F32, "stride": "i32:16", "BLOCK": 256}, "uncoalesced", "256 sectors"),
    "column store": Planted(column_store, {**F32, "stride": "i32:16", "BLOCK": 256}, "uncoalesced", "tt.store"),
    "array of structs": Planted(structs, {**F32, "BLOCK": 256}, "uncoalesced", "12 B apart in memory"),
    "stride unknown to be 1": Planted(
        strided_rows, {**F32, "stride_row": 4096, "stride_column": "i32", "BM": 64, "BN": 64},
        "uncoalesced", "tt.load"),
    "base off by one": Planted(shifted, {**F32, "BLOCK": 128}, "misaligned", "tt.load", options={"num_warps": 4}),
    "length no multiple of 16": Planted(
        softmax, {**F32, "stride": "i32:16", "n": "i32", "BLOCK": 1024}, "narrow-access", "8 instructions of 4 B"),
    "pointers of unknown alignment": Planted(
        vector_add, {"x_ptr": "*fp16:1", "y_ptr": "*fp16", "out_ptr": "*fp16", "n": "i32:16", "BLOCK": 1024},
        "narrow-access", "8 instructions of 2 B"),
    "block smaller than the CTA": Planted(
        vector_add, {**F32, "y_ptr": "*fp32", "n": "i32:16", "BLOCK": 64}, "idle-threads", "256 threads",
        options={"num_warps": 8}),
    "no swizzle, read by ldmatrix": Planted(
        through_shared, {**BF16, "COPY": ALONG, "SHARED": PLAIN, "READ": OPERAND}, "bank-conflict",
        "8 passes for 1"),
    "padding by whole rows": Planted(
        through_shared, {**BF16, "COPY": ALONG, "SHARED": NO_HELP, "READ": OPERAND}, "bank-conflict",
        "padded_shared ((64, 64),)"),
    "shared memory the other way round": Planted(
        through_shared, {**BF16, "COPY": ALONG, "SHARED": TURNED, "READ": ALONG}, "bank-conflict", "st.shared.b16"),
    "lanes down the columns": Planted(
        through_shared, {**BF16, "COPY": DOWN, "SHARED": SWIZZLED, "READ": ALONG}, "uncoalesced", "tt.load"),
    "conflicts on AMD": Planted(
        through_shared, {
            **BF16, "COPY": gl.BlockedLayout([1, 8], [8, 8], [4, 1], [1, 0]), "SHARED": PLAIN,
            "READ": gl.BlockedLayout([1, 8], [64, 1], [4, 1], [0, 1]),
        }, "bank-conflict", "gfx942", "gfx942"),
    "tile too large for the registers": Planted(
        flash_attention, {**ATTENTION, "BM": 128, "D": 128}, "spill", "255 registers", "sm_80"),
    "maxnreg too small": Planted(
        matmul, {**F16, **STRIDES, **TILES}, "spill", "B of spill", "sm_80", {"maxnreg": 64}),
    "too many stages": Planted(
        matmul, {**F16, **STRIDES, "BM": 64, "BN": 64, "BK": 128}, "low-occupancy", "shared memory",
        options={"num_stages": 6}),
    "more shared memory than there is": Planted(
        matmul, {**F16, **STRIDES, "BM": 64, "BN": 64, "BK": 128}, "too-much-shared", "cannot be launched", "sm_86",
        {"num_stages": 6}),
    "one warp": Planted(
        vector_add, {**F32, "y_ptr": "*fp32", "n": "i32:16", "BLOCK": 128}, "low-occupancy", "CTAs", "sm_86",
        {"num_warps": 1}),
    "product in full float32": Planted(
        exact_matmul, {"a_ptr": "*fp32", "b_ptr": "*fp32", "c_ptr": "*fp32", "BM": 32}, "no-tensor-cores", "scalar"),
    "product too short for wgmma": Planted(
        matmul, {**F16, **STRIDES, **TILES, "BM": 32}, "mma-sync", "32 rows are fewer than 64"),
    "one stage": Planted(
        matmul, {**F16, **STRIDES, **TILES}, "not-pipelined", "the loop has one stage", "sm_80", {"num_stages": 1}),
    "fp8 operand the other way round": Planted(*TUTORIALS["matmul_fp8"], "transposed-operand", "1 B a lane"),
    "rows of half a line": Planted(
        matmul, {**F16, **STRIDES, **TILES, "BK": 32}, "short-rows", "rows of 64 B"),
    "turned on each trip": Planted(
        turned_each_trip, {**F32, "n": "i32:16", "BM": 64, "BN": 64}, "convert-in-loop", "on each trip"),
    "one counter for all": Planted(
        one_counter, {"x_ptr": "*i32", "total_ptr": "*i32", "BLOCK": 256}, "contended-atomic", "1 address"),
    "a counter for each value": Planted(
        counters_by_value, {"x_ptr": "*i32", "counts_ptr": "*i32", "BLOCK": 256}, "contended-atomic", "from memory"),
    "division in a loop": Planted(
        division, {**F32, "n": "i32:16", "width": "i32", "BLOCK": 256}, "integer-division", "no constant"),
    "float64 constant": Planted(doubles, {**F32, "BLOCK": 256}, "float64", "float64"),
    "gather of elements": Planted(
        column_gather, {"out_ptr": "*fp32", "table_ptr": "*fp32", "index_ptr": "*i32", "n": "i32:16", "BLOCK": 256},
        "gather", "from memory"),
}
