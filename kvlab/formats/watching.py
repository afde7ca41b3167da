"""A paged cache under watch: unused slots are poisoned, and an audit follows each step of an engine."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from kvlab.common.arrays import on_gpu, to_numpy
from kvlab.common.checks import require
from kvlab.memory import POISON

from .audits import Audit, Mask, audit, bytewise, check_array, format_of_cache, in_numpy
from .format import Format


class AuditFailure(AssertionError):
    """Flaws that a :class:`Watch` has found; the message is the report."""


class Watch:
    """A cache whose unused slots are poisoned, looked at after each step of an engine.

    cache, table, lengths, how    as of :func:`audit`; ``cache`` is writable and contiguous, and shared, on a GPU too

    Slots that are freed are poisoned at the next :meth:`step`, so that a late reader gets NaN. 4-bit fields whose
    slots share a byte are left alone. :attr:`last` are table and lengths of the last step that was right.

    >>> pages = np.zeros((4, 2, 1, 8), np.float16)
    >>> watch = Watch(pages, [[1, -1]], [1])
    >>> pages[1, 1] = 1.0                  # the token of the next step
    >>> watch.step([[1, -1]], [2])
    Audit(nothing is wrong; 2 of 8 slots hold tokens)
    >>> pages[3, 0, 0, 2] = 5.0
    >>> watch.step([[1, -1]], [2])
    Traceback (most recent call last):
        ...
    kvlab.formats.watching.AuditFailure: stray: k of page 3, slot 0 was written, and holds no token
    """

    def __init__(self, cache: Any, table: Any, lengths: Any, **how: Any) -> None:
        given = how.pop("format", None)
        self.format: Format = format_of_cache(cache) if given is None else given
        self._flat, self._how, self._cache = self._shared(cache), how, cache
        first = audit(cache, table, lengths, format=self.format, **how)
        self._empty = np.zeros_like(first.used)
        self._keep(table, lengths, first.used)

    def _shared(self, cache: Any) -> Any:
        """The cache's bytes: NumPy's, or a tensor's on a GPU."""
        check_array(cache)
        array: Any = cache if on_gpu(cache) else to_numpy(cache, "cache")
        fits = array.is_contiguous() if on_gpu(cache) else array.flags.c_contiguous and array.flags.writeable
        require(
            fits, "cache is not contiguous, or read-only", "contiguous and writable: unused slots are poisoned in it",
        )
        if on_gpu(cache):
            return array.detach().reshape(-1).view(sys.modules["torch"].uint8)
        return array.reshape(-1).view(np.uint8)

    def step(self, table: Any, lengths: Any) -> Audit:
        """The audit after a step. Raises :class:`AuditFailure` with the report where something is wrong."""
        found = audit(self._cache, table, lengths, format=self.format, poisoned=self._empty, **self._how)
        if not found:
            raise AuditFailure(found.report())
        self._keep(table, lengths, found.used)
        return found

    def _keep(self, table: Any, lengths: Any, used: Mask) -> None:
        """Keep table and lengths, which were right, and poison the slots that are newly without a token."""
        self.last = (np.array(in_numpy(table, "table")), np.array(in_numpy(lengths, "lengths")))
        page, slot = np.nonzero(~used & ~self._empty)
        self._empty = ~used
        for field in self.format.fields:
            if "slot" not in field.axes or field.group("slot") != 1:
                continue
            plain = bytewise(field)
            at = plain.base + plain.table("page", used.shape[0])[page] + plain.table("slot", used.shape[1])[slot]
            for axis in ("copy", "layer", "head", "dim"):
                at = np.add.outer(at, plain.table(axis)[:: max(plain.group(axis), 1)]).ravel()
            where = (at[:, None] // 8 + np.arange(plain.type.bits // 8)).ravel()
            if on_gpu(self._flat):
                where = sys.modules["torch"].from_numpy(where).to(self._flat.device)
            self._flat[where] = POISON
