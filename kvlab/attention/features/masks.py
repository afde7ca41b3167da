"""Keys that a query sees: MAX's masks by name, the protocol for masks of one's own, and what kernels get of them.

A mask tells, for positions in the sequence, ``visible(batch, head, q_pos, k_pos)`` (bool) or ``value(...)`` (what is
added to the score, -inf where it masks); arguments are integer arrays that broadcast. The new token i of S lies at
position ``i + n - S`` of n keys. A mask of one's own is a :class:`Mask` with one of the two methods.

Where the keys that a query sees are one run, the mask is an :class:`Interval` (four numbers), and tiles outside it are
never read. Every other mask becomes an array that is added to the scores. :func:`resolve_mask` gives kernels a
:class:`MaskPlan`: both.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from kvlab.attention.features.intervals import UNLIMITED, Interval, host, side_of
from kvlab.attention.tiles.online_softmax import MASK_VALUE
from kvlab.common.arrays import to_torch
from kvlab.common.checks import is_integer
from kvlab.common.torch_here import is_torch

Array = np.ndarray[Any, Any]


class TileStatus(enum.IntFlag):
    """Effect of a mask on a tile of queries and keys (numbers as MAX's)."""

    NO_MASK = 0
    PARTIAL_MASK = 1
    FULL_MASK = 3
    UNKNOWN_MASK = 4


class Mask:
    """A mask of one's own has ``visible`` or ``value``.

    >>> class EvenKeys(Mask):
    ...     def visible(self, batch, head, q_pos, k_pos):
    ...         return k_pos % 2 == 0
    >>> EvenKeys().value(0, 0, 3, np.arange(4)).tolist()
    [0.0, -inf, 0.0, -inf]
    """

    def visible(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        """Tells whether the query sees the key."""
        if type(self).value is Mask.value:
            raise ValueError(f"{self!r} has neither visible nor value: a mask must have one of the two methods")
        return np.logical_not(self.value(batch, head, q_pos, k_pos) <= MASK_VALUE)

    def value(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        """Summand of the score, natural units; MASK_VALUE or less masks the key, NaN makes the row NaN."""
        seen = self.visible(batch, head, q_pos, k_pos)
        if seen is None:
            raise ValueError(f"visible of {self!r} gives None: must be true or false for each query and key")
        return np.where(seen, np.float32(0), np.float32(-np.inf))

    def status(self, q0: int, k0: int, BM: int, BN: int) -> TileStatus:
        """Effect of the mask on queries ``q0 ... q0 + BM`` and keys ``k0 ... k0 + BN``."""
        return TileStatus.UNKNOWN_MASK

    def interval(self) -> Interval | None:
        """The same as four numbers, where the keys that a query sees are one run."""
        return None


class _IntervalMask(Mask):
    """The keys that a query sees are one run."""

    def interval(self) -> Interval:
        raise NotImplementedError

    def visible(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        first, limit = self.interval().bounds(q_pos, UNLIMITED, batch)
        return (k_pos >= first) & (k_pos < limit)

    def status(self, q0: int, k0: int, BM: int, BN: int) -> TileStatus:
        """FULL_MASK tiles are never read.

        >>> [CausalMask().status(q0, 64, 64, 64).name for q0 in (0, 64, 127)]
        ['FULL_MASK', 'PARTIAL_MASK', 'NO_MASK']
        """
        of = self.interval()
        valid = np.array([UNLIMITED]) if of.valid is None else host(of.valid)
        plain = replace(of, valid=None)
        first, limit = plain.bounds(np.array([q0, q0 + BM - 1]), UNLIMITED)
        if k0 >= min(limit[1], valid.max(initial=0)) or k0 + BN <= first[0]:
            return TileStatus.FULL_MASK
        whole = k0 >= first[1] and k0 + BN <= min(limit[0], valid.min(initial=UNLIMITED))
        return TileStatus.NO_MASK if whole else TileStatus.PARTIAL_MASK


@dataclass(frozen=True)
class NullMask(_IntervalMask):
    """Every key is seen."""

    def interval(self) -> Interval:
        return Interval()


@dataclass(frozen=True)
class CausalMask(_IntervalMask):
    """``k <= q``."""

    def interval(self) -> Interval:
        return Interval(right=0)


@dataclass(frozen=True)
class SlidingWindowCausalMask(_IntervalMask):
    """``k <= q and q - k < window``."""

    window: int

    def __post_init__(self) -> None:
        _positive(self, "window", self.window)

    def interval(self) -> Interval:
        return Interval(self.window - 1, 0)


@dataclass(frozen=True)
class SlidingWindowNonCausalMask(_IntervalMask):
    """``q - k < window``: future keys are seen."""

    window: int

    def __post_init__(self) -> None:
        _positive(self, "window", self.window)

    def interval(self) -> Interval:
        return Interval(self.window - 1)


@dataclass(frozen=True)
class BandMask(_IntervalMask):
    """``q - left <= k <= q + right``: None is no bound, a negative one is on the diagonal's other side.

    >>> BandMask(-1, 2).visible(0, 0, 3, np.arange(7)).tolist()
    [False, False, False, False, True, True, False]
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, side in vars(self).items():
            if side is not None and not is_integer(side):
                raise ValueError(f"{name} is {side!r} of BandMask: must be a number of keys or None")
        if sum(self._sides) < 0:
            raise ValueError(f"{self!r}: must leave keys to see, left + right of at least 0")

    @property
    def _sides(self) -> tuple[int, int]:
        return side_of(self.left), side_of(self.right)

    def interval(self) -> Interval:
        return Interval(*self._sides)


@dataclass(frozen=True)
class ChunkedMask(_IntervalMask):
    """``q // chunk == k // chunk``."""

    chunk: int

    def __post_init__(self) -> None:
        _positive(self, "chunk", self.chunk)

    def interval(self) -> Interval:
        return Interval(chunk=self.chunk)


@dataclass(frozen=True)
class ChunkedCausalMask(_IntervalMask):
    """Causal and in the chunk."""

    chunk: int

    def __post_init__(self) -> None:
        _positive(self, "chunk", self.chunk)

    def interval(self) -> Interval:
        return Interval(right=0, chunk=self.chunk)


@dataclass(frozen=True, eq=False)
class CausalPaddingMask(_IntervalMask):
    """``k <= q and k < valid_lengths[batch]``; integers ``[B]``, NumPy or torch as the call's arrays."""

    valid_lengths: Any

    def interval(self) -> Interval:
        return Interval(right=0, valid=self.valid_lengths)


@dataclass(frozen=True, eq=False)
class MaterializedMask(Mask):
    """An array that is added to the scores: ``[B or 1, Hq or 1, S, keys]``, ``[B or 1, S, keys]`` or ``[S, keys]``.

    Row i is new token i, whatever its position; keys count from the start of the sequence. Rows and keys outside the
    array are masked, and so are values of MASK_VALUE (-2^100) or less, not NaN; bool: False masks. Kernels take it as
    it is. ``start`` is the position of row 0 for :meth:`value` (keys less rows if None).
    """

    array: Any
    start: Any = None

    def value(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        a = host(self.bias())
        start = a.shape[3] - a.shape[2] if self.start is None else np.asarray(self.start)
        row = np.asarray(q_pos) - (start[batch] if np.ndim(start) else start)
        key, inside = np.asarray(k_pos), (row >= 0) & (row < a.shape[2]) & (np.asarray(k_pos) < a.shape[3])
        b, h = (0 * np.asarray(i) if n == 1 else i for i, n in ((batch, a.shape[0]), (head, a.shape[1])))
        found = a[b, h, np.clip(row, 0, a.shape[2] - 1), np.clip(key, 0, a.shape[3] - 1)]
        return np.where(inside, found.astype(np.float32), np.float32(-np.inf))

    def bias(self) -> Any:
        """The array as ``[B or 1, Hq or 1, S, keys]`` of floats."""
        a = self.array
        if not (is_torch(a) or isinstance(a, np.ndarray)):
            raise ValueError(f"MaterializedMask of {a!r}: must be a NumPy array or torch tensor [.., S, keys]")
        if not 2 <= a.ndim <= 4:
            raise ValueError(f"MaterializedMask of shape {tuple(a.shape)}: must be [.., S, keys] with 2 to 4 axes")
        a = a[None, None] if a.ndim == 2 else a[:, None] if a.ndim == 3 else a
        if str(a.dtype).endswith("bool"):
            a = a.float().log() if is_torch(a) else np.where(a, np.float32(0), np.float32(-np.inf))
        return a


@dataclass(frozen=True, eq=False)
class _TwoMasks(Mask):
    """Two masks as one."""

    a: Mask
    b: Mask
    values: ClassVar[Callable[..., Any]]
    statuses: ClassVar[Callable[..., Any]]
    intervals: ClassVar[Callable[..., Any]]
    decisive: ClassVar[TileStatus]
    """The status of one mask that is that of both, whatever the other's."""

    def __post_init__(self) -> None:
        for part in (self.a, self.b):
            if not isinstance(part, Mask):
                raise ValueError(f"{type(self).__name__} of {part!r}: must be two masks of kvlab.attention.masks")

    def value(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
        return type(self).values(*(one.value(batch, head, q_pos, k_pos) for one in (self.a, self.b)))

    def status(self, q0: int, k0: int, BM: int, BN: int) -> TileStatus:
        both = [one.status(q0, k0, BM, BN) for one in (self.a, self.b)]
        if TileStatus.UNKNOWN_MASK in both:
            return self.decisive if self.decisive in both else TileStatus.UNKNOWN_MASK
        return TileStatus(type(self).statuses(*both))

    def interval(self) -> Interval | None:
        both = self.a.interval(), self.b.interval()
        together: Interval | None = None if None in both else type(self).intervals(*both)
        return together


class AndMask(_TwoMasks):
    """Masked only where both mask: the greater of the two values."""

    values, statuses, intervals, decisive = np.maximum, operator.and_, operator.or_, TileStatus.NO_MASK


class OrMask(_TwoMasks):
    """Masked where either masks: the lesser of the two values."""

    values, statuses, intervals, decisive = np.minimum, operator.or_, operator.and_, TileStatus.FULL_MASK


@dataclass(frozen=True, eq=False)
class MaskPlan:
    """Arguments of a kernel for a mask. A key is seen if it is in the interval (see :class:`Interval`) and, where there
    is a ``bias`` ``[B or 1, Hq or 1, S, keys]``, inside it with a value greater than MASK_VALUE. Positions and keys
    count from the first valid key, before which a sequence has ``leftpad`` ``[B]``, integers; None: none. Query tokens
    are at ``positions`` ``[B, S]`` or ``[1, total]``, integers; None: the last of their sequence.
    """

    left: int = UNLIMITED
    right: int = UNLIMITED
    chunk: int = 0
    valid: Any = None
    bias: Any = None
    leftpad: Any = None
    positions: Any = None

    @classmethod
    def of(cls, interval: Interval, bias: Any = None) -> MaskPlan:
        """The plan of an interval, with a bias within it. What reaches further than any key does not bound."""
        left, right = (min(side, UNLIMITED) for side in (interval.left, interval.right))
        return cls(left, right, interval.chunk if interval.chunk < UNLIMITED else 0, interval.valid, bias)

    @property
    def interval(self) -> Interval:
        return Interval(self.left, self.right, self.chunk, self.valid)

    def padding(self, sequence: int, num_keys: int) -> int:
        """Keys of a sequence of ``num_keys`` before its first valid one."""
        return 0 if self.leftpad is None else max(0, min(int(self.leftpad[sequence]), num_keys))

    def position(self, sequence: int, num_keys: int, rows: slice) -> Array:
        """Positions ``[S]`` of the query tokens ``rows`` of a sequence of ``num_keys`` valid keys."""
        if self.positions is None:
            return np.arange(rows.start, rows.stop) - rows.stop + num_keys
        found: Array = self.positions[sequence if len(self.positions) > 1 else 0, rows].astype(np.int64)
        return found

    @property
    def by_length(self) -> tuple[int, int]:
        """Keys that a query sees before and behind the place that lengths give it: no bound where it has another."""
        return (UNLIMITED, UNLIMITED) if self.placed else (self.left, self.right)

    @property
    def placed(self) -> bool:
        """Tells whether queries have other places among the keys than the last, or keys others than from 0 on."""
        return self.positions is not None or self.leftpad is not None

    @property
    def windowed(self) -> bool:
        """Tells whether rows see no keys before some first one (a left bound or chunks), where their tiles may start.
        """
        return self.left < UNLIMITED or self.chunk > 0

    @property
    def bounded(self) -> bool:
        """Tells whether rows of a tile see other keys than its last: they are windowed, or a bias is added."""
        return self.windowed or self.bias is not None


def resolve_mask(
    mask: Any, interval: Interval, *, heads: int, lengths: Callable[[], tuple[Array, ...]], like: Any
) -> MaskPlan:
    """The plan of ``mask`` (None: no more than ``interval``) within ``interval``, those of the other arguments.

    lengths : gives (new tokens, keys) ``[B]`` of each sequence in CPU memory, and positions ``[B, S]`` where these are
    given; called only for a mask that is neither an interval nor a MaterializedMask. like : an array of the library and
    on the device where the bias shall be.

    >>> plan = resolve_mask(ChunkedMask(4), Interval(right=0), heads=1, lengths=lambda: None, like=np.zeros(1))
    >>> plan.right, plan.chunk, plan.bias
    (0, 4, None)
    """
    if mask is not None and not isinstance(mask, Mask):
        raise ValueError(f"mask is {mask!r}: must be a kvlab.attention.masks.Mask, as CausalMask() or one's own class")
    if mask is None:
        return MaskPlan.of(interval)
    own = mask.interval()
    both = None if own is None else own & interval
    if both is not None:
        return MaskPlan.of(both)
    bias = mask.bias() if isinstance(mask, MaterializedMask) else _materialise(mask, heads, *lengths(), like=like)
    return MaskPlan.of(interval, bias)


def _materialise(mask: Mask, heads: int, new: Array, keys: Array, *positions: Array, like: Any) -> Any:
    """The values of a mask, ``[B or 1, Hq or 1, S, keys]``, in the library of ``like``."""
    S, n = int(new.max(initial=0)), int(keys.max(initial=0))
    (q_pos,) = positions or (np.arange(S) + (keys - new)[:, None].astype(np.int64),)
    if (q_pos == q_pos[:1]).all():
        q_pos = q_pos[:1]
    where = np.arange(len(new))[:, None, None, None], np.arange(heads)[:, None, None]
    values = mask.value(*where, q_pos[:, None, :, None], np.arange(n))
    try:
        found = np.asarray(() if values is None else values, np.float32)
        found = np.broadcast_to(found, (*(1,) * (4 - found.ndim), *found.shape))
        bias: Any = np.ascontiguousarray(np.broadcast_to(found, (*found.shape[:2], S, n)))
    except (TypeError, ValueError):
        got = f"shape {values.shape}" if isinstance(values, np.ndarray) else repr(values)
        raise ValueError(f"{mask!r} gives {got}: must be numbers [{len(new)} or 1, {heads} or 1, {S}, {n}]") from None
    if is_torch(like):
        bias = to_torch(bias).to(like.device)
    return bias


def _positive(mask: Any, name: str, value: Any) -> None:
    if not is_integer(value) or value < 1:
        raise ValueError(f"{name} is {value!r} of {type(mask).__name__}: must be a number of keys, at least 1")
