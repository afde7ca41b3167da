"""The twins of Hopper's kernels meet at the same places: rests on the texts of both.

Where a wait is true already, no run of the emulator misses it; the kernel, which is not interpreted, is not run at all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from seeded_faults import HOPPER, sources_of

from kvlab.mirror import Operation, check_sources
from kvlab.mirror.meetings import meetings_of
from kvlab.mirror.source import read_side

every = pytest.mark.parametrize("op", ["mha_prefill", "mha_decode", "mla_decode"])
SIDES = {"kernel": "hopper_steps", "emulator": "hopper_cta"}


def partitions(op: str) -> dict[str, str]:
    """The functions of Hopper's twin."""
    (twin,) = Operation.load(op).pick("hopper")
    return {side: getattr(twin, side).partition(":")[2] for side in SIDES}


def without(text: str, places: set[int]) -> str:
    """A module's text with ``pass`` instead of the statements that stand on these lines."""
    lines = text.splitlines()
    for s in ast.walk(ast.parse(text)):
        if isinstance(s, ast.Expr | ast.Assign) and places & set(range(s.lineno, (s.end_lineno or s.lineno) + 1)):
            empty = [""] * ((s.end_lineno or s.lineno) - s.lineno)
            lines[s.lineno - 1 : s.end_lineno] = [" " * s.col_offset + "pass", *empty]
    return "\n".join(lines) + "\n"


@every
@pytest.mark.parametrize("side", SIDES)
def test_a_wait_or_an_arrival_of_one_twin_alone_is_found(op: str, side: str) -> None:
    """Each is reported, with what stands before and behind it in its step or without."""
    sources, names = sources_of(op, HOPPER), partitions(op)
    assert check_sources(sources["kernel"], sources["emulator"], *names.values()).ok
    places = [meeting for step in read_side(sources[side], names[side]).steps for meeting in step.meetings]
    assert len(places) >= 2
    for some in (places[::2], places[1::2]):
        changed = sources | {side: without(sources[side], {place.line for place in some})}
        found = check_sources(changed["kernel"], changed["emulator"], *names.values())
        said = [violation.message for violation in found.violations]
        assert all(any(f"'{place.text}'" in words for words in said) for place in some)


def methods(op: str, file: str) -> Iterator[tuple[str, list[str]]]:
    """What each function of a file does in a role's stead: its waits, arrivals and fences, without the headers around
    them and the bytes that it expects. The compiler has warps meet behind a wait for stores; waits for products are
    the shared CTA's.
    """
    for node in ast.walk(ast.parse(sources_of(op, (file, file))["kernel"])):
        if isinstance(node, ast.FunctionDef) and node.name not in ("__init__", "wait_store", "wait_mma"):
            texts = [m.text.rpartition(": ")[2] for statement in node.body for m in meetings_of(statement)]
            pairs = zip(["", *texts], texts, strict=False)
            if found := [
                text.split()[0] if text.startswith("expect") else text
                for before, text in pairs
                if (before, text) != ("wait for stores", "meet")
            ]:
                yield node.name, found


@every
def test_the_steps_that_roles_call_meet_alike(op: str) -> None:
    kernel, emulator = (dict(methods(op, file)) for file in SIDES.values())
    assert kernel == emulator
    assert kernel


@pytest.mark.parametrize(
    "old, new",
    [
        ("yield cta.r_full[b], (it // C.NB) & 1", "yield cta.r_free[b], (it // C.NB) & 1"),
        ("yield cta.l_free[b], ((it // C.NB) & 1) ^ 1", "yield cta.l_free[b], (it // C.NB) & 1"),
        ("cta.wait_mma(me, PARTS)", "cta.wait_mma(me, 0)"),
        ("            if C.LATE:\n                cta.s_done", "            if C.MASKED:\n                cta.s_done"),
        ("cta.arrive(me, cta.q_free)", "cta.arrive(me, cta.q_full)"),
        ("expect_bytes(C.BN * (C.DV // 2) * 2", "expect_bytes(C.BN * C.DV * 2"),
    ],
    ids=["barrier", "phase", "products", "branch", "arrival", "bytes"],
)
def test_another_wait_is_found(old: str, new: str) -> None:
    sources, names = sources_of("mla_decode", HOPPER), partitions("mla_decode")
    assert old in sources["emulator"]
    found = check_sources(sources["kernel"], sources["emulator"].replace(old, new, 1), *names.values())
    assert len(found.violations) == 1
    assert "in the kernel, '" in found.violations[0].message
