"""Marks: `covers` must name a row of docs/coverage.md, what needs Spark is slow, and what may take longest begins first."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.cli.commands.coverage import read_rows

CHECKOUT = Path(__file__).resolve().parents[2]
TIMEOUT_S_MAX = 600.0
"""So long may a test hang that is not in the long tier."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse a covers mark that names no row of docs/coverage.md: it would count for nothing. What starts Spark is slow."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
        if not item.get_closest_marker("bench") and _timeout_s(item) > TIMEOUT_S_MAX:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S_MAX), append=False)
    if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        _put_long_modules_first(items)
    rows = {row.name for row in read_rows(CHECKOUT)}
    unknown = sorted(
        f"{item.nodeid} covers {name!r}"
        for item in items
        for mark in item.iter_markers("covers")
        for name in mark.args
        if name not in rows
    )
    if unknown:
        raise pytest.UsageError("no such row in docs/coverage.md: " + "; ".join(unknown))


def _put_long_modules_first(items: list[pytest.Item]) -> None:
    """Several processes take module by module: a long one that comes last would leave the others idle."""
    longest: dict[Path, float] = {}
    for item in items:
        if not item.get_closest_marker("bench"):
            longest[item.path] = max(longest.get(item.path, 0.0), _timeout_s(item))
    items.sort(key=lambda item: -longest.get(item.path, 0.0))


def _timeout_s(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark is not None and mark.args else 0.0
