"""Machines without Triton, without torch, with an old make: what can run runs, and what is missing is named.

Rests on the emulator's results, which need NumPy alone, on the manual of GNU make (which release brought what), and on
pyproject.toml, which names the extras.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = """
import importlib.metadata, pathlib, sys
blocked = {blocked!r}
sys.modules.update(dict.fromkeys(blocked))  # what an import of them, and a search for them, see
whole = importlib.metadata.version
def version(name):
    if name in blocked:
        raise importlib.metadata.PackageNotFoundError(name)
    return whole(name)
importlib.metadata.version = version
"""
NOTEBOOKS = """
import kvlab.triton_support.versions
for name in ("09_mha_decode", "10_mha_prefill", "11_mla", "12_fp8_kv"):
    path = pathlib.Path("notebooks", name + ".py")
    exec(compile(path.read_text(encoding="utf-8"), name, "exec"), {{"__name__": "__main__"}})
    print("ran", name)
"""
TORCH_ALONE = """
import torch
import kvlab.integrations.torch_ops, kvlab.integrations
from kvlab.attention import explain, merge_states
outs, lses = torch.arange(64.0).reshape(2, 1, 2, 16), torch.zeros(2, 1, 2)
print(explain(merge_states, outs, lses).reason)
merged = torch.compile(merge_states, backend="eager", fullgraph=True)(outs, lses, return_lse=False)
print(torch.equal(merged, outs.mean(0)))
"""
NEWER_THAN_3_81 = (
    r"\.SHELLFLAGS", r"\.ONESHELL", r"\$\((?:file|let|intcmp|guile) ", r"::?:=", r"\w\s*!=", r"&:", r"^undefine ",
    r"^private ", r"\.EXTRA_PREREQS", r"\.WAIT", r"--output-sync", r"--shuffle", r"^load ",
)


def run(code: str, *blocked: str) -> str:
    code = BLOCKED.format(blocked=blocked) + code.format()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("blocked", [("triton",), ("torch", "triton")], ids=" and ".join)
def test_notebooks_run_and_name_what_is_missing(blocked: tuple[str, ...]) -> None:
    said = run(NOTEBOOKS, *blocked)
    assert said.count("ran ") == 4
    lines = [line for line in said.splitlines() if "is not installed" in line]
    assert len(lines) == 4
    assert all(".[kernels]" in line for line in lines)


def test_torch_without_triton() -> None:
    """Integrations are imported, and a compiled call goes to the emulator."""
    assert run(TORCH_ALONE, "triton").splitlines() == ["torch tensors in CPU memory, without Triton", "True"]


@pytest.mark.parametrize(("package", "module", "extra"), [
    ("torch", "flash_attn", "kernels"), ("transformers", "transformers", "models"),
])
def test_an_adapter_names_the_extra_that_it_needs(package: str, module: str, extra: str) -> None:
    code = f"""
try:
    import kvlab.integrations.{module}
except ImportError as error:
    print(error)
"""
    assert f"is not installed: pip install -e '.[{extra}]', in kvlab's own folder" in run(code, package)


def test_hints_name_extras_of_this_folder() -> None:
    """There is no project of an index to install: every hint names the folder, and an extra that exists."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [*ROOT.glob("kvlab/**/*.py"), *ROOT.glob("notebooks/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    hints = [hint for path in files for hint in re.findall(r"pip install ([^`\n]*)", path.read_text(encoding="utf-8"))]
    assert hints
    assert not [hint for hint in hints if re.match(r"['\"]?kvlab", hint)]
    named = [name for hint in hints for found in re.findall(r"\.\[([\w,]+)\]", hint) for name in found.split(",")]
    assert set(named) <= set(extras)


def test_makefile_is_for_make_3_81() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert not [name for name in NEWER_THAN_3_81 if re.search(name, text, re.MULTILINE)]


def test_lab_installs_what_notebooks_need() -> None:
    """The extra of the notebooks brings neither torch nor transformers."""
    plan = subprocess.run(["make", "-n", "-B", "lab"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-e '.[notebooks]'" in plan
    assert "kernels" not in plan
    assert ".[dev]" not in plan
