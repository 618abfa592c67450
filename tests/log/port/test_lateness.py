"""How far event time has come at any offset, and who is late: the same however the log is cut, sealed, archived and read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import numpy as np
import pytest

import headwater as hw
from headwater.log.log import Log
from headwater.log.port.lateness import is_late
from headwater.model.clock import NO_TIME

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
NOON_US = int(NOON.timestamp() * 1_000_000)
LATENESS_S = 10


def expected(seconds: list[int | None]) -> tuple[list[int], list[bool]]:
    """The running maximum before each event, and whether it is late, event by event."""
    running, before, late = NO_TIME, [], []
    for second in seconds:
        before.append(running)
        at = None if second is None else NOON_US + second * 1_000_000
        late.append(at is not None and running != NO_TIME and at < running - LATENESS_S * 1_000_000)
        if at is not None and second < 10_000:
            running = max(running, at)
    return [*before, running], late


def fill(log: Log, random: Random, **options: object) -> list[int | None]:
    log.create_topic(
        "t", "n BIGINT, at TIMESTAMP", time="at", lateness=f"{LATENESS_S} seconds", partitions=1, segment_bytes=4096, **options
    )  # fmt: skip
    seconds: list[int | None] = []
    for _ in range(random.randint(5, 25)):
        part = [
            None if random.random() < 0.05 else 1_000_000 if random.random() < 0.03 else len(seconds) + random.randint(-30, 5)
            for _ in range(random.randint(1, 12))
        ]  # fmt: skip
        log.append(
            "t", [{"n": n, "at": None if s is None else NOON + timedelta(seconds=s)} for n, s in enumerate(part)]
        )
        seconds += part
    return seconds


def clock() -> int:
    return NOON_US + 3600 * 1_000_000


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("form", ["memory", "frames", "sealed", "archived"])
def test_what_event_time_had_reached_is_known_at_every_offset(tmp_path: Path, form: str, seed: int) -> None:
    """And with it who is late: one oracle, every form in which events are kept. A clock far ahead advances nothing."""
    random = Random(seed)
    url = "memory://" if form == "memory" else str(tmp_path / "log")
    archive = {"archive": str(tmp_path / "archive"), "retention": "1 hour"} if form == "archived" else {}
    now = [clock()]
    with hw.open_log(url, clock=lambda: now[0]) as log:
        seconds = fill(log, random, **archive)
        if form == "sealed":
            log.seal("t")
        if form == "archived":
            now[0] += 7200 * 1_000_000
            log.tidy("t")
        before, late = expected(seconds)
        assert [log.store.reached("t", 0, offset=offset) for offset in range(len(seconds) + 1)] == before
        cursor, found, offset = log.store.cursor("t", 0, offset=0), [], 0
        while cursor.offset < len(seconds):
            for chunk in cursor.read(len(seconds), events_max=random.randint(1, 40)):
                found += is_late(chunk, before[offset]).tolist()
                offset += chunk.batch.num_rows
        assert found == late
        assert np.any(late)
