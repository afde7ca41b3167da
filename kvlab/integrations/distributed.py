"""Attention on several GPUs, one process (rank) each, over torch.distributed: heads, or keys, shared between ranks.

- Tensor parallelism: :func:`tensor_parallel_heads` says which heads a rank has; it calls kvlab's operations with these,
  and :func:`all_gather_heads` puts outputs together where they are wanted whole.
- Context parallelism over pages: :func:`context_parallel_decode`, :func:`context_parallel_mla_decode` and
  :func:`context_parallel_prefill`. Each rank has the queries and its own pages (:class:`ContextShard`), and computes a
  partial result over these; partial results are gathered, and merged by their lse in the order of ranks, so that all
  ranks get the same bits.
- Context parallelism over tokens: :func:`all_gather_prefill`. Each rank has its tokens of q, K and V, and gathers K
  and V.

``group`` is a ProcessGroup, a DeviceMesh of one dimension (``mesh["context"]``), or None, the default group. Calls are
collective: all ranks of the group make them, in the same order, with arguments that agree. A rank that dies, or does
not come, is a RuntimeError of torch.distributed at the others, no later than the group's timeout.

With ``check`` True (None: unless tensors are on a GPU, which would wait for it) ranks compare the sizes and lengths
that have to agree before anything is computed. :func:`bytes_sent` tells what a call sends. Tensors are detached, or
calls under ``torch.no_grad()``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch import distributed as dist

from kvlab.attention import merge_states, mha_decode_paged, mha_prefill, mha_prefill_paged, mla_decode_paged
from kvlab.attention.call.options import DecodeOptions, MLADecodeOptions, PagedPrefillOptions, PrefillOptions
from kvlab.attention.features.positions import check_positions
from kvlab.attention.features.resolve import in_base, kv_view
from kvlab.attention.features.scales import is_fp8
from kvlab.attention.masks import Interval, Mask, window_interval
from kvlab.common.arrays import same_place
from kvlab.common.checks import count, flag, is_integer, require, shown
from kvlab.common.opaque import opaque

from .adapting import checked_tensors, in_sight, rows_of_starts, slots_of

PLACEMENTS = ("contiguous", "round_robin")
"""How the pages of a sequence lie over ranks."""
COMPARED = 8
"""Numbers of 64 bits that ranks compare before a call that is checked."""


class Membership(NamedTuple):
    """A process group of torch.distributed, None for the default one, the caller's rank in it, and its ranks."""

    group: Any
    rank: int
    ranks: int


class TensorParallelHeads(NamedTuple):
    """The heads of a rank: slices of query heads and of KV heads."""

    q: slice
    kv: slice


def tensor_parallel_heads(q_heads: int, kv_heads: int, *, group: Any = None) -> TensorParallelHeads:
    """Query heads and KV heads of this rank, equal parts of all; where there are more ranks than KV heads, ranks whose
    query heads read the same KV head have a copy each.

    ``q[..., heads.q, :]`` over ``k_cache[..., heads.kv, :]`` is these heads' attention; sinks, slopes and temperatures
    are those of ``heads.q``, scales of heads those of ``heads.kv``.

    ValueError unless q_heads is a multiple of kv_heads and of the ranks, and one of kv_heads and ranks is a multiple of
    the other.

    >>> heads_of_rank(8, 2, 3, 4)
    TensorParallelHeads(q=slice(6, 8, None), kv=slice(1, 2, None))
    """
    _, rank, ranks = membership(group)
    return heads_of_rank(q_heads, kv_heads, rank, ranks)


def heads_of_rank(q_heads: int, kv_heads: int, rank: int, ranks: int) -> TensorParallelHeads:
    """As ``tensor_parallel_heads``, of the given rank.

    >>> heads_of_rank(32, 8, 1, 2)
    TensorParallelHeads(q=slice(16, 32, None), kv=slice(4, 8, None))
    >>> heads_of_rank(12, 6, 0, 4)
    Traceback (most recent call last):
        ...
    ValueError: kv_heads is 6 with 4 ranks: must be a multiple of the ranks, or the ranks a multiple of it
    """
    count("q_heads", q_heads, 1)
    count("kv_heads", kv_heads, 1)
    require(q_heads % kv_heads == 0, f"q_heads is {q_heads}", f"a multiple of kv_heads, {kv_heads}")
    require(q_heads % ranks == 0, f"q_heads is {q_heads}", f"a multiple of the {ranks} ranks of group")
    fits, what = kv_heads % ranks == 0 or ranks % kv_heads == 0, f"kv_heads is {kv_heads} with {ranks} ranks"
    require(fits, what, "a multiple of the ranks, or the ranks a multiple of it")
    mine, first = max(kv_heads // ranks, 1), rank * kv_heads // ranks
    each = q_heads // ranks
    return TensorParallelHeads(slice(rank * each, (rank + 1) * each), slice(first, first + mine))


@opaque
def all_gather_heads(out: Tensor, *, group: Any = None, check: bool | None = None) -> Tensor:
    """Outputs ``[.., Hq, D]`` of all heads, from those of each rank's heads ``[.., Hq / ranks, D]``."""
    checked_tensors(out=out)
    require(out.ndim >= 2, f"out has shape {tuple(out.shape)}", "[.., heads, D]")
    member = membership(group)
    rows = {f"out.shape[{axis - out.ndim}]": int(out.shape[axis]) for axis in (-2, -1)}
    _compare(member, check, out, {"elements of out": out.numel(), "bytes of its elements": out.element_size()} | rows)
    return _side_by_side(_gathered(out, member), out.ndim - 2)


@dataclass(frozen=True)
class ContextShard:
    """The pages of each sequence that a rank has: ``columns`` columns of a table of its own, in the order of the
    sequence. Of a sequence's pages, "contiguous" gives ranks one run each (rank r has the pages ``r * columns`` up to
    ``(r + 1) * columns``), "round_robin" every ``ranks``-th (rank r has the pages r, r + ranks, ...).

    >>> shard = ContextShard(1, 2, columns=3, page_size=4, placement="round_robin")
    >>> shard.before(torch.tensor([3, 7, 12, 17])).tolist()
    [0, 3, 4, 8]
    >>> shard.slots(torch.tensor([[9, 7, 5]]), torch.tensor([[3, 4, 13]])).tolist()
    [[-1, 36, 29]]
    """

    rank: int
    ranks: int
    columns: int
    page_size: int
    placement: str = "contiguous"

    def __post_init__(self) -> None:
        known = isinstance(self.placement, str) and self.placement in PLACEMENTS
        require(known, f"placement is {shown(self.placement)}", f"one of {', '.join(PLACEMENTS)}")

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that the pages of all ranks hold."""
        return self.ranks * self.columns * self.page_size

    @property
    def start(self) -> int:
        """The position of this rank's first token."""
        return self.rank * self.page_size * (self.columns if self.placement == "contiguous" else 1)

    def before(self, tokens: Tensor) -> Tensor:
        """The number of this rank's tokens among the first ``tokens``: its keys of sequences of these lengths."""
        if self.placement == "contiguous":
            mine = tokens - self.start
        else:
            turn = self.ranks * self.page_size  # launches are what this costs on a GPU: few, of the dtype given
            last = (tokens.remainder(turn) - self.start).clamp(0, self.page_size)
            mine = torch.add(last, tokens.div(turn, rounding_mode="floor"), alpha=self.page_size)
        return mine.clamp(0, self.columns * self.page_size)

    def positions(self, positions: Tensor) -> Tensor:
        """Positions of queries among this rank's keys: contiguous ones keep all distances, those of round-robin pages
        tell which keys are up to the query, and nothing else.
        """
        return positions - self.start if self.placement == "contiguous" else self.before(positions + 1) - 1

    def slots(self, block_table: Tensor, positions: Tensor, sequence: Tensor | None = None) -> Tensor:
        """Slots of this rank's tokens for a store, -1 for tokens of other ranks: of tokens at ``positions`` ``[T]`` of
        their ``sequence`` ``[T]``, or of ``[B, n]`` of each; ``block_table`` ``[B, columns]`` is this rank's own.
        """
        checked_tensors(block_table=block_table, positions=positions, sequence=sequence)
        shape = tuple(block_table.shape)
        require(shape[1:] == (self.columns,), f"block_table has shape {shape}", f"[B, {self.columns}]")
        found = positions - self.start
        if self.placement == "round_robin":
            page, _ = self._page(positions)
            found = self.before(positions).where((page % self.ranks == self.rank) & (positions >= 0), -1)
        return slots_of(block_table, sequence, found.long(), self.page_size)

    def _page(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        page = torch.div(tokens, self.page_size, rounding_mode="floor")
        return page, tokens - page * self.page_size


def context_shard(
    block_table: Tensor, page_size: int, *, group: Any = None, placement: str = "contiguous"
) -> ContextShard:
    """Pages that this rank has of sequences whose pages lie over the ranks of ``group``; ``block_table``
    ``[B, columns]`` is its own, as wide as the others'.
    """
    checked_tensors(block_table=block_table)
    require(block_table.ndim == 2, f"block_table has shape {tuple(block_table.shape)}", "[B, columns]")
    _, rank, ranks = membership(group)
    return ContextShard(rank, ranks, int(block_table.shape[1]), count("page_size", page_size, 1), placement)


@opaque
def context_parallel_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, *, group: Any = None,
    placement: str = "contiguous", **options: Unpack[DecodeOptions],
) -> Any:
    """:func:`kvlab.attention.mha_decode_paged` over pages that lie over ranks. Every rank gets the whole result.

    q            ``[B, Hq, D]`` or ``[B, S, Hq, D]``, the same at all ranks
    k_cache, v_cache  this rank's pages
    block_table  integers ``[B, columns]``: this rank's pages of each sequence (see :class:`ContextShard`), as many
                 columns at each rank; entries past the sequence's end are not read
    seq_lens     integers ``[B]``: keys of each sequence at all ranks together, the new tokens among them
    placement    "contiguous", or "round_robin", which keeps ranks equally busy at any length. It has no window, ALiBi
                 or chunks: ValueError
    options      those of ``mha_decode_paged``: positions count in the whole sequence; the mask is None or an interval
                 of positions, chunks whole at each rank. Sinks are counted once. ``leftpad_k`` is refused, and
                 ``balanced`` where a rank's kernel needs positions: S above 1, windows, ALiBi

    Partial results have ``out``'s dtype, and are merged in float32: of float32 the result differs from one process's by
    the order of sums, of 16 bits by a rounding of each part too. ValueError on bad arguments, before results are sent.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    ...     q, cache, table = torch.ones(1, 4, 64), torch.ones(3, 16, 2, 64), torch.tensor([[2, 0]])
    ...     out = context_parallel_decode(q, cache, cache, table, torch.tensor([20]), backend="emulator")
    ...     dist.destroy_process_group()
    >>> out.unique().tolist()
    [1.0]
    """
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    checked_tensors(**tensors)
    return _decode(mha_decode_paged, tensors, group, placement, dict(options))


@opaque
def context_parallel_mla_decode(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, *, group: Any = None,
    placement: str = "contiguous", **options: Unpack[MLADecodeOptions],
) -> Any:
    """:func:`kvlab.attention.mla_decode_paged` over pages of latent rows that lie over ranks. Every rank gets the whole
    result.

    q         ``[B, H, D]`` or ``[B, S, H, D]``, the same at all ranks. All heads read the same rows: ranks that share
              out heads, too, have a copy of the rows each
    kv_cache  this rank's pages
    options   those of ``mla_decode_paged``; ``indices`` is refused, whose slots are those of one rank

    The rest: as for :func:`context_parallel_decode`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    ...     q, rows, table = torch.ones(1, 2, 48), torch.full((3, 16, 48), 3.0), torch.tensor([[2, 0]])
    ...     sizes = {"v_dim": 32, "scale": 0.2, "backend": "emulator"}
    ...     out = context_parallel_mla_decode(q, rows, table, torch.tensor([20]), **sizes)
    ...     dist.destroy_process_group()
    >>> out.shape, out.unique().tolist()
    (torch.Size([1, 2, 32]), [3.0])
    """
    tensors = {"q": q, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
    checked_tensors(**tensors)
    _refuse(options, "over pages of ranks", "indices")
    return _decode(mla_decode_paged, tensors, group, placement, dict(options))


def _decode(
    operation: Any, tensors: dict[str, Tensor], group: Any, placement: str, options: dict[str, Any]
) -> Any:
    """A decode over all ranks' pages."""
    q, seq_lens = tensors["q"], tensors["seq_lens"]
    require(q.ndim in (3, 4), f"q has shape {tuple(q.shape)}", "[B, Hq, D] or [B, S, Hq, D]")
    sequences = tuple(seq_lens.shape)
    require(sequences == (q.shape[0],), f"seq_lens has shape {sequences}", f"{(q.shape[0],)}, the sequences of q")
    new = int(q.shape[1]) if q.ndim == 4 else 1

    def last(lengths: Tensor) -> Tensor:
        return (lengths[:, None] - new + torch.arange(new, device=lengths.device)).view(q.shape[:-2])

    causal = options.get("mask") is None or is_integer(options.get("window"))
    return _over_pages(PagesCall(operation, tensors, last, causal, alone=new == 1), group, placement, options)


@opaque
def context_parallel_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, *,
    group: Any = None, placement: str = "contiguous", **options: Unpack[PagedPrefillOptions],
) -> Any:
    """:func:`kvlab.attention.mha_prefill_paged` over pages that lie over ranks: chunked prefill. Every rank gets the
    whole result.

    q             ``[total, Hq, D]``: the new tokens of all sequences, the same at all ranks; their keys are stored
                  (``ContextShard.slots``)
    cu_seqlens_q  integers ``[B + 1]``: where each sequence's new tokens start in q, and the total
    options       those of ``mha_prefill_paged``

    The rest: as for :func:`context_parallel_decode`. :func:`all_gather_prefill` shares out the queries, too.
    """
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens,
               "cu_seqlens_q": cu_seqlens_q}
    checked_tensors(**tensors)
    require(q.ndim == 3, f"q has shape {tuple(q.shape)}", "[total, Hq, D]")
    starts = tuple(cu_seqlens_q.shape)
    fits = seq_lens.ndim == 1 and starts == (seq_lens.shape[0] + 1,)
    require(fits, f"cu_seqlens_q has shape {starts}", f"[B + 1], as seq_lens has shape {tuple(seq_lens.shape)}")

    def last(lengths: Tensor) -> Tensor:
        sequence, number = rows_of_starts(cu_seqlens_q, q.shape[0])
        return (lengths - cu_seqlens_q.long().diff())[sequence.clamp(min=0)] + number

    given = options.get("causal")
    causal = options.get("mask") is None if given is None else flag("causal", given)
    return _over_pages(PagesCall(mha_prefill_paged, tensors, last, causal), group, placement, dict(options))


@opaque
def all_gather_prefill(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any = None, **options: Unpack[PrefillOptions]
) -> Any:
    """:func:`kvlab.attention.mha_prefill` of sequences whose tokens lie over ranks, a run of them at each, in the
    order of ranks: K and V of all ranks are gathered, and each rank gets the output of its own queries.

    q        ``[B, S, Hq, D]``: this rank's queries, as many at each rank
    k, v     ``[B, n, Hkv, D]`` and ``[.., Dv]``: this rank's keys, as many at each rank
    options  those of ``mha_prefill``, of all keys: a mask may be any. ``q_positions``, ``leftpad_k`` and scales of
             tokens are refused

    A sequence that ends earlier is padded at its end, where causal queries do not see it. ValueError on bad arguments,
    before results are sent.
    """
    checked_tensors(q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require(tensor.ndim == 4, f"{name} has shape {tuple(tensor.shape)}", "[B, S, H, D]")
    require(v.shape[:3] == k.shape[:3], f"v has shape {tuple(v.shape)}", f"{tuple(k.shape[:3])} without its last axis")
    _refuse(options, "over tokens of all ranks", "leftpad_k", "q_positions", "cu_seqlens_q", "cu_seqlens_k")
    for name in ("k_scale", "v_scale"):
        scale = options.get(name)
        heads = not isinstance(scale, Tensor) or scale.ndim < 3
        require(heads, f"{name} is {shown(scale)}", "a number, [Hkv] or [B, Hkv]: scales of tokens are not gathered")
    member = membership(group)
    new, keys = int(q.shape[1]), int(k.shape[1])
    _compare(member, options.get("check"), q, {
        **{f"k.shape[{axis}]": int(size) for axis, size in enumerate(k.shape)}, "v.shape[3]": int(v.shape[3]),
        "bytes of k's elements": k.element_size(), "q.shape[1]": new,
    })
    first = member.ranks * (keys - new) + member.rank * new
    positions = torch.arange(first, first + new, dtype=torch.int32, device=q.device).repeat(q.shape[0], 1)
    k, v = (_side_by_side(_gathered(x, member), 1) for x in (k, v))
    everything: dict[str, Any] = {**options, "q_positions": positions}
    return mha_prefill(q, k, v, **everything)


def bytes_sent(ranks: int, *tensors: Tensor, check: bool = True) -> int:
    """Bytes that each of ``ranks`` ranks sends in a call that gathers these tensors of each of them, on the device
    "meta", say: the other ranks get a copy each, and as many numbers to compare if it is checked.

    ============================  =====================================================
    call                          tensors
    ============================  =====================================================
    ``context_parallel_decode``   the result: out, and lse in float32; of MLA, too
    ``context_parallel_prefill``  the same
    ``all_gather_prefill``        k and v of a rank
    ``all_gather_heads``          out of a rank
    ============================  =====================================================

    >>> out, lse = torch.empty(1, 32, 128, dtype=torch.bfloat16, device="meta"), torch.empty(1, 32, device="meta")
    >>> bytes_sent(4, out, lse, check=False)  # 32 heads of 128 columns and a lse, to 3 others
    24960
    """
    compared = COMPARED * torch.int64.itemsize if flag("check", check) else 0
    return (count("ranks", ranks, 1) - 1) * (compared + sum(t.numel() * t.element_size() for t in tensors))


def membership(group: Any) -> Membership:
    """The process group that the argument ``group`` means. ValueError for what is none, or is not this rank's."""
    running = dist.is_available() and dist.is_initialized()
    require(running, "group without a process group", "after torch.distributed.init_process_group")
    found = group
    if isinstance(group, dist.DeviceMesh):
        names = group.mesh_dim_names or tuple(range(group.ndim))
        require(group.ndim == 1, f"group is a DeviceMesh of dimensions {names}", f"one of them, as mesh[{names[-1]!r}]")
        found = group.get_group()
    one = found is None or isinstance(found, dist.ProcessGroup)
    require(one, f"group is {shown(group)}", "None, a ProcessGroup or DeviceMesh that this rank belongs to")
    rank = dist.get_rank(found)
    require(rank >= 0, f"group is {shown(group)}", "one that this rank belongs to")
    return Membership(found, rank, dist.get_world_size(found))


def _compare(member: Membership, check: Any, like: Tensor, numbers: dict[str, int]) -> None:
    """ValueError, at all ranks, for ``numbers`` that differ between ranks; names are what a message says. Nothing is
    sent if ``check`` is False, or None for a tensor ``like`` on a GPU.
    """
    if not _looked_at(check, like):
        return
    mine = torch.zeros(COMPARED, dtype=torch.int64)
    mine[: len(numbers)] = torch.tensor(list(numbers.values()))
    rows = _gathered(mine.to(like.device), member).tolist()
    for rank, row in enumerate(rows):
        for at, name in enumerate(numbers):
            least, here = rows[0][at], row[at]
            require(here == least, f"{name} is {least} at rank 0 and {here} at rank {rank}", "the same at all ranks")


class PagesCall(NamedTuple):
    """A call over pages: the operation and its arrays, checked to be tensors; ``last`` gives the positions of new
    tokens from lengths ``[B]`` where they are the last; alone: each is the only new one of its sequence.
    """

    operation: Any
    tensors: dict[str, Tensor]
    last: Callable[[Tensor], Tensor]
    causal: bool
    alone: bool = False


def _over_pages(call: PagesCall, group: Any, placement: str, options: dict[str, Any]) -> Any:
    """The result of an operation over all ranks' pages."""
    q, table, lengths = (call.tensors[name] for name in ("q", "block_table", "seq_lens"))
    out, given = options.pop("out", None), options.pop("q_positions", None)
    checked_tensors(q_positions=given, out=out)
    same_place(**call.tensors)
    check_positions(given, q)
    page_size, columns = _sizes_of_pages(call.tensors, options)
    shard = context_shard(table, page_size, group=group, placement=placement)
    expected = table.shape[:1]
    require(lengths.shape == expected, f"seq_lens has shape {tuple(lengths.shape)}", f"{tuple(expected)}")
    _refuse(options, "over pages of ranks", "leftpad_k")
    positional = _asks_positions(shard, call, options, given)
    if positional:
        _refuse(options, "over pages of ranks, where kernels need positions", "balanced", "plan")
    lse_too, base2 = (flag(name, options.pop(name, False)) for name in ("return_lse", "base2"))
    shape = torch.Size((*q.shape[:-1], columns))
    require(out is None or out.shape == shape, f"out has shape {tuple(getattr(out, 'shape', ()))}", f"{tuple(shape)}")
    dtype = out.dtype if out is not None else torch.bfloat16 if is_fp8(q) else q.dtype

    member, check = membership(group), options.get("check")
    _compare(member, check, lengths, {
        "rows of q": shape[:-2].numel(), "heads of q": shape[-2], "columns of the output": columns,
        "bytes of out's elements": dtype.itemsize, "columns of block_table": shard.columns,
        "tokens of a page": page_size, "the place of placement": PLACEMENTS.index(placement),
        "the checksum of seq_lens": _checksum(shard, lengths) if _looked_at(check, lengths) else 0,
    })
    if positional:
        given = call.last(lengths.long()) if given is None else given.long()
        options["q_positions"] = shard.positions(given).to(torch.int32).contiguous()
    if member.rank:
        options.pop("sinks", None)
    wide = lengths if lengths.dtype in (torch.int32, torch.int64) else lengths.long()
    mine = call.tensors | {"seq_lens": shard.before(wide).to(lengths.dtype)}

    # One collective: the lse stands behind the output in one buffer.
    size, rows = shape.numel() * dtype.itemsize, shape[:-1]
    part = torch.empty(size + rows.numel() * 4, dtype=torch.uint8, device=q.device)
    _, lse = call.operation(*mine.values(), out=part[:size].view(dtype).view(shape), return_lse=True, **options)
    part[size:].view(torch.float32).view(rows).copy_(lse)
    parts = _gathered(part, member)
    outs = parts[:, :size].view(dtype).view(member.ranks, *shape)
    lses = parts[:, size:].view(torch.float32).view(member.ranks, *rows)
    backend = options.get("backend", "auto")
    out, lse = merge_states(outs, lses, out=out, return_lse=True, backend="auto" if backend == "hopper" else backend)
    return (out, in_base(lse, base2)) if lse_too else out


def _sizes_of_pages(tensors: dict[str, Tensor], options: dict[str, Any]) -> tuple[int, int]:
    """Tokens of a page, and columns of an output."""
    latent, layout = "kv_cache" in tensors, options.get("kv_layout", "NHD")
    caches = {name: x for name, x in tensors.items() if name.endswith("cache")}
    for name, cache in caches.items():
        axes = (3, 4) if latent else (4,)
        require(cache.ndim in axes, f"{name} has shape {tuple(cache.shape)}", "pages first, and four axes"
                if not latent else "[pages, page_size, D], or with an axis of one head")
    *_, cache = caches.values()
    view = cache if cache.ndim == 3 else kv_view(cache, layout)
    return int(view.shape[1]), count("v_dim", options.get("v_dim", 512), 1) if latent else int(cache.shape[-1])


def _asks_positions(shard: ContextShard, call: PagesCall, options: dict[str, Any], given: Tensor | None) -> bool:
    """Tells whether a rank's call has to know positions, ``given`` ones among them. ValueError for a mask, a window or
    ALiBi that it could not have right.
    """
    mask, window, slopes = options.get("mask"), options.get("window"), options.get("alibi_slopes")
    own = Interval() if mask is None else mask.interval() if isinstance(mask, Mask) else None
    sees = None if own is None else own & window_interval(call.causal, window)
    if sees is None or sees.valid is not None:
        raise ValueError(f"mask is {shown(mask)}: must be None or an interval of positions, as CausalMask() is")
    unbounded, causal = sees == Interval(), sees == Interval(right=0)
    if shard.placement == "round_robin":
        require(unbounded or causal, f"mask is {shown(mask)}, window {shown(window)} with placement 'round_robin'",
                "causal or without bounds: a window is not as many keys at each rank")
        require(slopes is None, "alibi_slopes with placement 'round_robin'",
                "None: distances between a rank's keys are not those of the sequence")
    keys = shard.columns * shard.page_size
    whole = not sees.chunk or keys % sees.chunk == 0
    require(whole, f"mask is {shown(mask)} with {keys} tokens at each rank", "of chunks that are whole at each rank")
    return slopes is not None or not (unbounded or (causal and call.alone and given is None))


def _checksum(shard: ContextShard, lengths: Tensor) -> int:
    """A checksum of lengths. ValueError for one that the pages of all ranks do not hold."""
    values = lengths.tolist()
    for b, n in enumerate(values):
        require(0 <= n <= shard.capacity, f"seq_lens[{b}] is {n}", f"0 to {shard.capacity}, what the {shard.columns} "
                f"columns of block_table at {shard.ranks} ranks hold in pages of {shard.page_size}")
    return sum((b + 1) * n for b, n in enumerate(values))


def _looked_at(check: Any, like: Tensor) -> bool:
    """Tells whether values are compared, as ``check`` says; None: unless they are on a GPU."""
    return in_sight(like) if check is None else flag("check", check)


def _refuse(options: Any, where: str, *names: str) -> None:
    """ValueError for those of the options that are given."""
    for name in names:
        left_out = options.get(name) is None or options.get(name) is False
        require(left_out, f"{name} {where}", "left out")


def _gathered(tensor: Tensor, member: Membership) -> Tensor:
    """``[ranks, ..]`` of tensors of the same shape and dtype at all ranks, by rank."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)  # not every backend knows every dtype
    found = flat.new_empty(member.ranks * flat.shape[0])
    if flat.shape[0]:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(found, flat, group=member.group)
    return found.view(tensor.dtype).view(member.ranks, *tensor.shape)


def _side_by_side(gathered: Tensor, axis: int) -> Tensor:
    """Tensors of ranks ``[ranks, ..]``, one behind the other along an axis of theirs."""
    return torch.cat(gathered.unbind(0), axis)
