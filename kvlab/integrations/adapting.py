"""Parts that adapters share: the caller's names in errors, what kvlab lacks, windows, and the slots of new tokens."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from kvlab.attention.call.checks import check_integers
from kvlab.attention.masks import CausalMask, ChunkedCausalMask, ChunkedMask, Mask, NullMask
from kvlab.common.checks import flag, require, shown

P = ParamSpec("P")
R = TypeVar("R")


def in_names(**theirs: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: the ValueErrors of a function name ``theirs[x]`` where kvlab says x.

    >>> @in_names(seq_lens="cache_seqlens")
    ... def attend():
    ...     raise ValueError("seq_lens[1] is 33: must be 0 to 32")
    >>> attend()
    Traceback (most recent call last):
        ...
    ValueError: cache_seqlens[1] is 33: must be 0 to 32
    """
    word = re.compile(rf"\b({'|'.join(theirs)})\b")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except ValueError as error:
                raise ValueError(word.sub(lambda found: theirs[found[0]], str(error))) from error

        return call

    return decorate


def lacks(why: str, *neutral: Any, **given: Any) -> None:
    """NotImplementedError for an argument ``given`` that is none of ``neutral`` (None where there are none): what kvlab
    lacks, and ``why``.

    >>> lacks("kvlab drops no weights", 0.0, dropout_p=0.1)
    Traceback (most recent call last):
        ...
    NotImplementedError: dropout_p is 0.1: must be 0.0; kvlab drops no weights
    """
    neutral = neutral or (None,)
    for name, value in given.items():
        if not any(value is one or (isinstance(value, int | float | str) and value == one) for one in neutral):
            accepted = " or ".join(map(repr, neutral))
            raise NotImplementedError(f"{name} is {shown(value)}: must be {accepted}; {why}")


def window_of(window_size: Any) -> tuple[int | None, int | None]:
    """``(left, right)`` keys beside that of a query; below 0 becomes None, no bound.

    >>> window_of((-1, 3))
    (None, 3)
    >>> window_of(128)
    Traceback (most recent call last):
        ...
    ValueError: window_size is 128: must be a pair (left, right) of numbers of keys, below 0 for no bound
    """
    try:
        left, right = (operator.index(side) for side in window_size)
    except (TypeError, ValueError):
        accepted = "a pair (left, right) of numbers of keys, below 0 for no bound"
        raise ValueError(f"window_size is {shown(window_size)}: must be {accepted}") from None
    return (None if left < 0 else left), (None if right < 0 else right)


def sight(causal: Any, window: tuple[int | None, int | None], chunk: int = 0) -> dict[str, Any]:
    """The keywords ``mask`` and ``window`` of an operation: keys up to the query's own if ``causal`` (aligned at the
    end), in its chunk of ``chunk`` keys if not 0, and in the window.

    >>> sight(True, (None, None)), sight(False, (8, None), chunk=4)
    ({'mask': CausalMask(), 'window': (None, None)}, {'mask': ChunkedMask(chunk=4), 'window': (8, None)})
    """
    mask: Mask
    if flag("causal", causal):
        mask = ChunkedCausalMask(chunk) if chunk else CausalMask()
    else:
        mask = ChunkedMask(chunk) if chunk else NullMask()
    return {"mask": mask, "window": window}


def checked_tensors(needed: str = "", /, **tensors: Any) -> None:
    """ValueError for what is neither None nor a tensor, for None where the name is among the ``needed`` ones, apart by
    spaces, for a nested tensor, and for one that requires grad where grad mode is on.

    >>> checked_tensors("q", q=None, qv=None)
    Traceback (most recent call last):
        ...
    ValueError: q is None: must be a torch tensor
    """
    for name, tensor in tensors.items():
        if tensor is None and name not in needed.split():
            continue
        if not isinstance(tensor, torch.Tensor):
            said = "None" if tensor is None else f"a {type(tensor).__name__}"
            raise ValueError(f"{name} is {said}: must be a torch tensor")
        if tensor.is_nested:
            raise ValueError(f"{name} is a nested tensor: must be a dense one, of ragged rows with their offsets")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires grad: must be detached, or the call under torch.no_grad(); kvlab is for inference"
            )


def checked_integers(shape: tuple[int, ...] | None = None, form: str = "", **tensors: Any) -> None:
    """ValueError for what is neither None nor a tensor of integers, of ``shape``, described by ``form``, where given.

    >>> checked_integers((2,), "[B = 2]", cache_batch_idx=torch.ones(3).int())
    Traceback (most recent call last):
        ...
    ValueError: cache_batch_idx has shape (3,): must be [B = 2]
    """
    checked_tensors(**tensors)
    for name, tensor in tensors.items():
        if tensor is not None:
            check_integers(name, tensor)
            require(shape is None or tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}", form)


def in_sight(*tensors: torch.Tensor) -> bool:
    """Tells whether values may be looked at: no tensor is on a GPU, which would be waited for, and nothing is traced.

    >>> in_sight(torch.zeros(1))
    True
    """
    return not (torch.compiler.is_compiling() or any(tensor.is_cuda for tensor in tensors))


def rows_of_starts(starts: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(sequence, number)`` of each of ``total`` tokens of sequences one after the other, int64: without waiting for a
    GPU. Tokens past the last start belong to no sequence: -1.

    >>> [x.tolist() for x in rows_of_starts(torch.tensor([0, 2, 2, 3]), 4)]
    [[0, 0, 2, -1], [0, 1, 0, 0]]
    """
    token = torch.arange(total, device=starts.device)
    sequence = torch.searchsorted(starts[1:].long().contiguous(), token, right=True)
    none = sequence >= starts.shape[0] - 1
    number = token - starts.long()[sequence.clamp(max=starts.shape[0] - 1)]
    return sequence.masked_fill(none, -1), number.masked_fill(none, 0)


def slots_of(
    block_table: torch.Tensor, sequence: torch.Tensor | None, position: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Slots of tokens at ``position`` ``[T]`` of their ``sequence``, or, with None, ``[B, n]`` of each; negative, which
    a store skips, for a token of no sequence, of no page and past the row of its table.

    >>> table = torch.tensor([[3, 1], [0, 5]])
    >>> slots_of(table, torch.tensor([0, 1, 1, -1]), torch.tensor([17, 3, 32, 0]), 16).tolist()
    [17, 3, -1, -1]
    >>> slots_of(table, None, torch.tensor([[17, 18], [31, 32]]), 16).tolist()
    [[17, 18], [95, -1]]
    """
    column = torch.div(position, page_size, rounding_mode="floor")
    known = column.clamp(0, block_table.shape[1] - 1)
    if sequence is None:
        inside, page = column == known, block_table.long().gather(1, known)
    else:
        inside, page = (column == known) & (sequence >= 0), block_table.long()[sequence, known]
    return torch.where(inside, page * page_size + position % page_size, -1)
