"""Cases of MLA prefill with everything poisoned that must not be read, and as PyTorch computes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from yardsticks import mask_on, on, page_table, rounded_attention

from kvlab.attention import mla_prefill_paged, mla_prefill_ragged
from kvlab.attention.call.latent_rows import latent_windows
from kvlab.attention.call.operands import result_dtype
from kvlab.attention.features.intervals import window_interval
from kvlab.attention.features.resolve import resolve_features
from kvlab.attention.features.scales import resolve_scale
from kvlab.attention.masks import Mask, resolve_mask
from kvlab.attention.mla_prefill.config import MLAPrefillProblem
from kvlab.attention.mla_prefill.reference import reference
from kvlab.attention.tiles.pages import Sequences
from kvlab.common.arrays import to_torch
from kvlab.memory import as_dtype, float8_e4m3fn

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """Sizes of a call. ``lens``: (new tokens, keys) of each sequence; ``held``: keys that k and v have, the last ones,
    or from ``starts`` on. columns: nope, rope, value. row: of the cache, "plain", "fp8", "rope-aware"; "": none.
    kv: "fp8" for k and v of e4m3. scales: kind of those of k and v (q of e4m3 has one of heads at most); k_scale: of
    the rope part, which is e4m3 where it has one and there is no cache.
    """

    lens: tuple[tuple[int, int], ...]
    H: int = 2
    columns: tuple[int, int, int] = (128, 64, 128)
    dtype: str = "bf16"
    page: int = 16
    row: str = "plain"
    latent: int = 64
    held: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    causal: bool | None = None
    window: Any = None
    mask: Mask | None = None
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    k_scale: str = ""
    kv: str = ""
    scales: str = ""
    strided: bool = False
    seed: int = 0

    def __str__(self) -> str:
        lens = "_".join(f"{s}x{n}" for s, n in self.lens) or "none"
        name = f"{lens}-H{self.H}-{'+'.join(map(str, self.columns))}-{self.dtype}"
        name += f"-page{self.page}-{self.row}" if self.row else "-ragged"
        for word, value in (("held", self.held), ("starts", self.starts), ("window", self.window)):
            name += f"-{word}{value}".replace(" ", "") if value is not None else ""
        name += f"-kv{self.kv}" if self.kv else ""
        name += f"-{self.scales}-scales" if self.scales else ""
        name += "-full" if self.causal is False else ""
        name += f"-{type(self.mask).__name__}" if self.mask else ""
        name += f"-cap{self.softcap:g}" if self.softcap else ""
        flags = {
            "sinks": self.sinks,
            "slopes": self.slopes,
            "strided": self.strided,
            f"{self.k_scale}scale": self.k_scale,
        }
        return name + "".join(f"-{word}" for word, set_ in flags.items() if set_)

    def fits(self, arch: str) -> bool:
        """Whether the machine has the dtypes of K, V and the rope part: sm_80 has no e4m3."""
        return arch != "sm_80" or (self.row != "fp8" and not self.kv)

    def build(self) -> Inputs:
        """Random values where they are used, NaN everywhere else, pages dealt at random, garbage in the table."""
        rng = np.random.default_rng(self.seed)
        dtype, (nope, rope, value) = as_dtype(self.dtype), self.columns
        new, keys = (np.array([pair[i] for pair in self.lens], np.int64).reshape(-1) for i in (0, 1))
        held = keys if self.held is None else np.array(self.held, np.int64)
        first = keys - held if self.starts is None else np.array(self.starts, np.int64)

        def rows(n: int, columns: int, dtype: Any) -> Array:
            """Random rows, in part of wider ones full of NaN where the case is strided."""
            extra = (1, 1, columns) if self.strided else (0, 0, 0)
            shape = n, self.H, columns
            wide = np.full(tuple(a + b for a, b in zip(shape, extra, strict=True)), np.nan, dtype)
            view = wide[extra[0] :, extra[1] :, extra[2] :]
            view[...] = rng.standard_normal(shape).astype(dtype)
            return view

        kv = float8_e4m3fn if self.kv else dtype
        q, n = rows(int(new.sum()), nope + rope, dtype), int(held.sum())
        k, v = rows(n, nope, kv), rows(n, value, kv)
        cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (new, held))
        more: dict[str, Any] = {}
        if self.starts is not None:
            more["starts"] = first.astype(np.int32)
        if self.sinks:
            more["sinks"] = rng.standard_normal(self.H).astype(np.float32)
        if self.slopes:
            more["slopes"] = rng.uniform(0, 0.1, (len(self.lens), self.H)).astype(np.float32)
        if self.scales:
            k_by, v_by, q_by = (rng.uniform(0.5, 2, (n, self.H)).astype(np.float32) for _ in range(3))
            forms = {"number": (0.75, 1.5), "head": (k_by[:1].T[:, 0], v_by[:1].T[:, 0]), "token": (k_by, v_by)}
            more["kv_scales"] = forms[self.scales]
            more["q_scale"] = 1.25 if self.scales == "number" else q_by[0]
        if not self.row:
            rope_rows = rng.standard_normal((n, rope)).astype(float8_e4m3fn if self.k_scale else dtype)
            more |= self._rope_scales((n, 1), rng)
            return Inputs(self, q, k, v, rope_rows, cu_q, cu_k, **more)
        columns = -(-keys // self.page)
        pages = int(columns.sum()) + 2
        table = page_table(columns, pages, rng)
        width = self.latent + (2 if self.row == "rope-aware" else 1) * rope
        stored = dtype if self.row == "plain" else float8_e4m3fn
        wide = np.full((pages, 2, self.page, width), np.nan, stored)  # NaN in every latent: none is read
        cache = wide[:, 1] if self.strided else wide[:, 1].copy()
        _, window = latent_windows(cache, self.latent, rope)
        b, key = np.nonzero((np.arange(keys.max(initial=0)) >= first[:, None])
                            & (np.arange(keys.max(initial=0)) < (first + held)[:, None]))
        window[...] = np.nan
        window[table[b, key // self.page], key % self.page] = rng.standard_normal((len(b), rope)).astype(window.dtype)
        more |= {"table": table, "seq_lens": keys.astype(np.int32)}
        more |= self._rope_scales((pages, self.page, 1), rng)
        return Inputs(self, q, k, v, cache, cu_q, cu_k, **more)

    def _rope_scales(self, tokens: tuple[int, ...], rng: np.random.Generator) -> dict[str, Any]:
        """Of the rope part, if it has some; those of tokens have this shape."""
        if not self.k_scale:
            return {}
        whole = rng.uniform(0.5, 2, tokens).astype(np.float32)
        return {"k_scale": {"number": 0.75, "head": whole.reshape(-1)[:1], "token": whole}[self.k_scale]}


@dataclass
class Inputs:
    """The arrays of a call."""

    case: Case
    q: Array
    k: Array
    v: Array
    cache: Array
    """``[pages, page_size, D]``, or the rope part of K ``[total_k, rope]``."""
    cu_q: Array
    cu_k: Array
    table: Any = None
    seq_lens: Any = None
    starts: Any = None
    sinks: Any = None
    slopes: Any = None
    k_scale: Any = None
    """Of the rope part."""
    kv_scales: Any = (None, None)
    q_scale: Any = None

    def with_(self, **changes: Any) -> Inputs:
        return replace(self, **changes)

    def call(self, *, device: str | None = None, **options: Any) -> Any:
        """The public function; with torch tensors on ``device`` if given."""
        case = self.case
        names = (
            "q",
            "k",
            "v",
            "cache",
            "cu_q",
            "cu_k",
            "table",
            "seq_lens",
            "starts",
            "sinks",
            "slopes",
            "k_scale",
            "q_scale",
        )
        a = {name: getattr(self, name) for name in names} | dict(zip(("k_by", "v_by"), self.kv_scales, strict=True))
        mask = case.mask
        if device is not None:
            a = {n: on(to_torch(x), device) if isinstance(x, np.ndarray) else x for n, x in a.items()}
            mask = mask_on(mask, device)
        asked = {"causal": case.causal, "window": case.window, "mask": mask, "softcap": case.softcap}
        asked |= {"sinks": a["sinks"], "alibi_slopes": a["slopes"]}
        asked |= {"q_scale": a["q_scale"], "k_scale": a["k_by"], "v_scale": a["v_by"]}
        if self.table is None:
            asked |= {"rope_scale": a["k_scale"]}
            return mla_prefill_ragged(a["q"], a["k"], a["v"], a["cache"], a["cu_q"], a["cu_k"], **asked | options)
        arrays = a["q"], a["k"], a["v"], a["cache"], a["table"], a["seq_lens"], a["cu_q"], a["cu_k"]
        asked |= {"k_starts": a["starts"], "latent_dim": case.latent, "rope_scale": a["k_scale"]}
        if not case.kv:
            asked |= {"rope_scale": None, "k_scale": a["k_scale"]}
        return mla_prefill_paged(*arrays, **asked | options)

    @property
    def rope(self) -> Array:
        """The rope part of K."""
        return (
            self.cache if self.table is None else latent_windows(self.cache, self.case.latent, self.case.columns[1])[1]
        )

    def launch_form(self) -> tuple[Any, ...]:
        """The positional arguments of the launch functions and the reference."""
        sequences = Sequences(self.cu_q, self.cu_k, self.table, self.seq_lens, self.starts)
        return self.q, self.k, self.v, self.rope, sequences

    def features(self) -> Any:
        """As the public function puts them together."""
        case, new = self.case, np.diff(self.cu_q).astype(np.int64)
        causal = case.mask is None if case.causal is None else case.causal
        keys = np.diff(self.cu_k).astype(np.int64) if self.seq_lens is None else self.seq_lens.astype(np.int64)
        plan = resolve_mask(case.mask, window_interval(causal, case.window), heads=case.H,
                            lengths=lambda: (new, keys), like=self.q)
        rope = self.rope[..., None, :]
        by = dict(zip(("k_scale", "v_scale"), self.kv_scales, strict=True)) | {"q_scale": self.q_scale}
        found = resolve_features(self.q, self.k, self.v, mask=plan, batch=len(case.lens), softcap=case.softcap,
                                 sinks=self.sinks, alibi_slopes=self.slopes, **by)
        by_rope = resolve_scale("k_scale", self.k_scale, rope, len(case.lens), 1, rope.shape[:-1])
        return replace(found, scales=replace(found.scales, rope=by_rope))

    def problem(self) -> MLAPrefillProblem:
        case = self.case
        return MLAPrefillProblem(
            len(case.lens),
            len(self.q),
            case.H,
            *case.columns,
            max(self.q.itemsize, 2),
            self.features().heavy,
            bool(case.kv),
            self.features().mask.bias is not None,
            self.table is not None,
        )

    def exact(self) -> tuple[Array, Array]:
        """The float64 reference."""
        return reference(*self.launch_form(), scale=sum(self.case.columns[:2]) ** -0.5, features=self.features())

    def plain_torch(self) -> Array:
        """``softmax(scores) v`` as PyTorch has it in the dtype of the products, every intermediate rounded; what is
        e4m3 multiplied by its scale first.
        """
        case, (nope, rope, value) = self.case, self.case.columns
        out, features = np.zeros((*self.q.shape[:2], value)), self.features()
        for b, (_, keys) in enumerate(case.lens):
            rows, held = slice(*self.cu_q[b : b + 2]), slice(*self.cu_k[b : b + 2])
            n = held.stop - held.start
            first = keys - n if self.starts is None else int(self.starts[b])
            key = np.arange(first, first + n)
            where: Any = held if self.table is None else (self.table[b, key // case.page], key % case.page)
            scale = self.k_scale[where] if case.k_scale == "token" else 1 if self.k_scale is None else self.k_scale
            dtype, by = result_dtype(self.q), features.scales
            k_rope = (self.rope[where].astype(np.float64) * scale).astype(dtype)
            scaled = ((self.q[rows], by.q.at(None)), (self.k[held], by.k.at(held)), (self.v[held], by.v.at(held)))
            q, k, v = (to_torch((a.astype(np.float64) * s[..., None]).astype(dtype)) for a, s in scaled)
            whole = torch.cat([k, to_torch(k_rope)[:, None].expand(-1, case.H, -1)], -1)
            options = {"scale": (nope + rope) ** -0.5, "keys": keys, "first": first, "sequence": b}
            out[rows] = rounded_attention(q, whole, v, features, **options)
        return out
