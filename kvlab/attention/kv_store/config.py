"""KV store: what a program writes, and the twins of the operation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvlab.attention.call.latent_rows import uint8, viewed
from kvlab.mirror.twin import Twin

SYNONYMS = {
    **{f"{x}_cache": f"{x}_cache_ptr" for x in "kv"},
    **{f"{x}_number": f"{x}_scale_ptr" for x in "kv"},
    **{x: f"{x}_ptr" for x in ("where", "lens", "table", "positions")},
    "load_vectors": "load",
    "load_elements": "load",
    "store_vectors": "store",
}
TWINS = (Twin("append", kernel="kernel:append", emulator="emulator:append", synonyms=SYNONYMS),)
LAUNCH = ("kernel:launch", "emulator:launch")

SMALLEST = 2.0**-100
"""A block whose largest magnitude is less is quantised as if it were this: its scale has a finite reciprocal."""

FOUR_BITS = {"e2m1": 6.0, "int4": 7.0, "uint4": 15.0}
"""Formats of 4 bits, two columns a byte, and the largest magnitude that is stored of each."""

MOST_ELEMENTS, LEAST_ELEMENTS = 1024, 512
MOST_WARPS, MOST_WARPS_ROPED = 2, 4
VECTOR_BYTES = 16
PROGRAMS_PER_PROCESSOR = 2
MOST_BITS = 8


class StoreSide(NamedTuple):
    """K or V: how a program cuts it. A *row* is one block of G dims of one head of one token.

    D dims of a head, G of a block, ``blocks`` of a head, BR rows of a program, BG = G rounded up to a power of two.
    quant: "none" (copy, or a plain cast), "number" and "tensor" (one scale, given), "block" (a scale for each row,
    computed and stored); of 4 bits "e2m1" (the row's scale in e4m3, of what a number divides), "int4" (float32) and
    "uint4" (a scale and a minimum). limit: largest magnitude of the format of 8 or 4 bits. vec_in, vec_out: elements of
    a vector that every row of the source and of the cache is a multiple of. pack: dims of an element of the cache.
    fours: scales of four slots lie side by side. loads: the number is in memory.
    """

    D: int
    G: int
    BG: int
    blocks: int
    BR: int
    quant: str = "none"
    limit: float = 0.0
    vec_in: int = 1
    vec_out: int = 1
    pack: int = 1
    fours: bool = False
    loads: bool = False


@dataclass(frozen=True)
class StoreProblem:
    """Sizes of one call: T tokens of H heads; D dims of a head and G of a block, for K and for V (D 0: no V)."""

    tokens: int
    heads: int
    D: tuple[int, int]
    G: tuple[int, int]
    itemsize: tuple[int, int]


class StoreTables(NamedTuple):
    """Arrays that say where tokens go. where: slots ``[T]``, row offsets ``[B + 1]`` or valid lengths ``[B]``, as the
    form says; with the latter two lens ``[B]``, the tokens in the cache, and the table ``[B, columns]`` of pages.
    positions: ``[T]``, where a token's place does not tell them.
    """

    where: Any
    lens: Any = None
    table: Any = None
    positions: Any = None


class CosSin(NamedTuple):
    """Cosines and sines ``[positions, R / 2]``, or None without a rope."""

    cos: Any = None
    sin: Any = None


NO_ANGLES = CosSin()


class BlockScales(NamedTuple):
    """Scales of e2m1: ``number`` is given, or an array of one; ``blocks`` are computed: e4m3, of 16 dims each, of what
    it divides.
    """

    number: Any
    blocks: Any


class ScalesAndMinima(NamedTuple):
    """Scale and minimum of each token and head, computed for integers from 0 to 15."""

    scales: Any
    minima: Any


class StoreScales(NamedTuple):
    """Scales of K and V as programs take them: arrays, given or computed, or None; minima likewise; and a number, 1 /
    that given as one, for e2m1 what values are divided by, perhaps a tensor of one.
    """

    k: Any
    v: Any
    k_min: Any
    v_min: Any
    k_number: Any
    v_number: Any

    @classmethod
    def of(cls, k_scale: Any, v_scale: Any) -> StoreScales:
        """Of the scales of a launch: None, a number, an array, ``ScalesAndMinima`` or ``BlockScales``, whose e4m3
        become bytes, since kernels for sm_80 know no others.

        >>> StoreScales.of(4.0, None)
        StoreScales(k=None, v=None, k_min=None, v_min=None, k_number=0.25, v_number=1.0)
        """
        (k, k_min, k_number), (v, v_min, v_number) = map(_as_taken, (k_scale, v_scale))
        return cls(k, v, k_min, v_min, k_number, v_number)


def _as_taken(scale: Any) -> tuple[Any, Any, Any]:
    if isinstance(scale, BlockScales):
        number = float(scale.number[0]) if isinstance(scale.number, np.ndarray) else scale.number
        return viewed(scale.blocks, uint8, "scales of blocks"), None, number
    if isinstance(scale, ScalesAndMinima):
        return *scale, 1.0
    if isinstance(scale, float):
        return None, None, float(np.float32(1) / np.float32(scale))
    return scale, None, 1.0


class StoreSizes(NamedTuple):
    """Sizes of a launch: all tokens and those of a padded sequence, sequences, pages, columns of the table, and
    positions that have angles.
    """

    tokens: int
    seq_tokens: int
    batch: int
    pages: int
    columns: int
    angles: int

    @classmethod
    def of(cls, k: Any, pages: int, tables: StoreTables, cos_sin: CosSin) -> StoreSizes:
        """The sizes of a launch on k ``[B, S, H, D]``."""
        each = (tables.table, 1), (tables.lens, 0), (cos_sin.cos, 0)
        columns, batch, angles = (0 if x is None else int(x.shape[axis]) for x, axis in each)
        return cls(k.shape[0] * k.shape[1], max(1, k.shape[1]), batch, pages, columns, angles)


@dataclass(frozen=True)
class StoreConfig:
    """Tile sizes and launch parameters, the same for the kernel and the emulator.

    form: "slots", "ragged" or "padded". rope: "none", "k" or "v", the side that is rotated: ``rope_dim`` dims from
    ``rope_first`` on, as pairs (2j, 2j + 1) where ``interleaved``, else (j, j + rope_dim / 2). BB, BITS: the
    search for a token's sequence compares BB stretches of 2^BITS sequences at once, then goes on by halves.
    """

    form: str
    heads: int
    page_size: int
    k: StoreSide
    v: StoreSide
    programs: int
    rope: str = "none"
    rope_dim: int = 0
    rope_first: int = 0
    interleaved: bool = False
    BB: int = 32
    BITS: int = 0
    num_warps: int = 4

    def grid(self) -> tuple[int]:
        """Programs. The lengths and slots have no part in it: a CUDA graph may be replayed."""
        return (self.programs,)


def widest_vector(itemsize: int, *multiples: int) -> int:
    """Elements of the widest vector, up to 16 bytes, that divides all of ``multiples`` (elements).

    >>> widest_vector(2, 128, 1024), widest_vector(2, 20), widest_vector(1, 128), widest_vector(4, 3)
    (8, 4, 16, 1)
    """
    whole = math.gcd(VECTOR_BYTES // itemsize, *multiples)
    return whole & -whole


def choose_config(
    problem: StoreProblem, *, form: str, page_size: int, quant: Iterable[str] = ("none", "none"),
    limit: Iterable[float] = (0.0, 0.0), vec_in: Iterable[int] = (1, 1), vec_out: Iterable[int] = (1, 1),
    codes: Iterable[tuple[int, bool, bool]] = 2 * ((1, False, False),), batch: int = 0, processors: int = 132,
    **rope: object,
) -> StoreConfig:
    """The configuration of a call; ``processors`` are the SMs of the device (132 on an H100), ``codes`` the pack, fours
    and loads of each side.

    A program moves 1024 elements of K and of V with two warps, four 16-byte loads a thread under way at once (four
    warps where it rotates, which takes registers); fewer elements where that would leave processors without a program.
    benchmarks/NOTES.md has what larger programs gave on an H100.

    >>> problem = StoreProblem(tokens=4096, heads=8, D=(128, 128), G=(128, 128), itemsize=(2, 2))
    >>> config = choose_config(problem, form="slots", page_size=16)
    >>> config.k.BR, config.programs, config.num_warps
    (8, 4096, 2)
    """
    rows = [problem.tokens * problem.heads * -(-D // G) for D, G in zip(problem.D, problem.G, strict=True)]
    widths = [max(2, 1 << (G - 1).bit_length()) for G in problem.G]
    elements = MOST_ELEMENTS
    most = max(n * BG if D else 0 for n, BG, D in zip(rows, widths, problem.D, strict=True))
    while elements > LEAST_ELEMENTS and most < PROGRAMS_PER_PROCESSOR * processors * elements:
        elements //= 2
    tile = [max(1, elements // BG) if D else 1 for BG, D in zip(widths, problem.D, strict=True)]
    sides = [
        StoreSide(D, G, BG, max(1, -(-D // G)), BR, *more, *of_codes)
        for D, G, BG, BR, *more, of_codes in zip(
            problem.D, problem.G, widths, tile, quant, limit, vec_in, vec_out, codes, strict=True
        )
    ]
    programs = max(-(-n // BR) if D else 0 for n, BR, D in zip(rows, tile, problem.D, strict=True))
    widest = max(BR * BG * size for BR, BG, size in zip(tile, widths, problem.itemsize, strict=True))
    most_warps = MOST_WARPS_ROPED if rope else MOST_WARPS
    num_warps = max(1, min(most_warps, widest // (32 * VECTOR_BYTES)))
    all_bits = max(0, batch - 1).bit_length()  # of a sequence's number
    BB = 1 << min(max(all_bits, 4), MOST_BITS)
    return StoreConfig(
        form, problem.heads, page_size, sides[0], sides[1], programs, BB=BB, BITS=max(0, all_bits - MOST_BITS),
        num_warps=1 << (num_warps.bit_length() - 1), **rope,  # type: ignore[arg-type]
    )
