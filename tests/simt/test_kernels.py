"""Compiled kernels run without a GPU. Rests on float64, on NumPy's exact results, and on hardware.

The records are bits of an H200 (tests/data/hardware/chip_bits.npz) and counters of an H100 (kernels.json), both of
Triton 3.6.0; 3.7.1's code gives the same bits. Triton 3.9 has the same products, and adds the exponentials that a
thread holds of a row as a tree, (a + b) + (c + d), where 3.6 adds one after the other: rows whose sum then rounds
otherwise differ in the last place, of the portable decode of e4m3 two rows, 239 of 4096 values.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simt_kernels as kernels
from caught import Caught, as_tensors

from benchmarks.chip_bits import CALLS, Call
from benchmarks.truth.whole import KERNELS, opcode
from kvlab import attention
from kvlab.common.arrays import to_numpy
from kvlab.memory import OutOfBounds, bfloat16, float8_e4m3fn, float8_e5m2, float16
from kvlab.replay import lockstep_case
from kvlab.simt import DeviceAssertion, run
from kvlab.triton_support.compile import options_of
from kvlab.triton_support.versions import gluon_lacks, installed
from kvlab.xray import XRay, xray
from kvlab.xray.edges import product_wavefronts

pytestmark = pytest.mark.compile
RECORDS = Path(__file__).parents[1] / "data" / "hardware"


def floats(*shape: int) -> Any:
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape).astype(np.float32)


def close(ours: Any, exact: Any, part: float) -> bool:
    return bool(np.abs(ours.astype(np.float64) - exact).max() <= part * np.abs(exact).max())


def test_elements_and_rows() -> None:
    """Vector add equals NumPy's sums; softmax, layer norm and a scan float64's, to a few float32 roundings."""
    x, y, out = floats(1000), floats(1000)[::-1].copy(), np.zeros(1000, np.float32)
    ran = run(kernels.add_kernel, (4,), x, y, out, 1000, B=256)
    assert np.array_equal(out, x + y)
    assert ran.sectors == 2 * 3 * 1000 * 4 // 32  # a thread's two elements are loaded one by one: every sector twice
    rows, result = floats(6, 300), np.zeros((6, 300), np.float32)
    run(kernels.softmax_kernel, lambda meta: (6,), rows, result, 300, 300, B=512)
    e = np.exp(rows.astype(np.float64) - rows.max(axis=1, keepdims=True))
    assert close(result, e / e.sum(axis=1, keepdims=True), 1e-6)
    given, weight, bias = floats(5, 700).astype(bfloat16), floats(700), floats(700)[::-1].copy()
    normal = np.zeros_like(given)
    ran = run(kernels.layer_norm_kernel, (5,), given, weight, bias, normal, 700, 1e-5, B=256)
    assert ran.provisional == ("sqrt.approx.ftz.f32",)
    wide = given.astype(np.float64)
    wide = (wide - wide.mean(axis=1, keepdims=True)) / np.sqrt(wide.var(axis=1, keepdims=True) + 1e-5)
    assert close(normal, wide * weight + bias, 2.0**-8)
    z, sums = floats(512), np.zeros(512, np.float32)
    run(kernels.scan_kernel, (1,), z, sums, B=512)
    assert close(sums, np.cumsum(z.astype(np.float64)), 1e-6)


def test_gather_atomics_and_a_transpose() -> None:
    """All exact. The swizzled transpose has the passes that its bytes need, and no conflicts."""
    x, index, out = floats(256), np.random.default_rng(1).integers(0, 256, 256).astype(np.int32), np.zeros(256, "f4")
    run(kernels.gather_kernel, (1,), x, index, out, B=256)
    assert np.array_equal(out, x[index])
    values = np.random.default_rng(2).integers(0, 11, 1000).astype(np.int32)
    counts, most, flag = np.zeros(16, np.int32), np.full(1, -5, np.int32), np.full(1, 7, np.int32)
    run(kernels.atomics_kernel, (4,), values, counts, most, flag, 1000, B=256)
    assert np.array_equal(counts, np.bincount(values, minlength=16))
    assert most[0] == values.max()
    assert flag[0] in range(100, 104)  # one of the programs was the first
    halves, total = floats(3, 256).astype(float16), np.zeros(256, float16)
    ran = run(kernels.halves_kernel, (3,), halves, total, B=256)
    assert any(facts.instruction.op[-1] == "f16x2" for facts in ran.accesses)
    assert np.array_equal(total, halves[0] + halves[1] + halves[2])  # float16's sums in turn
    square, turned = floats(64, 64).astype(float16), np.zeros((64, 64), float16)
    ran = run(kernels.transpose_kernel, (1,), square, turned, B=64)
    assert np.array_equal(turned, square.T)
    assert ran.conflicts == 0
    assert ran.wavefronts == sum(facts.ideal for facts in ran.instructions) >= 2 * square.nbytes // 128


WIDENS = pytest.mark.skipif(installed() == "3.6.0", reason="3.6 widens e5m2 as only sm_89 can")
MATMULS = [(bfloat16, "sm_80", 1e-6), (np.dtype(np.float32), "sm_80", 2e-3),
           pytest.param(np.dtype(float8_e5m2), "sm_80", 1e-6, marks=WIDENS), (np.dtype(float8_e4m3fn), "sm_89", 1e-3)]


@pytest.mark.parametrize("dtype, target, part", MATMULS, ids=lambda x: str(x))
def test_a_matrix_product(dtype: Any, target: str, part: float) -> None:
    """Three stages of cp.async over a K that no tile divides. tf32 has 10 digits, sums of e4m3 14, their products are
    exact; e5m2 of sm_80 is widened to float16."""
    a, b, c = floats(128, 80).astype(dtype), floats(80, 64).astype(dtype), np.zeros((128, 64), np.float32)
    bk = 64 if dtype.itemsize == 1 else 32
    ran = run(kernels.matmul_kernel, (2, 2), a, b, c, 64, 80, 80, 64, 64, BM=64, BN=32, BK=bk, num_stages=3,
              target=target)
    assert close(c, a.astype(np.float64) @ b.astype(np.float64), part)
    known = {bfloat16: (), np.dtype(np.float32): ("mma.sync.m16n8k8.tf32",)}
    assert ran.provisional == known.get(dtype, ())


def test_attention_and_its_table() -> None:
    q, k, v = (floats(n, 64).astype(bfloat16) for n in (64, 96, 97))
    out = np.zeros((64, 64), bfloat16)
    ran = run(kernels.attention_kernel, (1,), q, k, v[:96], out, 96, 0.125, D=64, BM=64, BN=32, num_stages=3)
    s = q.astype(np.float64) @ k.astype(np.float64).T * 0.125
    p = np.exp2(s - s.max(axis=1, keepdims=True))
    assert close(out, p / p.sum(axis=1, keepdims=True) @ v[:96].astype(np.float64), 2.0**-7)
    assert ran.conflicts == 0
    (line,) = [found for found in ran.lines() if "values = tl.load" in found.code]
    assert line.sectors == 96 * 64 * 2 // 32
    text = str(ran)
    assert f"simt_kernels.py:{line.source[1]}" in text
    assert "values = tl.load" in text
    assert "<code>values = tl.load" in ran._repr_html_()


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_branches_of_lanes_local_memory_and_a_lock(target: str) -> None:
    """sine of numbers that need the long reduction beside such that do not; seven programs take a lock in turn."""
    x = floats(256) * np.where(np.arange(256) % 3, np.float32(1), np.float32(1e6))
    out, lock, total = np.zeros((2, 256), np.float32), np.zeros(1, np.int32), np.zeros(1, np.int32)
    ran = run(kernels.functions_kernel, (7,), x, out, lock, total, B=256, target=target, debug=True)
    assert np.abs(out[0] - np.sin(x.astype(np.float64))).max() < 1e-7
    assert np.array_equal(out[1], np.clip(x, -0.5, 0.5))
    assert total[0] == 2**7 - 1
    assert any(facts.executed and "local" in facts.instruction.op for facts in ran.instructions)
    x[77] = 1e10
    with pytest.raises(DeviceAssertion, match=r"assertion of the kernel failed; at PTX line \d+, simt_kernels.py:\d+"):
        run(kernels.functions_kernel, (1,), x, out, lock, total, B=256, target=target, debug=True)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_products_of_descriptors(target: str) -> None:
    """By pointers for sm_80, by TMA and wgmma for sm_90: rows past the tensor's end are read as zeros and not written.
    Descriptors of the host, and those that the programs make in memory of their own."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    a, b = floats(100, 128).astype(bfloat16), floats(128, 160).astype(bfloat16)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    rows = np.full((101, 160), 7, bfloat16)
    x, y, z = (as_tensors(array) for array in (a, b, rows[:100]))
    blocks = {"BM": 64, "BN": 128, "BK": 64, "num_stages": 3, "target": target}
    given = [TensorDescriptor.from_tensor(*pair) for pair in ((x, [64, 64]), (y, [64, 128]), (z, [64, 128]))]
    run(kernels.tiles_kernel, (2, 2), *given, 128, **blocks)
    assert close(rows[:100], exact, 2.0**-8)
    assert (rows[100] == 7).all()
    rows[:] = 7
    run(kernels.own_tiles_kernel, (2, 2), x, y, z, 100, 160, 128, **blocks)
    assert close(rows[:100], exact, 2.0**-8)
    assert (rows[100] == 7).all()


def test_a_mask_that_is_missing_is_named() -> None:
    """The line of the kernel, the argument, and the address."""
    x, y, out = floats(1000), floats(1001)[:1000], np.zeros(1000, np.float32)
    with pytest.raises(OutOfBounds, match=r"^x: access of 8 bytes .*simt_kernels\.py:18: `.*ld\.global"):
        run(kernels.unmasked_kernel, (4,), x, y, out, 1000, B=256)
    assert not out.any()


def test_arguments_that_are_wrong_are_named() -> None:
    x = floats(8)
    with pytest.raises(ValueError, match="target is 'sm_70'"):
        run(kernels.scan_kernel, (1,), x, x, B=8, target="sm_70")
    with pytest.raises(ValueError, match=r"scan_kernel takes .*missing: \['B'\], unknown: \['b'\]"):
        run(kernels.scan_kernel, (1,), x, x, b=8)
    with pytest.raises(ValueError, match="x: given by place and by name"):
        run(kernels.scan_kernel, (1,), x, x, x=x, B=8)
    with pytest.raises(ValueError, match=r"grid is \(0.5,\)"):
        run(kernels.scan_kernel, (0.5,), x, x, B=8)
    with pytest.raises(ValueError, match=r"kernel is .*: must be a @triton.jit"):
        run(len, (1,), x)
    with pytest.raises(ValueError, match="arithmetic is 'exact'"):
        run(kernels.scan_kernel, (1,), x, x, B=8, arithmetic="exact")


def launched(call: Call, out: Any) -> tuple[Any, tuple[int, ...], dict[str, Any], Any]:
    """kvlab's own kernel, the grid and the arguments of a call, and the lse that it will write."""
    home, arrays, named = call.launched()
    module: Any = importlib.import_module(f"{home}{'hopper' if call.backend == 'hopper' else 'kernel'}")
    stub = Caught(module.attend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "attend", stub)
        patch.setattr(module, "machine", lambda device: ("sm_90", 132), raising=False)
        _, lse = module.launch(*map(as_tensors, arrays), **named, out=out)
    ((grid, arguments),) = stub.calls
    if call.operation == "decode" and call.backend == "triton":
        arguments["C"] = arguments["C"]._replace(PTX=90)
    return stub.fn, grid, arguments, lse


OWN = [
    ("decode-triton-bf16-float32", "sm_80"), ("decode-triton-bf16", "sm_90"), ("prefill-triton-bf16-float32", "sm_80"),
    ("decode-hopper-e4m3", "sm_90"), ("prefill-hopper-bf16", "sm_90"),
]


def x_rayed(fn: Any, arguments: dict[str, Any], target: str) -> XRay:
    """The X-ray of a launch."""
    options = {key: arguments[key] for key in options_of(target) if key in arguments}
    return xray(fn, {key: value for key, value in arguments.items() if key not in options}, target, **options)


@pytest.mark.parametrize("name, target", OWN)
def test_own_kernels_have_the_chip_s_bits(name: str, target: str) -> None:
    """Every bit that an H200 recorded; the emulator with ``arithmetic="chip"`` has the same ones (test_chip.py). The
    code for sm_80 sums in the order of that for sm_90."""
    if name.startswith("prefill") and str(installed()).startswith("3.9."):
        pytest.skip("Triton 3.9 adds up a row's exponentials as a tree, those of the record one after the other")
    call = next(call for call in CALLS if str(call) == name)
    if call.backend == "hopper" and gluon_lacks():
        pytest.skip(f"Hopper's kernels are not used with {gluon_lacks()}")
    out = as_tensors(call.output(call.arrays()))
    fn, grid, arguments, lse = launched(call, out)
    ran = run(fn, grid, target=target, **arguments)
    with np.load(RECORDS / "chip_bits.npz") as recorded:
        for what, ours in (("out", to_numpy(out)), ("lse", to_numpy(lse))):
            theirs = recorded[f"{name} {what}"]
            assert np.array_equal(ours.view(theirs.dtype), theirs), what
    assert ran.provisional == ()


@dataclass(frozen=True)
class Narrow(Call):
    """A call of 64 columns, of which there is no record."""

    def arrays(self) -> tuple[Any, ...]:
        return tuple(np.ascontiguousarray(x[..., :64]) for x in super().arrays())

    def output(self, arrays: tuple[Any, ...]) -> Any:
        return np.zeros(arrays[0].shape, bfloat16)


@pytest.mark.skipif(gluon_lacks() is not None, reason="a release of Triton for which it is not chosen")
def test_the_compiled_prefill_of_64_columns_has_the_emulator_s_bits() -> None:
    """Rests on the machine of compiled code, whose arithmetic is the chip's: 79 of 1,200 lse are others where a lane
    adds its columns pair by pair."""
    call = Narrow("prefill", "bf16", "hopper")
    out = as_tensors(call.output(call.arrays()))
    fn, grid, arguments, lse = launched(call, out)
    run(fn, grid, target="sm_90", **arguments)
    for ours, theirs in zip(call.emulated(), (out, lse), strict=True):
        assert np.array_equal(ours.view(np.uint8), to_numpy(theirs).view(np.uint8))


@dataclass(frozen=True)
class Counted(Call):
    """A call whose launch was counted on an H100."""

    kernel: str = ""

    def arrays(self) -> tuple[Any, ...]:
        return tuple(KERNELS[self.kernel].inputs())


@pytest.mark.skipif(installed() != "3.6.0", reason="the record is that of Triton 3.6.0")
@pytest.mark.parametrize("name", ["decode fp8", "prefill hopper"])
def test_own_kernels_take_what_a_chip_counted(name: str) -> None:
    """Nsight Compute's counters of whole kernels on an H100 (tests/data/hardware/kernels.json), to the last pass and
    sector: wavefronts of shared memory with their conflicts, sectors of cp.async, loads and TMA."""
    counters = json.loads((RECORDS / "kernels.json").read_text())[name]["counters"]
    call = Counted(name.split()[0], "bf16", KERNELS[name].backend, kernel=name)
    q = call.arrays()[0]
    fn, grid, arguments, _ = launched(call, as_tensors(np.zeros(q.shape, bfloat16)))
    ran = run(fn, grid, target="sm_90", arithmetic="float32", **arguments)
    sectors: Counter[str] = Counter()
    for facts in ran.instructions:
        op = facts.instruction.op
        way = op[0] if op[0] != "cp" else "cp.async" if op[2] != "bulk" else op[5] if len(op) > 5 else ""
        sectors[way] += facts.sectors
    assert ran.wavefronts == counters["wavefronts"]
    assert sectors["cp.async"] == counters["cp_async_sectors"]
    assert sectors["ld"] == counters["load_sectors"]
    assert sectors["shared::cluster"] == counters["tma_read_sectors"]
    assert sectors["global"] == counters["tma_written_sectors"]


def recorded(name: str) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    """A kernel of the record, the grid and the arguments of its launch."""
    one = KERNELS[name]
    if not one.operation.startswith("mla"):
        call = Counted(name.split()[0], "bf16", one.backend, kernel=name)
        return launched(call, as_tensors(np.zeros(call.arrays()[0].shape, bfloat16)))[:3]
    planned = getattr(attention, one.operation).planned(*one.inputs(), **one.options, backend="emulator", arch="sm_90")
    home, case, _ = lockstep_case(planned)
    module: Any = importlib.import_module(f"{home}.kernel")
    stub = Caught(module.attend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "attend", stub)
        patch.setattr(module, "merge", lambda *args, **named: None)
        module.launch(**{key: as_tensors(value) for key, value in case.items()})
    return stub.fn, *stub.calls[0]


def instruction_of(sass: str) -> str:
    """The PTX's name of a SASS instruction that touches shared memory."""
    op = opcode(sass) or ""
    wide = {"U8": "b8", "U16": "b16", "64": "b64", "128": "b128"}.get(op.rpartition(".")[2], "b32")
    names = {
        "LDSM.16.M88.": "ldmatrix.x4", "LDSM.16.MT88.": "ldmatrix.x4.trans", "STSM": f"stmatrix.x{op[-1]}",
        "LDS": f"ld.shared.{wide}", "STS": f"st.shared.{wide}", "HGMMA": "wgmma", "UTMA": "TMA",
        "LDGSTS.E.BYPASS.128": "cp.async.cg.16", "LDGSTS": "cp.async.ca.4",
    }
    for start, name in names.items():
        if op.startswith(start):
            return name
    raise AssertionError(sass)


@pytest.mark.skipif(installed() != "3.6.0", reason="the record is that of Triton 3.6.0")
@pytest.mark.parametrize("name", [
    "decode", "decode fp8", "prefill", "prefill hopper", "mla decode", "mla decode, 16 heads"])
def test_an_x_ray_of_own_kernels_has_what_a_chip_counted(name: str) -> None:
    """Instruction by instruction of the compiled code, none more and none less: the passes of a warp that the X-ray
    predicts of cp.async, ld, st, ldmatrix, stmatrix, wgmma's operands and TMA, and those that an H100 counted, divided
    by how often warps executed it. Numbers of pages past the last are not copied, by two trips of a warp at most. Then
    sectors of TMA, of whose larger boxes more are loaded here."""
    record = json.loads((RECORDS / "kernels.json").read_text())[name]
    fn, grid, arguments = recorded(name)
    found = x_rayed(fn, arguments, "sm_90")
    warps = int(np.prod(grid)) * found.resources.warps
    expected: Counter[tuple[str, float]] = Counter()
    for edge in found.edges:
        for access in edge.accesses:
            kind = access.instruction.split(".")[0] if edge.kind == "product" else \
                "TMA" if edge.kind == "tma" else access.instruction
            passes = (product_wavefronts(access.instruction) or 0) / 4 if edge.kind == "product" else \
                access.passes("sm_90")[0] / edge.warps
            expected[kind, passes] += edge.kind != "global"
    most = dict(expected.keys())
    chip: Counter[tuple[str, float]] = Counter()
    for sass, executed, passes in record["listing"]:
        kind = instruction_of(sass)
        idle = most[kind] * executed - passes if kind == "cp.async.ca.4" else 0
        assert 0 <= idle <= 2 * most[kind] * warps
        chip[kind, (passes + idle) / executed] += 1
    assert chip == +expected
    for way, op, counter in (("global_to_local", "UTMALDG", "tma_read_sectors"),
                             ("local_to_global", "UTMASTG", "tma_written_sectors")):
        boxes = sorted(edge.sectors / len(edge.accesses) / edge.warps for edge in found.edges if way in edge.operation
                       for _ in edge.accesses if edge.kind == "tma")
        times = sorted(executed for sass, executed, _ in record["listing"] if op in sass)
        assert np.dot(boxes, times) == record["counters"][counter]


@pytest.mark.timing
def test_a_million_lane_instructions_a_second() -> None:
    """On the 2 cores that the project is tested on: attention with products and exponentials of the chip, all accesses
    counted. The fastest run of up to three."""
    q, k, v = (floats(n, 64).astype(bfloat16) for n in (512, 256, 257))
    out = np.zeros((512, 64), bfloat16)
    given = q, k, v[:256], out, 256, 0.125
    best = 0.0
    for _ in range(3):
        ran = run(kernels.attention_kernel, (8,), *given, D=64, BM=64, BN=32, num_stages=3)
        assert ran.lane_instructions > 10**6
        best = max(best, ran.rate)
        if best > 2e6:
            break
    assert best > 10**6
