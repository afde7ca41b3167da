"""X-ray of kernels as tutorials write them, and of kernels with one planted cause of slowness each.

Expected values rest on the compiler's own code (its PTX and its allocation of shared memory), on the rule of wavefronts
that an H100 confirmed, applied to layouts instead of addresses, on CUDA's arithmetic of occupancy, and on what was
planted.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from slow_kernels import ALONG, OPERAND, PLAIN, PLANTED, through_shared
from tutorial_kernels import TUTORIALS

from kvlab.hardware import count_wavefronts, shared_transfer
from kvlab.layout.encodings import Encoding, SharedEncoding, SwizzledSharedLayout
from kvlab.triton_support.staged_tile import StagedTile
from kvlab.xray import Resources, XRay, diff, xray
from kvlab.xray.cures import _lane_accesses, shared_layouts


@functools.cache
def tutorial(name: str, target: str) -> XRay:
    kernel, arguments = TUTORIALS[name]
    return xray(kernel, arguments, target)


@functools.cache
def planted(name: str) -> XRay:
    case = PLANTED[name]
    return xray(case.kernel, case.arguments, case.target, **case.options)


@pytest.mark.compile
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorials_kernel_has_nothing_that_is_not_known(name: str) -> None:
    found = tutorial(name, "sm_90")
    assert found.unknown == []
    for edge in found.edges:
        assert edge.accesses or edge.kind in ("product", "tma"), edge
        assert edge.wavefronts >= edge.ideal
        assert edge.sectors >= edge.ideal_sectors


@pytest.mark.compile
@pytest.mark.parametrize("name, target", [("flash_attention", "sm_80"), ("matmul", "sm_90"), ("softmax", "sm_90")])
def test_every_access_of_the_ptx_has_its_lanes(name: str, target: str) -> None:
    """The LLVM IR, from which addresses come, has the accesses that the PTX has in the end."""
    found = tutorial(name, target)
    names = [access.instruction for edge in found.edges if edge.kind != "global" for access in edge.accesses]
    names += [a.instruction for edge in found.edges if edge.kind == "global" for a in edge.accesses
              if a.space == "global"]
    counts = {kind: sum(lines.total() for lines in found.histogram.get(kind, {}).values())
              for kind in ("ldmatrix", "copy to shared", "shared load", "shared store", "global load", "global store")}
    starts = {"ldmatrix": "ldmatrix", "copy to shared": "cp.async", "shared load": "ld.shared",
              "shared store": "st.shared", "global load": "ld.global", "global store": "st.global"}
    assert {kind: sum(n.startswith(start) for n in names) for kind, start in starts.items()} == counts


@pytest.mark.compile
def test_wavefronts_of_addresses_are_those_of_layouts() -> None:
    """The wavefronts of a tile read by ldmatrix and written by st.shared, once from the compiled addresses and once
    from the two layouts."""
    found = planted("no swizzle, read by ldmatrix")
    store, load = (next(e for e in found.edges if e.operation == f"ttg.local_{verb}") for verb in ("store", "load"))
    shared, registers = load.allocation, load.target
    assert shared is not None
    assert isinstance(shared.layout, SharedEncoding)
    assert isinstance(registers, Encoding)
    instruction, addresses = StagedTile("sm_90", (64, 64), shared.layout, registers).read_addresses()
    taken, least, _ = count_wavefronts(instruction, addresses)
    assert (load.wavefronts, load.ideal) == (int(taken.sum()), int(least.sum())) == (512, 64)
    assert isinstance(store.source, Encoding)
    transfer = shared_transfer(store.source, shared.layout, (64, 64), 16)
    taken, least, _ = count_wavefronts(f"st.shared.b{16 * transfer.vec}", transfer.offset * 2)
    assert (store.wavefronts, store.ideal) == (int(taken.sum()), int(least.sum())) == (64, 64)


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


LAUNCHES: dict[str, tuple[dict[str, int], list[Any], str]] = {
    "transpose": ({"M": 64, "N": 64}, [zeros(64, 64), zeros(64, 64), 64, 64], "sm_80"),
    "row_sums": ({"stride": 128}, [zeros(32, 128), zeros(32), 128], "sm_90"),
    "softmax": ({"stride": 1024, "n": 1024}, [zeros(1024), zeros(1024), 1024, 1024], "sm_90"),
    "flash_attention": (
        {"stride": 64, "keys": 256},
        [*(zeros(rows, 64, dtype="uint16") for rows in (64, 256, 256, 64)), 64, 256, 0.125], "sm_80"),
}


@pytest.mark.parametrize("name", [*LAUNCHES, "no swizzle, read by ldmatrix", "shared memory the other way round"])
def test_what_is_predicted_is_what_the_compiled_code_does(name: str) -> None:
    """Passes and sectors by line and instruction, of the PTX as a machine of warps runs it and of addresses that were
    only followed. Copies of a pipelined loop are left out: its last trips copy nothing."""
    from kvlab.simt import run_ptx

    if name in LAUNCHES:
        changes, arguments, target = LAUNCHES[name]
        kernel, types = TUTORIALS[name]
        found = xray(kernel, {**types, **changes}, target)
    else:
        found, arguments = planted(name), [zeros(64, 64, dtype="uint16"), zeros(64, 64, dtype="uint16")]
    predicted: Counter[tuple[int, str, str]] = Counter()
    for edge in found.edges:
        for access in edge.accesses:
            verb = access.instruction.split(".")[0]
            if edge.kind == "global" and access.space == "global":
                predicted[edge.line, verb, "sectors"] += access.sectors()[0]
            elif edge.kind in ("read", "write", "scratch"):
                for key, count in zip(("wavefronts", "ideal"), access.passes(found.target), strict=True):
                    predicted[edge.line, verb, key] += count
    counted: Counter[tuple[int, str, str]] = Counter()
    for facts in run_ptx(found.compiled.asm["ptx"], (1, 1, 1), arguments, shared=found.compiled.shared).instructions:
        trips, verb = facts.executed / found.resources.warps, facts.instruction.op[0]
        if trips and verb in ("ld", "st", "ldmatrix", "stmatrix") and facts.source is not None:
            for key in ("wavefronts", "ideal", "sectors"):
                counted[facts.source[1], verb, key] += round(getattr(facts, key) / trips)
    assert {k: n for k, n in predicted.items() if n} == {k: n for k, n in counted.items() if n}


def test_the_cure_of_a_conflict_is_one_when_it_is_compiled() -> None:
    """What the model promises for another layout is what the compiler's addresses give with that layout."""
    from triton.experimental.gluon import language as gl

    finding = planted("no swizzle, read by ldmatrix").findings[0]
    promised = finding.cures[0]
    assert isinstance(promised.layout, SwizzledSharedLayout)
    fields = (promised.layout.vec, promised.layout.per_phase, promised.layout.max_phase, list(promised.layout.order))
    arguments = {**PLANTED["no swizzle, read by ldmatrix"].arguments, "SHARED": gl.SwizzledSharedLayout(*fields)}
    cured = xray(through_shared, arguments, "sm_90")
    assert sum(edge.wavefronts for edge in cured.edges) == promised.after == 128
    assert promised.before == 576
    assert promised.proof is not None
    assert [one.wavefronts for one in promised.proof.candidates][-1] == 128
    assert all(one.wavefronts > 128 for one in promised.proof.candidates[:-1])
    assert (promised.proof.before.wavefronts, promised.proof.after.wavefronts) == (32, 4)
    assert cured.findings == ()
    both = diff(planted("no swizzle, read by ldmatrix"), cured)
    assert ("wavefronts", 576, 128) in [(name, a, b) for name, a, b in both.rows]
    assert len(both.gone) == 1
    assert both.new == []


def test_a_tile_elsewhere_has_the_same_cure() -> None:
    """1 KiB further on, and in the second of two stages: no bank changes, so neither counts nor layouts do."""
    found = planted("no swizzle, read by ldmatrix")
    (piece,) = {id(edge.allocation): edge.allocation for edge in found.edges if edge.allocation is not None}.values()
    touching = [edge for edge in found.edges if edge.allocation is piece]
    assert piece.offset == 0
    moved = replace(piece, offset=1024, size=2 * piece.size, type=f"2x{piece.type}")
    further = [replace(edge, allocation=moved, accesses=[
        replace(access, addresses=access.addresses + 1024 + stage * piece.size) for access in edge.accesses
    ]) for stage, edge in enumerate(touching)]
    cures = [[(one.layout, one.before, one.after, one.tried) for one in shared_layouts(*given, "sm_90")]
             for given in ((piece, touching), (moved, further))]
    assert cures[0] == cures[1]
    assert [one[1:3] for one in cures[0]] == [(576, 128), (576, 128)]
    assert isinstance(piece.layout, SharedEncoding)
    offsets = np.asarray(piece.layout.offsets((64, 64)))
    for home, edges in ((piece, touching), (moved, further)):
        moves = [access for edge in edges for access in edge.accesses if access.instruction.startswith("ldmatrix")]
        (found_again,) = _lane_accesses(home, moves, piece.layout, (64, 64), 2) or []
        wanted = np.stack([a.addresses - (home.offset or 0) for a in moves]) % piece.size
        assert np.array_equal(2 * offsets[found_again.at], wanted)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_found_and_named(name: str) -> None:
    case, found = PLANTED[name], planted(name)
    fitting = [one for one in found.findings if one.kind == case.kind]
    assert fitting, found.findings
    assert any(case.words in str(one) for one in fitting), [str(one) for one in fitting]
    assert all(one.cures for one in found.findings)
    costs = [one.cost for one in found.findings]
    assert costs == sorted(costs, reverse=True)


def test_a_cost_counts_what_a_loop_repeats() -> None:
    """Sectors in excess at two cycles each, once; a change of layout in a loop, sixteen times."""
    column = next(one for one in planted("column load").findings if one.kind == "uncoalesced")
    assert column.cost == 2 * (256 - 32)
    found = planted("turned on each trip")
    turned = next(one for one in found.findings if one.kind == "convert-in-loop")
    (edge,) = [edge for edge in found.edges if edge.operation == "ttg.convert_layout" and edge.line == turned.line]
    assert turned.cost == 16 * (edge.wavefronts + 60)


def test_options_are_tried_by_compiling() -> None:
    """A register limit that spills, and a block smaller than its CTA: the options after which the finding is gone."""
    (finding, change, other), *_ = planted("maxnreg too small").try_options()
    assert (finding.kind, change, other.resources.spills) == ("spill", {"maxnreg": None}, 0)
    (finding, change, other), *_ = planted("block smaller than the CTA").try_options()
    assert (finding.kind, change, other.resources.warps) == ("idle-threads", {"num_warps": 2}, 2)
    with pytest.raises(ValueError, match="was compiled elsewhere"):
        xray(planted("maxnreg too small").compiled).with_options(num_warps=8)


@pytest.mark.compile
def test_allocations_lie_where_the_compiler_put_them() -> None:
    found = tutorial("flash_attention", "sm_80")
    kept = [piece for piece in found.allocations if piece.what == "ttg.local_alloc"]
    assert all(piece.offset is not None for piece in found.allocations)
    ends = [piece.offset + piece.size for piece in found.allocations if piece.offset is not None]
    assert max(ends) == found.resources.shared
    for one in kept:  # pieces that live at one time do not overlap
        for other in kept:
            if one is not other and one.life[0] <= other.life[1] and other.life[0] <= one.life[1]:
                assert one.offset is not None
                assert other.offset is not None
                assert one.offset + one.size <= other.offset or other.offset + other.size <= one.offset
    touched = [a for edge in found.edges for a in edge.accesses if edge.allocation in kept and a.space == "shared"]
    homes = {id(edge.allocation): edge.allocation for edge in found.edges if edge.allocation in kept}
    assert touched
    for edge in found.edges:
        piece = homes.get(id(edge.allocation))
        for access in edge.accesses:
            if piece is not None and access.space == "shared":
                low, high = int(access.addresses.min()), int(access.addresses.max()) + access.nbytes
                assert piece.offset is not None
                assert piece.offset <= low
                assert high <= piece.offset + piece.size


@pytest.mark.compile
def test_what_l1_has_already_is_no_finding() -> None:
    """Two loads of 16 bytes a lane, 32 bytes apart: each touches all sectors, together they move them once."""
    found = tutorial("layer_norm", "sm_90")
    assert [(e.sectors, e.ideal_sectors, e.distinct) for e in found.edges if e.sectors > e.ideal_sectors] == [
        (256, 128, 128)] * 2
    assert found.findings == ()
    column = next(edge for edge in planted("column load").edges if edge.operation == "tt.load")
    assert (column.sectors, column.distinct, column.ideal_sectors) == (256, 256, 32)
    (scratch,) = tutorial("transpose", "sm_90").allocations
    assert (scratch.what, scratch.size, scratch.layout) == ("ttg.convert_layout", 64 * 64 * 4, None)


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_89", "sm_120", "sm_100", "gfx950"])
def test_other_targets(target: str) -> None:
    found = tutorial("matmul", target)
    assert [what for what in found.unknown if "tensor_memory" not in what] == []
    assert found.resources.ctas >= 1
    loads = [edge for edge in found.edges if edge.kind == "global" and edge.operation != "tt.store"]
    assert len(loads) == 2
    # rows of 64 fp16 are 4 sectors; nothing moves twice
    assert all(edge.sectors == edge.ideal_sectors > 0 and edge.sectors % (64 * 4) == 0 for edge in loads)


@pytest.mark.parametrize("target, registers, shared, warps, ctas, limiter", [
    ("sm_90", 168, 163840, 12, 1, "registers and shared memory"),  # CUDA's calculator of occupancy
    ("sm_80", 96, 32768, 4, 4, "shared memory"),
    ("sm_86", 32, 1024, 1, 16, "CTAs"),
    ("sm_90", 255, 0, 8, 1, "registers"),
    ("sm_90", 33, 0, 4, 12, "registers"),  # a warp has registers by 256: 40 a thread
    ("gfx942", 128, 16384, 4, 4, "registers and shared memory"),
])
def test_occupancy(target: str, registers: int, shared: int, warps: int, ctas: int, limiter: str) -> None:
    found = Resources(target, registers, 0, 0, shared, warps)
    assert (found.ctas, found.limiter) == (ctas, limiter)


def test_text_json_and_html_tell_the_same() -> None:
    found = planted("no swizzle, read by ldmatrix")
    words, data, page = str(found), json.loads(found.to_json()), found.to_html()
    assert "8 passes for 1" in words
    assert data["findings"][0]["cures"][0]["after"] == 128
    assert data["edges"][0]["operation"] in words
    assert "8 passes for 1" in page
    assert "<svg" in page
    assert "src=" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "through_shared on sm_90" in page
    assert found._repr_html_() in page


def test_values_of_arguments_are_used_and_assumptions_told() -> None:
    kernel, _ = TUTORIALS["softmax"]
    given = xray(kernel, {"x_ptr": np.zeros(64, np.float32), "out_ptr": "*fp32", "stride": 512, "n": 100, "BLOCK": 256})
    assert given.assumed == {}
    load = next(edge for edge in given.edges if edge.operation == "tt.load")
    active = sum(int(access.active.sum()) for access in load.accesses)
    assert active == 100
    assert tutorial("softmax", "sm_90").assumed == {"stride": 4096, "n": 4096}


def test_errors_name_the_argument() -> None:
    kernel, arguments = TUTORIALS["softmax"]
    with pytest.raises(ValueError, match="target is 'sm_70': must be one of sm_80"):
        xray(kernel, arguments, "sm_70")
    with pytest.raises(ValueError, match=r"signature_or_args is .* missing: \['n'\], unknown: \['m'\]"):
        xray(kernel, {**{k: v for k, v in arguments.items() if k != "n"}, "m": "i32"})
    with pytest.raises(ValueError, match="kernel is 3: must be"):
        xray(3)
    with pytest.raises(ValueError, match="n is 'int': must be a type"):
        xray(kernel, {**arguments, "n": "int"})
    with pytest.raises(ValueError, match=r"signature_or_args is .* must be a mapping, or a list of at most"):
        xray(kernel, [*arguments.values(), 5, 5, 5, 5])
    with pytest.raises(ValueError, match="num_warps is 3: must be a power of two"):
        xray(kernel, arguments, num_warps=3)
    with pytest.raises(ValueError, match="num_stages is -1: must be at least 0"):
        xray(kernel, arguments, num_stages=-1)
    with pytest.raises(ValueError, match=r"num_wraps is 8: sm_90 has no such option, must be one of \["):
        xray(kernel, arguments, num_wraps=8)
    compiled = tutorial("softmax", "sm_90").compiled
    for given in ({"signature_or_args": arguments}, {"maxnreg": 64}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} is .*: must be left out, softmax is compiled"):
            xray(compiled, **given)


@pytest.mark.timing
def test_an_xray_takes_at_most_twice_the_compilation() -> None:
    kernel, arguments = TUTORIALS["flash_attention"]
    tutorial("matmul", "sm_90")
    ratios = []
    for size in (32, 64, 16):  # a kernel of its own each, so that each is compiled
        found: Any = xray(kernel, {**arguments, "BN": size}, "sm_90")
        compilation, rest = found.seconds
        ratios.append((compilation + rest) / compilation)
    assert min(ratios) <= 2


def test_layouts_draw_themselves() -> None:
    found = xray(through_shared, {
        "x_ptr": "*bf16", "out_ptr": "*bf16", "ROWS": 64, "COLUMNS": 64, "COPY": ALONG, "SHARED": PLAIN,
        "READ": OPERAND,
    }, "sm_80")
    assert found.layouts
    for layout in found.layouts.values():
        assert (layout._repr_html_() or "").startswith("<svg")
