"""Golden traces of the gfx950 buffers, and operands that carry their own element index."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlab.layout import Swizzle

DATA = Path(__file__).parents[1] / "data"
ZERO_FILLED, NEVER_WRITTEN, UNDEFINED, PAST_END = -1, -2, -3, -5


class Tags:
    """Element indices as data. A buffer moves bytes, so an index travels in pieces of the element's size: run the
    buffer once for each piece and put the pieces together. Index i is stored as i + 1: zeros that the hardware fills in
    read as -1. Poison (all bits) reads as -5."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype({"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}[dtype])
        self.bits = 8 * self.dtype.itemsize
        self.pieces = 32 // self.bits

    def split(self, index: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        return [((index + 1) >> (self.bits * i)).astype(self.dtype) for i in range(self.pieces)]

    def operand(self, shape: list[int]) -> list[np.ndarray[Any, Any]]:
        return self.split(np.arange(np.prod(shape)).reshape(shape))

    def join(self, pieces: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        value = sum(piece.astype(np.int64) << (self.bits * i) for i, piece in enumerate(pieces))
        return np.where(value == 2**32 - 1, PAST_END, value - 1)

    @staticmethod
    def unknown(golden: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Golden values with all kinds of what nobody wrote as -5, as :meth:`join` gives poison."""
        return np.where(np.isin(golden, (NEVER_WRITTEN, UNDEFINED)), PAST_END, golden)


@pytest.fixture
def tags() -> type[Tags]:
    return Tags


def _array(coded: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.cumsum(coded["differences"]).reshape(coded["shape"])


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return _array(value) if "differences" in value else {key: _array(coded) for key, coded in value.items()}


def _traces(name: str) -> list[dict[str, Any]]:
    cases = json.loads(gzip.decompress((DATA / name).read_bytes()))["cases"]
    for case in cases:
        case["expected"] = {key: _decoded(value) for key, value in case["expected"].items()}
        triple = case["inputs"]["swizzle"]
        case["inputs"]["swizzle"] = None if triple is None else Swizzle(*triple, "vector")
    return cases


def _name(case: dict[str, Any]) -> str:
    i = case["inputs"]
    shape = "x".join(map(str, i["mma_shape"]))
    swizzle = "none" if i["swizzle"] is None else f"Sw{i['swizzle'].bits}{i['swizzle'].base}{i['swizzle'].shift}"
    role = "K" if i["transpose"] else "V"
    sizes = f"{shape}-D{i['depth']}-BK{i['BK']}-{swizzle}-end{i['end']}"
    return f"{case['op'].split('.')[1]}-{case['id']}-{role}-{i['dtype'][:6]}-{sizes}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``streaming_trace``, ``kvbuffer_trace`` and ``decode_trace`` run over all golden cases."""
    for fixture in ("streaming_trace", "kvbuffer_trace", "decode_trace"):
        if fixture in metafunc.fixturenames:
            cases = _traces(f"kvbuffer_trace_{fixture.removesuffix('_trace')}.json.gz")
            metafunc.parametrize(fixture, [pytest.param(case, id=_name(case)) for case in cases])


@pytest.fixture
def golden() -> Callable[[str], list[dict[str, Any]]]:
    return lambda name: json.loads((DATA / name).read_text())["cases"]
