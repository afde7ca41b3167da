"""Splitting of a sequence's keys over programs that share them."""

from __future__ import annotations

import operator

from kvlab.common.checks import shown

MIN_SPLIT_KEYS = 256
MAX_SPLITS = 64
INVARIANT_SPLIT_KEYS = 2048


def check_splits(num_splits: object) -> int | None:
    """``num_splits`` as an int, None as it is; ValueError for what is no integer from 1 to 64.

    >>> check_splits(3), check_splits(None)
    (3, None)
    >>> check_splits(2.0)
    Traceback (most recent call last):
        ...
    ValueError: num_splits is 2.0: must be an integer from 1 to 64
    """
    if num_splits is None:
        return None
    try:
        number = 0 if isinstance(num_splits, bool) else operator.index(num_splits)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if not 1 <= number <= MAX_SPLITS:
        raise ValueError(f"num_splits is {shown(num_splits)}: must be an integer from 1 to {MAX_SPLITS}")
    return number


def choose_splits(programs: int, max_keys: int, places: int) -> int:
    """Number of splits of a sequence's keys, where unsplit ``programs`` meet a device with ``places`` for them.

    One where the programs fill 0.6 of the places; otherwise the fewest within 0.95 of the best use of them, each of at
    least 256 keys.

    >>> choose_splits(8, 32768, 396), choose_splits(8, 1024, 396), choose_splits(300, 32768, 396)
    (47, 4, 1)
    """
    if programs == 0 or programs >= 0.6 * places:
        return 1
    most = _most(max_keys)
    use = [programs * n / places / -(-programs * n // places) for n in range(1, most + 1)]
    return 1 + next(i for i, u in enumerate(use) if u >= 0.95 * max(use))


def fitting_splits(programs: int, max_keys: int, places: int) -> int:
    """Number of splits of a sequence's keys for which all programs have a place at once; each has at least 256 keys.

    >>> fitting_splits(8, 32768, 132), fitting_splits(8, 1024, 132), fitting_splits(300, 32768, 132)
    (16, 4, 1)
    """
    return max(1, min(_most(max_keys), places // max(programs, 1)))


def _most(max_keys: int) -> int:
    return max(1, min(MAX_SPLITS, max_keys // MIN_SPLIT_KEYS))


def invariant_splits(max_keys: int) -> int:
    """Number of splits of a sequence's keys, whatever the batch and the device: one for 2048 that its table holds.

    >>> invariant_splits(1000), invariant_splits(32768), invariant_splits(1 << 20)
    (1, 16, 64)
    """
    return max(1, min(MAX_SPLITS, max_keys // INVARIANT_SPLIT_KEYS))


def decode_splits(num_splits: object, programs: int, max_keys: int, places: int, *, batch_invariant: bool) -> int:
    """Number of splits of a sequence's keys: ``num_splits``, which ``check_splits`` checks, or, where that is None, as
    ``invariant_splits`` or ``choose_splits`` say.

    >>> [decode_splits(n, 8, 32768, 396, batch_invariant=invariant) for n, invariant in ((3, True), (None, True))]
    [3, 16]
    """
    asked = check_splits(num_splits)
    if asked is not None:
        return asked
    return invariant_splits(max_keys) if batch_invariant else choose_splits(programs, max_keys, places)
