"""Agreement, conversion and identification of formats. Rests on brute force: every element's place, enumerated."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
from any_formats import any_format
from hypothesis import given, settings

from kvlab.formats import CATALOGUE, Format, agree, convert, identify, known_format, markers
from kvlab.formats.field import AXES

SMALL = {"layers": 2, "pages": 2, "page_size": 16, "heads": 2, "dim": 64}
FORMATS = [known_format(name, **{**SMALL, "page_size": 32 if name == "kivi.int4" else 16}) for name in CATALOGUE]


@cache
def places(one: Format) -> dict[str, Any]:
    """All addresses of each field, [copies, layer, page, slot, head, dim], with its element type."""
    out = {}
    for field in one.fields:
        extent = [one.field(field.part).extent(axis) for axis in AXES]
        index = np.meshgrid(*map(np.arange, extent), indexing="ij", sparse=True)
        at = field.address(**dict(zip(AXES, index, strict=True)))
        copies = field.table("copy").reshape(-1, 1, 1, 1, 1, 1)
        out[field.name] = (field.stored, np.broadcast_to(at, extent) + copies)
    return out


def first_difference(writer: Format, reader: Format) -> Any:
    """None, or the least (layer, page, slot, head, dim, copy) of any field with two places, or "shape"."""
    ours, theirs = places(writer), places(reader)
    if ours.keys() != theirs.keys():
        return "shape"
    found = []
    for name, (stored, at) in ours.items():
        other, there = theirs[name]
        if stored != other or at.shape != there.shape:
            return "shape"
        apart = np.argwhere((at != there).transpose(1, 2, 3, 4, 5, 0))
        if apart.size:
            found.append(tuple(apart[0].tolist()))
    return min(found, default=None)


def test_all_pairs_of_known_formats_as_brute_force_says() -> None:
    alike = set()
    for a, b in itertools.product(FORMATS, FORMATS):
        answer, truth = agree(a, b), first_difference(a, b)
        assert bool(answer) == (truth is None), (a.name, b.name, answer)
        if answer.kind == "place":
            assert tuple(answer.index.get(axis, 0) for axis in AXES) == truth[:-1], (a.name, b.name)
            assert answer.writer_at == places(a)[answer.name][1][truth[-1:] + truth[:-1]]
        alike |= {(a.name, b.name)} if answer and a.name < b.name else set()
    assert alike == {
        ("flashinfer.hnd", "vllm.hnd"), ("flashinfer.nhd", "vllm.blocks_first"),
        ("flash_attention.paged", "sglang.mha"), ("flash_attention.paged", "vllm.kv_first"),
        ("sglang.mha", "vllm.kv_first"), ("max.continuous", "max.paged"), ("lmcache.kv_2ltd", "max.paged"),
        ("lmcache.kv_2ltd", "max.continuous"),
    }


EQUAL = [
    ("page:4 kv:2 slot:16 head:8 dim:64 kv.bf16", "page:4 kv:2 slot/4:4 slot:4 head:8 dim/8:8 dim:8 kv.bf16"),
    ("slot:8 (dim:128 k.e4m3, k_scale.f32)", "slot:8 (dim:128 k.e4m3, dim/128:1 k_scale.f32)"),
    ("slot:8 dim:8 k.s4", "slot:8 dim/2:4 dim:2 k.s4"),
    ("page:4 (slot:4 (dim:8 k.s8, pad:8))", "page:4 (slot:4@16 dim:8 k.s8)%64"),
    ("page:4 (slot:4 dim:8 k.s8)%64", "page:4 (slot:4 dim:8 k.s8, pad:32)"),
    ("page:4 head:1 slot:4 dim:8 k.s8", "page:4 slot:4 dim:8 k.s8"),
    ("kv:2 slot:4 dim:8 kv.s8", "(slot:4 dim:8 k.s8, slot:4 dim:8 v.s8)"),
    ("-slot:1 dim:4 k.s8", "slot:1 dim:4 k.s8"),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_one_format_in_two_writings_agrees(one: str, other: str) -> None:
    a, b = Format.parse(one), Format.parse(other)
    assert agree(a, b)
    assert agree(b, a)
    assert not convert(a, b).moved


def planted() -> dict[str, tuple[str, str, str]]:
    """What differs -> (writer, reader, kind of the answer): 40 and more formats beside one that differs."""
    row = "layer:2 page:2 slot:16 (dim:512 latent.e4m3, dim/128:4 latent_scale.f32, dim:64 rope.bf16)"
    v4 = ("page:2 (slot:16 (dim:448 latent.e4m3, dim:64 rope.bf16), slot:16 (dim/64:7 latent_scale.e8m0, pad:1))%576")
    fp4 = "page:2 head:2 (slot:16 dim:64 v.e2m1, slot/4:4 dim/16:4 slot:4 v_scale.e4m3)"
    nhd = "layer:2 page:4 kv:2 slot:16 head:4 dim:64 kv.bf16"
    q4 = "slot:8 dim/32:4 (k_scale.f16, dim:16 dim/16:2 k.b4)"
    split = "(page:2 head:2 dim/8:8 slot:16 dim:8 k.bf16, page:2 head:2 dim:64 slot:16 v.bf16)"
    asym = "page:2 head:2 slot:16 (dim:64 k.u4, k_scale.f16, k_min.f16)"
    order = [" ".join(axes) + " dim:64 kv.bf16" for axes in itertools.permutations(
        ("layer:2", "page:4", "kv:2", "slot:16", "head:4"))]
    out = {f"order of axes {number}": (nhd, other, "place") for number, other in enumerate(order[1:16], 1)}
    out |= {
        "a head stored twice by the reader":
            (nhd, nhd.replace("head:4", "head:2 copy:2"), "extent"),
        "a head stored twice by the writer":
            (nhd.replace("head:4", "head:4 copy:2"), nhd, "copies"),
        "the copies of a head apart, and side by side":
            (nhd.replace("head:4", "copy:2 head:4"), nhd.replace("head:4", "head:4 copy:2"), "place"),
        "V before K":
            (nhd, nhd.replace("kv:2 ", "-kv:2 "), "field"),
        "a page offset of 256 bytes":
            (nhd, f"(pad:256, {nhd})", "place"),
        "a page fewer, and padding for it":
            (nhd, f"({nhd.replace('page:4', 'page:3')}, pad:65536)", "extent"),
        "pages further apart":
            (nhd, nhd.replace("page:4 kv", "page:4@33024 kv"), "place"),
        "pages counted down":
            (nhd, nhd.replace("page:4", "-page:4"), "place"),
        "each half of a head counted down":
            (nhd, nhd.replace("dim:64", "dim/32:2 -dim:32"), "place"),
        "dims of a head interleaved":
            (nhd, nhd.replace("dim:64", "dim:32 dim/32:2"), "place"),
        "f16 for bf16":
            (nhd, nhd.replace("bf16", "f16"), "type"),
        "16 bytes between scales and rope":
            (row, row.replace("latent_scale.f32, dim:64", "latent_scale.f32, pad:16, dim:64"), "place"),
        "scales behind rope":
            (row, row.replace("dim/128:4 latent_scale.f32, dim:64 rope.bf16",
                              "dim:64 rope.bf16, dim/128:4 latent_scale.f32"), "place"),
        "the order of the scales of a row":
            (row, row.replace("dim/128:4", "dim/128:2 dim/256:2"), "place"),
        "scales of 64 for 128":
            (row, row.replace("dim/128:4", "dim/64:8"), "group"),
        "scales in bf16":
            (row, row.replace("dim/128:4 latent_scale.f32", "dim/128:4 latent_scale.bf16"), "type"),
        "rows aligned to 1024 bytes":
            (row, row.replace("dim:64 rope.bf16)", "dim:64 rope.bf16)%1024"), "place"),
        "a page that is not aligned":
            (v4, v4.replace("%576", ""), "place"),
        "a page aligned to 640 for 576":
            (v4, v4.replace("%576", "%640"), "place"),
        "the padding before the scales":
            (v4, v4.replace("(dim/64:7 latent_scale.e8m0, pad:1)", "(pad:1, dim/64:7 latent_scale.e8m0)"), "place"),
        "scales in the rows, not behind them":
            (v4, "page:2 (slot:16 (dim:448 latent.e4m3, dim:64 rope.bf16, dim/64:7 latent_scale.e8m0, pad:1))%576",
            "place"),
        "scales of all slots by dim":
            (v4, v4.replace("slot:16 (dim/64:7 latent_scale.e8m0, pad:1)",
                            "dim/64:7 slot:16 latent_scale.e8m0, pad:16"), "place"),
        "V's scales linear, not 4x4":
            (fp4, fp4.replace("slot/4:4 dim/16:4 slot:4", "slot:16 dim/16:4"), "place"),
        "V's scales by slot, then dim":
            (fp4, fp4.replace("slot/4:4 dim/16:4 slot:4", "slot/4:4 slot:4 dim/16:4"), "place"),
        "V's scales of 8 slots side by side":
            (fp4, fp4.replace("slot/4:4 dim/16:4 slot:4", "slot/8:2 dim/16:4 slot:8"), "place"),
        "the other half of a byte first":
            (fp4, fp4.replace("dim:64 v.e2m1", "dim/2:32 -dim:2 v.e2m1"), "place"),
        "halves of a block side by side, not 16 apart":
            (q4, q4.replace("dim:16 dim/16:2", "dim:32"), "place"),
        "the halves of a byte exchanged":
            (q4, q4.replace("dim:16 dim/16:2", "dim:16 -dim/16:2"), "place"),
        "the scale behind the block":
            (q4, q4.replace("k_scale.f16, dim:16 dim/16:2 k.b4", "dim:16 dim/16:2 k.b4, k_scale.f16"), "place"),
        "4-bit numbers without an offset":
            (q4, q4.replace("b4", "s4"), "type"),
        "pieces of 8 bytes, not of 16":
            (split, split.replace("dim/8:8 slot:16 dim:8", "dim/4:16 slot:16 dim:4"), "place"),
        "keys in rows, not in pieces":
            (split, split.replace("dim/8:8 slot:16 dim:8", "slot:16 dim:64"), "place"),
        "V in rows, not transposed":
            (split, split.replace("dim:64 slot:16 v", "slot:16 dim:64 v"), "place"),
        "minimum before scale":
            (asym, asym.replace("k_scale.f16, k_min.f16", "k_min.f16, k_scale.f16"), "place"),
        "padding for a minimum":
            (asym, asym.replace("k_scale.f16, k_min.f16", "k_scale.f16, pad:2"), "field"),
        "4 bytes before the values":
            (asym, asym.replace("(dim:64", "(pad:4, dim:64"), "place"),
    }
    return {name: one for name, one in out.items() if one[0] != one[1]}


def test_planted_differences_are_found() -> None:
    assert len(planted()) >= 40
    for what, (one, other, kind) in planted().items():
        writer, reader = Format.parse(one), Format.parse(other)
        answer, truth = agree(writer, reader), first_difference(writer, reader)
        assert truth is not None, what
        swapped = kind == "field" and "-kv" in reader.print()  # V, then K: the same fields at other places
        assert answer.kind == ("place" if swapped else kind), (what, answer)
        assert answer.name in answer.words
        if answer.kind == "place":
            assert tuple(answer.index.get(axis, 0) for axis in AXES) == truth[:-1]
            ends = [places(one)[answer.name][1][truth[-1:] + truth[:-1]] for one in (writer, reader)]
            assert ends == [answer.writer_at, answer.reader_at]  # of the field that is named
            assert ends[0] != ends[1]


def test_what_cannot_be_equal_is_said_in_words() -> None:
    row = Format.parse("slot:4 (dim:512 latent.e4m3, dim/128:4 latent_scale.f32, dim:64 rope.bf16)")
    other = Format.parse("slot:4 (dim:512 latent.e4m3, dim/64:8 latent_scale.f32, dim:64 rope.bf16)")
    assert agree(row, other).words == "latent_scale: one for 128 along dim to the writer, one for 64 to the reader"
    halves = Format.parse("slot:4 dim/2:4 -dim:2 k.s4"), Format.parse("slot:4 dim:8 k.s4")
    words = "k of slot 0, dim 0: written to the high half of byte 0, read from the low half of byte 0"
    assert agree(*halves).words == words


CONVERTED = [
    ("vllm.LBNHC", "vllm.x_split"), ("max.paged", "trtllm.pool"), ("aiter.shuffle", "vllm.BHLNC"),
    ("flashinfer.hnd", "flash_attention.paged"), ("llama_cpp.cells", "llama_cpp.transposed_v"),
]


@pytest.mark.parametrize(("one", "other"), CONVERTED)
def test_converted_bytes_are_those_of_the_other_encoder(one: str, other: str) -> None:
    a, b = known_format(one, **SMALL), known_format(other, **SMALL)
    k, v = markers(a.shape("k")), markers(a.shape("v"), 1)
    there, back = convert(a, b), convert(b, a)
    stored = a.encode(k, v)
    assert np.array_equal(there.apply(stored), b.encode(k, v))
    assert np.array_equal(back.apply(b.encode(k, v)), stored)
    assert there.copies.nbytes == a.nbytes


@pytest.mark.parametrize("name", ["vllm.x_split", "mla.584", "flashinfer.nvfp4", "vllm.nvfp4", "lmdeploy.int4"])
@pytest.mark.parametrize(("here", "there"), [((6, 32), (4, 48)), ((4, 16), (1, 64))])
def test_pages_of_another_size_hold_the_same_tokens(name: str, here: Any, there: Any) -> None:
    """Rests on the encoder of the other page size, given the same tokens in their order."""
    a, b = (known_format(name, heads=2, dim=64, pages=pages, page_size=size) for pages, size in (here, there))
    codes = {field.name: markers(field.shape, number).astype(np.uint8) & 15 for number, field in enumerate(a.fields)}
    tokens = {}
    for field in b.fields:
        axes = list(field.axes)
        at = axes.index("page")
        old = np.moveaxis(codes[field.name], axes.index("slot"), at + 1)  # pages and slots side by side: tokens
        new = old.reshape(*old.shape[:at], there[0], there[1], *old.shape[at + 2 :])
        tokens[field.name] = np.moveaxis(new, at + 1, axes.index("slot"))
    assert np.array_equal(convert(a, b).apply(a.pack(codes)), b.pack(tokens))
    assert np.array_equal(convert(b, a).apply(b.pack(tokens)), a.pack(codes))


def test_half_bytes_and_copies_are_converted() -> None:
    a = Format.parse("slot:4 (dim:16 dim/16:2 k.b4, k_scale.f16)")
    b = Format.parse("(copy:2 slot:4 (dim/2:16 -dim:2 k.b4, pad:1), slot:4 k_scale.f16)")
    x = markers((4, 32))
    plan = convert(a, b)
    assert not plan.copies.whole
    assert np.array_equal(plan.apply(a.encode(x), fill=0), b.encode(x))
    assert plan.copies.nbytes == 2 * 4 * 16 + 4 * 2


def test_pages_are_converted_in_place_one_by_one() -> None:
    a, b = known_format("vllm.blocks_first", **SMALL), known_format("vllm.hnd", **SMALL)
    k, v = markers(a.shape("k")), markers(a.shape("v"), 1)
    buffer, plan = a.encode(k, v), convert(a, b)
    assert plan.scratch <= a.nbytes // (2 * 2 * 2)  # K, or V, of a page of a layer
    plan.apply_in_place(buffer)
    assert np.array_equal(buffer, b.encode(k, v))
    whole = convert(known_format("max.paged", **SMALL), known_format("vllm.kv_first", **SMALL))
    before = buffer.copy()
    with pytest.raises(ValueError, match=r"change places with each other: must be converted by apply"):
        whole.apply_in_place(buffer)
    assert np.array_equal(buffer, before)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ("slot:4 (dim:8 k.s8, k_scale.f32)", "slot:4 dim:8 k.s8", "target has no field k_scale: .* its bytes are lost"),
        ("slot:4 dim:8 k.s8", "slot:4 (dim:8 k.s8, k_scale.f32)", "source has no field k_scale: .* come from nowhere"),
        ("slot:4 dim:8 k.bf16", "slot:4 dim:8 k.e4m3", "k is e4m3 in target: must be bf16"),
        ("slot:4 dim:8 k.bf16", "slot:2 dim:8 k.bf16", "slot of k is 2 in target: must be 4"),
        ("page:2 slot:4 dim:8 k.bf16", "page:3 slot:2 dim:8 k.bf16", "page of k is 3 in target: must be 2"),
        ("page:2 (slot:4 dim:8 k.s8, k_scale.f32)", "page:4 (slot:2 dim:8 k.s8, k_scale.f32)",
         "k_scale is one for 2 along slot in target: must be one for 4, as in source"),
        ("page:2 slot/2:2 (slot:2 dim:8 k.s8, k_scale.f32)", "(page:4 slot:2 dim:8 k.s8, k_scale.f32)",
         "k_scale is one for all pages in target: must be one for each page"),
        ("slot:4 (dim:8 k.s8, dim/4:2 k_scale.f32)", "slot:4 (dim:8 k.s8, k_scale.f32)",
         "k_scale is one for 8 along dim in target: must be one for 4"),
    ],
)
def test_a_conversion_that_loses_bytes_is_refused(one: str, other: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert(Format.parse(one), Format.parse(other))


def test_bad_buffers_are_refused_before_anything_is_written() -> None:
    plan = convert(known_format("vllm.blocks_first", **SMALL), known_format("vllm.hnd", **SMALL))
    x = np.arange(plan.source.nbytes).astype(np.uint8)
    before, read_only = x.copy(), np.zeros(x.size, np.uint8)
    read_only.flags.writeable = False
    cases: list[tuple[dict[str, Any], str]] = [
        ({"out": x}, "out shares memory with buffer: must be apart"), ({"fill": 256}, "fill is 256: must be a byte"),
        ({"out": x[:9].copy()}, r"out has shape \(9,\) and dtype uint8: must be contiguous uint8 \[32768\]"),
        ({"out": np.zeros(x.size, np.int8)}, "dtype int8: must be contiguous uint8"),
        ({"out": np.zeros(2 * x.size, np.uint8)[::2]}, "out has shape .* and dtype uint8: must be contiguous uint8"),
        ({"out": read_only}, "out is read-only: must be writeable"),
        ({"out": bytearray(x.size)}, "out is a bytearray: must be contiguous"),
    ]
    for how, words in cases:
        with pytest.raises(ValueError, match=words):
            plan.apply(x, **how)
    owned = bytearray(x)
    with pytest.raises(ValueError, match="out shares memory with buffer: must be apart"):
        plan.apply(owned, out=np.frombuffer(owned, np.uint8))
    assert owned == bytearray(before)
    with pytest.raises(ValueError, match=r"target is 'page:2 k\.bf16': must be a Format"):
        convert(plan.source, "page:2 k.bf16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reader is None: must be a Format"):
        agree(plan.source, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"buffer has 7 bytes: must be {x.size}"):
        plan.apply(x[:7], out=np.zeros(x.size, np.uint8))
    for bad in (x[:-1], x.astype(np.int16), list(x)):
        with pytest.raises(ValueError, match=r"buffer (has shape|is a list).*: must be contiguous uint8"):
            plan.apply_in_place(bad)
    assert np.array_equal(x, before)
    assert not read_only.any()


def test_tensors_are_converted_into_tensors() -> None:
    """The same bytes as NumPy's, in new memory, in that which is given, and in place; padding stays in the second."""
    torch = pytest.importorskip("torch")
    a = known_format("mla.584", **SMALL)
    plan = convert(a, known_format("mla.584", **{**SMALL, "pages": 4, "page_size": 8}))
    x = np.random.default_rng(0).integers(0, 256, a.nbytes, dtype=np.uint8)
    new = plan.apply(torch.from_numpy(x), fill=7)
    assert np.array_equal(new.numpy(), plan.apply(x, fill=7))
    out = torch.full((plan.target.nbytes,), 3, dtype=torch.uint8)
    assert plan.apply(torch.from_numpy(x).view(torch.int16), out=out) is out
    assert np.array_equal(out.numpy(), plan.apply(x, fill=3))
    with pytest.raises(ValueError, match="out is in another place than buffer: must be of one library and device"):
        plan.apply(x, out=out)
    turn = convert(known_format("vllm.blocks_first", **SMALL), known_format("vllm.hnd", **SMALL))
    held = torch.from_numpy(np.resize(x, turn.source.nbytes))
    exact = turn.apply(held.numpy())
    turn.apply_in_place(held)
    assert np.array_equal(held.numpy(), exact)


def test_every_known_format_is_identified_by_its_markers() -> None:
    """The store is the encoder; formats that agree are one group, and no other format reads the markers."""
    for one in FORMATS:
        stored = one.encode(*(markers(part.shape, number) for number, part in enumerate(one.parts)))
        found = identify(stored, candidates=FORMATS)
        assert not found.ambiguous, found
        assert one.name in [match.name for match in found.matches[0]]
        assert set(found.refused) == {f.name for f in FORMATS} - {match.name for match in found.matches[0]}


def test_a_store_of_one_token_has_several_names() -> None:
    sizes = {"layers": 1, "pages": 2, "page_size": 1, "heads": 2, "dim": 8}
    stored = known_format("vllm.LBNHC", **sizes)
    found = identify(stored.encode(markers(stored.shape("k")), markers(stored.shape("v"), 1)), **sizes)
    names = [[match.name for match in group] for group in found.matches]
    assert names == [["vllm.LBHNC", "vllm.LBNHC", "vllm.BLHNC", "vllm.BLNHC", "vllm.BHLNC"]]  # one token has no order
    assert "has" in found.refused["llama_cpp.cells"] or "reads" in found.refused["llama_cpp.cells"]


@settings(max_examples=40, deadline=None)
@given(any_format(), any_format())
def test_any_two_formats_agree_as_brute_force_says_and_convert_into_each_other(a: Format, b: Format) -> None:
    answer, truth = agree(a, b), first_difference(a, b)
    assert bool(answer) == (truth is None)
    x = np.arange(128).reshape(2, 2, 4, 2, 4) % 15 - 7
    k, v = x.astype(np.float32), -np.flip(x, 2).astype(np.float32)
    for one in (a, b):
        assert Format.parse(one.print()) == one
        back = one.decode(one.encode(k, v))
        assert np.array_equal(back[0], k)
        assert np.array_equal(back[1], v)
        for field in one.fields:
            held, index = field.find(field.addresses().ravel())
            assert held.all()
            assert np.array_equal(field.address(**index), field.addresses().ravel())
    if a.fields[0].stored == b.fields[0].stored:
        if answer.kind == "place":
            assert tuple(answer.index.get(axis, 0) for axis in AXES) == truth[:-1]
        assert np.array_equal(convert(a, b).apply(a.encode(k, v)), b.encode(k, v))
