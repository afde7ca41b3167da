"""Features of an attention call, besides q, k, v and scale; the same keywords for every operation.

``resolve_features`` checks the keywords of :class:`~.options.FeatureOptions` but mask and window and puts them with
the plan of the mask (:func:`kvlab.attention.masks.resolve_mask`) into one :class:`Features`, which the launch functions
of all three siblings take. ``in_base`` gives an lse as ``base2`` asks, ``kv_view`` pages as ``kv_layout`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvlab.attention.features.alibi import resolve_slopes, slopes_by_sequence
from kvlab.attention.features.bias import check_bias
from kvlab.attention.features.leftpad import check_of_sequences
from kvlab.attention.features.masks import MaskPlan
from kvlab.attention.features.positions import positions_of_rows
from kvlab.attention.features.qv import qv_of_rows
from kvlab.attention.features.scales import Scale, Scales, latent_scales, of_codes, resolve_scales, scale_of
from kvlab.attention.features.sinks import resolve_sinks
from kvlab.attention.features.softcap import resolve_softcap
from kvlab.attention.features.temperature import resolve_temperature
from kvlab.attention.tiles.online_softmax import LOG2E
from kvlab.common.checks import require
from kvlab.common.torch_here import is_torch


@dataclass(frozen=True, eq=False)
class Features:
    """The features of a call, checked. sinks ``[Hq]``; slopes ``[B or 1, Hq]``, temperature ``[Hq]`` float32;
    qv ``[B or 1, .., Hq, Dv]``; None where there are none.
    """

    mask: MaskPlan = field(default_factory=lambda: MaskPlan(right=0))
    softcap: float = 0.0
    sinks: Any = None
    slopes: Any = None
    temperature: Any = None
    qv: Any = None
    scales: Scales = field(default_factory=Scales)

    def of_sequence(self, batch: int, where: Any, scale: float, rows: slice | None = None) -> dict[str, Any]:
        """Keywords of :func:`.exact.attention` for one sequence whose K and V are at ``where``, its queries ``rows`` of
        all (None: of its own).
        """
        scales = self.scales
        return {
            "scale": scale, "features": self, "sequence": batch, "rows": rows,
            "k_scale": scales.q.at(None, batch) * scales.k.at(where, batch), "v_scale": scales.v.at(where, batch),
        }

    def with_arrays(self, q: Any, k: Any, v: Any, asked: Mapping[str, Any]) -> Features:
        """The mask and softcap of a call with the other keywords of another call of its kind, which need no check."""
        heads, given, mask = int(k.shape[-2]), asked.get, self.mask
        scales = Scales(
            scale_of(given("q_scale"), q, heads, by_token=False),
            *(of_codes(scale_of(given(f"{x}_scale"), one, heads), given(f"{x}_block_scale"), given(f"{x}_min"))
              for x, one in (("k", k), ("v", v))),
        )
        if given("leftpad_k") is not None or given("q_positions") is not None:
            mask = replace(mask, leftpad=given("leftpad_k"), positions=positions_of_rows(given("q_positions"), q))
        slopes, second = slopes_by_sequence(given("alibi_slopes")), qv_of_rows(given("qv"), q)
        return Features(mask, self.softcap, given("sinks"), slopes, given("temperature"), second, scales)

    def without_arrays(self) -> Features:
        """The mask and softcap alone, what ``with_arrays`` starts from."""
        return Features(replace(self.mask, leftpad=None, positions=None), self.softcap)

    def with_leading_axis(self) -> Features:
        """For K and V ``[total, Hkv, D]`` that launches take as ``[1, total, Hkv, D]``: scales of tokens likewise."""
        scales = {name: getattr(self.scales, name) for name in ("k", "v")}
        some = {n: replace(one, tokens=one.tokens[None]) for n, one in scales.items() if one.tokens is not None}
        return replace(self, scales=replace(self.scales, **some)) if some else self

    def of_latents(self, whole: bool) -> Features:
        """With the scales of MLA's latent rows (see ``latent_scales``)."""
        return replace(self, scales=latent_scales(self.scales, whole)) if self.scales.k.scaled else self

    def of_parts(self) -> Features:
        """With the scale of K as that of its columns before those of rope, which have their own."""
        scales = self.scales
        return replace(self, scales=replace(scales, k=Scale(), nope=scales.k)) if scales.k.scaled else self

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays among the features."""
        found = (
            self.mask.valid, self.mask.leftpad, self.mask.positions, self.mask.bias, self.sinks, self.slopes,
            self.temperature, self.qv,
            *(a for scale in vars(self.scales).values() for a in (scale.array, scale.blocks, scale.minima)),
        )
        return tuple(array for array in found if array is not None)

    @property
    def heavy(self) -> bool:
        """Tells whether scores are changed in a way that takes registers: tiles are smaller then."""
        return (
            self.mask.bounded
            or self.softcap > 0
            or self.slopes is not None
            or "token" in (*self.scales.kinds, self.scales.rope.kind)
        )


def resolve_features(
    q: Any, k: Any, v: Any, *, mask: MaskPlan, batch: int, softcap: Any = 0.0, sinks: Any = None,
    alibi_slopes: Any = None, temperature: Any = None, qv: Any = None, **by: Any,
) -> Features:
    """The features of a call on q ``[.., Hq, D]``, k and v ``[.., Hkv, D]``, ``by`` the scales of ``resolve_scales``.
    ValueError that names the argument.
    """
    number = resolve_softcap(softcap)
    sinks, slopes = resolve_sinks(sinks, q), resolve_slopes(alibi_slopes, q, batch)
    temperature = resolve_temperature(temperature, q)
    check_of_sequences("mask.valid_lengths", mask.valid, q, batch)
    check_bias(mask.bias, q, batch)
    scales = resolve_scales(q, k, v, batch, **by)
    return Features(mask, number, sinks, slopes, temperature, qv_of_rows(qv, q), scales)


def in_base(lse: Any, base2: bool) -> Any:
    """An lse in the natural logarithm, as kernels give it, or in that of base 2."""
    return lse * LOG2E if base2 else lse


def kv_view(array: Any, kv_layout: str) -> Any:
    """Pages ``[pages, page_size, Hkv, ...]`` of an array in ``kv_layout`` "NHD" (as it is) or "HND" (axes swapped).

    >>> import numpy as np
    >>> kv_view(np.zeros((4, 2, 16, 64)), "HND").shape
    (4, 16, 2, 64)
    """
    require(kv_layout in ("NHD", "HND"), f"kv_layout is {kv_layout!r}", "'NHD' or 'HND'")
    if kv_layout == "NHD" or array is None or getattr(array, "ndim", 0) < 3:
        return array
    return array.transpose(1, 2) if is_torch(array) else array.swapaxes(1, 2)

