"""Cases of prefill with everything poisoned that must not be read, and as PyTorch computes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from yardsticks import mask_on, on, page_table, rounded_attention

from kvlab.attention import masks
from kvlab.attention.call.explain import explain
from kvlab.attention.mha_prefill import mha_prefill, mha_prefill_paged
from kvlab.attention.mha_prefill.reference import reference
from kvlab.common.arrays import to_torch
from kvlab.memory import as_dtype

Array = np.ndarray[Any, Any]


class Striped(masks.Mask):
    """A mask of one's own: no run of keys, another for each head; query 5 sees nothing."""

    def visible(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return ((q_pos + 2 * k_pos + head + batch) % 3 > 0) & (q_pos % 7 != 5)


MASKS: dict[str, masks.Mask] = {
    "null": masks.NullMask(),
    "sliding": masks.SlidingWindowCausalMask(70),
    "future": masks.SlidingWindowNonCausalMask(40),
    "chunked": masks.ChunkedMask(50),
    "chunked causal": masks.ChunkedCausalMask(50),
    "striped": Striped(),
    "padding": masks.CausalPaddingMask(np.array([60, 9])),
    "chunks and window": masks.AndMask(masks.ChunkedCausalMask(30), masks.SlidingWindowCausalMask(9)),
}


@dataclass(frozen=True)
class Case:
    """Sizes of a call. ``lens``: (new tokens, keys) of each sequence; dense calls have the same for all."""

    lens: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (2, 1)
    D: int = 64
    dtype: str = "bf16"
    form: str = "dense"
    page: int = 16
    window: Any = None
    causal: bool = True
    softcap: float = 0.0
    sinks: bool = False
    strided: bool = False
    seed: int = 0
    DV: int | None = None
    kv: str | None = None
    scales: str = ""
    mask: str = ""
    alibi: str = ""
    base2: bool = False
    hnd: bool = False
    temperature: bool = False

    def __str__(self) -> str:
        lens = "_".join(f"{s}x{n}" for s, n in self.lens) or "none"
        name = f"{self.form}{self.page if self.form == 'paged' else ''}-{lens}-H{self.heads[0]}x{self.heads[1]}"
        name += f"-D{self.D}" + (f"x{self.DV}" if self.DV else "") + f"-{self.dtype}"
        name += (f"-kv{self.kv}" if self.kv else "") + (f"-scales:{self.scales}" if self.scales else "")
        name += (f"-{self.mask.replace(' ', '_')}" if self.mask else "") + ("" if self.causal else "-full")
        name += "".join(f"-{word}" for word in ("alibi", "base2", "hnd", "temperature") if getattr(self, word))
        name += f"-window{self.window}".replace(" ", "") if self.window is not None else ""
        name += f"-cap{self.softcap:g}" if self.softcap else ""
        return name + ("-sinks" if self.sinks else "") + ("-strided" if self.strided else "")

    def fits(self, arch: str) -> bool:
        """Whether the machine has its dtypes: sm_80 has no e4m3."""
        return arch != "sm_80" or "fp8" not in (self.dtype, self.kv)

    def build(self) -> Inputs:
        """Random values where they are used, NaN everywhere else, pages dealt at random, garbage in the table."""
        rng = np.random.default_rng(self.seed)
        dtype, (q_heads, kv_heads), D = as_dtype(self.dtype), self.heads, self.D
        kv_dtype, DV = as_dtype(self.kv or self.dtype), self.DV or self.D
        new, keys = (np.array([pair[i] for pair in self.lens], np.int64).reshape(-1) for i in (0, 1))
        batch = len(self.lens)

        def rows(*shape: int, dtype: Any = dtype) -> Array:
            """Random rows, in part of wider ones full of NaN where the case is strided."""
            extra = (1, 1, shape[-1]) if self.strided else (0, 0, 0)
            wide = np.full((*shape[:-3], *(n + e for n, e in zip(shape[-3:], extra, strict=True))), np.nan, dtype)
            view = wide[..., extra[0] :, extra[1] :, extra[2] :]
            view[...] = rng.standard_normal(view.shape).astype(dtype)
            return view

        more: dict[str, Any] = {}
        if self.form == "dense":
            q = rows(batch, int(new.max(initial=0)), q_heads, D)
            k, v = (rows(batch, int(keys.max(initial=0)), kv_heads, d, dtype=kv_dtype) for d in (D, DV))
        else:
            q = rows(int(new.sum()), q_heads, D)
            more["cu_q"] = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        if self.form == "ragged":
            k, v = (rows(int(keys.sum()), kv_heads, d, dtype=kv_dtype) for d in (D, DV))
            more["cu_k"] = np.concatenate([[0], np.cumsum(keys)]).astype(np.int32)
        if self.form == "paged":
            columns = -(-keys // self.page)
            pages = int(columns.sum()) + 2
            k, v = (np.full((pages, self.page, kv_heads, d), np.nan, kv_dtype) for d in (D, DV))
            if self.strided:  # halves of one buffer, HND
                k, v = np.full((pages, 2, kv_heads, self.page, D), np.nan, kv_dtype).transpose(1, 0, 3, 2, 4)
            table = page_table(columns, pages, rng)
            b, key = np.nonzero(np.arange(keys.max(initial=0)) < keys[:, None])
            for cache in (k, v):
                values = rng.standard_normal((len(b), kv_heads, cache.shape[-1])).astype(kv_dtype)
                cache[table[b, key // self.page], key % self.page] = values
            more |= {"table": table, "seq_lens": keys.astype(np.int32)}
        if self.sinks:
            more["sinks"] = rng.standard_normal(q_heads).astype(np.float32)
        if self.alibi:
            shape = (batch, q_heads) if self.alibi == "sequence" else (q_heads,)
            more["slopes"] = (0.5 ** np.arange(1, 1 + np.prod(shape, dtype=int))).reshape(shape).astype(np.float32)
        if self.temperature:
            more["temperature"] = rng.uniform(-2, 2, q_heads).astype(np.float32)
        if self.scales == "token":  # NaN where there is no key
            unused = np.isnan(k.astype(np.float32)).all(-1)
            for name in ("k_scale", "v_scale"):
                more[name] = np.where(unused, np.nan, rng.uniform(0.2, 3, k.shape[:-1])).astype(np.float32)
        elif self.scales:
            size = () if self.scales == "number" else (kv_heads,)
            more |= {n: rng.uniform(0.2, 3, size).astype(np.float32) for n in ("q_scale", "k_scale", "v_scale")}
            if self.scales == "number":
                more |= {n: float(more[n]) for n in ("q_scale", "k_scale", "v_scale")}
        return Inputs(self, q, k, v, **more)


@dataclass
class Inputs:
    """The arrays of a call."""

    case: Case
    q: Array
    k: Array
    v: Array
    cu_q: Any = None
    cu_k: Any = None
    table: Any = None
    seq_lens: Any = None
    sinks: Any = None
    slopes: Any = None
    temperature: Any = None
    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None

    def with_(self, **changes: Any) -> Inputs:
        return replace(self, **changes)

    NAMES = (
        "q", "k", "v", "cu_q", "cu_k", "table", "seq_lens", "sinks", "slopes", "temperature", "q_scale", "k_scale",
        "v_scale",
    )

    def arguments(self, device: str | None = None, **options: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The public function and what it is called with; torch tensors on ``device`` if given."""
        case, a = self.case, {name: getattr(self, name) for name in self.NAMES}
        mask = MASKS.get(case.mask)
        if device is not None:
            a = {n: on(to_torch(x), device) if isinstance(x, np.ndarray) else x for n, x in a.items()}
            mask = mask_on(mask, device)
        more: dict[str, Any] = {
            "window": case.window, "softcap": case.softcap, "sinks": a["sinks"], "alibi_slopes": a["slopes"],
            "temperature": a["temperature"],
            "q_scale": a["q_scale"], "k_scale": a["k_scale"], "v_scale": a["v_scale"], "base2": case.base2,
            "causal": None if case.mask and case.causal else case.causal, "mask": mask,
        }
        more |= options
        if case.form != "paged":
            return mha_prefill, (a["q"], a["k"], a["v"]), more | {"cu_seqlens_q": a["cu_q"], "cu_seqlens_k": a["cu_k"]}
        if case.hnd:
            names = ("k", "v", "k_scale", "v_scale")
            a |= {n: a[n].swapaxes(1, 2) for n in names if getattr(a[n], "ndim", 0) > 2}
            more |= {n: a[n] for n in names[2:]} | {"kv_layout": "HND"}
        return mha_prefill_paged, (a["q"], a["k"], a["v"], a["table"], a["seq_lens"], a["cu_q"]), more

    def call(self, *, device: str | None = None, **options: Any) -> Any:
        """The public function; with torch tensors on ``device`` if given."""
        function, arrays, more = self.arguments(device, **options)
        return function(*arrays, **more)

    def explain(self, **options: Any) -> Any:
        """What the call would get."""
        function, arrays, more = self.arguments(**options)
        return explain(function, *arrays, **more)

    def plan(self, device: str | None = None, **options: Any) -> Any:
        """The checked call: what the launch functions are given."""
        function, arrays, more = self.arguments(device, **options)
        return function.planned(*arrays, **more)

    def exact(self) -> tuple[Array, Array]:
        """The float64 reference."""
        call = self.plan()
        out, lse = reference(*call.arrays, scale=call.plan.scale, features=call.features)
        lse = lse / np.log(2) if self.case.base2 else lse
        return (out, lse) if self.cu_q is None else (out[0], lse[0])

    def poison_before_window(self) -> None:
        """NaN in every K and V row before the first key that a row of its sequence sees."""
        left = self.plan().features.mask.left
        for b, (new, keys) in enumerate(self.case.lens):
            first = max(keys - new - left, 0)
            for array in (self.k, self.v):
                key = np.arange(first)
                if self.table is not None:
                    array[self.table[b, key // self.case.page], key % self.case.page] = np.nan
                elif self.cu_k is not None:
                    array[self.cu_k[b] + key] = np.nan
                else:
                    array[b, key] = np.nan

    def sequences(self) -> list[tuple[Any, Array, Array, Array]]:
        """(where its rows are in out, q, k, v) of each sequence."""
        found: list[tuple[Any, Array, Array, Array]] = []
        for b in range(len(self.case.lens)):
            at: Any = b if self.cu_q is None else slice(self.cu_q[b], self.cu_q[b + 1])
            where: Any = b
            if self.cu_k is not None:
                where = slice(self.cu_k[b], self.cu_k[b + 1])
            if self.table is not None:
                key = np.arange(self.seq_lens[b])
                where = self.table[b, key // self.case.page], key % self.case.page
            scales = [getattr(self, n) for n in ("k_scale", "v_scale")]  # of the stored values
            scales = [x[where] if getattr(x, "ndim", 0) > 1 else x for x in scales]
            rows = [
                x if by is None else x.astype(np.float32) * np.asarray(by)[..., None]
                for x, by in zip((self.k[where], self.v[where]), scales, strict=True)
            ]
            q = self.q[at]
            if self.q_scale is not None and q.dtype.itemsize == 1:
                group = self.case.heads[0] // self.case.heads[1]
                by = np.broadcast_to(self.q_scale, (self.case.heads[1],)).repeat(group)
                q = q.astype(np.float32) * by[:, None]
            found.append((at, q, *rows))
        return found

    def plain_torch(self) -> Array:
        """``softmax(q k^T * scale) v`` as PyTorch has it in the storage dtype (bfloat16 for e4m3), every intermediate
        rounded; P of e4m3 where both are.
        """
        case = self.case
        DV, features = case.DV or case.D, self.plan().features
        out = np.zeros((*self.q.shape[:-1], DV))
        dtype = as_dtype("bf16") if self.q.dtype.itemsize == 1 else self.q.dtype
        for b, (at, *arrays) in enumerate(self.sequences()):
            q, k, v = (to_torch(np.ascontiguousarray(a).astype(dtype)) for a in arrays)
            out[at] = rounded_attention(
                q, k, v, features, scale=case.D**-0.5, keys=len(k), sequence=b, p_fp8=self.q.dtype.itemsize == 1
            )
        return out


FEATURES = [
    Case(((130, 200), (60, 40)), form="ragged", heads=(3, 1), mask="chunked"),
    Case(((70, 130), (0, 9), (9, 70)), form="paged", heads=(2, 1), mask="chunked causal", dtype="fp16", page=16),
    Case(((90, 150), (5, 3)), form="ragged", heads=(2, 2), mask="sliding", alibi="head", base2=True, sinks=True),
    Case(((90, 150),), heads=(2, 1), mask="future", dtype="fp32"),
    Case(((70, 90), (20, 33)), form="ragged", heads=(2, 1), mask="striped", softcap=4.0, alibi="sequence"),
    Case(((70, 90), (20, 33)), form="ragged", heads=(2, 1), mask="padding"),
    Case(((70, 90),), heads=(2, 1), mask="chunks and window", sinks=True, dtype="fp32"),
    Case(((130, 140), (7, 7)), form="paged", heads=(5, 1), alibi="head", causal=False, hnd=True),
    Case(((70, 90), (30, 30)), form="paged", D=192, DV=128, heads=(2, 1), window=50),
    Case(((70, 90),), D=64, DV=192, heads=(2, 1), dtype="fp16"),
    Case(((70, 90),), D=128, DV=64, heads=(2, 1), dtype="fp32"),
    Case(((140, 150),), heads=(2, 1), kv="fp8", scales="number"),
    Case(((20, 90), (9, 70)), form="paged", D=128, heads=(6, 2), kv="fp8", scales="head", dtype="fp16", page=64),
    Case(((140, 150), (3, 20)), form="paged", heads=(4, 2), kv="fp8", scales="token", window=40, hnd=True),
    Case(((60, 80), (9, 20)), form="ragged", heads=(4, 2), kv="fp8", scales="token", D=192, DV=128),
    Case(((140, 150),), heads=(2, 1), dtype="fp8", scales="number", D=128),
    Case(((20, 90), (9, 70)), form="paged", heads=(6, 2), dtype="fp8", scales="head", softcap=20.0, sinks=True),
    Case(((60, 80),), form="ragged", heads=(4, 2), dtype="fp8", scales="token", D=192, DV=128),
    Case(((20, 90), (9, 70)), form="paged", heads=(6, 2), temperature=True, softcap=4.0, alibi="head", sinks=True),
    Case(((70, 90), (20, 33)), form="ragged", heads=(2, 1), temperature=True, mask="striped", dtype="fp32"),
    Case(((40, 60),), heads=(4, 2), temperature=True, dtype="fp8", scales="head", D=128),
]
"""Every feature. Few rows have the query heads of a KV head in one tile."""

ENDS = [
    Case(lens, heads=(4, 2), D=128, dtype=dtype, form=form, scales="head" if dtype == "fp8" else "")
    for lens, form in (
        (((1, 130), (0, 0), (0, 40), (1, 1)), "ragged"), (((1, 1), (0, 9), (70, 90), (0, 0), (1, 129)), "paged"),
    )
    for dtype in ("bf16", "fp8")
]
"""One row at both ends of the batch, and between them sequences without rows."""

ODD_DEPTHS = [
    Case(((40, 70),), D=D, DV=DV, dtype=t, kv=kv, heads=(2, 1))
    for D, DV, t, kv in (
        (16, None, "bf16", None), (80, None, "fp16", None), (96, 40, "bf16", None), (576, 512, "bf16", None),
        (192, None, "fp32", None), (320, 24, "fp32", None), (80, None, "bf16", "fp8"), (112, 48, "fp8", None),
        (264, 264, "fp16", None), (320, 272, "bf16", "fp8"),
    )
]
"""Head dimensions in pieces, padded, with other dimensions of the values."""
