"""Lockstep of kernels without markers. Rests on the interpreter against NumPy twins, and on what was planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvlab.mirror.patterns import pattern_of
from kvlab.mirror.proposed import propose

R = np.random.default_rng(18)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return R.standard_normal(shape).astype(dtype)


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


BF16 = ml_dtypes.bfloat16
X, A, B = normal(3, 64), normal(32, 64, dtype=np.float16), normal(64, 32, dtype=np.float16)
Q, K, V = (normal(n, 16, dtype=BF16) for n in (32, 64, 64))
MATMUL: dict[str, Any] = {"a_ptr": A, "b_ptr": B, "c_ptr": np.zeros((32, 32), np.float16), "K": 64, "BM": 16, "BN": 16,
                          "BK": 16}
STRIDES = {"stride_a": 64, "stride_b": 32, "stride_c": 32}
SOFTMAX = {"x_ptr": X, "out_ptr": np.zeros_like(X), "stride": 64, "n": 50, "BLOCK": 64}
ATTENTION = {"q_ptr": Q, "k_ptr": K, "v_ptr": V, "out_ptr": np.zeros((32, 16), BF16), "stride": 16, "keys": 64,
             "scale": 0.25, "BM": 16, "BN": 32, "D": 16}
CALLS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "vector_add": ({"x_ptr": X[0], "y_ptr": X[1], "out_ptr": np.zeros(64, np.float32), "n": 50, "BLOCK": 32}, (2,)),
    "softmax": (SOFTMAX, (3,)),
    "matmul": ({**MATMUL, **STRIDES}, (2, 2)),
    "matmul_descriptors": ({**MATMUL, "M": 32, "N": 32}, (2, 2)),
    "layer_norm": ({"x_ptr": X.astype(np.float16), "out_ptr": np.zeros((3, 64), np.float16), "w_ptr": X[0],
                    "b_ptr": X[1], "stride": 64, "N": 64, "eps": 1e-5, "BLOCK": 32}, (3,)),
    "flash_attention": (ATTENTION, (2,)),
    "paged_decode": ({"q_ptr": Q[:16], "cache_ptr": normal(5, 16, 16, dtype=BF16),
                      "table_ptr": np.array([3, 1, 4], np.int32), "out_ptr": np.zeros((16, 16), np.float32), "keys": 48,
                      "scale": 0.25, "PAGE": 16, "HEADS": 16, "D": 16}, (1,)),
    "transpose": ({"x_ptr": normal(32, 16), "out_ptr": np.zeros((16, 32), np.float32), "M": 32, "N": 16, "BM": 16,
                   "BN": 16}, (2, 1)),
    "row_sums": ({"x_ptr": normal(16, 32), "out_ptr": np.zeros(16, np.float32), "stride": 32, "BM": 16, "BN": 32},
                 (1,)),
    "scan": ({"x_ptr": X[0], "out_ptr": np.zeros(64, np.float32), "BLOCK": 32}, (2,)),
    "gather": ({"table_ptr": X[2], "index_ptr": R.permutation(64).astype(np.int32), "out_ptr": np.zeros(64, np.float32),
                "BLOCK": 32}, (2,)),
    "atomics": ({"x_ptr": np.arange(64, dtype=np.int32), "counts_ptr": np.zeros(8, np.int32), "BLOCK": 32, "BINS": 8},
                (2,)),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CALLS)
def test_a_tutorials_kernel_agrees_with_its_twin(name: str) -> None:
    import tutorial_kernels
    import tutorial_twins

    from kvlab.mirror import assert_lockstep

    arguments, grid = CALLS[name]
    before = {key: value.copy() for key, value in arguments.items() if isinstance(value, np.ndarray)}
    found = assert_lockstep(getattr(tutorial_kernels, name), getattr(tutorial_twins, name), arguments, grid)
    assert found.rows
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


def test_errors_name_the_argument() -> None:
    pytest.importorskip("triton")
    import tutorial_kernels
    import tutorial_twins

    from kvlab.mirror import lockstep_kernel

    with pytest.raises(ValueError, match="kernel is 3: must be"):
        lockstep_kernel(3, tutorial_twins.scan, {})
    with pytest.raises(ValueError, match=r"args are \['x_ptr'\]: must have \['out_ptr', 'BLOCK'\]"):
        lockstep_kernel(tutorial_kernels.scan, tutorial_twins.scan, {"x_ptr": X[0]})
    with pytest.raises(ValueError, match="twin is 3: must be a function of a file"):
        lockstep_kernel(tutorial_kernels.scan, 3, CALLS["scan"][0])
