"""Conversions of formats on a GPU. Rests on NumPy's execution of the same plan, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from format_pairs import pairs_of_formats

from kvlab.formats import Format, convert, known_format

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("source", "target"), pairs_of_formats(), ids=lambda one: f"{one.name}-{one.sizes.get('slot')}"
)
def test_bytes_of_pairs(source: Format, target: Format) -> None:
    plan = convert(source, target)
    x = torch.randint(0, 256, (source.nbytes,), dtype=torch.uint8)
    exact = plan.apply(x, fill=3)
    for _ in range(2):  # the second launch reuses the first one's
        assert torch.equal(plan.apply(x.cuda(), fill=3).cpu(), exact)


@pytest.mark.parametrize(
    ("one", "other"), [("vllm.blocks_first", "vllm.hnd"), ("vllm.x_split", "flash_attention.paged"),
                       ("aiter.shuffle", "flash_attention.paged")],
)
@pytest.mark.parametrize("page_size", [16, 48])
def test_in_place_many_times(one: str, other: str, page_size: int) -> None:
    """Programs of one launch run in any order: there and back, 20 times over many pages, is where it began."""
    sizes = {"layers": 3, "pages": 200, "page_size": page_size, "heads": 2, "dim": 64}
    there = convert(known_format(one, **sizes), known_format(other, **sizes))
    back = convert(there.target, there.source)
    x = torch.randint(0, 256, (there.source.nbytes,), dtype=torch.uint8, device="cuda")
    exact = there.apply(x)
    held = x.clone()
    for _ in range(20):
        there.apply_in_place(held)
        assert torch.equal(held, exact)
        back.apply_in_place(held)
    assert torch.equal(held, x)


def test_more_than_32_bits_of_bytes_and_an_odd_address() -> None:
    """5 GiB: places of the last pages have 33 bits; a view that begins at an odd byte is copied byte by byte."""
    sizes = {"layers": 1, "pages": 40960, "page_size": 16, "heads": 16, "dim": 128}
    plan = convert(known_format("vllm.blocks_first", **sizes), known_format("vllm.hnd", **sizes))
    x = torch.randint(-(2**62), 2**62, (plan.source.nbytes // 8,), device="cuda").view(torch.bfloat16)
    found = plan.apply(x).view(torch.int16)
    exact = x.view(torch.int16).view(40960, 2, 16, 16, 128).transpose(2, 3)
    assert torch.equal(found.view(40960, 2, 16, 16, 128), exact)
    small = convert(known_format("vllm.blocks_first"), known_format("vllm.x_split"))
    odd = torch.randint(0, 256, (small.source.nbytes + 1,), dtype=torch.uint8, device="cuda")[1:]
    assert np.array_equal(small.apply(odd).cpu().numpy(), small.apply(odd.cpu().numpy()))


def test_what_is_refused_is_refused_before_anything_is_written() -> None:
    sizes = {"layers": 2, "pages": 2048, "page_size": 1, "heads": 1, "dim": 16}
    a, b = known_format("max.paged", **sizes), known_format("vllm.kv_first", **sizes)
    plan = convert(a, b)
    x = torch.randint(0, 256, (a.nbytes,), dtype=torch.uint8, device="cuda")
    before = x.clone()
    for bad, words in ((x, "change places with each other: must be converted by apply"), (x[:-1], "contiguous uint8")):
        with pytest.raises(ValueError, match=words):
            plan.apply_in_place(bad)
    for options, words in (({"out": x}, "shares memory"), ({"out": x.cpu()}, "one library and device"),
                           ({"out": x[::2]}, "contiguous uint8"), ({"fill": 300}, "a byte")):
        with pytest.raises(ValueError, match=words):
            plan.apply(x, **options)
    with pytest.raises(ValueError, match=rf"buffer has 7 bytes: must be {a.nbytes}"):
        plan.apply(x[:7])
    assert torch.equal(x, before)
