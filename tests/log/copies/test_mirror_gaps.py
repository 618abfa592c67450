"""A mirror of what compaction and retention have left: the copy has the same offsets, gaps included, whatever kills the mirror."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

import headwater as hw
from headwater.log.copies.mirror import Mirror
from headwater.log.disk.disk import Disk, RealDisk
from headwater.log.doctor.doctor import examine
from headwater.model.errors import Diverged, EventsMissed, Fenced
from headwater.testing import SimDisk
from headwater.testing.crash.disk import CrashingDisk, RandomCrashDisk
from headwater.testing.crash.points import crash_points, gap_points
from headwater.testing.simulation.process import Crashed
from tests.rigs.children import Child
from tests.rigs.log.pairs import every_pair
from tests.rigs.memory_folders import memory_folder

SCHEMA = "id STRING, n BIGINT, at TIMESTAMP"
SEGMENT_BYTES = 4096


def make(log: hw.Log, *, tombstones: str = "0 seconds") -> None:
    """A topic that is compacted, one that keeps little, one that keeps all."""
    shape = {"key": "id", "time": "at", "partitions": 2, "segment_bytes": SEGMENT_BYTES}
    log.create_topic("newest", SCHEMA, compact=True, tombstones=tombstones, **shape)
    log.create_topic("recent", SCHEMA, **shape)
    log.create_topic("all", SCHEMA, **shape)


def fill(log: hw.Log, chance: random.Random, *, batches: int = 12) -> None:
    for _ in range(batches):
        rows = [
            {
                "id": f"k{chance.randrange(40)}",
                "n": chance.randrange(1000),
                "at": f"2026-01-01T00:00:{chance.randrange(60):02}Z",
            }
            for _ in range(chance.randint(10, 40))
        ]
        for name in ("newest", "recent", "all"):
            log.append(name, rows)
        log.append("newest", [{"id": f"k{chance.randrange(40)}", "_deleted": True}])
        with log.producer() as producer:
            producer.send("newest", {"id": "h", "n": 1}, headers={"h": b"\xff"})


def tidy(log: hw.Log, *, names: tuple[str, ...] = ("newest", "recent")) -> int:
    """Removes what goes; the limit is lifted again, since a copy has it too, and may count its bytes otherwise."""
    log.alter_topic("recent", retention_bytes=SEGMENT_BYTES // 2)
    removed = sum(log.tidy(name) for name in names)
    log.alter_topic("recent", retention_bytes=None)
    return removed


def held(log: hw.Log) -> dict[str, pa.Table]:
    """Everything that each topic holds, offsets, append times and headers included."""
    columns = ["id", "n", "at", "_partition", "_offset", "_time", "_appended", "_headers", "_deleted"]
    return {name: log.read(name, columns=columns) for name in log.topics()}


def check_same(source: hw.Log, target: hw.Log) -> None:
    assert target.topics() == source.topics()
    for name in source.topics():
        assert target.offsets(name) == source.offsets(name)
    assert held(target) == held(source)


@every_pair
@pytest.mark.covers("concept: replication")
def test_what_compaction_and_retention_left_is_copied_with_its_gaps(logs: tuple[hw.Log, hw.Log]) -> None:
    """By offset; and the copy is a log like any other: it is read from a time, added to, compacted and mirrored again."""
    source, target = logs
    make(source)
    fill(source, random.Random(1))
    assert tidy(source) > 0
    assert source.offsets("recent")[0].start > 0
    first = source.read("newest", columns=["_offset"]).num_rows
    assert first < sum(map(len, source.offsets("newest").values())), "compaction has left no gaps"
    source.mirror(target)
    check_same(source, target)
    assert source.mirror(target).events == 0
    fill(source, random.Random(2), batches=5)
    source.mirror(target)
    check_same(source, target)
    for at in ("2026-01-01T00:00:30Z", "2026-01-01T00:00:59Z"):
        assert target.read("newest", start=at).num_rows == source.read("newest", start=at).num_rows
    tidy(source)
    tidy(target)
    assert target.table("newest").sort_by("id") == source.table("newest").sort_by("id")
    source.mirror(target)
    assert source.table("newest").sort_by("id") == target.table("newest").sort_by("id")
    with pytest.raises(EventsMissed):
        target.read("recent", start={0: 0})


@every_pair
def test_a_copy_that_lacks_what_is_gone_is_refused_unless_it_is_empty(logs: tuple[hw.Log, hw.Log]) -> None:
    """What retention removed before it was copied is missing for good, and somebody should know."""
    source, target = logs
    source.create_topic("t", SCHEMA, key="id", partitions=1, retention_bytes=SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES)
    source.append("t", [{"id": "a", "n": 1}])
    source.mirror(target)
    running = Mirror(source.store, target.store)
    running.catch_up()
    for number in range(40):
        source.append("t", [{"id": "b" * 100, "n": number} for _ in range(10)])
    source.tidy("t")
    assert source.offsets("t")[0].start > 1
    for mirror in (running.catch_up, lambda: source.mirror(target)):
        with pytest.raises(Diverged, match="which the copy lacks") as refusal:
            mirror()
        assert "mirror what is left" in refusal.value.advice
    assert target.read("t")["n"].to_pylist() == [1]
    target.delete_topic("t")
    source.mirror(target)
    check_same(source, target)


@every_pair
def test_a_partition_of_which_nothing_is_left_begins_where_it_ended(logs: tuple[hw.Log, hw.Log]) -> None:
    """Also when more goes while the copy is still empty."""
    source, target = logs
    source.create_topic("t", SCHEMA, partitions=1, retention="1 millisecond", segment_bytes=SEGMENT_BYTES)
    mirror = Mirror(source.store, target.store)
    for ended in (7, 14):
        source.append("t", [{"id": "a"} for _ in range(7)])
        while source.offsets("t")[0].start < ended:
            source.tidy("t")
        mirror.catch_up()
        assert target.offsets("t") == source.offsets("t") == {0: range(ended, ended)}
    source.mirror(target)
    target.append("t", [{"id": "b"}])
    assert target.offsets("t")[0].stop == 15


@every_pair
def test_a_topic_that_was_split_is_split_behind_its_gaps(logs: tuple[hw.Log, hw.Log]) -> None:
    """The fences are where they were, also where nothing below them is left."""
    source, target = logs
    make(source)
    fill(source, random.Random(4))
    tidy(source)
    for name in ("newest", "recent", "all"):
        source.alter_topic(name, partitions=4)
    fill(source, random.Random(5))
    tidy(source)
    source.mirror(target)
    check_same(source, target)
    assert target.topic("recent").splits == source.topic("recent").splits
    fill(source, random.Random(6), batches=3)
    source.mirror(target)
    check_same(source, target)


@every_pair
def test_events_with_gaps_are_refused_from_a_mirror_that_was_replaced(logs: tuple[hw.Log, hw.Log]) -> None:
    source, target = logs
    make(source)
    earlier = Mirror(source.store, target.store)
    earlier.catch_up()
    later = Mirror(source.store, target.store)
    later.catch_up()
    fill(source, random.Random(7))
    tidy(source, names=("newest",))
    with pytest.raises(Fenced):
        earlier.catch_up()
    later.catch_up()
    check_same(source, target)


# Kills and power losses


def copy(folder: Path, disk: Disk) -> None:
    with hw.open_log(folder / "log", read_only=True) as log, hw.open_log(folder / "copy", disk=disk) as target:
        log.mirror(target)


@pytest.mark.slow
@pytest.mark.parametrize("point", gap_points())
def test_a_mirror_dies_between_two_steps_of_a_gap(point: str) -> None:
    """The copy is whole in between: healthy, backed up, appended to by the next mirror, which goes on."""
    with memory_folder() as folder, hw.open_log(folder / "log") as log:
        make(log)
        fill(log, random.Random(8))
        tidy(log)
        deaths = 0
        for nth in (1, 2, 5):
            status = Child(lambda nth=nth: copy(folder, CrashingDisk(point, nth=nth))).wait()
            deaths += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            report = examine(str(folder / "copy"))
            assert not [finding for finding in report.findings if finding.severity == "error"]
            with hw.open_log(folder / "copy") as target:
                held(target)
                target.backup(folder / f"backup{nth}")
        assert deaths, "the point is not reached"
        log.mirror(folder / "copy")
        assert examine(str(folder / "copy"), repair=True).healthy
        with hw.open_log(folder / "copy") as target:
            check_same(log, target)
            target.seal("newest")
            check_same(log, target)


def kill_round(folder: Path, seed: int) -> None:
    """Mirrors that are killed at points and anywhere, and between them more events, compactions and other cuts."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    with hw.open_log(folder / "log") as log:
        make(log, tombstones="1 hour")  # who does not come by for longer misses deletions, a mirror too
        fill(log, chance)
        tidy(log)
        for _ in range(5):
            point, nth = chance.choice(gap_points()), chance.randint(1, 6)
            disk = (
                CrashingDisk(point, nth=nth)
                if chance.random() < 0.5
                else RandomCrashDisk(chance.randrange(1 << 30), 0.01)
            )
            Child(lambda disk=disk: copy(folder, disk)).wait()
            fill(log, chance, batches=chance.randint(0, 4))
            if chance.random() < 0.7:
                tidy(log, names=("newest",))
        Child(lambda: copy(folder, RealDisk())).result()
        check_held(folder)


def check_held(folder: Path) -> None:
    """DuckDB: all that the log holds is in the copy, at the same place; what else the copy holds was replaced by now."""
    with hw.open_log(folder / "log") as log, hw.open_log(folder / "copy") as target:
        columns = ["id", "n", "_partition", "_offset", "_appended", "_deleted"]
        for name in log.topics():
            with duckdb.connect() as oracle:
                oracle.register("here", log.read(name, columns=columns))
                oracle.register("there", target.read(name, columns=columns))
                assert oracle.sql("select * from here except all select * from there").fetchall() == []
                left = (
                    "select * from (select * from there except all select * from here) old where not _deleted and not exists "
                    "(select 1 from here where here._partition = old._partition and here.id = old.id "
                    "and here._offset > old._offset)"
                )
                assert oracle.sql(left).fetchall() == []
            assert {n: span.stop for n, span in log.offsets(name).items()} == {
                n: span.stop for n, span in target.offsets(name).items()
            }
        assert log.table("newest").sort_by("id") == target.table("newest").sort_by("id")
    assert examine(str(folder / "copy")).healthy


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_killed_mirror_goes_on_behind_its_gaps(seed: int) -> None:
    with memory_folder() as folder:
        kill_round(folder, seed)


@pytest.mark.bench
@pytest.mark.parametrize("seed", range(100, 160))
def test_a_killed_mirror_goes_on_behind_its_gaps_many_more_times(seed: int) -> None:
    """The long tier of the same."""
    with memory_folder() as folder:
        kill_round(folder, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_power_loss_costs_a_copy_with_gaps_only_time(seed: int) -> None:
    """The copy's disk loses what was not synced, again and again; the next mirror goes on from what is left."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    disk = SimDisk(seed)
    points = [*gap_points(), *gap_points(), *crash_points()]
    with hw.open_log("memory://") as source:
        make(source)
        fill(source, chance, batches=10)
        tidy(source)
        for life in range(8):
            process = disk.process(f"mirror {life}")
            disk.crash_at(f"mirror {life}", chance.choice(points), nth=chance.randint(1, 4))
            try:
                with hw.open_log("/disk/copy", disk=process) as target:
                    source.mirror(target)
            except Crashed:
                disk.kill(f"mirror {life}")
            if chance.random() < 0.7:
                disk.power_loss()
            fill(source, chance, batches=chance.randint(0, 2))
        with hw.open_log("/disk/copy", disk=disk.process("last")) as target:
            source.mirror(target)
            check_same(source, target)
