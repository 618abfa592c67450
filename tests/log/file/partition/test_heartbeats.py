"""Heartbeats: time passes in partitions that nobody appends to; whatever dies or breaks on the way, no event is lost by it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import headwater as hw
from headwater.log.disk.disk import RealDisk
from headwater.log.file.partition import heartbeats
from headwater.log.file.partition.heartbeats import FILE, read_heartbeats
from headwater.log.log import Log
from headwater.log.port.lateness import Heartbeat
from headwater.model.errors import FormatTooNew, InvalidInput, NoAccess
from headwater.testing.crash.points import heartbeat_points

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
NOON_US = int(NOON.timestamp() * 1_000_000)
SECOND = 1_000_000


class Clock:
    """Stands where it is put."""

    def __init__(self) -> None:
        self.now = NOON_US

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["file", "memory"])
def log(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Log]:
    with hw.open_log("memory://" if request.param == "memory" else tmp_path / "log", clock=clock) as log:
        log.create_topic("t", "n BIGINT, at TIMESTAMP", key="n", time="at", partitions=2)
        yield log


def put(log: Log, number: int, second: float) -> int:
    """Appends an event and returns its partition."""
    before = {at: span.stop for at, span in log.offsets("t").items()}
    log.append("t", [{"n": number, "at": NOON + timedelta(seconds=second)}])
    return next(at for at, span in log.offsets("t").items() if span.stop > before[at])


def test_time_passes_where_nothing_is_appended(log: Log) -> None:
    """In all partitions at least so far; never back; and an offset from before knows nothing of it."""
    mine = put(log, 1, 10)
    other = 1 - mine
    assert log.reached("t") == {mine: NOON_US + 10 * SECOND, other: None}
    assert log.heartbeat("t", NOON + timedelta(seconds=20)) == 2
    assert log.reached("t") == {0: NOON_US + 20 * SECOND, 1: NOON_US + 20 * SECOND}
    assert log.heartbeat("t", NOON + timedelta(seconds=15)) == 0
    assert log.store.reached("t", mine, offset=0) < NOON_US
    assert put(log, 1, 5) == mine
    assert log.store.reached("t", mine, offset=2) == NOON_US + 20 * SECOND
    assert log.heartbeat("t", NOON + timedelta(seconds=30)) == 2
    assert log.store.reached("t", mine, offset=1) == NOON_US + 20 * SECOND
    assert log.store.reached("t", mine, offset=2) == NOON_US + 30 * SECOND
    assert [beat.offset for beat in log.store.heartbeats("t", mine)] == [1, 2]


def test_a_partition_that_is_written_to_needs_none(log: Log, clock: Clock) -> None:
    """By the clock of the log: nothing appended for so long."""
    mine = put(log, 1, 0)
    clock.now += 5 * SECOND
    assert log.heartbeat("t", clock.now, idle="10 seconds") == 1
    clock.now += 5 * SECOND
    assert log.heartbeat("t", clock.now, idle="10 seconds") == 2
    assert log.reached("t")[mine] == clock.now


def test_a_heartbeat_that_makes_no_sense_is_refused(log: Log, clock: Clock, tmp_path: Path) -> None:
    """From the far future, for a topic without times, by a reader."""
    with pytest.raises(InvalidInput, match="future_max"):
        log.heartbeat("t", clock.now + 25 * 3600 * SECOND)
    log.create_topic("plain", "n BIGINT")
    with pytest.raises(InvalidInput, match="no event time"):
        log.heartbeat("plain", clock.now)
    if (tmp_path / "log").exists():
        with hw.open_log(tmp_path / "log", read_only=True) as reader, pytest.raises(NoAccess):
            reader.heartbeat("t", clock.now)


def test_a_file_that_has_grown_keeps_what_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each offset, and of those before the first event that is left the greatest."""
    monkeypatch.setattr(heartbeats, "REWRITE_BYTES", 8 + 24 * 10)
    clock = Clock()
    with hw.open_log(tmp_path / "log", clock=clock) as log:
        log.create_topic("t", "at TIMESTAMP", time="at", partitions=1)
        expected = []
        for number in range(50):
            clock.now += SECOND
            if number % 3 == 0:
                log.append("t", [{"at": NOON - timedelta(hours=1)}])
            log.heartbeat("t", clock.now)
            expected = [beat for beat in expected if beat.offset != number // 3 + 1]
            expected.append(Heartbeat(number // 3 + 1, clock.now))
        assert log.store.heartbeats("t", 0) == expected
        assert (tmp_path / "log/topics/t/0" / FILE).stat().st_size < 24 * 30


def test_of_several_for_one_offset_the_last_that_is_whole_counts(tmp_path: Path) -> None:
    """An empty partition may be given thousands of them."""
    clock = Clock()
    with hw.open_log(tmp_path / "log", clock=clock) as log:
        log.create_topic("t", "at TIMESTAMP", time="at", partitions=1)
        for _ in range(3):
            clock.now += SECOND
            log.heartbeat("t", clock.now)
        assert log.store.heartbeats("t", 0) == [Heartbeat(0, NOON_US + 3 * SECOND)]
        path = tmp_path / "log/topics/t/0" / FILE
        data = bytearray(path.read_bytes())
        data[-12] ^= 1
        path.write_bytes(data)
        assert log.store.heartbeats("t", 0) == [Heartbeat(0, NOON_US + 2 * SECOND)]


@pytest.mark.parametrize("how", ["torn", "flipped", "empty"])
def test_a_damaged_heartbeat_counts_as_none(tmp_path: Path, how: str) -> None:
    """Those before it stay, and the next is written behind it."""
    clock = Clock()
    with hw.open_log(tmp_path / "log", clock=clock) as log:
        log.create_topic("t", "at TIMESTAMP", time="at", partitions=1)
        for _ in range(2):
            clock.now += SECOND
            log.append("t", [{"at": NOON}])
            log.heartbeat("t", clock.now)
        path = tmp_path / "log/topics/t/0" / FILE
        data = bytearray(path.read_bytes())
        if how == "flipped":
            data[-12] ^= 1
        path.write_bytes(b"" if how == "empty" else data[:-5] if how == "torn" else data)
        kept = [] if how == "empty" else [NOON_US + SECOND]
        assert [beat.time for beat in log.store.heartbeats("t", 0)] == kept
        clock.now += SECOND
        assert log.heartbeat("t", clock.now) == 1
        assert log.reached("t") == {0: clock.now}


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    """By its number, before anything is read."""
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("t", "at TIMESTAMP", time="at", partitions=1)
        log.heartbeat("t", NOON)
        path = tmp_path / "log/topics/t/0" / FILE
        path.write_bytes(path.read_bytes().replace(b"HWBEAT\x01", b"HWBEAT\x02"))
        with pytest.raises(FormatTooNew, match="newer version"):
            log.reached("t")


_BEGIN_US = 1_700_000_000_000_000
_BEATING = f"""
import sys
import headwater as hw
from headwater.log.file.partition import heartbeats
from headwater.testing.crash.disk import CrashingDisk

heartbeats.REWRITE_BYTES = 24 * 5
log = hw.open_log(sys.argv[1], disk=CrashingDisk(sys.argv[2], nth=2))
for number in range(20):
    log.heartbeat("t", {_BEGIN_US} + number)
    print(number, flush=True)
"""


@pytest.mark.parametrize("point", heartbeat_points())
def test_heartbeats_survive_a_kill(tmp_path: Path, point: str) -> None:
    """What was told stays told, and the next who tells goes on."""
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("t", "at TIMESTAMP", time="at", partitions=1)
    done = subprocess.run(
        [sys.executable, "-c", _BEATING, str(tmp_path / "log"), point], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    told = len(done.stdout.split())
    with hw.open_log(tmp_path / "log") as log:
        beats = read_heartbeats(RealDisk(), os.fspath(tmp_path / "log/topics/t/0"))
        assert beats[-1].time >= _BEGIN_US + told - 1
        assert log.heartbeat("t", _BEGIN_US + 100) == 1
        assert log.reached("t") == {0: _BEGIN_US + 100}
