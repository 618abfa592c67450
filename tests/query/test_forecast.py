"""The forecast that `topics show` prints: against plain arithmetic, with a clock of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.log.log import open_log
from headwater.query.forecast import forecast

HOUR_US = 3_600_000_000


@pytest.mark.covers("concept: buffer limit")
def test_hours_are_room_divided_by_rate(tmp_path: Path) -> None:
    """Of the last hour; a reader that stops now is overtaken by time or by size, whichever is sooner."""
    now = [1_700_000_000_000_000]
    with open_log(str(tmp_path), clock=lambda: now[0]) as log:
        log.create_topic("t", partitions=1, retention="12 hours", bytes_max=10_000_000)
        log.append("t", [b"x"] * 5000)
        now[0] += 3 * HOUR_US
        log.append("t", [b"x"] * 3600)
        seen = forecast(log, "t", bytes_on_disk=860_000, clock=lambda: now[0])
        assert (seen["events_per_s"], seen["bytes_per_s"]) == (1.0, 100.0)
        assert seen["hours_to_full"] == round((10_000_000 - 860_000) / 100 / 3600, 2)
        assert seen["hours_to_overtaken"] == 12.0
        log.alter_topic("t", retention_bytes=1_800_000)
        seen = forecast(log, "t", bytes_on_disk=860_000, clock=lambda: now[0])
        assert (seen["hours_to_full"], seen["hours_to_overtaken"]) == (None, 5.0)
        now[0] += 3 * HOUR_US
        seen = forecast(log, "t", bytes_on_disk=860_000, clock=lambda: now[0])
        assert (seen["events_per_s"], seen["hours_to_full"], seen["hours_to_overtaken"]) == (0.0, None, 12.0)


def test_a_log_in_memory_has_a_rate_only() -> None:
    """There is no disk to fill."""
    with open_log("memory://") as log:
        log.create_topic("t", partitions=1)
        log.append("t", [b"x"] * 10)
        seen = forecast(log, "t", bytes_on_disk=None)
        assert seen["events_per_s"] > 0
        assert (seen["bytes_per_s"], seen["hours_to_full"], seen["hours_to_overtaken"]) == (None, None, None)


def test_a_buffer_is_room_and_its_reserve_is_no_use(tmp_path: Path) -> None:
    """What is set aside on the disk is there for the events, so it neither makes them look larger nor the room smaller."""
    now = [1_700_000_000_000_000]
    with open_log(str(tmp_path), clock=lambda: now[0]) as log:
        log.create_topic("t", partitions=1, bytes_max=1_000_000, overload="buffer", buffer_bytes=500_000)
        now[0] += 3 * HOUR_US
        log.append("t", [b"x"] * 3600)
        reserve = tmp_path / "topics/t/0/reserve"
        assert reserve.stat().st_size == 500_000
        seen = forecast(log, "t", bytes_on_disk=360_000 + 500_000, clock=lambda: now[0])
        assert seen["bytes_per_s"] == 100.0
        assert seen["hours_to_full"] == round((1_500_000 - 360_000) / 100 / 3600, 2)


def test_a_topic_that_drops_its_oldest_is_never_full_and_overtakes_readers(tmp_path: Path) -> None:
    now = [1_700_000_000_000_000]
    with open_log(str(tmp_path), clock=lambda: now[0]) as log:
        log.create_topic("t", partitions=2, bytes_max=1_800_000, overload="drop_oldest")
        now[0] += 3 * HOUR_US
        log.append("t", [b"x"] * 3600)
        seen = forecast(log, "t", bytes_on_disk=360_000, clock=lambda: now[0])
        assert (seen["hours_to_full"], seen["hours_to_overtaken"]) == (None, 10.0)


def test_what_is_acknowledged_makes_room(tmp_path: Path) -> None:
    """As long as its queues keep up the topic does not grow; when something from before the last hour is left it does."""
    now = [1_700_000_000_000_000]
    with open_log(str(tmp_path), clock=lambda: now[0]) as log:
        log.create_topic("t", partitions=1, bytes_max=1_000_000, retain="until_acked")
        log.append("t", [b"x"] * 7200)
        now[0] += 3 * HOUR_US
        log.append("t", [b"x"] * 3600)
        behind = forecast(log, "t", bytes_on_disk=360_000, clock=lambda: now[0])
        assert behind["hours_to_full"] is not None
        with log.queue("t") as queue:
            while leases := queue.lease(events_max=5000):
                queue.ack(leases)
        log.tidy("t")
        log.append("t", [b"x"] * 3600)
        seen = forecast(log, "t", bytes_on_disk=360_000, clock=lambda: now[0])
        assert (seen["bytes_per_s"], seen["hours_to_full"]) == (100.0, None)
