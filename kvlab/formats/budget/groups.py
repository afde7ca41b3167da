"""Groups of layers that keep the same: a page of a layer as a format, and how many pages a request holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod

import numpy as np

from kvlab.common.checks import require, shown
from kvlab.formats.catalogue import known_format
from kvlab.formats.format import Format

from .layers import Layer, Rows, State

PLAIN = {"bf16": "bf16", "fp16": "f16", "fp32": "f32", "fp8": "e4m3", "fp8_e5m2": "e5m2"}
"""Types without scales in the cache; fp8 has one scale of the tensor, outside the bytes."""
SCALED = {
    "fp8_per_token_head": "slot:{N} head:{H} dim:{D} F.e4m3, slot:{N} head:{H} F_scale.f32",
    "int8_per_token_head": "slot:{N} head:{H} dim:{D} F.s8, slot:{N} head:{H} F_scale.f32",
    "int4": "slot:{N} head:{H} dim:{D} F.u4, slot:{N} head:{H} (F_scale.f16, F_min.f16)",
    "nvfp4": "slot:{N} head:{H} dim:{D} F.e2m1, slot:{N} head:{H} dim/16:{S} F_scale.e4m3",
}
LATENT = {"fp8_ds_mla": "mla.656", "nvfp4": "mla.352"}
KV_DTYPES = (*PLAIN, *SCALED, "fp8_ds_mla")
"""What a cache may be of; ``fp8_ds_mla`` is the 656-byte row of MLA, whose ``nvfp4`` is the 352-byte row."""


def format_of(rows: Rows, kv_dtype: str, page_size: int) -> Format:
    """A page of one layer as a format. ValueError for a type that has no such rows.

    >>> format_of(Rows("full", 8, 128, 128), "nvfp4", 16).bytes_per_token
    1152
    """
    if rows.kind.endswith("indexer"):
        return Format.parse(f"page:1 (slot:{page_size} dim:{rows.k_dim} k.e4m3, slot:{page_size} k_scale.f32)")
    if rows.kind.endswith("mla"):
        if kv_dtype in LATENT:
            what = f"kv_dtype is {kv_dtype!r} and kv_lora_rank, qk_rope_head_dim are {rows.k_dim}, {rows.v_dim}"
            require(rows[2:4] == (512, 64), what, "512, 64")
            return known_format(LATENT[kv_dtype], pages=1, page_size=page_size)
        require(kv_dtype in PLAIN, f"kv_dtype is {kv_dtype!r}", f"one of {', '.join((*PLAIN, *LATENT))} for MLA")
        type_ = PLAIN[kv_dtype]
        return Format.parse(f"page:1 slot:{page_size} (dim:{rows.k_dim} latent.{type_}, dim:{rows.v_dim} rope.{type_})")
    require(kv_dtype != "fp8_ds_mla", "kv_dtype is 'fp8_ds_mla'", f"one of {', '.join((*PLAIN, *SCALED))} without MLA")
    text = SCALED.get(kv_dtype, f"slot:{{N}} head:{{H}} dim:{{D}} F.{PLAIN.get(kv_dtype)}")
    parts = []
    for field, dim in (("k", rows.k_dim), ("v", rows.v_dim)):
        by = {"nvfp4": 16, "int4": 2}.get(kv_dtype, 1)
        what = f"kv_dtype is {kv_dtype!r} and head_dim of {field} is {dim}"
        require(dim % by == 0, what, f"a multiple of {by}")
        parts.append(text.format(N=page_size, H=rows.heads, D=dim, S=dim // 16).replace("F", field))
    return Format.parse(f"page:1 ({', '.join(parts)})")


def rank_rows(rows: Rows, degree: int) -> tuple[Rows, int]:
    """Row of a token on one of ``degree`` ranks, and how many ranks keep the same: heads are dealt out, replicated
    where there are fewer than ranks; a row of MLA is on every rank.

    >>> rank_rows(Rows("full", 2, 128, 128), 8)
    (Rows(kind='full', heads=1, k_dim=128, v_dim=128, keeps=None), 4)
    """
    if rows.kind.endswith(("mla", "indexer")):
        return rows, degree
    fits = rows.heads % degree == 0 or degree % rows.heads == 0
    require(fits, f"degree is {degree}", f"a divisor or a multiple of {rows.heads} KV heads")
    return rows._replace(heads=max(rows.heads // degree, 1)), max(degree // rows.heads, 1)


def rank_state(state: State, degree: int) -> tuple[int, int]:
    """Elements of the recurrent state and of the convolution's inputs on one rank; groups are replicated where there
    are fewer than ranks."""
    for what, size in (("heads", state.heads), ("channels", state.channels)):
        require(size % degree == 0, f"degree is {degree}", f"a divisor of {size} {what} of {state.kind} layers")
    groups = state.groups if state.groups % degree == 0 else max(state.groups, degree)
    require(groups % degree == 0, f"degree is {degree}", f"a divisor or a multiple of {state.groups} groups")
    channels = state.channels + 2 * groups * state.group
    return state.heads // degree * state.head, channels // degree * state.columns


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep the same, on one rank.

    kind         that of :class:`Rows` or of :class:`State`
    layers       their indices
    page_tokens  tokens of a page; 0 of a state, which a request has once
    page_data    bytes of a layer's page, or state, that hold elements and scales
    page_bytes   bytes that it takes, with padding
    span         newest tokens that a request must hold; None: all
    chunk        tokens of a chunk, where what is kept begins at a multiple of it; else 0
    replicas     ranks that hold the same
    format       of a page; None of a state

    >>> from kvlab.formats import kv_budget
    >>> group = kv_budget("gpt-oss-20b").groups[0]
    >>> group.kind, len(group.layers), group.page_bytes, group.span, group.pages(100_000)
    ('sliding', 12, 32768, 128, 9)
    """

    kind: str
    layers: tuple[int, ...]
    page_tokens: int
    page_data: int
    page_bytes: int
    span: int | None = None
    chunk: int = 0
    replicas: int = 1
    format: Format | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in one layer, with scales and without padding; 0 of a state."""
        return self.page_data // self.page_tokens if self.page_tokens else 0

    def pages(self, tokens: int) -> int:
        """The most pages of a layer that a request holds on its way to ``tokens``: a window of ``span`` tokens that
        slides may touch one page more than it fills. A state counts as a page.

        >>> KVGroup("sliding", (0,), 16, 64, 64, span=33).pages(1000)
        3
        """
        if not tokens or not self.page_tokens:
            return min(tokens, 1)
        size = self.page_tokens
        every = -(-tokens // size)
        if self.span is None:
            return every
        if not self.chunk:
            return min(every, (self.span + size - 2) // size + 1)
        period = self.chunk * (size // gcd(self.chunk, size))  # after which chunks lie in their pages as before
        first = np.arange(0, min(tokens, period), self.chunk)
        last = np.minimum(first + self.span, tokens) - 1
        return int((last // size - first // size).max()) + 1

    def data(self, tokens: int) -> int:
        """Bytes that a request of ``tokens`` needs in all layers of the group."""
        held = tokens if self.span is None else min(tokens, self.span)
        one = held * self.token_bytes if self.page_tokens else self.pages(tokens) * self.page_data
        return one * len(self.layers)

    def nbytes(self, tokens: int) -> int:
        """Bytes that its pages take in all layers of the group."""
        return self.pages(tokens) * self.page_bytes * len(self.layers)


def _rows_group(rows: Rows, kv_dtype: str, page_size: int, degree: int, step_tokens: int) -> KVGroup:
    mine, replicas = rank_rows(rows, degree)
    page = format_of(mine, kv_dtype, page_size)
    data = sum(prod(field.shape) * field.type.bits for field in page.fields) // 8
    span = None if rows.keeps is None else rows.keeps - 1 + step_tokens
    chunk = rows.keeps or 0 if rows.kind == "chunked" else 0
    return KVGroup(rows.kind, (), page_size, data, page.nbytes, span, chunk, replicas, page)


def groups_of(
    layers: tuple[Layer, ...], kv_dtype: str, page_size: int, degree: int, step_tokens: int,
    state_bytes: tuple[int, int],
) -> list[KVGroup]:
    """The groups of a model's layers on one rank, in the order of their first layers.

    state_bytes    of an element of recurrent states, and of convolutions' inputs
    """
    require(kv_dtype in KV_DTYPES, f"kv_dtype is {shown(kv_dtype)}", f"auto or one of {', '.join(KV_DTYPES)}")
    made: dict[Rows | State, KVGroup] = {}
    held: dict[Rows | State, list[int]] = {}
    for layer in layers:
        for one in (*layer.rows, *((layer.state,) if layer.state is not None else ())):
            held.setdefault(one, []).append(layer.number)
            if one in made:
                continue
            if isinstance(one, Rows):
                made[one] = _rows_group(one, kv_dtype, page_size, degree, step_tokens)
            else:
                recurrent, inputs = rank_state(one, degree)
                data = recurrent * state_bytes[0] + inputs * state_bytes[1]
                made[one] = KVGroup(one.kind, (), 0, data, data)
    return [replace(group, layers=tuple(held[one])) for one, group in made.items()]


def aligned(group: KVGroup, align: int) -> KVGroup:
    """The group with pages of a multiple of ``align`` bytes."""
    return replace(group, page_bytes=-(-group.page_bytes // align) * align)


def uniform(groups: list[KVGroup]) -> list[KVGroup]:
    """The groups with pages of one number of bytes, as in a pool that all share: a page of rows takes as many tokens
    as fit, a state is padded to a page, and pages grow until the largest state fits.

    >>> small, state = KVGroup("full", (0,), 16, 64, 64), KVGroup("mamba2", (1,), 0, 100, 100)
    >>> [(g.page_tokens, g.page_data, g.page_bytes) for g in uniform([small, state])]
    [(32, 128, 128), (0, 100, 128)]
    """
    unit = max((group.page_bytes for group in groups if group.page_tokens), default=1)
    most = max((group.page_bytes for group in groups), default=1)
    size = -(-most // unit) * unit
    out = []
    for group in groups:
        times = size // group.page_bytes if group.page_tokens else 1
        slots = times * group.page_tokens
        page = group.format.resized(slot=slots) if group.format is not None and times > 1 else group.format
        data = times * group.page_data
        out.append(replace(group, page_tokens=slots, page_data=data, page_bytes=size, format=page))
    return out
