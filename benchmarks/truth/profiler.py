"""Nsight Compute: run a part of the probes under it, and read its report."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["profile", "tool", "version"]

ROOT = Path(__file__).parents[2]


def tool() -> Path:
    """The path of ncu. RuntimeError if there is none."""
    found = [shutil.which("ncu"), "/usr/local/cuda/bin/ncu", *Path("/opt/nvidia/nsight-compute").glob("*/ncu")]
    found += Path("/usr/local").glob("cuda*/nsight-compute-*/ncu")
    for path in found:
        if path is not None and Path(path).exists():
            return Path(path)
    raise RuntimeError("ncu (Nsight Compute) was not found: the counters cannot be read")


def version() -> str:
    """As ncu tells it."""
    text = subprocess.run([tool(), "--version"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"Version (\S+)", text)[0]


def profile(
    part: str, metrics: list[str], *more: str, by_instruction: list[str] | None = None, timeout: int = 200
) -> list[dict[str, Any]]:
    """Run ``play(part)`` under ncu: for every launch its ``kernel``, its metrics, and under ``"instructions"`` for each
    of ``by_instruction`` a list of (place, count, SASS) in the order of the code.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = f"{folder}/report.ncu-rep"
        command = [str(tool()), "-f", "-o", report, "--clock-control", "none", "--metrics", ",".join(metrics), *more]
        command += ["--section", "SourceCounters"] if by_instruction else []
        command += [sys.executable, "-m", "benchmarks.truth.play", part]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
        if not Path(report).exists():
            raise RuntimeError(f"ncu made no report:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return read(report, metrics, by_instruction or [])


def read(report: str, metrics: list[str], by_instruction: list[str]) -> list[dict[str, Any]]:
    """What :func:`profile` returns, of a report that exists."""
    return [_launch(action, metrics, by_instruction) for action in actions(report)]


def actions(report: str) -> list[Any]:
    """The launches of a report, as objects of ncu's own Python module, which it brings along."""
    candidates = sorted(Path("/opt/nvidia/nsight-compute").glob("*/extras/python"))
    candidates += [tool().resolve().parent / "extras" / "python"]
    candidates += sorted(Path("/usr/local").glob("cuda*/nsight-compute-*/extras/python"))
    sys.path[:0] = [str(path) for path in candidates if path.exists()]
    module: Any = importlib.import_module("ncu_report")
    context = module.load_report(report)
    ranges = [context.range_by_idx(i) for i in range(context.num_ranges())]
    found = [group.action_by_idx(i) for group in ranges for i in range(group.num_actions())]
    _alive.append(context)
    return found


_alive: list[Any] = []  # actions are views of their report


def _launch(action: Any, metrics: list[str], by_instruction: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"kernel": action.name()}
    for name in metrics:
        metric = action.metric_by_name(name)
        if metric is None:
            raise RuntimeError(f"ncu {version()} counted no {name} of {action.name()}: has this card the counter?")
        out[name] = _number(metric.as_double())
    out["instructions"] = {name: _instances(action, action.metric_by_name(name)) for name in by_instruction}
    return out


def _instances(action: Any, metric: Any) -> list[tuple[int, int, str]]:
    if metric is None or not metric.num_instances():
        return []
    places = metric.correlation_ids()
    pairs = sorted((places.as_uint64(i), _number(metric.as_double(i))) for i in range(metric.num_instances()))
    return [(place, count, action.sass_by_pc(place)) for place, count in pairs]


def _number(value: float) -> Any:
    return int(value) if value == int(value) else value
