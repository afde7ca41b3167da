"""Triton's encodings. Rests on the compilers' own layout code (tests/data/triton_layouts*.json and triton_rotating.json
name the versions and how they were asked); test_triton_oracle.py asks the installed compiler for more."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from kvlab.layout import encodings
from kvlab.layout.encodings import (
    AMDRotatingSharedLayout,
    AMDWMMALayout,
    BlockedLayout,
    DotOperandLayout,
    NVMMADistributedLayout,
    NVMMASharedLayout,
    PaddedSharedLayout,
    SharedEncoding,
    SharedLinearLayout,
    SliceLayout,
    SwizzledSharedLayout,
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    from_gluon,
    sm120_scales_layout,
)

DATA = Path(__file__).parent.parent / "data"
GOLDEN = json.loads((DATA / "triton_layouts.json").read_text())
MORE = json.loads((DATA / "triton_layouts_more.json").read_text())["cases"]
ROTATING = json.loads((DATA / "triton_rotating.json").read_text())["cases"]


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array.astype("<i4")).tobytes()).hexdigest()


def encoding(case):
    return encodings.from_fields(GOLDEN["layouts"][case["layout"]])


def name(case):
    kind = GOLDEN["layouts"][case["layout"]]["class"]
    return f"{case.get('id', 'rejected')}-{kind}-{'x'.join(map(str, case['shape']))}"


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=name)
def test_equals_the_compiler(case):
    """The digest of the whole map: every register of every lane and warp, or every element's offset."""
    enc, shape = encoding(case), case["shape"]
    layout = enc.to_linear_layout(shape)
    if isinstance(enc, SharedEncoding):
        assert digest(enc.offsets(shape)) == case["sha256"]
        assert enc.alignment_bytes == case.get("alignment", enc.alignment_bytes)
        assert layout.is_invertible
    else:
        registers_lanes_warps = layout.coordinates()[:, :, :, 0]
        assert digest(registers_lanes_warps.transpose(2, 1, 0, 3)) == case["sha256"]
        assert layout.is_surjective
    if "offset_bases_3.6.0" in case:
        assert enc.to_linear_layout(shape, triton_version="3.6.0").bases["offset"] == case["offset_bases_3.6.0"]


@pytest.mark.parametrize("index", range(len(GOLDEN["rejected"])))
def test_refuses_what_the_compiler_refuses(index):
    case = GOLDEN["rejected"][index]
    with pytest.raises(ValueError, match=r"too small for the swizzle byte size .* got .*: must be at least"):
        encodings.from_fields(case["layout"]).to_linear_layout(case["shape"])


@pytest.mark.parametrize("case", ROTATING, ids=lambda c: f"{c['vec']}-{c['per_phase']}-{c['max_phase']}-{c['order']}")
def test_rotating(case):
    enc = AMDRotatingSharedLayout(case["vec"], case["per_phase"], case["max_phase"], case["order"])
    offsets = enc.offsets(case["shape"])
    assert digest(offsets) == case["sha256"]
    for row, expected in case["rows"].items():
        assert offsets[int(row)].tolist() == expected


@pytest.mark.parametrize("case", MORE, ids=lambda c: f"{c['triton']}-{c['layout']['class']}-{c['sha256'][:4]}")
def test_equals_each_version(case):
    """Several CTAs, tiles per warp, rank 3, tiny and large shapes; the version that was asked."""
    layout = encodings.from_fields(case["layout"]).to_linear_layout(case["shape"], triton_version=case["triton"])
    text = json.dumps(layout.bases, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == case["sha256"]


def grid(shape):
    return np.ix_(*map(np.arange, shape))


@pytest.mark.parametrize("shape", [(64, 64), (16, 32), (8, 128), (4, 4)])
@pytest.mark.parametrize("vec, per_phase, max_phase", [(1, 1, 1), (8, 1, 8), (4, 2, 4), (8, 4, 2), (16, 1, 16)])
@pytest.mark.parametrize("kind", [SwizzledSharedLayout, AMDRotatingSharedLayout])
def test_swizzled_closed_form(kind, vec, per_phase, max_phase, shape):
    """Law: the formula of one element, in both orders."""
    r, c = grid(shape)
    phase = r // per_phase % max_phase
    if kind is AMDRotatingSharedLayout:
        phase = phase ^ r // (per_phase * max_phase) % max_phase
    expected = r * shape[1] + (c ^ phase * vec % shape[1])
    np.testing.assert_array_equal(kind(vec, per_phase, max_phase, (1, 0)).offsets(shape), expected)
    np.testing.assert_array_equal(kind(vec, per_phase, max_phase, (0, 1)).offsets(shape[::-1]), expected.T)


@pytest.mark.parametrize("rows", [8, 64, 512])
@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("width", [32, 64, 128])
def test_nvmma_is_the_tma_image(width, bits, rows):
    """Law: panels one behind the other, in each of them byte o of a dense panel stands at o ^ ((o >> 7) % n << 4)."""
    cols = 2 * 8 * width // bits
    r, c = grid((rows, cols))
    panel = 8 * width // bits
    byte = ((c // panel * rows + r) * panel + c % panel) * bits // 8
    expected = (byte ^ (byte >> 7) % (width // 16) << 4) * 8 // bits
    np.testing.assert_array_equal(NVMMASharedLayout(width, bits).offsets((rows, cols)), expected)
    if rows <= 256:
        transposed = NVMMASharedLayout(width, bits, transposed=True).offsets((cols, rows))
        np.testing.assert_array_equal(transposed, expected.T)


def test_padding_counts_every_interval():
    enc = PaddedSharedLayout.with_identity_for([[64, 4], [16, 2]], (16, 32), (0, 1))
    linear = np.arange(512)
    expected = linear + linear // 64 * 4 + linear // 16 * 2
    np.testing.assert_array_equal(enc.offsets((16, 32)), expected.reshape(32, 16).T)
    assert enc.size == expected[-1] + 1


def test_registers_that_only_repeat():
    """The difference between versions where a thread's box is larger than the tensor."""
    blocked = BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    old = blocked.to_linear_layout((16, 8), triton_version="3.7.1").bases["register"]
    new = blocked.to_linear_layout((16, 8), triton_version="3.9.0").bases["register"]
    assert (old, new) == ([[0, 1], [0, 2], [0, 4], [0, 0]], [[0, 1], [0, 2], [0, 4]])


def test_ctas_split_the_tensor():
    blocked = BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0], cga_layout=[[0, 1], [0, 0]])
    layout = blocked.to_linear_layout((64, 64))
    assert layout.bases["block"] == [[0, 32], [0, 0]]
    assert layout.kernel() == ({"register": 0, "lane": 0, "warp": 0, "block": 2},)
    assert SliceLayout(0, blocked).to_linear_layout((64,)).bases["block"] == [[32], [0]]
    shared = SwizzledSharedLayout(8, 1, 8, [1, 0], cga_layout=[[1, 0]])
    np.testing.assert_array_equal(shared.offsets((16, 64))[8:], SwizzledSharedLayout(8, 1, 8, [1, 0]).offsets((8, 64)))


def test_from_gluon_takes_objects_by_their_fields():
    gluon = pytest.importorskip("triton.experimental.gluon.language")
    parent = gluon.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    ours = encodings.from_gluon(gluon.DotOperandLayout(0, parent, 2))
    assert ours == DotOperandLayout(0, NVMMADistributedLayout((2, 0), (4, 1), (16, 8)), 2)
    assert hash(ours) == hash(encodings.from_gluon(gluon.DotOperandLayout(0, parent, 2)))


def test_gaps_of_a_transposed_box_of_rank_3():
    """Without a swizzle 3.9.0 permutes the dimensions of the box but not their sizes; before it was row-major."""
    enc = NVMMASharedLayout(0, 16, rank=3, transposed=True)
    assert enc.to_linear_layout((2, 64, 64), triton_version="3.7.1").is_invertible
    assert len(enc.to_linear_layout((2, 64, 64), triton_version="3.9.0").kernel()) == 5


BLOCKED = BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
WGMMA = NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: BlockedLayout([1], [32], [4], [1]), "order must be a permutation"),
        (lambda: BLOCKED.to_linear_layout((64,)), r"shape is \(64,\): must be of rank 2"),
        (lambda: BLOCKED.to_linear_layout((64, 48)), "power of two"),
        (lambda: SliceLayout(2, BLOCKED), "dim must be one of the parent's"),
        (lambda: NVMMADistributedLayout([5, 0], [4, 1], [16, 8]), "version"),
        (lambda: DotOperandLayout(1, WGMMA, 2).to_linear_layout((64, 64)), "operand 1 of wgmma is read from shared"),
        (lambda: DotOperandLayout(0, SliceLayout(0, BLOCKED), 2), "parent must be an accumulator"),
        (lambda: AMDWMMALayout(2, False), "either warps_per_cta or warp_bases"),
        (lambda: AMDWMMALayout(1, False, [2, 2]).to_linear_layout((8, 64), triton_version="3.7.1"), "smaller than the"),
        (lambda: SwizzledSharedLayout(3, 1, 8, [1, 0]), "powers of two"),
        (lambda: NVMMASharedLayout(48, 16), "swizzle_byte_width must be 0, 32, 64 or 128"),
        (lambda: NVMMASharedLayout(128, 16).to_linear_layout((4, 64)), "panels of 4 rows: must be 8 or more"),
        (lambda: PaddedSharedLayout([[48, 8]], [[1]], [], [2]), "powers of two"),
        (lambda: SharedLinearLayout([[2], [4]]), "do not reach every coordinate"),
        (lambda: encodings.from_fields({"class": "Blocked"}), "BlockedLayout"),
        (lambda: encodings.from_fields({"class": "SliceLayout", "axis": 1}), "'dim', 'parent'"),
        (lambda: BLOCKED.to_linear_layout((64, 64), triton_version="new"), "text such as '3.6.0'"),
    ],
)
def test_errors_say_what_is_accepted(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("call", "message"), [
    (lambda: TensorMemoryLayout((32, 64), 1), "block must be 64 or 128 rows"),
    (lambda: TensorMemoryLayout((64, 48), 1), "block's columns: a power of two"),
    (lambda: TensorMemoryLayout((64, 64), 3), "col_stride: a power of two"),
    (lambda: TensorMemoryLayout((64, 64), 2, fp4_padded=True), "fp4_padded needs a col_stride of 1"),
    (lambda: TensorMemoryLayout((128, 64), 1).to_linear_layout((64, 64)), "must have 128 rows or more"),
    (lambda: TensorMemoryLayout((64, 64), 1, ((1, 0),), True).to_linear_layout((128, 1)), "must have 2 columns"),
    (lambda: TensorMemoryScalesLayout().to_linear_layout((64,)), "must be of rank 2"),
    (lambda: sm120_scales_layout(2, (64, 4), (2, 2)), "operand_index is 2"),
    (lambda: sm120_scales_layout(0, (64,), (2, 2)), "must be two numbers each"),
])  # fmt: skip
def test_blackwell_s_own_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_clusters_of_tensor_memory_of_older_releases_are_refused():
    """Triton before 3.9 writes cta_split_num, which has the bases of one CTA alone."""
    old = dataclasses.make_dataclass("TensorMemoryScalesLayout", ["cta_split_num"])
    assert from_gluon(old(None)) == TensorMemoryScalesLayout()
    with pytest.raises(ValueError, match="cta_split_num"):
        from_gluon(old((2, 1)))


def test_tensor_memory_is_read_from_ttgir():
    """As Triton 3.6.0, 3.7.1 and 3.9.0 print it for a block-scaled product on sm_100."""
    text = "#ttng.tensor_memory_encoding<blockM = 128, blockN = 64, colStride = 1>"
    assert encodings.from_ttgir(text) == TensorMemoryLayout((128, 64), 1)
    assert encodings.from_ttgir("#ttng.tensor_memory_scales_encoding<>") == TensorMemoryScalesLayout()
    with pytest.raises(ValueError, match="CTASplitM"):
        encodings.from_ttgir("#ttng.tensor_memory_scales_encoding<CTASplitM = 2>")
