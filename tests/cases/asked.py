"""Which thread holds which element, as Triton's compiler says: to compare with the emulators' maps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ASK = Path(__file__).with_name("ask_layouts.py")


def ask(num_warps: int, layouts: dict[str, dict[str, Any]]) -> dict[str, dict[str, list[list[int]]]]:
    question = json.dumps({"num_warps": num_warps, "layouts": layouts})
    asked = subprocess.run([sys.executable, str(ASK), question], capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr[-2000:]
    return json.loads(asked.stdout)


def same_registers(row: np.ndarray, col: np.ndarray, bases: dict[str, list[list[int]]], role: str) -> None:
    """The coordinates of (thread, register) are the XOR of the bases of their set bits."""
    threads, registers = row.shape[0], row[0].size
    assert 2 ** len(bases["reg"]) == registers, role
    index = np.arange(threads)[:, None], np.arange(registers)[None]
    parts = [(index[1], bases["reg"]), (index[0] % 32, bases["lane"]), (index[0] // 32, bases["warp"])]
    for axis, ours in enumerate((row, col)):
        theirs = np.zeros((threads, registers), np.int64)
        for number, vectors in parts:
            for bit, vector in enumerate(vectors):
                theirs ^= (number >> bit & 1) * vector[axis]
        assert (ours.reshape(threads, registers) == theirs).all(), role
