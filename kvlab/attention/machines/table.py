"""CTA models of the operations by architecture, with the inputs that each takes: one table, one question, one check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from kvlab.attention.call.checks import check_lane_copies
from kvlab.common.arrays import dtype_of
from kvlab.common.checks import require
from kvlab.hardware import arch_table, get_arch, get_atom
from kvlab.staging.gfx950.kv_buffer_cta import KVBufferCTA
from kvlab.staging.gfx950.kv_buffer_decode_cta import KVBufferDecodeCTA
from kvlab.staging.gfx950.mfma_cta import MfmaCTA
from kvlab.staging.nvidia.fma_cta import FmaCTA
from kvlab.staging.nvidia.gather4_cta import Gather4CTA
from kvlab.staging.nvidia.mma_sync_cta import MmaSyncCTA
from kvlab.staging.nvidia.wgmma_cta import WgmmaCTA
from kvlab.staging.tile.tile_spec import TileCTA


def kind_of(dtype: Any) -> str:
    """Name that rows give a dtype of K and V: "4 bits" of two columns a byte, "e4m3", "16 bits" or "float32"."""
    return "4 bits" if dtype == np.uint8 else {1: "e4m3", 2: "16 bits", 4: "float32"}[dtype.itemsize]


@dataclass(frozen=True)
class Columns:
    """The columns that a row takes: ``what`` they are, ``fits`` tells of their numbers, ``words`` says it behind "must
    be", ``why`` behind that; ``asked`` holds places for the numbers and for ``name`` and ``dtype`` of the operand.
    """

    what: str
    asked: str
    fits: Callable[..., bool]
    words: str
    why: str


@dataclass(frozen=True)
class Machine:
    """A row: operations on architectures, with K and V of some dtypes and at least ``rows`` query rows in a tile, and
    the CTA model that emulates them.
    """

    operations: tuple[str, ...]
    archs: tuple[str, ...]
    kinds: tuple[str, ...]
    cta: type[TileCTA]
    rows: int = 0
    columns: Columns | None = None

    @property
    def buffer(self) -> str:
        """Path of K and V to shared memory and on to the products."""
        return self.cta.buffer

    @property
    def p_path(self) -> str:
        """The way of P from the first product to the second."""
        return self.cta.p_path


def _both(*depths: int) -> Columns:
    fits, asked = lambda k, v: k == v and k in depths, "head dimensions {} and {} on"
    return Columns("head dimensions", asked, fits, f"both {_either(depths)}", ", as MAX's decode")


def _either(words: Iterable[Any]) -> str:
    """``a, b or c``."""
    *first, last = map(str, words)
    return f"{', '.join(first)} or {last}" if first else last


_LATENTS = Columns(
    "latent and rope columns", "{} + {} columns of {dtype} on",
    lambda latent, rope: latent in (128, 256, 512) and rope in (32, 64), "128, 256 or 512 + 32 or 64 of 16 bits",
    "; a tile of 128 keys in float32 does not fit into LDS; sm_80 and sm_90 take the others",
)
_PANELS = Columns(
    "latent and rope columns", "{} + {} columns of {dtype} on",
    lambda latent, rope: latent in (128, 256, 512) and rope in (64, 128), "128, 256 or 512 + 64 or 128 of 16 bits",
    ": boxes of gather4 have 64",
)
_STRIPS = Columns(
    "columns of the rope part", "{} columns of {name} in {dtype} on", lambda columns: columns > 32, "more than 32",
    ": strips of KVBuffer have 64",
)


def _archs(rows: Iterable[Machine]) -> tuple[str, ...]:
    """The architectures of rows, in the order of the table of hardware."""
    named = {arch for row in rows for arch in row.archs}
    return tuple(arch for arch in arch_table.ARCHS if arch in named)


_PREFILLS = ("mha_prefill", "mla_prefill")
_DECODES = ("mha_decode", "mla_decode")

MACHINES = (
    Machine((*_PREFILLS, *_DECODES), ("sm_90",), ("16 bits",), WgmmaCTA, rows=64),
    Machine((*_PREFILLS, *_DECODES), ("sm_90",), ("e4m3",), WgmmaCTA, rows=64),
    Machine((*_DECODES, *_PREFILLS), ("sm_80", "sm_90"), ("16 bits",), MmaSyncCTA),
    Machine((*_DECODES, *_PREFILLS), ("sm_90",), ("e4m3",), MmaSyncCTA),
    Machine(("mha_decode",), ("sm_80", "sm_90"), ("4 bits",), MmaSyncCTA),
    Machine((*_DECODES, *_PREFILLS), ("sm_80", "sm_90"), ("float32",), FmaCTA),
    Machine(("mha_decode",), ("gfx950",), ("16 bits",), KVBufferDecodeCTA, columns=_both(64, 128, 256, 512)),
    Machine(("mha_decode",), ("gfx950",), ("e4m3",), KVBufferDecodeCTA, columns=_both(128, 256, 512)),
    Machine(("mha_decode",), ("gfx950",), ("float32",), MfmaCTA, columns=_both(64, 128, 256, 512)),
    Machine(("mha_decode_streaming",), ("gfx950",), ("16 bits", "e4m3", "float32"), MfmaCTA),
    Machine(("mla_decode",), ("gfx950",), ("16 bits",), KVBufferDecodeCTA, columns=_LATENTS),
    Machine(_PREFILLS, ("gfx950",), ("16 bits",), KVBufferCTA),
    Machine(("mha_prefill",), ("gfx950",), ("e4m3",), KVBufferCTA),
    Machine(("mla_prefill",), ("gfx950",), ("e4m3",), KVBufferCTA, columns=_STRIPS),
    Machine(_PREFILLS, ("gfx950",), ("float32",), MfmaCTA),
)
"""Of two rows that take a tile, the first is its."""

LISTED = (Machine(("mla_decode",), ("sm_100",), ("16 bits",), Gather4CTA, columns=_PANELS), *MACHINES)
"""Those of calls with lists of slots."""

ARCHS = _archs(MACHINES)
"""Those that are emulated."""


def choose(arch: str, dtype: Any, operation: str, *, rows: int = 0, listed: bool = False) -> Machine:
    """The row of an operation on ``arch`` with K and V of ``dtype``, for tiles of ``rows`` query rows; ``listed``: of
    keys that lists of slots name. ValueError where there is none.

    >>> from kvlab.memory import bfloat16, float8_e4m3fn
    >>> choose("sm_90", bfloat16, "mha_prefill", rows=128).cta.__name__
    'WgmmaCTA'
    >>> row = choose("gfx950", bfloat16, "mha_prefill")
    >>> row.cta.__name__, row.buffer, row.p_path
    ('KVBufferCTA', 'KVBuffer, two stages or one', 'registers')
    >>> choose("sm_70", bfloat16, "mha_decode")
    Traceback (most recent call last):
        ...
    ValueError: arch is 'sm_70': must be one of sm_80, sm_90, gfx950
    >>> choose("sm_80", float8_e4m3fn, "mha_decode")
    Traceback (most recent call last):
        ...
    ValueError: K and V in float8_e4m3fn on sm_80: must be on sm_90 or gfx950: sm_80 has no e4m3
    """
    mine = _of(operation, arch, listed)
    found = [row for row in mine if kind_of(dtype) in row.kinds and rows >= row.rows]
    if not found:
        _refuse_dtype(operation, arch, "K and V", dtype)
    return found[0]


def check_emulated(
    operation: str, arch: str, q: Any, arrays: Mapping[str, Any],
    columns: Mapping[str, tuple[int, ...]] | None = None, *, listed: bool = False,
) -> None:
    """ValueError for a call that no row takes: ``q``, and K and V by their names, whose rows lanes copy; ``columns``
    are the numbers of columns of some of these, where rows tell them apart. ``listed``: as of ``choose``.
    """
    mine = _of(operation, arch, listed)
    for name, array in arrays.items():
        dtype, numbers = dtype_of(array, name), (columns or {}).get(name)
        row = next((row for row in mine if kind_of(dtype) in row.kinds), None)
        told = (row or mine[0]).columns if numbers else None
        if row is None and (told is None or dtype.itemsize == 1):
            _refuse_dtype(operation, arch, name, dtype)
        if told is not None and numbers is not None:
            asked = told.asked.format(*numbers, name=name, dtype=dtype)
            require(row is not None and told.fits(*numbers), f"{asked} {arch}", told.words + told.why)
    copied = {"q": q, **arrays}
    check_lane_copies({name: array for name, array in copied.items() if 0 not in array.shape})


def _of(operation: str, arch: str, listed: bool) -> list[Machine]:
    """The rows of an operation on ``arch``; ValueError where it is not emulated."""
    rows = [row for row in (LISTED if listed else MACHINES) if operation in row.operations]
    archs = _archs(rows)
    require(arch in archs, f"arch is {arch!r}", f"one of {', '.join(archs)}" if archs[1:] else repr(archs[0]))
    return [row for row in rows if arch in row.archs]


def _refuse_dtype(operation: str, arch: str, name: str, dtype: Any) -> NoReturn:
    """ValueError that names the architectures which take the dtype."""
    archs = _archs(row for row in MACHINES if operation in row.operations and kind_of(dtype) in row.kinds)
    multiplied = any(get_atom(atom).dtype == dtype for atom in get_arch(arch).atoms)
    why = f": {arch} has no e4m3" if kind_of(dtype) == "e4m3" and not multiplied else ""
    raise ValueError(f"{name} in {dtype} on {arch}: must be on {_either(archs)}{why}")
