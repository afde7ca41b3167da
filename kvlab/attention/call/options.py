"""The keywords that operations share: their names, for type checkers and for help, and their types."""

from __future__ import annotations

from typing import Literal, TypedDict

from kvlab.attention.features.options import (
    FeatureOptions,
    FourBitOptions,
    LatentFeatureOptions,
    QueriedValuesOptions,
)
from kvlab.attention.features.rope import Rope
from kvlab.attention.schedule.schedule import Schedule
from kvlab.common.arrays import Array
from kvlab.staging import Traffic

Backend = Literal["auto", "reference", "emulator", "triton", "hopper"]
PortableBackend = Literal["auto", "reference", "emulator", "triton"]
Arch = Literal["sm_80", "sm_90", "sm_100", "gfx950"]
KVLayout = Literal["NHD", "HND"]
Arithmetic = Literal["float32", "chip"]


class RunOptions(TypedDict, total=False):
    """Keywords of any attention call: where it runs, and its results."""

    scale: float | None
    return_lse: bool
    base2: bool
    out: Array | None
    batch_invariant: bool
    arch: Arch
    arithmetic: Arithmetic
    check: bool | None
    traffic: Traffic | None


class SplitOptions(RunOptions, total=False):
    """Keywords of a decode over pages."""

    kv_layout: KVLayout
    num_splits: int | None
    mask_value: float


class DecodeOptions(QueriedValuesOptions, FeatureOptions, FourBitOptions, SplitOptions, total=False):
    """Keywords of ``mha_decode_paged``."""

    backend: Backend
    balanced: bool | None
    plan: Schedule | None


class StreamingOptions(FeatureOptions, SplitOptions, total=False):
    """Keywords of ``mha_decode_streaming_paged``."""

    backend: PortableBackend


class MLADecodeOptions(LatentFeatureOptions, SplitOptions, total=False):
    """Keywords of ``mla_decode_paged``."""

    v_dim: int
    indices: Array | None
    balanced: bool | None
    plan: Schedule | None
    backend: Backend


class PrefillOptions(FeatureOptions, RunOptions, total=False):
    """Keywords of ``mha_prefill``, but for its rows."""

    causal: bool | None
    max_seqlen_q: int | None
    backend: Backend


class PagedPrefillOptions(QueriedValuesOptions, PrefillOptions, FourBitOptions, total=False):
    """Keywords of ``mha_prefill_paged``."""

    plan: Schedule | None
    kv_layout: KVLayout


class AttendOptions(QueriedValuesOptions, FeatureOptions, FourBitOptions, RunOptions, total=False):
    """Keywords of ``attend_paged``."""

    plan: Schedule | None
    causal: bool | None
    max_seqlen_q: int | None
    kv_layout: KVLayout
    backend: Backend


class MLAPrefillOptions(FeatureOptions, RunOptions, total=False):
    """Keywords of ``mla_prefill_ragged``."""

    plan: Schedule | None
    rope_scale: Array | float | None
    causal: bool | None
    max_seqlen_q: int | None
    backend: PortableBackend


class PagedMLAPrefillOptions(MLAPrefillOptions, total=False):
    """Keywords of ``mla_prefill_paged``."""

    k_starts: Array | None
    latent_dim: int
    kv_layout: KVLayout


class StoreOptions(TypedDict, total=False):
    """Keywords of a store."""

    rope: Rope | None
    positions: Array | None
    backend: PortableBackend
    arch: str
    check: bool | None
    traffic: Traffic | None


class PagedStoreOptions(FourBitOptions, StoreOptions, total=False):
    """Keywords of ``kv_store_paged``."""


class MergeOptions(TypedDict, total=False):
    """Keywords of ``merge_states``."""

    out: Array | None
    return_lse: bool
    backend: PortableBackend
    arithmetic: Arithmetic
