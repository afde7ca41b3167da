"""Pairwise cases of the stores: K and V, and rows of MLA.

What lies in a slot afterwards is checked against float64: the bits of what is copied; a value that is rounded once to
its format, after a few roundings of float32; a computed scale, and the values by the scale that is stored. Every other
byte of the caches is a canary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pairs.calls import Row, _backend, _converted, _flat, _host, _on_gpu, random_scales, rows_of
from pairs.covering import Rule, Table
from pairs.operands import NOWHERE, Operand, page_table, placed, vectors

import kvlab.attention
from kvlab.attention import Rope
from kvlab.cache import PagedKVCacheCollection
from kvlab.memory import as_dtype, bfloat16

Array = np.ndarray[Any, Any]

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
LIMIT = {E4M3: 448.0, E5M2: 57344.0}
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, E4M3: 2.0**-4, E5M2: 2.0**-3}
LEAST = {"float32": 1e-30, "float16": 2.0**-25, "bfloat16": 1e-30, E4M3: 2.0**-10, E5M2: 2.0**-17}
"""Half of the distance of the smallest numbers."""
CANARY = 0xA5
POSITIONS = 70

BEFORE, NEW = (3, 0, 9, 22), (2, 5, 0, 4)
"""Tokens of each sequence in the cache, and new ones."""


def _scaled(dtypes: tuple[str, str], scale: str) -> bool:
    return not scale or (dtypes[1] in LIMIT and dtypes[0] not in LIMIT)


STORE = Table(
    {
        "form": ("NHD", "HND", "ragged", "padded"),
        "dtypes": (("bfloat16", "bfloat16"), ("float32", "float32"), ("float32", "bfloat16"), ("float16", "float32"),
                   ("bfloat16", E4M3), ("float32", E4M3), ("float16", E5M2), (E4M3, E4M3)),
        "heads": (1, 2, 3, 8),
        "D": ((64, 64), (80, 48), (24, 40), (32, 128)),
        "page": (1, 4, 5, 16),
        "k_scale": ("", "number", "tensor", "heads", "own", "own 32", "own 12"),
        "v_scale": ("", "number", "tensor", "heads", "own", "own 16", "own 12"),
        "scale_dtype": ("float32", "bfloat16"),
        "rope": (0, 8, 16),
        "interleaved": (False, True),
        "first": (0, 6),
        "positions": ("cache", "given"),
        "angles": ("float32", "bfloat16"),
        "ints": ("int32", "int64", "uint32"),
        "spread": (1, 3),
        "arch": ("sm_90", "gfx950"),
    },
    (
        Rule(("form", "D"), lambda form, D: form in ("NHD", "HND") or D[0] == D[1]),
        Rule(("dtypes", "k_scale"), _scaled),
        Rule(("dtypes", "v_scale"), _scaled),
        Rule(("dtypes", "rope"), lambda dtypes, rope: not rope or dtypes[0] not in LIMIT),
        Rule(("form", "k_scale", "v_scale"), lambda form, k, v: form in ("NHD", "HND") or
             k == v == "own" or (not k.startswith("own") and not v.startswith("own"))),
        Rule(("form", "ints"), lambda form, ints: form in ("ragged", "padded") or ints != "uint32"),
        Rule(("rope", "interleaved"), lambda rope, interleaved: rope > 0 or not interleaved),
        Rule(("rope", "first"), lambda rope, first: rope > 0 or first == 0),
        Rule(("rope", "angles"), lambda rope, angles: rope > 0 or angles == "float32"),
        Rule(("form", "rope", "positions"), lambda form, rope, positions: positions == "given"
             if rope and form in ("NHD", "HND") else positions == "cache" or rope > 0),
    ),
)
LATENT = Table(
    {
        "row": ("plain", "aware", "scaled"),
        "dtypes": (("bfloat16", "bfloat16"), ("float32", "float16"), ("bfloat16", E4M3), ("float32", E4M3),
                   ("float16", E5M2)),
        "columns": ((128, 64), (256, 32), (384, 16)),
        "axes": (3, 4),
        "page": (1, 4, 5, 16),
        "scale": ("", "number", "tensor"),
        "rope": (False, True),
        "interleaved": (False, True),
        "angles": ("float32", "bfloat16"),
        "ints": ("int32", "int64"),
        "spread": (1, 3),
    },
    (
        Rule(("row", "dtypes"), lambda row, dtypes: row == "plain" or dtypes[1] in LIMIT),
        Rule(("row", "scale"), lambda row, scale: row != "scaled" or not scale),
        Rule(("dtypes", "scale"), lambda dtypes, scale: not scale or dtypes[1] in LIMIT),
        Rule(("rope", "interleaved"), lambda rope, interleaved: rope or not interleaved),
        Rule(("rope", "angles"), lambda rope, angles: rope or angles == "float32"),
    ),
)


@dataclass
class Part:
    """What a store writes to one cache: ``values`` [n, H, D], in float64, of the tokens that are stored, go to
    ``window[at]``.

    off : what float32 makes of them before they are rounded. limit : of a format that saturates. by : what they are
    divided by, or the scales ``[pages, page, H, blocks]`` that are computed and stored for each G of them.
    """

    values: Array
    off: Array
    bits: Array | None
    window: Array
    at: Any
    by: Any = 1.0
    own: Array | None = None
    G: int = 0

    def check(self) -> None:
        """AssertionError where a slot holds something else."""
        stored, kind = self.window[self.at], self.window.dtype.name
        if self.bits is not None:
            assert stored.tobytes() == self.bits.tobytes(), "a copy has the bits of what is copied"
            return
        by, limit = np.broadcast_to(np.asarray(self.by, np.float64), self.values.shape), LIMIT.get(kind, np.inf)
        if self.own is not None:
            scales = self.own[self.at].astype(np.float64)
            n, heads, D = self.values.shape
            blocks = scales.shape[-1]
            padded = np.zeros((2, n, heads, blocks * self.G))
            padded[0, ..., :D], padded[1, ..., :D] = np.abs(self.values), self.off
            top, off = padded.reshape(2, n, heads, blocks, self.G).max(-1)
            exact = np.maximum(top, 2.0**-100) / limit
            unit = UNIT[self.own.dtype.name]
            assert (np.abs(scales - exact) <= exact * (unit + 2.0**-21) + off / limit).all(), "a computed scale"
            by = scales.repeat(self.G, -1)[..., :D]
        exact, off = self.values / by, self.off / by
        exact = np.clip(exact, -limit, limit)
        slack = (UNIT[kind] + 2.0**-20) * np.abs(exact) + off + LEAST[kind]
        wrong = np.abs(stored.astype(np.float64) - exact) / slack
        assert wrong.max(initial=0) <= 1, f"{wrong.max():.3g} times what rounding explains"


@dataclass
class Store:
    """``function(*arrays, **options)``, which writes ``parts`` and nothing else."""

    row: Row
    function: Callable[..., Any]
    arrays: list[Any]
    options: dict[str, Any]
    operands: dict[str, Operand]
    written: dict[str, Operand]
    parts: list[Part]
    emulated: dict[str, Any] = field(default_factory=dict)

    def check(self, backend: str) -> None:
        """Run it and look at every byte of what it may write to."""
        cuda = backend.startswith("cuda")
        before = {name: x.buffer.view(np.uint8).copy() for name, x in self.written.items()}
        buffers = {x.buffer.ctypes.data: _flat(x.buffer) for x in self.written.values()} if cuda else {}

        def convert(x: Any) -> Any:
            return _on_gpu(x, buffers) if cuda else x

        options = self.options | _backend(backend) | (self.emulated if backend == "emulator" else {})
        self.function(*(_given(x, convert) for x in self.arrays),
                      **{name: _given(x, convert) for name, x in options.items()})
        for x in self.written.values() if cuda else ():
            x.buffer.reshape(-1)[...] = _host(buffers[x.buffer.ctypes.data])
        for part in self.parts:
            part.check()
        for part in self.parts:
            for array in (part.window, *(() if part.own is None else (part.own,))):
                array[part.at] = np.frombuffer(bytes([CANARY]) * array.itemsize, array.dtype)[0]
        for name, x in self.written.items():
            assert (x.buffer.view(np.uint8) == before[name]).all(), f"{name}: a byte beside the slots has changed"


def _given(x: Any, convert: Callable[[Any], Any]) -> Any:
    """Arrays, also those of ropes and collections, by ``convert``."""
    if isinstance(x, PagedKVCacheCollection):
        scales = None if x.scales is None else convert(x.scales)
        return PagedKVCacheCollection(
            convert(x.blocks), convert(x.cache_lengths), convert(x.lookup_table), x.max_seq_length,
            x.max_cache_length, total_num_pages=x.total_num_pages, scales=scales,
            quantization_granularity=x.quantization_granularity,
        )
    return _converted(x, convert)


def _canaries(name: str, shape: tuple[int, ...], dtype: Any, unit: int, order: Any = None) -> Operand:
    made = placed(name, np.zeros(shape, dtype), unit=unit, order=order)
    made.buffer.view(np.uint8)[...] = CANARY
    return made


def _turned(x: Array, where: Array, rope: Rope, first: int) -> tuple[Array, Array]:
    """``[n, H, D]`` in float64 turned by the angles at ``where``, and what float32 loses."""
    cos, sin = (a[where].astype(np.float64)[:, None] for a in (rope.cos, rope.sin))
    j = np.arange(cos.shape[-1])
    one, two = (first + 2 * j, first + 2 * j + 1) if rope.interleaved else (first + j, first + j + len(j))
    out, off = x.copy(), np.zeros_like(x)
    out[..., one], out[..., two] = x[..., one] * cos - x[..., two] * sin, x[..., two] * cos + x[..., one] * sin
    off[..., one] = 2.0**-22 * (np.abs(x[..., one] * cos) + np.abs(x[..., two] * sin))
    off[..., two] = 2.0**-22 * (np.abs(x[..., two] * cos) + np.abs(x[..., one] * sin))
    return out, off


def _rope(c: Row, R: int, used: Array, rng: np.random.Generator, first: int) -> tuple[Rope, dict[str, Operand]]:
    """Angles, those that no token has NaN; the axes of cos and of sin in unlike orders."""
    angles = np.full((2, POSITIONS, R // 2), np.nan)
    turns = rng.uniform(0, 2 * np.pi, (len(used), R // 2))
    angles[0, used], angles[1, used] = np.cos(turns), np.sin(turns)
    dtype = as_dtype(c.angles)
    cos, sin = placed("cos", angles[0].astype(dtype)), placed("sin", angles[1].astype(dtype), order=(1, 0))
    return Rope(cos.array, sin.array, c.interleaved, first), {"cos": cos, "sin": sin}


def store(row: Row) -> Store:
    """A case of K and V as a call."""
    c, rng = row, np.random.default_rng(row.number)
    source, kept = (as_dtype(name) for name in c.dtypes)
    before, new, H = np.array(BEFORE), np.array(NEW), c.heads
    batch, most = len(new), max(NEW)
    columns = -(-(before + new) // c.page)
    pages = int(columns.sum()) + 2
    table = page_table(columns, pages, rng)
    sequence = np.repeat(np.arange(batch), new)
    within = np.concatenate([np.arange(n) for n in new])
    token_position = before[sequence] + within
    slots = c.form in ("NHD", "HND")
    if c.form == "padded":
        rows: Any = sequence, within
        lead = batch, most
    else:
        rows = np.arange(len(sequence)) + (2 if slots else 0)  # two tokens in front that go nowhere, and one or more
        lead = (len(sequence) + (3 if slots else 2),)  # behind
    page, slot = table[sequence, token_position // c.page], token_position % c.page
    data: dict[str, Operand] = {}
    for name, D in zip("kv", c.D, strict=True):
        values = np.full((*lead, H, D), np.nan, source)
        values[rows] = (3 * rng.standard_normal((len(sequence), H, D))).astype(source)
        data[name] = placed(name, values, unit=c.spread * vectors(source))
    position = token_position
    used = {"positions": rng.integers(0, POSITIONS, lead)} if c.positions == "given" else {}
    options: dict[str, Any] = {}
    operands = dict(data)
    if used:
        position = used["positions"][rows]
        options["positions"] = placed("lens", used["positions"].astype("int64")).array
    rope = None
    if c.rope:
        rope, angles = _rope(c, c.rope, np.unique(position), rng, c.first)
        options["rope"] = rope
        operands |= angles
    scale_dtype = as_dtype(c.scale_dtype)
    parts, written, own = [], {}, {}
    unit = c.spread * vectors(kept)
    if slots:
        order = (0, 2, 1, 3) if c.form == "HND" else None
        windows = {}
        for name, D in zip("kv", c.D, strict=True):
            written[f"{name}_cache"] = _canaries(f"{name}_cache", (pages, c.page, H, D), kept, unit, order)
            windows[name] = written[f"{name}_cache"].array
    else:
        blocks = _canaries("k_cache", (pages, 2, 3, c.page, H, c.D[0]), kept, unit)
        written["k_cache"] = blocks
        windows = {"k": blocks.array[:, 0, 1], "v": blocks.array[:, 1, 1]}
    scales_array = None
    for number, (name, D) in enumerate(zip("kv", c.D, strict=True)):
        kind = getattr(c, f"{name}_scale")
        by: Any = 1.0
        G = D
        if kind == "number":
            by = options[f"{name}_scale"] = 0.25 + number / 8
        elif kind == "tensor":
            given = random_scales(rng, (1,)) / 4
            by = options[f"{name}_scale"] = given
        elif kind == "heads":
            given = placed(f"{name}_scale", (random_scales(rng, (H,)) / 4)[:, None])
            operands[f"{name}_scale"] = given
            options[f"{name}_scale"] = given.array[:, 0]
            by = given.array
        elif kind:
            _, _, most_dims = kind.partition(" ")
            G = int(most_dims or (D if slots else 16))
            n = -(-D // G)
            if slots:
                its = _canaries(f"{name}_scale", (pages, c.page, H, n), scale_dtype, 1 + 2 * number, (0, 2, 1, 3))
                written[f"{name}_scale"] = its
                options[f"{name}_scale"], options[f"{name}_granularity"] = its.array, G
                own[name] = its.array
            else:
                if scales_array is None:
                    scales_array = _canaries("k_scale", (pages, 2, 3, c.page, H, n), scale_dtype, 1)
                    written["k_scale"] = scales_array
                own[name] = scales_array.array[:, number, 1]
        true = data[name].array[rows].astype(np.float64)
        off = np.zeros_like(true)
        copied = None
        if rope is not None and name == "k":
            true, off = _turned(true, position, rope, c.first)
        elif source == kept:
            copied = data[name].array[rows]
        parts.append(Part(true, off, copied, windows[name], (page, slot), by, own.get(name), G))
    ints = as_dtype(c.ints)
    if slots:
        where = np.full(lead, -1, np.int64)
        where[rows] = page * c.page + slot
        where[1], where[-1] = -NOWHERE, -2
        function: Callable[..., Any] = kvlab.attention.kv_store_paged
        arrays = [data["k"].array, data["v"].array, windows["k"], windows["v"],
                  placed("lens", where[:, None].astype(ints)).array[:, 0]]
    else:
        clean = np.where(np.arange(table.shape[1]) < columns[:, None], table, NOWHERE)
        lookup = placed("table", clean.astype(ints))
        operands["table"] = lookup
        cache = PagedKVCacheCollection(
            blocks.array, placed("lens", before[:, None].astype(ints)).array[:, 0], lookup.array, most,
            int((before + new).max()), scales=None if scales_array is None else scales_array.array,
            quantization_granularity=1 if scales_array is None else 16,
        )
        function = kvlab.attention.kv_store
        arrays = [data["k"].array, data["v"].array, cache, 1]
        if c.form == "ragged":
            options["cu_seqlens"] = placed("lses", np.concatenate([[0], np.cumsum(new)])[:, None].astype(ints)).array[
                :, 0
            ]
        else:
            options["valid_lengths"] = placed("lses", new[:, None].astype(ints)).array[:, 0]
    return Store(row, function, arrays, options, operands, written, parts, {"arch": c.arch})


def latent(row: Row) -> Store:
    """A case of MLA rows as a call."""
    c, rng = row, np.random.default_rng(row.number)
    source, kept = (as_dtype(name) for name in c.dtypes)
    L, R = c.columns
    T, tokens = 11, np.array([1, 2, 4, 5, 7, 9])
    pages = -(-len(tokens) // c.page) + 2
    at = np.divmod(rng.permutation(pages * c.page)[: len(tokens)], c.page)
    data = {}
    for name, label, D in (("latent", "latent", L), ("k_rope", "rope", R)):
        values = np.full((T, D), np.nan, source)
        values[tokens] = (3 * rng.standard_normal((len(tokens), D))).astype(source)
        data[name] = placed(label, values, unit=c.spread * vectors(source))
    scales = 4 * (L // 128) if c.row == "scaled" else 0
    width = L + (R if c.row == "plain" else scales + 2 * R)
    shape = (pages, c.page, 1, width)
    cache = _canaries("k_cache", shape, kept, c.spread * vectors(kept))
    options: dict[str, Any] = {}
    window, turned = cache.array[..., :L], cache.array[..., L + scales :]
    own = cache.array[..., L : L + scales].view(np.float32) if scales else None
    if c.row != "plain":
        turned = turned.view(bfloat16)
    by: Any = 1.0
    if c.scale == "number":
        by = options["scale"] = 0.375
    elif c.scale == "tensor":
        by = options["scale"] = random_scales(rng, (1,)) / 4
    part, operands = data["k_rope"].array[tokens][:, None].astype(np.float64), dict(data)
    off, copied = np.zeros_like(part), data["k_rope"].array[tokens] if source == turned.dtype else None
    if c.rope:
        position = rng.integers(0, POSITIONS, T)
        options["positions"] = placed("lens", position).array
        rope, angles = _rope(c, R, np.unique(position[tokens]), rng, 0)
        options["rope"] = rope
        operands |= angles
        (part, off), copied = _turned(part, position[tokens], rope, 0), None
    content = data["latent"].array[tokens]
    parts = [
        Part(content[:, None].astype(np.float64), np.zeros((len(tokens), 1, L)),
             content if source == kept else None, window, at, by, own, 128),
        Part(part, off, copied, turned, at),
    ]
    where = np.full(T, -1, np.int64)
    where[tokens] = at[0] * c.page + at[1]
    arrays = [data["latent"].array, data["k_rope"].array, cache.array if c.axes == 4 else cache.array[:, :, 0],
              placed("lens", where[:, None].astype(c.ints)).array[:, 0]]
    return Store(row, kvlab.attention.mla_store_paged, arrays, options, operands, {"k_cache": cache}, parts)


KV_STORE = [(row, functools.partial(store, row)) for row in rows_of(STORE)]
MLA_STORE = [(row, functools.partial(latent, row)) for row in rows_of(LATENT)]
