"""Added partitions and everything that copies, keeps and repairs a log: the fences survive, and no key loses its order."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import headwater as hw
from headwater.log.doctor.doctor import examine
from headwater.log.kafka.store import KafkaStore
from headwater.log.port.write import Write
from headwater.model.errors import Damaged, Diverged, TopicNotFound, Unsupported
from headwater.testing import SimDisk
from headwater.testing.contracts.case import events_of
from headwater.testing.contracts.split import KEYS, NUMBERS, check_in_order, numbered, polled
from headwater.testing.crash.disk import CrashingDisk
from headwater.testing.crash.points import crash_points, split_points
from headwater.testing.simulation.process import Crashed
from tests.rigs.children import Child
from tests.rigs.commands import Command, refused
from tests.rigs.log.pairs import every_pair


def places(log: hw.Log) -> list[tuple[int, int, int]]:
    """Every event with its place."""
    return [(event.partition, event.offset, event.value["n"]) for event in events_of(log, "t")]


@every_pair
def test_a_mirror_splits_where_its_log_was_split(logs: tuple[hw.Log, hw.Log]) -> None:
    """A copy that was begun before, and one that begins afterwards, both over several splits."""
    source, target = logs
    source.create_topic("t", NUMBERS, key="k", partitions=1)
    sent = 0
    for partitions, count in ((1, 50), (2, 50), (4, 9_000), (8, 50)):  # 9,000 are too much for one transaction
        source.append("t", numbered(sent, 50))
        source.alter_topic("t", partitions=partitions)
        source.append("t", numbered(sent + 50, count))
        sent += 50 + count
        if partitions != 4:
            source.mirror(target)
    with hw.open_log("memory://") as late:
        source.mirror(late)
        for copy in (target, late):
            assert places(copy) == places(source)
            assert copy.topic("t").splits == source.topic("t").splits
            with copy.reader("t") as reader:
                check_in_order(polled(reader), range(sent))


@every_pair
def test_a_copy_that_was_split_elsewhere_is_refused(logs: tuple[hw.Log, hw.Log]) -> None:
    """By itself at other offsets, or after somebody else wrote to it."""
    source, target = logs
    source.create_topic("t", NUMBERS, key="k", partitions=1)
    source.append("t", numbered(0, 50))
    source.mirror(target)
    target.alter_topic("t", partitions=2)
    with pytest.raises(Diverged):
        source.mirror(target)
    source.alter_topic("t", partitions=2)
    source.mirror(target)
    source.alter_topic("t", partitions=4)
    source.append("t", numbered(50, 50))
    target.append("t", numbered(1000, 40))
    before = places(target)
    with pytest.raises(Diverged):
        source.mirror(target)
    assert places(target) == before


def test_a_backup_has_the_fences(tmp_path: Path) -> None:
    """What is restored is read in the same order, goes on, and can be split again."""
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("t", NUMBERS, key="k", partitions=2)
        log.append("t", numbered(0, 100))
        log.alter_topic("t", partitions=4)
        log.append("t", numbered(100, 100))
        log.backup(tmp_path / "backup")
        expected = log.topic("t").splits
    hw.restore_log(tmp_path / "backup", tmp_path / "restored")
    with hw.open_log(tmp_path / "restored") as log:
        assert log.topic("t").splits == expected
        log.alter_topic("t", partitions=8)
        log.append("t", numbered(200, 100))
        with log.reader("t") as reader:
            check_in_order(polled(reader), range(300))


def test_a_tombstone_stays_as_long_as_the_parent_has_its_key(tmp_path: Path) -> None:
    """Or a deleted key would come back from where it was before it moved; tombstones of keys that never moved go."""
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic(
            "t", "k STRING, n STRING", key="k", partitions=1, compact=True, tombstones="0 seconds", segment_bytes=4096
        )
        fill(log, "old")
        log.alter_topic("t", partitions=2)
        log.append("t", [{"k": f"k{number}", "_deleted": True} for number in range(KEYS)])
        log.append("t", [{"k": f"new{number}", "n": "x"} for number in range(KEYS)])
        log.append("t", [{"k": f"new{number}", "_deleted": True} for number in range(KEYS)])
        for turn in range(4):
            fill(log, f"filler {turn}")
            log.tidy("t")
            assert {row["k"][:6] for row in log.table("t").to_pylist()} == {"filler"}
        rows = log.read("t", columns=["k", "_deleted", "_partition"]).to_pylist()
        held = {(row["_partition"], row["k"]) for row in rows if row["_deleted"]}
        assert held
        assert {partition for partition, _ in held} == {1}
        assert {key for _, key in held} <= {f"k{number}" for number in range(KEYS)}


def fill(log: hw.Log, prefix: str) -> None:
    """Enough for several segments."""
    keys = [f"k{number}" for number in range(KEYS)] if prefix == "old" else [f"{prefix} {n}" for n in range(60)]
    for _ in range(8):
        log.append("t", [{"k": key, "n": "x" * 100} for key in keys])


@pytest.mark.parametrize("point", split_points())
def test_what_a_dead_split_leaves_is_nobodys_concern(tmp_path: Path, point: str) -> None:
    """The doctor finds nothing wrong, a backup works, others write and read, and the next split removes what lies about."""
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("t", NUMBERS, key="k", partitions=2)
        log.append("t", numbered(0, 100))

    def split() -> None:
        with hw.open_log(tmp_path / "log", disk=CrashingDisk(point)) as mine:
            mine.alter_topic("t", partitions=4)

    assert os.WIFSIGNALED(Child(split).wait())
    assert {found.what for found in examine(str(tmp_path / "log")).findings} <= {"left over from a crash"}
    with hw.open_log(tmp_path / "log") as log:
        happened = point in ("split: written", "split: counted one again")
        assert log.topic("t").partitions == (4 if happened else 2)
        log.append("t", numbered(100, 100))
        log.backup(tmp_path / "backup")
        log.alter_topic("t", partitions=8)
        log.append("t", numbered(200, 100))
        with log.reader("t") as reader:
            check_in_order(polled(reader), range(300))
        assert log.topic("t").generation == 1 + happened
    assert not [name for name in os.listdir(tmp_path / "log" / "topics") if name.startswith(".")]
    assert not examine(str(tmp_path / "log")).findings


@pytest.mark.covers("Kinesis")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the locks of a dead process
@pytest.mark.parametrize("durability", ["fsync", "os"])
@pytest.mark.parametrize("seed", range(8))
def test_a_split_survives_power_losses(seed: int, durability: Any) -> None:
    """At any step, again and again: what was acknowledged is there once, no end lies behind its fence, keys keep their order."""
    print(f"seed {seed}")
    chance = random.Random(f"{seed} {durability}")
    disk = SimDisk(seed)
    acked: set[int] = set()
    sent, points = 0, [*split_points() * 3, *crash_points()]
    with hw.open_log("/disk/log", disk=disk.process("first")) as log:
        log.create_topic("t", NUMBERS, key="k", partitions=1, durability=durability, segment_bytes=4096)
    disk.kill("first")
    for life in range(8):
        name = f"life {life}"
        process = disk.process(name)
        disk.crash_at(name, chance.choice(points), nth=chance.randint(1, 6))
        try:
            with hw.open_log("/disk/log", disk=process) as log:
                for _ in range(chance.randint(1, 6)):
                    count = chance.randint(1, 30)
                    sent += count
                    log.append("t", numbered(sent - count, count), atomic=chance.random() < 0.5)
                    acked |= set(range(sent - count, sent))
                    partitions = log.topic("t").partitions
                    if partitions < 16 and chance.random() < 0.5:
                        log.alter_topic("t", partitions=2 * partitions)
        except Crashed:
            disk.kill(name)
        if chance.random() < 0.7:
            disk.power_loss()
            if durability == "os":
                acked = set()
    with hw.open_log("/disk/log", disk=disk.process("last")) as log:
        found = Counter(number for _, _, number in places(log))
        assert acked <= set(found) <= set(range(sent))
        assert set(found.values()) <= {1}
        ends = [span.stop for span in log.offsets("t").values()]
        for split in log.topic("t").splits:
            assert all(fence <= end for fence, end in zip(split.fences, ends, strict=False))
        with log.reader("t") as reader:
            check_in_order(polled(reader), found)
        log.alter_topic("t", partitions=32)
        log.append("t", numbered(sent, 100))
        with log.reader("t") as reader:
            check_in_order(polled(reader), [*found, *range(sent, sent + 100)])


@pytest.mark.parametrize("seed", range(5))
def test_no_power_loss_takes_an_end_back_behind_its_fence(seed: int) -> None:
    """Where nothing else is ever synced: a reader would wait for events that nobody has any more."""
    disk = SimDisk(seed)
    log = hw.open_log("/disk/log", disk=disk.process("writer"))
    log.create_topic("t", NUMBERS, key="k", partitions=2, durability="os")
    log.append("t", numbered(0, 100))
    fences = log.alter_topic("t", partitions=4).splits[0].fences
    log.append("t", numbered(100, 100))
    disk.power_loss()
    with hw.open_log("/disk/log", disk=disk.process("after")) as log:
        assert all(span.stop >= fence for span, fence in zip(log.offsets("t").values(), fences, strict=False))
        with log.reader("t") as reader:
            found = [event.value["n"] for event in polled(reader)]
            assert reader.lag() == 0
        assert set(range(100)) <= set(found)


@pytest.mark.parametrize("url", ["memory://", "log"])
def test_an_interrupted_batch_goes_on_after_a_split(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two writes of a batch that was placed again: what is stored is not stored again, the rest is."""
    with hw.open_log(url if "://" in url else tmp_path / url) as log:
        log.create_topic("t", NUMBERS, key="k", partitions=2)
        write, calls = log.store.write, [0]

        def interrupted(writes: Sequence[Write]) -> list[range | Exception]:
            calls[0] += 1
            if calls[0] == 2:
                write(writes[: len(writes) // 2])
                raise KeyboardInterrupt
            return write(writes)

        with log.producer(linger_ms=60_000) as producer:
            for row in numbered(0, 100):
                producer.send("t", row)
            log.alter_topic("t", partitions=8)
            monkeypatch.setattr(log.store, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                producer.flush()
            producer.flush()
            assert calls[0] == 3
        with log.reader("t") as reader:
            check_in_order(polled(reader), range(100))


def test_a_topic_that_was_never_split_says_nothing_of_it(tmp_path: Path) -> None:
    """So an older Headwater reads it."""
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("t", NUMBERS, key="k", partitions=2)
        path = tmp_path / "log" / "topics" / "t" / "topic"
        assert "splits" not in json.loads(path.read_text().partition("\n")[2])
        log.append("t", numbered(0, 10))
        log.alter_topic("t", partitions=4)
        fences = [span.stop for span in log.offsets("t").values()][:2]
        assert json.loads(path.read_text().partition("\n")[2])["splits"] == [{"partitions": 2, "fences": fences}]


def test_a_partition_with_events_is_never_taken_for_a_leftover(tmp_path: Path) -> None:
    """A topic's file from before the split, put back by hand, must not cost the events that came after it."""
    path = tmp_path / "log" / "topics" / "t" / "topic"
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("t", NUMBERS, key="k", partitions=2)
        before = path.read_bytes()
        log.alter_topic("t", partitions=4)
        log.append("t", numbered(0, 100))
    after = path.read_bytes()
    path.write_bytes(before)
    with hw.open_log(tmp_path / "log") as log, pytest.raises(Damaged, match="does not know"):
        log.alter_topic("t", partitions=4)
    path.write_bytes(after)
    with hw.open_log(tmp_path / "log") as log:
        assert len(places(log)) == 100


@pytest.mark.parametrize("url", ["memory://", "log"])
def test_a_reader_does_not_take_another_topic_for_a_split_one(url: str, tmp_path: Path) -> None:
    """One that was deleted and created again with more partitions is another topic."""
    with hw.open_log(url if "://" in url else tmp_path / url) as log:
        log.create_topic("t", NUMBERS, key="k", partitions=1)
        with log.reader("t") as reader:
            log.delete_topic("t")
            log.create_topic("t", NUMBERS, key="k", partitions=8)
            log.append("t", numbered(0, 100))
            with pytest.raises(TopicNotFound):
                polled(reader)


def test_a_split_while_partitions_are_opened_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another handle is about to open what the first split made when the second one comes."""
    with hw.open_log(tmp_path / "log") as log, hw.open_log(tmp_path / "log") as other:
        log.create_topic("t", NUMBERS, key="k", partitions=1)
        assert len(other.offsets("t")) == 1
        log.alter_topic("t", partitions=2)
        handles = other.store.handles  # type: ignore[attr-defined]
        opened = handles.partition

        def split_first(name: str, number: int) -> Any:
            if number == 1 and log.topic("t").partitions == 2:
                log.alter_topic("t", partitions=4)
            return opened(name, number)

        monkeypatch.setattr(handles, "partition", split_first)
        assert len(other.offsets("t")) == 4


def test_kafka_is_refused_with_advice() -> None:
    """There keys would lose their order."""
    with pytest.raises(Unsupported, match="order") as told:
        KafkaStore.__new__(KafkaStore).split("t", 8)
    assert told.value.advice


def test_the_command_adds_partitions(command: Command) -> None:
    """And shows from what each was split off."""
    with hw.open_log("data") as log:
        log.create_topic("t", NUMBERS, key="k", partitions=2)
        log.append("t", numbered(0, 100))
        fence = log.offsets("t")[1].stop
    refused(command("topics", "alter", "t", "--partitions", 3), "invalid_input", "2 partitions", "4, 6")
    assert "4 partitions" in command("topics", "alter", "t", "--partitions", 4).out
    assert f"from 1 at {fence}" in command("topics", "show", "t").out
    shown = json.loads(command("topics", "show", "t", "--json").out)
    assert [(row["parent"], row["fence"]) for row in shown["partitions"]][3] == (1, fence)
    assert shown["partitions"][0]["parent"] is None
