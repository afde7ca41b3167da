"""What every test run shares: thread limits, private compiler cache, Hypothesis profiles, the GPU marker, doctests."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import pytest

# Read by the numerical libraries at their import, hence set here, before any test module is loaded.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# Triton 3.9 warns that this default will change; the value is today's.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

PACKAGE = Path(__file__).parent / "kvlab"
_triton_cache: str | None = None

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("local", deadline=None)
    settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", default="1/1", metavar="K/N", help="of a test's rows those of the K-th of N shares")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out rows of other shares. A test has one row at least: its first, where no row of it is in the share."""
    share, shares = map(int, config.getoption("--rows").split("/"))
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    of_share = {
        test: [row for row in rows if crc32(row.nodeid.encode()) % shares == share - 1] or rows[:1]
        for test, rows in tests.items()
    }
    kept = {row for rows in of_share.values() for row in rows}
    items[:] = [item for item in items if item in kept]


def pytest_configure(config: pytest.Config) -> None:
    global _triton_cache
    if "TRITON_CACHE_DIR" not in os.environ:
        _triton_cache = os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="kvlab-triton-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _triton_cache is not None:
        shutil.rmtree(_triton_cache, ignore_errors=True)
        os.environ.pop("TRITON_CACHE_DIR", None)


def _cuda_available() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A GPU test that was asked for on a machine without one fails: it must not look as if it had passed."""
    if item.get_closest_marker("gpu") and not _cuda_available():
        pytest.fail("marked `gpu`, but torch sees no CUDA device; leave out `-m gpu`", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Folders of ``kvlab.attention`` have the names of the functions in them: collecting a folder's doctests puts the
    module where users find the function.
    """
    report = yield
    attention = sys.modules.get("kvlab.attention")
    for name in getattr(attention, "__all__", ()):
        found = getattr(attention, name)
        if isinstance(found, ModuleType):
            setattr(attention, name, getattr(found, name))
    return report


def may_import_torch(path: Path) -> bool:
    """Whether this module of the package is one of the few that may import torch or triton."""
    room = path.relative_to(PACKAGE).parts[0]
    kernels = {"kernel.py", "hopper.py", "hopper_roles.py", "hopper_steps.py", "hopper_capped.py", "results.py",
               "torch_ops.py"}
    return room in {"triton_support", "mirror", "xray", "integrations", "demo", "command"} or (
        room == "attention" and path.name in kernels
    )


@pytest.fixture(scope="session")
def run_notebook() -> Callable[[Any], None]:
    """A function that fills in the outputs of a notebook of ours, from a fresh kernel; a cell's error is raised."""
    nbclient = pytest.importorskip("nbclient")
    config = pytest.importorskip("traitlets.config")

    def run(notebook: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="kvlab-") as folder:  # the names of sockets must be short
            # Not by ports: of the free ones that a kernel is told to take, another process may take one first.
            sockets = config.Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/socket"}})
            place = {"metadata": {"path": str(PACKAGE.parent / "notebooks")}}
            patience = {"timeout": 600, "startup_timeout": 300}
            client = nbclient.NotebookClient(notebook, resources=place, config=sockets, **patience)
            client.execute(env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)})

    return run


@pytest.fixture(scope="session")
def executed(run_notebook: Callable[[Any], None], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Any]:
    """A function that gives a notebook of the course with its outputs: it runs once, whichever tests and workers ask.

    It runs as it is; behind each cell that asks, cells with the tag "answered" give the right answer and take it back.
    0 to 8 run without the packages of any extra.
    """
    nbformat = pytest.importorskip("nbformat")
    from notebook_truths import answered, without_extras

    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def give(source: Path) -> Any:
        path = folder / f"{source.stem}.ipynb"
        with (folder / f"{source.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                notebook = answered(nbformat.read(source.with_suffix(".ipynb"), as_version=4))
                notebook = without_extras(notebook) if source.stem < "09" else notebook
                run_notebook(notebook)
                nbformat.write(notebook, path)
        return nbformat.read(path, as_version=4)

    return give


@pytest.fixture(scope="session")
def numpy_modules() -> list[Path]:
    """The files of the package that run on NumPy and ml-dtypes alone."""
    return sorted(path for path in PACKAGE.rglob("*.py") if not may_import_torch(path))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Doctests are looked for in the package only, and not in modules whose torch or triton is not installed."""
    if collection_path.suffix != ".py":
        return None
    if not collection_path.is_relative_to(PACKAGE):
        return True if not collection_path.name.startswith("test_") else None
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    return True if missing and may_import_torch(collection_path) else None
