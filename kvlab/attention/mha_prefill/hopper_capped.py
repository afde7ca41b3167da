"""P of scores with a softcap, whose weights have a top that stays: all that a thread of the Hopper kernel does to 64.

The exp unit takes eight cycles for a warp's instruction, of which 64 exponentials alone are 512, and tanh would be as
many again. So tanh is a polynomial where the scores of a warp are below half of the cap, as nearly all are, and the exp
unit's otherwise. All other work of a score stands between the exponentials: the next scores' largest, the polynomial,
rounding, sums. The compiler would not move it there across the branches.
"""

from __future__ import annotations

import itertools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_config import FIXED_ABOVE, TANH

SCORES = 64  # of a thread: of two rows in turn, two keys each
FIRST = 16  # whose largest is known before the first exponential
# Operands: 32 words of P; as many registers as scores for the sums, of which two are given; scores; as many registers
# for each of the other arguments.
P = [f"${i}" for i in range(SCORES // 2)]
SUMS = [f"${SCORES // 2 + 2 * row}" for row in range(2)]
X, TOP = ([f"${first + i}" for i in range(SCORES)] for first in (3 * SCORES // 2, 5 * SCORES // 2))  # TOP: times -1
INNER, SCALE, A, B, C, LIMIT = (f"${(7 + 2 * i) * SCORES // 2}" for i in range(6))


def _joined(pieces: list[list[str]]) -> list[str]:
    return list(itertools.chain.from_iterable(pieces))


def _largest(first: int, stop: int) -> list[list[str]]:
    """The largest of some scores in four registers, one piece for each score."""
    found = [[f"abs.f32 top{i}, {X[first + i]};"] for i in range(4)]
    return found + [[f"abs.f32 t, {X[i]};", f"max.f32 top{i % 4}, top{i % 4}, t;"] for i in range(first + 4, stop)]


def _leave(label: str) -> list[str]:
    """To ``label`` if a score of the warp is beyond the limit."""
    return [
        "max.f32 top0, top0, top1;", "max.f32 top2, top2, top3;", "max.f32 top0, top0, top2;",
        f"setp.gt.f32 far, top0, {LIMIT};", "vote.sync.any.pred far, far, 0xffffffff;", f"@far bra.uni {label};",
    ]  # fmt: skip


def _near(i: int, weight: str) -> list[str]:
    """2^(polynomial - top)."""
    return [
        f"mul.f32 t, {X[i]}, {X[i]};", f"fma.rn.f32 u, t, {C}, {B};", f"fma.rn.f32 u, t, u, {A};",
        f"fma.rn.f32 u, u, {X[i]}, {TOP[i]};", f"ex2.approx.ftz.f32 {weight}, u;",
    ]  # fmt: skip


def _any(i: int, weight: str) -> list[str]:
    """2^(tanh * scale - top), 0 of a key that a row does not see."""
    return [
        f"mul.f32 t, {X[i]}, {INNER};", "tanh.approx.f32 t, t;", f"fma.rn.f32 t, t, {SCALE}, {TOP[i]};",
        f"ex2.approx.ftz.f32 {weight}, t;", f"setp.eq.f32 hidden, {X[i]}, 0fFF800000;",
        f"selp.f32 {weight}, 0f00000000, {weight}, hidden;",
    ]  # fmt: skip


def _add(pair: int) -> list[str]:
    """Two weights of a row, to P and to the sums."""
    sums = f"sum{pair % 2 * 2}", f"sum{pair % 2 * 2 + 1}"
    start = ["mov.f32 {0}, {1};", "add.f32 {0}, {0}, {1};"][pair >= 2]
    return [f"cvt.rn.bf16x2.f32 {P[pair]}, w1, w0;", *map(start.format, sums, ("w0", "w1"))]


def _ptx() -> str:
    first, pairs = FIRST // 2, SCORES // 2
    near, exact = (
        [step(2 * i, "w0") + step(2 * i + 1, "w1") + _add(i) for i in range(pairs)] for step in (_near, _any)
    )
    others = _largest(FIRST, SCORES)
    share = -(-len(others) // first)
    mixed = [near[i] + _joined(others[i * share : (i + 1) * share]) for i in range(first)]
    lines = [
        [".reg .pred far, hidden;", ".reg .f32 t, u, top<4>, w<2>, sum<4>;"],
        *_largest(0, FIRST), _leave("all"), *mixed, _leave("others"), *near[first:], ["bra.uni done;", "all:"],
        *exact[:first], ["others:"], *exact[first:], ["done:"],
        [f"add.f32 {SUMS[row]}, sum{2 * row}, sum{2 * row + 1};" for row in range(2)],
    ]  # fmt: skip
    return "{\n" + "\n".join(_joined(lines)) + "\n}"


WEIGHTS = gl.constexpr(_ptx())
OPERANDS = gl.constexpr(",".join(["=&r"] * (SCORES // 2) + ["=&f"] * SCORES + ["f"] * 8 * SCORES))
TANH0, TANH1, TANH2, MOST_ABOVE = (gl.constexpr(c) for c in (*TANH, FIXED_ABOVE))


@gluon.jit
def polynomial(inner, scale):
    """Factors of tanh(s * inner) * scale as a polynomial of s, and up to which s it holds: 0 if they underflow."""
    cube = inner * inner * inner
    a = TANH0 * inner * scale
    b = TANH1 * cube * scale
    c = TANH2 * (cube * inner * inner) * scale
    return a, b, c, gl.where((inner > 2.0**-20) & (inner < 2.0**20), 0.5 / inner, 0.0)


@gluon.jit
def fixed_top(m, inner, scale):
    """What the largest score of the first block weighs, in units of log2, or so many whole units above it that no score
    weighs more than 2^56.
    """
    a, b, c, limit = polynomial(inner, scale)
    far = gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [m * inner], dtype=gl.float32, is_pure=True, pack=1
    )
    top = gl.where(gl.abs(m) > limit, far * scale, m * (a + m * m * (b + m * m * c)))
    return top + gl.maximum(gl.ceil(scale - MOST_ABOVE - top), 0.0)


@gluon.jit
def capped_weights(s, top, inner, scale, BM: gl.constexpr, BN: gl.constexpr):
    """P in bfloat16, ``2^(tanh(s * inner) * scale - top)``, and its row sums ``[BM, 4]``, one for each lane of four."""
    a, b, c, limit = polynomial(inner, scale)
    p, sums = gl.inline_asm_elementwise(
        WEIGHTS, OPERANDS, [s, -top[:, None], inner, scale, a, b, c, limit], dtype=(gl.bfloat16, gl.float32),
        is_pure=True, pack=64,
    )  # fmt: skip
    sums, _ = sums.reshape([BM, BN // 8, 4, 2]).split()  # of all registers, those that were given
    sums, _ = sums.permute((0, 2, 1)).reshape([BM, 4, BN // 16, 2]).split()
    sums, _ = sums.reshape([BM, 4, BN // 32, 2]).split()
    sums, _ = sums.reshape([BM, 4, BN // 64, 2]).split()
    sums, _ = sums.reshape([BM, 4, BN // 128, 2]).split()
    return p, sums.reshape([BM, 4])
