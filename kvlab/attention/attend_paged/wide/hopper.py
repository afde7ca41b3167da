"""Prefill tiles over a schedule on Hopper: the kernel of MHA prefill, whose programs walk a work list.

The heads of a KV head share a tile, token by token; ``join`` merges as it does for the portable walk.
"""

from __future__ import annotations

from typing import Any

import torch

from kvlab.attention.attend_paged.config import Walk
from kvlab.attention.attend_paged.kernel import WalkSizes
from kvlab.attention.features.arguments import feature_arrays, feature_numbers
from kvlab.attention.features.resolve import Features
from kvlab.attention.features.softcap import cap_terms
from kvlab.attention.hopper.kernel import BOX8_LAYOUT, BOX_LAYOUT, box_descriptor
from kvlab.attention.mha_prefill.hopper import attend
from kvlab.attention.tiles.online_softmax import LOG2E
from kvlab.attention.tiles.strides import RowStrides
from kvlab.triton_support.launching import Again

walk = attend


def pointers_of(
    one: Walk, arrays: tuple[Any, ...], results: tuple[torch.Tensor, ...], f: Features, again: Again
) -> tuple[Any, ...]:
    """The pointers of a launch. arrays : q ``[1, total, Hq, D]``, K, V, table, lengths, cu_seqlens and list."""
    (q, k, v, table, lens, starts, work), (out, lse, part, part_lse), C = arrays, results, one.wide
    if C.STORED == 1:  # what others take as pairs
        k, v = (x.view(torch.float8_e4m3fn) for x in (k, v))
    rows, box = (C.BM, 1) if C.ODD else (C.BM // C.PACK, C.PACK), (C.BOX, 1)
    shapes = {"q": (q, rows), "k": (k, box), "v": (v, box), "out": (out, rows)}
    descriptors = (
        box_descriptor(x, shape, BOX8_LAYOUT if x.element_size() == 1 else BOX_LAYOUT, name, again)
        for name, (x, shape) in shapes.items()
    )
    lists = (starts, None, table, lens, None), (work, part, part_lse)
    queries = (q, RowStrides(*q.stride()[:3]), q.shape[3]) if C.ODD else None
    return *descriptors, out, lse, queries, *lists, feature_arrays(f)


def numbers_of(
    one: Walk, arrays: tuple[Any, ...], into: tuple[torch.Tensor, torch.Tensor], sizes: WalkSizes, f: Features,
    scale: float, *, ragged: bool, listed: bool, early: bool, beside: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments behind the pointers: numbers, and constants and options by name."""
    (q, k), (out, lse) = arrays[:2], into
    inner, outer = cap_terms(scale * (f.scales.q.number * f.scales.k.number), f.softcap)
    tiles = 0, 0, 0, 0, 0, q.shape[2], sizes.group, 0, sizes.max_keys, k.shape[0]
    strides = sizes.table_batch, 0, lse.stride(1), sizes.room, sizes.seq_lens_batch, RowStrides(*out.stride()[:3])
    factors = inner, outer, 1 / LOG2E, f.scales.v.number
    options = {"C": one.wide, "num_warps": 4} | ({"launch_pdl": True} if beside else {})
    return (factors, feature_numbers(f), *tiles, *strides), options
