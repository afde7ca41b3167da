"""The machine on PTX written by hand.

Rests on the PTX ISA's definitions in Python's integers, on wavefronts counted on an H100
(tests/data/h100_wavefronts.json), and on laws: lanes that part meet again, a copy lands when it is waited for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlab.hardware import TmaDescriptor
from kvlab.memory import OutOfBounds, UnwrittenRead
from kvlab.simt import Deadlock, DeviceAssertion, KernelRun, Unfenced, UnknownInstruction, Unwaited, run_ptx
from kvlab.simt.order import Order

DATA = Path(__file__).parents[1] / "data"
LANE = np.arange(32)


def execute(body: str, *args: Any, threads: int = 32, grid: tuple[int, ...] = (1,), **options: Any) -> KernelRun:
    """A kernel of these statements: parameters of 64 bits in %rd100, %rd101, ...; thread number in %r100, its four
    bytes' offset in %rd99."""
    parameters = ", ".join(f".param .u64 p{i}" for i in range(len(args)))
    loads = "\n".join(f"ld.param.b64 %rd{100 + i}, [p{i}];" for i in range(len(args)))
    return run_ptx(
        f""".version 8.0\n.target sm_90\n.extern .shared .align 16 .b8 smem[];
        .visible .entry f({parameters}) {{
        .reg .pred %p<20>; .reg .b16 %rs<40>; .reg .b32 %r<120>; .reg .b64 %rd<120>;
        {loads}
        mov.u32 %r100, %tid.x;
        mul.wide.u32 %rd99, %r100, 4;
        {body}
        ret;\n}}""", grid, list(args), threads=threads, **options)


NUMBERS = np.array([0, 1, 2, 3, 5, 31, 32, 33, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x12345678, 0x7FFFFFFF,
                    0x80000000, 0x80000001, 0xDEADBEEF, 0xFFFFFFFE, 0xFFFFFFFF, 7, 100, 0xF0F0F0F0, 0x0F0F0F0F, 12, 13,
                    14, 15, 16, 17, 18], np.uint32)
MASK = 0xFFFFFFFF


def signed(a: int) -> int:
    return a - (1 << 32) if a >> 31 else a


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def field(a: int, start: int, length: int, sign: bool) -> int:
    start, length = start & 255, length & 255
    end = min(start + length, 32)
    value = (a >> start) & ((1 << max(end - start, 0)) - 1)
    top = a >> (end - 1) & 1 if sign and length and start < 32 else 0
    return value | (-1 << (end - start)) * top & MASK if top else value


def inserted(a: int, b: int, start: int, length: int) -> int:
    mask = ((1 << length) - 1) << start & MASK
    return b & ~mask | a << start & mask


def permuted(a: int, b: int, selector: int) -> int:
    data, out = (b << 32 | a).to_bytes(8, "little"), 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = data[nibble & 7]
        out |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * i
    return out


LAWS: dict[str, Any] = {
    "add.u32 %r3, %r1, %r2": lambda a, b: a + b,
    "sub.s32 %r3, %r1, %r2": lambda a, b: a - b,
    "mul.lo.s32 %r3, %r1, %r2": lambda a, b: a * b,
    "mul.hi.u32 %r3, %r1, %r2": lambda a, b: a * b >> 32,
    "mul.hi.s32 %r3, %r1, %r2": lambda a, b: signed(a) * signed(b) >> 32,
    "mad.lo.s32 %r3, %r1, %r2, %r1": lambda a, b: a * b + a,
    "div.s32 %r3, %r1, %r4": lambda a, b: truncated(signed(a), signed(b | 1)),
    "rem.s32 %r3, %r1, %r4": lambda a, b: signed(a) - truncated(signed(a), signed(b | 1)) * signed(b | 1),
    "rem.u32 %r3, %r1, %r4": lambda a, b: a % (b | 1),
    "min.s32 %r3, %r1, %r2": lambda a, b: min(signed(a), signed(b)),
    "max.u32 %r3, %r1, %r2": lambda a, b: max(a, b),
    "add.s16x2 %r3, %r1, %r2": lambda a, b: (a + b) % 2**16 | ((a >> 16) + (b >> 16)) % 2**16 << 16,
    "max.u16x2 %r3, %r1, %r2": lambda a, b: max(a % 2**16, b % 2**16) | max(a >> 16, b >> 16) << 16,
    "max.relu.s32 %r3, %r1, %r2": lambda a, b: max(signed(a), signed(b), 0),
    "shl.b32 %r3, %r1, %r2": lambda a, b: a << min(b, 32),
    "shr.u32 %r3, %r1, %r2": lambda a, b: a >> min(b, 32),
    "shr.s32 %r3, %r1, %r2": lambda a, b: signed(a) >> min(b, 31),
    "shf.l.wrap.b32 %r3, %r1, %r2, 5": lambda a, b: (b << 32 | a) << 5 >> 32,
    "bfe.u32 %r3, %r1, %r2, 7": lambda a, b: field(a, b, 7, False),
    "bfe.s32 %r3, %r1, 3, %r2": lambda a, b: field(a, 3, b, True),
    "bfi.b32 %r3, %r1, %r2, 4, 9": lambda a, b: inserted(a, b, 4, 9),
    "prmt.b32 %r3, %r1, %r2, 0x73C1": lambda a, b: permuted(a, b, 0x73C1),
    "prmt.b32 %r3, %r1, %r2, %r1": lambda a, b: permuted(a, b, a),
    "lop3.b32 %r3, %r1, %r2, %r4, 0xCA": lambda a, b: a & b | ~a & (b | 1),
    "popc.b32 %r3, %r1": lambda a, b: a.bit_count(),
    "clz.b32 %r3, %r1": lambda a, b: 32 - a.bit_length(),
    "brev.b32 %r3, %r1": lambda a, b: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 %r3, %r1": lambda a, b: a.bit_length() - 1,
    "not.b32 %r3, %r1": lambda a, b: ~a,
    "neg.s32 %r3, %r1": lambda a, b: -a,
    "cvt.s32.s8 %r3, %r1": lambda a, b: (a & 255 ^ 128) - 128,
    "cvt.u32.u16 %r3, %r1": lambda a, b: a & 0xFFFF,
    "cvt.sat.s16.s32 %r3, %r1": lambda a, b: max(-0x8000, min(0x7FFF, signed(a))),
    "add.cc.u32 %r5, %r1, %r2; addc.u32 %r3, %r2, 7": lambda a, b: b + 7 + (a + b >> 32),
    "sub.cc.u32 %r5, %r1, %r2; subc.u32 %r3, %r1, 7": lambda a, b: a - 7 - (a < b),
    "mad.lo.cc.u32 %r5, %r1, %r2, %r4; madc.hi.u32 %r3, %r1, %r2, 0": lambda a, b: a * b + (b | 1) >> 32,
    "dp4a.u32.u32 %r3, %r1, %r2, %r1": lambda a, b: a + sum((a >> s & 255) * (b >> s & 255) for s in (0, 8, 16, 24)),
}


def test_integers_are_those_of_the_isa() -> None:
    """Each instruction for 32 x 32 pairs of numbers with all the edges, against Python's own integers."""
    a, b = (x.ravel().copy() for x in np.meshgrid(NUMBERS, NUMBERS, indexing="ij"))
    out = np.zeros((len(LAWS), a.size), np.uint32)
    body = "add.s64 %rd1, %rd100, %rd99; add.s64 %rd2, %rd101, %rd99; ld.global.b32 %r1, [%rd1];"
    body += "ld.global.b32 %r2, [%rd2]; or.b32 %r4, %r2, 1; add.s64 %rd3, %rd102, %rd99;\n"
    body += "\n".join(f"{text}; st.global.b32 [%rd3+{i * a.nbytes}], %r3;" for i, text in enumerate(LAWS))
    execute(body, a, b, out, threads=1024)
    for text, law, ours in zip(LAWS, LAWS.values(), out, strict=True):
        exact = np.array([law(x, y) & MASK for x, y in zip(a.tolist(), b.tolist(), strict=True)], np.uint32)
        assert np.array_equal(ours, exact), text


def test_floats_at_their_edges() -> None:
    """-0 lies below 0, a NaN gives way, conversions end at the largest number; casts as an H100's
    (tests/data/hardware/h100_casts.json)."""
    inf, nan = np.inf, np.nan
    a = np.tile(np.float32([-0.0, 0.0, nan, 1.5, -2.5, 3e9, -inf, 65519.9]), 4)
    b = np.tile(np.float32([0.0, -0.0, 1.0, nan, 2.0, -1.0, 5.0, 1.0]), 4)
    laws = {
        "min.f32 %r3, %r1, %r2": np.float32([-0.0, -0.0, 1, 1.5, -2.5, -1, -inf, 1]),
        "max.f32 %r3, %r1, %r2": np.float32([0, 0, 1, 1.5, 2, 3e9, 5, a[7]]),
        "max.NaN.f32 %r3, %r1, %r2": np.float32([0, 0, nan, nan, 2, 3e9, 5, a[7]]),
        "min.xorsign.abs.f32 %r3, %r1, %r2": np.float32([-0.0, -0.0, 1, 1.5, -2, -1, -5, 1]),
        "max.relu.f32 %r3, %r1, %r2": np.float32([0, 0, 1, 1.5, 2, 3e9, 5, a[7]]),
        "add.sat.f32 %r3, %r1, %r2": np.float32([0, 0, 0, 0, 0, 1, 0, 1]),
        "min.relu.f32 %r3, %r1, %r2": np.float32([0, 0, 1, 1.5, 0, 0, 0, 1]),
        "setp.nan.f32 %p1, %r1, %r2; selp.f32 %r3, %r1, %r2, %p1": np.float32([0, -0.0, nan, 1.5, 2, -1, 5, 1]),
        "setp.num.f32 %p1, %r1, %r2; selp.f32 %r3, %r1, %r2, %p1": np.float32([-0.0, 0, 1, nan, -2.5, 3e9, -inf, a[7]]),
        "setp.ne.f32 %p1, %r1, %r2; selp.f32 %r3, %r1, %r2, %p1": np.float32([0, -0.0, 1, nan, -2.5, 3e9, -inf, a[7]]),
        "setp.neu.f32 %p1, %r1, %r2; selp.f32 %r3, %r1, %r2, %p1":
            np.float32([0, -0.0, nan, 1.5, -2.5, 3e9, -inf, a[7]]),
        "cvt.rzi.s32.f32 %r3, %r1": np.int32([0, 0, 0, 1, -2, 2**31 - 1, -(2**31), 65519]),
        "cvt.rni.s32.f32 %r3, %r1": np.int32([0, 0, 0, 2, -2, 2**31 - 1, -(2**31), 65520]),
        "cvt.rz.f16.f32 %rs1, %r1; cvt.f32.f16 %r3, %rs1":
            np.float32([-0.0, 0, nan, 1.5, -2.5, 65504, -inf, 65504]),
        "cvt.rn.f16.f32 %rs1, %r1; cvt.f32.f16 %r3, %rs1": np.float32([-0.0, 0, nan, 1.5, -2.5, inf, -inf, 65504]),
    }
    out = np.zeros((len(laws), 32), np.uint32)
    body = "add.s64 %rd1, %rd100, %rd99; add.s64 %rd2, %rd101, %rd99; ld.global.b32 %r1, [%rd1];"
    body += "ld.global.b32 %r2, [%rd2]; add.s64 %rd3, %rd102, %rd99;\n"
    body += "\n".join(f"{text}; st.global.b32 [%rd3+{128 * i}], %r3;" for i, text in enumerate(laws))
    execute(body, a, b, out)
    for (text, exact), ours in zip(laws.items(), out[:, :8], strict=True):
        same = ours == exact.view(np.uint32)
        assert (same | (np.isnan(ours.view(np.float32)) & np.isnan(exact.astype(np.float32)))).all(), text
    record = json.loads((DATA / "hardware" / "h100_casts.json").read_text())
    given = np.frombuffer(bytes.fromhex(record["float32"]), np.float32)
    given = given[: len(given) // 32 * 32].copy()
    for name, code, text in (
        ("float8_e4m3fn", "u1", "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r1, %r1"),
        ("float8_e5m2", "u1", "cvt.rn.satfinite.e5m2x2.f32 %rs1, %r1, %r1"),
        ("bfloat16", "u2", "cvt.rn.bf16.f32 %rs1, %r1"), ("float16", "u2", "cvt.rn.f16.f32 %rs1, %r1"),
    ):
        bits = np.zeros(len(given), np.uint32)
        execute(f"""
            mov.u32 %r3, %ctaid.x; mul.wide.u32 %rd1, %r3, 128; add.s64 %rd1, %rd1, %rd99; add.s64 %rd2, %rd1, %rd100;
            add.s64 %rd3, %rd1, %rd101; ld.global.b32 %r1, [%rd2]; {text}; cvt.u32.u16 %r2, %rs1;
            st.global.b32 [%rd3], %r2;""", given, bits, grid=(len(given) // 32,))
        cast = np.frombuffer(bytes.fromhex(record[name]), code)[: len(given)].astype(np.uint32)
        assert np.array_equal(bits, cast if code == "u2" else cast * 257), name


@pytest.mark.parametrize("verb, first, factors", [
    ("sub", True, (1, -1)), ("sub", False, (-1, 1)), ("add", False, (1, 1)),
])
def test_a_product_that_is_added_alone_is_fused(verb: str, first: bool, factors: tuple[int, int]) -> None:
    """a b and c with one rounding, as ptxas contracts them: exact in float64, rounded once; without it, twice."""
    rng = np.random.default_rng(3)
    a, b, c = (rng.standard_normal(32).astype(np.float32) for _ in range(3))
    c = np.float32(a * b) + c * np.float32(1e-6)  # the digits that the first rounding takes are what is left
    operands = "%r3, %r4" if first else "%r4, %r3"
    body = f"""
        add.s64 %rd1, %rd100, %rd99; add.s64 %rd2, %rd101, %rd99; add.s64 %rd3, %rd102, %rd99;
        add.s64 %rd4, %rd103, %rd99; ld.global.b32 %r1, [%rd1]; ld.global.b32 %r2, [%rd2]; ld.global.b32 %r4, [%rd3];
        mul.f32 %r3, %r1, %r2; {verb}.f32 %r5, {operands}; st.global.b32 [%rd4], %r5;"""
    product, rest = a.astype(np.float64) * b, c.astype(np.float64)
    exact = (factors[0] * product + factors[1] * rest).astype(np.float32)
    twice = factors[0] * (a * b) + factors[1] * c
    fused, apart = np.zeros(32, np.float32), np.zeros(32, np.float32)
    execute(body, a, b, c, fused)
    execute(body, a, b, c, apart, contract=False)
    assert np.array_equal(fused, exact)
    assert np.array_equal(apart, twice)
    assert not np.array_equal(exact, twice)


@pytest.mark.parametrize("address, sectors, ideal", [("%rd100", 1, 1), ("%rd1", 4, 4), ("%rd2", 8, 4)])
def test_sectors_and_the_fewest_of_the_same_bytes(address: str, sectors: int, ideal: int) -> None:
    """All lanes at one word, at neighbouring ones, at every second one."""
    ran = execute(f"""
        add.s64 %rd1, %rd100, %rd99; add.s64 %rd2, %rd1, %rd99; ld.global.b32 %r1, [{address}];""",
                  np.zeros(64, np.uint32))
    (facts,) = [facts for facts in ran.instructions if facts.sectors]
    assert (facts.sectors, facts.ideal_sectors) == (sectors, ideal)


def test_what_tma_has_written_over_needs_no_fence() -> None:
    """Law of proxies: a store of the generic proxy hinders a read of wgmma until a fence, or until TMA writes there."""
    order, (cta, warp) = Order(1, 4, 256, races=True), np.zeros((2, 1), np.int64)
    where = np.arange(0, 128, 16)[None]
    order.unfenced[0, :8] = True
    with pytest.raises(Unfenced, match=r"stored at shared address 0: no fence\.proxy\.async"):
        order.read_async(order.products, cta, warp, where)
    order.copied(cta, warp, where)
    order.read_async(order.products, cta, warp, where)


def test_lanes_that_part_meet_again() -> None:
    """Every lane goes round a loop as often as its number says; a shuffle behind it finds all 32 there."""
    out = np.zeros(64, np.uint32)
    execute("""
        mov.u32 %r1, 0; mov.u32 %r2, 0;
        again: setp.ge.u32 %p1, %r1, %r100;
        @%p1 bra done;
        add.u32 %r2, %r2, %r1; add.u32 %r1, %r1, 1;
        bra again;
        done: shfl.sync.bfly.b32 %r3|%p2, %r2, 1, 31, -1;
        add.s64 %rd1, %rd100, %rd99; st.global.b32 [%rd1], %r3;""", out, threads=64)
    number = np.arange(64) ^ 1
    assert np.array_equal(out, number * (number - 1) // 2)


def test_warps_with_work_of_their_own() -> None:
    """A warp writes, another reads behind a barrier of these two; a barrier that nobody completes is named."""
    body = """
        mov.u32 %r1, smem; shl.b32 %r2, %r100, 2; and.b32 %r2, %r2, 127; add.u32 %r1, %r1, %r2;
        setp.lt.u32 %p1, %r100, 32; @%p1 bra writer;
        setp.ge.u32 %p2, %r100, 64; @%p2 bra end;
        bar.sync 1, 64;
        ld.shared.b32 %r3, [%r1]; add.s64 %rd1, %rd100, %rd99; st.global.b32 [%rd1+-128], %r3;
        bra end;
        writer: add.u32 %r3, %r100, 7; st.shared.b32 [%r1], %r3; bar.arrive 1, 64;
        end: bar.sync 0;"""
    out = np.zeros(32, np.uint32)
    execute(body, out, threads=96, shared=128, grid=(1,))
    assert np.array_equal(out, LANE + 7)
    with pytest.raises(Deadlock, match=r"PTX line \d+: `bar.sync 1, 64`"):
        execute(body.replace("bar.arrive 1, 64;", ""), out, threads=96, shared=128)
    with pytest.raises(UnwrittenRead, match=r"at PTX line \d+: `ld.shared.b32 %r3"):
        execute(body.replace("bar.sync 1, 64;", "").replace("bra writer", "bra end"), out, threads=96, shared=128)


@pytest.mark.parametrize("wait, error", [("0", None), ("1", UnwrittenRead), (None, UnwrittenRead)])
def test_a_copy_lands_when_it_is_waited_for(wait: str | None, error: type[Exception] | None) -> None:
    """Lanes past 20 copy nothing, which writes zeros."""
    source, out = np.arange(100, 132, dtype=np.uint32), np.ones(32, np.uint32)
    body = f"""
        mov.u32 %r1, smem; shl.b32 %r2, %r100, 2; add.u32 %r1, %r1, %r2; st.shared.b32 [%r1], %r2;
        setp.lt.u32 %p1, %r100, 20; selp.b32 %r3, 4, 0, %p1; add.s64 %rd1, %rd100, %rd99;
        cp.async.ca.shared.global [%r1+0], [%rd1+0], 0x4, %r3; cp.async.commit_group;
        {"" if wait is None else f"cp.async.wait_group {wait};"}
        ld.shared.b32 %r4, [%r1]; add.s64 %rd2, %rd101, %rd99; st.global.b32 [%rd2], %r4;"""
    if error is None:
        ran = execute(body, source, out, shared=128)
        assert np.array_equal(out, np.where(LANE < 20, source, 0))
        (copy,) = [facts for facts in ran.instructions if facts.instruction.op[:2] == ("cp", "async") and facts.nbytes]
        assert (copy.sectors, copy.ideal_sectors, copy.wavefronts, copy.nbytes) == (3, 3, 1, 80)
    else:
        with pytest.raises(error, match=r"at PTX line \d+: `ld.shared.b32"):
            execute(body, source, out, shared=128)


@pytest.mark.parametrize("arrive, wait, error", [
    ("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1];", True, None),
    ("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1];", False, UnwrittenRead),
    ("mbarrier.arrive.shared::cta.b64 _, [%r1];", True, UnwrittenRead),
    ("", True, Deadlock),
    ("cp.async.mbarrier.arrive.shared::cta.b64 [%r1];", True, UnknownInstruction),
])
def test_an_arrival_behind_copies_comes_when_they_have_landed(
    arrive: str, wait: bool, error: type[Exception] | None
) -> None:
    """Rests on the definition of cp.async.mbarrier.arrive: one arrival of each thread, behind the copies that it has in
    flight; those that it starts afterwards are others. A warp reads what another one's threads have copied.
    """
    source, out = np.arange(100, 164, dtype=np.uint32), np.zeros(32, np.uint32)
    waits = "again: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra again;" if wait else ""
    body = f"""
        mov.u32 %r1, smem; and.b32 %r2, %r100, 31; shl.b32 %r2, %r2, 2; add.u32 %r3, %r1, 16; add.u32 %r3, %r3, %r2;
        setp.eq.u32 %p1, %r100, 0; @%p1 mbarrier.init.shared::cta.b64 [%r1], 32; bar.sync 0;
        setp.lt.u32 %p1, %r100, 32; @%p1 bra copies;
        {waits}
        ld.shared.b32 %r4, [%r3]; add.s64 %rd2, %rd101, %rd99; st.global.b32 [%rd2+-128], %r4;
        bra end;
        copies: add.s64 %rd1, %rd100, %rd99; cp.async.ca.shared.global [%r3+0], [%rd1+0], 0x4;
        {arrive}
        cp.async.ca.shared.global [%r3+128], [%rd1+128], 0x4;
        end: bar.sync 0;"""
    launch = {"threads": 64, "shared": 512, "races": True}
    if error is None:
        execute(body, source, out, **launch)
        assert np.array_equal(out, source[:32])
        with pytest.raises(UnwrittenRead, match=r"at PTX line \d+: `ld.shared.b32 %r4"):
            execute(body.replace("ld.shared.b32 %r4, [%r3]", "ld.shared.b32 %r4, [%r3+128]"), source, out,
                    **launch | {"races": False})
    else:
        with pytest.raises(error):
            execute(body, source, out, **launch)


def test_what_the_launch_before_writes_is_there_from_the_first_wait_on() -> None:
    """Rests on the definition of griddepcontrol.wait; CTAs of one launch run that before it once."""
    ready, out = np.zeros(32, np.uint32), np.zeros((2, 32), np.uint32)
    body = """
        add.s64 %rd1, %rd100, %rd99; add.s64 %rd2, %rd101, %rd99; griddepcontrol.launch_dependents;
        ld.global.b32 %r1, [%rd1]; griddepcontrol.wait; ld.global.b32 %r2, [%rd1];
        st.global.b32 [%rd2], %r1; st.global.b32 [%rd2+128], %r2;"""
    ran = []

    def before() -> None:
        ran.append(1)
        ready[:] = LANE + 5

    execute(body, ready, out, grid=(2,), launch_before=before)
    assert len(ran) == 1
    assert np.array_equal(out, [np.zeros(32), LANE + 5])
    with pytest.raises(Unwaited, match=r"f ends without a griddepcontrol\.wait: what waits for it does not wait"):
        execute(body.replace("griddepcontrol.wait;", ""), ready, out, launch_before=before)
    execute(body, ready, out)


def test_atomics_come_one_after_the_other() -> None:
    """Lanes see what those before them left, on shared memory each CTA its own."""
    out = np.zeros((2, 32), np.uint32)
    execute("""
        mov.u32 %r1, smem; mov.u32 %r2, 5; setp.eq.u32 %p1, %r100, 0; @%p1 st.shared.b32 [%r1], %r2;
        mov.u32 %r3, %ctaid.x; add.u32 %r4, %r3, 1; atom.shared.add.u32 %r5, [%r1], %r4;
        mul.wide.u32 %rd1, %r3, 128; add.s64 %rd1, %rd1, %rd99; add.s64 %rd1, %rd1, %rd100;
        st.global.b32 [%rd1], %r5;""", out, shared=16, grid=(2,))
    assert np.array_equal(out, 5 + LANE * np.array([[1], [2]]))


def boxes(expect: str = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 1024;", wait: str = "wait") -> str:
    """PTX: a thread copies a box of 8 x 32 to byte 1024 of shared memory, all wait for it and read it in order."""
    waits = "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra again;" if wait else ""
    return f"""
        .version 8.0\n.target sm_90\n.extern .shared .align 1024 .b8 smem[];
        .visible .entry f(.param .align 64 .b8 p0[128], .param .u64 p1) {{
        .reg .pred %p<4>; .reg .b32 %r<12>; .reg .b64 %rd<8>;
        ld.param.b64 %rd1, [p1]; mov.b64 %rd2, p0; cvta.param.u64 %rd2, %rd2;
        mov.u32 %r2, %tid.x; setp.eq.u32 %p1, %r2, 0; mov.u32 %r1, smem; add.u32 %r3, %r1, 1024; mov.u32 %r4, 4;
        @%p1 mbarrier.init.shared::cta.b64 [%r1], 1; bar.sync 0;
        @%p1 {expect}
        @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
             [%r3], [%rd2, {{%r4, %r4}}], [%r1];
        again: {waits}
        shl.b32 %r5, %r2, 4; add.u32 %r5, %r5, %r3; ld.shared.v4.b32 {{%r6, %r7, %r8, %r9}}, [%r5];
        mul.wide.u32 %rd3, %r2, 16; add.s64 %rd3, %rd3, %rd1; st.global.v4.b32 [%rd3], {{%r6, %r7, %r8, %r9}};
        ret;\n}}"""


def test_a_box_of_tma_lands_when_its_mbarrier_is_waited_for() -> None:
    """Its image is the one that was measured on an H100 (test_tma.py): 128 B swizzle, zeros outside the tensor."""
    tensor = np.arange(10 * 36, dtype=np.uint32).reshape(10, 36)
    d, out = TmaDescriptor.of(tensor, (8, 32), "128B"), np.zeros(256, np.uint32)
    ran = run_ptx(boxes(), (1,), [d, out], shared=2048, threads=64)
    exact = np.zeros((8, 32), np.uint32)
    exact[:6] = tensor[4:, 4:36]
    assert np.array_equal(out[d.image(0) // 4], exact)
    (copy,) = [facts for facts in ran.instructions if facts.instruction.op[:3] == ("cp", "async", "bulk")]
    assert copy.nbytes == 8 * 32 * 4
    launch = {"shared": 2048, "threads": 64}
    with pytest.raises(UnwrittenRead, match=r"at PTX line \d+: `ld.shared.v4.b32"):
        run_ptx(boxes(wait=""), (1,), [d, out], **launch)
    with pytest.raises(Deadlock, match=r"PTX line \d+: `mbarrier.try_wait"):
        run_ptx(boxes("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 2048;"), (1,), [d, out], **launch)
    with pytest.raises(ValueError, match="mbarrier at shared address 8 was not initialised; at PTX line"):
        run_ptx(boxes("mbarrier.arrive.shared::cta.b64 _, [%r1+8];"), (1,), [d, out], **launch)


def test_a_product_that_a_sum_alone_uses_is_fused() -> None:
    """ptxas contracts them; its code gives the recorded bits of Hopper's prefill (test_kernels.py)."""
    a, out = np.full(32, 1 + 2**-12, np.float32), np.zeros(32, np.float32)
    body = """
        add.s64 %rd1, %rd100, %rd99; ld.global.b32 %r1, [%rd1]; mul.f32 %r2, %r1, %r1; add.f32 %r3, %r2, 0fBF800000;
        add.s64 %rd2, %rd101, %rd99; st.global.b32 [%rd2], %r3;"""
    execute(body, a, out)
    assert (out == np.float32(2**-11 + 2**-24)).all()
    execute(body, a, out, contract=False)
    assert (out == np.float32(2**-11)).all()
    execute(body.replace("mul.f32", "mul.rn.f32"), a, out)
    assert (out == np.float32(2**-11)).all()


MEASURED = json.loads((DATA / "h100_wavefronts.json").read_text())["operations"]


@pytest.mark.parametrize("name", [f"{verb}{bits}" for verb in ("ld", "st") for bits in (32, 64, 128)])
def test_wavefronts_are_those_counted_on_a_chip(name: str) -> None:
    """An H100's counts of instructions at these addresses: here each is a CTA of its own that loads its addresses."""
    record = MEASURED[name]
    address = np.array(record["addr"], np.uint32)
    mask = np.array(record.get("mask", [MASK] * len(address)), np.int64)
    active = (mask[:, None] >> LANE & 1).astype(np.uint32)
    vector = {"32": "", "64": ".v2", "128": ".v4"}[name[2:]]
    registers = ", ".join(f"%r{i}" for i in range(10, 10 + int(name[2:]) // 32))
    access = f"ld.shared{vector}.b32 {{{registers}}}, [%r1]" if name[:2] == "ld" else \
        f"st.shared{vector}.b32 [%r1], {{{registers}}}"
    ran = execute(f"""
        mov.u32 %r3, %ctaid.x; mul.wide.u32 %rd1, %r3, 128; add.s64 %rd1, %rd1, %rd99;
        add.s64 %rd2, %rd1, %rd100; ld.global.b32 %r1, [%rd2]; add.s64 %rd3, %rd1, %rd101; ld.global.b32 %r2, [%rd3];
        setp.ne.b32 %p1, %r2, 0; @%p1 {access};""",
        address, active, shared=int(address.max()) + 16, grid=(len(address),), strict=False)
    (facts,) = [facts for facts in ran.accesses if "shared" in facts.instruction.op]
    assert facts.wavefronts == sum(record["wavefronts"])
    assert facts.conflicts == sum(record["conflicts"])


def test_what_the_machine_lacks_is_named_before_anything_runs() -> None:
    out = np.zeros(32, np.uint32)
    store = "add.s64 %rd1, %rd100, %rd99; st.global.b32 [%rd1], %r100;"
    with pytest.raises(UnknownInstruction, match=r"PTX line \d+: `frob.b32 %r1, %r2`: the machine has no such"):
        execute(f"{store} frob.b32 %r1, %r2;", out)
    with pytest.raises(UnknownInstruction, match="'%q1' is no register"):
        execute(f"{store} add.u32 %r1, %q1, 1;", out)
    assert not out.any()
    with pytest.raises(OutOfBounds, match=r"address 0x7 lies in no argument of the kernel; at PTX line"):
        execute("mov.b64 %rd1, 7; ld.global.b8 %r1, [%rd1];", out)
    with pytest.raises(ValueError, match=r"argument 0: address \d+ of 16 bytes is not a multiple of 16; at PTX line"):
        execute("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd100+4];", out)
    with pytest.raises(DeviceAssertion, match="traps; at PTX line"):
        execute("trap;", out)
    with pytest.raises(ValueError, match="PTX has 0 entries"):
        run_ptx("", (1,), [])
    with pytest.raises(ValueError, match="argument 0 is 'x': must be an array, a number"):
        execute("", "x")
