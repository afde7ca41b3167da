"""Cases of paged decode with features, everything poisoned that must not be read, and as PyTorch computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from decode_cases import storage
from yardsticks import mask_on, on, page_table, rounded_attention

from kvlab.attention import masks as M
from kvlab.attention.mha_decode import mha_decode_paged
from kvlab.attention.mha_decode.reference import reference
from kvlab.common.arrays import to_torch
from kvlab.memory import as_dtype

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class FeatureCase:
    """Sizes and features of a call; ``build`` makes its arrays. ``mask`` names one of :func:`mask_of`; ``scales`` is
    the kind of those of K and V, with ``kv`` of fp8.
    """

    lens: tuple[int, ...] = (150, 0, 17, 3)
    heads: tuple[int, int] = (6, 2)
    D: int = 64
    Dv: int | None = None
    page: int = 16
    dtype: str = "bf16"
    kv: str | None = None
    S: int = 1
    splits: int | None = None
    storage: str = "apart"
    window: Any = None
    mask: str = ""
    softcap: float = 0.0
    sinks: bool = False
    alibi: str = ""
    temperature: bool = False
    scales: str = ""
    seed: int = 0

    def __str__(self) -> str:
        plain = FeatureCase()
        parts = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)]
        return "-".join(parts).replace(" ", "").replace("float8_e4m3fn", "fp8") or "plain"

    def build(self) -> FeatureInputs:
        """Random values in the slots that some row sees, NaN in all others; pages dealt at random."""
        rng = np.random.default_rng(self.seed)
        (q_heads, kv_heads), Dv = self.heads, self.D if self.Dv is None else self.Dv
        q_dtype, kv_dtype = as_dtype(self.dtype), as_dtype(self.kv or self.dtype)
        lens, widest = np.array(self.lens, np.int32), max(self.D, Dv)
        batch, columns = len(lens), -(-lens // self.page)
        pages = int(columns.sum()) + 2
        k, v = storage(self.storage, (pages, self.page, kv_heads, widest), kv_dtype)
        k, v = k[..., : self.D], v[..., :Dv]
        table = page_table(columns, pages, rng)
        options = self._options(rng, lens, k.shape[:3])
        interval = self._interval(lens)
        for b, n in enumerate(lens):
            key = np.arange(n)
            first, _ = interval.bounds(np.arange(n - self.S, n), n, b)
            key = key[key >= (first.min() if n else 0)]  # pages and slots before are never read
            at = table[b, key // self.page], key % self.page
            k[at] = rng.standard_normal((len(key), kv_heads, self.D)).astype(kv_dtype)
            v[at] = rng.standard_normal((len(key), kv_heads, Dv)).astype(kv_dtype)
        q = rng.standard_normal((batch, self.S, q_heads, self.D)).astype(q_dtype)
        return FeatureInputs(self, (q, k, v, table, lens), options)

    def _interval(self, lens: Array) -> M.Interval:
        mask = mask_of(self.mask, self, lens)
        own = None if mask is None else mask.interval()
        window = M.window_interval(mask is None or isinstance(self.window, int), self.window)
        return window if own is None else own & window or M.Interval()

    def _options(self, rng: np.random.Generator, lens: Array, slots: tuple[int, ...]) -> dict[str, Any]:
        (q_heads, kv_heads), f32 = self.heads, np.float32
        options: dict[str, Any] = {"mask": mask_of(self.mask, self, lens), "window": self.window}
        options["softcap"] = self.softcap
        if self.sinks:
            options["sinks"] = rng.standard_normal(q_heads).astype(f32)
        if self.alibi:
            shape = (len(lens), q_heads) if self.alibi == "sequence" else (q_heads,)
            options["alibi_slopes"] = rng.random(shape).astype(f32) / 8
        if self.temperature:
            options["temperature"] = rng.uniform(-2, 2, q_heads).astype(f32)
        if self.scales:
            shapes: dict[str, Any] = {"number": None, "head": (kv_heads,), "token": slots}
            for name in ("k_scale", "v_scale"):
                shape = shapes[self.scales]
                options[name] = 0.625 if shape is None else (0.5 + rng.random(shape)).astype(f32)
            if as_dtype(self.dtype).itemsize == 1:
                by_head = self.scales == "head"
                options["q_scale"] = (0.5 + rng.random(self.heads[1])).astype(f32) if by_head else 0.75
        return options


def mask_of(name: str, case: FeatureCase, lens: Array) -> M.Mask | None:
    """A mask by name, with numbers that fit."""
    rng = np.random.default_rng(7)
    rows, keys = case.S, int(max(case.lens))
    bias = np.where(rng.random((1, case.heads[0], rows, keys)) < 0.5, rng.standard_normal((rows, keys)), -np.inf)
    made: dict[str, Any] = {
        "": lambda: None,
        "null": M.NullMask,
        "chunked": lambda: M.ChunkedMask(32),
        "chunked causal": lambda: M.ChunkedCausalMask(32),
        "sliding": lambda: M.SlidingWindowCausalMask(40),
        "sliding not causal": lambda: M.SlidingWindowNonCausalMask(40),
        "padding": lambda: M.CausalPaddingMask((lens + 1) // 2),
        "bias": lambda: M.MaterializedMask(bias.astype(np.float32)),
        "even keys": EvenKeys,
        "both": lambda: M.OrMask(M.CausalMask(), EvenKeys()),
    }
    mask: M.Mask | None = made[name]()
    return mask


class EvenKeys(M.Mask):
    """A mask of one's own."""

    def visible(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return (k_pos + 0 * q_pos) % 2 == 0


@dataclass
class FeatureInputs:
    """A call: arrays and options. ``q`` is ``[B, S, Hq, D]``."""

    case: FeatureCase
    arrays: tuple[Array, ...]
    options: dict[str, Any]

    @property
    def q(self) -> Array:
        return self.arrays[0]

    @property
    def resolved(self) -> Any:
        """The call as the launch functions get it."""
        return mha_decode_paged.planned(*self.arrays, backend="reference", **self.options)

    @property
    def scale(self) -> float:
        return float(self.case.D) ** -0.5

    def torch(self, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        return tuple(on(to_torch(a), device) for a in self.arrays)

    def torch_options(self, device: str = "cpu") -> dict[str, Any]:
        made = {k: to_torch(v).to(device) if isinstance(v, np.ndarray) else v for k, v in self.options.items()}
        return made | {"mask": mask_on(made["mask"], device)}

    def exact(self) -> tuple[Array, Array]:
        """The float64 reference."""
        return reference(*self.arrays, scale=self.scale, features=self.resolved.features)

    def plain_torch(self) -> Array:
        """The formula in PyTorch in q's dtype (bfloat16 for fp8), every intermediate rounded."""
        q, k, v, table, lens = self.arrays
        dtype = torch.bfloat16 if q.itemsize == 1 else getattr(torch, q.dtype.name)
        features = self.resolved.features
        out = np.zeros((*q.shape[:3], v.shape[3]))
        for b, n in enumerate(lens):
            key = np.arange(n)
            at = table[b, key // k.shape[1]], key % k.shape[1]
            f = features.of_sequence(b, at, self.scale)
            K, V = (_rows(x[at], by, dtype) for x, by in ((k, f["k_scale"]), (v, f["v_scale"])))
            rows = to_torch(np.ascontiguousarray(q[b])).to(dtype)
            out[b] = rounded_attention(rows, K, V, features, scale=self.scale, keys=int(n), sequence=b)
        return out


def _rows(x: Array, scale: Any, dtype: torch.dtype) -> torch.Tensor:
    """Rows ``[n, Hkv, D]`` of K or V, scaled."""
    true = x.astype(np.float64) * np.broadcast_to(np.asarray(scale, np.float64), x.shape[:2])[..., None]
    return torch.from_numpy(true).to(dtype)


FP8 = "float8_e4m3fn"
MASKS = ["null", "chunked", "chunked causal", "sliding", "sliding not causal", "padding", "bias", "even keys", "both"]
FEATURES = [
    *(FeatureCase((150, 0, 17, 1), mask=mask, S=2, splits=2 if i % 2 else None) for i, mask in enumerate(MASKS)),
    FeatureCase(window=20, S=4, splits=3),
    FeatureCase(window=(70, 0), dtype="fp32", page=5),
    FeatureCase(window=(3, 2), mask="null", S=3, dtype="fp16"),
    FeatureCase(softcap=2.0, D=128),
    FeatureCase(softcap=1.0, sinks=True, splits=5),
    FeatureCase(sinks=True, window=9, splits=4, S=2, dtype="fp32"),
    FeatureCase(alibi="head", S=2),
    FeatureCase(alibi="sequence", dtype="fp16", splits=2, storage="hnd"),
    FeatureCase(mask="bias", window=40, softcap=3.0, sinks=True, alibi="head", S=3, splits=2),
    FeatureCase(softcap=1.0, sinks=True, alibi="sequence", temperature=True, S=3, splits=2),
    FeatureCase(D=128, kv=FP8, scales="head", temperature=True, heads=(6, 3), S=2),
    FeatureCase(D=128, kv=FP8),
    FeatureCase(D=128, kv=FP8, scales="number", dtype="fp16", S=2, splits=2, storage="halves"),
    FeatureCase(D=128, kv=FP8, scales="head", page=64, heads=(5, 1)),
    FeatureCase(D=128, kv=FP8, scales="token", splits=3, page=1, window=60, sinks=True),
    FeatureCase(D=256, kv=FP8, scales="token", dtype=FP8, softcap=2.0, S=2),
]
ENDS = [
    FeatureCase((1, 0, 0, 1), heads=(4, 2), D=128, splits=splits, kv=kv, scales="head" if kv else "")
    for splits in (1, 3) for kv in (None, FP8)
]
"""One key at both ends of the batch, and between them sequences without keys."""
FEATURES += ENDS
DEPTHS = [
    *(FeatureCase(lens=(70, 3), D=D, dtype=dtype) for D in (96, 192, 576) for dtype in ("bf16", "fp32")),
    FeatureCase(lens=(70, 3), D=80, S=4, heads=(10, 1), softcap=1.0),
    FeatureCase(lens=(70, 3), D=192, Dv=128, splits=2),
    FeatureCase(lens=(70, 3), D=64, Dv=128, dtype="fp32"),
    FeatureCase(lens=(70, 3), D=576, Dv=512),
    FeatureCase(lens=(70, 3), D=80, Dv=48, kv=FP8, scales="head"),
    FeatureCase(lens=(70, 3), D=16, kv=FP8, dtype="fp16"),
    FeatureCase(lens=(70, 3), D=264),
    FeatureCase(lens=(70, 3), D=576, kv=FP8, scales="number"),
]
