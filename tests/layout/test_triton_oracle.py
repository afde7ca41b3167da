"""Layouts drawn at random, asked of the installed Triton. Rests on the compiler's own layout code; needs no GPU.

Triton's wheels are built with assertions: a bad query ends the process. So each query runs in a forked child, and where
the child dies kvlab may answer or refuse. What can be asked differs by version:

* shared layouts: directly since 3.7.0; in 3.6.0 by a reshape of a memory descriptor, whose layout is then read
* bank conflicts: for AMD in 3.6.0 only
* WMMA: by warps and tiles per warp in 3.6.0, by bases since
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import select
import signal
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab.hardware.banks.triton_conflicts import bank_conflicts
from kvlab.layout import LinearLayout
from kvlab.layout.encodings import from_gluon, from_ttgir, sm120_scales_layout, ttgir_aliases

gluon = pytest.importorskip("triton.experimental.gluon.language")

pytestmark = pytest.mark.oracle

import triton  # noqa: E402
from triton._C.libtriton import gluon_ir, ir  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler.compiler import make_backend  # noqa: E402
from triton.experimental.gluon.language.amd import AMDMFMALayout, AMDWMMALayout  # noqa: E402

VERSION = triton.__version__
OLD = VERSION.startswith("3.6.")
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
    "gfx1200": GPUTarget("hip", "gfx1200", 32),
}
PATIENCE = 300  # seconds that a forked child may take to answer
oracle = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def builder(target, num_ctas):
    """A builder inside a function of a module that names the target; the caller keeps all three alive."""
    context = ir.context()
    ir.load_dialects(context)
    backend = make_backend(target)
    backend.load_dialects(context)
    plain = ir.builder(context)
    module = plain.create_module()
    options = backend.parse_options({"num_warps": 4})
    module.set_attr("ttg.target", plain.get_string_attr(backend.get_target_name(options)))
    numbers = {"num-warps": 4, "num-ctas": num_ctas, "threads-per-warp": target.warp_size}
    for name, number in numbers.items():
        module.set_attr(f"ttg.{name}", plain.get_int32_attr(number))
    made = gluon_ir.GluonOpBuilder(context)
    function = made.get_or_insert_function(module, "f", made.get_function_ty([], []), "public", False)
    module.push_back(function)
    made.set_insertion_point_to_start(function.add_entry_block())
    return context, module, made


def in_child(question):
    """The answer of a forked child as JSON; None where it raised or died."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            faulthandler.disable()
            os.close(read)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.write(write, json.dumps(question()).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        told = select.select([pipe], [], [], PATIENCE)[0]
        if not told:
            os.kill(child, signal.SIGKILL)
        answer = pipe.read()
    os.waitpid(child, 0)
    assert told, f"a forked child did not answer in {PATIENCE} s"
    return json.loads(answer) if answer else None


def cga_of(layout):
    while hasattr(layout, "parent"):
        layout = layout.parent
    return getattr(layout, "cga_layout", [])


def ask_layout(target, layout, shape):
    """The bases by the compiler."""

    def question():
        context, module, made = builder(TARGETS[target], 1 << len(cga_of(layout)))
        linear = made.to_linear_layout(layout._to_ir(made), list(shape))
        del context, module
        if hasattr(linear, "offset_bases"):
            return {"offset": linear.offset_bases, "block": linear.block_bases}
        names = {"register": "reg_bases", "lane": "lane_bases", "warp": "warp_bases", "block": "block_bases"}
        return {name: getattr(linear, field) for name, field in names.items()}

    return in_child(question)


def ask_reshaped(layout, shape, bits):
    """The bases of a shared layout by the way of a reshape of the last dimension to (n / 2, 2), folded back."""

    def question():
        context, module, made = builder(TARGETS["sm_90"], 1)
        element = {8: made.get_int8_ty, 16: made.get_int16_ty, 32: made.get_int32_ty}[bits]()
        kind = made.get_shared_mem_desc_ty(element, list(shape), layout._to_ir(made), list(shape))
        parts = [*shape[:-1], shape[-1] // 2, 2]
        found = made.get_gluon_layout_from_memdesc(made.create_memdesc_reshape(made.create_local_alloc(kind), parts))
        del context, module
        if not isinstance(found, gluon.SharedLinearLayout):
            return None  # named as another encoding of higher rank, not as bases
        bases = from_gluon(found).to_linear_layout(parts).reshape(shape).bases
        return {"offset": bases["offset"], "block": bases["block"]}

    return in_child(question)


def check(expected, layout, shape):
    """Equal to the compiler's answer. Where it has none, a ValueError is right too."""
    try:
        ours = from_gluon(layout).to_linear_layout(shape, triton_version=VERSION).bases
    except ValueError as error:
        ours = error
    assert expected in (None, ours), f"{layout} on {shape}: {ours}"


def powers(low, high):
    return st.integers(low, high).map(lambda bits: 1 << bits)


@st.composite
def spread(draw, bits, rank):
    """A power of two as a product over the dimensions."""
    sizes = [1] * rank
    for axis in draw(st.lists(st.integers(0, rank - 1), min_size=bits, max_size=bits)):
        sizes[axis] *= 2
    return sizes


@st.composite
def cga_layouts(draw, rank):
    """Bases of up to 4 CTAs, each along a dimension or repeating."""
    reach, bases = [1] * rank, []
    for axis in draw(st.lists(st.integers(0, rank), max_size=2)):
        bases.append([reach[axis] * (axis == other) for other in range(rank)] if axis < rank else [0] * rank)
        if axis < rank:
            reach[axis] *= 2
    return bases


def shapes(rank, low=0, high=8):
    return st.lists(powers(low, high), min_size=rank, max_size=rank)


@st.composite
def blocked_layouts(draw, rank, lanes=32, cga=True):
    return gluon.BlockedLayout(
        draw(spread(draw(st.integers(0, 5)), rank)),
        draw(spread(int(math.log2(lanes)), rank)),
        draw(spread(2, rank)),
        draw(st.permutations(range(rank))),
        draw(cga_layouts(rank)) if cga else [],
    )


@st.composite
def mma_layouts(draw, cga=True):
    if draw(st.booleans()):
        rank = draw(st.integers(2, 3))
        version, instruction = [2, 0], [1] * (rank - 2) + [16, 8]
        warps = draw(spread(2, rank))
    else:
        rank, version, instruction = 2, [3, 0], [16, draw(powers(3, 8)), 16]
        warps = draw(st.sampled_from([[4, 1], [2, 2], [1, 4]]))
    return gluon.NVMMADistributedLayout(version, warps, instruction, draw(cga_layouts(rank)) if cga else [])


@st.composite
def mfma_layouts(draw, cga=True):
    rank, tile = draw(st.integers(2, 3)), draw(st.sampled_from([[32, 32], [16, 16], [4, 64], [64, 4]]))
    return AMDMFMALayout(
        version=draw(st.sampled_from([3, 4])),
        instr_shape=[*tile, 16],
        transposed=tile == [64, 4] or draw(st.booleans()),
        warps_per_cta=draw(spread(2, rank)),
        element_bitwidth=draw(st.sampled_from([32, 64])),
        tiles_per_warp=[1] * (rank - 2) + draw(spread(draw(st.integers(0, 2)), 2)),
        cga_layout=draw(cga_layouts(rank)) if cga else [],
    )


@st.composite
def wmma_layouts(draw):
    common = {
        "version": draw(st.sampled_from([1, 2])),
        "transposed": draw(st.booleans()),
        "cga_layout": draw(cga_layouts(2)),
    }
    if OLD:
        tiles = draw(spread(draw(st.integers(0, 2)), 2))
        return AMDWMMALayout(warps_per_cta=draw(spread(2, 2)), tiles_per_warp=tiles, **common)
    reach, bases = [1, 1], []
    for axis in draw(st.lists(st.integers(0, 1), min_size=2, max_size=3)):
        bases.append([reach[axis] * (axis == other) for other in range(2)])
        reach[axis] *= 2
    return AMDWMMALayout(warp_bases=bases[-2:], reg_bases=bases[:-2], **common)


@st.composite
def views(draw, parents, operand=None, k_width=(0, 4)):
    """An accumulator, a slice of it, or one of its operands; with a shape."""
    layout = draw(parents)
    kind = draw(st.sampled_from(["itself", "operand", "slice"]))
    if kind == "operand":
        layout = gluon.DotOperandLayout(
            draw(st.integers(0, 1)) if operand is None else operand, layout, draw(powers(*k_width)) if k_width else 0
        )
    if kind == "slice" and layout.rank > 1:
        layout = gluon.SliceLayout(draw(st.integers(0, layout.rank - 1)), layout)
    return layout, draw(st.one_of(shapes(layout.rank), shapes(layout.rank, 5, 9)))


@st.composite
def distributed_linear(draw):
    """Any order of single steps, and repeats, over registers, lanes and warps."""
    shape = draw(shapes(draw(st.integers(1, 3)), 0, 4))
    steps = [
        [(1 << bit) * (axis == other) for other in range(len(shape))]
        for axis, size in enumerate(shape)
        for bit in range(size.bit_length() - 1)
    ]
    steps = draw(st.permutations(steps + [[0] * len(shape)] * 7))
    return gluon.DistributedLinearLayout(list(steps[7:]), list(steps[:5]), list(steps[5:7]), [], shape)


@oracle
@given(st.integers(1, 3).flatmap(lambda rank: st.tuples(blocked_layouts(rank), shapes(rank))))
def test_blocked(case):
    check(ask_layout("sm_90", *case), *case)


@oracle
@given(views(st.integers(2, 3).flatmap(blocked_layouts), k_width=None))
def test_blocked_operands_and_slices(case):
    check(ask_layout("sm_90", *case), *case)


@oracle
@given(views(mma_layouts(), k_width=(0, 3)))
def test_mma(case):
    check(ask_layout("sm_90", *case), *case)


@oracle
@given(views(mfma_layouts()), st.sampled_from(["gfx942", "gfx950"]))
def test_mfma(case, target):
    check(ask_layout(target, *case), *case)


@oracle
@given(views(wmma_layouts(), k_width=(3, 4)))
def test_wmma(case):
    accumulator = case[0]
    while hasattr(accumulator, "parent"):
        accumulator = accumulator.parent
    check(ask_layout({1: "gfx1100", 2: "gfx1200"}[accumulator.version], *case), *case)


@oracle
@given(distributed_linear(), st.data())
def test_distributed_linear(layout, data):
    shape = data.draw(shapes(layout.rank, 0, 6))
    check(ask_layout("sm_90", layout, shape), layout, shape)


@st.composite
def swizzled(draw, rank, cga=True):
    sizes = (draw(powers(0, 4)), draw(powers(0, 3)), draw(powers(0, 4)))
    return gluon.SwizzledSharedLayout(
        *sizes, draw(st.permutations(range(rank))), draw(cga_layouts(rank)) if cga else []
    )


@st.composite
def nvmma(draw, rank, cga=True, bits=None):
    return gluon.NVMMASharedLayout(
        draw(st.sampled_from([0, 32, 64, 128])) if rank > 1 else 0,
        bits or draw(st.sampled_from([8, 16, 32])),
        rank,
        draw(st.booleans()),
        cga_layout=draw(cga_layouts(rank)) if cga else [],
    )


@oracle
@pytest.mark.skipif(OLD, reason="Triton 3.6.0 aborts on shared layouts")
@given(
    st.integers(1, 3).flatmap(
        lambda rank: st.tuples(
            st.one_of(swizzled(rank), nvmma(rank)), st.one_of(shapes(rank, 2, 7), shapes(rank, 3, 11 - rank))
        )
    )
)
def test_shared(case):
    check(ask_layout("sm_90", *case), *case)


@oracle
@given(
    st.integers(1, 2).flatmap(
        lambda rank: st.tuples(st.one_of(swizzled(rank, cga=False), nvmma(rank, cga=False)), shapes(rank, 3, 9))
    )
)
def test_shared_by_a_reshape(case):
    """In every version; transposed NVMMA layouts have no answer in some."""
    layout, shape = case
    check(ask_reshaped(layout, shape, getattr(layout, "element_bitwidth", 16)), layout, shape)


@st.composite
def transfers(draw, registers):
    """A register layout, a shared layout and a shape that both fit, and the bits of an element."""
    layout, bits = draw(registers), draw(st.sampled_from([8, 16, 32]))
    shape = draw(shapes(layout.rank, 4, 8 if layout.rank < 3 else 6))
    shared = st.one_of(swizzled(layout.rank, cga=False), nvmma(layout.rank, cga=False, bits=bits))
    return layout, draw(shared), shape, bits


def check_conflicts(target, layout, shared, shape, bits):
    def question():
        context, module, made = builder(TARGETS[target], 1)
        found = made.get_shared_bank_conflicts(layout._to_ir(made), shared._to_ir(made), list(shape), bits)
        del context, module
        return found

    try:
        smem = from_gluon(shared).to_linear_layout(shape, triton_version=VERSION)
    except ValueError:
        return
    expected = in_child(question)
    if expected is not None:
        registers = from_gluon(layout).to_linear_layout(shape, triton_version=VERSION)
        assert bank_conflicts(registers, smem, shape, bits) == expected, f"{layout}, {shared}, {shape}, {bits}"


@oracle
@given(
    transfers(st.one_of(st.integers(1, 3).flatmap(lambda rank: blocked_layouts(rank, cga=False)), mma_layouts(False)))
)
def test_bank_conflicts(case):
    check_conflicts("sm_90", *case)


@oracle
@pytest.mark.skipif(not OLD, reason="since 3.7.0 the query aborts for AMD")
@given(transfers(st.one_of(blocked_layouts(2, lanes=64, cga=False), mfma_layouts(False))))
def test_bank_conflicts_of_amd(case):
    check_conflicts("gfx942", *case)


def printed(target, layout, shape, bits):
    """What the compiler prints of a layout, in the type of a tensor or of shared memory."""

    def question():
        context, module, made = builder(TARGETS[target], 1 << len(cga_of(layout)))
        element = {8: made.get_int8_ty, 16: made.get_int16_ty, 32: made.get_int32_ty}[bits]()
        if "Shared" in type(layout).__name__:
            kind = made.get_shared_mem_desc_ty(element, list(shape), layout._to_ir(made), list(shape))
        else:
            kind = made.get_distributed_ty(element, list(shape), layout._to_ir(made))
        text = str(kind)
        del context, module
        encoding = text[text.index("#ttg.") :]
        return encoding.split(", #ttg.shared_memory")[0] if "Shared" in type(layout).__name__ else encoding[:-1]

    return in_child(question)


@st.composite
def padded(draw):
    shape = draw(shapes(2, 2, 6))
    pairs = draw(st.dictionaries(powers(2, 6), powers(0, 4), min_size=1, max_size=2))
    order = draw(st.permutations(range(2)))
    return gluon.PaddedSharedLayout.with_identity_for([list(pair) for pair in pairs.items()], shape, order), shape


@st.composite
def linear_shared(draw):
    shape = draw(shapes(2, 2, 5))
    steps = [[(1 << bit) * (axis == other) for other in range(2)]
             for axis in range(2) for bit in range(shape[axis].bit_length() - 1)]
    return gluon.SharedLinearLayout(draw(st.permutations(steps)), [], draw(powers(4, 7))), shape


PRINTED = st.one_of(
    st.tuples(st.just("sm_90"), views(st.integers(2, 3).flatmap(blocked_layouts), k_width=None)),
    st.tuples(st.just("sm_90"), views(mma_layouts(), k_width=(1, 3))),
    st.tuples(st.just("gfx950"), views(mfma_layouts(), k_width=(2, 4))),
    st.tuples(st.just("sm_90"), distributed_linear().map(lambda layout: (layout, layout.shape))),
    st.tuples(st.just("sm_90"), st.integers(1, 3).flatmap(lambda rank: st.tuples(swizzled(rank), shapes(rank, 2, 7)))),
    st.tuples(st.just("sm_90"), st.tuples(nvmma(2), shapes(2, 7, 9))),
    st.tuples(st.just("sm_90"), padded()),
    st.tuples(st.just("sm_90"), linear_shared()),
)


@settings(oracle, max_examples=150)
@given(PRINTED)
def test_what_the_compiler_prints_is_read_back(case):
    """The same bases and the same offsets as of the Gluon layout that was printed."""
    target, (layout, shape) = case
    text = printed(target, layout, shape, getattr(layout, "element_bitwidth", None) or 16)
    if text is None:
        return
    read, given = from_ttgir(text), from_gluon(layout)
    assert read.to_linear_layout(shape, triton_version=VERSION) == given.to_linear_layout(shape, triton_version=VERSION)
    if hasattr(given, "offsets") and not cga_of(layout):
        assert np.array_equal(read.offsets(shape), given.offsets(shape))


def binding(layout):
    """Triton's own object of a linear layout."""
    from triton._C.libtriton import linear_layout

    outs = layout.out_dims
    return linear_layout.LinearLayout.from_bases(list(layout.bases.items()), list(outs), list(outs.values()), False)


def read_back(found):
    return [dict(found.bases), [list(pair) for pair in found.out_dims]]


def test_products_and_ways_are_those_of_triton_s_linear_layouts():
    """Its bindings: dimensions in other orders, broadcasts that both sides have, tiles of larger buffers."""
    random = np.random.default_rng(7)

    def shuffled(bits, names, outs):
        columns = [1 << int(bit) for bit in random.permutation(bits)]
        for _ in range(4):
            i, j = random.integers(0, bits, 2)
            columns[i] ^= columns[j] if i != j else 0
        cuts = np.sort(random.integers(0, bits + 1, len(names) - 1)).tolist()
        parts = [columns[a:b] for a, b in zip([0, *cuts], [*cuts, bits], strict=True)]
        flat = LinearLayout({name: [[x] for x in part] for name, part in zip(names, parts, strict=True)}, (1 << bits,))
        return flat.reshape(outs)

    cases = []
    for turn in range(24):
        small = shuffled(5, ("register", "lane", "warp"), {"dim0": 4, "dim1": 8})
        large = shuffled(7, ("offset", "block"), {"dim1": 16, "dim0": 8})
        none = LinearLayout({"warp": [[0, 0]] * (turn % 3)}, small.out_dims)
        same = small.sublayout(["register", "lane"], ["dim0", "dim1"]).concat_ins(none)
        whole = same.concat_ins(shuffled(5, ("x",), {"dim0": 4, "dim1": 8})).transpose("dim1", "dim0")
        ours = same.concat_ins(LinearLayout({"x": [[1, 2], [0, 5]]}, small.out_dims))
        cases.append(("invert_and_compose", small, large))
        if not VERSION.startswith(("3.6.", "3.7.", "3.8.")):
            cases.append(("invert_and_compose", ours, whole))
        cases.append(("__mul__", small.sublayout(["lane"], ["dim1"]), small))
        cases.append(("__mul__", small, LinearLayout({"block": [[1, 0]]}, {"dim0": 2, "dim2": 4})))
    asked = in_child(lambda: [read_back(getattr(binding(a), how)(binding(b))) for how, a, b in cases])
    assert asked, "Triton answered nothing"
    for (how, a, b), (bases, outs) in zip(cases, asked, strict=True):
        ours = a.product(b) if how == "__mul__" else a.invert_and_compose(b, keep_equal=True)
        assert (ours.bases, [list(pair) for pair in ours.out_dims.items()]) == (bases, outs), (how, a, b)
        assert list(ours.bases) == list(bases)


@pytest.mark.skipif(OLD, reason="Triton 3.6 has no linear layouts of tensor memory")
def test_tensor_memory():
    """Rows and columns by the compiler, of all forms of the block, and of the scales."""
    from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, TensorMemoryScalesLayout

    pair, wide = [[1, 0]], [[0, 1]]
    cases = [(TensorMemoryLayout(*made), shape) for made, shape in (
        (((64, 64), 1), (64, 64)), (((64, 64), 1), (128, 64)), (((64, 64), 1), (64, 256)), (((64, 32), 2), (256, 256)),
        (((128, 64), 2), (128, 64)), (((128, 128), 1), (256, 512)), (((128, 128), 1), (128, 32)),
        (((64, 64), 4), (64, 64)),
    )]  # fmt: skip
    scales = ((64, 4), (32, 4), (128, 16), (256, 8), (16, 2), (64, 1))
    cases += [(TensorMemoryScalesLayout(), shape) for shape in scales]
    if hasattr(TensorMemoryScalesLayout(), "cga_layout"):
        cases += [(TensorMemoryLayout((64, 64), 1, pair, two_ctas=True), (128, 128)),
                  (TensorMemoryLayout((128, 64), 1, pair, two_ctas=True), (256, 64)),
                  (TensorMemoryLayout((128, 64), 1, wide), (128, 128)),
                  (TensorMemoryLayout((128, 64), 1, fp4_padded=True), (128, 64)),
                  (TensorMemoryScalesLayout(pair), (128, 8)), (TensorMemoryScalesLayout(wide), (128, 8))]  # fmt: skip

    def question(layout, shape):
        context, module, made = builder(GPUTarget("cuda", 100, 32), 1 << len(getattr(layout, "cga_layout", [])))
        linear = made.to_linear_layout(layout._to_ir(made), list(shape))
        del context, module
        return [linear.rows, linear.cols]

    for layout, shape in cases:
        told = in_child(lambda layout=layout, shape=shape: question(layout, shape))
        ours = from_gluon(layout).to_linear_layout(shape)
        assert told, (layout, shape)
        assert [ours.bases["row"], ours.bases["col"]] == told, (layout, shape)
        assert ours.is_surjective


def test_scales_of_sm120():
    """The layouts to which the compiler brings the scales of a block-scaled product, four warps as 2 x 2."""
    from triton import language as tl

    @triton.jit
    def scaled(a, b, a_scale, b_scale, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
        m, n, k, s = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K), tl.arange(0, K // 32)
        x, y = tl.load(a + m[:, None] * K + k), tl.load(b + k[:, None] * N + n)
        p, q = tl.load(a_scale + m[:, None] * (K // 32) + s), tl.load(b_scale + n[:, None] * (K // 32) + s)
        tl.store(c + m[:, None] * N + n, tl.dot_scaled(x, p, "e4m3", y, q, "e4m3"))

    names = dict.fromkeys(("a", "b"), "*fp8e4nv") | dict.fromkeys(("a_scale", "b_scale"), "*u8") | {"c": "*fp32"}
    sizes = {"M": 128, "N": 64, "K": 128}
    source = triton.compiler.ASTSource(scaled, names | dict.fromkeys(sizes, "constexpr"), sizes)
    text = triton.compile(source, target=GPUTarget("cuda", 120, 32), options={"num_warps": 4}).asm["ttgir"]
    found = ttgir_aliases(text)
    (mma,) = [encoding for encoding in found.values() if hasattr(encoding, "instr_shape")]
    linear = [one.to_linear_layout(one.shape) for one in found.values() if hasattr(one, "reg_bases")]
    for index, shape in ((0, (128, 4)), (1, (64, 4))):
        assert sm120_scales_layout(index, shape, mma.warps_per_cta) in linear
