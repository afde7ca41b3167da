"""Formats of K and V of one shape, drawn at random."""

from __future__ import annotations

from hypothesis import strategies as st

from kvlab.formats import Format


@st.composite
def any_format(draw: st.DrawFn) -> Format:
    """K and V of one shape in any order of whole and split axes, of any direction, with padding or without."""
    pieces = ["layer:2", "page:2", *draw(st.sampled_from([["slot:4"], ["slot/2:2", "slot:2"]]))]
    pieces += [*draw(st.sampled_from([["dim:4"], ["dim/2:2", "dim:2"]])), "head:2", "kv:2"]
    order = [("-" if draw(st.booleans()) else "") + piece for piece in draw(st.permutations(pieces))]
    inside = draw(st.integers(0, len(order)))
    stored = draw(st.sampled_from(["s8", "s4"]))
    tail = " ".join(order[inside:])
    group = f"({tail} kv.{stored}, pad:{draw(st.integers(0, 3))})%{draw(st.sampled_from([1, 8]))}"
    half = stored == "s4" and not tail
    return Format.parse(f"{' '.join(order)} kv.{stored}" if half else f"{' '.join(order[:inside])} {group}")
