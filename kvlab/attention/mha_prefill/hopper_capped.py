"""Weights of scores with a softcap, which have a top that stays: all that a thread of the Hopper kernel does to 64.

The exp unit takes eight cycles for a warp's instruction, of which 64 exponentials alone are 512; tanh would be as many
again. So tanh is a polynomial where the scores of a warp are below half of the cap, as nearly all are, and otherwise
the exp unit's.
"""

from __future__ import annotations

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_config import FIXED_ABOVE, TANH

SCORES = 64  # of a thread: of two rows in turn, two keys each
# Operands: as many registers for each argument as there are scores.
X, TOP = ([f"${first + i}" for i in range(SCORES)] for first in (SCORES, 2 * SCORES))
INNER, SCALE = (f"${(3 + i) * SCORES}" for i in range(2))


def _literal(value: float) -> str:
    return "0f" + struct.pack(">f", value).hex()


def _ptx() -> str:
    """A branch that a warp takes as one; the largest score is found in four registers, one after the other waits."""
    lines = [".reg .pred far, hidden;", ".reg .f32 t, u, a, b, c, most<4>, top<2>;"]
    lines += [f"neg.f32 top{row}, {TOP[2 * row]};" for row in range(2)]
    lines += [f"abs.f32 most{i}, {X[i]};" for i in range(4)]
    for i in range(4, SCORES):
        lines += [f"abs.f32 t, {X[i]};", f"max.f32 most{i % 4}, most{i % 4}, t;"]
    lines += ["max.f32 most0, most0, most1;", "max.f32 most2, most2, most3;", "max.f32 most0, most0, most2;"]
    lines += [f"mul.f32 t, most0, {INNER};", "setp.gt.f32 far, t, 0f3F000000;"]
    for test, power in ("lt", -20), ("gt", 20):  # beyond which c would be no normal number
        lines += [f"setp.{test}.or.f32 far, {INNER}, {_literal(2.0**power)}, far;"]
    lines += ["vote.sync.any.pred far, far, 0xffffffff;", "@far bra.uni beyond;"]
    lines += [f"mul.f32 t, {INNER}, {INNER};", f"mul.f32 a, {INNER}, {SCALE};", "mul.f32 b, a, t;", "mul.f32 c, b, t;"]
    lines += [f"mul.f32 {name}, {name}, {_literal(factor)};" for name, factor in zip("abc", TANH, strict=True)]
    for i, x in enumerate(X):
        lines += [f"mul.f32 t, {x}, {x};", "fma.rn.f32 u, t, c, b;", "fma.rn.f32 u, t, u, a;"]
        lines += [f"fma.rn.f32 u, u, {x}, top{i // 2 % 2};", f"ex2.approx.ftz.f32 ${i}, u;"]
    lines += ["bra.uni done;", "beyond:"]
    for i, x in enumerate(X):
        lines += [f"mul.f32 t, {x}, {INNER};", "tanh.approx.f32 t, t;", f"fma.rn.f32 t, t, {SCALE}, top{i // 2 % 2};"]
        lines += ["ex2.approx.ftz.f32 t, t;", f"setp.eq.f32 hidden, {x}, 0fFF800000;"]
        lines += [f"selp.f32 ${i}, 0f00000000, t, hidden;"]
    return "{\n" + "\n".join([*lines, "done:"]) + "\n}"


WEIGHTS = gl.constexpr(_ptx())
OPERANDS = gl.constexpr(",".join(["=&f"] * SCORES + ["f"] * 4 * SCORES))
MOST_ABOVE = gl.constexpr(FIXED_ABOVE)


@gluon.jit
def fixed_top(top, scale):
    """``top``, in units of log2, or so many whole units above it that no score weighs more than 2^56."""
    return top + gl.maximum(gl.ceil(scale - MOST_ABOVE - top), 0.0)


@gluon.jit
def capped_weights(s, top, inner, scale):
    """``2^(tanh(s * inner) * scale - top)``, 0 of keys that a row does not see: of scores -inf."""
    return gl.inline_asm_elementwise(
        WEIGHTS, OPERANDS, [s, top[:, None], inner, scale], dtype=gl.float32, is_pure=True, pack=64
    )
