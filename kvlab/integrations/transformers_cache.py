"""A cache of transformers whose keys and values lie in pages that sequences share."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvlab.attention import (
    kv_store_paged,
    mha_decode_paged,
    mha_prefill_paged,
    mla_decode_paged,
    mla_prefill_ragged,
    mla_store_paged,
)
from kvlab.attention.call.latent_rows import BLOCK, latent_windows, row_scales, scaled_width
from kvlab.cache import OutOfPages, PageCopy, PagedKVCacheCollection, PagePool, copy_pages
from kvlab.common.checks import count, require
from kvlab.memory import POISON

from .transformers_states import NAME, CacheStep, GrowingColumns, PagedStates, Pending

Array = np.ndarray[Any, Any]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
OLDEST = 4, 57
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
if VERSION < OLDEST:
    raise ImportError(f"transformers is {transformers.__version__}: must be 4.57 or later")
CACHE_ARGUMENT = "cache" if VERSION >= (5, 24) else "past_key_values"
"""What models and ``generate`` of the transformers that is there call their cache."""
CROPS_TO_LENGTH = "max_length" in inspect.signature(Cache.crop).parameters
"""Its ``crop`` takes a length, or what to remove below 0."""
DECODE_TOKENS, ABSORBED_TOKENS = 4, 16
"""Most new tokens of a sequence that decode takes: ``mha_decode_paged``, ``mla_decode_paged``."""


class PagedLayer(CacheLayerMixin):
    """A layer as transformers asks for it; what it holds, the cache knows."""

    is_croppable, supports_early_init = True, False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise NotImplementedError

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise NotImplementedError

    def get_seq_length(self) -> int:
        raise NotImplementedError

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


@dataclass
class Pages:
    """The pages of all layers and who holds them; caches share it."""

    pool: PagePool
    dtype: torch.dtype | None
    layers: dict[int, PagedKVCacheCollection] = field(default_factory=dict)
    widths: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Columns of K and of V, or of latents and of rope."""

    def hold(self, index: int, keys: torch.Tensor, values: torch.Tensor, latent: bool) -> None:
        """Make the pages of a layer when its first states ``[B, H, S, D]`` arrive; ValueError for others than those."""
        heads, widths = keys.shape[1], (keys.shape[3], values.shape[3])
        alike = latent or keys.shape[:3] == values.shape[:3]
        require(alike, f"value_states has shape {tuple(values.shape)}", f"{(*keys.shape[:3], 'any')}, as key_states is")
        dtype, fp8 = keys.dtype if self.dtype is None else self.dtype, self.dtype == torch.float8_e4m3fn
        fits = dtype == keys.dtype or (fp8 and keys.dtype in (torch.bfloat16, torch.float16))
        require(fits, f"dtype is {dtype} for states of {keys.dtype}", "None, or torch.float8_e4m3fn for 16 bits")
        width = sum(widths) if latent else max(widths)
        if latent and fp8:
            whole = widths[0] % BLOCK == 0
            require(whole, f"dtype is {dtype} for {widths[0]} latent columns", f"None, or for a multiple of {BLOCK}")
            width = scaled_width(*widths) or 0
        if index not in self.layers:
            shape = (self.pool.num_pages, 1 if latent else 2, 1, self.pool.page_size, heads, width)
            scales = _poisoned((*shape[:-1], 1), torch.float32, keys.device) if fp8 and not latent else None
            none = torch.zeros(1, 1, dtype=torch.int32, device=keys.device)
            self.layers[index] = PagedKVCacheCollection(
                _poisoned(shape, dtype, keys.device), none[0], none, 1, 1, scales=scales,
                quantization_granularity=width,
            )
            self.widths[index] = widths
        made, own = self.layers[index].blocks, self.widths[index]
        require(
            made.shape[4] == heads and own == widths and made.device == keys.device,
            f"layer {index} has states of {heads} heads x {widths[0]} and {widths[1]} on {keys.device}",
            f"{made.shape[4]} x {own[0]} and {own[1]} on {made.device}, as those in its pages",
        )

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Carry out what the pool asks for, in all layers."""
        for collection in self.layers.values():
            copy_pages(collection, copies)


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that reads as NaN until it is written."""
    array = torch.empty(shape, dtype=dtype, device=device)
    array.view(torch.uint8).fill_(POISON)
    return array


def _release(pool: PagePool, sequences: list[int | None]) -> None:
    for sequence in sequences:
        if sequence is not None:
            pool.free(sequence)
    sequences.clear()


class KVLabCache(Cache):
    """A transformers ``Cache`` in pages, for models with ``attn_implementation="kvlab"``.

    ``model(ids, cache=cache)`` and ``model.generate(ids, cache=cache)`` fill it; transformers before 5.24 calls the
    argument ``past_key_values`` (``CACHE_ARGUMENT`` is the name in the one that is there). Row b of the batch is the
    sequence ``sequences[b]`` of ``pages.pool``, a :class:`~kvlab.cache.PagePool`; tokens that the attention mask leaves
    out are not stored. Beams, :meth:`fork` and ``copy.deepcopy`` share pages until one of them writes (copy on write),
    and ``crop`` gives pages back. The pages of a layer are made when its first states arrive, and read as NaN until
    they are written. Models with latent attention (MLA) store latent rows, and decode absorbed.

    Parameters
    ----------
    config : the model's; its layers are those of full or sliding attention. Sliding layers keep all tokens.
    num_pages, page_size : of the pool. :class:`~kvlab.cache.OutOfPages` where it is too small; nothing changed then.
    dtype : of the pages: None is that of the states; torch.float8_e4m3fn (beside 16-bit states) with a float32 scale
        for each token and head, computed as they are stored; of latent rows the latents alone, with a scale for each
        128 of them, beside a bfloat16 rope part (656 bytes for 512 + 64).
    max_length : longest sequence, which fixes the columns of the page table, as captured graphs need; None for any.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from kvlab.integrations.transformers import register
    >>> register(backend="emulator")
    >>> shape = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="kvlab")).eval()
    >>> cache = KVLabCache(model.config, num_pages=8, page_size=4)
    >>> with torch.no_grad():
    ...     _ = model(torch.tensor([[1, 2, 3, 4, 5]]), cache=cache)
    >>> cache, cache.get_seq_length()
    (KVLabCache(2 layers, 1 sequences, 5 tokens, 6 of 8 pages free), 5)
    >>> branch = cache.fork([0, 0])
    >>> cache.pages.pool.num_free, branch.get_seq_length()
    (6, 5)
    """

    def __init__(
        self, config: Any, *, num_pages: int, page_size: int = 16, dtype: torch.dtype | None = None,
        max_length: int | None = None,
    ) -> None:
        require(dtype is None or dtype in DTYPES, f"dtype is {dtype}", f"None or one of {', '.join(map(str, DTYPES))}")
        self._start(config, Pages(PagePool(num_pages, page_size), dtype), max_length)

    def _start(self, config: Any, pages: Pages, max_length: int | None) -> None:
        self.config = config.get_text_config(decoder=True)
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"] * self.config.num_hidden_layers
        known = ("full_attention", "sliding_attention", "chunked_attention", "moe", "mlp")  # two have no states
        other = sorted({kind for kind in kinds if kind not in known})
        require(not other, f"config has layers of {', '.join(other)}", "one of full_attention and sliding_attention")
        super().__init__(layers=[PagedLayer() for _ in kinds])
        self.pages = pages
        self.max_length = None if max_length is None else count("max_length", max_length, least=1)
        self.sequences: list[int | None] = []
        self._total = 0  # columns so far, padding among them
        self._valid: Array | None = None  # bool [B, columns so far]; None: all, or rows that differ in length
        self._step: CacheStep | None = None
        self._seen: set[int] = set()  # layers that took part in the step
        self._by_hand = False
        self._arrays: dict[str, torch.Tensor] = {}

    def __repr__(self) -> str:
        pool = self.pages.pool
        return (
            f"KVLabCache({len(self.layers)} layers, {len(self.sequences)} sequences, {self._total} tokens, "
            f"{pool.num_free} of {pool.num_pages} pages free)"
        )

    # Sequences.

    def of(self, sequences: Sequence[int | None]) -> KVLabCache:
        """A cache over the same pages whose rows are sequences that the caller holds; None is a row without one.

        It frees nothing. Rows may differ in length: give ``position_ids`` then, and no attention mask.
        """
        cache = KVLabCache.__new__(KVLabCache)
        cache._start(self.config, self.pages, self.max_length)
        cache.sequences = list(sequences)
        cache._total = max((self.pages.pool.length(s) for s in sequences if s is not None), default=0)
        return cache

    def fork(self, rows: Sequence[int] | None = None, tokens: int | None = None) -> KVLabCache:
        """A cache whose rows begin as these of this one (all if None), with their first ``tokens`` (all if None).

        Pages are shared, not copied. ``tokens`` counts columns, padding among them."""
        kept = self._total if tokens is None else count("tokens", tokens)
        require(kept <= self._total, f"tokens is {tokens}", f"at most {self._total}, those that are there")
        cache = KVLabCache.__new__(KVLabCache)
        cache._start(self.config, self.pages, self.max_length)
        chosen = range(len(self.sequences)) if rows is None else rows
        cache._own(self.pages.pool.fork(self._sequence(row)) for row in chosen)
        cache._total, cache._valid = self._total, None if self._valid is None else self._valid[list(chosen)]
        cache._remove(self._total - kept)
        return cache

    def __deepcopy__(self, memo: Any) -> KVLabCache:
        return self.fork()

    def _own(self, sequences: Iterable[int]) -> None:
        self.sequences = list(sequences)
        weakref.finalize(self, _release, self.pages.pool, self.sequences)

    def _sequence(self, row: int) -> int:
        sequence = self.sequences[row]
        if sequence is None:
            raise ValueError(f"row {row} has no sequence: must be one of those that have")
        return sequence

    def reset(self) -> None:
        """End all sequences; their pages are free again."""
        _release(self.pages.pool, self.sequences)
        self._total, self._valid, self._step, self._by_hand = 0, None, None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns of all rows; zero removes none. Where transformers' ``crop``
        takes a ``max_length``, a number that is not below 0 is one: the columns to keep.
        """
        remove = -int(tokens_to_remove)
        if CROPS_TO_LENGTH and remove <= 0:
            remove = max(self._total + remove, 0)
        require(0 <= remove <= self._total, f"tokens_to_remove is {tokens_to_remove}", f"from {-self._total} to 0")
        self._remove(remove)

    def _remove(self, remove: int) -> None:
        """Remove the last columns of all rows."""
        kept = self._total - remove
        for row, sequence in enumerate(self.sequences):
            if sequence is not None and remove:
                gone = remove if self._valid is None else int(self._valid[row, kept:].sum())
                self.pages.pool.truncate(sequence, self.pages.pool.length(sequence) - gone)
        self._total, self._valid = kept, None if self._valid is None else self._valid[:, :kept]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, in this order, possibly repeated: their pages are shared."""
        chosen = np.arange(len(self.sequences))[torch.as_tensor(indices).cpu().numpy()]
        kept = [self.pages.pool.fork(self._sequence(int(row))) for row in chosen]
        _release(self.pages.pool, self.sequences)
        self.sequences.extend(kept)
        self._valid = None if self._valid is None else self._valid[chosen]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row b becomes what row ``beam_idx[b]`` was."""
        if self.sequences:
            self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times."""
        if self.sequences:
            self.batch_select_indices(torch.arange(len(self.sequences)).repeat_interleave(repeats))

    # What transformers asks for.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding among them."""
        return self._total

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        """(keys with those of the next step, 0), from their number, or their positions, as older transformers."""
        new = len(query_length) if isinstance(query_length, torch.Tensor) else int(query_length)
        return GrowingColumns(self._total + new), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The longest sequence, -1 where only the pages limit it."""
        return -1 if self.max_length is None else self.max_length

    get_max_cache_shape = get_max_length

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first step."""
        return len(self.sequences) or -1

    @property
    def is_initialized(self) -> bool:
        """A sequence is there."""
        return bool(self.sequences)

    def collection(self, layer: int) -> PagedKVCacheCollection:
        """The pages of a layer as a collection of one layer, with the table and the lengths of the rows; where K and V
        differ in width, the narrower has columns that nobody writes.
        """
        made, pool = self.pages.layers[layer], self.pages.pool
        held = [self._sequence(row) for row in range(len(self.sequences))]
        lengths = pool.lengths(held)
        return PagedKVCacheCollection(
            made.blocks, torch.as_tensor(lengths.astype(np.int32)).to(made.blocks.device),
            torch.as_tensor(pool.lookup_table(held).astype(np.int32)).to(made.blocks.device), 1, int(lengths.max()),
            scales=made.scales, quantization_granularity=made.quantization_granularity,
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new states ``[B, H, S, D]``, for the attention function, which stores them and reads the pages."""
        chosen = self.config._attn_implementation
        require(chosen == NAME, f"attn_implementation is {chosen!r} with a KVLabCache", repr(NAME))
        ranks = getattr(self.config, "kv_lora_rank", None), getattr(self.config, "qk_rope_head_dim", None)
        widths, heads = (key_states.shape[3], value_states.shape[3]), (key_states.shape[1], value_states.shape[1])
        pending = Pending(self, layer_idx, key_states, value_states, latent=heads == (1, 1) and widths == ranks)
        self.pages.hold(layer_idx, key_states, value_states, pending.latent)
        keys, values = key_states.as_subclass(PagedStates), value_states.as_subclass(PagedStates)
        keys.pending = values.pending = pending
        return keys, values

    # Steps.

    def begin(self, tokens: int, device: Any = None) -> CacheStep:
        """Make room for ``tokens`` more tokens of each row, and the arrays that a forward reads.

        For those who replay a captured forward, which does not do it itself: call it before each forward. Arrays of the
        same shapes are those of the call before, filled anew.
        """
        self._by_hand, self._seen = True, set()
        require(self.sequences, "begin of a cache without a row", "called of a cache whose rows are given, as by of()")
        if device is None:
            require(self.pages.layers, "device is None", "given before the first states are there")
            device = next(iter(self.pages.layers.values())).blocks.device
        return self._begin(tokens, None, torch.empty(0, device=device).device)

    def _step_of(self, pending: Pending, valid: Array | None) -> CacheStep:
        batch, _, tokens, _ = pending.keys.shape
        if not self.sequences:
            self._own(self.pages.pool.allocate(0)[0] for _ in range(batch))
        rows = len(self.sequences)
        require(batch == rows, f"the states of layer {pending.layer} have {batch} rows", f"{rows}, those of the cache")
        step = self._step
        if step is None or pending.layer in self._seen:
            require(not self._by_hand, "begin() is not called before this forward", "called before each, once it was")
            self._seen = set()
            step = self._begin(tokens, self._new_columns(valid, tokens), pending.keys.device)
        require(step.tokens == tokens, f"the states of layer {pending.layer} have {tokens} tokens", f"{step.tokens}")
        self._seen.add(pending.layer)
        return step

    def _new_columns(self, valid: Array | None, tokens: int) -> Array | None:
        """Which of the new columns exist, bool ``[B, tokens]``; None for all."""
        rows, total = len(self.sequences), self._total
        if valid is None:
            require(self._valid is None, "attention_mask is None", "given, as in the steps before, which had padding")
            return None
        before = np.ones((rows, total), bool) if self._valid is None else self._valid
        same = valid.shape == (rows, total + tokens) and bool((valid[:, :total] == before).all())
        require(same, f"attention_mask of shape {valid.shape}", f"[{rows}, {total + tokens}], its past as it was")
        return valid[:, total:]

    def _begin(self, tokens: int, new: Array | None, device: Any) -> CacheStep:
        pool, rows = self.pages.pool, len(self.sequences)
        counts = np.full(rows, tokens) if new is None else new.sum(1)
        self._append(counts)
        lengths = np.array([0 if s is None else pool.length(s) for s in self.sequences])
        slots = [
            np.full(n, -1) if s is None else pool.slots(s, length - n, int(n))
            for s, n, length in zip(self.sequences, counts, lengths.tolist(), strict=True)
        ]
        starts = np.concatenate([[0], np.cumsum(counts)])
        self._step = CacheStep(
            tokens, int(counts.max()), self._array("slots", np.concatenate(slots), np.int64, device),
            self._array("table", self._table(), np.int32, device), self._array("lengths", lengths, np.int32, device),
            self._array("starts", starts, np.int32, device),
            None if new is None or new.all() else torch.as_tensor(np.flatnonzero(new)).to(device),
        )
        if self._valid is not None or self._step.columns is not None:
            before = np.ones((rows, self._total), bool) if self._valid is None else self._valid
            self._valid = np.concatenate([before, np.ones((rows, tokens), bool) if new is None else new], axis=1)
        self._total += tokens
        return self._step

    def _append(self, counts: Array) -> None:
        """Room for so many more tokens of each row, in all of them or in none."""
        pool, done, copies = self.pages.pool, [], []
        try:
            for sequence, n in zip(self.sequences, counts.tolist(), strict=True):
                if sequence is not None:
                    if self.max_length is not None:
                        most, new = self.max_length, pool.length(sequence) + n
                        require(new <= most, f"sequence {sequence} gets {new} tokens", f"at most {most}, max_length")
                    copies += pool.append(sequence, n)
                    done.append((sequence, n))
        except (OutOfPages, ValueError):
            for sequence, n in done:
                pool.truncate(sequence, pool.length(sequence) - n)
            raise
        finally:
            self.pages.copy(copies)

    def _table(self) -> Array:
        pool = self.pages.pool
        held = [s for s in self.sequences if s is not None]
        columns = None if self.max_length is None else -(-self.max_length // pool.page_size)
        found = pool.lookup_table(held, columns)
        table = np.full((len(self.sequences), found.shape[1]), pool.num_pages, np.int64)
        table[[s is not None for s in self.sequences]] = found
        return table

    def _all_keys(self) -> tuple[Array, Array]:
        """Slots of all keys, one sequence after the other, and where each begins."""
        pool = self.pages.pool
        held = [self._sequence(row) for row in range(len(self.sequences))]
        slots = [pool.slots(s, 0, pool.length(s)) for s in held]
        return np.concatenate(slots), np.concatenate([[0], np.cumsum([len(one) for one in slots])])

    def _array(self, name: str, values: Array, dtype: Any, device: Any) -> torch.Tensor:
        """The array of that name on the device, in the memory that it had, if it fits."""
        made, there = torch.as_tensor(values.astype(dtype)), self._arrays.get(name)
        if there is not None and there.shape == made.shape and there.device == device:
            return there.copy_(made)
        self._arrays[name] = made.to(device)
        return self._arrays[name]

    # Bytes.

    def _store(self, pending: Pending, step: CacheStep, backend: Any) -> None:
        k, v = step.rows(pending.keys), step.rows(pending.values)
        pages, scales = self._pages_of(pending)
        if pending.latent:
            mla_store_paged(k[:, 0], v[:, 0], pages[0], step.slots, backend=backend)
        else:
            kv_store_paged(k, v, pages[0], pages[1], step.slots, backend=backend, **scales)

    def _pages_of(self, pending: Pending) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """The pages of K and of V, or those of latent rows, and the scales of e4m3 beside them."""
        made, widths = self.pages.layers[pending.layer], self.pages.widths[pending.layer]
        if pending.latent:
            return (made.blocks[:, 0, 0, :, 0],), {}
        pages = tuple(made.blocks[:, i, 0, ..., :width] for i, width in enumerate(widths))
        if made.scales is None:
            return pages, {}
        return pages, {"k_scale": made.scales[:, 0, 0, ..., 0], "v_scale": made.scales[:, 1, 0, ..., 0]}

    def attend(
        self, pending: Pending, step: CacheStep, query: torch.Tensor, options: dict[str, Any], *, causal: bool
    ) -> torch.Tensor:
        """``[B, S, Hq, D]``: the attention of queries ``[B, Hq, S, D]`` to all keys of their rows.

        ``pending`` is stored, by ``step``. Queries of padding get 0. ``options`` are those of ``mha_decode_paged``."""
        (k, v), scales = self._pages_of(pending)
        options = {**options, **scales}
        if step.decodes(DECODE_TOKENS) and causal:
            return mha_decode_paged(query.transpose(1, 2), k, v, step.table, step.lengths, **options)
        options |= {"causal": causal, "max_seqlen_q": step.longest}
        rows = mha_prefill_paged(step.rows(query), k, v, step.table, step.lengths, step.starts, **options)
        return step.padded(rows, len(query))

    def attend_latent(
        self, pending: Pending, step: CacheStep, module: Any, query: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """The same over latent rows: absorbed where few tokens are new, otherwise with K and V of each head, which
        ``module.expand_kv`` makes of the latent rows of all keys."""
        rank, rope = pending.keys.shape[3], pending.values.shape[3]
        (pages,), nope = self._pages_of(pending)[0], query.shape[3] - rope
        plain = type(module.kv_b_proj) is torch.nn.Linear and module.kv_b_proj.bias is None
        if plain and step.decodes(ABSORBED_TOKENS):
            weight = module.kv_b_proj.weight.unflatten(0, (query.shape[1], -1))
            absorbed = torch.einsum("bhsd,hdl->bshl", query[..., :nope], weight[:, :nope])
            q = torch.cat([absorbed, query[..., nope:].transpose(1, 2)], -1)
            latent = mla_decode_paged(q, pages, step.table, step.lengths, v_dim=rank, **options)
            return torch.einsum("bshl,hdl->bshd", latent, weight[:, nope:])
        keys, starts = self._all_keys()
        at = torch.as_tensor(keys).to(pages.device)
        latents, ropes = (x.flatten(0, 1)[at].to(query.dtype) for x in latent_windows(pages, rank, rope))
        scales = row_scales(pages, rank, rope)
        if scales is not None:
            by = scales.flatten(0, 1)[at].repeat_interleave(BLOCK, 1)
            latents = (latents.float() * by).to(query.dtype)
        k, v = module.expand_kv(latents[None, None], ropes[None, None])
        k, v = k[0].transpose(0, 1)[..., :nope], v[0].transpose(0, 1)
        key_starts = torch.as_tensor(starts.astype(np.int32)).to(pages.device)
        out = mla_prefill_ragged(
            step.rows(query), k, v, ropes, step.starts, key_starts, max_seqlen_q=step.longest, **options
        )
        return step.padded(out, len(query))
