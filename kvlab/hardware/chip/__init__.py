"""The arithmetic of an H100: sums of products, special functions, and the context that lets emulators use them."""

from .current import (
    ARITHMETICS,
    Arithmetic,
    add_products,
    arithmetic,
    check_arithmetic,
    current_arithmetic,
    divide,
    exp,
    exp2,
    log,
    log2,
    multiply_add,
)
from .functions import div_full, ex2_approx, ex2_wide, expf, fma, log2f, logf, rcp_approx
from .products import SUMS, SumRule, mma_sum

__all__ = [
    "ARITHMETICS", "SUMS", "Arithmetic", "SumRule", "add_products", "arithmetic", "check_arithmetic",
    "current_arithmetic", "div_full", "divide", "ex2_approx", "ex2_wide", "exp", "exp2", "expf", "fma", "log", "log2",
    "log2f", "logf", "mma_sum", "multiply_add", "rcp_approx",
]
