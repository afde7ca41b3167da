"""Launches of the kernels of ``tutorial_kernels`` on small arrays: a kernel's name, its arguments, its grid.

One table for the interpreter, the compiler and the machine that runs what is compiled; ``tutorial_twins`` has the
NumPy function of the same name, which says what is right.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

R = np.random.default_rng(18)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Normal numbers of a dtype."""
    return R.standard_normal(shape).astype(dtype)


BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
X, A, B = normal(3, 64), normal(32, 64, dtype=np.float16), normal(64, 32, dtype=np.float16)
Q, K, V = (normal(n, 16, dtype=BF16) for n in (32, 64, 64))
MATMUL: dict[str, Any] = {"a_ptr": A, "b_ptr": B, "c_ptr": np.zeros((32, 32), np.float16), "K": 64, "BM": 16, "BN": 16,
                          "BK": 16}
STRIDES = {"stride_a": 64, "stride_b": 32, "stride_c": 32}
SOFTMAX = {"x_ptr": X, "out_ptr": np.zeros_like(X), "stride": 64, "n": 50, "BLOCK": 64}
ATTENTION = {"q_ptr": Q, "k_ptr": K, "v_ptr": V, "out_ptr": np.zeros((32, 16), BF16), "stride": 16, "keys": 64,
             "scale": 0.25, "BM": 16, "BN": 32, "D": 16}
#: name -> arguments, grid; ``matmul_fp8`` is ``matmul`` with other dtypes
CALLS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "vector_add": ({"x_ptr": X[0], "y_ptr": X[1], "out_ptr": np.zeros(64, np.float32), "n": 50, "BLOCK": 32}, (2,)),
    "softmax": (SOFTMAX, (3,)),
    "matmul": ({**MATMUL, **STRIDES}, (2, 2)),
    "matmul_fp8": ({**MATMUL, **STRIDES, "BK": 32, "a_ptr": A.astype(E4M3), "b_ptr": B.astype(E4M3)}, (2, 2)),
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
#: that of ``scaled_matmul``, whose rows of A have scales that differ, its columns of B one
SCALED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "scaled_matmul": ({
        "a_ptr": A.astype(E4M3), "b_ptr": B.astype(E4M3), "c_ptr": np.zeros((32, 32), np.float32),
        "row_scale_ptr": np.arange(1, 33, dtype=np.float32), "column_scale_ptr": np.full(32, 0.5, np.float32), "K": 64,
        "BM": 32, "BN": 32, "BK": 32}, (1,)),
}
