"""Fixtures for the tests of an engine: ``pytest_plugins = ["kvlab.integrations.pytest_fixtures"]`` in its conftest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvlab.formats import Watch


@pytest.fixture
def kv_watch() -> Iterator[Callable[..., Watch]]:
    """A function that makes a :class:`kvlab.formats.Watch` of a cache: unused slots hold poison, and each step is
    audited.

    After the test every watch is audited once more, with the table and the lengths of its last step::

        def test_decode(kv_watch):
            watch = kv_watch(engine.cache, engine.table, engine.lengths)
            for _ in range(10):
                engine.step()
                watch.step(engine.table, engine.lengths)
    """
    made: list[Watch] = []

    def watch(cache: Any, table: Any, lengths: Any, **how: Any) -> Watch:
        made.append(Watch(cache, table, lengths, **how))
        return made[-1]

    yield watch
    for one in made:
        one.step(*one.last)
