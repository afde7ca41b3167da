"""Keywords of the features, the same for every operation."""

from __future__ import annotations

from typing import TypedDict

from kvlab.common.arrays import Array

from . import alibi, leftpad, positions, qv, scales, sinks, softcap, temperature
from .masks import Mask


class LatentFeatureOptions(TypedDict, total=False):
    """Keywords that change scores, for calls whose V is a part of K; ``DOCUMENTATION`` says what each is."""

    mask: Mask | None
    window: int | tuple[int | None, int | None] | None
    leftpad_k: Array | None
    q_positions: Array | None
    softcap: float
    sinks: Array | None
    alibi_slopes: Array | None
    temperature: Array | None
    q_scale: Array | float | None
    k_scale: Array | float | None


class FeatureOptions(LatentFeatureOptions, total=False):
    """Keywords that change scores and values."""

    v_scale: Array | float | None


class QueriedValuesOptions(TypedDict, total=False):
    """Keyword of calls over a schedule, whose V may be queried, too."""

    qv: Array | None


class FourBitOptions(TypedDict, total=False):
    """Keywords of calls that take K and V of 4 bits."""

    k_block_scale: Array | None
    v_block_scale: Array | None
    k_min: Array | None
    v_min: Array | None


DOCUMENTATION = {
    "qv": qv.DOCUMENTATION,
    "leftpad_k": leftpad.DOCUMENTATION,
    "q_positions": positions.DOCUMENTATION,
    "softcap": softcap.DOCUMENTATION,
    "sinks": sinks.DOCUMENTATION,
    "alibi_slopes": alibi.DOCUMENTATION,
    "temperature": temperature.DOCUMENTATION,
    "q_scale, k_scale, v_scale": scales.DOCUMENTATION,
    "k_block_scale, v_block_scale": scales.BLOCK_DOCUMENTATION,
    "k_min, v_min": scales.MINIMA_DOCUMENTATION,
}
"""Name -> what it is, a paragraph of plain text."""
NAMES = (
    *QueriedValuesOptions.__annotations__, *FeatureOptions.__annotations__, *FourBitOptions.__annotations__
)
DEFAULTS = {name: 0.0 if name == "softcap" else None for name in NAMES}
