"""A merge of partial attention: what it asks of its arguments, and the form its siblings take them in."""

from __future__ import annotations

from typing import Any

from kvlab.attention.call.backends import choose_backend
from kvlab.attention.call.call import Call
from kvlab.attention.call.checks import DTYPES, check_dtype, check_strides, check_writeable
from kvlab.attention.call.explain import Explanation
from kvlab.attention.call.operands import Operand, Sizes
from kvlab.common.arrays import add_axis, element_strides
from kvlab.common.checks import require
from kvlab.memory import float32

from .config import merge_grid

MAX_PARTS = 1024


class MergeStates(Call[Any]):
    """Of ``merge_states``; siblings take ``[N, B, S, H, D]``."""

    operation = "merge_states"
    operands = (
        Operand("outs", "[N, T, H, D] or [N, B, S, H, D]", dtypes=DTYPES, strides=""),
        Operand("lses", dtypes=(float32,), strides=""), Operand("out", strides="", optional=True),
    )
    return_lse = True
    check = False
    outs: Any
    lses: Any

    def check_arguments(self, sizes: Sizes) -> None:
        lses, shape = self.lses, tuple(int(n) for n in self.outs.shape)
        require(1 <= shape[0] <= MAX_PARTS, f"outs has {shape[0]} parts", f"1 to {MAX_PARTS}")
        fits = tuple(lses.shape) == shape[:-1]
        require(fits, f"lses has shape {tuple(lses.shape)}", f"{shape[:-1]}, as outs is {shape}")
        for name in ("outs", "out"):
            strides = (1,) if getattr(self, name) is None else element_strides(getattr(self, name), name)
            fits = 0 in shape or shape[-1] < 2 or strides[-1] == 1
            require(fits, f"{name} has strides {strides}", "contiguous in the last dimension")

    def check_out(self) -> None:
        shape, expected = tuple(self.out.shape), self.result_shape()
        require(shape == expected, f"out has shape {shape}", f"{expected}, a part of outs")
        check_dtype("out", self.out)
        check_writeable("out", self.out)

    def result_shape(self) -> tuple[int, ...]:
        return tuple(self.outs.shape[1:])

    def checked_scale(self) -> float:
        return 1.0

    def arrange(self) -> None:
        self.arrays, self.into = (self.outs, self.lses), self.out
        if self.outs.ndim == 4:
            self.dropped, self.arrays = 1, (add_axis(self.outs, 2), add_axis(self.lses, 2))
            self.into = add_axis(self.out, 1)

    def choose(self, scale: float) -> tuple[Explanation, Any, str]:
        chosen, reason = choose_backend(self.outs, self.backend)
        if chosen == "triton":  # tensors have no negative strides
            for name in ("outs", "lses", "out"):
                if getattr(self, name) is not None:
                    check_strides(name, getattr(self, name), contiguous=False)
        batch, tokens, heads, head_dim = self.arrays[0].shape[1:]
        grid = merge_grid(batch, tokens, heads, head_dim)
        return Explanation(self.operation, chosen, reason, None, grid), None, chosen

    def named(self) -> dict[str, Any]:
        return {"out": self.into}
