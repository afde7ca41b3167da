"""Explorers in a browser: what the module computes, what a reader moves, what the page's address says.

Rests on: the package's own arithmetic, which rests on the hardware's records (the module repeats it in another
language); laws (a picture is a function of its state; legible as in ``test_hosts.py``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gallery import budget, pipeline, pool, timeline

from kvlab.cache import PagedKVCache
from kvlab.hardware import INSTRUCTIONS, get_arch, get_atom, wavefronts
from kvlab.hardware.banks.count import count_wavefronts
from kvlab.layout import ComposedLayout, Layout, Swizzle, TileTensor
from kvlab.staging import FragmentMap
from kvlab.viz import explore
from kvlab.viz.explorer.access import instruction_shown
from kvlab.viz.explorer.explore import module
from kvlab.viz.model.accesses import tile_reads

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def js(chromium: Any) -> Iterator[Callable[[str, Any], Any]]:
    """``js(body, argument)`` runs a function body of (m, x) with the module as m."""
    tab = chromium.new_page()
    tab.set_content("<!doctype html><body></body>")
    as_file = "URL.createObjectURL(new Blob([text], {type: 'text/javascript'}))"
    tab.evaluate(f"async (text) => {{ window.m = await import({as_file}); }}", module())
    yield lambda body, argument: tab.evaluate(f"(x) => {{ const m = window.m; {body} }}", argument)
    tab.close()


def test_wavefronts_of_every_instruction_are_pythons(js: Callable[[str, Any], Any]) -> None:
    """Random addresses of all instructions of two machines, some lanes inactive: passes, and who is served when."""
    rng, cases, told = np.random.default_rng(7), [], []
    for name, instruction in INSTRUCTIONS.items():
        for arch in ("sm_90", "gfx950"):
            machine = get_arch(arch)
            if not instruction.exists_on(machine):
                continue
            for span, alike in ((6, 1), (40, 2), (9, 4)):
                address = rng.integers(0, span, machine.warp_size // alike).repeat(alike) * 4 * instruction.nbytes
                mask = None if instruction.matrices or alike == 1 else rng.random(machine.warp_size) < 0.7
                found = wavefronts(name, address, mask=mask, arch=arch)
                active = np.where(found.active, found.addresses, -1)
                cases.append([instruction_shown(found.op, machine), active.tolist()])
                told.append([found.wavefronts, found.ideal, found.phase.tolist(), found.pass_in_phase[:, 0].tolist()])
    counted = js(
        "return x.map(([op, at]) => m.wavefronts(op, at)).map((c) => [c.wavefronts, c.ideal, c.phase, c.turn])", cases
    )
    assert len(cases) > 100
    assert counted == told


def test_thousands_of_states_are_pythons(js: Callable[[str, Any], Any]) -> None:
    """Each access, row, swizzle and column of the scene: the addresses of its lanes and its wavefronts."""
    reads = tile_reads("sm_90")
    data = explore(Swizzle(3, 4, 3, "byte")).scene.shown["data"]
    swizzles = [(bits, base, shift) for bits in range(4) for base in (4, 5, 6) for shift in (3, 4, 5)]
    states = [*itertools.product(reads, (32, 64, 128, 256, 512), swizzles, range(8))]
    assert len(states) > 5000
    counted = js(
        """return x.states.map(([access, row_bytes, [bits, base, shift], column]) => {
             const [plain, cured] = m.sides(x.data, {access, row_bytes, bits, base, shift, column});
             return [plain.count.wavefronts, cured.count.wavefronts, cured.count.ideal, ...cured.address]; })""",
        {"states": states, "data": data},
    )
    for name, read in reads.items():
        mine = [(state, row) for state, row in zip(states, counted, strict=True) if state[0] == name]
        plain = np.array([read.address(row_bytes, column) for (_, row_bytes, _, column), _ in mine])
        moved = np.array([Swizzle(*how, "byte")(at) for ((_, _, how, _), _), at in zip(mine, plain, strict=True)])
        (before, _, _), (after, ideal, _) = (count_wavefronts(read.op.name, at) for at in (plain, moved))
        told = np.concatenate([before[:, None], after[:, None], ideal[:, None], moved], axis=1)
        assert np.array_equal(np.array([row for _, row in mine]), told), name


def test_loads_over_a_layout_are_pythons(js: Callable[[str, Any], Any]) -> None:
    """From every 7th cell, down and along: the addresses of 32 lanes and their wavefronts."""
    swizzled = ComposedLayout(Layout.row_major(40, 24), Swizzle(2, 1, 3, "fp32"))
    for layout, size in ((Layout("(40,24):(30,1)"), 2), (Layout("(24,(8,5)):(1,(24,200))"), 8), (swizzled, 4)):
        scene = explore(layout, element_bytes=size).scene.shown
        offset = np.array(scene["data"]["offset"]).reshape(scene["data"]["rows"], scene["data"]["columns"])
        states = [
            {"element_bytes": size, "direction": way, "row": cell // offset.shape[1], "column": cell % offset.shape[1]}
            for way in ("down the column", "along the row") for cell in range(0, offset.size, 7)
        ]
        counted = js(
            "return x[1].map((s) => m.read(x[0], s)).map((r) => [r.count.wavefronts, r.count.ideal, ...r.address])",
            [scene["data"], states],
        )
        address, mask = np.zeros((2, len(states), 32), np.int64)
        for state, row, active in zip(states, address, mask, strict=True):
            down = state["direction"] == "down the column"
            seen = offset[state["row"] :, state["column"]] if down else offset[state["row"], state["column"] :]
            row[: len(seen[:32])], active[: len(seen[:32])] = seen[:32] * size, 1
        passes, ideal, _ = count_wavefronts(f"ld.shared.b{8 * size}", address, mask=mask.astype(bool))
        told = np.concatenate([passes[:, None], ideal[:, None], np.where(mask, address, -1)], axis=1)
        assert np.array_equal(np.array(counted), told), layout


def test_the_memory_of_a_pipeline_is_what_its_events_say(js: Callable[[str, Any], Any]) -> None:
    """Rests on a law: byte by byte, the last copy, landing, write or read of a cell tells its state."""
    made = pipeline()
    scene, runs = explore(made).scene.shown, [made.whole, made.run(1), made.run(5)]
    for run, told in zip(runs, (scene["data"]["runs"][number] for number in (0, 2, 6)), strict=True):
        counted = js(
            "return x[1].events.map((_, i) => [...m.memoryAt(x[0], x[1], i + 1).state])", [scene["data"], told]
        )
        state, flying = np.zeros(made.nbytes, int), []
        for event, ranges, cells in zip(run.events, run.touched, counted, strict=True):
            at = np.concatenate([np.arange(*one) for one in ranges]) if ranges else np.zeros(0, int)
            if event.kind == "copy":
                state[at] = 1
                flying.append((event.what, event.stage, at))
            elif event.kind == "landed":
                first = next(one for one in flying if one[:2] == (event.what, event.stage))
                flying = [one for one in flying if one is not first]
                state[first[2]] = np.where(state[first[2]] == 1, 2, state[first[2]])
            elif event.kind == "read":
                state[at] = np.where(state[at] == 2, 3, state[at])
            assert np.array_equal(np.repeat(cells, 16)[: made.nbytes], state), event


def test_bytes_of_tokens_are_pythons(js: Callable[[str, Any], Any]) -> None:
    """Of a strided cache of two heads: 500 tokens and elements, asked of the cache itself."""
    blocks = np.zeros((9, 2, 3, 2, 8, 24), np.float16)[:, 1, 2].transpose(0, 2, 1, 3)  # tokens inside heads
    cache = PagedKVCache(blocks, [45, 17], [[5, 2, 8, 0, 1, 3], [7, 6, 4, -1, -1, -1]], 1, 46)
    data, rng = explore(cache).scene.shown["data"], np.random.default_rng(5)
    most = [(s, *rng.integers(((45, 17)[s], 2, 24)).tolist()) for s in rng.integers(0, 2, 500).tolist()]
    states = [dict(zip(("sequence", "token", "head", "element"), one, strict=True)) for one in most]
    counted = js("return x[1].map((state) => m.byteOf(x[0], state).byte)", [data, states])
    sequence, token, head, element = (np.array([state[name] for state in states]) for name in states[0])
    assert counted == np.asarray(cache.block_paged_ptr(sequence, token, head, element).byte_address).tolist()


def test_budgets_are_pythons(js: Callable[[str, Any], Any]) -> None:
    made = budget()
    dtypes, memories = ("bf16", "fp8", "fp32"), ("plain", "swizzled")
    states = [*itertools.product(range(0, 10, 3), range(7, 18, 2), (16, 256), dtypes, memories)]
    counted = js(
        """return x[1].map(([log2_batch, log2_context, page_size, dtype, shared_memory]) =>
             m.spent(x[0], {log2_batch, log2_context, page_size, dtype, shared_memory})).map((s) =>
             [s.bytes, s.held, s.flops, s.passes, s.seconds, s.bound])""",
        [explore(made).scene.shown["data"], states],
    )
    for (batch, context, page_size, dtype, memory), found in zip(states, counted, strict=True):
        told = made.at(
            batch=1 << batch, context=1 << context, page_size=page_size, dtype=dtype, swizzled=memory == "swizzled"
        )
        assert tuple(found) == dataclasses.astuple(told)


EXPLORED: dict[str, Callable[[], Any]] = {
    "128 x 64": lambda: Layout.row_major(128, 64),
    "view": lambda: TileTensor.stack_allocation(Layout.row_major(8, 16), "fp32").tile((4, 8), (1, 1)),
    "lanes": lambda: TileTensor.stack_allocation(Layout.row_major(32, 64), "bf16").vectorize(1, 8).distribute(
        Layout.row_major(4, 8), np.arange(32)
    ),
    "mma": lambda: get_atom("mma.sync.m16n8k16.bf16"),
    "wgmma": lambda: get_atom("wgmma.m64n16k16.bf16"),
    "mfma": lambda: get_atom("mfma.32x32x16.bf16"),
    "fragments": lambda: FragmentMap((4, 4), np.arange(8)[:, None, None] // 2, 2 * (np.arange(8)[:, None, None] % 2)
                                     + np.arange(2)),
    "pipeline": pipeline,
    "timeline": timeline,
    "pages": pool,
    "budget": budget,
    "wavefronts": lambda: wavefronts("ld.shared.b64", np.arange(32) * 40, mask=0x55555555),
}
FRAME_MS = """() => { const times = [];
  for (let i = 1; i <= 9; i++) document.querySelectorAll("input[type=range]").forEach((one) => {
    const start = performance.now();
    one.value = +one.min + (i % 2); one.dispatchEvent(new Event("input", {bubbles: true}));
    document.body.getBoundingClientRect(); times.push(performance.now() - start); });
  return times.sort((a, b) => a - b)[times.length >> 3]; }"""
"""What a frame costs in ms; a slower one had to share the machine."""


@pytest.mark.parametrize("name", EXPLORED)
def test_every_scene_is_legible_at_its_ends(name: str, page: Callable[..., Any], tmp_path: Path) -> None:
    """At the start and with each slider at its end, within 900 px of height; a frame takes less than 50 ms."""
    path = explore(EXPLORED[name]()).save(tmp_path / "explorer.html")
    tab = page("dark" if len(name) % 2 else "light", width=960, height=900)
    tab.tab.goto(path.as_uri())
    assert not tab.faults(tab.tab.query_selector("body"))
    for slider in tab.tab.query_selector_all("input[type=range]"):
        slider.fill(slider.get_attribute("max"))
    assert not tab.faults(tab.tab.query_selector("body"))
    assert tab.tab.evaluate("document.querySelector('.kvlab-explorer').offsetHeight") <= 900
    assert tab.tab.evaluate(FRAME_MS) < 50
    assert not tab.errors


@pytest.mark.parametrize("prefers", ["light", "dark"])
def test_a_page_is_legible_and_answers(prefers: str, page: Callable[..., Any], tmp_path: Path) -> None:
    path = explore(Swizzle(3, 4, 3, "byte")).save(tmp_path / "explorer.html")
    tab = page(prefers, width=960, height=900)
    at = tab.tab
    at.goto(path.as_uri())
    assert not tab.faults(at.query_selector("body"))
    title = ".kvlab-explorer svg g:first-child"
    assert "32 wavefronts plain, 4 with Sw<3,4,3>" in at.text_content(title)
    at.locator("input[name=bits]").fill("1")
    assert "32 wavefronts plain, 16 with Sw<1,4,3>" in at.text_content(title)
    at.locator("rect[data-set='{\"lane\":9}']").last.hover()
    assert at.input_value("input[name=lane]") == "9"
    at.locator(".picture").focus()
    at.keyboard.press("ArrowDown")
    at.keyboard.press("ArrowRight")
    assert at.url.endswith("#bits=1&step=2&lane=10")
    assert "T10: row 10" in at.text_content(".kvlab-explorer")
    at.select_option("select[name=access]", "ld.shared.b32 along a row")
    assert "1 wavefront plain" in at.text_content(title)
    assert not tab.faults(at.query_selector("body"))
    seen, address = at.inner_html(".picture"), at.url
    at.goto("about:blank")
    at.goto(address)
    assert at.inner_html(".picture") == seen
    at.select_option("select[name=access]", "ldmatrix.x4")
    at.locator("button").click()
    at.wait_for_function("location.hash.includes('step=3')")
    assert not tab.errors
    assert not tab.scrolls_sideways()
