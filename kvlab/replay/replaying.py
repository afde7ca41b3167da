"""A recorded call in every sibling, and the first difference: in words, and as a picture."""

from __future__ import annotations

import contextlib
import html
import importlib
import inspect
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlab.attention.call.call import Call
from kvlab.common.checks import require
from kvlab.common.drawn import Shown
from kvlab.common.dtypes import float32

from .array_values import Entry, described, dtype_named, kept
from .recorded import Held, RecordedCall, load
from .recorder import results_of

SIDES = ("reference", "emulator", "kernel")
LSE_ALLOWED, FLOAT32_ALLOWED = 1e-4, 1e-5
MOST_ROWS = 64
"""Rows that are off of which a pattern is looked for."""


@dataclass(frozen=True, eq=False)
class Ran:
    """One sibling's run. name : ``recorded``, ``reference``, ``emulator`` or ``kernel``; results : its arrays, by name,
    None where it did not run, which ``words`` explain; raised : what it raised.
    """

    name: str
    results: Held | None = None
    words: str = ""
    raised: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """One result of one side against the same of the reference. error : the largest distance, relative to the
    reference's largest magnitude (of lse to 1 at least), infinite where one side alone is finite; allowed : what the
    narrowest dtype of the call excuses, units in the last place of that magnitude: two of 16 bits, one of 8 bits.
    shares : of a result that is off, the error of each element over what is allowed, ``[rows, last axis]``.
    """

    side: str
    name: str
    error: float
    allowed: float
    words: str
    shares: Any = field(default=None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Tells whether it is within what is allowed."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        return f"{self.name} of the {self.side} side against the reference: {self.words}"


@dataclass(frozen=True, eq=False)
class Replay(Shown):
    """Result of :func:`replay`: the sides that ran, comparisons, and the lockstep, None where it did not run, which
    ``lockstep_words`` explain. repeated : the sides whose results have the bits that were recorded.
    """

    recorded: RecordedCall
    sides: dict[str, Ran]
    comparisons: list[Comparison]
    lockstep: Any = field(default=None, repr=False)
    lockstep_words: str = ""
    repeated: tuple[str, ...] = ()

    @property
    def first_difference(self) -> str | None:
        """First difference in words: what a side raised alone, a result that is off, or a step of the lockstep."""
        raised = {side.name: side.raised for side in self.sides.values() if side.results is not None or side.raised}
        if len(set(raised.values())) > 1:
            return "; ".join(f"{name}: {f'raised {text}' if text else 'gave results'}" for name, text in raised.items())
        bad = next((one for one in self.comparisons if not one.ok), None)
        if bad is not None:
            return str(bad)
        first = None if self.lockstep is None else self.lockstep.first_difference
        return None if first is None else f"lockstep: {first}"

    @property
    def ok(self) -> bool:
        """Tells whether nothing differs."""
        return self.first_difference is None

    @property
    def finding(self) -> str:
        """One sentence."""
        first = self.first_difference
        if first is not None:
            return f"first difference: {first}"
        raised = next((side.raised for side in self.sides.values() if side.raised), None)
        if raised is not None:
            return f"no difference: every side raised {raised}"
        sides = list(dict.fromkeys(one.side for one in self.comparisons))
        if not sides:
            ran = ", ".join(side.name for side in self.sides.values() if side.results is not None) or "no side"
            return f"nothing to compare: {ran} alone gave values"
        return f"no difference: {', '.join(sides)} agree{'s' * (len(sides) == 1)} with the reference"

    def __str__(self) -> str:
        lines = [str(self.recorded), ""]
        for side in self.sides.values():
            lines.append(f"{side.name}: {side.words}")
        if self.repeated:
            lines.append(f"the bits that were recorded: {', '.join(self.repeated)}")
        lines += [f"{'ok' if one.ok else 'DIFFERS'}  {one}" for one in self.comparisons]
        lines.append(f"lockstep: {self.lockstep_words if self.lockstep is None else self.lockstep.finding}")
        return "\n".join([*lines, "", self.finding])

    def draw(self) -> Any:
        """The picture: errors of all sides, where the first that differs is off, and the lockstep. ValueError where two
        sides did not run.
        """
        return importlib.import_module("kvlab.viz.charts.replay_page").draw_replay(self)

    def to_html(self, full: bool = False) -> str:
        """Words, errors and lockstep as HTML; ``full``: a page of its own."""
        host = importlib.import_module("kvlab.viz.pen.host")
        errors = ""
        if self.comparisons:
            errors = importlib.import_module("kvlab.viz.charts.replay_page").draw_replay(self, lockstep=False).inline
        beside = "" if self.lockstep is None else self.lockstep.to_html()
        told = f"<p><b>{html.escape(self.finding)}</b></p><pre>{html.escape(str(self))}</pre>"
        body = host.view("replay", told, rules="pre{white-space:pre-wrap}", label=self.finding) + errors + beside
        page: str = host.document(f"kvlab replay: {self.recorded.source}", body, style="body{margin:8px}")
        return page if full else body

    def _repr_html_(self) -> str:
        return self.to_html()


def replay(
    source: str | os.PathLike[str] | RecordedCall, *, quick: bool = False, device: str | None = None
) -> Replay:
    """Run a recorded call in the reference, the emulator, the kernel and in lockstep, each as far as it can. What they
    give, and what was recorded, is compared with the reference.

    source   a file that was recorded, or what :func:`load` or :func:`load_flashinfer` gave
    quick    neither the kernel nor the lockstep
    device   where the kernel runs, ``"cuda"`` say; by default it is interpreted in CPU memory, which is slow

    A side that cannot run says why. ValueError for a bad file, and for one that lacks values.

    >>> import tempfile
    >>> from kvlab.attention import merge_states
    >>> from kvlab.replay import recording
    >>> outs, lses = np.ones((2, 3, 4, 8), np.float32), np.zeros((2, 3, 4), np.float32)
    >>> with tempfile.TemporaryDirectory() as folder, recording(folder) as recorder:
    ...     out = merge_states(outs, lses)
    ...     found = replay(recorder.files[0], quick=True)
    >>> found.ok, found.repeated, [f"{one.name} of {one.side}" for one in found.comparisons][:2]
    (True, ('reference', 'emulator'), ['out of recorded', 'lse of recorded'])
    """
    recorded = source if isinstance(source, RecordedCall) else load(source)
    require(not recorded.missing, f"{recorded.source} lacks {'; '.join(recorded.missing)}",
            "recorded with a larger limit to be run")
    sides = {"recorded": _as_recorded(recorded)}
    for name in SIDES[: 2 if quick else 3]:
        sides[name] = _run(recorded, name, device)
    exact, comparisons = sides["reference"].results, []
    if exact is not None:
        allowed = _allowed(recorded)
        for side in sides.values():
            if side.name != "reference" and side.results is not None:
                comparisons += list(_compared(side.name, side.results, exact, allowed))
    run, words = (None, "left out") if quick else _in_lockstep(recorded)
    return Replay(recorded, sides, comparisons, run, words, _repeated(sides))


def lockstep_case(call: Call[Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The operation's folder, what both siblings are launched with in a planned call, and what the emulator alone gets.
    ValueError for a call whose emulator mirrors another kernel than the portable one.
    """
    folder = call.plan.sibling.rpartition(".")[0]
    launch = getattr(importlib.import_module(f"{folder}.emulator"), "launch", None)
    if launch is None or call.plan.sibling != f"{folder}.emulator:launch":
        raise ValueError(f"operation is {call.operation!r}: must be one whose emulator mirrors the portable kernel")
    case = dict(zip(inspect.signature(launch).parameters, call.arrays, strict=False)) | call.named()
    for alone in ("out", "traffic"):
        case.pop(alone, None)
    arch = call.plan.explanation.arch
    return folder, case, {"arch": arch} if "arch" in inspect.signature(launch).parameters else {}


def _as_recorded(recorded: RecordedCall) -> Ran:
    if recorded.raised is not None:
        return Ran("recorded", words=f"raised {recorded.raised}", raised=recorded.raised)
    if not recorded.ended:
        return Ran("recorded", words="has no results: the call did not end")
    lacks = recorded.results.missing
    return Ran("recorded", recorded.results, f"lacks {'; '.join(lacks)}" if lacks else "all values of its results")


def _run(recorded: RecordedCall, side: str, device: str | None) -> Ran:
    """The call in one sibling."""
    given = recorded.trees
    changed: dict[str, Any] = {"backend": "triton" if side == "kernel" else side}
    backend = (recorded.plan or {}).get("backend")
    if side == "kernel" and device is not None and backend == "hopper":
        changed["backend"] = "hopper"
    if side != "emulator" and "arithmetic" in given:
        changed["arithmetic"] = "float32"
    start, planned = time.perf_counter(), False
    try:
        call = recorded.made(device if side == "kernel" else None, **changed).planned()
        planned = True
        found, written = results_of(call, call.results(*call.launch()))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if not planned and recorded.raised is None and isinstance(error, ValueError):  # what this side does not do
            return Ran(side, words=f"did not run: {text}")
        return Ran(side, words=f"raised {text}", raised=text)
    entries, storages = described(found)
    held = Held(entries, storages, kept(found, entries, written, 1 << 62)[0])
    told, seconds = call.plan.explanation, time.perf_counter() - start
    return Ran(side, held, f"{told.backend} ({told.reason}), {seconds:.2f} s", seconds=seconds)


def _in_lockstep(recorded: RecordedCall) -> tuple[Any, str]:
    """The lockstep of the portable kernel, or why there is none."""
    try:
        call = recorded.made(backend="emulator").planned()
        folder, case, alone = lockstep_case(call)
        run = importlib.import_module("kvlab.mirror").lockstep(folder.rpartition(".")[2], case, emulator=alone)
    except Exception as error:
        return None, f"did not run: {type(error).__name__}: {error}"
    return run, ""


def _repeated(sides: dict[str, Ran]) -> tuple[str, ...]:
    """The sides with the bits of the recorded one, by their digests, which are kept of all results."""
    before = sides["recorded"].results
    if before is None or not before.entries:
        return ()
    bits = _bits(before.entries)
    return tuple(name for name, side in sides.items()
                 if name != "recorded" and side.results is not None and _bits(side.results.entries) == bits)


def _bits(entries: dict[str, Entry]) -> dict[str, tuple[Any, ...]]:
    return {name: (*_form(entry), entry["sha256"]) for name, entry in entries.items()}


def _form(entry: Entry) -> tuple[Any, ...]:
    """Dtype and shape, of a cache that of the pages which count."""
    shape = entry["shape"]
    return (entry["dtype"], entry["pages"], *shape[1:]) if "pages" in entry else (entry["dtype"], *shape)


def _allowed(recorded: RecordedCall) -> float:
    """The error that the narrowest float of the call excuses, as a share of the largest magnitude."""
    ml_dtypes, widest = importlib.import_module("ml_dtypes"), FLOAT32_ALLOWED
    for entry in recorded.held.entries.values():
        dtype = dtype_named(entry["dtype"], "dtype")
        if dtype.itemsize < float32.itemsize and dtype.kind in "fV":
            widest = max(widest, dtype.itemsize * float(ml_dtypes.finfo(dtype).eps))
    return widest


def _compared(side: str, held: Held, exact: Held, allowed: float) -> Iterator[Comparison]:
    for name, entry in held.entries.items():
        other = exact.entries.get(name)
        if other is None or name not in held.values or name not in exact.values:
            continue
        if _form(entry) != _form(other):
            words = f"{entry['dtype']} {entry['shape']}, not {other['dtype']} {other['shape']}"
            yield Comparison(side, name, float("inf"), allowed, words)
            continue
        a, b = (np.asarray(x.values[name]).view(dtype_named(entry["dtype"], "dtype")) for x in (held, exact))
        yield _distance(side, name, a, b, LSE_ALLOWED if name == "lse" else allowed)


def _distance(side: str, name: str, a: Any, b: Any, allowed: float) -> Comparison:
    """How far an array is from the reference's, and where most."""
    with np.errstate(invalid="ignore", over="ignore"):
        x, y = a.astype(np.float64), b.astype(np.float64)
        same, finite = (x == y) | (np.isnan(x) & np.isnan(y)), np.isfinite(x) & np.isfinite(y)
        apart = np.where(same, 0.0, np.where(finite, np.abs(x - y), np.inf))
    scale = float(np.abs(y[np.isfinite(y)]).max(initial=0.0))
    scale = max(scale, 1.0) if name == "lse" else scale or 1.0
    error = float(apart.max(initial=0.0)) / scale
    if error <= allowed:
        words = f"at most {error:.2g} of its largest magnitude, {allowed:.2g} allowed"
        return Comparison(side, name, error, allowed, words)
    at = np.unravel_index(int(apart.argmax()), apart.shape)
    wrong = ~same & ~(finite & (apart <= allowed * scale))
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    columns = x.shape[-1] if x.ndim else 1
    rows = np.flatnonzero(wrong.reshape(-1, columns).any(axis=1))
    words = f"; {int(wrong.sum())} of {wrong.size} elements are off, in {len(rows)} rows, {rows[0]} to {rows[-1]}"
    with contextlib.suppress(ValueError), np.errstate(all="ignore"):
        pattern_of = importlib.import_module("kvlab.mirror.patterns").pattern_of
        pattern = pattern_of(*(side.reshape(-1, columns)[rows[:MOST_ROWS]] for side in (x, y)))
        words += f"; there, {pattern.name}: {pattern.words}" if pattern.name != "region" else ""
    return Comparison(
        side, name, error, allowed,
        f"first at {list(first)}: {x[first]:.6g}, reference {y[first]:.6g}; most at {[int(i) for i in at]}: "
        f"{x[at]:.6g}, reference {y[at]:.6g}, {error:.2g} of its largest magnitude, {allowed:.2g} allowed{words}",
        apart.reshape(-1, columns) / (allowed * scale),
    )
