"""Lockstep of kernels without markers. Rests on the interpreter against NumPy twins, and on what was planted."""

from __future__ import annotations

import importlib.util
import math
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tutorial_calls import BF16, CALLS, X, normal

from kvlab.mirror.patterns import pattern_of
from kvlab.mirror.proposed import propose

R = np.random.default_rng(19)
TILE = normal(16, 16)
ROWS, COLUMNS = np.arange(16)[:, None], np.arange(16)
FAULTS: dict[str, tuple[np.ndarray, np.ndarray, str, str]] = {
    "turned": (TILE.T, TILE, "transposed", "rows and columns exchanged"),
    "column major": (TILE[:8].T.reshape(8, 16), TILE[:8], "transposed", "column by column"),
    "row too far": (np.vstack([TILE[1:], TILE[:1] * 3]), TILE, "shifted", "1 rows further on"),
    "two columns too early": (np.hstack([TILE[:, :2] * 5, TILE[:, :-2]]), TILE, "shifted", "2 columns further back"),
    "swizzle on one side": (TILE[ROWS, COLUMNS ^ ROWS // 2 % 4 * 4], TILE, "swizzle", "(4, 2, 4)"),
    "scale dropped": (TILE * 8, TILE, "scale missing", "8 times"),
    "scale of rows dropped": (TILE * (1 + ROWS), TILE, "scale missing", "each row"),
    "scale of columns dropped": (TILE * (1 + COLUMNS), TILE, "scale missing", "each column"),
    "sign": (-TILE, TILE, "negated", "other sign"),
    "bias added": (TILE + 3, TILE, "offset", "plus 3"),
    "mask of zeros": (TILE, np.where(COLUMNS < 11, TILE, 0), "mask missing", "where the other has 0"),
    "mask of infinities": (np.where(COLUMNS <= ROWS, TILE, -np.inf), TILE, "mask missing", "where the other has -inf"),
    "bfloat16": (TILE.astype(ml_dtypes.bfloat16), TILE, "rounding", "rounded to bfloat16"),
    "e4m3": (TILE.astype(ml_dtypes.float8_e4m3fn), TILE, "rounding", "rounded to float8_e4m3fn"),
    "rows in another order": (TILE[R.permutation(16)], TILE, "rows permuted", "another order"),
    "NaN": (np.where(TILE > 0, np.nan, TILE), TILE, "not finite", "NaN"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_difference_is_named(name: str) -> None:
    first, second, kind, words = FAULTS[name]
    found = pattern_of(first, second)
    assert (found.name, words in found.words) == (kind, True), found
    assert "differ" in found.where


def test_the_region_is_told_by_rows_and_columns() -> None:
    changed = TILE.copy()
    changed[3:6, 2::4] = 9
    assert pattern_of(changed, TILE).where == "12 of 256 elements differ, rows 3-5, columns 2-14 in steps of 4"
    changed[3:5] = TILE[3:5]
    assert pattern_of(changed, TILE).where == "4 of 256 elements differ, rows 5, columns 2-14 in steps of 4"
    assert pattern_of(TILE, TILE).name == "equal"
    with pytest.raises(ValueError, match=r"first has shape \(16, 16\): must be \(4, 4\)"):
        pattern_of(TILE, TILE[:4, :4])


def test_markers_are_proposed_where_names_and_loops_agree() -> None:
    pytest.importorskip("triton")
    import tutorial_kernels
    import tutorial_twins

    found = propose((tutorial_kernels.__file__, "flash_attention"), (tutorial_twins.__file__, "flash_attention"))
    assert found.matched[:3] == ("rows", "columns", "q")
    assert "        #: s -> s\n        s = tl.dot(q" in found.kernel_text
    assert found.alone == ("where",)
    assert [step.marker.outputs for step in found.kernel.steps] == [s.marker.outputs for s in found.twin.steps]
    with pytest.raises(ValueError, match="must have names in common"):
        propose((tutorial_kernels.__file__, "row_sums"), (tutorial_twins.__file__, "atomics"))


def test_a_loop_corresponds_to_one_loop(tmp_path: Path) -> None:
    """The second loop of one side is not the first one's counterpart, though it binds the same name."""
    kernel, twin = tmp_path / "kernel.py", tmp_path / "twin.py"
    kernel.write_text("def f():\n    for i in range(2):\n        a = i\n        b = i\n")
    twin.write_text("def f():\n    for i in range(2):\n        a = i\n    for i in range(2):\n        b = i\n")
    found = propose((str(kernel), "f"), (str(twin), "f"))
    assert (found.matched, found.alone) == (("a",), ("b",))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CALLS)
def test_a_tutorials_kernel_agrees_with_its_twin(name: str) -> None:
    import tutorial_kernels
    import tutorial_twins

    from kvlab.mirror import assert_lockstep

    arguments, grid = CALLS[name]
    before = {key: value.copy() for key, value in arguments.items() if isinstance(value, np.ndarray)}
    plain = name.removesuffix("_fp8")
    found = assert_lockstep(getattr(tutorial_kernels, plain), getattr(tutorial_twins, plain), arguments, grid)
    assert found.rows
    assert found.memory.lines
    assert all(np.array_equal(before[key], arguments[key]) for key in before)


@pytest.mark.interpreter
@pytest.mark.parametrize("kernel, twin, output, pattern", [
    ("matmul", "late_tile", "acc", None),
    ("softmax", "no_mask", "x", "mask missing"),
    ("flash_attention", "no_scale", "s", "scale missing"),
    ("transpose", "not_turned", "x", "transposed"),
])
def test_a_wrong_twin_is_explained(kernel: str, twin: str, output: str, pattern: str | None) -> None:
    import tutorial_kernels
    import tutorial_twins

    from kvlab.mirror import assert_lockstep, lockstep_kernel

    arguments, grid = CALLS[kernel]
    if kernel == "transpose":
        arguments = {**arguments, "x_ptr": normal(16, 16), "out_ptr": np.zeros((16, 16), np.float32), "M": 16}
        grid = (1, 1)
    pair = getattr(tutorial_kernels, kernel), getattr(tutorial_twins, twin)
    found = lockstep_kernel(*pair, arguments, grid)
    first = found.first_difference
    assert first is not None
    assert first.output == output
    assert pattern is None or (found.explanation is not None and found.explanation.name == pattern)
    with pytest.raises(AssertionError, match=f"first difference: {kernel}"):
        assert_lockstep(*pair, arguments, grid)


@pytest.mark.interpreter
def test_a_helper_is_followed_through_autotuning_and_heuristics(tmp_path: Path) -> None:
    """The helper's own names are compared, call by call; an error in it is told as the second call's, before those of
    the caller that follow from it. The first configuration and the heuristic's value reach the twin."""
    import tutorial_kernels
    import tutorial_twins

    from kvlab.mirror import assert_lockstep, lockstep_kernel

    x = normal(4, 64)
    arguments = {"x_ptr": x, "out_ptr": np.zeros_like(x), "stride": 64, "n": 50}
    found = assert_lockstep(tutorial_kernels.tuned_softmax, tutorial_twins.tuned_softmax, arguments, (2,))
    assert {row.twin for row in found.rows} == {"tuned_softmax", "row_weights", "launch"}
    assert found.helpers["row_weights"].matched == ("m", "p", "total")
    compared = [(row.twin, row.output, row.launch) for row in found.rows[:12]]
    assert compared.index(("row_weights", "total", 0)) < compared.index(("tuned_softmax", "weights", 0))
    text = Path(tutorial_twins.__file__).read_text()
    wrong = tmp_path / "wrong_twins.py"
    wrong.write_text(text.replace("    m = x.max()\n", "    m = x.max() if x[0] > -9 else x[1]\n", 1))
    x[3, 0] = -10
    first = lockstep_kernel(tutorial_kernels.tuned_softmax, loaded(wrong).tuned_softmax, arguments, (2,)).finding
    assert first.startswith("first difference: row_weights.m, call 1, program 1")
    alone = tmp_path / "inlined_twins.py"
    inlined = "weights = np.exp(x - x.max()) / np.exp(x - x.max()).sum()"
    alone.write_text(text.replace("weights = row_weights(x)", inlined))
    found = assert_lockstep(tutorial_kernels.tuned_softmax, loaded(alone).tuned_softmax, arguments, (2,))
    assert found.skipped["row_weights"] == "a helper of the kernel; the twin calls no function of this name"


LOCKED = """
import triton
import triton.language as tl

@triton.jit
def sums(x_ptr, out_ptr, lock_ptr, N: tl.constexpr):
    row = tl.program_id(0); column = tl.arange(0, N)
    x = tl.load(x_ptr + row * N + column); total = tl.sum(x, 0)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(out_ptr, tl.load(out_ptr) + total)
    tl.atomic_xchg(lock_ptr, 0)
"""
TURNS = """
def sums(pid, x_ptr, out_ptr, lock_ptr, N):
    row = pid
    x = x_ptr[row]
    total = x.sum()
    out_ptr[0] += total
"""


@pytest.mark.interpreter
def test_a_lock_is_no_fault_and_statements_share_a_line(tmp_path: Path) -> None:
    """A sum of whole numbers under a lock is right in any order; without the lock, sums are lost on a GPU. Of a line's
    statements the last is compared, none is missed."""
    from kvlab.mirror import lockstep_kernel

    (tmp_path / "turns.py").write_text(TURNS)
    (tmp_path / "locked.py").write_text(LOCKED)
    unlocked = LOCKED.replace("tl.atomic_cas(lock_ptr, 0, 1) == 1", "tl.load(lock_ptr) == 2")
    (tmp_path / "unlocked.py").write_text(unlocked)
    arguments = {"x_ptr": np.arange(64.0, dtype="f4").reshape(4, 16), "out_ptr": np.zeros(1, "f4"),
                 "lock_ptr": np.zeros(1, "i4"), "N": 16}  # fmt: skip
    found = [lockstep_kernel(loaded(tmp_path / f"{name}.py").sums, loaded(tmp_path / "turns.py").sums, arguments, (4,))
             for name in ("locked", "unlocked")]
    assert found[0].ok, found[0].finding
    assert [row.output for row in found[0].rows][:1] == ["total"]
    assert [(fault.kind, fault.argument) for fault in found[1].memory.faults] == [("overwritten", "out_ptr")]


def loaded(path: Path) -> Any:
    """The module of a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.interpreter
def test_memory_is_told_line_by_line() -> None:
    """Sectors and bounds of a column-wise read, from its strides: 16 columns of 32 floats in rows of 128 B."""
    import tutorial_kernels
    import tutorial_twins

    from kvlab.mirror import lockstep_kernel

    arguments, grid = CALLS["transpose"]
    assert lockstep_kernel(tutorial_kernels.transpose, tutorial_twins.transpose, arguments, grid, programs=1).ok
    found = lockstep_kernel(tutorial_kernels.transpose, tutorial_twins.transpose, arguments, grid)
    read, write = found.memory.lines
    assert (read.operation, read.argument, read.times, read.elements) == ("load", "x_ptr", 2, 512)
    assert (read.low, read.high, read.sectors, read.ideal) == (0, 32 * 16 * 4, 64, 64)
    assert (write.operation, write.sectors, write.ideal, write.part) == ("store", 64, 64, 1.0)
    assert read.code.startswith("x = tl.load(x_ptr + rows[:, None]")
    assert "x_ptr     2      512" in found.memory.table()
    narrow = {**arguments, "M": 64, "out_ptr": np.zeros((16, 64), np.float32)}
    assert lockstep_kernel(tutorial_kernels.transpose, tutorial_twins.transpose, narrow, grid).memory.faults == []
    odd = {**CALLS["row_sums"][0], "stride": 33, "x_ptr": np.zeros(33 * 16, np.float32)}
    (line, _) = lockstep_kernel(tutorial_kernels.row_sums, tutorial_twins.row_sums_any, odd, (1,)).memory.lines
    assert (line.elements, line.sectors, line.ideal) == (512, 66, 64)  # 15 rows of 132 B and one of 128
    with pytest.raises(ValueError, match=r"unwritten is \['n'\]: must be names of arrays among"):
        lockstep_kernel(tutorial_kernels.transpose, tutorial_twins.transpose, arguments, grid, unwritten=["n"])


@pytest.mark.interpreter
@pytest.mark.compile
def test_the_threads_of_a_difference_are_named() -> None:
    """By the compiler's layout: element i of 64 is in lane i % 32 of warps i // 32 and i // 32 + 2."""
    import tutorial_kernels
    import tutorial_twins

    from kvlab.mirror import lockstep_kernel

    pair = tutorial_kernels.softmax, tutorial_twins.no_mask
    found = lockstep_kernel(*pair, *CALLS["softmax"], target="sm_90")
    assert found.finding.endswith("elements 50-63; on sm_90 in 28 lanes of 128: warps 1, 3, lanes 18-31, registers 0")


@pytest.mark.timing
@pytest.mark.interpreter
def test_lockstep_takes_at_most_twice_the_interpreter() -> None:
    """Eight programs of 24 trips, each of their names compared; the interpreter alone in the same process. Each of the
    two by its fastest run of up to nine pairs, so that what else the machine does is not counted."""
    import tutorial_kernels
    import tutorial_twins

    from kvlab.mirror import lockstep_kernel
    from kvlab.triton_support import child

    q, k, v = (normal(n, 32, dtype=BF16) for n in (128, 384, 384))
    out = np.zeros((128, 32), BF16)
    sizes = {"stride": 32, "keys": 384, "scale": 0.25, "BM": 16, "BN": 16, "D": 32}
    case: dict[str, Any] = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, **sizes}
    alone = seconds = math.inf
    for pair in range(9):
        alone = min(alone, child.run("tutorial_launch:interpreted", "flash_attention", case, (8,)))
        start = time.perf_counter()
        found = lockstep_kernel(tutorial_kernels.flash_attention, tutorial_twins.flash_attention, case, (8,))
        seconds = min(seconds, time.perf_counter() - start)
        assert found.ok
        if pair >= 2 and seconds <= 1.8 * alone:
            break
    assert seconds <= 2 * alone, f"{seconds:.2f} s in lockstep, {alone:.2f} s in the interpreter alone"


def test_an_access_of_two_arguments_is_counted_for_each() -> None:
    """Rests on the addresses: four elements of x and eight of y, by one instruction."""
    from kvlab.mirror.memory_accesses import MemoryWatch

    watch = MemoryWatch({"x": np.zeros(8, np.float32), "y": np.zeros(8, np.float32)})
    addresses = [watch.case[name].ctypes.data + 4 * np.arange(many) for name, many in (("x", 4), ("y", 8))]
    kept = watch.access("load", np.concatenate(addresses).astype(np.uint64), np.ones(12, bool), 4)
    assert kept.all()
    assert [(one.argument, one.elements, one.low, one.high) for one in watch.record.lines] == [
        ("x", 4, 0, 16), ("y", 8, 0, 32)]
    assert not watch.record.faults


def test_errors_name_the_argument() -> None:
    pytest.importorskip("triton")
    import tutorial_kernels
    import tutorial_twins

    from kvlab.mirror import lockstep_kernel

    for words, how in {
        r"grid is \(0,\): must be one to three integers above 0": {"grid": (0,)},
        "grid is .*: must be one to three": {"grid": lambda args: (1.5,)},
        "programs has 2: must be below the 2 programs": {"grid": 2, "programs": [0, 2]},
        "tolerance is nan: must be a number of at least 0": {"tolerance": float("nan")},
        "tolerance is {'x': 1}: must be a number": {"tolerance": {"x": 1}},
        "unwritten is 'x_ptr': must be names of arrays in a list": {"unwritten": "x_ptr"},
        "target is 'sm_7': must be None or one of sm_80": {"target": "sm_7"},
    }.items():
        with pytest.raises(ValueError, match=words):
            lockstep_kernel(tutorial_kernels.scan, tutorial_twins.scan, CALLS["scan"][0], **how)
    with pytest.raises(ValueError, match="kernel is 3: must be"):
        lockstep_kernel(3, tutorial_twins.scan, {})
    with pytest.raises(ValueError, match=r"args are \['x_ptr'\]: must have \['out_ptr', 'BLOCK'\]"):
        lockstep_kernel(tutorial_kernels.scan, tutorial_twins.scan, {"x_ptr": X[0]})
    with pytest.raises(ValueError, match="twin is 3: must be a function of a file"):
        lockstep_kernel(tutorial_kernels.scan, 3, CALLS["scan"][0])
