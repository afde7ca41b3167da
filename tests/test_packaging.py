"""The package as it is shipped: wheel, environment.yml, pinned versions. Rests on what pip and the archive show."""

from __future__ import annotations

import math
import re
import struct
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import kvlab

PACKAGE = Path(kvlab.__file__).parent
ROOT = PACKAGE.parent
PYTHONS = ("3.11", "3.12", "3.13")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name: Version(version) for name, version in pairs}


def pip(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with the hatchling that is installed: nothing is downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, ROOT)
    return next(folder.glob("kvlab-*.whl"))


def test_wheel_carries_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    shipped = {name for name in names if ".dist-info/" not in name}
    ours = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert shipped == ours
    assert {"kvlab/py.typed", "kvlab/data/smollm2.npz", "kvlab/data/smollm2.json"} <= shipped
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_installs_and_works_with_numpy_and_ml_dtypes_alone(wheel: Path, tmp_path: Path) -> None:
    """In a new environment, away from this tree, with links to the two packages: no torch, no Triton, no network."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    pip("--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    packages = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    site = Path(numpy.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (site / name).exists():
            (packages / name).symlink_to(site / name)
    (packages / "ml_dtypes").symlink_to(Path(ml_dtypes.__file__).parent)
    code = (
        "import importlib.metadata, importlib.util, kvlab\n"
        "missing = [n for n in ('torch', 'triton', 'matplotlib') if importlib.util.find_spec(n) is None]\n"
        "capture = kvlab.data.load_smollm2()\n"
        "rooms = kvlab.memory, kvlab.layout, kvlab.hardware, kvlab.cache, kvlab.staging, kvlab.attention, kvlab.viz\n"
        "print(kvlab.__file__, importlib.metadata.version('kvlab'), capture.k.shape, missing, sep='|')"
    )
    done = subprocess.run([python, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file, version, shape, missing = done.stdout.strip().split("|")
    assert Path(file).is_relative_to(packages)
    assert version == kvlab.__version__
    assert shape == "(3, 307, 3, 64)"
    assert missing == "['torch', 'triton', 'matplotlib']"


def test_core_needs_numpy_and_ml_dtypes_only(project: dict[str, Any]) -> None:
    assert {Requirement(line).name for line in project["dependencies"]} == {"ml-dtypes", "numpy"}


def test_every_requirement_is_pinned_to_an_allowed_version(project: dict[str, Any], pins: dict[str, Version]) -> None:
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras.values() for line in extra)]
    requirements = [requirement for requirement in map(Requirement, lines) if requirement.name != "kvlab"]
    for requirement in requirements:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_dev_contains_the_other_extras(project: dict[str, Any]) -> None:
    """But what makes the site."""
    extras = project["optional-dependencies"]
    own = next(requirement for requirement in map(Requirement, extras["dev"]) if requirement.name == "kvlab")
    assert own.extras == extras.keys() - {"dev", "site"}


def test_pins_are_exact_public_versions_in_order(pins: dict[str, Version]) -> None:
    assert list(pins) == sorted(pins)
    assert all(name == canonicalize_name(name) for name in pins)
    assert not [name for name, version in pins.items() if version.local]
    assert (str(pins["torch"]), str(pins["triton"])) == ("2.13.0", "3.7.1")


def test_environment_takes_everything_from_pyproject(project: dict[str, Any]) -> None:
    """conda brings Python and pip, nothing else: one list of dependencies, and no channel is asked by this test."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["name"] == project["name"]
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    python, pip_itself, rest = environment["dependencies"]
    assert SpecifierSet(project["requires-python"]).contains(python.removeprefix("python="))
    assert (python, pip_itself) == ("python=3.11", "pip")
    assert rest == {"pip": ["-c constraints.txt", "-e .[dev]"]}
    assert "dev" in project["optional-dependencies"]
    assert (ROOT / "constraints.txt").exists()


def test_supported_pythons_are_the_same_everywhere(project: dict[str, Any]) -> None:
    specifier = SpecifierSet(project["requires-python"])
    assert [f"3.{minor}" for minor in range(9, 17) if specifier.contains(f"3.{minor}.1")] == list(PYTHONS)
    prefix = "Programming Language :: Python :: "
    assert [line.removeprefix(prefix) for line in project["classifiers"] if line.startswith(prefix)] == list(PYTHONS)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    low, high = re.search(r"\((3, \d+)\) <= v < \((3, \d+)\)", makefile).groups()  # type: ignore[union-attr]
    assert specifier == SpecifierSet(f">={low.replace(', ', '.')},<{high.replace(', ', '.')}")


def test_version_is_stated_once(project: dict[str, Any]) -> None:
    assert project["dynamic"] == ["version"]
    assert str(Version(kvlab.__version__)) == kvlab.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (str(citation["version"]), citation["license"]) == (kvlab.__version__, project["license"])


def test_pictures_of_the_readme_have_twins_for_an_index() -> None:
    """A PNG beside each SVG, of its shape."""
    named = re.findall(r"!\[[^\]]+\]\((\S+)\.svg\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert named
    for name in named:
        width, height = struct.unpack(">II", (ROOT / f"{name}.png").read_bytes()[16:24])
        found = re.search(r'width="(\S+)" height="(\S+)"', (ROOT / f"{name}.svg").read_text(encoding="utf-8"))
        assert found is not None
        assert (width, height) == tuple(2 * math.ceil(float(side)) for side in found.groups())
