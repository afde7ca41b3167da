"""Pairs of formats that hold the same codes."""

from __future__ import annotations

import itertools
from typing import Any

from kvlab.formats import CATALOGUE, Format, known_format

SIZES = {"layers": 2, "pages": 3, "heads": 3, "dim": 64}


def pairs_of_formats() -> list[tuple[Format, Format]]:
    """Each known format and the next that holds the same codes, and pages of other sizes, none a power of two."""
    known = [known_format(name, **SIZES, page_size=32 if name == "kivi.int4" else 16) for name in CATALOGUE]
    groups: dict[Any, list[Format]] = {}
    for one in known:
        kinds = tuple(sorted((f.name, f.stored, f.group("slot"), f.group("dim")) for f in one.fields))
        groups.setdefault((kinds, one.sizes.get("slot")), []).append(one)
    found = [pair for group in groups.values() for pair in itertools.pairwise([*group, group[0]]) if len(group) > 1]
    found.append((known_format("vllm.x_split", **SIZES), known_format("aiter.shuffle", **SIZES)))
    for name, dim in {"mla.656": 64, "mla.584": 64, "mla.384": 64, "flashinfer.nvfp4": 64, "vllm.hnd": 80}.items():
        sizes = {**SIZES, "dim": dim}
        one, other = (known_format(name, **{**sizes, "pages": n}, page_size=page) for n, page in ((6, 32), (4, 48)))
        found.append((one, other))
    halves = ("slot:4 (dim:16 dim/16:2 k.b4, k_scale.f16)",
              "(copy:2 slot:4 (dim/2:16 -dim:2 k.b4, pad:1), slot:4 k_scale.f16)")
    odd = "slot:37 head:3 dim:67 k.s8", "head:3 slot:37 dim:67 k.s8"  # of which no tile has a whole number
    return [*found, *((Format.parse(a, name=name), Format.parse(b, name=name)) for name, (a, b) in
                      {"halves": halves, "odd": odd}.items())]
