"""Top-level modes of a layout: put behind or before, exchanged, taken together."""

from __future__ import annotations

from kvlab.common.checks import shown
from kvlab.layout.algebra.checked import need_layouts
from kvlab.layout.algebra.int_tuple import as_int
from kvlab.layout.algebra.layout import Layout
from kvlab.layout.algebra.operations import make_layout

_ONE = Layout(1, 0)


def append(layout: Layout, mode: Layout = _ONE, rank: int | None = None) -> Layout:
    """``layout`` with ``mode`` behind its modes, as often as ``rank`` asks for (once if None).

    >>> append(Layout("(4,8):(8,1)"), Layout("3:32")), append(Layout("4:2"), rank=3)
    (Layout("(4,8,3):(8,1,32)"), Layout("(4,1,1):(2,0,0)"))
    """
    modes = _repeated("append", layout, mode, rank)
    return make_layout(*layout.modes, *modes)


def prepend(layout: Layout, mode: Layout = _ONE, rank: int | None = None) -> Layout:
    """``layout`` with ``mode`` before its modes, as often as ``rank`` asks for (once if None).

    >>> prepend(Layout("(4,8):(8,1)"), Layout("3:32"))
    Layout("(3,4,8):(32,8,1)")
    """
    return make_layout(*_repeated("prepend", layout, mode, rank), *layout.modes)


def replace(layout: Layout, index: int, mode: Layout) -> Layout:
    """``layout`` with ``mode`` in the place of its mode ``index``.

    >>> replace(Layout("(4,8):(8,1)"), 0, Layout("3:32"))
    Layout("(3,8):(32,1)")
    """
    need_layouts("replace", layout, mode)
    index = _place("index", index, layout.rank - 1, layout)
    return make_layout(*layout.modes[:index], mode, *layout.modes[index + 1 :])


def group(layout: Layout, begin: int, end: int) -> Layout:
    """``layout`` with its modes from ``begin`` to before ``end`` as one mode.

    >>> group(Layout("(4,3,2):(1,8,4)"), 0, 2)
    Layout("((4,3),2):((1,8),4)")
    """
    need_layouts("group", layout)
    begin = _place("begin", begin, layout.rank, layout)
    end = _place("end", end, layout.rank, layout)
    if end <= begin:
        raise ValueError(f"end is {end}: must be past begin {begin}, a mode of none has no layout")
    modes = layout.modes
    return make_layout(*modes[:begin], make_layout(*modes[begin:end]), *modes[end:])


def _repeated(operation: str, layout: Layout, mode: Layout, rank: int | None) -> tuple[Layout, ...]:
    need_layouts(operation, layout, mode)
    if rank is None:
        return (mode,)
    if as_int(rank, "rank") < layout.rank:
        raise ValueError(f"rank is {rank}: must be at least the {layout.rank} of {layout}")
    return (mode,) * (rank - layout.rank)


def _place(name: str, value: int, most: int, layout: Layout) -> int:
    if not 0 <= as_int(value, name) <= most:
        raise ValueError(f"{name} is {shown(value)}: must be 0 to {most} in {layout}")
    return value
