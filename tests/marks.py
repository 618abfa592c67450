"""The covers mark: it must name a row of docs/coverage.md. And what needs Spark is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.cli.coverage import read_rows

CHECKOUT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a covers mark that names no row of docs/coverage.md: it would count for nothing. What starts Spark is slow."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
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
