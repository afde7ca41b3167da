"""The twins of KV store: the static check on the real sources, with faults seeded in them, and the lockstep run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from seeded_faults import is_found
from store_cases import Step, Store

from kvlab.attention import kv_store, kv_store_paged
from kvlab.attention.kv_store.config import StoreProblem, choose_config
from kvlab.attention.kv_store.emulator import sequence_of
from kvlab.mirror import check, lockstep


def test_the_twins_mirror_each_other() -> None:
    report = check("kv_store")
    assert report.ok, str(report)
    ((name, kernel, _),) = report.twins
    steps = [step.marker.name for step in kernel.steps]
    assert (name, steps) == ("append", [
        "setup", "load", "place", "rope_v", "quantise_v", "store_v", "rope_k", "quantise_k", "store_k",
    ])


FAULTS = {
    "a word of a marker": ("emulator", "#: rope_v -> v    where V is the roped side", "#: rope_v -> v    where V is"),
    "a name of a marker": ("kernel", "#: load -> k, v, k_scale", "#: fetch -> k, v, k_scale"),
    "an output left out": ("kernel", "#: quantise_v -> v, v_scale ", "#: quantise_v -> v "),
    "a step more": ("emulator", "    k_from = source", "    #: odd -> k_from\n    k_from = source"),
    "a step left out": ("kernel", "    #: rope_k -> k    where K is the roped side\n", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found(fault: str) -> None:
    assert is_found("kv_store", "append", *FAULTS[fault])


CASES = [
    Store(),
    Store(tokens=20, heads=3, D=(80, 48), page=5, source="fp16", cache="fp16"),
    Store(source="fp32", cache="fp32", rope=24, D=(80, 80), heads=3, interleaved=True),
    Store(source="bf16", cache="fp8", rope=64, scale="own", granularity=32),
    Store(cache="fp8", scale="heads", heads=3, source="fp16"),
    Store(tokens=7, heads=1, D=(512, 64), page=64, storage="rows"),
]


#: 700 sequences, of which most are empty: more than are compared at a time
MANY = Step((1, 0, 2, 1, 0, 0, 1) * 100, (0, 0, 0, 2, 0, 1, 0) * 100, heads=1, D=16, page=2)


def arguments(call: Any) -> dict[str, Any]:
    return {**dict(zip(("k", "v", "k_cache", "v_cache", "tables"), call.arrays, strict=True)), **call.named()}


@pytest.mark.interpreter
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lockstep_by_slots(case: Store) -> None:
    """Every output of every step is the same, bit for bit, between the interpreted kernel and the emulator."""
    x = case.build()
    call = kv_store_paged.planned(x.k, x.v, x.k_cache, x.v_cache, x.slots, **x.more)
    result = lockstep("kv_store", arguments(call))
    assert result.ok, str(result)
    assert max(row.distance.absolute.max() for row in result.rows if row.distance is not None) == 0


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "step", [Step((5, 0, 3), (3, 1, 4)), Step((5, 2, 0), (3, 1, 4), padded=True), Step((2,) * 40, (1, 0) * 20, page=2),
             MANY],
    ids=["few", "padded", "40 sequences", "700 sequences"],
)
def test_lockstep_by_tables(step: Step) -> None:
    k, v = step.tokens()
    k, v = (np.nan_to_num(x.astype(np.float32)).astype(x.dtype) for x in (k, v))
    call = kv_store.planned(k, v, step.paged(), 1, **step.where())
    result = lockstep("kv_store", arguments(call))
    assert result.ok, str(result)
    assert (call.plan.explanation.config.BITS > 0) == (step is MANY)


@pytest.mark.parametrize("batch", [0, 1, 2, 16, 17, 255, 256, 257, 512, 513, 1000, 4096, 100_000])
def test_the_search_finds_each_tokens_sequence(batch: int) -> None:
    """Rests on the definition: as many sequences end at a token or before; also past the last, and where all are
    empty. It takes one comparison of the stretches' ends, and then no more steps than halve one.
    """
    rng, problem = np.random.default_rng(batch), StoreProblem(8, 1, (16, 16), (16, 16), (2, 2))
    config = choose_config(problem, form="ragged", page_size=16, batch=batch)
    assert config.BB << config.BITS >= batch
    assert config.BB <= 256
    assert config.BITS == max(0, int(np.ceil(np.log2(max(batch, 1) / 256))))
    for lengths in (rng.integers(0, 3, batch), np.zeros(batch, np.int64), (rng.random(batch) < 0.01) * 7):
        where = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        token = np.arange(where[-1] + 3, dtype=np.int32)
        found = sequence_of(token, where, batch, config.BB, config.BITS)
        assert found.tolist() == np.searchsorted(where[1:], token, side="right").tolist()


def test_checks_are_not_part_of_the_launch() -> None:
    """What the twins are run on went through the same checks as a call of a user."""
    x = CASES[0].build()
    with pytest.raises(ValueError, match="slot_mapping"):
        kv_store_paged.planned(x.k, x.v, x.k_cache, x.v_cache, x.slots[:-1])
