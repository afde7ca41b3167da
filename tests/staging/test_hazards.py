"""The record of hazards against an oracle that draws the graph of events, and what its messages say."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.hardware import BarrierDeadlock
from kvlab.memory import Memory
from kvlab.staging import Hazard, Hazards, Timeline
from kvlab.staging.record.footprint import ByteCells

WARPS, BYTES = 3, 6


class Graph:
    """Every event is a node with all that happens before it; two accesses are ordered if one is among the other's.

    Rests on the definition of happens-before: program order of a warp, barriers, and the wait that completes a copy.
    """

    def __init__(self) -> None:
        self.count = itertools.count()
        self.before: list[set[int]] = [set() for _ in range(WARPS)]  # of the next event of each warp
        self.groups: list[list[list[int]]] = [[[]] for _ in range(WARPS)]  # copies of each warp, group by group
        self.accesses: list[tuple[int, int, int, bool]] = []  # node, first and last byte, whether it writes
        self.last: dict[int, list[tuple[int, bool]]] = {byte: [] for byte in range(BYTES)}

    def access(self, warp: int, first: int, end: int, writes: bool, flies: bool = False) -> bool:
        """Whether it is ordered after all that it must be ordered after."""
        node, ordered = next(self.count), True
        for byte in range(first, end):
            clash = [other for other, wrote in self.last[byte] if wrote or writes]
            ordered = ordered and all(other in self.before[warp] for other in clash)
            if writes:
                self.last[byte] = []
            self.last[byte].append((node, writes))
        if flies:
            self.groups[warp][-1].append(node)
        else:
            self.before[warp].add(node)
        return ordered

    def wait(self, warp: int, n: int) -> None:
        done = self.groups[warp][: max(len(self.groups[warp]) - 1 - n, 0)]
        self.before[warp].update(node for group in done for node in group)

    def barrier(self) -> None:
        union = set().union(*self.before)
        self.before = [set(union) for _ in range(WARPS)]


ranges = st.tuples(st.integers(0, BYTES - 1), st.integers(1, BYTES)).map(lambda x: (x[0], min(x[0] + x[1], BYTES)))
statements = st.one_of(
    st.tuples(st.sampled_from(["read", "write", "copy"]), st.integers(0, WARPS - 1), ranges),
    st.tuples(st.just("wait"), st.integers(0, WARPS - 1), st.integers(0, 1)),
    st.tuples(st.just("commit"), st.integers(0, WARPS - 1), st.none()),
    st.tuples(st.just("barrier"), st.just(0), st.none()),
)


def state(hazards: Hazards, graph: Graph, statement: tuple[str, int, Any]) -> bool:
    """State it to both; what the graph says of it."""
    what, warp, more = statement
    if what in ("read", "write", "copy"):
        ordered = graph.access(warp, *more, writes=what != "read", flies=what == "copy")
        at = hazards.region(more[0], more[1] - more[0], (warp,))
        {"read": hazards.read, "write": hazards.write, "copy": hazards.copy_async}[what](at, what)
        return ordered
    if what == "wait":
        hazards.wait_group(more, (warp,))
        graph.wait(warp, more)
    elif what == "commit":
        hazards.commit_group((warp,))
        graph.groups[warp].append([])
    else:
        hazards.barrier()
        graph.barrier()
    return True


@settings(max_examples=400, deadline=None)
@given(st.lists(statements, max_size=25))
def test_what_is_ordered_is_what_the_graph_of_events_orders(program: list[tuple[str, int, Any]]) -> None:
    hazards, graph = Hazards(Memory(BYTES), WARPS), Graph()
    for statement in program:
        before = (list(graph.before), {byte: list(x) for byte, x in graph.last.items()})
        try:
            assert state(hazards, graph, statement), statement
        except Hazard:
            graph.before, graph.last = before
            assert not graph.access(statement[1], *statement[2], writes=statement[0] != "read")
            return


def test_every_byte_counts() -> None:
    """Rests on arithmetic: two warps that write neighbouring bytes do not meet; one byte further they do."""
    hazards = Hazards(Memory(64), warps=2)
    hazards.write(hazards.region(0, 33, (0,)), "left")
    hazards.write(hazards.region(33, 31, (1,)), "right")
    with pytest.raises(Hazard) as caught:
        hazards.read(hazards.region(30, 4, (1,)), "both")
    assert caught.value.byte_range == (30, 33)
    assert (caught.value.earlier.what, caught.value.earlier.warp, caught.value.later.warp) == ("left", 0, 1)


@pytest.mark.parametrize(
    "arch, missing",
    [("sm_80", "cp.async.commit_group, then cp.async.wait_group in warp 1"), ("gfx950", "s_waitcnt vmcnt in warp 1")],
)
def test_words_of_the_machine(arch: str, missing: str) -> None:
    hazards = Hazards(Memory(64, name="LDS"), warps=2, arch=arch)
    at = hazards.region(0, 64, (1,))
    hazards.copy_async(at, "k copy", 0, instructions=None if arch == "sm_80" else [0, 4])
    with pytest.raises(Hazard, match="LDS, bytes \\[0, 64\\): k read by warp 1, stage 0, of what k copy") as caught:
        hazards.read(at, "k read", 0)
    assert caught.value.missing == missing


@pytest.mark.parametrize("left", [1, 2, 3])
@pytest.mark.parametrize("arch, wait", [("sm_80", "cp.async.wait_group"), ("gfx950", "s_waitcnt vmcnt")])
def test_a_wait_that_lets_too_much_be_in_flight_is_told(arch: str, wait: str, left: int) -> None:
    """Rests on the meaning of wait(n): of 3 copies, all but the newest n are done. The first of 3 is read: <= 2."""
    hazards = Hazards(Memory(96), warps=2, arch=arch)
    parts = [hazards.region(32 * i, 32, (1,)) for i in range(3)]
    for stage, part in enumerate(parts):
        hazards.copy_async(part, "k copy", stage, instructions=None if arch == "sm_80" else [0, 1])
        if arch == "sm_80":
            hazards.commit_group()
    hazards.wait_group(left)
    for stage in range(3 - left):
        hazards.read(parts[stage], "k read", stage)
    with pytest.raises(Hazard) as caught:
        hazards.read(parts[3 - left], "k read", 3 - left)
    told = f"{wait} in warp 1 leaves {left} in flight, <= {left - 1} needed"
    assert caught.value.too_weak == told
    assert str(caught.value).endswith(f"still brings; {told}")
    assert caught.value.missing == f"{wait} in warp 1"


def test_a_wait_before_the_copy_is_no_wait_for_it() -> None:
    hazards = Hazards(Memory(64), warps=1)
    hazards.wait_group(0)
    hazards.copy_async(hazards.region(0, 64), "k copy", 0)
    hazards.commit_group()
    with pytest.raises(Hazard, match=r"missing: cp\.async\.wait_group in warp 0"):
        hazards.read(hazards.region(0, 64), "k read", 0)


@pytest.mark.parametrize("of", ["wgmma", "store"])
def test_a_weak_wait_for_reads_is_told(of: str) -> None:
    """The same of wgmma groups and of bulk stores: memory that they still read is overwritten, or the CTA ends."""
    hazards = Hazards(Memory(64), warps=1)
    at = hazards.region(0, 64)
    hazards.write(at, "p write")
    hazards.fence_async()
    for _ in range(2):
        hazards.read_async(at, "p wgmma") if of == "wgmma" else hazards.store_bulk(at, "p store")
    hazards.wait_mma(1) if of == "wgmma" else hazards.wait_store(1)
    name = "wgmma.wait_group" if of == "wgmma" else "cp.async.bulk.wait_group.read"
    for late in (lambda: hazards.write(at, "p write"), hazards.finish):
        with pytest.raises(Hazard, match=rf"; {name} in warp 0 leaves 1 in flight, <= 0 needed"):
            late()


def test_vmcnt_counts_instructions() -> None:
    """Rests on the ISA: vmcnt(n) lets the n newest loads of the wave be in flight."""
    hazards = Hazards(Memory(128), warps=1, arch="gfx950")
    old, new = hazards.region(0, 64), hazards.region(64, 64)
    hazards.copy_async(old, "K", 0, instructions=[4])
    hazards.copy_async(new, "V", 1, instructions=[3])
    hazards.wait_group(3)
    hazards.read(old, "K read", 0)
    with pytest.raises(Hazard, match="of what V by warp 0, stage 1, still brings"):
        hazards.read(new, "V read", 1)


def test_a_timeline_tells_when_copies_land() -> None:
    line = Timeline()
    hazards = Hazards(Memory(64), warps=2, timeline=line)
    halves = hazards.footprint(np.array([[[0], [32]]]), 32)
    hazards.copy_async(halves, "k copy", 0)
    hazards.commit_group()
    hazards.wait_group(0, (0,))
    assert [event.kind for event in line] == ["copy", "commit", "wait"]
    hazards.wait_group(0, (1,))
    assert [tuple(event) for event in line][-1] == ("landed", "k copy", 0, (0, 1), 64)


def test_the_end() -> None:
    hazards = Hazards(Memory(64), warps=2)
    hazards.copy_async(hazards.region(0, 64, (1,)), "k copy")
    with pytest.raises(Hazard, match=r"missing: cp.async.commit_group, then cp.async.wait_group in warp 1"):
        hazards.finish()
    hazards.commit_group()
    hazards.wait_group(0, (0,))
    with pytest.raises(Hazard, match=r"k copy by warp 1, is in flight at .*; missing: cp.async.wait_group in warp 1"):
        hazards.finish()
    hazards.wait_group(0)
    hazards.finish()
    hazards.barrier((0,))
    with pytest.raises(BarrierDeadlock, match=r"warps \[0\] wait at barrier 0 for ever: warps \[1\] do not arrive"):
        hazards.finish()


def test_accesses_outside_the_memory_are_left_to_it() -> None:
    hazards = Hazards(Memory(64, base=128), warps=2)
    at = hazards.footprint_inside(np.array([112, 128, 184, 192]), 16, np.array([0, 0, 1, 1]))
    assert (at.warps, at.moved.tolist()) == ((0,), [16, 0])


def test_bad_footprints() -> None:
    hazards = Hazards(Memory(64, base=128), warps=2)
    with pytest.raises(ValueError, match=r"bytes \[120, 136\) are not inside \[128, 192\)"):
        hazards.region(120, 16)
    with pytest.raises(ValueError, match=r"must be bytes and warps 0 to 1"):
        hazards.region(128, 16, (2,))
    with pytest.raises(ValueError, match=r"addresses has shape \(3, 4\): must be \[..., 2 warps, lanes\]"):
        hazards.footprint(np.zeros((3, 4), np.int64), 4)
    with pytest.raises(ValueError, match="warps is 40: must be 1 to 31"):
        Hazards(Memory(64), warps=40)


BAD = {
    r"warps is \(7,\): must be different ones of 0 to 1": lambda h: h.commit_group((7,)),
    r"warps is \(0, 0\): must be different": lambda h: h.mbarrier("full[0]").arrive((0, 0)),
    r"a wait for all but -1: must be 0 or more": lambda h: h.wait_group(-1),
    r"a wait for all but -2: must be 0 or more": lambda h: h.wait_mma(-2),
    r"a wait for all but -3: must be 0 or more": lambda h: h.wait_store(-3),
    r"instructions is \[1\]: must be a number for each": lambda h: h.copy_async(h.region(0, 64), "k", 0, [1]),
    r"warps \(0, 1\) of a bulk copy: must be one": lambda h: h.store_bulk(h.region(0, 64), "o store"),
    r"in other cells than those of memory": lambda h: h.read(Hazards(Memory(64), warps=2).region(0, 64), "k read"),
    r"cells of 32 bytes from 0 on and 2 warps: must be of 64": lambda h: Hazards(Memory(64), 2, cells=ByteCells(32, 2)),
}


@pytest.mark.parametrize("message", BAD)
def test_statements_that_make_no_sense(message: str) -> None:
    hazards = Hazards(Memory(64), warps=2)
    with pytest.raises(ValueError, match=message):
        BAD[message](hazards)
    hazards.finish()


def test_records_that_share_their_cells() -> None:
    """Rests on arithmetic: each memory has a past of its own, and follows when the partition becomes finer."""
    one = Hazards(Memory(64), warps=2)
    two = Hazards(Memory(64), warps=2, cells=one.cells)
    whole = [one.region(0, 64, (warp,)) for warp in (0, 1)]
    one.write(whole[0], "left")
    two.read(whole[1], "right")
    quarter = two.region(16, 16, (1,))
    with pytest.raises(Hazard) as caught:
        one.read(quarter, "quarter")
    assert caught.value.byte_range == (16, 32)
    two.read(quarter, "quarter")


def test_a_parity_tells_of_the_first_phase_that_lets_it_pass() -> None:
    """Rests on PTX's test_wait.parity: three arrivals where one is counted, so that three phases go by; who waits may
    have gone on after the first of them."""
    hazards = Hazards(Memory(64), warps=3)
    free = hazards.mbarrier("free[0]")
    for warp in (0, 1, 0):
        hazards.read(hazards.region(0, 64, (warp,)), "k read")
        free.arrive((warp,))
    free.wait(0, (2,))
    with pytest.raises(Hazard, match="k write by warp 2, may come before k read by warp 0"):
        hazards.write(hazards.region(0, 64, (2,)), "k write")


@pytest.mark.parametrize("rows", [(0, 64), (0, 32)], ids=["all", "a part"])
def test_equal_stores_are_equal_in_their_values(rows: tuple[int, int]) -> None:
    """Law: warps that put the same values may come in any order. One that puts others, of the same name and in a part
    of them, too, must know of every warp that did, also of one whose stores changed nothing.
    """
    hazards = Hazards(Memory(64), warps=2)
    for warp in (0, 1):
        hazards.write_equal(hazards.region(0, 64, (warp,)), "zeros", values=(0, 64))
    with pytest.raises(Hazard, match="zeros by warp 0, may come before zeros by warp 1, is done"):
        hazards.write_equal(hazards.region(*rows, (0,)), "zeros", values=rows if rows[1] < 64 else "others")
    hazards.barrier()
    hazards.write_equal(hazards.region(*rows, (0,)), "zeros", values=rows)
