"""Faults planted into kernels of ``tutorial_kernels``, each with the words that are to name it.

In the source, for lockstep with the right twin; in the PTX, for the machine that runs it. ``slow_kernels`` has those
that only cost time.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tutorial_kernels
from tutorial_calls import X, normal


class InSource(NamedTuple):
    """A kernel in whose text ``old`` becomes ``new``; words of the finding; arguments that are not those of CALLS."""

    kernel: str
    old: str
    new: str
    words: tuple[str, ...]
    changes: dict[str, Any] = {}
    grid: tuple[int, ...] | None = None
    unwritten: tuple[str, ...] = ()

    def text(self) -> str:
        """The whole file with the fault in it."""
        return self.planted()[0]

    def named(self) -> list[str]:
        """The words, and the line of the fault, each as a pattern."""
        line = self.planted()[1]
        return [rf"\bline (\d+ and )*{line}\b", *(re.escape(words.format(line=line)) for words in self.words)]

    def planted(self) -> tuple[str, int]:
        """The file's text, and the line of the fault."""
        whole = Path(tutorial_kernels.__file__).read_text()
        start = whole.index(f"\ndef {self.kernel}(")
        end = whole.index("\n\n\n", start)
        body = whole[start:end]
        assert body.count(self.old) == 1, (self.kernel, self.old, body.count(self.old))
        line = whole[:start].count("\n") + body[: body.index(self.old)].count("\n") + 1
        return whole[:start] + body.replace(self.old, self.new) + whole[end:], line


SHORT = {"x_ptr": X[0, :50].copy(), "y_ptr": X[1, :50].copy(), "out_ptr": np.zeros(50, np.float32)}
SQUARE = {"x_ptr": normal(16, 16), "out_ptr": np.zeros((16, 16), np.float32), "M": 16}
TALL = {"x_ptr": normal(64, 16), "out_ptr": np.zeros((16, 64), np.float32), "M": 64}

IN_SOURCE: dict[str, InSource] = {
    "mask missing where it loads": InSource(
        "vector_add", "x = tl.load(x_ptr + offsets, mask=mask)", "x = tl.load(x_ptr + offsets)",
        ("out of bounds: line {line}: load of 14 elements outside x_ptr in 1 program, first element 50 of 50",),
        SHORT),
    "mask missing where it stores": InSource(
        "vector_add", "x + y, mask=mask", "x + y",
        ("out of bounds: line {line}: store of 14 elements outside out_ptr",), SHORT),
    "mask one too long": InSource(
        "vector_add", "offsets < n", "offsets <= n",
        ("load of 1 element outside x_ptr", "vector_add.mask, program 1"), SHORT),
    "value outside the mask forgotten": InSource(
        "softmax", ', other=-float("inf"))', ", other=0.0)", ("softmax.x,", "mask missing", "elements 50-63")),
    "maximum not subtracted": InSource(
        "softmax", "x - tl.max(x, axis=0)", "x", ("softmax.numerator,", "scale missing")),
    "row stride of another tensor": InSource(
        "transpose", "rows[:, None] * N +", "rows[:, None] * 2 * N +", ("transpose.x", "stride: row n of the first is "
        "row 2 n of the second"), TALL),
    "row stride forgotten": InSource(
        "transpose", "rows[:, None] * N +", "rows[:, None] * 0 +", ("stride: row n of the first is row 0",), SQUARE,
        (1, 1)),
    "one element further": InSource(
        "scan", "tl.program_id(0) * BLOCK +", "tl.program_id(0) * BLOCK + 1 +",
        ("out of bounds", "scan.offsets", "shifted: the first is the second, 1 elements further on")),
    "tile of another program": InSource(
        "gather", "tl.program_id(0) * BLOCK", "tl.program_id(0) * (BLOCK // 2)",
        ("gather.offsets, program 1", "shifted: the first is the second, 16 elements further back")),
    "off by one tile": InSource(
        "flash_attention", "where = (start + tl", "where = (start + BN + tl",
        ("out of bounds", "outside k_ptr", "flash_attention.s, iteration 0", "tile shifted: the first is the second's "
         "tile of the iteration after")),
    "scale of the scores forgotten": InSource(
        "flash_attention", "tl.trans(tl.load(k_ptr + where))) * scale", "tl.trans(tl.load(k_ptr + where)))",
        ("flash_attention.s,", "scale missing: the first is 4 times")),
    "probabilities rounded early": InSource(
        "flash_attention", "tl.exp2(s - new[:, None])", "tl.exp2(s - new[:, None]).to(tl.bfloat16).to(tl.float32)",
        ("flash_attention.p,", "rounding: the first is the other rounded to bfloat16")),
    "sums not rescaled": InSource(
        "flash_attention", "acc * shrink[:, None]", "acc",
        ("flash_attention.acc_2, iteration 1", "operand missing: the second's statement uses shrink")),
    "maximum of one tile alone": InSource(
        "flash_attention", "new = tl.maximum(m, tl.max(s, 1))", "new = tl.max(s, 1)",
        ("flash_attention.new, iteration 1", "operand missing: the second's statement uses m, the first's does not")),
    "maximum not kept": InSource(
        "flash_attention", "        m = new", "        m = m",
        ("flash_attention.m_2, iteration 0", "not finite: the first is infinite")),
    "sum over K dropped": InSource(
        "matmul", "tl.load(b), acc)", "tl.load(b))",
        ("matmul.acc_2, iteration 1",
         "sum dropped: the first is the second without its value of the iteration before")),
    "pointer not advanced": InSource(
        "matmul", "b += BK * stride_b", "b += BK", (
            "matmul.acc_2, iteration 1",
            "carried: the trip before agrees, so what it leaves to this one does not: a (line 39), b (line 40)")),
    "page after the right one": InSource(
        "paged_decode", "table_ptr + page)", "table_ptr + page + 1)", ("outside table_ptr", "paged_decode.block")),
    "operand transposed": InSource(
        "transpose", "rows[:, None] * N + columns[None, :]", "columns[None, :] * N + rows[:, None]",
        ("transpose.x", "transposed: the first is the second, rows and columns exchanged"), SQUARE, (1, 1)),
    "swizzle on one side": InSource(
        "transpose", "+ columns[None, :])", "+ (columns[None, :] ^ (rows[:, None] // 2 % 4 * 4)))",
        ("swizzle: the first is the second with columns XORed: swizzle (4, 2, 4)",), SQUARE, (1, 1)),
    "rows backwards": InSource(
        "row_sums", "rows[:, None] * stride", "(BM - 1 - rows)[:, None] * stride",
        ("row_sums.x", "rows permuted: the first has the rows of the second in another order")),
    "accumulated into what nobody wrote": InSource(
        "row_sums", "tl.sum(x, axis=1))", "tl.load(out_ptr + rows) + tl.sum(x, axis=1))",
        ("unwritten read: line {line}: load of 16 elements of out_ptr that no store has written",),
        unwritten=("out_ptr",)),
    "store in place of an atomic": InSource(
        "atomics", "tl.atomic_add(counts_ptr + offsets % BINS, ",
        "tl.store(counts_ptr + offsets % BINS, tl.load(counts_ptr + offsets % BINS) + ",
        ("overwritten: line {line}: store of 32 elements of counts_ptr, where another program stored other values",)),
    "mean not divided": InSource(
        "layer_norm", "tl.sum(total) / N", "tl.sum(total)",
        ("layer_norm.mean,", "operand missing: the second's statement uses N, the first's does not")),
    "epsilon forgotten": InSource(
        "layer_norm", "mean * mean + eps", "mean * mean",
        ("layer_norm.rstd,", "operand missing: the second's statement uses eps"), {"eps": 0.5}),
    "sign of the centred values": InSource("layer_norm", "y = (x - mean) * rstd * tl.load(w_ptr + columns) + tl.load("
        "b_ptr + columns)", "y = (mean - x) * rstd * tl.load(w_ptr + columns) + tl.load(b_ptr + columns)",
        ("layer_norm.y,", "negated"), {"b_ptr": np.zeros(64, np.float32)}),
    "fp8 scale of rows dropped": InSource(
        "scaled_matmul", "acc * rows_by[:, None]", "acc",
        ("scaled_matmul.scaled", "scale missing: each row of the first is the second's times a factor of its own")),
    "fp8 scale of columns dropped": InSource(
        "scaled_matmul", " * columns_by[None, :]", "", ("scaled_matmul.scaled", "scale missing: the first is 2 times")),
}


class InCode(NamedTuple):
    """A compiled kernel of LAUNCHES without the line of its PTX that the pattern finds, the ``which``-th; the error."""

    launch: str
    pattern: str
    which: int
    error: str
    words: str

    def text(self, ptx: str) -> str:
        """The PTX with the fault in it: without the line, or with a wait that does not wait."""
        lines = ptx.splitlines()
        places = [n for n, line in enumerate(lines) if re.search(self.pattern, line)]
        at = places[self.which]
        lines[at] = "mov.pred complete, -1;" if "try_wait" in lines[at] else ""
        return "\n".join(lines)


def product(side: int, K: int) -> dict[str, Any]:
    """Arguments of a product of squares."""
    a, b = (normal(side, K).astype(np.float16), normal(K, side).astype(np.float16))
    return {"a_ptr": a, "b_ptr": b, "c_ptr": np.zeros((side, side), np.float16), "K": K}


#: name -> kernel, target, arguments
LAUNCHES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "transpose": ("transpose", "sm_80", {
        "x_ptr": normal(32, 32), "out_ptr": np.zeros((32, 32), np.float32), "M": 32, "N": 32, "BM": 32, "BN": 32}),
    "softmax": ("softmax", "sm_80", {
        "x_ptr": normal(1, 512), "out_ptr": np.zeros((1, 512), np.float32), "stride": 512, "n": 512, "BLOCK": 512}),
    "cp.async": ("matmul", "sm_80", {
        **product(32, 160), "stride_a": 160, "stride_b": 32, "stride_c": 32, "BM": 32, "BN": 32, "BK": 32}),
    "wgmma": ("matmul", "sm_90", {
        **product(64, 320), "stride_a": 320, "stride_b": 64, "stride_c": 64, "BM": 64, "BN": 64, "BK": 64}),
    "TMA": ("matmul_descriptors", "sm_90", {**product(64, 320), "M": 64, "N": 64, "BM": 64, "BN": 64, "BK": 64}),
}
STORE = "cp.async.bulk.tensor.2d.global"
IN_CODE: dict[str, InCode] = {
    "barrier between store and load": InCode("transpose", r"bar\.sync", 0, "Race", "reads what warp 1 wrote"),
    "barrier of a reduction": InCode("softmax", r"bar\.sync", 0, "Race", "reads what warp 1 wrote"),
    "barrier of a second reduction": InCode("softmax", r"bar\.sync", 2, "Race", "with no barrier between them"),
    "wait for cp.async": InCode("cp.async", r"cp\.async\.wait_group\s+2", 0, "UnwrittenRead", "ldmatrix"),
    "group of cp.async not closed": InCode("cp.async", r"cp\.async\.commit_group", 1, "UnwrittenRead", "ldmatrix"),
    "barrier behind the wait for cp.async": InCode(
        "cp.async", r"cp\.async\.wait_group\s+2;\n?", 0, "UnwrittenRead", "which nothing has written"),
    "barrier before a stage is filled again": InCode("cp.async", r"bar\.sync", 2, "Race", "writes what warp 1 read"),
    "wait for cp.async before wgmma": InCode("wgmma", r"cp\.async\.wait_group\s+2", 0, "UnwrittenRead", "wgmma"),
    "fence of the sums": InCode("wgmma", r"wgmma\.fence", 0, "Unfenced", "no wgmma.fence"),
    "group of wgmma not closed": InCode("wgmma", r"wgmma\.commit_group", 0, "Unwaited", "still reads them"),
    "wait for wgmma before a stage is filled again": InCode(
        "wgmma", r"wgmma\.wait_group.*1;", 0, "Unwaited", "are written while a product of wgmma"),
    "wait for wgmma before its sums are used": InCode(
        "wgmma", r"wgmma\.wait_group.*0;", 0, "Unwaited", "holds a product of wgmma in flight"),
    "bytes of TMA not expected": InCode("TMA", r"expect_tx", 0, "Deadlock", "mbarrier.try_wait"),
    "wait for TMA's mbarrier": InCode("TMA", r"try_wait", 0, "UnwrittenRead", "wgmma"),
    "wait for wgmma before TMA fills a stage again": InCode(
        "TMA", r"wgmma\.wait_group.*1;", 0, "Unwaited", "cp.async.bulk.tensor"),
    "fence between stores and TMA": InCode("TMA", r"fence\.proxy\.async\.shared", 1, "Unfenced", STORE),
    "barrier between stores and TMA": InCode("TMA", r"bar\.sync", -2, "Race", STORE),
    "wait for a copy out by TMA": InCode("TMA", r"bulk\.wait_group", -1, "Unwaited", "the kernel ends while"),
}
