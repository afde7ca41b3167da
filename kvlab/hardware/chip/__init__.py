"""The arithmetic of an H100: sums of products, special functions, and the context that lets emulators use them."""

from .current import ARITHMETICS, Arithmetic, arithmetic, check_arithmetic, current_arithmetic
from .functions import div_full, ex2_approx, ex2_wide, expf, fma, log2f, logf, rcp_approx
from .products import SUMS, SumRule, mma_sum

__all__ = [
    "ARITHMETICS",
    "SUMS",
    "Arithmetic",
    "SumRule",
    "arithmetic",
    "check_arithmetic",
    "current_arithmetic",
    "div_full",
    "ex2_approx",
    "ex2_wide",
    "expf",
    "fma",
    "log2f",
    "logf",
    "mma_sum",
    "rcp_approx",
]
