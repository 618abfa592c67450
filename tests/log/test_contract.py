"""The contract of a log, on every backend there is."""

from __future__ import annotations

from pathlib import Path

import pytest

import headwater
from headwater.log.log import Log
from headwater.log.memory.store import MemoryStore
from headwater.model.clock import system_clock
from headwater.testing.contracts.case import OpenLog
from headwater.testing.contracts.log import WholeLogContract
from headwater.testing.contracts.queues.queue import WholeQueueContract


def test_every_test_of_the_contract_is_run_and_says_its_rule() -> None:
    """Two parts with a test of the same name would hide one of them."""
    contracts = {*WholeLogContract.__mro__, *WholeQueueContract.__mro__}
    parts = [part for part in contracts if part.__module__.startswith("headwater.")]
    tests = [(name, test) for part in parts for name, test in vars(part).items() if name.startswith("test")]
    assert len({name for name, _ in tests}) == len(tests) > 90
    assert not [name for name, test in tests if not test.__doc__]


class TestFileLog(WholeLogContract):
    """Acknowledged means on disk."""

    backend = "file"

    @pytest.fixture
    def open_log(self, tmp_path: Path) -> OpenLog:
        return lambda: headwater.open_log(str(tmp_path / "log"))


class TestFileLogWithoutFsync(WholeLogContract):
    """Acknowledged means with the operating system."""

    backend = "file"

    @pytest.fixture
    def open_log(self, tmp_path: Path) -> OpenLog:
        return lambda: headwater.open_log(f"file://{tmp_path}/log", durability="os")


class TestMemoryLog(WholeLogContract):
    """Handles share one store: nothing outlives it."""

    backend = "memory"

    @pytest.fixture
    def open_log(self) -> OpenLog:
        store = MemoryStore(clock=system_clock)
        return lambda: Log(store, "fsync", system_clock)


class TestFileQueues(WholeQueueContract):
    """Queues over a folder, shared by handles as by processes."""

    backend = "file"

    @pytest.fixture
    def open_log(self, tmp_path: Path) -> OpenLog:
        return lambda: headwater.open_log(str(tmp_path / "log"), durability="os")


class TestMemoryQueues(WholeQueueContract):
    """Queues in memory."""

    backend = "memory"

    @pytest.fixture
    def open_log(self) -> OpenLog:
        store = MemoryStore(clock=system_clock)
        return lambda: Log(store, "fsync", system_clock)
