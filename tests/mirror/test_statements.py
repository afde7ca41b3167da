"""Twins statement by statement. Rests on a law: texts that say the same have no violation, a change of one has some."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kvlab
from kvlab.mirror import Operation, check, check_sources
from kvlab.mirror.covered import Coverage
from kvlab.mirror.lines import Beside, beside, lines_of
from kvlab.mirror.report import Report
from kvlab.mirror.source import read_helper

KERNEL = '''
@triton.jit
def attend(
    q_ptr, k_ptr, o_ptr, sinks_ptr, scale, softcap, q_row, k_page, k_token, o_row,
    SINKS: tl.constexpr, CAPPED: tl.constexpr, BM: tl.constexpr, D: tl.constexpr,
):
    """Words."""
    #: setup -> q, k, m
    k_at = page * k_page + slot * k_token  #- address
    rows, d = tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * q_row + d[None, :], mask=rows[:, None] < limit, other=0.0)
    k = tl.load(k_ptr + k_at)
    m = tl.full([BM], LOWEST, tl.float32)
    if SINKS:
        m, l = sink_alone(tl.load(sinks_ptr + head).to(tl.float32) * LOG2E)
    #: scores -> s
    s = dots(q, k) * scale
    if CAPPED:
        s = cap(s, softcap)
    #: mask -> s
    visible = (key[None, :] >= first[:, None]) & (key[None, :] < limit[:, None])
    s = tl.where(visible, s, -float("inf"))
    #: softmax -> p, l
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.math.exp2(s - m_new[:, None])
    l = l * tl.math.exp2(m - m_new) + tl.sum(p, 1)
    #: store
    tl.store(o_ptr + rows * o_row, l / 1.4426950408889634, mask=rows < limit)
'''
EMULATOR = '''
def attend(q_array, k_rows, features, scale, traffic):
    """Words."""
    #: setup -> q, k, m
    BM, D = config.BM, config.D
    rows, d = np.arange(BM), np.arange(D)
    q = load(q_array, (rows[:, None], d), mask=rows[:, None] < limit, other=0)
    k = k_rows[page, slot]
    m = np.full(rows.shape, LOWEST, np.float32)
    if features.sinks is not None:
        m, l = sink_alone(features.sinks.astype(np.float32)[head] * np.float32(LOG2E))
    #: scores -> s
    active = start < hi  #- programs
    s = cta.dots(q, k, active).times(scale)
    if features.softcap > 0:
        s = cap(s, features.softcap)
    #: mask -> s
    key_at = by_column(s, key)
    visible = (key_at >= s.by_row(first)) & (s.by_row(limit) > key_at)
    s = s.with_values(np.where(visible, s.values, np.float32(-np.inf)))
    #: softmax -> p, l
    m_new = np.maximum(m, cta.row_max(s))
    p = s.with_values(exp2(s.values - s.by_row(m_new)))
    l = multiply_add(l, exp2(m - m_new), cta.row_sum(p))
    #: store
    store(o_array, (rows,), divide(l, np.float32(1.4426950408889634)), mask=rows < limit)
    traffic.move("registers->DRAM", l.nbytes)
'''


def report(kernel: str = KERNEL, emulator: str = EMULATOR, **more: Any) -> Report:
    told = {"features.sinks is not None": "SINKS", "features.sinks": "sinks_ptr", **more.pop("synonyms", {})}
    return check_sources(kernel, emulator, "attend", "attend", synonyms=told, **more)


def change(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
    return text.replace(old, new)


def test_spellings_of_both_sides_are_one() -> None:
    found = report()
    assert found.ok, str(found)
    (lines,) = found.lines
    assert lines.count() == (15, 14, 14)
    assert [(line.step, line.kind) for line in lines.lines if None in (line.kernel, line.emulator)] == [
        ("setup", "address"),
        ("scores", "programs"),
    ]


CHANGES = {
    "a scale that is missing": ("dots(q, k) * scale", "dots(q, k)", "'scale' is not used in the kernel"),
    "a line that is missing": ("    if CAPPED:\n        s = cap(s, softcap)\n", "", "'s': in the emulator only"),
    "another condition": ("    if SINKS:", "    if CAPPED:", "under 'CAPPED' in the kernel, 'SINKS' in the emulator"),
    "a comparison turned": ("(key[None, :] < limit[:, None])", "(key[None, :] > limit[:, None])", "'limit < key'"),
    "a comparison less strict": (
        ">= first[:, None]",
        "> first[:, None]",
        "'first < key' in the kernel, 'first <= key'",
    ),
    "bounds exchanged": (
        "(key[None, :] >= first[:, None]) & (key[None, :] < limit[:, None])",
        "(key[None, :] >= limit[:, None]) & (key[None, :] < first[:, None])",
        "'key < first', 'limit <= key' in the kernel, 'first <= key', 'key < limit' in the emulator",
    ),
    "exp for exp2": ("p = tl.math.exp2(", "p = tl.exp(", "'exp(-m_new s)' in the kernel, 'exp2(-m_new s)' in"),
    "sum for max": ("tl.max(s, 1)", "tl.sum(s, 1)", "'sum(s)' in the kernel, 'max(s)' in the emulator"),
    "a sign": ("s - m_new", "s + m_new", "'m_new + s'"),
    "operands exchanged": ("exp2(m - m_new)", "exp2(m_new - m)", "'-m + m_new'"),
    "a product for a quotient": ("l / 1.44", "l * 1.44", "'1.4426950408889634 * l' in the kernel"),
    "a constant": ("l / 1.4426950408889634", "l / 1.45", "'/1.45 * l' in the kernel"),
    "an initial value": ("[BM], LOWEST", "[BM], 0", "'is(0.0)' in the kernel"),
    "what a masked score is": ('s, -float("inf")', "s, 0.0", "'where(visible, s, 0.0)' in the kernel"),
    "what stands outside a mask": ("limit, other=0.0", "limit, other=1.0", "'other(1.0)' in the kernel"),
    "another array": ("tl.load(k_ptr + k_at)", "tl.load(q_ptr + k_at)", "'q_ptr' is not used in the emulator"),
    "a sign in an address": ("q_row + d", "q_row - d", "'minus(d)' in the kernel, nothing in the emulator"),
    "another operand": ("= dots(q, k)", "= dots(q, q)", "'k' is not used in the kernel"),
    "operands of a helper": ("cap(s, softcap)", "cap(softcap, s)", "cap() is given softcap, s in the kernel"),
    "another helper": ("= cap(s", "= bound(s", "'bound()' in the kernel, 'cap()' in the emulator"),
    "a name": ("    p = tl", "    w = tl", "'w': in the kernel only; a comment '#- class' says why"),
    "the mask of a store": ("mask=rows < limit)", "mask=rows <= limit)", "'rows <= limit' in the kernel"),
    "what is stored": ("o_row, l / 1", "o_row, m / 1", "'m' is not used in the emulator"),
    "a class that is none": ("#- address", "#- because", "class 'because' is none of address, piece, wait"),
    "no class": ("  #- address", "", "'k_at': in the kernel only; a comment"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_reported_with_both_lines(name: str) -> None:
    old, new, said = CHANGES[name]
    found = report(change(KERNEL, old, new))
    assert any(said in violation.message for violation in found.violations), str(found)
    places = {part for v in found.violations for part in (v.kernel, v.emulator)}
    assert all(place.rpartition(":")[2].isdigit() for place in places)


def test_an_order_is_one() -> None:
    lines = "    m_new = tl.maximum(m, tl.max(s, 1))\n", "    p = tl.math.exp2(s - m_new[:, None])\n"
    assert not report(change(KERNEL, "".join(lines), "".join(reversed(lines)))).ok


def test_a_synonym_is_declared_and_what_a_machine_holds() -> None:
    other = change(EMULATOR, "times(scale)", "times(problem.factor)")
    assert not report(emulator=other).ok
    assert report(emulator=other, synonyms={"problem.factor": "scale"}).ok
    walked = change(EMULATOR, "cta.dots(q, k, active)", "cta.dots(q, active)")
    assert [v.message for v in report(emulator=walked).violations] == [
        "step 'scores', 's': 'k' is not used in the emulator"
    ]
    assert report(emulator=walked, held={"dots": "k"}).ok


HELPER = """
def scores(x, y):
    top = x * 2
    return top - y
def other(x):
    return x
def attend(q, k):
    #: scores -> s
    s = scores(q, k) + other(q)
"""


def test_helpers_that_both_call_are_compared() -> None:
    named = HELPER.replace("def scores", "def _scores").replace("= scores", "= _scores")
    assert check_sources(HELPER, named, "attend", "attend", synonyms={}).ok
    found = check_sources(HELPER, named.replace("top - y", "y - top"), "attend", "attend", synonyms={})
    assert [v.message for v in found.violations] == [
        "step 'scores', 'return': '-y + top' in the kernel, '-top + y' in the emulator"
    ]
    assert [lines.name for lines in found.lines] == ["attend", "attend: scores", "attend: other"]


def test_a_constant_that_a_helper_no_longer_uses_is_missed() -> None:
    """Both modules have LN2 and LOG2E; one side's only use of one is exchanged for the other, or dropped."""
    module = "from units import LN2, LOG2E\n\n\n" + HELPER.replace("x * 2", "x * LOG2E")
    modules = [module, module]
    assert check_sources(*modules, "attend", "attend", synonyms={}).ok
    for changed in ("x * LN2", "x"):
        for side in (0, 1):
            sources = [text.replace("x * LOG2E", changed) if i == side else text for i, text in enumerate(modules)]
            found = check_sources(*sources, "attend", "attend", synonyms={})
            who = ("kernel", "emulator")[side]
            assert f"'LOG2E' is not used in the {who}" in "".join(v.message for v in found.violations)


def test_source_lines_stand_beside_each_other_once() -> None:
    """Of the side-by-side picture: every line of a step in its order, counterparts in one row."""
    found = report()
    (lines,) = found.lines
    for step, (kernel, emulator) in zip(
        lines.steps, zip(lines.kernel.steps, lines.emulator.steps, strict=True), strict=True
    ):
        spans = [range(s.line + 1, s.last_line + 1) for s in (kernel, emulator)]
        rows = beside(step, *spans)
        assert [line for row in rows for line in row.kernel] == [*spans[0]]
        assert [line for row in rows for line in row.emulator] == [*spans[1]]
        assert all(row.kinds or (row.kernel and row.emulator) for row in rows)
    assert beside((), range(1, 3), range(4, 5)) == [Beside(range(1, 3), range(4, 5))]


OPERATIONS = (
    "merge_states", "kv_store", "mha_decode", "mha_decode_streaming", "mha_prefill", "mla_decode", "mla_prefill",
    "attend_paged", "kvlab.attention.attend_paged.latent", "kvlab.attention.attend_paged.expanded",
)


@pytest.mark.parametrize("op", OPERATIONS)
def test_nine_of_ten_statements_have_a_counterpart_and_equal_it(op: str) -> None:
    """And operations that attend call the helpers of SHARED, which the next test changes."""
    coverage = Coverage(check(op).lines)
    for twin, lines in zip(Operation.load(op).twins, coverage.of_twins, strict=True):
        total, paired, equal = lines.count()
        if not twin.specialised:
            assert equal == paired >= 0.9 * total, str(coverage)
    helpers = {lines.name.rpartition(": ")[2] for lines in coverage.lines}
    assert op in ("merge_states", "kv_store") or helpers >= {helper for _, helper, _, _ in SHARED.values()}


SIDES = ("kernel", "emulator")
SHARED = {
    "softcap": ("features/scores.py", "adjust", r"\n( *)if (?:numbers|features)\.softcap[^\n]*\n +s = cap[^\n]*", ""),
    "exp2": ("tiles/online_softmax.py", "weigh", r"\bexp2\((?=\(?s)", "exp("),
    "mask": (
        "features/scores.py", "hide",
        r"(key\)?|key\[None, :\]) < (?=limit|s\.by_row\(limit)", r"\1 > ",
    ),
    "scale": ("features/scores.py", "adjust", r"(\n +s = [^\n#]*?) \* (?:s\.by_row\(factor\)|factor)", r"\1"),
}
"""A softcap, an exponential, a comparison of a mask and a scale of scores, in helpers that twins call: file, helper,
text, what it becomes."""


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", SHARED)
def test_what_helpers_make_of_scores_cannot_be_changed_on_one_side(name: str, side: str) -> None:
    file, helper, old, new = SHARED[name]
    path = str(Path(kvlab.__file__).parent / "attention" / file)
    text = Path(path).read_text(encoding="utf-8")
    functions = {"kernel": f"{helper}_kernel", "emulator": helper}
    body = re.search(rf"\ndef {functions[side]}\(.*?(?=\n\n\n|\Z)", text, re.S)
    assert body is not None
    changed, count = re.subn(old, new, body[0])
    assert count > 0, "nothing of the kind"
    texts = dict.fromkeys(functions, text) | {side: text.replace(body[0], changed)}

    def differences(of: dict[str, str]) -> list[str]:
        kernel, emulator = (read_helper(of[one], function, path) for one, function in functions.items())
        lines = lines_of(helper, kernel, emulator, {}, {}).lines
        return [words for line in lines for words in line.differences or (() if line.kernel and line.emulator else "-")]

    assert not differences(dict.fromkeys(functions, text))
    assert differences(texts)
