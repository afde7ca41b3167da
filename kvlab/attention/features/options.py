"""Keywords of the features, the same for every operation."""

from __future__ import annotations

from typing import Any, TypedDict

from . import alibi, leftpad, scales, sinks, softcap, temperature


class LatentFeatureOptions(TypedDict, total=False):
    """Keywords that change scores, for calls whose V is a part of K; ``DOCUMENTATION`` says what each is."""

    mask: Any
    window: Any
    leftpad_k: Any
    softcap: float
    sinks: Any
    alibi_slopes: Any
    temperature: Any
    q_scale: Any
    k_scale: Any


class FeatureOptions(LatentFeatureOptions, total=False):
    """Keywords that change scores and values."""

    v_scale: Any


DOCUMENTATION = {
    "leftpad_k": leftpad.DOCUMENTATION,
    "softcap": softcap.DOCUMENTATION,
    "sinks": sinks.DOCUMENTATION,
    "alibi_slopes": alibi.DOCUMENTATION,
    "temperature": temperature.DOCUMENTATION,
    "q_scale, k_scale, v_scale": scales.DOCUMENTATION,
}
"""Name -> what it is, a paragraph of plain text."""
DEFAULTS = {name: 0.0 if name == "softcap" else None for name in FeatureOptions.__annotations__}
