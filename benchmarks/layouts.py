"""Layouts against their closest peer, tensor-layouts: ratios of times on this machine, one JSON line a figure.

    python benchmarks/layouts.py [--peer-python PATH] [--repeat N]

The peer is installed with its drawing extra into a scratch environment, which is removed afterwards; ``--peer-python``
names an interpreter that has it. Both sides do the same work, in turns, each in its own process; a figure is the ratio
of the best times. The peer's bank model counts a vector access as if all lanes went at once; only times are compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvlab.hardware import count_wavefronts
from kvlab.layout import ComposedLayout, Layout, Swizzle, complement, compose, logical_divide, zipped_divide
from kvlab.viz import draw_layout

PEER = ["tensor-layouts==0.3.2", "matplotlib>=3.10"]
TARGETS = {"swizzled_offsets": 300, "bank_analysis": 100, "algebra": 1, "svg": 200}
SVG_LIMIT_S = 0.050

ALGEBRA = {
    "compose": [
        ("(6,2):(8,2)", "(4,3):(3,1)"),
        ("(10,2):(16,4)", "(5,4):(1,5)"),
        ("(8,(2,8)):(16,(8,1))", "(16,8):(8,1)"),
        ("((2,4),(2,8)):((1,16),(2,64))", "(4,8):(2,8)"),
        ("128:1", "(8,16):(16,1)"),
    ],
    "complement": [
        ("4:2", 24),
        ("(2,2):(1,6)", 24),
        ("(4,8):(1,64)", 4096),
        ("(8,(2,4)):(1,(16,64))", 1024),
        ("32:4", 512),
    ],
    "divide": [
        ("(4,2,3):(2,1,8)", "4:2"),
        ("(64,32):(32,1)", "(16,8):(1,64)"),
        ("128:1", "(4,8):(1,16)"),
        ("(8,8,8):(64,8,1)", "8:1"),
        ("(16,(4,8)):(32,(8,1))", "(4,4):(1,16)"),
    ],
}
"""1000 of each operation in a round: 200 times these."""

PEER_PROGRAM = """
import json, sys, time
from tensor_layouts import ComposedLayout, Layout, Swizzle, complement, compose, logical_divide
from tensor_layouts.analysis import bank_conflicts

work, out = json.loads(sys.argv[1]), sys.argv[2]


def layout(text):
    return Layout(*(eval(part) for part in text.split(":")))


def swizzled_offsets(count=100_000):
    c = compose(Swizzle(3, 3, 3), Layout((16384, 64), (64, 1)))
    start = time.perf_counter()
    for i in range(count):
        c(i)
    return (time.perf_counter() - start) * (1_000_000 / count)


def bank_analysis():
    swizzle, lanes = Swizzle(3, 3, 3), Layout(((16, 2), 8), ((64, 8), 1))
    start = time.perf_counter()
    for row in range(0, 128, 16):
        for column in range(0, 64, 16):
            bank_conflicts(ComposedLayout(swizzle, lanes, offset=row * 64 + column), element_bytes=2)
    return time.perf_counter() - start


def algebra():
    pairs = {
        name: [(layout(a), b if isinstance(b, int) else layout(b)) for a, b in todo] for name, todo in work.items()
    }
    start = time.perf_counter()
    for name, operation in (("compose", compose), ("complement", complement), ("divide", logical_divide)):
        for _ in range(200):
            for a, b in pairs[name]:
                operation(a, b)
    return time.perf_counter() - start


def svg():
    from tensor_layouts.viz import draw_layout

    start = time.perf_counter()
    draw_layout(compose(Swizzle(3, 3, 3), Layout((128, 64), (64, 1))), filename=out + "/peer.svg", colorize=True)
    return time.perf_counter() - start


print(json.dumps(globals()[sys.argv[3]]()))
"""


def swizzled_offsets() -> float:
    layout = ComposedLayout(Layout((16384, 64), (64, 1)), Swizzle(3, 3, 3, "fp16"))
    start = time.perf_counter()
    layout(np.arange(1_000_000))
    return time.perf_counter() - start


def bank_analysis() -> float:
    lane, start = np.arange(32), time.perf_counter()
    tile = ComposedLayout(Layout.row_major(128, 64), Swizzle(3, 3, 3, "fp16"))
    offsets = zipped_divide(tile, (16, 16))((lane % 16, lane // 16 * 8), np.arange(32)[:, None])
    wavefronts, ideal, _ = count_wavefronts("ldmatrix.x4", offsets * 2)
    elapsed = time.perf_counter() - start
    if wavefronts.sum() != ideal.sum():
        raise AssertionError("the swizzled tile has bank conflicts")
    return elapsed


def algebra() -> float:
    pairs = {
        name: [(Layout(a), b if isinstance(b, int) else Layout(b)) for a, b in todo] for name, todo in ALGEBRA.items()
    }
    start = time.perf_counter()
    for name, operation in (("compose", compose), ("complement", complement), ("divide", logical_divide)):
        for _ in range(200):
            for a, b in pairs[name]:
                operation(a, b)
    return time.perf_counter() - start


def svg() -> float:
    layout, start = Layout.row_major(128, 64), time.perf_counter()
    picture = draw_layout(layout, element_bytes=2).svg
    elapsed = time.perf_counter() - start
    if len(picture) < 8192:
        raise AssertionError("the picture does not show 8192 cells")
    return elapsed


OURS: dict[str, Callable[[], float]] = {f.__name__: f for f in (swizzled_offsets, bank_analysis, algebra, svg)}


def peer_python(folder: str) -> str:
    """The interpreter of a fresh environment in ``folder`` that has the peer."""
    venv.create(folder, with_pip=True)
    python = str(Path(folder, "Scripts" if sys.platform == "win32" else "bin", "python"))
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PEER]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="an interpreter that has tensor-layouts and matplotlib")
    parser.add_argument("--repeat", type=int, default=3, help="rounds; the peer's figure (half a minute) is drawn once")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        python = options.peer_python or peer_python(str(Path(folder, "peer")))
        for name, ours in OURS.items():
            ours()  # imports and first-use caches
            mine, theirs = [], []
            for _ in range(1 if name == "svg" else options.repeat):
                mine += [ours() for _ in range(5)]
                command = [python, "-c", PEER_PROGRAM, json.dumps(ALGEBRA), folder, name]
                theirs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            ratio = min(theirs) / min(mine)
            reached = ratio >= TARGETS[name] and (name != "svg" or min(mine) < SVG_LIMIT_S)
            failed |= not reached
            figure = {
                "figure": name,
                "ratio": round(ratio, 2) if ratio < 10 else round(ratio),
                "target": TARGETS[name],
                "kvlab_s": round(min(mine), 6),
                "tensor_layouts_s": round(min(theirs), 6),
                "reached": reached,
            }
            print(json.dumps(figure), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
