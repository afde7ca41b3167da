"""The static check of twins. Rests on a law: a check must pass on twins that mirror and fail on each single change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.mirror import MirrorError, Operation, Report, Twin, check, check_sources, compare
from kvlab.mirror.lines import lines_of
from kvlab.mirror.source import read_side

TOY = Path(__file__).parent / "fixtures" / "mirror_toy"
KERNEL = (TOY / "kernel.py").read_text()
EMULATOR = (TOY / "emulator.py").read_text()


def mutate(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
    return text.replace(old, new)


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def report(kernel: str = KERNEL, emulator: str = EMULATOR, name: str = "attend") -> Report:
    return check_sources(kernel, emulator, name, name)


def test_the_toy_twins_mirror() -> None:
    found = check("mirror_toy")
    assert found.ok
    steps = [step.marker.name for step in found.twins[0][1].steps]
    assert steps == ["setup", "load_k", "scores", "mask", "softmax", "load_v", "accumulate", "store"]
    assert str(found) == "twins mirror each other (attend: 8 steps, normalise: 3 steps)"


def test_white_space_of_a_marker_is_free_but_its_words_are_not() -> None:
    spaced = mutate(EMULATOR, "#: softmax -> p, m, l, o   online:", "#:  softmax ->  p,m , l, o online:")
    assert report(emulator=spaced).ok
    assert not report(emulator=mutate(EMULATOR, "zeros past the end", "zeros after the end")).ok


SWAPPED = mutate(
    mutate(EMULATOR, "#: load_v -> v\n", "#: accumulate -> o\n        o = 1\n        #: load_v -> v\n"),
    "        #: accumulate -> o\n        o +=",
    "        o +=",
)


@pytest.mark.parametrize(
    ("emulator", "message", "line"),
    [
        (
            mutate(EMULATOR, "#: load_k -> inside, k ", "#: fetch_k -> inside, k "),
            "marker 'load_k -> inside, k   a tile",
            "#: load_k",
        ),
        (mutate(EMULATOR, "        #: load_v -> v\n", ""), "marker 'load_v -> v' in the kernel, nothing", "#: load_v"),
        (SWAPPED, "nothing in the kernel, marker 'accumulate -> o' in the emulator", "#: load_v"),
        (mutate(EMULATOR, "ragged_range(0, hi, BN):", "ragged_range(0, hi, BM):"), "header 'for start in", "for start"),
        (
            mutate(EMULATOR, "for start in ragged", "for begin in ragged"),
            "header 'for start in range(0, hi, BN)'",
            "for",
        ),
        (mutate(EMULATOR, "        s *= np.float32(scale)\n", ""), None, None),
        (
            mutate(EMULATOR, "v = Lanes(", "w = Lanes("),
            "step 'load_v' lists 'v' but the emulator does not",
            "#: load_v",
        ),
        (mutate(EMULATOR, "        m = m_new\n", ""), "step 'softmax' lists 'm' but the emulator", "#: softmax"),
        (mutate(EMULATOR, "-> p, m, l, o ", "-> p, m, l, o, z "), "marker 'softmax", "#: softmax"),
    ],
    ids=["renamed", "missing", "order", "bounds", "target", "free-statement", "unbound", "unbound-2", "outputs"],
)
def test_one_change_is_one_report(emulator: str, message: str | None, line: str | None) -> None:
    found = report(emulator=emulator)
    if message is None:
        assert found.ok
        return
    assert any(v.message.startswith(message) for v in found.violations), str(found)
    assert line is not None
    assert any(v.kernel == f"kernel.py:{line_of(KERNEL, line)}" for v in found.violations), str(found)


def test_a_change_of_the_kernel_is_seen_too() -> None:
    found = report(kernel=mutate(KERNEL, "        o += tl.sum", "        acc = tl.sum"))
    assert [v.message for v in found.violations] == ["step 'accumulate' lists 'o' but the kernel does not bind it"]


def test_statements_outside_a_step() -> None:
    after_loop = mutate(EMULATOR, "    #: store   unnormalised", "    late = o\n    #: store   unnormalised")
    (violation,) = report(emulator=after_loop).violations
    assert violation.message == "statement outside a step: 'late = o'; a marker must open it"
    assert violation.emulator == f"emulator.py:{line_of(after_loop, 'late = o')}"
    assert violation.kernel == f"kernel.py:{line_of(KERNEL, '#: accumulate')}"
    first = mutate(EMULATOR, '    """All programs at once', '    early = 1\n    """All programs at once')
    assert any("'early = 1'" in v.message for v in report(emulator=first).violations)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("        #: scores -> s\n", "        #: scores -> s\n        #: more -> s\n", "step 'scores' is empty"),
        (
            "        s *= np.float32(scale)",
            "        s *= np.float32(scale)  #: more",
            "marker '#: more' stands behind code",
        ),
        ("        #: load_v -> v\n", "        #: load_v ->\n", "marker '#: load_v ->' is not of the form"),
        ("    #: store   unnormalised", "        #: tail\n    #: store   unnormalised", "step 'tail' is empty"),
    ],
    ids=["empty", "behind-code", "form", "no-statement"],
)
def test_malformed_markers(old: str, new: str, message: str) -> None:
    found = report(emulator=mutate(EMULATOR, old, new))
    assert any(v.message.startswith(message) for v in found.violations), str(found)


BRANCH = """
def f(flag):
    #: setup -> x
    x = 1
    if flag > 0:
        #: left -> y
        y = x
    elif flag < 0:
        #: middle -> y
        y = 0 if x else 1
    else:
        #: right -> y
        (y := -x)
    while y < 3:
        #: count -> y
        y += 1
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if flag > 0", "if flag > 1"),
        ("elif flag < 0", "elif flag < 1"),
        ("while y < 3", "while y < 4"),
        ("    else:\n        #: right", "    if x:\n        #: right"),
        ("    else:\n        #: right", "    for _ in range(1):\n        #: right"),
        ("        (y := -x)", "        print([y for y in (1, 2)])"),
        ("        #: right -> y\n", ""),
    ],
    ids=["if", "elif", "while", "else-to-if", "else-to-for", "walrus", "no-marker-in-else"],
)
def test_branches_and_while(old: str, new: str) -> None:
    assert report(BRANCH, BRANCH, "f").ok
    assert not report(BRANCH, mutate(BRANCH, old, new), "f").ok


def test_hints_of_a_range_are_free_but_its_step_is_not() -> None:
    kernel = "def f(n):\n    for i in tl.range(0, n, step=2, num_stages=3):\n        #: a -> x\n        x = i\n"
    assert report(kernel, kernel.replace("tl.range", "range").replace(", num_stages=3", ""), "f").ok
    assert not report(kernel, kernel.replace("step=2", "step=4"), "f").ok
    assert not report(kernel, kernel.replace("tl.range", "reversed"), "f").ok


PRODUCER = """
def produce(n):
    #@ producer
    for tile in range(n):
        #: load_k -> k
        k = tile
        #: load_v -> v
        v = tile

def consume(n):
    #@ consumer
    for tile in range(n):
        #: scores -> s
        s = tile
"""
INTERLEAVED = """
def emulate(n):
    for tile in range(n):
        #@ producer
        #: load_k -> k
        k = tile
        #@ consumer   works on what has landed
        #: scores -> s
        s = k
        #@ producer
        #: load_v -> v
        v = tile
"""


def test_order_is_checked_within_each_role() -> None:
    assert check_sources(PRODUCER, INTERLEAVED, "produce, consume", "emulate").ok
    late = INTERLEAVED.replace("load_k -> k", "X").replace("load_v -> v", "load_k -> k").replace("X", "load_v -> v")
    found = check_sources(PRODUCER, late, "produce, consume", "emulate")
    assert any("(role producer)" in v.message for v in found.violations)
    assert not any("(role consumer)" in v.message for v in found.violations)


def test_check_raises_with_every_violation_and_both_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mutate(mutate(EMULATOR, "v = Lanes(", "w = Lanes("), "#: scores -> s", "#: score -> s")
    package = tmp_path / "mirror_toy_broken"
    package.mkdir()
    for name, text in (("kernel", KERNEL), ("emulator", broken), ("config", (TOY / "config.py").read_text())):
        (package / f"{name}.py").write_text(text)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MirrorError) as caught:
        check("mirror_toy_broken")
    assert isinstance(caught.value, ValueError)
    assert len(caught.value.report.violations) == 2
    for part in ("1. ", "2. ", str(package / "kernel.py") + ":", str(package / "emulator.py") + ":"):
        assert part in str(caught.value)
    assert compare("mirror_toy_broken").violations == caught.value.report.violations


def test_twins_of_any_module() -> None:
    twin = Twin("attend", kernel="mirror_toy.kernel:attend", emulator="mirror_toy.emulator:attend")
    assert check(Operation((twin,))).ok


def test_bad_input_says_what_is_accepted() -> None:
    with pytest.raises(ValueError, match=r"'nothing_here' is unknown.*folder of kvlab.attention"):
        check("nothing_here")
    with pytest.raises(ValueError, match=r"'attend' does not name a function; write 'module:function'"):
        Twin("attend", kernel="attend", emulator="emulator:attend")
    with pytest.raises(ValueError, match=r"defines no function 'absent'.*attend, normalise, launch"):
        check_sources(KERNEL, EMULATOR, "absent", "attend")
    with pytest.raises(ValueError, match=r"'mirror_toy.none' has no Python source"):
        check(Operation((Twin("a", "mirror_toy.none:f", "mirror_toy.emulator:f"),)))


def test_the_check_imports_neither_triton_nor_torch_and_a_twin_not_even_numpy() -> None:
    code = (
        "import sys\n"
        "from kvlab.mirror.twin import Twin\n"
        "assert not {'numpy', 'torch', 'triton'} & set(sys.modules), 'Twin'\n"
        "from kvlab.mirror import check\n"
        f"sys.path.insert(0, {str(TOY.parent)!r})\n"
        "check('mirror_toy')\n"
        "assert not {'torch', 'triton', 'mirror_toy.kernel', 'mirror_toy.emulator'} & set(sys.modules), 'check'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_waits_and_arrivals_are_counterparts() -> None:
    """A wait has its counterpart where it waits for the same phase of the same barrier."""
    kernel = "def f(q, full, b):\n    #: wait\n    mbarrier.wait(full.index(b), 1)\n"
    kernel += "    x = hopper.warpgroup_mma_wait(0, deps=(q,))\n"
    emulator = "def f(cta, b, me):\n    #: wait\n    yield cta.full[b], {}\n    cta.wait_mma(me, 0)\n"
    for phase, paired in ((1, 2), (0, 1)):
        sides = read_side(kernel, "f"), read_side(emulator.format(phase), "f")
        lines = lines_of("f", *sides, {}, {})
        assert lines.count() == (2, paired, paired)
