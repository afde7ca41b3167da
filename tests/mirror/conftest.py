"""The toy twins are importable as ``mirror_toy``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

collect_ignore_glob = ["fixtures/*"]

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(autouse=True)
def toy_on_path(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(FIXTURES), *sys.path])
    return FIXTURES / "mirror_toy"
