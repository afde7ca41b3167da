"""Calls over K and V of 4 bits, and what is true of them by ml_dtypes' e2m1 and int4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from kvlab.attention import mha_decode_paged
from kvlab.memory import bfloat16, float8_e4m3fn


@dataclass(frozen=True)
class FourBits:
    """A call over pages of 4 bits; other slots hold NaN scales, other entries of the table no pages. kind: "e2m1",
    "words" (V's scales in the 4x4 order, as flashinfer.nvfp4 has them), "int4", "uint4" (over minima), or "halves"
    (over minima, pairs of float16 as lmdeploy.int4 has them).
    """

    kind: str
    lens: tuple[int, ...] = (70, 33)
    heads: tuple[int, int] = (6, 2)
    D: int = 128
    Dv: int = 0
    page: int = 16
    S: int = 1
    dtype: Any = bfloat16

    def build(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """(arguments, options) of ``mha_decode_paged``."""
        rng = np.random.default_rng(7)
        columns = -(-max(self.lens) // self.page)
        pages, heads = len(self.lens) * columns + 1, self.heads[1]
        table = rng.permutation(pages - 1).reshape(len(self.lens), columns).astype(np.int32)
        lens = np.array(self.lens, np.int32)
        used = np.zeros((pages, self.page), bool)
        for b, length in enumerate(self.lens):
            key = np.arange(length)
            used[table[b, key // self.page], key % self.page] = True
            table[b, -(-length // self.page) :] = -99
        q = rng.standard_normal((len(lens), self.S, self.heads[0], self.D)).astype(self.dtype)
        arrays, options = [q], {}
        for name, D in (("k", self.D), ("v", self.Dv or self.D)):
            both = rng.integers(0, 256, (pages, self.page, 2 * heads, D // 2), dtype=np.uint8)
            arrays.append(both[:, :, ::2])  # strides of their own
            if self.kind in ("e2m1", "words"):
                scale = rng.uniform(0.02, 3, (pages, self.page, heads, D // 16)).astype(float8_e4m3fn)
                scale[~used] = np.nan
                if self.kind == "words" and name == "v":
                    fours = scale.reshape(pages, self.page // 4, 4, heads, D // 16).transpose(0, 3, 1, 4, 2)
                    scale = np.ascontiguousarray(fours).swapaxes(1, 2)  # pages, heads, fours, blocks, 4
                options |= {f"{name}_block_scale": scale, f"{name}_scale": 0.25 if name == "k" else 1.5}
            elif self.kind in ("uint4", "halves"):
                dtype = np.float16 if self.kind == "halves" else np.float32
                pairs = rng.uniform(-2, 0.3, (pages, heads, self.page, 2)).astype(dtype)
                pairs[..., 0] = rng.uniform(0.02, 0.3, pairs.shape[:-1])
                pairs[0, :, 1, 0] = 0  # tokens of one number
                pairs.swapaxes(1, 2)[~used] = np.nan
                options |= {f"{name}_scale": pairs[..., 0].swapaxes(1, 2), f"{name}_min": pairs[..., 1].swapaxes(1, 2)}
            else:
                scale = rng.uniform(0.02, 0.3, (pages, self.page, heads)).astype(np.float32)
                scale[~used] = np.nan
                options[f"{name}_scale"] = scale
        return [*arrays, table, lens], options


def true(cache: np.ndarray, blocks: np.ndarray | None, over: bool = False) -> np.ndarray:
    """The numbers of the codes (``over`` minima: 0 to 15), float32, times the scales of blocks: by ml_dtypes, and the
    low half first.
    """
    halves = np.stack([cache & 15, cache >> 4], -1).reshape(*cache.shape[:-1], -1)
    if over:
        return halves.astype(np.float32)
    if blocks is None:
        return halves.view(np.int8).astype(ml_dtypes.int4).astype(np.float32)
    if blocks.ndim == 5:
        pages, fours, heads, columns, _ = blocks.shape
        blocks = np.stack([blocks[..., i] for i in range(4)], 2).reshape(pages, 4 * fours, heads, columns)
    return halves.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * np.repeat(blocks.astype(np.float32), 16, -1)


def exact(arrays: list[np.ndarray], options: dict[str, Any]) -> np.ndarray:
    """The reference of float32 K and V."""
    q, k, v, table, lens = arrays
    whole = []
    for name, cache in (("k", k), ("v", v)):
        scale = options[f"{name}_scale"]
        least = options.get(f"{name}_min")
        x = true(cache, options.get(f"{name}_block_scale"), least is not None)
        x = x * (scale[..., None] if isinstance(scale, np.ndarray) else np.float32(scale))
        whole.append(np.nan_to_num(x if least is None else x + least[..., None].astype(np.float32)))
    return mha_decode_paged(q.astype(np.float32), *whole, table, lens, backend="reference")
