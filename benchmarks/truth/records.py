"""Records of the chip as JSON: arrays packed into text, and where the files lie."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["FOLDER", "pack", "read", "unpack", "write"]

FOLDER = Path(__file__).parents[2] / "tests" / "data" / "hardware"


def pack(values: np.ndarray[Any, Any]) -> str:
    """Integers as text: differences of neighbours, compressed."""
    steps = np.diff(np.asarray(values, np.int64).ravel(), prepend=0)
    if np.abs(steps).max(initial=0) >= 1 << 31:
        raise ValueError(f"neighbours differ by up to {np.abs(steps).max()}: less than 2^31 is packed")
    return base64.b64encode(zlib.compress(steps.astype("<i4").tobytes(), 9)).decode()


def unpack(text: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The integers of :func:`pack`, flat."""
    steps = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4")
    return np.cumsum(steps, dtype=np.int64)


def read(name: str) -> Any:
    """A record by the name of its file."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def write(folder: Path, name: str, record: dict[str, Any]) -> None:
    """One key a line, the lists below it compact."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for key, value in record.items():
        if isinstance(value, dict):
            lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            parts.append(f" {json.dumps(key)}: {{\n{lines}\n }}")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    (folder / f"{name}.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")
