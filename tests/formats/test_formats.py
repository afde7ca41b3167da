"""Formats: where elements lie, and values to bytes and back.

Rests on the shapes that the engines write down, made with NumPy's transposes; on the quantisation of the gguf package;
and on laws: text to format to text, bytes to codes to bytes, an element's place to the element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvlab.formats import CATALOGUE, STORED, Format, known_format

L, P, N, H, D = 2, 3, 32, 2, 64
SIZES = {"layers": L, "pages": P, "page_size": N, "heads": H, "dim": D}
Array = np.ndarray[Any, Any]


def made(name: str) -> tuple[Format, list[Array]]:
    """A format and random values for it, no two groups of one size."""
    found = known_format(name, **SIZES)
    rng = np.random.default_rng(7)
    return found, [
        (rng.standard_normal(part.shape) * rng.uniform(0.1, 4, (*part.shape[:-1], 1))).astype(np.float32)
        for part in found.parts
    ]


def bits(x: Array, dtype: Any) -> Array:
    return np.ascontiguousarray(x.astype(dtype)).view(np.uint8).reshape(-1)


def bf16(*arrays: Array) -> Array:
    return np.concatenate([bits(x, ml_dtypes.bfloat16) for x in arrays])


def both(k: Array, v: Array, axis: int) -> Array:
    return np.stack([k, v], axis)


# k and v are [L, P, N, H, D]. Each line is the shape that the engine documents.
SHAPES: dict[str, Callable[[Array, Array], Array]] = {
    "vllm.kv_first": lambda k, v: bf16(both(k, v, 1)),
    "vllm.blocks_first": lambda k, v: bf16(both(k, v, 2)),
    "vllm.hnd": lambda k, v: bf16(both(k, v, 2).transpose(0, 1, 2, 4, 3, 5)),
    "vllm.LBHNC": lambda k, v: bf16(np.concatenate([k, v], -1).transpose(0, 1, 3, 2, 4)),
    "vllm.LBNHC": lambda k, v: bf16(np.concatenate([k, v], -1)),
    "vllm.LHBNC": lambda k, v: bf16(np.concatenate([k, v], -1).transpose(0, 3, 1, 2, 4)),
    "vllm.BLHNC": lambda k, v: bf16(np.concatenate([k, v], -1).transpose(1, 0, 3, 2, 4)),
    "vllm.BLNHC": lambda k, v: bf16(np.concatenate([k, v], -1).transpose(1, 0, 2, 3, 4)),
    "vllm.BHLNC": lambda k, v: bf16(np.concatenate([k, v], -1).transpose(1, 3, 0, 2, 4)),
    "vllm.x_split": lambda k, v: np.concatenate([
        bf16(k[i].reshape(P, N, H, D // 8, 8).transpose(0, 2, 3, 1, 4), v[i].transpose(0, 2, 3, 1)) for i in range(L)
    ]),
    "aiter.shuffle": lambda k, v: np.concatenate([
        bf16(
            k[i].reshape(P, N, H, D // 8, 8).transpose(0, 2, 3, 1, 4),
            v[i].reshape(P, N // 8, 8, H, D).transpose(0, 3, 1, 4, 2),
        )
        for i in range(L)
    ]),
    "flash_attention.paged": lambda k, v: np.concatenate([bf16(k[i], v[i]) for i in range(L)]),
    "trtllm.pool": lambda k, v: bf16(both(k, v, 2).transpose(1, 0, 2, 4, 3, 5)),
    "max.paged": lambda k, v: bf16(both(k, v, 0).transpose(2, 0, 1, 3, 4, 5)),
    "lmcache.kv_t2d": lambda k, v: bf16(both(k, v, 3)),
    "llama_cpp.transposed_v": lambda k, v: np.concatenate([
        np.concatenate([bits(k[i], np.float16), bits(v[i].transpose(0, 2, 3, 1), np.float16)]) for i in range(L)
    ]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_are_those_of_the_documented_shape(name: str) -> None:
    found = known_format(name, **SIZES)
    rng = np.random.default_rng(3)
    k, v = rng.standard_normal((2, L, P, N, H, D)).astype(np.float32)
    assert np.array_equal(found.encode(k, v), SHAPES[name](k, v))


def rows(name: str) -> tuple[Format, list[Array], Array]:
    """A format of latent rows, its values of one layer, and the bytes of its pages: [P, bytes]."""
    found = known_format(name, layers=1, pages=P, page_size=N)
    rng = np.random.default_rng(5)
    values = [rng.standard_normal(part.shape).astype(np.float32) for part in found.parts]
    return found, [value[0] for value in values], found.encode(*values).reshape(P, -1)


def test_the_656_byte_row() -> None:
    _, (latent, rope), pages = rows("mla.656")
    row = pages.reshape(P, N, 656)
    scale = row[..., 512:528].copy().view(np.float32)
    assert np.array_equal(scale, np.abs(latent).reshape(P, N, 4, 128).max(-1) / np.float32(448))
    assert np.array_equal(row[..., 528:].reshape(-1), bits(rope, ml_dtypes.bfloat16))
    codes = (latent.reshape(P, N, 4, 128) / scale[..., None]).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    stored = row[..., :512].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(codes.shape)
    # Division and multiplication by the reciprocal differ by one rounding.
    assert (np.abs(stored - codes) <= np.maximum(np.abs(codes) / 8, 2**-9)).all()


def test_the_584_byte_row() -> None:
    found, (latent, rope), pages = rows("mla.584")
    assert pages.shape[1] % 576 == 0
    assert found.bytes_per_token == pages.shape[1] / N
    data, tail = pages[:, : 576 * N].reshape(P, N, 576), pages[:, 576 * N : 584 * N].reshape(P, N, 8)
    assert np.array_equal(data[..., 448:].reshape(-1), bits(rope, ml_dtypes.bfloat16))
    power = np.exp2(tail[..., :7].astype(np.float32) - 127)
    reach = np.abs(latent).reshape(P, N, 7, 64).max(-1)
    assert (reach <= 448 * power).all()  # the least power of two that holds the group
    assert (reach > 448 * power / 2).all()
    assert not tail[..., 7].any()


def test_the_352_byte_row() -> None:
    _, (latent, rope), pages = rows("mla.352")
    row = pages.reshape(P, N, 352)
    assert np.array_equal(row[..., 256:320].reshape(-1), bits(rope, ml_dtypes.float8_e4m3fn))
    s = np.arange(32)
    scale = row[..., 320 + 8 * (s % 4) + s // 4].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    reach = np.abs(latent).reshape(P, N, 32, 16).max(-1)
    assert np.array_equal(scale, (reach / np.float32(6)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_v_scales_of_nvfp4_pages_lie_four_tokens_side_by_side() -> None:
    found, (k, v) = made("flashinfer.nvfp4")
    page = found.encode(k, v).reshape(L, -1)
    data = P * 2 * H * N * D // 2
    scales = page[:, data:].reshape(L, P, 2, H, N * D // 16)
    for part, x in enumerate((k, v)):
        reach = np.abs(x).reshape(L, P, N, H, D // 16, 16).max(-1).transpose(0, 1, 3, 2, 4)
        linear = bits(reach / np.float32(6), ml_dtypes.float8_e4m3fn).reshape(L, P, H, N, D // 16)
        if part:  # [N, S] as [N/4, 4, 4, S/4], its axes in the order 0, 2, 3, 1
            linear = linear.reshape(L, P, H, N // 4, 4, 4, D // 64).transpose(0, 1, 2, 3, 5, 6, 4)
        assert np.array_equal(scales[:, :, part].reshape(-1), linear.reshape(-1))


def test_rows_of_vllm_nvfp4_have_their_scales_in_the_4x4_order() -> None:
    found, (k, v) = made("vllm.nvfp4")
    row, S = D // 2 + D // 16, D // 16
    stored = found.encode(k, v).reshape(L, P, 2, H, N, row)
    t, s = np.meshgrid(np.arange(N), np.arange(S), indexing="ij")
    line, column = t // 4 * 4 + s // (S // 4), s % (S // 4) * 4 + t % 4
    for part, x in enumerate((k, v)):
        reach = np.abs(x).reshape(L, P, N, H, S, 16).max(-1).transpose(0, 1, 3, 2, 4)
        want = (reach / np.float32(6)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert np.array_equal(stored[:, :, part][..., line, D // 2 + column], want)


@pytest.mark.parametrize(("name", "kind"), [("llama_cpp.q8_0", "Q8_0"), ("llama_cpp.q4_0", "Q4_0")])
def test_blocks_of_llama_cpp_are_those_of_gguf(name: str, kind: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    gguf = pytest.importorskip("gguf")
    found, (k, v) = made(name)
    k[0, 0, 0, 0, :32] = 0  # a block without a scale
    want = quants.quantize(both(k, v, 1).reshape(-1, D), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(found.encode(k, v), want.reshape(-1))
    assert np.array_equal(np.stack(found.decode(want), 1).reshape(-1, D), quants.dequantize(
        want, gguf.GGMLQuantizationType[kind]))


# The largest step of a code next to its largest number, in units of what a scale reaches.
STEP = {
    "e4m3": 32 / 448, "e2m1": 2 / 6, "s8": 1 / 127, "u4": 2 / 15, "s4": 1 / 7, "b4": 2 / 8, "bf16": 2**-7, "f16": 2**-10
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_format_there_and_back(name: str) -> None:
    found, values = made(name)
    assert Format.parse(found.print()) == found
    stored = found.encode(*values, fill=0xA5)
    assert stored.size == found.nbytes == np.asarray(found.bytes_per_token) * P * N
    codes = found.unpack(stored)
    assert np.array_equal(found.pack(codes, fill=0xA5), stored)
    for part, value, back in zip(found.parts, values, found.decode(stored), strict=True):
        assert back.shape == value.shape == found.shape(part.name)
        scaled = any(field.name == f"{part.name}_scale" for field in found.fields)
        reach = np.abs(value).max() if scaled else np.abs(value)
        step = STEP[part.stored] if scaled or part.stored != "e4m3" else 2**-3
        coarse = 1 + (STEP["e4m3"] if scaled else 0)  # the scale itself is rounded
        wide = 2 if name in ("mla.584", "indexer.68") else 1  # a power of two reaches up to twice as far
        assert (np.abs(back - value) <= step / 2 * reach * coarse * wide + 2**-10).all()
    # Each bit is written by one element: what no element writes is the padding.
    flipped = {name: ~code & ((1 << found.field(name).type.bits) - 1) for name, code in codes.items()}
    other = found.pack({name: code.astype(codes[name].dtype) for name, code in flipped.items()}, fill=0xA5)
    held = sum(int(np.prod(field.shape)) * field.type.bits for field in found.fields)
    assert np.unpackbits(other ^ stored).sum() == held


@pytest.mark.parametrize("name", ["vllm.nvfp4", "mla.584", "llama_cpp.q4_0", "aiter.shuffle_fp8", "kivi.int4"])
def test_a_byte_is_found_again(name: str) -> None:
    found = known_format(name, layers=2, pages=2, page_size=32, heads=2, dim=64)
    for field in found.fields:
        index = {axis: np.arange(0, field.extent(axis), field.group(axis)) for axis in field.axes}
        at = field.addresses()[0].ravel()
        held, back = field.find(at + field.type.bits - 1)
        assert held.all()
        for axis, grid in zip(field.axes, np.meshgrid(*index.values(), indexing="ij"), strict=True):
            assert np.array_equal(back[axis], grid.ravel())
        others = np.concatenate([f.addresses()[0].ravel() for f in found.fields if f is not field])
        assert not field.find(others)[0].any()


def test_a_field_is_a_layout() -> None:
    field = known_format("aiter.shuffle", layers=1, pages=1, heads=2, page_size=16, dim=32).field("v")
    layout = field.layout("slot", "dim")
    for slot, dim in ((0, 0), (9, 3), (15, 31)):
        assert field.base + layout((slot, dim)) == field.address(slot=slot, dim=dim)


def test_replicas_are_written_and_the_first_is_read() -> None:
    found = Format.parse("slot:4 head:2 copy:2 dim:8 k.s8")
    x = np.arange(64, dtype=np.float32).reshape(4, 2, 8) - 32
    stored = found.encode(x).view(np.int8).reshape(4, 2, 2, 8)
    assert np.array_equal(stored[:, :, 0], x)
    assert np.array_equal(stored[:, :, 1], x)
    assert np.array_equal(found.decode(stored)[0], x)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("page:4 slot:16 k.bf17", "element type is 'bf17': must be one of f32"),
        ("page:4 block:16 k.bf16", "axis is 'block': must be one of layer, page, slot, head, dim, kv, copy"),
        ("page:4 slot/8:2 slot:4 k.bf16", r"k has pieces slot/1:4 and slot/8:2: must be pieces that tile the axis"),
        ("page:4 slot/4:4 k.bf16", r"k has slot/4:4 alone: must be a piece slot:4"),
        ("page:4 slot:16", "text has '' where an item begins: must be an axis"),
        ("page:4 (slot:4 k.bf16, slot:8 v.bf16)", r"slot of k is 4: must be 8, as in the other fields"),
        ("slot:3 k.s4", "format 'slot:3 k.s4' has 12 bits: must be whole bytes"),
        ("slot:4 (k.s4, v.s4)", r"member 'k.s4' of a group has 4 bits: must be whole bytes"),
        ("slot:4 (k_scale.f32, v.bf16)", "field k_scale has no values: must be beside a field k"),
        ("slot:4 (k.bf16, k.bf16)", "format has the field k twice"),
        ("slot:4@1 dim:2 k.bf16", r"puts two elements at byte 1: must be apart"),
        ("kv:3 slot:4 kv.bf16", r"axis kv/1:3: must be kv:2"),
        ("slot:4 k.bf16 )", r"text goes on with '\)'"),
        ("slot:4 ?", r"text cannot be read from ' \?'"),
        ("slot:4 (k.bf16, pad:8)%0", "text aligns a group with %0"),
        ("slot:99999999999999999999 k.bf16", r"text cannot be read from 'slot:9999"),
        ("slot:999999999999999 dim:999 k.bf16", r"format has \d+ bytes: must be at most"),
        ("(" * 400, "text has 400 words: must be at most 300"),
    ],
)
def test_what_is_no_format_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Format.parse(text)


@pytest.mark.parametrize("scale", ["a", True, [1], np.nan, 0, 1e-46, 1e39])
def test_a_tensor_scale_is_a_number(scale: Any) -> None:
    """What float32 rounds to 0 or to infinity is refused, too, where it is read and where it is written."""
    found = known_format("kvlab.int4", layers=1, pages=1, page_size=2, heads=1, dim=16)
    x, words = np.ones((1, 1, 2, 1, 16)), "must be a number above 0, finite in float32"
    stored = found.encode(x, x)
    for call in (lambda: found.encode(x, x, tensor_scale=scale), lambda: found.decode(stored, tensor_scale=scale)):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(ValueError, match="tensor_scale is 1e-30: must be one over which v is finite in float32"):
        found.encode(x, 1e20 * x, tensor_scale=1e-30)
    with pytest.raises(ValueError, match="k has dtype complex128: must be real numbers"):
        found.encode(x + 1j, x)


@pytest.mark.parametrize("codes, words", [
    ([1, 2, 3, 16], "codes of k have 16: must be of 4 bits"), ([1, 2, 3, -1], "codes of k have -1: must be of 4 bits"),
    ([1, 2, 3, 1.5], "codes of k have dtype float64: must be unsigned integers"),
])
def test_codes_that_do_not_fit_are_refused(codes: Any, words: str) -> None:
    """They would go into the neighbour's half of a byte."""
    with pytest.raises(ValueError, match=words):
        Format.parse("dim:4 k.u4").pack({"k": codes})
    with pytest.raises(ValueError, match="fill is 300: must be a byte"):
        Format.parse("dim:4 k.u4").encode(np.zeros(4), fill=300)


@pytest.mark.parametrize(("stored", "scale", "value", "words"), [
    ("s8", "f16", 1e9, r"k has 1e\+09, whose scale is 7.87402e\+06: must be one that k_scale, f16, holds"),
    ("bf16", "e4m3", 4.0, "k has 4, whose scale is 1.*e-38: must be one that k_scale, e4m3, holds"),
    ("s8", "f32", 1e9, ""), ("b4", "e8m0", -7.0, ""), ("b4", "e8m0", 7.0, ""),
])  # fmt: skip
def test_a_scale_that_its_type_cannot_hold_is_refused(stored: str, scale: str, value: float, words: str) -> None:
    """A law: what is encoded is decoded, but for a rounding, or refused; e8m0 has no sign and no zero."""
    made = Format.parse(f"slot:2 (dim:4 k.{stored}, k_scale.{scale}, pad:1)")
    given = np.array([[value] * 4, [0.0] * 4], np.float32)
    if words:
        with pytest.raises(ValueError, match=words):
            made.encode(given)
    else:
        assert np.allclose(made.decode(made.encode(given))[0], given, rtol=0.01, atol=0)


def test_strided_memory_is_read_in_its_order() -> None:
    made = Format.parse("slot:4 k.s8")
    assert made.decode(memoryview(bytes([1, 9, 2, 9, 3, 9, 4, 9]))[::2])[0].tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="byte has dtype float64: must be integers"):
        made.at(1.5)


def test_values_of_another_shape_are_refused() -> None:
    found = known_format("mla.656", layers=1, pages=1, page_size=2)
    latent, rope = np.zeros((1, 1, 2, 512)), np.zeros((1, 1, 2, 64))
    with pytest.raises(ValueError, match=r"values are 1 arrays: must be 2: latent, rope"):
        found.encode(latent)
    with pytest.raises(ValueError, match=r"rope has shape \(1, 1, 64, 2\): must be \(1, 1, 2, 64\)"):
        found.encode(latent, rope.swapaxes(-1, -2))
    with pytest.raises(ValueError, match=r"buffer has 1311 bytes: must be 1312"):
        found.decode(found.encode(latent, rope)[:-1])
    with pytest.raises(IndexError, match=r"dim is 64: must be in \[0, 64\)"):
        found.where("rope", dim=64)
    with pytest.raises(ValueError, match=r"name is 'mla.657': must be one of vllm\.LBHNC"):
        known_format("mla.657")


def test_codes_are_the_nearest_of_their_type() -> None:
    """A law: no other code of the type is nearer, of all types but the widest."""
    rng = np.random.default_rng(1)
    for stored in STORED.values():
        if stored.bits > 8 or stored.name == "e8m0":
            continue
        every = stored.numbers(np.arange(1 << stored.bits).astype(np.uint8))
        every = every[np.isfinite(every) & ((np.abs(every) <= stored.largest) | (every == -stored.offset))]
        x = rng.uniform(every.min(), every.max(), 500).astype(np.float32)
        near = stored.numbers(stored.codes(x))
        assert np.array_equal(np.abs(near - x), np.abs(every[:, None] - x).min(0))


def test_halves_are_rounded_as_ggml_and_the_engines_do() -> None:
    """Half up where a code has an offset (q4_0), half away from zero for other integers, half to even for floats."""
    assert STORED["b4"].codes([0.5, -0.5, 1.5, -1.5]).tolist() == [9, 8, 10, 7]
    assert STORED["s8"].codes([0.5, -0.5, 2.5, -2.5]).tolist() == [1, 255, 3, 253]
    assert STORED["e2m1"].numbers(STORED["e2m1"].codes([2.5, 3.5, 5.0])).tolist() == [2, 4, 4]


@pytest.mark.parametrize("name", ["flashinfer.nvfp4", "mla.584", "indexer.68"])
def test_codes_are_the_nearest_under_the_scale_that_is_stored(name: str) -> None:
    """A law: a coarse scale is rounded first, and the codes are made with what is stored."""
    found, values = made(name)
    codes = found.unpack(found.encode(*values))
    part = found.parts[0]
    scale = found.field(f"{part.name}_scale")
    factor = np.repeat(scale.type.numbers(codes[scale.name]), scale.group("dim"), -1)
    every = part.type.numbers(np.arange(1 << part.type.bits).astype(np.uint8))
    every = np.unique(every[np.isfinite(every)])
    x = (values[0] / factor)[:1, :1, :4]
    stored = part.type.numbers(codes[part.name])[:1, :1, :4]
    best = np.abs(every - x[..., None]).min(-1)
    assert (np.abs(stored - x) <= best * (1 + 1e-5) + 1e-6).all()
