"""Schedules. Laws: every key block of every tile is done once, by programs that have equal shares; the lengths say how
sums are ordered, and with units of a fixed size a sequence's own length alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from kvlab.attention import Schedule, plan
from kvlab.attention.features.intervals import UNLIMITED
from kvlab.attention.schedule import ScheduleConfig

LENGTHS = st.one_of(st.integers(0, 70), st.integers(0, 3000), st.sampled_from([0, 1, 15, 16, 17, 64, 4096, 20_000]))


@st.composite
def calls(draw: Any) -> dict[str, Any]:
    """The arguments of a call of ``plan``: decode, drafts, chunks and mixed, on few and many programs."""
    lengths = draw(st.lists(LENGTHS, min_size=1, max_size=12))
    uniform = draw(st.booleans())
    new = draw(st.integers(1, 16)) if uniform else [draw(st.integers(0, min(n, 300))) for n in lengths]
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 4, 8]))
    call = {"seq_lens": lengths, "new_tokens": new, "q_heads": kv_heads * group, "kv_heads": kv_heads}
    call["window"] = draw(st.sampled_from([None, None, 1, 100]))
    BM = draw(st.sampled_from([16, 32, 128]))
    call["config"] = ScheduleConfig(
        draw(st.integers(1, 60)), BM, draw(st.integers(1, 3)), draw(st.sampled_from([16, 64])),
        draw(st.integers(0, 5)), draw(st.integers(1, 20)), draw(st.sampled_from([0, 0, 4, 30])),
        heads=draw(st.sampled_from([1, kv_heads])),
    )
    return call


def visible(made: Schedule, sequence: int, tile: int, window: int | None) -> tuple[int, int]:
    """The key blocks that the rows of a tile see, from each row's own keys."""
    n, tokens, config = int(made.num_keys[sequence]), int(made.tokens[sequence]), made.config
    row = np.arange(tile * config.BM, min((tile + 1) * config.BM, tokens * made.problem.group))
    position = n - tokens + row // made.problem.group
    keys = np.arange(n)
    seen = keys <= position[:, None]
    if window is not None:
        seen &= keys > position[:, None] - window
    blocks = np.flatnonzero(seen.any(0)) // config.block
    return (int(blocks.min()), int(blocks.max()) + 1) if blocks.size else (0, 0)


@settings(max_examples=120, deadline=None)
@given(calls())
def test_every_key_block_of_every_tile_is_done_once(call: dict[str, Any]) -> None:
    made = plan(**call)
    found: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for unit in made.units:
        found.setdefault((unit["sequence"], unit["kv_head"], unit["tile"]), []).append((unit["first"], unit["last"]))
    for sequence, tokens in enumerate(made.tokens):
        for tile in range(-(-int(tokens) * made.problem.group // made.config.BM)):
            first, last = visible(made, sequence, tile, call["window"])
            for kv_head in range(made.problem.kv_heads):
                ranges = sorted(found.pop((sequence, kv_head, tile), []))
                ends = [first, *(end for _, end in ranges)]
                assert [begin for begin, _ in ranges] == ends[:-1]
                assert ends[-1] == last or first == last
    assert not found


@settings(max_examples=120, deadline=None)
@given(calls())
def test_programs_have_equal_shares(call: dict[str, Any]) -> None:
    """No team takes more than its share: of the cost of all, ``least`` at least; a unit of a fixed size, and the
    beginning of one that another has cut, come on top.
    """
    made, config = plan(**call), call["config"]
    assert made.share == max(-(-made.total // made.teams), config.least)
    longest = int((made.units["last"] - made.units["first"]).max(initial=0)) + config.overhead if config.unit else 0
    assert made.costs.max() <= made.share + config.overhead + longest
    assert made.units["program"].max(initial=0) < made.programs
    assert made.busiest >= 1
    assert len(made.costs) == made.programs


@settings(max_examples=120, deadline=None)
@given(calls())
def test_partial_results_have_places_of_their_own_and_an_order(call: dict[str, Any]) -> None:
    made = plan(**call)
    units = made.units[made.units["slot"] >= 0]
    places = [tuple(unit) for unit in units[["slot", "kv_head"]].tolist()]
    lanes = units["tile"] % made.config.together
    assert len({(*place, lane) for place, lane in zip(places, lanes.tolist(), strict=True)}) == len(units)
    assert units["slot"].max(initial=0) < max(made.slots, 1)
    for sequence, tile in {(int(u["sequence"]), int(u["tile"])) for u in made.units}:
        own = made.units[(made.units["sequence"] == sequence) & (made.units["tile"] == tile)]
        own = own[own["kv_head"] == 0]
        order = made.order_of(sequence, tile)
        assert order.tolist() == own[np.argsort(own["first"])]["slot"][own["slot"] >= 0].tolist()
        assert (own["slot"] >= 0).all() or len(own) == 1


@settings(max_examples=60, deadline=None)
@given(calls(), st.integers(1, 40))
def test_the_same_lengths_are_cut_alike(call: dict[str, Any], unit: int) -> None:
    """Twice the same call; and with units of a fixed size, each sequence alone, on another number of programs."""
    one, other = plan(**call), plan(**call)
    assert np.array_equal(one.units, other.units)
    assert np.array_equal(one.list, other.list)
    call["config"] = replace(call["config"], unit=unit)
    made = plan(**call)
    for sequence, n in enumerate(call["seq_lens"]):
        new = call["new_tokens"] if isinstance(call["new_tokens"], int) else [call["new_tokens"][sequence]]
        alone = plan(**call | {"seq_lens": [n], "new_tokens": new, "config": replace(call["config"], programs=7)})
        names = ["kv_head", "tile", "first", "last"]
        both = made.units[made.units["sequence"] == sequence], alone.units
        assert np.array_equal(*(np.sort(units[names]) for units in both))


@pytest.mark.parametrize("batch", [1, 64, 4096])
def test_one_of_a_million_keys_is_shared_by_all(batch: int) -> None:
    """Whatever the batch; and sequences without a key have no unit."""
    lengths = np.full(batch, 500)
    lengths[0], lengths[1::3] = 1_000_000, 0
    made = plan(lengths, q_heads=32, kv_heads=8)
    assert made.busiest < 1.03
    assert set(np.unique(made.units["sequence"])) == set(np.flatnonzero(lengths))
    assert len(made.order_of(0)) > (40 if batch < 100 else 10)


def test_nothing_to_do() -> None:
    made = plan([0, 0], [0, 3], q_heads=4, kv_heads=2)
    assert (len(made.units), made.busiest, made.total, made.costs.max()) == (0, 1.0, 1, 0)
    assert plan([40], 0, q_heads=4, kv_heads=2).units.size == 0


def test_sequences_of_another_kind_are_left_out() -> None:
    """A mixed batch as two lists: those of up to 16 new tokens, and the others."""
    lengths, new = np.array([900, 4000, 70, 5]), np.array([1, 512, 16, 0])
    config = ScheduleConfig(132)
    few, many = (plan(lengths, new, q_heads=8, kv_heads=2, config=replace(config, fewest=a, most=b))
                 for a, b in ((1, 16), (17, UNLIMITED)))
    assert set(few.units["sequence"]) == {0, 2}
    assert set(many.units["sequence"]) == {1}


def test_batch_invariant_units_have_2048_keys_and_a_sequence_at_most_64() -> None:
    made = plan([5000, 300_000], q_heads=4, kv_heads=1, batch_invariant=True)
    size = made.units["last"] - made.units["first"]
    short, long = (size[made.units["sequence"] == i] for i in (0, 1))
    assert short.tolist() == [128, 128, 57]
    assert len(long) == 64
    assert set(long[:-1]) == {293}  # 18750 key blocks in 64


@pytest.mark.parametrize("change, words", [
    ({"seq_lens": []}, "seq_lens has shape"),
    ({"seq_lens": [[3]]}, "seq_lens has shape"),
    ({"seq_lens": [1.5]}, "seq_lens has dtype float64: must be integers"),
    ({"seq_lens": None}, "seq_lens is None: must be integers"),
    ({"seq_lens": [[3], [3, 4]]}, r"seq_lens is \[\[3\], \[3, 4\]\]: must be integers"),
    ({"seq_lens": torch.tensor([True])}, "seq_lens: dtype is torch.bool"),
    ({"seq_lens": torch.empty(1, dtype=torch.int32, device="meta")}, "seq_lens is on meta"),
    ({"seq_lens": np.array([2**63], np.uint64)}, "seq_lens is 9223372036854775808: must be integers of"),
    ({"seq_lens": [4, -1]}, "seq_lens has -1: must be integers from 0"),
    ({"new_tokens": [1, 2]}, "new_tokens has shape"),
    ({"new_tokens": -1}, "new_tokens has -1"),
    ({"new_tokens": (np.array([0, 4]), 4, 4, 4)}, r"new_tokens is \(array\(\[0, 4\]\), 4, 4, 4\): must be integers"),
    ({"new_tokens": ([0, 3], 4)}, r"cu_seqlens_q is \[0, 3\]: must be from 0 to 4"),
    ({"new_tokens": (np.array([0, 4]), torch.tensor(4))}, r"total of new_tokens is a tensor \(\)"),
    ({"new_tokens": (np.array([0, 4]), -1)}, "total of new_tokens is -1: must be an integer of at least 0"),
    ({"new_tokens": 10**9, "q_heads": 6}, "new_tokens has 1000000000, 3000000000 rows of a KV head: must be at most"),
    ({"q_heads": 3}, "q_heads is 3: must be a multiple of kv_heads 2"),
    ({"kv_heads": 0}, "kv_heads is 0: must be an integer above 0"),
    ({"head_dim": True}, "head_dim is True"),
    ({"head_dim": 577}, "head_dim is 577: must be 1 to 576"),
    ({"itemsize": 0.25}, "itemsize is 0.25: must be an integer above 0, or 0.5 of 4 bits"),
    ({"programs": 0}, "programs is 0"),
    ({"unit": -3}, "unit is -3"),
    ({"window": 0}, "window is 0"),
    ({"unit": 4, "config": ScheduleConfig(4)}, "unit beside config"),
    ({"seq_lens": [10**9] * 40}, "the cost of seq_lens is"),
    ({"new_tokens": (np.array([0, 3]), 4)}, r"cu_seqlens_q is \[0, 3\]: must be from 0 to 4"),
    ({"new_tokens": (np.array([0.0, 4]), 4)}, "cu_seqlens_q has dtype float64"),
    ({"new_tokens": (np.array([0, 4]), 4, 3)}, "max_seqlen_q of new_tokens is 3: must be at least 4"),
    ({"seq_lens": (np.array([40]), 0)}, "max_keys of seq_lens is 0"),
    ({"seq_lens": (np.array([40]), 39)}, "seq_lens has 40: must be at most the max_keys beside it, 39"),
    ({"causal": None}, "causal is None: must be True or False"),
    ({"config": 3}, "config is 3: must be a ScheduleConfig"),
])
def test_bad_input(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(**{"seq_lens": [40], "q_heads": 4, "kv_heads": 2} | change)


@pytest.mark.parametrize("call, like", [
    ({"seq_lens": ([900, 40], 1000), "new_tokens": ([0, 1, 3], 3)},
     {"seq_lens": (np.array([900, 40]), 1000), "new_tokens": (np.array([0, 1, 3]), 3)}),
    ({"seq_lens": torch.tensor([900, 40]), "new_tokens": ([0, 1, 3], 3, 2)}, {"new_tokens": [1, 2]}),
    ({"q_heads": np.int64(4), "kv_heads": np.int32(2), "head_dim": np.uint8(128)}, {}),
    ({"new_tokens": (np.zeros(3, np.int32), 0)}, {"new_tokens": [0, 0]}),
], ids=["lists", "a list beside a tensor", "numbers of NumPy", "no new token"])  # fmt: skip
def test_other_forms_of_one_plan(call: dict[str, Any], like: dict[str, Any]) -> None:
    one, other = (plan(**{"seq_lens": [900, 40], "q_heads": 4, "kv_heads": 2} | form) for form in (call, like))
    assert np.array_equal(one.list, other.list)
    assert one.facts == other.facts


def test_a_graph_of_torch_leaves_it_out() -> None:
    """A plan that is made in a compiled function breaks the graph; of tensors without values it is refused."""
    def step(lens: torch.Tensor) -> Any:
        return plan(lens + 1, q_heads=4, kv_heads=2).list * 1

    lens = torch.tensor([900, 40])
    torch._dynamo.reset()
    assert torch.equal(torch.compile(step, backend="eager")(lens), step(lens))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="kvlab runs as it is, outside of the graph"):
        torch.compile(step, backend="eager", fullgraph=True)(lens)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match="seq_lens is a FakeTensor: must be"):
        step(mode.from_tensor(lens))


def test_a_sequence_that_is_not_there_has_no_order() -> None:
    with pytest.raises(ValueError, match="sequence is 1: must be 0 to 0"):
        plan([40], q_heads=4, kv_heads=2).order_of(1)
