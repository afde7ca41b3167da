"""Readers of LLVM IR and TTGIR, on small texts whose answers follow from the languages' definitions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvlab.xray.accesses import MemoryAccess, _pieces, accesses, joined
from kvlab.xray.cures import wider
from kvlab.xray.edges import Edge, allocations, edges
from kvlab.xray.findings import uncoalesced
from kvlab.xray.llir import IrLine, LaneValues, functions
from kvlab.xray.ttgir import read

IR = """
@global_smem = external addrspace(3) global [0 x i8], align 16

define ptx_kernel void @kernel(ptr addrspace(1) %0, i32 %1) local_unnamed_addr #0 !dbg !4 {
  %3 = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.x(), !dbg !12
  %4 = icmp samesign ult i32 %3, 8, !dbg !12
  br i1 %4, label %5, label %.lr.ph

5:                                                ; preds = %2
  %6 = getelementptr inbounds nuw float, ptr addrspace(3) @global_smem, i32 %3, !dbg !12
  tail call void asm sideeffect "st.shared.b32 [ $0 + 64 ], $1;", "r,r"(ptr addrspace(3) %6, i32 %3) #2, !dbg !12
  br label %.lr.ph

.lr.ph:                                           ; preds = %5, %2
  br label %7

7:                                                ; preds = %7, %.lr.ph
  %8 = phi i32 [ %11, %7 ], [ 256, %.lr.ph ]
  %9 = getelementptr [16 x i8], ptr addrspace(3) getelementptr (i8, ptr addrspace(3) @global_smem, i32 1024), i32 %3
  %10 = getelementptr i8, ptr addrspace(3) %9, i32 %8, !dbg !13
  %r = load <4 x i32>, ptr addrspace(3) %10, align 16, !dbg !13
  %11 = add nuw nsw i32 %8, 512
  %12 = zext nneg i32 %3 to i64
  %13 = getelementptr half, ptr addrspace(1) %0, i64 %12, !dbg !13
  %14 = load i16, ptr addrspace(1) %13, !dbg !13
  %15 = sext i16 %14 to i64
  %16 = getelementptr half, ptr addrspace(1) %0, i64 %15, !dbg !13
  tail call void asm sideeffect "@!$0 st.global.b16 [ $1 + 0 ], $2;", "b,l,h"(i1 %4, ptr addrspace(1) %16, i16 %14), !dbg !13
  %17 = icmp slt i32 %11, %1
  br i1 %17, label %7, label %18

18:
  ret void
}

!1 = !DIFile(filename: "mine.py", directory: "/home/me")
!2 = !DIFile(filename: "standard.py", directory: "/lib/site-packages/triton/language")
!4 = distinct !DISubprogram(name: "kernel", scope: !1, file: !1, line: 1, unit: !0)
!5 = distinct !DISubprogram(name: "sum", scope: !2, file: !2, line: 1, unit: !0)
!12 = !DILocation(line: 7, column: 3, scope: !4)
!13 = !DILocation(line: 291, column: 36, scope: !5, inlinedAt: !14)
!14 = !DILocation(line: 9, column: 5, scope: !4)
"""  # noqa: E501


def test_addresses_follow_from_the_text() -> None:
    """Guards of branches, first trips of loops, constant expressions, offsets in inline assembly, what is loaded."""
    made = functions(IR)[0]
    found = accesses(made, LaneValues(made, [1 << 40, 2048], 64, 32), "sm_90")
    store, load, read_, scatter = found
    thread = np.arange(64).reshape(2, 32)
    assert (store.instruction, store.depth, store.place) == ("st.shared.b32", 0, ((7, 3),))
    assert np.array_equal(store.addresses, 64 + 4 * thread)
    assert np.array_equal(store.active, thread < 8)
    assert (load.instruction, load.depth, load.place) == ("ld.shared.b128", 1, ((291, 36), (9, 5)))
    assert np.array_equal(load.addresses, 1024 + 256 + 16 * thread)
    assert load.active.all()
    assert (read_.instruction, read_.notes) == ("ld.global.b16", frozenset())
    assert (scatter.instruction, scatter.notes) == ("st.global.b16", {"data"})
    assert np.array_equal(scatter.active, thread >= 8)
    assert [made.line(access.place) for access in found] == [7, 9, 9, 9]


def test_an_index_that_is_widened_without_a_sign() -> None:
    """Below 0 it is near 2^32, as ``zext`` says; ``sext`` keeps the sign."""
    thread = np.arange(64).reshape(2, 32)
    for verb, indices in (("zext", (thread - 40) % 2**32), ("sext", thread - 40)):
        made = functions(IR.replace("%12 = zext nneg i32 %3", f"%s = sub i32 %3, 40\n  %12 = {verb} i32 %s"))[0]
        read_ = accesses(made, LaneValues(made, [1 << 40, 2048], 64, 32), "sm_90")[2]
        assert np.array_equal(read_.addresses, (1 << 40) + 2 * indices)


@pytest.mark.parametrize("size, reads", [("4", True), ("0", False), ("%14", True)])
def test_a_copy_has_lanes_of_its_predicate_and_bytes_of_its_size(size: str, reads: bool) -> None:
    """A size of 0 writes zeros; one that memory decides is taken for whole, and leaves the predicate as it is."""
    copy = ('tail call void asm sideeffect "@$3 cp.async.ca.shared.global [ $0 + 0 ], [ $1 + 0 ], 0x4, $2;", '
            f'"r,l,r,b"(ptr addrspace(3) %9, ptr addrspace(1) %0, i32 {size}, i1 %4), !dbg !13')
    made = functions(IR.replace("  %15 = sext", f"  {copy}\n  %15 = sext"))[0]
    access = accesses(made, LaneValues(made, [1 << 40, 2048], 64, 32), "sm_90")[3]
    wanted = np.arange(64).reshape(2, 32) < 8
    assert access.instruction == "cp.async.ca.4"
    assert access.zeros is not None
    assert np.array_equal(access.zeros, wanted)
    assert np.array_equal(access.active, wanted & reads)
    assert access.passes("sm_90")[0] == (8 if reads else 1)  # all read one word; they write eight banks


def test_a_line_that_is_not_understood_is_listed() -> None:
    made = functions(IR.replace("load <4 x i32>, ptr addrspace(3) %10, align 16", "load addrspace(3)"))[0]
    unread: list[str] = []
    assert len(accesses(made, LaneValues(made, [1 << 40, 2048], 64, 32), "sm_90", unread)) == 3
    assert unread == ["load addrspace(3)"]
    torn = functions(IR.replace("i32 1024), i32 %3", "i32 1022), i32 %3"))[0]
    for arch, lanes, name in (("sm_90", 32, "ld.shared.b128"), ("gfx942", 64, "ds_read_b128")):
        access = accesses(torn, LaneValues(torn, [1 << 40, 2048], 64, lanes), arch)[1]
        assert (access.instruction, access.notes, access.passes(arch)) == (name, {"unknown address"}, (0, 0))


def test_of_several_ways_on_the_first_is_taken() -> None:
    """As it stands in the text, whatever the numbers of the blocks; of a loop's it is the way in."""
    for ways, expected in (("[ 32, %5 ], [ 512, %2 ]", 32), ("[ 512, %2 ], [ 32, %5 ]", 512)):
        text = IR.replace("  br label %7\n\n7:", f"  %way = phi i32 {ways}\n  br label %7\n\n7:")
        made = functions(text.replace("[ 256, %.lr.ph ]", "[ %way, %.lr.ph ]"))[0]
        load = accesses(made, LaneValues(made, [1 << 40, 2048], 64, 32), "sm_90")[1]
        assert np.array_equal(load.addresses, 1024 + expected + 16 * np.arange(64).reshape(2, 32))


def test_a_quarter_more_sectors_are_told() -> None:
    """128 bytes a warp that begin 16 bytes past a sector are five sectors for four: of both warps that is a quarter
    more and is told, of one it is less."""
    for past, told in (((16, 16), ["misaligned"]), ((16, 0), [])):
        where = np.arange(64).reshape(2, 32) * 4 + np.array(past)[:, None] + np.array([[0], [1024]])
        access = MemoryAccess("ld.global.b32", "global", False, 4, where, where >= 0, None, ((3, 1),), 0)
        edge = Edge("tt.load", "global", 3, 1, ((3, 1),), (), None, None, None, None, 0, accesses=[access])
        edge.sectors, edge.ideal_sectors = access.sectors()
        assert (edge.sectors, edge.ideal_sectors) == (8 + len(told) + 1, 8)
        stub: Any = SimpleNamespace(edges=[edge], target="sm_90", assumed={})
        assert [one.kind for one in uncoalesced(stub)] == told


TTGIR = """#blocked = #ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>
#loc = loc("/home/me/mine.py":3:0)
#loc1 = loc("/home/me/mine.py":5:9)
#loc2 = loc("/home/me/help.py":8:2)
#shared = #ttg.swizzled_shared<{vec = 1, perPhase = 1, maxPhase = 1, order = [1, 0]}>
#odd = #ttg.something_new<{a = 1}>
#smem = #ttg.shared_memory
module attributes {"ttg.num-warps" = 4 : i32, ttg.shared = 4096 : i32, "ttg.threads-per-warp" = 32 : i32} {
  tt.func public @kernel(%x: !tt.ptr<f32> loc("x"(#loc))) attributes {noinline = false} {
    %k = ttg.local_alloc {allocation.offset = 0 : i32} : () -> !ttg.memdesc<2x16x32xf16, #shared, #smem, mutable> loc(#loc1)
    ttg.warp_specialize(%k) attributes {allocation.offset = 2048 : i32}
    default {
      ttg.warp_yield loc(#loc)
    }
    partition0(%arg0: !ttg.memdesc<2x16x32xf16, #shared, #smem, mutable> loc("k"(#loc1))) num_warps(1) {
      %1 = ttg.memdesc_index %arg0[%c0] : !ttg.memdesc<2x16x32xf16, #shared, #smem, mutable> -> !ttg.memdesc<16x32xf16, #shared, #smem, mutable> loc(#loc1)
      ttg.local_store %v, %1 : tensor<16x32xf16, #odd> -> !ttg.memdesc<16x32xf16, #shared, #smem, mutable> loc(callsite(#loc2 at #loc1))
      ttg.warp_return loc(#loc)
    } : (!ttg.memdesc<2x16x32xf16, #shared, #smem, mutable>) -> () loc(#loc)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
#loc3 = loc(callsite(#loc2 at #loc1))
"""  # noqa: E501


def test_operations_know_their_partition_their_memory_and_their_line() -> None:
    text = TTGIR.replace("loc(callsite(#loc2 at #loc1))\n      ttg.warp_return", "loc(#loc3)\n      ttg.warp_return")
    made = read(text)
    store = next(one for one in made.operations if one.name == "ttg.local_store")
    assert (store.warps, made.warps, made.most_warps) == (1, 4, 1)
    assert (store.line, made.where(store), store.place) == (8, "help.py", ((8, 2), (5, 9)))
    assert store.roots[-1] == "%k"
    assert made.unknown == {"#odd": "#ttg.something_new<{a = 1}>"}
    (piece, *_) = allocations(made, 4096)
    assert (piece.name, piece.offset, piece.size, piece.line) == ("%k", 0, 2048, 5)
    assert piece.life[0] < store.number <= piece.life[1]
    assert edges(made, [], [piece], "sm_90") == []  # nothing was compiled of it


def test_an_access_belongs_to_the_warps_of_its_partition() -> None:
    text = TTGIR.replace("loc(callsite(#loc2 at #loc1))\n      ttg.warp_return", "loc(#loc3)\n      ttg.warp_return")
    made, lane = read(text), np.arange(128).reshape(4, 32)

    access = MemoryAccess("st.shared.b32", "shared", True, 4, 4 * lane, lane >= 0, None, ((8, 2), (5, 9)), 0)
    (edge,) = edges(made, [access], allocations(made, 4096), "sm_90")
    assert (edge.operation, edge.warps, edge.wavefronts, edge.where) == ("ttg.local_store", 1, 1, "help.py:8")


def test_names_of_one_partition_are_not_those_of_another() -> None:
    """Each partition has names of its own, and a region's names come again after it: %arg0 and %1 are two pieces of
    memory, then another value."""
    second = TTGIR.split("    partition0")[1].split("    } :")[0].replace("index %arg0", "index %arg1")
    second = "    partition1" + second.replace("(%arg0:", "(%arg1: !ttg.memdesc<1xi64> loc(#loc1), %arg0:")
    again = "      %1 = arith.addi %arg1, %arg1 : i32 loc(#loc1)\n      tt.print %1 loc(#loc1)\n"
    second = second.replace("      ttg.warp_return", f"{again}      ttg.warp_return")
    text = TTGIR.replace("warp_specialize(%k)", "warp_specialize(%k, %other)")
    text = text.replace("    } :", f"    }}\n{second}    }} :")
    stores = [one for one in read(text).operations if one.name == "ttg.local_store"]
    assert [one.roots[-1] for one in stores] == ["%k", "%k"]
    printed = next(one for one in read(text).operations if one.name == "tt.print")
    assert printed.roots[0] != "%k"
    assert printed.roots == printed.operands


LANE = np.arange(32)[None]


def word(number: int, nbytes: int = 4, at: int | None = None, apart: int = 32) -> MemoryAccess:
    """The word so many words on in a lane's row."""
    where = apart * LANE + 4 * (number if at is None else at)
    return MemoryAccess(f"ld.shared.b{8 * nbytes}", "shared", False, nbytes, where, LANE >= 0, None, ((3, 1),), 0)


def found_in(lines: list[tuple[int, int, MemoryAccess]], ptx: str) -> list[tuple[int, int]]:
    """(first byte of lane 0, bytes) of lines (stretch, alignment, access) behind the compiler's last stage."""
    made = joined([((0, stretch, 4), align, [access]) for stretch, align, access in lines], ptx)
    assert all(a.instruction == f"ld.shared.b{8 * a.nbytes}" for a in made)
    return [(int(a.addresses[0, 0]), a.nbytes) for a in made]


def test_neighbours_are_joined_as_far_as_their_alignment_is_known() -> None:
    """Rests on the rule of LLVM's vectoriser of loads and stores, and on what the PTX has: eight words in a row are two
    loads of 16 bytes, or four of 8, or stay."""
    for most, text, many in ((16, "v4.b32", 2), (8, "v2.b32", 4), (4, "b32", 8)):
        lines = [(0, min(most, 4 * (n & -n or 4)), word(n)) for n in range(8)]
        ptx = f"ld.shared.{text} %r1, [%r2];\n" * many
        assert found_in(lines, ptx) == [(at, 32 // many) for at in range(0, 32, 32 // many)]
        assert found_in(lines[::-1], ptx) == [(at, 32 // many) for at in range(32 - 32 // many, -1, -32 // many)]
        assert len(found_in(lines, ptx + "ld.shared.b8 %r1, [%r2];")) == 8  # of other widths than these


def test_neighbours_that_are_not_joined() -> None:
    """Of two stretches, not in a row, of lanes that lie otherwise; three of them aligned to 16 bytes are a load of 16,
    whose last word nobody reads, and a unit is not cut."""
    pair = "ld.shared.v2.b32 {%r1, %r2}, [%r3];"
    assert found_in([(0, 8, word(0)), (0, 4, word(1))], pair) == [(0, 8)]
    for apart in ([(0, 8, word(0)), (1, 4, word(1))], [(0, 8, word(0)), (0, 8, word(2))],
                  [(0, 8, word(0)), (0, 4, word(1, apart=64))], [(0, 4, word(0)), (0, 4, word(1))]):
        assert [nbytes for _, nbytes in found_in(apart, pair)] == [4, 4]
    three = [(0, 16, word(0)), (0, 4, word(1)), (0, 8, word(2))]
    assert found_in(three, "ld.shared.v4.b32 {%r1, %r2, %r3, _}, [%r4];") == [(0, 16)]
    assert found_in(three, f"{pair}\nld.shared.b32 %r1, [%r4];") == [(0, 8), (8, 4)]
    twice = [(0, 8, word(0)), (0, 8, word(0, nbytes=8)), (0, 4, word(1))]
    assert found_in(twice, pair) == [(0, 8)]  # loads of what another one loads are none
    wide = [(0, 16, word(0)), (0, 16, word(0, nbytes=16, at=1))]
    assert found_in(wide, "ld.shared.b32 %r1, [%r2];\nld.shared.v4.b32 %r1, [%r2];") == [(0, 4), (4, 16)]


@pytest.mark.parametrize("kind, align, pieces", [
    ("<4 x float>", 16, [(0, 16)]), ("<4 x float>", 8, [(0, 8), (8, 8)]),
    ("<4 x float>", 4, [(0, 4), (4, 4), (8, 4), (12, 4)]),
    ("<4 x i8>", 1, [(0, 1), (1, 1), (2, 1), (3, 1)]), ("float", 4, [(0, 4)]),
    ("<8 x i1>", 1, [(0, 1)]), ("<16 x i1>", 2, [(0, 1), (1, 1)]), ("<32 x i1>", 4, [(0, 1), (1, 1), (2, 2)]),
])
def test_vectors_are_parted_as_far_as_their_alignment_is_not_known(kind: str, align: int, pieces: Any) -> None:
    """Rests on PTX that the compiler made of such loads (tests/simt/test_every_kernel.py runs it)."""
    line = IrLine("%2", "load", f"{kind}, ptr addrspace(3) %1, align {align}", 0, ())
    assert _pieces(line, kind) == pieces


def test_a_wider_access_has_sixteen_bytes_at_most() -> None:
    """Eight words in a row are two of 16 bytes; every second word alone is none."""
    lane = np.arange(32)[None]
    words = [MemoryAccess("ld.global.b32", "global", False, 4, 64 * lane + 4 * n, lane >= 0, None, ((3, 1),), 0)
             for n in range(8)]
    cured = wider(words)
    assert cured is not None
    assert (cured.before, cured.after, cured.words.partition(":")[0]) == (8, 2, "accesses of 16 bytes")
    assert wider(words[::2]) is None
