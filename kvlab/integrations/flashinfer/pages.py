"""Page lists on the device of the call: as a table for kvlab's operations, and as the slots of new tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvlab.attention import kv_store_paged
from kvlab.cache import table_of_page_lists
from kvlab.common.checks import count, require
from kvlab.integrations.adapting import (
    checked_integers,
    checked_tensors,
    in_names,
    in_sight,
    rows_of_starts,
    slots_of,
)

COLUMNS = 8
"""Tables have a multiple of these, so that plans of growing sequences share what was chosen for their size."""


class PageLists:
    """Pages and lengths of sequences as ``table`` ``[B, columns]`` and ``lens`` ``[B]``, int32 on a device.

    graph : the arrays stay where they are from the first lists on, so that a captured CUDA graph sees the later ones,
    which are of as many sequences and no longer than ``most`` pages in all.
    """

    table: Tensor
    lens: Tensor

    def __init__(self, device: Any, *, graph: bool = False, most: int | None = None) -> None:
        self.device, self.graph, self.most = device, graph, most

    def hold(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int, longest: int | None,
        block_tables: Tensor | None = None,
    ) -> None:
        """Take lists of sequences of up to ``longest`` keys (None: unknown), or, where it is given, their table. Values
        are looked at where all three lie in CPU memory; nothing waits for a GPU.
        """
        checked_integers(block_tables=block_tables)
        if block_tables is not None:
            shape, batch = tuple(block_tables.shape), int(last_page_len.shape[0])
            fits = len(shape) == 2 and shape[0] == batch
            require(fits, f"block_tables has shape {shape}", f"[B = {batch}, columns]")
        checked_tensors(indptr=indptr, indices=indices, last_page_len=last_page_len)
        count("page_size", page_size, 1)
        columns = self.columns(indptr, indices, page_size, longest)
        if in_sight(indptr, indices, last_page_len):
            check_lists(indptr, indices, last_page_len, page_size)
        device = self.device or indices.device
        indptr, indices, last_page_len = (x.to(device, non_blocking=True) for x in (indptr, indices, last_page_len))
        table, lens = table_of_lists(indptr, indices, last_page_len, page_size, columns)
        self.set(table if block_tables is None else block_tables.to(device, non_blocking=True), lens)

    def columns(self, indptr: Tensor, indices: Tensor, page_size: int, longest: int | None) -> int:
        """Columns that are enough: of the longest sequence if that is known, else of all pages, a power of two."""
        if longest is not None:
            pages = -(-count("max_sequence_kv", longest) // page_size)
        elif self.graph and self.most is not None:
            pages = self.most
        elif self.graph or not in_sight(indptr):
            pages = 1 << (int(indices.shape[0]) - 1).bit_length() if indices.shape[0] else 0
        else:
            pages = int(indptr.long().diff().max()) if indptr.shape[0] > 1 else 0
        return max(-(-pages // COLUMNS), 1) * COLUMNS

    def set(self, table: Tensor, lens: Tensor) -> None:
        """Take a table as it is."""
        if self.graph and hasattr(self, "table"):
            same = table.shape == self.table.shape and lens.shape == self.lens.shape
            require(same, f"a table of {tuple(table.shape)} in a CUDA graph",
                    f"that of the first plan, {tuple(self.table.shape)}; max_sequence_kv or buffers tell the largest")
            self.table.copy_(table)
            self.lens.copy_(lens)
        else:
            self.table, self.lens = table.to(torch.int32), lens.to(torch.int32)
            if self.graph:
                self.table, self.lens = self.table.clone(), self.lens.clone()


def check_lists(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> None:
    """ValueError for lists in CPU memory that are none, of pages of any cache."""
    table_of_page_lists(indptr, indices, last_page_len, page_size=page_size, num_pages=1 << 31)


def table_of_lists(
    indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int, columns: int
) -> tuple[Tensor, Tensor]:
    """``(table [B, columns], lens [B])`` int32 of page lists, on their device and without waiting for it. Entries past
    the end of a sequence are pages of others.

    >>> lists = (torch.tensor(x) for x in ([0, 2, 2, 3], [7, 0, 4], [3, 0, 16]))
    >>> table, lens = table_of_lists(*lists, 16, 2)
    >>> table.tolist(), lens.tolist()
    ([[7, 0], [4, 4], [4, 4]], [19, 0, 16])
    """
    first, held = indptr[:-1].long(), indptr.long().diff()
    lens = torch.where(held > 0, (held - 1) * page_size + last_page_len, 0)
    if not indices.shape[0]:
        return torch.zeros(first.shape[0], columns, dtype=torch.int32, device=indices.device), lens.int()
    at = first[:, None] + torch.arange(columns, device=indices.device)
    return indices[at.clamp(0, indices.shape[0] - 1)].to(torch.int32), lens.to(torch.int32)


def halves(paged_kv_cache: Any) -> tuple[Tensor, Tensor]:
    """``(k_cache, v_cache)`` of a pair, or of one tensor ``[pages, 2, ..]``: views."""
    if isinstance(paged_kv_cache, tuple | list) and len(paged_kv_cache) == 2:
        k_cache, v_cache = paged_kv_cache
        checked_tensors(paged_kv_cache=k_cache)
        checked_tensors(paged_kv_cache=v_cache)
        return k_cache, v_cache
    checked_tensors(paged_kv_cache=paged_kv_cache)
    fits = paged_kv_cache is not None and paged_kv_cache.ndim == 5 and paged_kv_cache.shape[1] == 2
    got = "None" if paged_kv_cache is None else f"of shape {tuple(paged_kv_cache.shape)}"
    require(fits, f"paged_kv_cache is {got}", "a pair (k_cache, v_cache), or one tensor [pages, 2, ..] of five axes")
    return paged_kv_cache[:, 0], paged_kv_cache[:, 1]


def checked_layout(kv_layout: Any) -> Any:
    """Name of a layout. ValueError for another."""
    require(kv_layout in ("NHD", "HND"), f"kv_layout is {kv_layout!r}", "'NHD' or 'HND'")
    return kv_layout


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Keys of each sequence ``[B]`` of page lists.

    >>> get_seq_lens(torch.tensor([0, 2, 2, 3]), torch.tensor([3, 0, 16]), 16).tolist()
    [19, 0, 16]
    """
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(append_indptr: Tensor, seq_lens: Tensor, nnz: int) -> tuple[Tensor, Tensor]:
    """``(batch_indices, positions)`` int32 ``[nnz]`` of the new tokens ``append_indptr[b]`` to ``append_indptr[b + 1]``
    of each sequence, its last ones of ``seq_lens``. Tokens past the last sequence have index -1 and position 0.

    >>> found = get_batch_indices_positions(torch.tensor([0, 1, 3]), torch.tensor([5, 9]), 4)
    >>> [x.tolist() for x in found]
    [[0, 1, 1, -1], [4, 7, 8, 0]]
    """
    sequence, number = rows_of_starts(append_indptr, count("nnz", nnz))
    first = seq_lens.long() - append_indptr.long().diff()
    position = torch.where(sequence >= 0, first[sequence] + number, 0)
    return sequence.to(torch.int32), position.to(torch.int32)


@in_names(slot_mapping="positions", k="append_key", v="append_value", indptr="kv_indptr", indices="kv_indices",
          last_page_len="kv_last_page_len", k_cache="paged_kv_cache", v_cache="paged_kv_cache")
def append_paged_kv_cache(
    append_key: Tensor, append_value: Tensor, batch_indices: Tensor, positions: Tensor, paged_kv_cache: Any,
    kv_indices: Tensor, kv_indptr: Tensor, kv_last_page_len: Tensor, kv_layout: str = "NHD", *, backend: Any = "auto",
) -> None:
    """Write new tokens ``[nnz, Hkv, D]`` into the pages of their sequences, whose lists count them already.

    batch_indices, positions  integers ``[nnz]``: of each token, as :func:`get_batch_indices_positions` gives them; a
        token of index -1 is skipped, on a GPU also one at a position that its sequence has no page for
    paged_kv_cache  ``(k_cache, v_cache)``, each ``[pages, page_size, Hkv, D]`` (HND: heads first), or one tensor
        ``[pages, 2, ..]``

    >>> cache, ones = torch.zeros(4, 2, 8, 1, 16), torch.ones(2, 1, 16)
    >>> lists = torch.tensor([3, 1]), torch.tensor([0, 2]), torch.tensor([2])
    >>> tokens = torch.tensor([0, 0]), torch.tensor([8, 9])
    >>> append_paged_kv_cache(ones, -ones, *tokens, cache, *lists, backend="emulator")
    >>> cache[1, :, :3, 0, 0].tolist(), cache.count_nonzero().item()
    ([[1.0, 1.0, 0.0], [-1.0, -1.0, 0.0]], 64)
    """
    k_cache, v_cache = halves(paged_kv_cache)
    page_size = int(k_cache.shape[1 if checked_layout(kv_layout) == "NHD" else 2])
    slots = _slots(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, page_size)
    layout: Any = kv_layout
    kv_store_paged(append_key, append_value, k_cache, v_cache, slots, kv_layout=layout, backend=backend)


@in_names(slot_mapping="positions", k="append_ckv", v="append_kpe", indptr="kv_indptr", indices="kv_indices",
          last_page_len="kv_last_page_len", k_cache="ckv_cache", v_cache="kpe_cache")
def append_paged_mla_kv_cache(
    append_ckv: Tensor, append_kpe: Tensor, batch_indices: Tensor, positions: Tensor, ckv_cache: Tensor,
    kpe_cache: Tensor, kv_indices: Tensor, kv_indptr: Tensor, kv_last_page_len: Tensor, *, backend: Any = "auto",
) -> None:
    """Write the latents ``[nnz, ckv]`` and rope parts ``[nnz, kpe]`` of new tokens into ``[pages, page_size, ..]``.

    The rest: as for :func:`append_paged_kv_cache`.

    >>> cache, lists = torch.zeros(2, 8, 80), (torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([3]))
    >>> ckv, kpe = cache[..., :64], cache[..., 64:]
    >>> new = torch.ones(1, 64), torch.full((1, 16), 2.0)
    >>> tokens = torch.tensor([0]), torch.tensor([2])
    >>> append_paged_mla_kv_cache(*new, *tokens, ckv, kpe, *lists, backend="emulator")
    >>> cache[1, 2, 62:66].tolist(), cache.count_nonzero().item()
    ([1.0, 1.0, 2.0, 2.0], 80)
    """
    checked_tensors("append_ckv append_kpe ckv_cache kpe_cache", append_ckv=append_ckv, append_kpe=append_kpe,
                    ckv_cache=ckv_cache, kpe_cache=kpe_cache)  # fmt: skip
    slots = _slots(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, int(ckv_cache.shape[1]))
    new = append_ckv[:, None], append_kpe[:, None]
    kv_store_paged(*new, ckv_cache[:, :, None], kpe_cache[:, :, None], slots, backend=backend)


def _slots(
    batch_indices: Tensor, positions: Tensor, indices: Tensor, indptr: Tensor, last_page_len: Tensor, page_size: int
) -> Tensor:
    """Slots ``[nnz]`` of tokens, -1 where there is none. ValueError for a position past the end of its sequence, where
    values are looked at.
    """
    checked_integers(batch_indices=batch_indices, positions=positions, indices=indices, indptr=indptr,
                     last_page_len=last_page_len)
    sequence, position = batch_indices.long(), positions.long()
    batch = int(indptr.shape[0]) - 1
    if in_sight(batch_indices, positions, indices, indptr, last_page_len):
        check_lists(indptr, indices, last_page_len, page_size)
        known = (sequence >= -1) & (sequence < batch)
        require(known.all(), f"batch_indices is {batch_indices.tolist()}", f"from 0 to {batch - 1}, or -1 to skip one")
        lens = get_seq_lens(indptr, last_page_len, page_size)
        most = torch.where(sequence >= 0, lens[sequence.clamp(min=0)], position + 1)
        inside = (position >= 0) & (position < most)
        if not inside.all():
            t = int((~inside).int().argmax())
            require(False, f"positions[{t}] is {int(position[t])}", f"0 to {int(most[t]) - 1}, tokens of its sequence")
    if not indices.shape[0] or batch < 1:
        return torch.full_like(position, -1)
    sequence = torch.where(sequence < batch, sequence, -1)
    of = sequence.clamp(min=0)
    column = torch.div(position, page_size, rounding_mode="floor")
    at = indptr.long()[of] + column
    inside = (column >= 0) & (at < indptr.long()[of + 1]) & (sequence >= 0)
    page = indices.long()[at.clamp(0, indices.shape[0] - 1)]
    return slots_of(page[:, None], torch.where(inside, torch.arange(len(page), device=page.device), -1),
                    position % page_size, page_size)
