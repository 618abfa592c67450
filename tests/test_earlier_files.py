"""Files of earlier versions: a log, checkpoints, state of operators, a view's store and copied files are read, and gone on with.

`samples/before.tar.xz` was made before the modules were moved to where they are now: a log with open, sealed and compacted segments, a
group, a queue, a producer with a name, a transaction; and `earlier_app.py`, which had run over its events.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections import Counter
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import headwater as hw

RIGS = Path(__file__).parent / "rigs"
EVENTS, MORE = 160, 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(RIGS / "samples" / "before.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def add_clicks(log: hw.Log) -> None:
    """Some that are there already, and some that are not."""
    numbers = range(EVENTS - MORE, EVENTS)
    rows = [{"id": n, "page": f"/{n % 3}", "at": f"2026-01-01T12:{n % 60:02d}:00Z"} for n in numbers]
    log.append("clicks", rows)


def test_an_earlier_log_is_read_and_written(folder: Path) -> None:
    """Events of every kind of file, a group's offsets, a queue's acknowledgements, a producer's name, the newest rows of a table."""
    with hw.open_log(folder / "log") as log:
        assert Counter(log.read("clicks")["id"].to_pylist()) == Counter([*range(120), *range(100, 140)])
        assert log.table("table").sort_by("id")["name"].to_pylist() == [*(f"v{n}" for n in range(15, 20)), "nine"]
        assert log.read("tasks")["value"].to_pylist() == [b"one", b"two", b"three", b"four", b"five"]
        assert {part.partition: part.committed for part in log.group("readers").partitions} == {0: 25, 1: 25}
        with log.queue("tasks", group="workers") as queue:
            leases = queue.lease(events_max=10, timeout_s=5)
            assert [lease.event.value for lease in leases] == [b"two", b"three", b"four", b"five"]
        with log.producer(id="importer") as producer:
            assert producer.send("tasks", b"six").result().offset == 5
        add_clicks(log)
        log.seal("clicks")
        assert log.read("clicks").num_rows == EVENTS + MORE


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_earlier_application_goes_on(folder: Path) -> None:
    """Copies of events that the earlier version has seen are removed by its state; its view goes on to count; nothing is written twice."""
    with hw.open_log(folder / "log") as log:
        add_clicks(log)
        clicks = log.read("clicks")["id"].to_pylist()
        done = subprocess.run(
            [sys.executable, str(RIGS / "earlier_app.py"), str(folder)], text=True, capture_output=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        assert sorted(log.read("unique")["id"].to_pylist()) == sorted(set(clicks))
    with hw.open_view(f"sqlite:///{folder}/views.db", "per_page") as view:
        found = dict(zip(*view.rows().to_pydict().values(), strict=True))
        assert found == Counter(f"/{number % 3}" for number in clicks)
    copied = [pq.read_table(file)["id"].to_pylist() for file in (folder / "files").glob("*.parquet")]
    assert Counter(chain.from_iterable(copied)) == Counter(clicks)
