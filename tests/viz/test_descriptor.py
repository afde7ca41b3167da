"""Descriptors: the bits are those of the encoded word, every field in its place (PTX ISA, matrix descriptor)."""

from __future__ import annotations

import re

import pytest

from kvlab.hardware import SmemDescriptor
from kvlab.viz import draw, draw_descriptor

DESCRIPTORS = [
    SmemDescriptor(0x4020, 16, 1024, "128B"),
    SmemDescriptor(0x4000, 2048, 1024, "64B", base_offset=5),
    SmemDescriptor(0, 128, 256, arch="sm_100"),
    SmemDescriptor(0x10000, 4096, 512, "32B", arch="sm_100"),
]


@pytest.mark.parametrize("descriptor", DESCRIPTORS, ids=str)
@pytest.mark.parametrize("major", ["K", "MN"])
def test_every_bit_and_field(descriptor: SmemDescriptor, major: str, sound, overlaps) -> None:
    picture = draw_descriptor(descriptor, major=major)
    sound(picture)
    bits = {int(bit): int(on) for bit, on in re.findall(r"<title>bit (\d+) = (\d)\n", picture.body)}
    assert sum(on << bit for bit, on in bits.items()) == descriptor.encode()
    assert len(bits) == 64
    fields = dict(re.findall(r"<title>bit (\d+) = \d\n([^<]*)", picture.body))
    assert (fields["13"], fields["14"], fields["29"], fields["45"]) == (
        "start address", "no field: must be 0", "LBO", "SBO",
    )
    assert fields["62"] == "swizzle"
    assert fields["46"] == ("constant" if descriptor.arch == "sm_100" else "no field: must be 0")
    assert f"start address = {descriptor.start_address >> 4} x 16 = {descriptor.start_address} bytes" in picture.svg
    assert not overlaps(picture)
    for sentence in descriptor.explain(major).splitlines()[1:]:
        assert sentence.split(":")[0] in picture.svg


def test_it_draws_itself() -> None:
    assert DESCRIPTORS[0]._repr_svg_() == draw(DESCRIPTORS[0]).svg
    with pytest.raises(ValueError, match="major is 'N': must be 'K' or 'MN'"):
        draw_descriptor(DESCRIPTORS[0], major="N")
