"""Lockstep runs. Rests on a law: right twins agree at every step; an error put into one twin is found where it was put.

The kernel runs in Triton's interpreter, the emulator in NumPy: two independent implementations of the toy operation.
"""

from __future__ import annotations

import html
import importlib
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import ml_dtypes
import numpy as np
import pytest

from kvlab.mirror import Lockstep, MirrorError, Operation, Twin, lockstep, lockstep_pair
from kvlab.viz import draw

pytestmark = pytest.mark.interpreter

LENGTHS = (21, 0, 20)
BN = 8


def make_case(dtype: Any = ml_dtypes.bfloat16) -> dict[str, Any]:
    r = np.random.default_rng(0)
    q, k, v = (r.standard_normal((3, n, 16)).astype(dtype) for n in (8, 32, 32))
    return {"q": q, "k": k, "v": v, "lengths": np.array(LENGTHS, np.int32), "scale": 0.25}


@pytest.fixture(scope="module")
def right() -> Lockstep:
    fixtures = str(Path(__file__).parent / "fixtures")
    sys.path.insert(0, fixtures)
    try:
        return lockstep("mirror_toy", make_case())
    finally:
        sys.path.remove(fixtures)


def test_right_twins_agree_at_every_step(right: Lockstep) -> None:
    assert right.ok, str(right)
    assert right.first_difference is None
    assert right.grids == {("attend", 0): (2, 3, 1), ("normalise", 0): (8, 3, 1)}
    assert {(m.twin, m.step, m.output) for m in right.maxima} >= {
        ("attend", "setup", "hi"),
        ("attend", "load_v", "v"),
        ("attend", "accumulate", "o"),
        ("normalise", "divide", "out"),
        ("launch", "returned", "out"),
    }


def test_each_program_is_compared_in_its_own_iterations_only(right: Lockstep) -> None:
    """Two row tiles a sequence; 21, 0 and 20 keys are 3, 0 and 3 tiles of 8."""
    ran = {(row.iteration, tuple(row.programs)) for row in right.rows if (row.twin, row.output) == ("attend", "k")}
    assert ran == {((i,), (0, 1, 4, 5)) for i in range(3)}
    counts = {(m.step, m.output): m.compared for m in right.maxima if m.twin == "attend"}
    assert counts["setup", "q"] == 6
    assert counts["scores", "s"] == 12


def test_shapes_and_dtypes_are_those_of_the_kernel(right: Lockstep) -> None:
    found = {(m.twin, m.step, m.output): (m.shape, m.dtype) for m in right.maxima}
    assert found["attend", "setup", "q"] == ((4, 16), "bfloat16")
    assert found["attend", "setup", "hi"] == ((), "int32")
    assert found["attend", "load_k", "inside"] == ((8,), "bool")
    assert found["attend", "load_v", "v"] == ((8, 16), "bfloat16")
    assert found["normalise", "setup", "total"] == ((), "float32")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "s = np.where(inside[:,",
            "inside = keys < hi[:, None] - 1\n        s = np.where(inside[:,",
            ("mask", (2,), 0, "s"),
        ),
        ("        o = o * rescale[..., None]", "        o = o * 1", ("softmax", (1,), 0, "o")),
        (
            "keys = start[:, None] + np.arange(BN)",
            "keys = start[:, None] + (start[:, None] == BN) + np.arange(BN)",
            ("load_k", (1,), 0, "k"),
        ),
        ("m = np.full((P, BM), -np.inf", "m = np.full((P, BM), np.nan", ("setup", (), 0, "m")),
        ("rows = tile[:, None] * BM", "rows = tile[::-1, None] * BM", ("setup", (), 0, "q")),
        ("hi = lengths[batch]", "hi = lengths[batch] + (np.arange(P) == 4)", ("setup", (), 4, "hi")),
    ],
    ids=["mask-by-one", "no-rescale", "tile-start", "nan", "program-order", "one-program"],
)
def test_a_seeded_error_is_found_where_it_was_put(seeded: Any, old: str, new: str, expected: tuple[Any, ...]) -> None:
    run = lockstep(seeded(emulator=(old, new)), make_case())
    assert not run.ok
    first = run.first_difference
    assert first is not None
    assert (first.step, first.iteration, first.program, first.output) == expected, str(run)
    assert first.twin == "attend"
    assert first.kernel is not None
    assert first.emulator is not None
    assert first.kernel.shape == first.emulator.shape
    assert "DIFFERS" in run.table()


@pytest.mark.parametrize(
    ("old", "new", "output", "error"),
    [
        (
            "q = q_memory[batch[:, None], rows]",
            "q = q_memory[batch[:, None], rows].astype(np.float32)",
            "q",
            "dtype: emulator float32, kernel bfloat16",
        ),
        (
            "out = np.where(total[:, None] > 0, o / total[:, None], np.float32(0))",
            "out = np.where(total[:, None] > 0, o / total[:, None], np.float32(0))[:, None]",
            "out",
            "shape: emulator [24, 1, 16], kernel [16] in 24 programs = [24, 16]",
        ),
    ],
    ids=["dtype", "shape"],
)
def test_shape_and_dtype_must_be_equal(seeded: Any, old: str, new: str, output: str, error: str) -> None:
    first = lockstep(seeded(emulator=(old, new)), make_case()).first_difference
    assert first is not None
    assert (first.output, first.error) == (output, error)


def test_an_emulator_that_raises_tells_what_differed_before(seeded: Any) -> None:
    package = seeded(emulator=("    hi = lengths[batch]", "    hi = lengths"))
    with pytest.raises(IndexError) as caught:
        lockstep(package, make_case())
    shape = "shape: emulator [3], kernel [] in 6 programs = [6]"
    assert caught.value.__notes__ == [
        f"lockstep, before the emulator raised this: attend.setup, program 0 = (0, 0, 0): hi {shape}"
    ]


@pytest.mark.parametrize(
    ("new", "iteration", "error"),
    [
        ("int(hi.max(initial=0)) + step", (3,), "no program of the kernel ran this step"),
        ("int(hi.max(initial=0)) - step", (2,), "the emulator did not run this step"),
    ],
    ids=["one-more", "one-less"],
)
def test_the_number_of_iterations_must_be_equal(seeded: Any, new: str, iteration: tuple[int, ...], error: str) -> None:
    run = lockstep(seeded(emulator=("int(hi.max(initial=0))", new)), make_case())
    found = [(run.step_name(row), row.iteration, row.problem) for row in run.rows if row.problem]
    assert found[0] == ("load_k", iteration, error)
    assert not run.ok


def test_what_the_launches_return_is_compared(seeded: Any) -> None:
    run = lockstep(seeded(emulator=('    return {"out": out}', '    return {"out": out + np.float32(1)}')), make_case())
    first = run.first_difference
    assert first is not None
    assert (first.twin, first.step, first.output) == ("launch", "returned", "out")


def test_the_members_of_a_tuple_are_compared_one_by_one(seeded: Any) -> None:
    store = "    #: store\n"
    kernel, emulator = ((store, f"    out = out, out * {n}\n{store}    out = out[0]\n") for n in (2, 3))
    first = lockstep(seeded(kernel=kernel, emulator=emulator), make_case()).first_difference
    assert first is not None
    assert (first.twin, first.step, first.output) == ("normalise", "divide", "out[1]")


def test_launches_of_grids_that_grow_are_told_apart(seeded: Any) -> None:
    """Programs that an earlier launch of the kernel did not have belong to the later one."""
    kernel = "    normalise[(m, batch)]", "    normalise[(1, batch)](o, l, out, m, D=d)\n    normalise[(m, batch)]"
    emulator = "    normalise(o, l, out)", "    normalise(o[:, :1], l[:, :1], out[:, :1])\n    normalise(o, l, out)"
    run = lockstep(seeded(kernel=kernel, emulator=emulator), make_case())
    assert run.ok, str(run.first_difference)
    assert [run.grids["normalise", launch] for launch in (0, 1)] == [(1, 3, 1), (8, 3, 1)]


def test_one_twin_and_some_programs() -> None:
    run = lockstep("mirror_toy", make_case(), twin="normalise", programs=[9, 23])
    assert {m.twin for m in run.maxima} == {"normalise", "launch"}
    assert {tuple(row.programs) for row in run.rows if row.twin == "normalise"} == {(9, 23)}
    assert {len(row.programs) for row in lockstep("mirror_toy", make_case(), programs=4).rows} == {1}


def test_tolerance_by_name_with_its_reason(seeded: Any) -> None:
    worse = ("s *= np.float32(scale)", "s *= np.float32(scale * (1 + 1e-4))")
    package = seeded(emulator=worse)
    run = lockstep(package, make_case())
    assert run.first_difference is not None
    assert run.first_difference.step == "scores"
    assert lockstep(package, make_case(), tolerance=1e-2).ok
    named = {"scores.s": (1e-3, "here"), "out": (1e-2, "there")}
    first = lockstep(package, make_case(), tolerance=named).first_difference
    assert first is not None
    assert first.step == "mask"
    hook = ('LAUNCH = ("', 'LOCKSTEP_TOLERANCE = {"s": (1e-3, "a coarser scale")}\nLAUNCH = ("')
    run = lockstep(seeded(emulator=worse, config=hook), make_case())
    assert run.first_difference is not None
    assert run.first_difference.step == "softmax"
    assert "a coarser scale" in run.to_html()


def test_the_case_is_left_alone_and_torch_tensors_will_do(right: Lockstep) -> None:
    torch = pytest.importorskip("torch")
    case = make_case(np.float32)
    before = {name: np.array(value) for name, value in case.items()}
    assert lockstep("mirror_toy", {n: torch.from_numpy(v) if n in "qkv" else v for n, v in case.items()}).ok
    assert all(np.array_equal(before[name], case[name]) for name in case)


def test_any_importable_pair() -> None:
    twin = Twin("attend", kernel="mirror_toy.kernel:attend", emulator="mirror_toy.emulator:attend")
    launch = ("mirror_toy.kernel:launch", "mirror_toy.emulator:launch")
    assert lockstep_pair(twin, launch, make_case(), programs=0).ok


def test_arguments_for_the_emulator_alone() -> None:
    run = lockstep("mirror_toy", make_case(), programs=0, emulator={"scale": 0.5})
    assert run.first_difference is not None
    assert run.first_difference.step == "scores"


def test_twins_that_do_not_mirror_are_not_run(seeded: Any) -> None:
    with pytest.raises(MirrorError, match="marker 'load_v -> v'"):
        lockstep(seeded(emulator=("#: load_v -> v", "#: load_w -> v")), make_case())


def test_a_kernel_edited_after_its_import_is_traced_as_it_is_now(seeded: Any) -> None:
    package = seeded()
    assert lockstep(package, make_case(), programs=0).ok
    path = Path(sys.path[0]) / package / "kernel.py"
    text = path.read_text()
    assert text.count("axis=2) * scale") == 1
    path.write_text(text.replace("axis=2) * scale", "axis=2) * scale * 3.0"))
    run = lockstep(package, make_case(), programs=0)
    assert run.first_difference is not None
    assert run.first_difference.step == "scores"


def test_an_emulator_edited_after_its_import_is_refused(seeded: Any) -> None:
    package = seeded()
    importlib.import_module(f"{package}.emulator")
    path = Path(sys.path[0]) / package / "emulator.py"
    path.write_text(path.read_text().replace("hi = lengths[batch]", "hi = lengths[batch] + 0"))
    with pytest.raises(RuntimeError, match="has changed since 'attend' was imported"):
        lockstep(package, make_case(), programs=0)


def test_bad_input_says_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"twin='reduce' is unknown; this operation has attend, normalise"):
        lockstep("mirror_toy", make_case(), twin="reduce")
    with pytest.raises(ValueError, match=r"programs=\[24\]: 24 must be in a grid"):
        lockstep("mirror_toy", make_case(), programs=24)
    with pytest.raises(ValueError, match=r"programs=-1: give program indices >= 0"):
        lockstep("mirror_toy", make_case(), programs=-1)
    with pytest.raises(ValueError, match="no LAUNCH"):
        lockstep(Operation((Twin("a", "mirror_toy.kernel:attend", "mirror_toy.emulator:attend"),)), {})
    with pytest.raises(TypeError, match="scale"):
        lockstep("mirror_toy", {name: value for name, value in make_case().items() if name != "scale"})


class _Balance(HTMLParser):
    """Fails on a tag that is not closed in order; collects what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href")]
        if tag not in ("br", "col", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(text: str) -> str:
    parser = _Balance()
    parser.feed(text)
    assert not parser.open
    assert not parser.fetched
    assert "url(" not in text
    assert "@import" not in text
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", re.sub(r"<style>.*?</style>", "", text, flags=re.S)))


def test_the_picture_of_agreement(right: Lockstep) -> None:
    text = parse(right.to_html(full=True))
    assert "No step differs" in text
    assert "FIRST DIFFERENCE" not in text
    kernel = right.twins[0][1]
    for line in ("k = tl.load(k_ptr", "m_new = np.where(live", "@triton.jit"):
        assert line in text
    assert all(f">{step.line}<" in right.to_html() for step in kernel.steps)
    assert right._repr_html_() == right.to_html()
    ulps = [float(number) for number in re.findall(r"([\d.]+) ulp", text)]
    assert ulps
    assert max(ulps) < 10  # sums in another order, in places of the tensor's largest magnitude
    assert "in ulp, units in the last place of the tensor's largest magnitude" in html.unescape(text)
    assert "or at most 1 value of bfloat16 apart (float32 sums in another order, rounded once to bfloat16)" in text


def test_the_picture_puts_counterparts_beside_each_other_and_folds_the_rest(right: Lockstep) -> None:
    rows = right.to_html().split("<tr")
    texts = [re.sub(r"<[^>]+>", "", row) for row in rows]
    (at,) = (i for i, text in enumerate(texts) if "m_new = tl.maximum" in text)
    assert "m_new = np.where" in texts[at]
    assert "<details>" not in rows[at]
    assert any("<details>" in row and "live = " in text for row, text in zip(rows, texts, strict=True))
    assert sum(text.count("#: softmax") for text in texts) == 2


def test_the_picture_of_a_difference(seeded: Any) -> None:
    run = lockstep(seeded(emulator=("        o = o * rescale[..., None]", "        o = o * 1")), make_case())
    page = run.to_html()
    text = parse(page)
    assert text.count("FIRST DIFFERENCE") == 1
    assert "iteration 1, program 0 = (0, 0, 0)" in text
    row = page[page.index('class="bad first"') :]
    assert "#: softmax" in row[: row.index("</tr>")]
    picture = ElementTree.fromstring(draw(run).svg)
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("✗ FIRST DIFFERENCE") == 1
    assert float(picture.attrib["width"]) <= 900
