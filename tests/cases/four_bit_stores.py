"""Stores into caches of 4 bits, canaries around every slot, and what lies there afterwards by ``kvlab.formats``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from store_cases import CANARY, filled

from kvlab.attention import kv_store_paged
from kvlab.formats import Format, known_format
from kvlab.memory import as_dtype

Array = np.ndarray[Any, Any]
NUMBERS = {"k": 0.65, "v": 2.1}
"""Of which dividing and multiplying by the reciprocal differ at ties."""


@dataclass(frozen=True)
class FourBitStore:
    """A store of 4 bits, most tokens in slots of their own, some in none; canaries around. kind: "e2m1", "words" (V's
    scales of blocks in the 4x4 order of flashinfer.nvfp4), "int4", "uint4" and "halves" (over minima, the latter in
    float16 as lmdeploy.int4 has them).
    """

    kind: str
    D: tuple[int, int] = (64, 96)
    heads: int = 3
    tokens: int = 9
    source: str = "fp32"
    page: int = 4

    def build(self) -> tuple[list[Array], dict[str, Any]]:
        """(arguments, options) of ``kv_store_paged``: magnitudes of blocks from 2^-24 to 2^8, a zero row, -0, more than
        e4m3 scales reach, a subnormal, and the ties of e2m1 times the number."""
        rng = np.random.default_rng(3)
        pages, sources, written, options = 5, [], [], {}
        for name, D in zip("kv", self.D, strict=True):
            shape = self.tokens, self.heads, D
            wide = np.exp2(rng.uniform(-24, 8, (*shape[:2], -(-D // 16)))).repeat(16, -1)[..., :D]
            x = (rng.standard_normal(shape) * wide).astype(as_dtype(self.source))
            x[1, 0], x[2, -1, :16], x[3, 0, 5], x[7, 0], x[8] = 0, -0.0, 60000, 0, 0
            x[7, 0, 1] = 2.0**-130  # 1 / its int4 scale is past float32
            ties = np.float32([6, -0.25, 0.25, 0.75, 1.25, 1.75, -2.5, 2.5, 3.5, -3.5, 5, -5])[: min(D, 12)]
            x[8, :, : len(ties)] = ties * np.exp2(np.arange(self.heads, dtype=np.float32)[:, None]) * np.float32(
                NUMBERS[name])
            sources.append(x)
            bytes_ = D // 2
            written.append(filled((pages + 1, self.page + 1, self.heads + 1, bytes_ + 16), "uint8")[1:, 1:, 1:, 16:])
            if self.kind in ("e2m1", "words"):
                scale = filled((pages, self.page + 1, self.heads, D // 16 + 3), "fp8")[:, 1:, :, :-3]
                if self.kind == "words" and name == "v":  # pages, heads, fours, blocks, four slots
                    fours = filled((pages, self.heads, self.page // 4 + 1, D // 16, 4), "fp8")[:, :, 1:]
                    scale = fours.swapaxes(1, 2)
                number = np.float32([NUMBERS[name]]) if self.kind == "words" else NUMBERS[name]
                options |= {f"{name}_block_scale": scale, f"{name}_scale": number}
            elif self.kind in ("uint4", "halves"):
                pairs = filled((pages, self.page, self.heads + 2, 2), "fp16" if self.kind == "halves" else "fp32")
                options |= {f"{name}_scale": pairs[:, :, 1:-1, 0], f"{name}_min": pairs[:, :, 1:-1, 1]}
            else:
                options[f"{name}_scale"] = filled((pages, self.page, self.heads + 2), "fp32")[:, :, 1:-1]
        slots = rng.permutation(pages * self.page)[: self.tokens]
        slots[4] = -1
        return [*sources, *written, slots], options

    def check(self, backend: str) -> None:
        """Run it and look at every byte."""
        arrays, options = self.build()
        kv_store_paged(*arrays, **options, backend=backend)
        check_bytes(self, arrays, options)


def encoded(kind: str, x: Array, name: str) -> tuple[Array, Array]:
    """Bytes and scales of ``x`` ``[T, H, D]`` by the format; over minima pairs of both."""
    T, H, D = x.shape
    if kind in ("uint4", "halves"):
        of_row = "dim:{} k.u4, (k_scale.{}, k_min.{})".format(D, *2 * ["f16" if kind == "halves" else "f32"])
        rows = Format.parse(f"slot:{T} head:{H} ({of_row})")
        with np.errstate(over="ignore", invalid="ignore"):
            raw = rows.encode(x.astype(np.float32)).reshape(T, H, -1)
        return raw[..., : D // 2], raw[..., D // 2 :]
    kind = "e2m1" if kind == "words" else kind
    known = known_format("kvlab.nvfp4" if kind == "e2m1" else "kvlab.int4", pages=1, page_size=T, heads=H, dim=D)
    rows = x.astype(np.float32)[None, None]
    with np.errstate(over="ignore", invalid="ignore"):
        raw = known.encode(rows, rows, tensor_scale=NUMBERS[name] if kind == "e2m1" else 1.0)
    scales = raw[x.size :].view(np.uint8 if kind == "e2m1" else np.float32)
    return raw[: x.size // 2].reshape(T, H, -1), scales[: scales.size // 2].reshape(T, H, -1)


def check_bytes(case: FourBitStore, arrays: list[Array], options: dict[str, Any]) -> None:
    """Every byte of the slots named is the format's, every other one a canary."""
    slots = arrays[4]
    token = np.nonzero((slots >= 0) & (slots < arrays[2].shape[0] * case.page))[0]
    page, slot = np.divmod(slots[token], case.page)
    for name, x, cache in zip("kv", arrays[:2], arrays[2:4], strict=True):
        codes, scales = encoded(case.kind, x, name)
        small = case.kind in ("e2m1", "words")
        scale = options[f"{name}_block_scale" if small else f"{name}_scale"]
        scale = scale.view(np.uint8) if small else scale[..., None]
        written = [scale]
        if f"{name}_min" in options:
            written.append(options[f"{name}_min"][..., None])
        assert (cache[page, slot] == codes[token]).all()
        if scale.ndim == 5:
            assert (scale[page, slot // 4, :, :, slot % 4] == scales[token]).all()
            scale[page, slot // 4, :, :, slot % 4] = CANARY
        else:
            stored = np.concatenate([np.ascontiguousarray(one[page, slot]).view(np.uint8) for one in written], -1)
            assert (stored == scales[token].view(np.uint8)).all()
        for array in (cache, *(written if scale.ndim < 5 else ())):
            array[page, slot] = np.frombuffer(bytes([CANARY]) * array.itemsize, array.dtype)[0]
        for array in (cache, *written):
            whole = array
            while isinstance(whole.base, np.ndarray):
                whole = whole.base
            assert (whole.reshape(-1).view(np.uint8) == CANARY).all()
