"""Cases of MLA decode with everything poisoned that must not be read, and as PyTorch computes them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from yardsticks import far_stride, mask_on, on, page_table, rounded_attention, sparse

from kvlab.attention.call.latent_rows import latent_windows, row_scales
from kvlab.attention.features.intervals import window_interval
from kvlab.attention.features.resolve import Features, resolve_features
from kvlab.attention.masks import Mask, resolve_mask
from kvlab.attention.mla_decode.reference import reference
from kvlab.common.arrays import to_torch
from kvlab.memory import as_dtype, float8_e4m3fn

Array = np.ndarray[Any, Any]
FULL = (512, 64)
"""Latent and rope columns of the models' caches."""


class EvenKeys(Mask):
    """A mask of one's own."""

    def visible(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return (k_pos % 2 == 0) & (k_pos <= q_pos)


@dataclass(frozen=True)
class Case:
    """Sizes of a call and what it asks for; ``build`` makes its arrays. ``lens`` count the S new tokens; a ``row`` of
    the cache is "plain", "fp8", "rope-aware" or "scaled", bytes with a scale of each 128 latents.
    """

    lens: tuple[int, ...]
    H: int = 4
    columns: tuple[int, int] = (128, 64)
    page: int = 16
    dtype: str = "bf16"
    S: int = 1
    splits: int | None = None
    storage: str = "dense"
    row: str = "plain"
    k_scale: str = ""
    mask: Mask | None = None
    window: Any = None
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    temperature: bool = False
    seed: int = 0

    def __str__(self) -> str:
        latent, rope = self.columns
        name = (
            f"B{len(self.lens)}-H{self.H}-{latent}+{rope}-page{self.page}-ctx{max(self.lens, default=0)}-{self.dtype}"
        )
        name += f"-S{self.S}" if self.S > 1 else ""
        name += f"-splits{self.splits}" if self.splits is not None else ""
        name += f"-{self.storage}" if self.storage != "dense" else ""
        name += f"-{self.row}" if self.row != "plain" else ""
        name += f"-window{self.window}".replace(" ", "") if self.window is not None else ""
        name += f"-{type(self.mask).__name__}" if self.mask else ""
        flags = {"scale" + self.k_scale: self.k_scale, "cap": self.softcap, "sinks": self.sinks, "slopes": self.slopes}
        flags["temperature"] = self.temperature
        return name + "".join(f"-{word}" for word, there in flags.items() if there)

    def build(self) -> Inputs:
        """Random values in the slots that are used, NaN in all others; pages dealt at random; garbage in the table."""
        rng = np.random.default_rng(self.seed)
        dtype, D = as_dtype(self.dtype), sum(self.columns)
        stored = dtype if self.row == "plain" else float8_e4m3fn
        width = D + (self.columns[1] if self.row in ("rope-aware", "scaled") else 0)
        width += self.columns[0] // 128 * 4 if self.row == "scaled" else 0
        lens = np.array(self.lens, np.int32)
        batch, columns = len(lens), -(-lens // self.page)
        pages = int(columns.sum()) + 2
        kv = storage(self.storage, (pages, self.page, width), stored)
        table = page_table(columns, pages, rng)
        b, token = np.nonzero(np.arange(max(self.lens, default=0)) < lens[:, None])
        rows = kv[:, :, 0] if kv.ndim == 4 else kv
        values, at = rng.standard_normal((len(b), D)), (table[b, token // self.page], token % self.page)
        for window, first in zip(latent_windows(rows, *self.columns), (0, self.columns[0]), strict=True):
            window[...] = np.nan
            window[at] = values[:, first : first + window.shape[2]].astype(window.dtype)
        by_block = row_scales(rows, *self.columns)
        if by_block is not None:
            by_block[...] = np.nan
            by_block[at] = rng.uniform(0.5, 2, (len(b), by_block.shape[2]))
            kv = kv.view(np.uint8)
        q = rng.standard_normal((batch, self.S, self.H, D)).astype(dtype)
        more: dict[str, Any] = {"mask": self.mask, "window": self.window, "softcap": self.softcap}
        more["sinks"] = rng.standard_normal(self.H).astype(np.float32) if self.sinks else None
        more["alibi_slopes"] = rng.uniform(0, 0.1, (batch, self.H)).astype(np.float32) if self.slopes else None
        more["temperature"] = rng.uniform(-2, 2, self.H).astype(np.float32) if self.temperature else None
        if dtype == float8_e4m3fn:
            more["q_scale"] = np.array([0.625], np.float32) if self.k_scale == "head" else 0.625
        if self.k_scale:
            by_token = rng.uniform(0.5, 2, (pages, self.page, 1)).astype(np.float32)
            by_token[at[0].max(initial=0) :, :, 0][np.isnan(rows[at[0].max(initial=0) :, :, 0].astype("f4"))] = np.nan
            more["k_scale"] = {"number": 0.75, "head": np.array([1.25], np.float32), "token": by_token}[self.k_scale]
        return Inputs(q, kv, table, lens, self.columns[0], {k: v for k, v in more.items() if v is not None})


def storage(kind: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A cache ``[pages, page_size, D]``, all NaN: dense, with its axis of one head, one layer of several, or columns of
    wider rows.
    """
    pages, page, D = shape
    if kind == "dense":
        whole = cache = np.empty(shape, dtype)
    elif kind == "head":
        whole = cache = np.empty((pages, page, 1, D), dtype)
    elif kind == "layers":
        whole = np.empty((pages, 1, 3, page, 1, D), dtype)
        cache = whole[:, 0, 1, :, 0]
    elif kind == "wide":
        whole = np.empty((pages + 1, page, 2 * D), dtype)
        cache = whole[1:, :, D:]
    else:
        raise ValueError(kind)
    whole[...] = np.nan
    return cache


@dataclass
class Inputs:
    """The arrays of a call; q is ``[B, S, H, D]``."""

    q: Array
    kv: Array
    table: Array
    lens: Array
    v_dim: int
    asked: dict[str, Any] = field(default_factory=dict)

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.q, self.kv, self.table, self.lens

    @property
    def rows(self) -> Array:
        """The cache ``[pages, page_size, D]``."""
        return self.kv[:, :, 0] if self.kv.ndim == 4 else self.kv

    @property
    def options(self) -> dict[str, Any]:
        return {"v_dim": self.v_dim, "scale": self.scale, **self.asked}

    @property
    def windows(self) -> tuple[Array, Array]:
        """The latent and the rope part of the cache."""
        return latent_windows(self.rows, self.v_dim, self.q.shape[-1] - self.v_dim)

    @property
    def row_scales(self) -> Array | None:
        """The scales of rows that have them."""
        return row_scales(self.rows, self.v_dim, self.q.shape[-1] - self.v_dim)

    @property
    def features(self) -> Features:
        """As the public function puts them together."""
        asked = dict(self.asked)
        mask, window = asked.pop("mask", None), asked.pop("window", None)
        interval = window_interval(mask is None or isinstance(window, int), window)
        lengths = np.full(len(self.lens), self.q.shape[1]), self.lens.astype(np.int64)
        plan = resolve_mask(mask, interval, heads=self.q.shape[2], lengths=lambda: lengths, like=self.q)
        latent = self.windows[0][:, :, None]
        return resolve_features(self.q, latent, latent, mask=plan, batch=len(self.lens), **asked)

    @property
    def scale(self) -> float:
        """Of heads of 128 + 64 before absorption."""
        return 192**-0.5

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        return *self.q.shape[:3], self.v_dim

    def torch(self, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        return tuple(on(to_torch(a), device) for a in self.arrays)

    def options_on(self, device: str = "cpu") -> dict[str, Any]:
        """:attr:`options` with torch tensors."""
        made = {k: on(to_torch(v), device) if isinstance(v, np.ndarray) else v for k, v in self.options.items()}
        return made | {"mask": mask_on(made.get("mask"), device)}

    def exact(self) -> tuple[Array, Array]:
        """The float64 reference."""
        arrays = self.q, *self.windows, self.table, self.lens
        return reference(*arrays, scale=self.scale, features=self.features, row_scales=self.row_scales)

    def plain_torch(self) -> Array:
        """``softmax(scores) v`` as PyTorch has it in q's dtype, every intermediate rounded; e4m3 multiplied by its
        scale first.
        """
        out = np.zeros(self.shape)
        for b in range(len(self.lens)):
            n = int(self.lens[b])
            dtype = self.q.dtype if self.q.dtype.itemsize > 1 else as_dtype("bf16")
            k = to_torch(self._true_rows(b).astype(dtype))[:, None]
            q = to_torch((self.q[b].astype(np.float32) * self.features.scales.q.at(None)).astype(dtype))
            out[b] = rounded_attention(q, k, k[..., : self.v_dim], self.features, scale=self.scale, keys=n, sequence=b)
        return out

    def _true_rows(self, b: int) -> Array:
        """The rows of a sequence's keys, scales applied, ``[n, D]``."""
        token, page = np.arange(int(self.lens[b])), self.rows.shape[1]
        at = self.table[b, token // page], token % page
        latent, rope = (window[at].astype(np.float32) for window in self.windows)
        by = np.broadcast_to(self.features.scales.k.at((*at, 0)), len(token))[:, None]
        if self.row_scales is not None:
            by = np.repeat(self.row_scales[at], 128, axis=-1)
        same = self.windows[0].dtype == self.windows[1].dtype
        return np.concatenate([latent * by, rope * (by if same else 1)], -1)

    def with_(self, **changes: Any) -> Inputs:
        return replace(self, **changes)


def decode_far_apart(case: Case) -> tuple[Array, Array]:
    """Interpreted kernel with pages, and with heads of q and out, that span more than 2^31 elements, and on the dense
    copy: both outputs. Runs where Triton is interpreted.
    """
    from kvlab.attention import mla_decode_paged

    x = case.build()
    pages, _, D = x.kv.shape
    kv = sparse(x.kv.shape, (far_stride(pages), D, 1), x.kv.dtype)
    kv[...] = x.kv
    far = far_stride(case.H)
    one = (case.H * far, case.H * far, far, 1)
    q, out = (sparse((1, 1, case.H, n), one, x.q.dtype) for n in (D, x.v_dim))
    q[...] = x.q
    out[...] = np.nan
    options = {"num_splits": case.splits, "backend": "triton", **x.options}
    mla_decode_paged(*x.with_(q=q, kv=kv).arrays, out=out, **options)
    return out.copy(), mla_decode_paged(*x.arrays, **options)
