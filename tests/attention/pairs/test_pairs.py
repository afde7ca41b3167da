"""Every operation with features combined in pairs, each operand with strides of its own, against what it is by
definition, written in float64: the reference, the emulator of every architecture, the interpreted kernel.

The bound of an error follows from what is rounded (see ``formula`` and ``kv_store``). What must not be read is NaN or
no page, what must not be written has canaries.
"""

from __future__ import annotations

from typing import Any

import pytest
from pairs.covering import Table
from pairs.operations import CASES, TABLES

EVERY = [pytest.param(build, id=f"{op}-{row}") for op, cases in CASES.items() for row, build in cases]


@pytest.mark.parametrize("build", EVERY)
def test_emulator(build: Any) -> None:
    build().check("emulator")


@pytest.mark.parametrize("op", CASES)
def test_reference(op: str) -> None:
    for _, build in CASES[op]:
        build().check("reference")


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.parametrize("build", EVERY)
def test_kernel(build: Any) -> None:
    build().check("triton")


@pytest.mark.parametrize("name", TABLES)
def test_every_pair_that_may_meet_does(name: str) -> None:
    """Rests on counting."""
    table: Table = TABLES[name]
    found = set()
    for row in table.rows():
        levels = sorted(table.levels_of(row).items())
        found |= {(a, b) for i, a in enumerate(levels) for b in levels[i + 1 :]}
        assert table.obeys(row)
    assert found == table.pairs()


@pytest.mark.parametrize("op", CASES)
def test_strides_tell_the_operands_apart(op: str) -> None:
    """In every case no two operands have the same strides, and K and V, and their scales, differ along every axis."""
    for row, build in CASES[op]:
        call = build()
        every = call.operands | call.written
        strides = {name: tuple(s // x.array.itemsize for s in x.array.strides) for name, x in every.items()}
        some = [s for s in strides.values() if len(s) > 1]
        assert len(set(some)) == len(some), (str(row), strides)
        for one, other in (("k", "v"), ("k_scale", "v_scale"), ("k_cache", "v_cache"), ("cos", "sin")):
            pair = strides.get(one, ()), strides.get(other, ())
            if len(pair[0]) == len(pair[1]) > 1:
                assert all(a != b for a, b in zip(*(p[:-1] for p in pair), strict=True)), (str(row), one, other, pair)


@pytest.mark.parametrize("op", CASES)
def test_operands_stay_as_they_are(op: str) -> None:
    for _, build in CASES[op][:6]:
        call = build()
        before = {name: x.buffer.tobytes() for name, x in call.operands.items()}
        call.check("emulator")
        assert {name: x.buffer.tobytes() for name, x in call.operands.items()} == before
