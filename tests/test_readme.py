"""The README: every Python block runs as it is printed, on its own, and the whole is short."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import RESULTS
from kvlab.hardware import best_swizzle

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_readme_is_short_and_has_blocks() -> None:
    assert len(README.splitlines()) < 100
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block{n}" for n in range(len(BLOCKS))])
def test_block_runs_and_prints(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def test_its_numbers_are_those_of_the_records() -> None:
    """Rests on the committed records of an H100, and on the search that it shows."""
    text = " ".join(README.split())
    tasks = record("attention_peers_h100")["tasks"]
    of_read = {name: f"{task['implementations']['kvlab']['fraction']:.2f}" for name, task in tasks.items()
               if name.startswith("decode")}
    (one,) = {of_read[f"decode_b64_ctx4k_p{page}"] for page in (16, 64, 128)}
    assert f"4096 keys, bfloat16 reads the cache at {one} of" in text
    fp8 = [of_read[f"decode_fp8_b64_ctx{keys}_p64"] for keys in ("4k", "16k")]
    assert "fp8 e4m3 at {} ({} of 16384 keys)".format(*fp8) in text
    portable = [row["of_read"] for row in record("mha_decode_h100")["synthetic"]]
    assert f"at [{min(portable):.2f} to {max(portable):.2f}](" in text
    short, tokens, long = (f"{row['of_read']:.2f}" for row in record("mha_decode_fp8_h100")["synthetic"][1:4])
    assert f"fp8 at [{short} and {long}](" in text
    assert f"and at {tokens} with a scale for every token and head" in text
    assert f"{best_swizzle((64, 64), 'bf16', 'ldmatrix.x4').tried} smaller have conflicts" in text
