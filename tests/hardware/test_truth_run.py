"""The run that makes the records of the chip: what an interrupted or a faulty one leaves. Needs no chip."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.truth import chip, profiler, records

ROOT = Path(__file__).parents[2]
HEAD = {"card": "NVIDIA H100", "driver": "580", "versions": {"ncu": "2025.3"}, "date": "2026-11-28"}


def test_a_step_that_is_finished_is_not_made_again(tmp_path: Path) -> None:
    """An interruption in the second step leaves the first on the disk; another day the run goes on there."""
    made: list[str] = []

    def run(step: records.Steps, fault: bool) -> list[Any]:
        def make(name: str) -> list[int]:
            made.append(name)
            if fault and name == "b":
                raise KeyboardInterrupt
            return [len(made)]

        return [step(name, lambda name=name: make(name)) for name in "abc"]

    with pytest.raises(KeyboardInterrupt):
        run(records.Steps(tmp_path, "part", HEAD), fault=True)
    assert json.loads((tmp_path / "part.partial.json").read_text())["done"] == {"a": [1]}
    again = records.Steps(tmp_path, "part", {**HEAD, "date": "2026-11-29"})
    assert run(again, fault=False) == [[1], [3], [4]]
    assert made == ["a", "b", "b", "c"]
    again.forget()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["card", "driver", "versions"])
def test_what_another_machine_left_is_not_used(tmp_path: Path, key: str) -> None:
    records.Steps(tmp_path, "part", HEAD).keep("a", 1)
    assert records.Steps(tmp_path, "part", HEAD).done == {"a": 1}
    assert records.Steps(tmp_path, "part", {**HEAD, key: "other"}).done == {}


def test_tools_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        monkeypatch.delenv(chip.LIBRARY, raising=False)
        with pytest.raises(RuntimeError, match=r"nvcc \(CUDA 12.8 or newer\) was not found"):
            chip.build()
    if not any(Path("/usr/local").glob("cuda*/**/ncu")) and not Path("/opt/nvidia/nsight-compute").exists():
        with pytest.raises(RuntimeError, match="Nsight Compute"):
            profiler.tool()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/hardware_truth.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("hardware_truth")


def test_a_part_that_fails_keeps_its_steps_and_no_record(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def record(step: records.Steps) -> dict[str, Any]:
        step("first", lambda: {"x": 1})
        return {"found": step("second", make)}

    def make() -> str:
        raise RuntimeError("ncu made no report")

    monkeypatch.setitem(script.PARTS, "kernels", record)
    assert not script.write("kernels", tmp_path, HEAD)
    assert "kernels: ncu made no report; 1 finished steps are kept in" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.partial.json"]
    monkeypatch.setitem(script.PARTS, "kernels", lambda step: {"found": step("second", lambda: "all")})
    assert script.write("kernels", tmp_path, HEAD)
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.json"]
    written = json.loads((tmp_path / "kernels.json").read_text())
    assert written == {"command": "python benchmarks/hardware_truth.py --only kernels", **HEAD, "found": "all"}


def test_the_suite_s_record_counts_what_pytest_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Errors of fixtures are failures; the committed record adds up."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))
    suite = importlib.import_module("suite")
    case = '<testcase classname="tests.gpu.a" name="b[{}]">{}</testcase>'
    ends = ("", "<failure/>", "<skipped/>", "<error/>", "<system-out/>", "<failure/><error/>")
    cases = "".join(case.format(i, end) for i, end in enumerate(ends))
    path = tmp_path / "junit.xml"
    path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    found = suite.summary(path)
    names = [f"tests.gpu.a::b[{i}]" for i in (1, 3, 5)]
    assert found == {"tests": 6, "passed": 2, "failed": 3, "skipped": 1, "failures": names}
    record = records.read("gpu_suite")
    assert record["tests"] == record["passed"] + record["failed"] + record["skipped"]
    assert len(record["failures"]) == record["failed"]
    assert {"command", "card", "driver", "date", "versions"} <= set(record)


def test_without_a_hopper_gpu_the_script_says_so(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["hardware_truth.py", "--only", "images"])
    with pytest.raises(SystemExit, match="needs a Hopper GPU"):
        script.main()
