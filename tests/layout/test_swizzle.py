"""Swizzle and its units. Rests on laws (involution, bijection, the same permutation in every unit), on worked values of
the Mojo layout package's own tests, and on the chunk rules of the images that an H100's TMA writes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.layout import Layout, Swizzle

UNITS = {"byte": 1, "fp8": 1, "bf16": 2, "float32": 4, "int64": 8, "vector": 16}


@st.composite
def swizzles(draw):
    bits = draw(st.integers(0, 4))
    shift = draw(st.integers(bits, 6)) * draw(st.sampled_from([1, -1]))
    return Swizzle(bits, draw(st.integers(0, 6)), shift, draw(st.sampled_from([*UNITS])))


@given(swizzles())
def test_involution_and_bijection_of_a_period(swizzle):
    x = np.arange(2 * swizzle.period)
    y = swizzle(x)
    assert (swizzle(y) == x).all()
    assert sorted(y[: swizzle.period].tolist()) == list(range(swizzle.period))
    assert (y[swizzle.period :] == y[: swizzle.period] + swizzle.period).all()


@given(swizzles())
def test_definition_bit_by_bit(swizzle):
    for x in range(0, 2 * swizzle.period, max(1, swizzle.period // 50)):
        y = x
        for k in range(swizzle.bits):
            low, high = swizzle.base + k, swizzle.base + k + abs(swizzle.shift)
            source, target = (high, low) if swizzle.shift > 0 else (low, high)
            y ^= (x >> source & 1) << target
        assert swizzle(x) == y


@given(swizzles(), st.sampled_from(tuple(UNITS)))
def test_conversion_is_the_same_permutation_of_bytes(swizzle, unit):
    """Of every multiple of both units; or no conversion exists because f moves pieces smaller than the new unit."""
    old, new = swizzle.unit_bytes, UNITS[unit]
    moved = old << swizzle.base
    if swizzle.bits and moved < new:
        with pytest.raises(ValueError, match=f"moves pieces of {moved} bytes"):
            swizzle.to(unit)
        return
    other = swizzle.to(unit)
    step = max(old, new)
    at = np.arange(0, min(4 * swizzle.period * old, 1 << 16), step)
    assert (other(at // new) * new == swizzle(at // old) * old).all()
    assert (swizzle.apply(at // new, new) == other(at // new)).all()
    if swizzle.bits:
        assert other.to(swizzle.unit) == swizzle
        assert other.period * new == swizzle.period * old


@given(swizzles())
def test_text_round_trip(swizzle):
    assert Swizzle.parse(str(swizzle)) == swizzle
    assert eval(repr(swizzle)) == swizzle
    assert pickle.loads(pickle.dumps(swizzle)) == swizzle
    assert hash(Swizzle.parse(str(swizzle))) == hash(swizzle)


class TestWorkedNumbers:
    def test_1_0_4(self):
        expected = [17, 16, 19, 18, 21, 20, 23, 22, 25, 24, 27, 26, 29, 28, 31, 30]
        assert Swizzle(1, 0, 4, "vector")(np.arange(16, 32)).tolist() == expected

    def test_2_1_3(self):
        rows = [18, 19, 16, 17, 22, 23, 20, 21, 26, 27, 24, 25, 30, 31, 28, 29, 36, 37, 38, 39, 32, 33, 34, 35]
        assert Swizzle(2, 1, 3, "vector")(np.arange(16, 40)).tolist() == rows

    def test_2_0_3(self):
        expected = [
            *range(8),
            9,
            8,
            11,
            10,
            13,
            12,
            15,
            14,
            18,
            19,
            16,
            17,
            22,
            23,
            20,
            21,
            27,
            26,
            25,
            24,
            31,
            30,
            29,
            28,
        ]
        assert Swizzle(2, 0, 3, "vector")(np.arange(32)).tolist() == expected

    def test_the_128_byte_mode_is_one_permutation_with_many_names(self):
        names = {unit: str(Swizzle(3, 4, 3, "byte").to(unit)) for unit in ("byte", "bf16", "float32", "fp8", "vector")}
        assert names == {
            "byte": "Sw<3,4,3> (byte)",
            "bf16": "Sw<3,3,3> (bfloat16)",
            "float32": "Sw<3,2,3> (float32)",
            "fp8": "Sw<3,4,3> (float8_e4m3fn)",
            "vector": "Sw<3,0,3> (16-byte vector)",
        }

    @pytest.mark.parametrize("mode, rows", [(3, 1), (2, 2), (1, 4)])
    def test_tma_chunks(self, mode, rows):
        r, c = np.arange(64)[:, None], np.arange(1 << mode)
        row_bytes = 16 << mode
        image = Swizzle(mode, 4, 3, "byte")(row_bytes * r + 16 * c)
        assert (image == row_bytes * r + 16 * (c ^ r // rows % (1 << mode))).all()

    def test_vector_of_row_goes_to_column_xor_row(self):
        r, c = np.arange(16)[:, None], np.arange(8)
        assert (Swizzle(3, 0, 3, "vector")(8 * r + c) == 8 * r + (c ^ r % 8)).all()


def test_byte_form_on_elements_is_the_wrong_place():
    """32 rows of 4-byte elements, column-major, element (0, 1): what a swizzle without a unit hides."""
    offset = Layout((32, 8), (1, 32))(0, 1)
    swizzle = Swizzle(3, 4, 3, "byte")
    assert (offset, swizzle(offset), swizzle.to("float32")(offset)) == (32, 32, 36)


def test_types():
    swizzle = Swizzle(3, 3, 3, "bf16")
    assert type(swizzle(np.int64(72))) is int
    assert swizzle(np.array([72], np.uint8)).dtype == np.int64
    assert swizzle(np.arange(4).reshape(2, 2)).shape == (2, 2)
    assert swizzle == Swizzle(3, 3, 3, swizzle.unit) != Swizzle(3, 3, 3, "float16")


def test_identity():
    assert Swizzle.identity("bf16")(np.arange(9)).tolist() == list(range(9))
    assert Swizzle.identity("byte").to("vector")(5) == 5


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: Swizzle(3, 0, 2, "vector"), r"Swizzle\(3,0,2\): shift 2 < bits 3 .* use Sw<3,0,3> or Sw<2,0,2>"),
        (lambda: Swizzle(3, 0, -2, "vector"), r"-shift 2 < bits 3 .* use Sw<3,0,-3> or Sw<2,0,-2>"),
        (lambda: Swizzle(1, 2, 0, "vector"), r"shift 0 < bits 1 .* use Sw<1,2,1> or Sw<0,2,0>"),
        (lambda: Swizzle(-1, 0, 3, "byte"), "must not be negative"),
        (lambda: Swizzle(3, 4, 3, "chunk"), "unit is 'chunk': must be 'byte', 'vector'"),
        (lambda: Swizzle(3, 4, 3.0, "byte"), "is 3.0: must be an int"),
        (lambda: Swizzle(3, 0, 3, "bf16").to("vector"), "moves pieces of 2 bytes"),
        (lambda: Swizzle(3, 0, 3, "bf16").apply(1, 12), "must be a power of two"),
        (lambda: Swizzle(3, 4, 3, "byte")(1.5), "address is 1.5: must be an int"),
        (lambda: Swizzle(3, 4, 3, "byte")(np.array([1.5])), "must be integers"),
        (lambda: Swizzle.parse("Sw<3,4>"), "is not a swizzle"),
        (lambda: Swizzle.parse("Sw<3,4,3>"), "names no unit"),
        (lambda: Swizzle.parse("Sw<3,4,3> (byte)", "bf16"), "names the unit 'byte'"),
    ],
)
def test_refusals(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_shift_below_bits_is_really_no_involution():
    """Why it is refused: by the definition, with the overlapping masks of Sw<3,0,2>."""
    x = np.arange(64)
    once = x ^ (x & 0b11100) >> 2
    assert (once ^ (once & 0b11100) >> 2 != x).sum() == 32


def test_prints_its_unit():
    assert str(Swizzle(3, 3, 3, "bf16")) == "Sw<3,3,3> (bfloat16)"
    assert repr(Swizzle(3, 0, 4, "vector")) == "Swizzle(3, 0, 4, unit='vector')"


def test_draws_itself():
    assert Swizzle(3, 4, 3, "byte")._repr_svg_().startswith("<svg")
