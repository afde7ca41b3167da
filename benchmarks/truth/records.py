"""Records of the chip as JSON: arrays packed into text, where the files lie, and what an interrupted run keeps."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["FOLDER", "Steps", "pack", "read", "unpack", "write"]

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


class Steps:
    """Finished steps of a part, kept in ``folder/part.partial.json``: an interrupted run goes on where it stopped.

    What another card, driver or version has left there is not used.
    """

    def __init__(self, folder: Path, part: str, head: dict[str, Any]) -> None:
        self.path = folder / f"{part}.partial.json"
        self.head = {key: head[key] for key in ("card", "driver", "versions")}
        left = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.done: dict[str, Any] = left["done"] if left.get("head") == self.head else {}

    def __call__(self, step: str, make: Callable[[], Any]) -> Any:
        """What ``make()`` gives, or gave before the run was interrupted."""
        if step not in self.done:
            self.keep(step, make())
        return self.done[step]

    def keep(self, step: str, value: Any) -> None:
        """A step is finished: it is on the disk when this returns."""
        self.done[step] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps({"head": self.head, "done": self.done}))
        fresh.replace(self.path)

    def forget(self) -> None:
        """The part is written as a whole."""
        self.path.unlink(missing_ok=True)
