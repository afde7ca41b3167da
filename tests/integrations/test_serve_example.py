"""The serving example, tiny: what it writes, shares and frees. Rests on transformers' own attention, one request at a
time (the example compares), and on the pool's count of pages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvlab.cache import OutOfPages

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "serve_smollm2.py"
TINY = [
    "--device=cpu", "--backend=emulator", "--layers=1", "--vocabulary=256", "--requests=6", "--slots=4",
    "--new-tokens=12",
]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve_smollm2", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_requests_share_are_pre_empted_and_write_what_each_writes_alone(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, requests = example.main([*TINY, "--pages=10", f"--plot={tmp_path / 'served.svg'}"])
    assert "all 6 outputs are those of transformers' own attention, one by one" in capsys.readouterr().out
    assert [len(r.tokens) - r.prompt for r in requests] == [12] * 6
    assert server.preempted > 0
    assert server.shared >= 4 * 40  # requests that begin as another that is there
    assert server.pool.num_free == 10
    assert (tmp_path / "served.svg").stat().st_size > 0


def test_other_tokens_are_said(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    write = example.Server._write
    monkeypatch.setattr(example.Server, "_write", lambda server, request, token: write(server, request, token ^ 1))
    with pytest.raises(SystemExit, match=r"requests \[0\] wrote other tokens than one by one"):
        example.main([*TINY, "--requests=1", "--pages=9", "--new-tokens=2"])


def test_a_pool_too_small_for_one_is_an_error(example: ModuleType) -> None:
    with pytest.raises(OutOfPages):
        example.main([*TINY, "--requests=1", "--pages=2"])
