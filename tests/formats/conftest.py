"""Fixtures that kvlab has for the tests of engines, used by its own."""

from __future__ import annotations

from kvlab.integrations.pytest_fixtures import kv_watch as kv_watch
