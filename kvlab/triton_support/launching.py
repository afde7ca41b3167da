"""Launches of a kernel that was launched before: the compiled kernel is called, what depends on no address is kept.

What Triton does for each launch (it binds the arguments by name, works out the type and the alignment of each, and
looks the compiled kernel up) takes longer on the host than the launch. A launcher that is given ``again``, what is kept
for calls of one kind (:class:`~kvlab.attention.call.kinds.Kind`), launches ``kernel[grid](*pointers, *numbers,
**constants)`` as

    if not relaunched(kernel, pointers, again):
        first_launch(kernel, grid, pointers, again)(*numbers, **constants)

Grid, numbers and constants are the same for all calls of a kind, and so are the pointers' types and alignments. What
Triton's knobs say when a kernel is compiled holds for the launches of the kind that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

Again = dict[Any, Any] | None
"""Function of a kernel -> its compiled form with a grid, and the arguments behind the pointers; and what :func:`once`
has kept, by name. None: all are first.
"""


def once(again: Again, name: str, make: Callable[[], T]) -> T:
    """The result of ``make`` at the first launch of a kind, and the same at those that follow.

    >>> again = {}
    >>> [once(again, "sizes", lambda: [size]) for size in (1, 2)], once(None, "sizes", lambda: [3])
    ([[1], [1]], [3])
    """
    if again is None:
        return make()
    if name not in again:
        again[name] = make()
    found: T = again[name]
    return found


def relaunched(kernel: Any, pointers: Sequence[Any], again: Again) -> bool:
    """Launch what :func:`first_launch` has kept of ``kernel``, over these pointers; whether there was any."""
    kept = None if again is None else again.get(kernel.fn)
    if kept is None:
        return False
    run, behind = kept
    run(*pointers, *behind)
    return True


def first_launch(kernel: Any, grid: tuple[int, ...], pointers: Sequence[Any], again: Again) -> Callable[..., None]:
    """Function that launches a kernel with the arguments behind the pointers, constants and options by name, and keeps
    it.
    """

    def launch(*numbers: Any, **constants: Any) -> None:
        compiled = kernel[grid](*pointers, *numbers, **constants)
        if again is not None and hasattr(compiled, "packed_metadata"):  # compiled, not interpreted
            names = kernel.arg_names[len(pointers) + len(numbers) :]
            again[kernel.fn] = compiled[(*grid, 1, 1)[:3]], (*numbers, *(constants[name] for name in names))

    return launch
