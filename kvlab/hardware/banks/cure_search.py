"""Cures of bank conflicts, found by counting: the smallest swizzle or padding of a tile, the best order of modes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kvlab.common.checks import shown
from kvlab.common.drawn import Drawn
from kvlab.hardware.arch import Arch, get_arch
from kvlab.layout import ComposedLayout, Layout, Swizzle, make_ordered_layout
from kvlab.layout.algebra.int_tuple import flatten
from kvlab.layout.encodings import (
    NVMMASharedLayout,
    PaddedSharedLayout,
    SharedEncoding,
    SharedLinearLayout,
    SwizzledSharedLayout,
)
from kvlab.memory import as_dtype

from .tile_access import Access, LaneAccess, PlacedTile, accesses_of, layout_of, tile_of

MOST_MODES = 5
"""Of a tile whose order is searched: 120 orders."""


class Candidate(NamedTuple):
    """One change of a tile that was counted: what it is, and the wavefronts of all instructions under it.

    >>> Candidate(Swizzle(1, 3, 3, "bf16"), 16)
    Candidate(change=Swizzle(1, 3, 3, unit='bfloat16'), wavefronts=16)
    """

    change: Any
    wavefronts: int


@dataclass(frozen=True, eq=False, repr=False)
class Cure(Drawn):
    """Change of a tile that frees its accesses of bank conflicts, with the proof: every candidate that was counted.

    change       what to do: a swizzle, a padding in elements, an order of modes; of a Triton encoding, the encoding
    layout       the tile with it, of the kind that was given
    wavefronts   of all instructions of all accesses under it; ``ideal``: the least that they could take
    given        wavefronts of the tile as it was given
    candidates   what was counted, in the order of the search, each a :class:`Candidate`; :meth:`table` prints them
    before, after  the instruction with the most conflicts in the tile as given, and the same one in ``layout``; None
                   where cp.async alone touches the tile, whose passes have no picture
    extra_bytes  of shared memory that ``layout`` reaches further than the tile as given

    It draws itself: both instructions side by side.

    >>> from kvlab.hardware import best_swizzle
    >>> cure = best_swizzle((16, 16), "fp16", "ldmatrix.x4")
    >>> print(cure.table(), cure.before.wavefronts, cure.after.wavefronts, sep=chr(10))
    Sw<0,3,0> (float16)       8
    Sw<1,3,1> (float16)       8
    Sw<1,4,1> (float16)       8
    Sw<1,5,1> (float16)       8
    Sw<1,3,2> (float16)       8
    Sw<1,4,2> (float16)       8
    Sw<1,5,2> (float16)       8
    Sw<1,3,3> (float16)       4
    8
    4
    """

    change: Any
    layout: Any
    wavefronts: int
    ideal: int
    given: int
    candidates: tuple[Candidate, ...]
    before: Any
    after: Any
    extra_bytes: int

    @property
    def conflicts(self) -> int:
        """Passes more than the least: 0 where the change does what was asked."""
        return self.wavefronts - self.ideal

    @property
    def tried(self) -> int:
        """Number of candidates counted that have conflicts."""
        return sum(one.wavefronts > self.ideal for one in self.candidates)

    def table(self) -> str:
        """The proof as lines of text: each candidate and its wavefronts."""
        names = [str(one.change) for one in self.candidates]
        width = max(map(len, names))
        rows = zip(names, self.candidates, strict=True)
        return "\n".join(f"{name:{width}}  {one.wavefronts:6}" for name, one in rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"


class BestSwizzle(Cure):
    """Result of :func:`best_swizzle`, with the counts that prove it (:class:`Cure`). ``str`` tells it in words.

    >>> from kvlab.hardware import best_swizzle
    >>> found = best_swizzle((16, 64), "bf16", "ldmatrix.x4")
    >>> str(found.swizzle), found.wavefronts, found.ideal, found.unswizzled, found.conflicts
    ('Sw<3,3,3> (bfloat16)', 16, 16, 128, 0)
    """

    @property
    def swizzle(self) -> Any:
        """The swizzle, in elements of the tile's dtype; of a Triton encoding the encoding that has it."""
        return self.change

    @property
    def unswizzled(self) -> int:
        """Wavefronts without any swizzle."""
        return self.candidates[0].wavefronts if _is_plain(self.candidates[0].change) else self.given

    def __str__(self) -> str:
        if not _is_plain(self.candidates[0].change):
            return (
                f"{self.swizzle}: {self.wavefronts} wavefronts; no smaller swizzle makes a tile that a descriptor of "
                "wgmma can name."
            )
        if self.conflicts:
            return (
                f"{self.swizzle}: {self.wavefronts} wavefronts where {self.ideal} would be ideal; without it "
                f"{self.unswizzled}. None of {self.tried} swizzles is free of conflicts; this one has the fewest."
            )
        return (
            f"{self.swizzle}: {_wavefronts(self.wavefronts)}, the least possible; without it {self.unswizzled}."
            f"{_smaller(self.tried, 'swizzle')}"
        )


class BestPadding(Cure):
    """Result of :func:`best_padding`, with the counts that prove it (:class:`Cure`). ``str`` tells it in words.

    >>> from kvlab.hardware import best_padding
    >>> found = best_padding((16, 64), "bf16", "ldmatrix.x4")
    >>> found.padding, found.extra_bytes, found.tried
    (8, 240, 1)
    """

    @property
    def padding(self) -> Any:
        """Elements after each row, 0 for none; of a Triton encoding the padded encoding."""
        return self.change

    def __str__(self) -> str:
        many = f"{self.padding} elements after each row" if isinstance(self.padding, int) else str(self.padding)
        cost = f"{_wavefronts(self.wavefronts)}, {{}}; as it is {self.given}. It takes {self.extra_bytes} bytes more."
        if self.conflicts:
            return (
                f"{many}: {cost.format(f'where {self.ideal} would be ideal')} None of {self.tried} paddings is free "
                "of conflicts; this one has the fewest."
            )
        return f"{many}: {cost.format('the least possible')}{_smaller(self.tried, 'padding')}"


class BestOrder(Cure):
    """Result of :func:`best_order`, with the counts of all orders (:class:`Cure`). ``str`` tells it in words.

    >>> from kvlab.hardware import best_order
    >>> found = best_order((32, 32), "fp32", ("ld.shared.b32", np.arange(32), 0))
    >>> found.order, str(found.layout), [one.wavefronts for one in found.candidates]
    ((0, 1), '(32,32):(1,32)', [32, 1])
    """

    @property
    def order(self) -> tuple[int, ...]:
        """The modes, fastest first."""
        return tuple(self.change)

    def __str__(self) -> str:
        others = ", ".join(f"{one.change} {one.wavefronts}" for one in self.candidates if one.change != self.change)
        least = "the least possible" if not self.conflicts else f"where {self.ideal} would be ideal"
        return (
            f"order {self.order}, fastest first: {self.wavefronts} wavefronts, {least}; "
            f"{f'the other orders: {others}' if others else 'no other order keeps the pieces of lanes together'}."
        )


def best_swizzle(
    tile: Any, dtype: Any, access: Any, *, arch: str | Arch = "sm_90", base: int = 0, shape: Any = None
) -> BestSwizzle:
    """The smallest swizzle under which no access to a shared-memory tile has a bank conflict.

    Parameters
    ----------
    tile : the (rows, columns) of a row-major tile, its :class:`~kvlab.layout.Layout`, in elements, or a
        :class:`~kvlab.layout.ComposedLayout`, whose swizzle is replaced; or an encoding of Triton for shared memory
        with its ``shape``.
    dtype : of an element.
    access : what reads or writes it; one access or a list of them, all of which the swizzle must serve:
        the name of a matrix instruction (``"ldmatrix.x4"``, ``"stmatrix.x2"``, ``.trans`` or not), which visits the
        whole tile in blocks of 16 x 16 (x4), 16 x 8 (x2) or 8 x 8 (x1), lane l with row l % 16 and 16-byte column
        l // 16, a tile of 8 rows in blocks of 8 x 32 and 8 x 16; ``"wgmma"``, which reads it through a descriptor;
        ``(instruction, rows, columns)``, int arrays ``[..., lanes]`` of each lane's first element; a
        :class:`~kvlab.hardware.LaneAccess`, which masks lanes, copies by cp.async, and has a tile of any number of
        modes; or a register layout, an encoding or linear layout of Triton or CuTe's layout of (threads, values), alone
        or as ``("ld", layout)``, ``("st", layout)``: plain loads or stores, as wide as the elements of a thread lie
        together in the tile without a swizzle.
    arch : its banks and phases; ``base`` : byte address of the tile (hardware swizzles read absolute addresses).

    "Smallest" is fewest bits, then the shortest reach (shift), then the finest piece. Pieces are at least as large as
    the widest access, and the tile must map onto itself; with wgmma among the accesses it must be one that a descriptor
    can name. Of encodings the same class is searched: ``(vec, per_phase, max_phase)`` of a SwizzledSharedLayout, the
    width of an NVMMASharedLayout; of others swizzles are put over the offsets they have. All candidates before the
    answer are counted, by the rule that :func:`~kvlab.hardware.count_wavefronts` documents: that is the proof,
    ``candidates`` of the result. Where no swizzle is free of conflicts, the one with the fewest is returned
    (``conflicts`` is not 0).

    >>> [str(best_swizzle((16, pitch), "fp16", "ldmatrix.x4").swizzle) for pitch in (16, 32, 64, 128)]
    ['Sw<1,3,3> (float16)', 'Sw<2,3,3> (float16)', 'Sw<3,3,3> (float16)', 'Sw<3,3,4> (float16)']
    >>> print(best_swizzle((32, 32), "fp32", ("ld.shared.b32", np.arange(32), 0)))
    Sw<5,0,5> (float32): 1 wavefront, the least possible; without it 32. All 75 smaller swizzles have conflicts.
    >>> from kvlab.layout.encodings import BlockedLayout, SwizzledSharedLayout
    >>> plain, columns = SwizzledSharedLayout(1, 1, 1, [1, 0]), BlockedLayout([1, 1], [32, 1], [1, 1], [0, 1])
    >>> best_swizzle(plain, "fp32", columns, shape=(32, 32)).swizzle
    SwizzledSharedLayout(vec=4, per_phase=1, max_phase=8, order=(1, 0), cga_layout=())
    """
    arch, dtype = get_arch(arch), as_dtype(dtype)
    given = tile_of(tile, dtype.itemsize, arch, base, shape)
    if isinstance(tile, PaddedSharedLayout):
        raise ValueError(f"tile is {tile}: must have no padding, best_padding searches those")
    if isinstance(tile, NVMMASharedLayout | SwizzledSharedLayout):
        plain = next(_same_class(tile, given, 1))[1]
        accesses = accesses_of(access, plain)
        piece = _piece(accesses, given)
        found: BestSwizzle = _search(BestSwizzle, given, accesses, _same_class(tile, given, piece), plain)
        return replace(found, layout=found.change)
    plain = given if isinstance(tile, SharedEncoding) else tile_of(_unswizzled(tile), dtype.itemsize, arch, base, None)
    accesses = accesses_of(access, plain)
    found = _search(BestSwizzle, given, accesses, _swizzled(plain, dtype, _piece(accesses, plain)), plain)
    swizzle = found.change
    if isinstance(tile, SharedEncoding):
        offsets = (swizzle.in_bytes()(plain.address) - base) // dtype.itemsize
        layout: Any = SharedLinearLayout.from_offsets(offsets)
    else:
        layout = ComposedLayout(layout_of(tile), swizzle, tile.offset if isinstance(tile, ComposedLayout) else 0)
    return replace(found, layout=layout)


def best_padding(
    tile: Any, dtype: Any, access: Any, *, arch: str | Arch = "sm_90", base: int = 0, shape: Any = None
) -> BestPadding:
    """The smallest padding under which no access to a shared-memory tile has a bank conflict.

    Arguments are those of :func:`best_swizzle`. A tile is (rows, columns), or a flat :class:`~kvlab.layout.Layout` with
    one contiguous mode: elements are added to the stride of the other, from none to a row of all banks. Of an encoding
    of Triton for shared memory the candidates are padded layouts: after every ``interval`` elements (powers of two from
    a row on) a power of two of empty ones, the smallest allocation first. A padding that would tear apart or misalign
    what a lane moves at once is no candidate.

    ValueError for a ComposedLayout, whose swizzle does what a padding does, and for wgmma, whose descriptor has no
    padding.

    >>> print(best_padding((16, 64), "bf16", "ldmatrix.x4"))
    8 elements after each row: 16 wavefronts, the least possible; as it is 128. It takes 240 bytes more. \
The only smaller padding has conflicts.
    >>> best_padding((32, 32), "fp32", ("ld.shared.b32", np.arange(32), 0)).layout
    Layout("(32,32):(33,1)")
    """
    arch, dtype = get_arch(arch), as_dtype(dtype)
    if isinstance(tile, ComposedLayout):
        raise ValueError(f"tile is {tile}: must have no swizzle, which does what a padding does")
    if "wgmma" in (access if isinstance(access, list) else [access] if isinstance(access, str) else []):
        raise ValueError("access is 'wgmma': must be another, a descriptor has no padding")
    given = tile_of(tile, dtype.itemsize, arch, base, shape)
    plain = given
    if isinstance(tile, SharedEncoding):
        plain, trials, layouts = _padded_encodings(tile, given)
    else:
        trials, layouts = _padded_rows(layout_of(tile), given, base)
    accesses = accesses_of(access, plain)
    found: BestPadding = _search(BestPadding, given, accesses, trials, plain)
    return replace(found, layout=layouts(found.change))


def best_order(
    tile: Any, dtype: Any, access: Any, *, arch: str | Arch = "sm_90", base: int = 0, shape: Any = None
) -> BestOrder:
    """The order of a tile's modes with the fewest wavefronts; all orders are counted.

    Arguments are those of :func:`best_swizzle`. Modes of a (rows, columns) or a :class:`~kvlab.layout.Layout` are its
    leaves, from the left, laid out dense; a swizzle that a ComposedLayout has stays. Of a SwizzledSharedLayout the
    ``order`` is searched. Register layouts move pieces as wide as each order allows. Of equals the first is taken: the
    row-major order, then the permutations in their order. An order that would tear apart what ``(instruction, rows,
    columns)`` move at once is no candidate. ValueError for wgmma (its major is the operand's), other encodings, and
    above 5 modes.

    >>> from kvlab.layout.encodings import BlockedLayout
    >>> rows_of_four = BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    >>> print(best_order((32, 32), "fp32", [("st", rows_of_four), ("ld.shared.b32", 0, np.arange(32))]))
    order (1, 0), fastest first: 33 wavefronts, the least possible; the other orders: (0, 1) 288.
    """
    arch, dtype = get_arch(arch), as_dtype(dtype)
    if access == "wgmma" or (isinstance(access, list) and "wgmma" in [one for one in access if isinstance(one, str)]):
        raise ValueError("access is 'wgmma': must be another, the major of an operand is part of the instruction")
    given = tile_of(tile, dtype.itemsize, arch, base, shape)
    explicit = [one for one in (access if isinstance(access, list) else [access])
                if isinstance(one, tuple) and (isinstance(one, LaneAccess) or len(one) == 3)]
    fixed = accesses_of(explicit, given) if explicit else []
    accesses_of(access, given)

    def counted() -> Iterator[tuple[Any, Any, PlacedTile, list[Access]]]:
        for order, layout in _orders(tile):
            trial = tile_of(layout, dtype.itemsize, arch, base, shape)
            if trial.keeps(fixed, given):
                yield order, layout, trial, accesses_of(access, trial)

    trials = list(counted())
    passes = [trial.passes(accesses) for _, _, trial, accesses in trials]
    if not trials:
        raise ValueError(f"tile is {shown(tile)}: no dense order keeps together what lanes of the access move at once")
    best = min(range(len(trials)), key=lambda n: (passes[n][0], n))
    order, layout, after, accesses = trials[best]
    before = given.instruction(given.worst(accesses_of(access, given)))
    candidates = tuple(Candidate(one[0], total) for one, (total, _) in zip(trials, passes, strict=True))
    worst = after.instruction(after.worst(accesses))
    total, ideal = passes[best]
    now = given.passes(accesses_of(access, given))[0]
    more = int(after.address.max() - given.address.max())
    return BestOrder(order, layout, total, ideal, now, candidates, before, worst, more)


def _wavefronts(count: int) -> str:
    return f"{count} wavefront{'s' * (count != 1)}"


def _smaller(tried: int, what: str) -> str:
    if tried < 2:
        return f" The only smaller {what} has conflicts." if tried else ""
    return f" All {tried} smaller {what}s have conflicts."


def _search(
    kind: Any, given: PlacedTile, accesses: list[Access], trials: Iterable[tuple[Any, PlacedTile]], plain: PlacedTile
) -> Any:
    """Counts candidates until one has no conflict: of those that keep together what a lane moves at once, as ``plain``
    does; a tile that wgmma reads must be one that a descriptor can name."""
    named = any(access.name == "wgmma" for access in accesses)
    best: tuple[int, Any, PlacedTile] | None = None
    candidates, ideal = [], 0
    for change, trial in trials:
        if (named and not trial.fits_descriptor()) or not trial.keeps(accesses, plain):
            continue
        total, ideal = trial.passes(accesses)
        candidates.append(Candidate(change, total))
        if best is None or total < best[0]:
            best = (total, change, trial)
        if total == ideal:
            break
    if best is None:
        raise ValueError(
            "access is 'wgmma': no candidate is a tile that a descriptor can name: must be panels of 128, 64, 32 or 16 "
            "bytes, rows one behind the other, at multiples of 8 rows"
            if named else "access: no candidate keeps together and aligned what a lane moves at once"
        )
    total, change, after = best
    worst = given.worst(accesses)
    before, cured = given.instruction(worst), after.instruction(worst)
    now, more = given.passes(accesses)[0], int(after.address.max() - given.address.max())
    return kind(change, None, total, ideal, now, tuple(candidates), before, cured, more)


def _is_plain(change: Any) -> bool:
    """Tells whether a candidate is the tile without a swizzle."""
    if isinstance(change, Swizzle):
        return change.bits == 0
    return 0 in (getattr(change, "swizzle_byte_width", 1), getattr(change, "max_phase", 2) - 1)


def _piece(accesses: list[Access], tile: PlacedTile) -> int:
    """Bytes that must stay together: the widest access, an element at least."""
    return max(tile.size, *(access.nbytes for access in accesses))


def _unswizzled(tile: Any) -> Any:
    return ComposedLayout(tile.layout, None, tile.offset) if isinstance(tile, ComposedLayout) else tile


def _swizzled(plain: PlacedTile, dtype: Any, piece: int) -> Iterator[tuple[Swizzle, PlacedTile]]:
    """Swizzles that move pieces of ``piece`` bytes or more among the banks, smallest first."""
    whole, arch = np.unique(plain.address), plain.arch
    low, high = piece.bit_length() - 1, arch.pass_bytes.bit_length() - 1
    top = (int(whole[-1]) + plain.size - 1).bit_length()
    yield Swizzle(0, low, 0, "byte").to(dtype), plain
    for bits in range(1, high - low + 1):
        for shift in range(bits, top):
            for first in range(low, high - bits + 1):
                swizzle = Swizzle(bits, first, shift, "byte")
                if first + shift + bits <= top and np.isin(swizzle(whole), whole).all():
                    yield swizzle.to(dtype), replace(plain, address=swizzle(plain.address))


def _same_class(tile: Any, given: PlacedTile, piece: int) -> Iterator[tuple[Any, PlacedTile]]:
    """Encodings of the tile's class on its shape, the one without a swizzle first."""
    shape, base = given.address.shape, int(given.address.min())

    def on(encoding: SharedEncoding) -> tuple[Any, PlacedTile]:
        return encoding, replace(given, address=np.asarray(encoding.offsets(shape)) * given.size + base)

    if isinstance(tile, NVMMASharedLayout):
        for width in (0, 32, 64, 128):
            try:
                found = on(replace(tile, swizzle_byte_width=width))
            except ValueError:  # rows shorter than the swizzle
                continue
            yield found
        return
    columns, rows, *_ = *(shape[axis] for axis in tile.order), 1
    vec = max(piece // given.size, 1)
    yield on(SwizzledSharedLayout(vec, 1, 1, tile.order, tile.cga_layout))
    for phases in (1 << bit for bit in range(1, max(columns // vec, 1).bit_length())):
        for per_phase in (1 << bit for bit in range(max(rows // phases, 1).bit_length())):
            for wide in (1 << bit for bit in range(vec.bit_length() - 1, max(columns // phases, 1).bit_length())):
                yield on(SwizzledSharedLayout(wide, per_phase, phases, tile.order, tile.cga_layout))


def _padded_rows(layout: Layout, given: PlacedTile, base: int) -> Any:
    strides, shape = flatten(layout.stride), flatten(layout.shape)
    along = strides.index(1) if len(strides) == 2 and 1 in strides else -1
    if along < 0 or strides[1 - along] < shape[along]:
        raise ValueError(f"tile is {layout}: must have two flat modes, one contiguous and the other its rows")
    pitch = strides[1 - along]

    def padded(more: int) -> Layout:
        return Layout(shape, (pitch + more, 1) if along else (1, pitch + more))

    row = given.arch.pass_bytes // given.size
    trials = ((more, tile_of(padded(more), given.size, given.arch, base, None)) for more in range(row + 1))
    return trials, padded


def _padded_encodings(tile: Any, given: PlacedTile) -> Any:
    """The dense tile, padded encodings over it by their size, and the encoding of a change."""
    shape, base = given.address.shape, int(given.address.min())
    steps = given.steps
    order = getattr(tile, "order", tuple(sorted(range(len(shape)), key=lambda mode: (shape[mode] == 1, steps[mode]))))
    if any(n & (n - 1) for n in shape):
        raise ValueError(f"shape is {shape}: must be powers of two")
    dense = SwizzledSharedLayout(1, 1, 1, order)
    columns, size = shape[order[0]], given.size
    most = given.arch.pass_bytes // size
    pairs = itertools.product(
        (1 << bit for bit in range(columns.bit_length() - 1, math.prod(shape).bit_length() - 1)),
        (1 << bit for bit in range(most.bit_length())),
    )
    padded = [PaddedSharedLayout.with_identity_for([pair], shape, order) for pair in pairs]
    padded.sort(key=lambda one: (one.size, one.interval_padding_pairs))

    def on(encoding: SharedEncoding) -> tuple[Any, PlacedTile]:
        return encoding, replace(given, address=np.asarray(encoding.offsets(shape)) * size + base)

    return on(dense)[1], (on(one) for one in (dense, *padded)), lambda change: change


def _orders(tile: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Orders, fastest mode first, and the tile in each; the row-major one first."""
    if isinstance(tile, SwizzledSharedLayout):
        yield from ((turned, replace(tile, order=turned)) for turned in ((1, 0), (0, 1)))
        return
    if isinstance(tile, SharedEncoding):
        raise ValueError(f"tile is {tile}: must be a SwizzledSharedLayout, a layout, or (rows, columns)")
    layout = layout_of(tile)
    modes = len(flatten(layout.shape))
    if modes > MOST_MODES:
        raise ValueError(f"tile is {layout}: must have at most {MOST_MODES} modes")
    for order in itertools.permutations(reversed(range(modes))):
        places = iter(np.argsort(order).tolist())
        dense = make_ordered_layout(layout.shape, _like(layout.shape, places))
        yield order, ComposedLayout(dense, tile.outer, tile.offset) if isinstance(tile, ComposedLayout) else dense


def _like(shape: Any, leaves: Iterator[int]) -> Any:
    """A tree of the form of ``shape`` with these leaves."""
    return tuple(_like(part, leaves) for part in shape) if isinstance(shape, tuple) else next(leaves)
