"""The scene of a matrix instruction: who holds what of A, B and C, and whether C is an A of the next product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvlab.viz.atom import draw_atom

from .scene import Knob, Scene

if TYPE_CHECKING:
    from kvlab.hardware import MmaAtom

Int64 = npt.NDArray[np.int64]


def of_atom(atom: MmaAtom) -> Scene:
    """An MMA atom."""
    parts = {name: _part(atom, name) for name in ("a", "b", "c")}
    from kvlab.hardware import get_arch

    group = atom.warp_size > get_arch(atom.arch).warp_size
    reuse = None
    if atom.a is not None:
        lane, order, turned = reused(atom)
        same = int((lane == _owner(atom, "a")[0]).sum())
        reuse = {"lane": lane.ravel().tolist(), "order": order.tolist(), "turned": turned, "same": same}
    who = "thread" if group else "lane"
    data = {"name": atom.name, "shape": list(atom.shape), "who": who, "parts": parts, "reuse": reuse}
    knobs = {"lane": Knob(who, 5, high=atom.warp_size - 1)}
    if reuse is not None:
        knobs["slide"] = Knob("slide C onto A", 0, high=10)
    return Scene("product", data, knobs, lambda: draw_atom(atom, lane=5))


def reused(atom: MmaAtom) -> tuple[Int64, Int64, bool]:
    """Lanes that hold the elements of C where they are an A: ``[M, K]``; the key of C that each column of A takes,
    ``[K]``; and whether C is turned before (it is the product of keys by queries).

    C stands for as many neighbouring products as fill K columns. The keys keep their order where the lanes match in it;
    else each column of A takes the first key left whose lanes are its own, and the first key left where there is none.

    >>> from kvlab.hardware import get_atom
    >>> lane, order, turned = reused(get_atom("mfma.32x32x16.bf16"))
    >>> order.tolist(), turned
    ([0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15], True)
    """
    m, n, k = atom.shape
    wanted, held = _owner(atom, "a")[0], _owner(atom, "c")[0]
    best = (held[:, :0], np.zeros(0, np.int64), False)
    most = -1
    for turned in (False, True):
        if turned and m != n:
            continue
        have = held.T if turned else held
        keys = np.tile(have, (1, -(-k // have.shape[1])))
        order = _order(keys, wanted)
        same = int((keys[:, order] == wanted).sum())
        if same > most:
            best, most = (keys[:, order], order, turned), same
    return best


def _order(have: Int64, wanted: Int64) -> Int64:
    """The column of ``have`` for each column of ``wanted``."""
    columns = wanted.shape[1]
    if np.array_equal(have[:, :columns], wanted):
        return np.arange(columns)
    left, order = list(range(have.shape[1])), []
    for column in wanted.T:
        match = next((key for key in left if np.array_equal(have[:, key], column)), left[0])
        order.append(match)
        left.remove(match)
    return np.array(order, np.int64)


def _owner(atom: MmaAtom, name: str) -> tuple[Int64, Int64]:
    """Lowest lane that holds each element of an operand, and its element there: ``[rows, columns]`` each."""
    count = getattr(atom, f"regs_{name}")
    lane, element = np.meshgrid(np.arange(atom.warp_size)[::-1], np.arange(count), indexing="ij")
    row, column = getattr(atom, name)(lane, element)
    held = np.full((2, *atom.extent(name)), -1, np.int64)
    held[0, row, column], held[1, row, column] = lane, element
    return held[0], held[1]


def _part(atom: MmaAtom, name: str) -> dict[str, Any] | None:
    """An operand as the module takes it; None where no register holds it."""
    if getattr(atom, name) is None:
        return None
    owner, _ = _owner(atom, name)
    count, each = getattr(atom, f"regs_{name}"), max(1, 4 // atom.dtype_of(name).itemsize)
    row, column = getattr(atom, name)(np.arange(atom.warp_size)[:, None], np.arange(count))
    row, column = (np.broadcast_to(places, (atom.warp_size, count)).tolist() for places in (row, column))
    return {
        "rows": owner.shape[0], "columns": owner.shape[1], "lane": owner.ravel().tolist(),
        "registers": [_registers(*places, each) for places in zip(row, column, strict=True)],
    }


def _registers(row: list[int], column: list[int], each: int) -> str:
    """In words: what each 32-bit register of a lane holds."""
    places = [f"[{r},{c}]" for r, c in zip(row, column, strict=True)]
    groups = [" ".join(places[i : i + each]) for i in range(0, len(places), each)]
    told = ", ".join(f"r{number} {group}" for number, group in enumerate(groups[:12]))
    return told + (f", … {len(groups)} registers" if len(groups) > 12 else "")
