"""The toy twins are importable as ``mirror_toy``; ``seeded`` makes a copy of them with an error in it."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

collect_ignore_glob = ["fixtures/*"]

FIXTURES = Path(__file__).parent / "fixtures"
_NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def toy_on_path(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(FIXTURES), *sys.path])
    return FIXTURES / "mirror_toy"


Seed = Callable[..., str]


@pytest.fixture
def seeded(tmp_path: Path, toy_on_path: Path) -> Seed:
    """``seeded(emulator=("old", "new"), kernel=..., config=...)`` -> name of a package with these texts replaced."""

    def make(**changes: tuple[str, str]) -> str:
        package = tmp_path / f"mirror_toy_{next(_NUMBERS)}"
        package.mkdir()
        for name in ("__init__", "config", "kernel", "emulator"):
            text = (toy_on_path / f"{name}.py").read_text()
            if name in changes:
                old, new = changes[name]
                assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {name}.py"
                text = text.replace(old, new)
            (package / f"{name}.py").write_text(text)
        sys.path.insert(0, str(tmp_path))
        importlib.invalidate_caches()
        return package.name

    return make
