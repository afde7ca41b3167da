"""Audits of paged caches. Rests on what is planted: each flaw is found where it was put, and nothing else.

Which slots hold tokens rests on the definition: token t of a sequence lies in slot t % size of page table[t // size].
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvlab.formats import AuditFailure, Format, Watch, audit, known_format

TABLE, LENGTHS = [[4, 1, -1], [2, 0, 5], [-1, -1, -1]], [20, 37, 0]
SIZES = {"layers": 2, "pages": 6, "page_size": 16, "heads": 2, "dim": 64}
NAMES = ["vllm.BLHNC", "vllm.x_split", "aiter.shuffle_fp8", "flashinfer.nvfp4", "mla.656", "mla.584", "llama_cpp.q8_0",
         "llama_cpp.q4_0", "int8.per_channel", "indexer.68"]


def filled(name: str) -> tuple[Format, np.ndarray[Any, Any]]:
    made = known_format(name, **SIZES)
    rng = np.random.default_rng(4)
    return made, made.encode(*(rng.uniform(0.5, 2, part.shape).astype(np.float32) for part in made.parts))


def put(made: Format, buffer: np.ndarray[Any, Any], field: str, byte: int, **index: int) -> None:
    """All bytes of an element."""
    one = made.field(field)
    at = one.address(**index) // 8
    buffer[at : at + max(one.type.bits // 8, 1)] = byte


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_that_is_right_has_no_flaw_and_its_used_slots_are_known(name: str) -> None:
    made, buffer = filled(name)
    found = audit(buffer, TABLE, LENGTHS, format=made)
    assert found, found.report()
    want = np.zeros((6, 16), bool)
    for row, tokens in zip(TABLE, LENGTHS, strict=True):
        for token in range(tokens):
            want[row[token // 16], token % 16] = True
    assert np.array_equal(found.used, want)
    assert repr(found) == "Audit(nothing is wrong; 57 of 96 slots hold tokens)"


@pytest.mark.parametrize(
    ("name", "field", "index"),
    [
        ("vllm.BLHNC", "v", {"layer": 1, "page": 5, "slot": 4, "head": 1, "dim": 63}),
        ("vllm.x_split", "k", {"layer": 0, "page": 1, "slot": 3, "head": 0, "dim": 9}),
        ("aiter.shuffle_fp8", "v", {"layer": 1, "page": 2, "slot": 15, "head": 1, "dim": 0}),
        ("mla.656", "rope", {"layer": 0, "page": 4, "slot": 8, "dim": 17}),
        ("mla.656", "latent_scale", {"layer": 1, "page": 0, "slot": 8, "dim": 256}),
        ("llama_cpp.q8_0", "v_scale", {"layer": 1, "page": 2, "slot": 2, "head": 1, "dim": 32}),
    ],
)
def test_a_value_that_is_poison_is_named_and_one_beside_the_tokens_is_not(name: str, field: str, index: Any) -> None:
    made, buffer = filled(name)
    put(made, buffer, field, 0xFF, **index)
    put(made, buffer, field, 0xFF, **{**index, "page": 5, "slot": 9})  # holds no token
    put(made, buffer, field, 0xFF, **{**index, "page": 3})  # nobody's page
    (flaw,) = audit(buffer, TABLE, LENGTHS, format=made).flaws
    assert (flaw.kind, flaw.field, dict(flaw.index)) == ("poison", field, index)
    assert all(f"{axis} {at}" in flaw.words for axis, at in index.items())


def test_nan_infinity_and_scales_out_of_range_are_told_apart() -> None:
    made = Format.parse("page:6 slot:16 (dim:8 k.f16, k_scale.f32, pad:4)")
    buffer = np.zeros((6, 16, 24), np.uint8)
    halves, scales = buffer.view(np.float16), buffer[..., 16:20].view(np.float32)
    halves[..., :8], scales[...] = 2, 0.5
    halves[4, 3, 5], halves[4, 4, 6], scales[1, 2], scales[2, 7] = np.nan, -np.inf, 1e6, 1e-12
    scales[0, 0] = 0.0  # allowed: a group of zeros
    scales[3] = 1e9  # nobody's
    found = audit(buffer, TABLE, LENGTHS, format=made, scale_range=(1e-9, 1e4))
    assert [(flaw.kind, flaw.index["page"], flaw.index["slot"]) for flaw in found.flaws] == [
        ("nan", 4, 3), ("inf", 4, 4), ("scale", 1, 2), ("scale", 2, 7)
    ]
    assert found.flaws[2].words == "k_scale of page 1, slot 2 is 1e+06, outside 1e-09 to 10000"
    assert found.counts == {"nan": 1, "inf": 1, "scale": 2}


@pytest.mark.parametrize("name", ["vllm.BLHNC", "flashinfer.nvfp4", "llama_cpp.q4_0", "mla.584"])
def test_a_slot_that_nobody_wrote_is_named(name: str) -> None:
    made, buffer = filled(name)
    field = made.parts[0]
    for head in range(field.extent("head")):
        for dim in range(field.extent("dim")):
            at = field.address(layer=1, page=0, slot=13, head=head, dim=dim)
            buffer[at // 8 : at // 8 + max(field.type.bits // 8, 1)] = 0xFF
    (flaw,) = audit(buffer, TABLE, LENGTHS, format=made).flaws
    assert (flaw.kind, dict(flaw.index)) == ("unwritten", {"layer": 1, "page": 0, "slot": 13})


@pytest.mark.parametrize(
    ("table", "lengths", "how", "words"),
    [
        ([[4, 1, -1], [2, 0, 5]], [20, 49], {}, ["length: lengths[1] is 49: the table has pages for 48 tokens"]),
        ([[4, -1, -1], [2, 0, 5]], [20, 48], {}, ["page: table[0, 1] is -1, none of the 6 pages, and has tokens"]),
        ([[4, 1, -1], [2, 1, 5]], [20, 37], {}, ["owners: page 1 has 2 owners: table[0, 1] and table[1, 1]"]),
        ([[4, 4, -1], [2, 1, 5]], [20, 37], {}, ["owners: page 4 has 2 owners: table[0, 0] and table[0, 1]"]),
        ([[4, 1, 2], [2, 0, 3]], [20, 20], {}, [
            "tail: table[0, 2] is 2, behind the pages of 20 tokens: sequence 1 has page 2",
            "tail: table[1, 2] is 3, behind the pages of 20 tokens: nobody has page 3"]),
        ([[4, 1, 0], [2, 3, 0]], [20, 20], {"padding": 0}, ["nothing is wrong"]),
        ([[4, 1, -1], [4, 0, 5]], [20, 37], {"shared_prefix": True}, ["nothing is wrong"]),
        ([[4, 1, -1], [4, 0, 5]], [10, 37], {"shared_prefix": True}, [
            "owners: page 4 has 2 owners: table[0, 0] and table[1, 0]",
            "tail: table[0, 1] is 1, behind the pages of 10 tokens: nobody has page 1"]),  # not yet full
        ([[4, 1, -1], [2, 4, 5]], [32, 37], {"shared_prefix": True}, [
            "owners: page 4 has 2 owners: table[0, 0] and table[1, 1]"]),  # another place
    ],
)
def test_what_is_wrong_with_the_table_is_said(table: Any, lengths: Any, how: Any, words: list[str]) -> None:
    cache = np.ones((6, 16, 2, 8), np.float32)
    assert audit(cache, table, lengths, **how).report() == "\n".join(words)


def test_tensors_of_torch_are_looked_at_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    cache = torch.ones(6, 2, 16, 2, 8, dtype=torch.bfloat16)
    cache[2, 1, 5, 1, 7] = float("nan")
    cache[3] = float("nan")  # nobody's page
    found = audit(cache, torch.tensor(TABLE, dtype=torch.int32), torch.tensor(LENGTHS))
    assert found.report() == "nan: v of page 2, slot 5, head 1, dim 7"
    codes = torch.zeros(6, 16, 2, 8, dtype=torch.float8_e4m3fn)
    codes.view(torch.uint8)[0, 0, 1, 2] = 0x7F
    assert audit(codes, TABLE, LENGTHS).report() == "nan: k of page 0, slot 0, head 1, dim 2"


def test_many_flaws_are_counted_and_the_first_listed() -> None:
    cache = np.full((6, 16, 2, 8), np.nan, np.float32)
    found = audit(cache, TABLE, LENGTHS)
    assert found.counts == {"nan": 57}  # slots
    assert len(found.flaws) == 20
    assert found.report().endswith("nan: 37 more")


@pytest.mark.parametrize(
    ("cache", "how", "words"),
    [
        (np.zeros((6, 16, 8), np.float32), {}, r"cache has shape \(6, 16, 8\) and dtype float32: must be given"),
        (np.zeros((6, 16, 2, 8), np.float32), {"format": Format.parse("slot:16 k.f32")}, "cache has 6144 bytes: must"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(cache: Any, how: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        audit(cache, TABLE, LENGTHS, **how)
    with pytest.raises(ValueError, match=r"table has shape \(3, 3\), lengths \(2,\): must be \[sequences, columns\]"):
        audit(np.zeros((6, 16, 2, 8), np.float32), TABLE, [1, 2])


@pytest.mark.parametrize("name", ["vllm.BLHNC", "mla.656", "llama_cpp.q4_0", "aiter.shuffle_fp8"])
def test_a_watch_poisons_what_is_free_and_sees_what_is_written_there(
    name: str, kv_watch: Callable[..., Watch]
) -> None:
    made, buffer = filled(name)
    original = buffer.copy()
    watch = kv_watch(buffer, TABLE, LENGTHS, format=made)
    used = audit(buffer, TABLE, LENGTHS, format=made).used
    field = made.parts[0]
    for page, slot in ((3, 0), (5, 5), (5, 4)):
        at = field.address(layer=1, page=page, slot=slot) // 8
        assert (buffer[at] == 0xFF) == (not used[page, slot])
        assert used[page, slot] or original[at] != 0xFF
    watch.step(TABLE, LENGTHS)
    token = [field for field in made.fields if "slot" in field.axes]
    for one in token:  # a step of sequence 1: slot 5 of page 5
        rest = [np.arange(one.extent(axis))[:: one.group(axis)] for axis in one.axes if axis not in ("page", "slot")]
        where = dict(zip([a for a in one.axes if a not in ("page", "slot")], np.ix_(*rest), strict=True))
        at = np.asarray(one.address(page=5, slot=5, **where)).ravel() // 8
        index = (at[:, None] + np.arange(max(one.type.bits // 8, 1))).ravel()
        buffer[index] = original[index]
    watch.step(TABLE, [20, 38, 0])
    with pytest.raises(AuditFailure, match=r"unwritten|poison"):
        watch.step(TABLE, [20, 39, 0])  # slot 6 has a token that nobody wrote
    put(made, buffer, field.name, 0x11, layer=0, page=3, slot=2)
    with pytest.raises(AuditFailure, match=f"stray: {field.name} of layer 0, page 3, slot 2 was written"):
        watch.step(TABLE, [20, 38, 0])
    put(made, buffer, field.name, 0xFF, layer=0, page=3, slot=2)


@pytest.mark.parametrize("text", [
    "page:6 slot:16 dim/2:4 -dim:2 k.s4", "page:6 -slot:16 (-dim:8 k.e2m1, pad:3)",
    "-page:6 dim/2:4 slot:16 dim:2 k.u4",
])
def test_half_bytes_in_any_direction_are_poisoned_and_seen(text: str) -> None:
    made = Format.parse(text)
    cache = made.encode(np.ones(made.shape("k"), np.float32))
    watch = Watch(cache, TABLE, LENGTHS, format=made)
    used = audit(cache, TABLE, LENGTHS, format=made).used
    assert np.array_equal((made.unpack(cache)["k"] == 15).all(-1), ~used)
    at = made.where("k", page=3, slot=7, dim=5)
    cache[at] = 0
    with pytest.raises(AuditFailure, match="stray: k of page 3, slot 7 was written"):
        watch.step(TABLE, LENGTHS)


def test_a_page_that_is_freed_is_poisoned() -> None:
    cache = np.ones((6, 16, 2, 8), np.float32)
    watch = Watch(cache, [[4, 1]], [32])
    watch.step([[4, -1]], [10])
    assert np.isnan(cache[1]).all()
    assert np.isnan(cache[4, 10:]).all()
    assert (cache[4, :10] == 1).all()


@pytest.mark.timing
def test_a_gigabyte_takes_less_than_five_seconds() -> None:
    """Of a quarter of it, with the time of this process."""
    made = known_format("vllm.blocks_first", layers=8, pages=512, page_size=16)
    cache = np.full(made.nbytes, 0x11, np.uint8)
    start = time.process_time()
    assert audit(cache, np.arange(512).reshape(8, 64), np.full(8, 1020), format=made)
    assert (time.process_time() - start) * 4 < 5
    assert made.nbytes == 2**28
