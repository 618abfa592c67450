"""The archive: what retention removes is read on by offset, from Parquet that others read too."""

from __future__ import annotations

import json
import os
import random
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pytest

from headwater.log.doctor.doctor import examine
from headwater.log.log import Log, open_log
from headwater.model.errors import Damaged, EventsMissed, InvalidInput, StorageError, Unsupported
from headwater.testing.crash.disk import CrashingDisk
from tests.rigs.children import Child

COLUMNS = "k STRING, n BIGINT, at TIMESTAMP"
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
POINTS = ["archive: added one", "retention: first published", "retention: given up", "retention: removed one"]


def made(log: Log, folder: Path, **options: Any) -> None:
    settings = {"key": "k", "time": "at", "partitions": 1, "segment_bytes": 4096, "exist_ok": True}
    log.create_topic("t", COLUMNS, **settings | {"archive": f"file://{folder}/archive"} | options)


def row(n: int) -> dict[str, Any]:
    return {"k": f"{'key' * 20}-{n % 9}", "n": n, "at": NOON + timedelta(seconds=n)}


def filled(log: Log, count: int, *, start: int = 0) -> None:
    for at in range(start, start + count, 4):
        log.append("t", [row(n) for n in range(at, min(at + 4, start + count))])


def archived_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("archive/t.*/0/*.parquet"))


def test_what_retention_removed_is_read_as_if_it_were_there(tmp_path: Path) -> None:
    """By offset, by time, from the earliest, as a table; only the files are elsewhere."""
    with open_log(str(tmp_path / "log")) as log:
        made(log, tmp_path)
        filled(log, 200)
        log.seal("t")
        filled(log, 100, start=200)
        with log.producer() as producer:
            producer.send("t", row(300), headers={"a": b"1"})
            producer.send("t", None, key="gone")
        filled(log, 100, start=302)
        before = log.reader("t").poll(events_max=1000)
        table = log.table("t")
        log.alter_topic("t", retention_bytes=4096)
        assert log.tidy("t") > 350
        local = log.store.handles.partition("t", 0).first()  # type: ignore[attr-defined]
        assert log.offsets("t") == {0: range(402)}
        assert min(int(p.name[:20]) for p in (tmp_path / "log/topics/t/0").glob("0*")) == local > 350
        assert log.reader("t").poll(events_max=1000) == before
        assert sorted(log.table("t").to_pylist(), key=str) == sorted(table.to_pylist(), key=str)
        for start in range(0, 402, 53):
            expected = [event for event in before if event.offset >= start]
            assert log.reader("t", start=start).poll(events_max=1000) == expected
            at = log.offsets_at("t", NOON + timedelta(seconds=start))
            assert at == {
                0: min(e.offset for e in before if e.value and e.value["at"] >= NOON + timedelta(seconds=start))
            }
        middle = before[100].appended
        assert log.offsets_at("t", middle, by="appended") == {
            0: min(event.offset for event in before if event.appended >= middle)
        }
        frame = polars.concat([polars.read_parquet(path) for path in archived_files(tmp_path)], how="diagonal")
        assert frame["_offset"].to_list() == list(range(local))
        assert examine(str(tmp_path / "log")).healthy
    with open_log(str(tmp_path / "log"), read_only=True) as log:
        assert log.read("t")["n"].to_pylist()[:300] == list(range(300))


def test_a_compacted_topic_is_archived_with_its_gaps(tmp_path: Path) -> None:
    """Explicit offsets go with the events; old events are read by the present schema."""
    with open_log(str(tmp_path / "log")) as log:
        made(log, tmp_path, compact=True)
        filled(log, 300)
        log.tidy("t")
        log.alter_topic("t", schema=f"{COLUMNS}, note STRING")
        before = log.reader("t").poll(events_max=1000)
        log.alter_topic("t", retention_bytes=1)
        log.tidy("t")
        assert archived_files(tmp_path)
        assert log.reader("t").poll(events_max=1000) == before
        assert log.offsets("t") == {0: range(300)}


def test_events_are_missed_only_beyond_the_archive(tmp_path: Path) -> None:
    """One that was set late has no more than came after; one that is taken away leaves what the log holds."""
    with open_log(str(tmp_path / "log")) as log:
        made(log, tmp_path, archive=None, retention_bytes=4096)
        filled(log, 200)
        first = log.tidy("t")
        log.alter_topic("t", archive=f"file://{tmp_path}/archive")
        filled(log, 100, start=200)
        log.tidy("t")
        assert log.offsets("t") == {0: range(first, 300)}
        assert log.read("t")["n"].to_pylist() == list(range(first, 300))
        with pytest.raises(EventsMissed):
            log.reader("t", start=first - 1).poll(timeout_s=0)
        log.alter_topic("t", archive=None)
        assert log.offsets("t")[0].start > first


def test_a_secret_in_the_url_is_not_shown(tmp_path: Path) -> None:
    """Neither in the error, nor in what a traceback would show behind it."""
    with open_log(str(tmp_path / "log")) as log:
        for url in (
            "nowhere://key:geheim@bucket/log",
            "s3://key:ge/heim@bucket/log",
            "s3://key:geheim@bucket/log?geht=nicht",
        ):
            with pytest.raises(InvalidInput) as refused:
                made(log, tmp_path, archive=url)
            behind = refused.value.__cause__ or (
                None if refused.value.__suppress_context__ else refused.value.__context__
            )
            assert "heim" not in str(refused.value) and behind is None


def test_nothing_is_removed_that_could_not_be_archived(tmp_path: Path) -> None:
    """A place that is none is refused; one that fails keeps the events in the log."""
    with open_log(str(tmp_path / "log")) as log:
        with pytest.raises(InvalidInput):
            made(log, tmp_path, archive="nowhere")
        (tmp_path / "archive").write_text("not a folder")
        made(log, tmp_path, retention_bytes=4096)
        filled(log, 100)
        with pytest.raises(StorageError):
            log.tidy("t")
        assert log.read("t")["n"].to_pylist() == list(range(100))
        (tmp_path / "archive").unlink()
        assert log.tidy("t") > 0
        assert log.read("t")["n"].to_pylist() == list(range(100))
    with open_log("memory://") as log, pytest.raises(Unsupported):
        made(log, tmp_path)


def test_damage_to_the_archive_is_noticed(tmp_path: Path) -> None:
    """Parquet's checksums are looked at; a file that is gone is named."""
    with open_log(str(tmp_path / "log")) as log:
        made(log, tmp_path, retention_bytes=4096)
        filled(log, 100)
        log.tidy("t")
        path = archived_files(tmp_path)[0]
        whole, chance = path.read_bytes(), random.Random(4)
        truth, noticed = log.read("t").to_pylist(), []
        for _ in range(40):
            content = bytearray(whole)
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
            try:
                batches = log.reader("t", start=0).poll_arrow(timeout_s=0)
            except (Damaged, StorageError) as error:
                noticed.append(str(error))
            else:
                assert pa.Table.from_batches(batches).to_pylist() == truth
        assert len(noticed) > 20
        assert all(str(path) in what for what in noticed)
        path.unlink()
        with pytest.raises((Damaged, StorageError)):
            log.reader("t", start=0).poll(timeout_s=0)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_killed_while_it_archives(tmp_path: Path, point: str) -> None:
    """With SIGKILL at every step: each acknowledged number is read, once and in order, from the first on."""
    account = tmp_path / "account"

    def work() -> None:
        with (
            open_log(str(tmp_path / "log"), disk=CrashingDisk(point, 2)) as log,
            account.open("ab", buffering=0) as lines,
        ):
            made(log, tmp_path, retention_bytes=8192, durability="os")
            while True:
                number = log.offsets("t")[0].stop
                log.append("t", [row(number)])
                lines.write(json.dumps(number).encode() + b"\n")
                if number % 40 == 39:
                    log.tidy("t")

    for _ in range(3):
        assert os.WTERMSIG(Child(work).wait()) == signal.SIGKILL
    acknowledged = [json.loads(line) for line in account.read_text().splitlines()]
    with open_log(str(tmp_path / "log")) as log:
        for _ in range(2):
            numbers = log.read("t")["n"].to_pylist()
            assert numbers == list(range(len(numbers)))
            assert acknowledged[-1] < len(numbers)
            log.tidy("t")
    assert examine(str(tmp_path / "log")).healthy
