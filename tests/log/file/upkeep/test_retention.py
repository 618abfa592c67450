"""Retention of the local log: whole segments go, in the background or on demand, and no crash leaves more or less than that."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import headwater
from headwater.log.disk.disk import File, Mode, RealDisk
from headwater.log.doctor.doctor import examine
from headwater.log.file.segments.segment import segment_name
from headwater.log.file.upkeep import keeper
from headwater.log.log import Log, open_log
from headwater.model.errors import EventsMissed, HeadwaterError
from headwater.testing import SimDisk
from headwater.testing.crash.disk import CrashingDisk
from headwater.testing.crash.points import keeping_points
from headwater.testing.simulation.process import Crashed
from tests.rigs.children import Child

POINTS = [point for point in keeping_points() if point.startswith("retention:")]
SECOND = 1_000_000


class Hands:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1_700_000_000 * SECOND

    def __call__(self) -> int:
        return self.now


def segments_of(folder: Path, topic: str = "t") -> list[int]:
    return sorted({int(path.name[:20]) for path in (folder / "topics" / topic / "0").glob("0*")})


def numbers_of(log: Log, **options: object) -> list[int]:
    return log.read("t", **options)["n"].to_pylist()


def filled(log: Log, count: int, *, start: int = 0, size: int = 400, **options: object) -> None:
    log.create_topic("t", "n BIGINT, text STRING", partitions=1, segment_bytes=4096, exist_ok=True, **options)
    for number in range(start, start + count):
        log.append("t", [{"n": number, "text": "x" * size}])


@pytest.mark.covers("Kafka")
def test_a_segment_goes_when_its_newest_event_is_expired(tmp_path: Path) -> None:
    """Not before, and not with events that are younger; the active one is closed first when all of it is expired."""
    clock = Hands()
    with open_log(str(tmp_path), clock=clock) as log:
        filled(log, 20, retention="1 hour")
        clock.now += 1800 * SECOND
        filled(log, 20, start=20)
        clock.now += 1801 * SECOND
        bases = segments_of(tmp_path)
        assert log.tidy("t") == max(base for base in bases if base <= 20)
        assert [base for base in bases if base > 20] == segments_of(tmp_path)[1:]
        clock.now += 3600 * SECOND
        log.tidy("t")
        assert (log.offsets("t"), segments_of(tmp_path)) == ({0: range(40, 40)}, [40])
        filled(log, 2, start=40)
        assert numbers_of(log) == [40, 41]


def test_sealed_segments_expire_as_frames_do(tmp_path: Path) -> None:
    """Both by time and by size, with their indexes."""
    clock = Hands()
    with open_log(str(tmp_path), clock=clock) as log:
        filled(log, 60)
        assert log.seal("t") > 3
        filled(log, 20, start=60)
        log.alter_topic("t", retention_bytes=12_000)
        assert log.tidy("t") > 0
        kept = sum(path.stat().st_size for path in (tmp_path / "topics" / "t" / "0").glob("0*"))
        assert 12_000 <= kept < 12_000 + 3 * 4096
        assert numbers_of(log) == list(log.offsets("t")[0])
        log.alter_topic("t", retention="1 second")
        clock.now += 2 * SECOND
        log.tidy("t")
        assert log.offsets("t") == {0: range(80, 80)}


def test_a_topic_file_from_before_retention_is_kept_for_ever(tmp_path: Path) -> None:
    """Its settings have a default."""
    from headwater.log.disk.text import read_text, write_text

    with open_log(str(tmp_path)) as log:
        filled(log, 3)
    path = str(tmp_path / "topics" / "t" / "topic")
    fields = read_text(RealDisk(), path, "topic")
    write_text(RealDisk(), path, "topic", {k: v for k, v in fields.items() if not k.startswith("retention")})
    with open_log(str(tmp_path)) as log:
        assert (log.topic("t").retention_us, log.tidy("t"), numbers_of(log)) == (None, 0, [0, 1, 2])


def test_a_head_from_before_retention_begins_at_0(tmp_path: Path) -> None:
    """And takes a first offset as any other does."""
    with open_log(str(tmp_path)) as log:
        filled(log, 30)
    head = tmp_path / "topics" / "t" / "0" / "head"
    content = bytearray(head.read_bytes())
    content[512 * 5 : 512 * 6] = bytes(512)
    head.write_bytes(content)
    assert examine(str(tmp_path)).findings == []
    with open_log(str(tmp_path)) as log:
        assert log.offsets("t") == {0: range(30)}
        log.alter_topic("t", retention_bytes=4096)
        first = log.tidy("t")
        assert log.offsets("t") == {0: range(first, 30)}
    assert examine(str(tmp_path)).findings == []


def test_it_happens_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever process has the topic open and may write to it."""
    monkeypatch.setattr(keeper.Keeper.__init__, "__kwdefaults__", {"after_s": 0.05, "every_s": 0.05})
    with open_log(str(tmp_path)) as log:
        filled(log, 30, retention="10 ms")
        deadline = time.monotonic() + 20
        while log.counters().get("expired", 0) < 30:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert (log.counters()["expired"], log.offsets("t")) == (30, {0: range(30, 30)})


def test_a_scan_of_all_goes_on_where_retention_lets_it(tmp_path: Path) -> None:
    """It asked for what there is; who named an offset is told."""
    with open_log(str(tmp_path)) as log:
        filled(log, 200)
        whole, named = log.scan("t"), log.scan("t", start=0)
        log.alter_topic("t", retention_bytes=4096)
        first = log.tidy("t")
        assert whole.read_all()["n"].to_pylist() == list(range(first, 200))
        with pytest.raises((EventsMissed, OSError)):
            named.read_all()


def test_the_doctor_knows_the_first_offset(tmp_path: Path) -> None:
    """What lies below it is left over; what is missing above it is missing; a lost head is made again."""
    with open_log(str(tmp_path)) as log:
        filled(log, 40)
        log.alter_topic("t", retention_bytes=8192)
        folder = tmp_path / "topics" / "t" / "0"
        oldest = (folder / segment_name(0)).read_bytes()
        first = log.tidy("t")
    assert examine(str(tmp_path)).findings == []
    (folder / segment_name(0)).write_bytes(oldest)
    report = examine(str(tmp_path), repair=True)
    assert [(finding.severity, finding.repaired) for finding in report.findings] == [("warning", True)]
    assert segments_of(tmp_path)[0] == first
    (folder / "head").unlink()
    assert examine(str(tmp_path), repair=True).healthy
    with open_log(str(tmp_path)) as log:
        assert numbers_of(log) == list(range(first, 40))
    (folder / segment_name(first)).unlink()
    assert not examine(str(tmp_path)).healthy


@pytest.mark.parametrize("seed", range(12))
def test_no_crash_and_no_power_loss_leaves_a_hole(seed: int) -> None:
    """Simulated: the first offset never goes back, what lies behind it is whole, and files before it go at last."""
    disk, chance, clock = SimDisk(seed), random.Random(seed), Hands()
    count = first = tidied = 0
    for life in range(8):
        name = f"life-{life}"
        if chance.random() < 0.8:
            disk.crash_at(name, chance.choice(POINTS), chance.randint(1, 4))
        try:
            log = open_log("/disk/log", disk=disk.process(name), clock=clock)
            filled(log, 0, size=0)
            log.alter_topic("t", retention="1 hour", retention_bytes=chance.choice((4096, 9000, 1 << 30)))
            for _ in range(3):
                start = log.offsets("t")[0]
                assert start.start >= first and start.stop >= count, f"seed {seed}"
                first, count = start.start, start.stop
                assert numbers_of(log) == list(start), f"seed {seed}"
                filled(log, chance.randint(1, 25), start=count)
                count = log.offsets("t")[0].stop
                if chance.random() < 0.3:
                    log.seal("t")
                clock.now += chance.choice((0, 0, 1801, 3601)) * SECOND
                log.tidy("t")
                first = tidied = log.offsets("t")[0].start
            log.close()
        except Crashed:
            pass
        if chance.random() < 0.4:
            disk.power_loss()
            first = tidied  # what was given up without a sync may come back
    disk.heal()
    log = open_log("/disk/log", disk=disk.process("last"), clock=clock)
    log.tidy("t")
    offsets = log.offsets("t")[0]
    assert numbers_of(log) == list(offsets)
    bases = [int(path.rpartition("/")[2][:20]) for path in disk.paths() if "/t/0/0" in path]
    assert min(bases) >= offsets.start
    assert examine("/disk/log", disk=disk.process("doctor")).healthy


@pytest.mark.parametrize("seed", range(8))
def test_what_a_dead_process_gave_up_is_on_disk_before_it_is_removed(seed: int) -> None:
    """One is killed before its sync, the next removes the files, the power fails: the first offset is not before them."""
    disk = SimDisk(seed)
    log = open_log("/disk/log", disk=disk.process("first"))
    filled(log, 60)
    log.alter_topic("t", retention_bytes=4096)
    disk.crash_at("first", "retention: first published")
    with pytest.raises(Crashed):
        log.tidy("t")
    disk.crash_at("second", "retention: removed one", 9)
    with pytest.raises(Crashed):
        open_log("/disk/log", disk=disk.process("second")).tidy("t")
    disk.power_loss()
    log = open_log("/disk/log", disk=disk.process("third"))
    assert numbers_of(log) == list(log.offsets("t")[0])
    assert examine("/disk/log", disk=disk.process("doctor")).healthy


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_killed_while_it_gives_up_segments(tmp_path: Path, point: str) -> None:
    """Real processes, killed with SIGKILL at every step; the oracle is the list of numbers that were acknowledged."""
    account = tmp_path / "account"

    def work() -> None:
        with headwater.open_log(str(tmp_path / "log"), disk=CrashingDisk(point, 2)) as log, account.open("a") as lines:
            filled(log, 0, retention_bytes=8192, durability="os")
            while True:
                number = log.offsets("t")[0].stop
                filled(log, 1, start=number)
                os.write(lines.fileno(), json.dumps(number).encode() + b"\n")
                if number % 20 == 19:
                    log.tidy("t")

    for _ in range(3):
        child = Child(work)
        assert os.WTERMSIG(child.wait()) == signal.SIGKILL
    acknowledged = [json.loads(line) for line in account.read_text().splitlines()]
    with headwater.open_log(str(tmp_path / "log")) as log:
        held = log.offsets("t")[0]
        assert held.start > 0 and held.stop > acknowledged[-1]
        assert numbers_of(log) == list(held)
        assert set(acknowledged) <= set(range(held.stop))
        log.tidy("t")
        assert segments_of(tmp_path / "log")[0] == log.offsets("t")[0].start
    assert examine(str(tmp_path / "log")).healthy


class RacingDisk(RealDisk):
    """Does something the moment a file of a segment is opened, once."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.meanwhile: Callable[[], object] | None = None

    def open(self, path: str, mode: Mode = "read") -> File:
        if self.meanwhile is not None and segment_name(self.base) in path:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return super().open(path, mode)


def test_a_reader_that_is_overtaken_within_a_poll_is_told_of_all_it_missed(tmp_path: Path) -> None:
    """What it had read before is not taken for missed, and nothing between is left out of the account."""
    with open_log(str(tmp_path)) as log:
        filled(log, 60)
        log.alter_topic("t", retention_bytes=8192)
    second = segments_of(tmp_path)[1]
    disk = RacingDisk(second)
    with headwater.open_log(str(tmp_path), disk=disk) as log, open_log(str(tmp_path)) as other:
        disk.meanwhile = lambda: other.tidy("t")
        reader = log.reader("t", start=0)
        read = [event.offset for event in reader.poll(events_max=40, timeout_s=0)]
        assert read == list(range(second)) and disk.meanwhile is None
        with pytest.raises(EventsMissed) as caught:
            reader.poll(timeout_s=0)
        assert (caught.value.first, caught.value.last + 1) == (second, log.offsets("t")[0].start)


@pytest.mark.parametrize("look", range(1, 7))
def test_events_that_go_between_two_looks_are_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    """Retention may run between any two questions of a reader for the first offset: it reads on, or says what it missed."""
    with open_log(str(tmp_path)) as log, open_log(str(tmp_path)) as other:
        filled(other, 100, retention_bytes=8192)
        reader = log.reader("t", start=0)
        head = log.store.handles.partition("t", 0)._head
        firsts, looks = head.firsts, 0

        def moved() -> tuple[int, int]:
            nonlocal looks
            looks += 1
            if looks == look:
                other.tidy("t")
            return firsts()

        monkeypatch.setattr(head, "firsts", moved)
        missed = None
        try:
            events = reader.poll(events_max=5, timeout_s=5)
        except EventsMissed as error:
            missed = (error.first, error.last + 1)
        if missed is None:
            assert [event.offset for event in events] == list(range(5))
        else:
            assert missed == (0, other.offsets("t")[0].start)


@pytest.mark.slow
def test_readers_and_writers_go_on_beside_it(tmp_path: Path) -> None:
    """A reader in another process sees every number in order but those it is told it missed."""
    with open_log(str(tmp_path)) as log:
        filled(log, 1, retention_bytes=8192, durability="os")

    def read() -> tuple[int, int]:
        expected = missed = 0
        told = []
        with open_log(str(tmp_path)) as log:
            reader = log.reader("t", start=0)
            while expected < 1500:
                try:
                    events = reader.poll(events_max=40, timeout_s=20)
                except EventsMissed as error:
                    told.append((error.first, expected))
                    missed, expected = missed + error.count, error.last + 1
                    reader.seek({0: expected})
                    continue
                for event in events:
                    assert event.offset == event.value["n"] == expected
                    expected += 1
        assert all(first == stood for first, stood in told)
        return expected, missed

    child = Child(read)
    with open_log(str(tmp_path)) as log:
        for start in range(1, 1500, 50):
            filled(log, 50, start=start)
            try:
                log.tidy("t")
            except HeadwaterError as error:
                pytest.fail(f"{error}")
    assert child.result()[0] >= 1500
