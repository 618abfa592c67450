"""Pairs of logs, a log and an empty one, of the kinds that a test asks for: what copies of a log are tested with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater as hw

KINDS = ("file", "memory")

every_pair = pytest.mark.parametrize("logs", [(a, b) for a in KINDS for b in KINDS], indirect=True, ids="-".join)


@pytest.fixture
def logs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[hw.Log, hw.Log]]:
    """A log and an empty one, of the kinds asked for."""
    source, target = (
        hw.open_log("memory://" if kind == "memory" else tmp_path / str(number))
        for number, kind in enumerate(request.param)
    )
    with source, target:
        yield source, target
