"""The local log as a folder of segments: how it rolls, is read by others, and frees what it held when it is closed or gone."""

from __future__ import annotations

import gc
import os
import shutil
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from crc32c import crc32c

import headwater as hw
from headwater.log.disk.disk import File, Map, Mode, RealDisk, RealFile
from headwater.log.file.segments.segment import Segment, segment_name
from headwater.log.log import Log
from headwater.model.errors import Closed, Damaged, InvalidInput, Poisoned, StorageError, TopicNotFound
from headwater.testing.contracts.case import ORDERS, events_of, orders, refused, values_of
from tests.rigs.children import in_child
from tests.rigs.log.folders import filled, open_folders


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can reach."""
    yield from open_folders()


def test_an_offset_that_is_not_there_names_those_that_are(folder: Path) -> None:
    """From the first to the last."""
    with filled(folder) as log:
        with refused(InvalidInput, "offsets 0 to 9;"):
            log.reader("raw", start={0: 11})
        log.create_topic("empty", partitions=1)
        with refused(InvalidInput, "holds no events"):
            log.reader("empty", start={0: 1})


def test_a_log_whose_folder_is_gone_says_so(folder: Path) -> None:
    """Not with an error of the operating system."""
    log = filled(folder)
    shutil.rmtree(folder)
    uses: list[Callable[[], object]] = [
        log.topics,
        lambda: log.create_topic("new"),
        lambda: log.topic("other"),
        lambda: hw.open_log(str(folder), create=False),
    ]
    for use in uses:
        with pytest.raises(hw.HeadwaterError) as caught:
            use()
        assert caught.value.advice
    log.close()


def test_segments_roll_and_everything_stays_readable(folder: Path) -> None:
    """By a reader that follows, by one that comes later, from any offset, sealed or not."""
    with hw.open_log(str(folder)) as log:
        log.create_topic("raw", partitions=1, segment_bytes=4096)
        values = [b"%d" % number * (number % 50 + 1) for number in range(300)]
        with log.reader("raw") as following:
            followed = []
            for start in range(0, 300, 7):
                log.append("raw", values[start : start + 7])
                followed += [event.value for event in following.poll(timeout_s=0)]
            assert followed == values
            assert len(list(folder.glob("topics/raw/0/*.frames"))) > 5
            assert values_of(log, "raw") == values
            log.store.seal("raw")
            assert len(list(folder.glob("topics/raw/0/*.arrow"))) > 5
            assert values_of(log, "raw") == values
            for start in range(0, 300, 23):
                found = log.read("raw", start=start, end=min(start + 30, 300)).column("value").to_pylist()
                assert found == values[start : start + 30]
            log.append("raw", [b"more"])
            assert [event.value for event in following.poll(timeout_s=0)] == [b"more"]


def test_a_batch_larger_than_a_segment_is_stored_whole(folder: Path) -> None:
    """And so is a single event."""
    with hw.open_log(str(folder)) as log:
        log.create_topic("raw", partitions=1, segment_bytes=4096)
        log.append("raw", [b"before"])
        log.append("raw", [b"x" * 20_000])
        log.append("raw", [b"%d" % number for number in range(2_000)])
        with log.transaction() as transaction:
            transaction.append("raw", [b"y" * 20_000])
        found = values_of(log, "raw")
    assert found == [b"before", b"x" * 20_000, *(b"%d" % number for number in range(2_000)), b"y" * 20_000]


def test_a_follower_survives_a_roll_at_the_end_of_a_page(folder: Path) -> None:
    """What a reader has mapped may have been cut since: it never looks behind the end of the file."""

    def follow() -> int:
        followed = 0
        with hw.open_log(str(folder), durability="os") as log:
            for size in range(11_700, 12_400, 64):
                name = f"t{size}"
                log.create_topic(name, partitions=1, segment_bytes=16_384)
                with log.reader(name) as reader:
                    for _ in range(3):
                        log.append(name, [b"x" * size])
                        followed += len(reader.poll(timeout_s=0))
        return followed

    assert in_child(follow) == 3 * len(range(11_700, 12_400, 64))


def test_a_sealed_segment_is_read_by_others_without_us(folder: Path) -> None:
    """It is an Arrow file: pyarrow, Polars and DuckDB see the rows that were appended."""
    rows = orders(500)
    with hw.open_log(str(folder)) as log:
        log.create_topic("orders", ORDERS, key="id", partitions=1, segment_bytes=4096)
        log.append("orders", rows)
        log.append("orders", [{"id": "o1", "_deleted": True, "_headers": {"why": b"asked"}}])
        log.append("orders", rows)
        log.store.seal("orders")
    first, second = sorted(folder.glob("topics/orders/0/*.arrow"))
    frame = pl.read_ipc(first)
    assert frame.drop("_appended").to_dicts() == rows
    asked = duckdb.from_arrow(pa.ipc.open_file(first).read_all()).aggregate("count(*), sum(amount), max(id)")
    assert asked.fetchall() == [(500, 124_750.0, "o99")]
    with_extras = pa.ipc.open_file(second).read_all()
    assert with_extras.select(["id", "_deleted"]).to_pylist() == [{"id": "o1", "_deleted": True}]


def test_sealing_does_not_disturb_who_looks_at_that_moment(folder: Path) -> None:
    """A file that is gone between finding and opening it is looked for again."""

    class SealedMeanwhile(RealDisk):
        """Somebody else seals whenever this process has listed a partition's files."""

        def names(self, folder: str) -> list[str]:
            found = super().names(folder)
            if folder.endswith("/raw/0"):
                sealing.store.seal("raw")
            return found

    with hw.open_log(str(folder)) as sealing:
        sealing.create_topic("raw", partitions=1, segment_bytes=4096)
        values = []
        for round_ in range(4):
            values += [b"%d" % number * 10 for number in range(50)]
            for value in values[50 * round_ :]:
                sealing.append("raw", [value])
            with hw.open_log(str(folder), disk=SealedMeanwhile()) as looking:
                if round_ % 2:
                    assert looking.offsets_at("raw", events_of(sealing, "raw")[0].appended) == {0: 0}
                else:
                    assert values_of(looking, "raw") == values


class Meddled(RealDisk):
    """A disk on which other things happen just before a process looks at certain paths, one after the other."""

    def __init__(self) -> None:
        self.happenings: list[tuple[str, Callable[[], object]]] = []

    def _happen(self, path: str) -> None:
        if self.happenings and path.endswith(self.happenings[0][0]):
            self.happenings.pop(0)[1]()

    def exists(self, path: str) -> bool:
        self._happen(path)
        return super().exists(path)

    def open(self, path: str, mode: Mode = "read") -> File:
        self._happen(path)
        return super().open(path, mode)

    def map(self, path: str, length: int, *, writable: bool = True) -> Map:
        self._happen(path)
        return super().map(path, length, writable=writable)


def test_a_topic_that_comes_and_goes_under_a_look_lacks_nothing(folder: Path) -> None:
    """It is not there, is made, and is deleted again before the look has ended: that is no damage."""
    with hw.open_log(str(folder)) as other:
        disk = Meddled()
        with hw.open_log(str(folder), disk=disk) as log:
            disk.happenings += [
                ("/t/topic", lambda: None),  # the first look comes before all that
                ("/t/0/head", lambda: other.create_topic("t", partitions=1)),
                ("/t/topic", lambda: other.delete_topic("t")),
            ]
            with pytest.raises(TopicNotFound):
                log.topic("t")
    assert not disk.happenings


def test_a_topic_that_was_made_again_with_fewer_partitions_lacks_none(folder: Path) -> None:
    """Another topic has the name now. The partition that was to be opened is that of one that is deleted."""

    def make_again() -> None:
        other.delete_topic("t")
        other.create_topic("t", partitions=1)

    with hw.open_log(str(folder)) as other:
        other.create_topic("t", partitions=2)
        disk = Meddled()
        with hw.open_log(str(folder), disk=disk) as log:
            disk.happenings.append(("/t/1/head", make_again))
            with pytest.raises(TopicNotFound):
                log.store.handles.partition("t", 1)
    assert not disk.happenings


def test_a_file_that_is_cut_and_grows_again_while_it_is_mapped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead writer's end is cut and written over between a reader's look at the length and its mapping: the reader looks again."""
    refusals, view = 3, RealFile.view

    def cut_for_a_moment(file: RealFile, length: int) -> pa.Buffer:
        nonlocal refusals
        if file.path.endswith(".frames") and refusals:
            refusals -= 1
            raise Damaged(f"{file.path} is shorter than {length} bytes.", advice="Run `headwater doctor` on this log.")
        return view(file, length)

    with hw.open_log(str(folder)) as log:
        log.create_topic("t", partitions=1)
        log.append("t", [b"1"])
    monkeypatch.setattr(RealFile, "view", cut_for_a_moment)
    with hw.open_log(str(folder)) as log:
        assert values_of(log, "t") == [b"1"]
    assert not refusals


class Held:
    """Something that a program has at hand while it waits for a receipt."""


def test_the_partitions_of_a_transaction_are_synced_side_by_side(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None waits for another; and all of them are on disk before the transaction is decided."""
    together, synced, sync = threading.Barrier(3, timeout=30), [], RealFile.sync

    def noted(file: RealFile) -> None:
        if "/topics/" in file.path:
            together.wait()
        sync(file)
        synced.append(Path(file.path).relative_to(folder).parts[:2])

    with hw.open_log(str(folder)) as log:
        for name in ("a", "b", "c"):
            log.create_topic(name, partitions=1)
        monkeypatch.setattr(RealFile, "sync", noted)
        with log.transaction() as transaction:
            for name in ("a", "b", "c"):
                transaction.append(name, [b"x"])
        assert sorted(synced[:3]) == [("topics", "a"), ("topics", "b"), ("topics", "c")] and synced[3:] == [
            ("commits",)
        ]


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_transaction_of_which_one_sync_fails_did_not_happen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whichever thread it fails in, the writer is told when all of them are done; nothing was published."""
    sync, running = RealFile.sync, []

    def failing(file: RealFile) -> None:
        running.append(file.path)
        if f"/topics/{name}/" in file.path:
            running.remove(file.path)
            raise StorageError("The disk is broken.", advice="Replace it.")
        time.sleep(0.05)
        sync(file)
        running.remove(file.path)

    with hw.open_log(str(folder)) as log:
        for each in ("a", "b", "c"):
            log.create_topic(each, partitions=1)
        transaction = log.transaction()
        for each in ("a", "b", "c"):
            transaction.append(each, [b"x"])
        with monkeypatch.context() as patch:
            patch.setattr(RealFile, "sync", failing)
            with pytest.raises(Poisoned):
                transaction.commit()
        assert not running
        assert [log.offsets(each) for each in ("a", "b", "c")] == [{0: range(0)}] * 3


def test_a_failed_receipt_keeps_nothing_alive(folder: Path) -> None:
    """The error is kept for whoever asks again, without the frames that it went through: nobody could collect those."""

    def fail(log: Log) -> weakref.ref[Held]:
        held = Held()
        with log.producer() as producer:
            receipts = [producer.send("raw", b"fits"), producer.send("raw", b"x" * 100)]
            with pytest.raises(InvalidInput):
                receipts[1].result()
            with pytest.raises(InvalidInput):
                producer.flush()
            assert receipts[0].result().offset == 0
        return weakref.ref(held)

    with filled(folder, events=0, event_bytes_max=50) as log:
        found = fail(log)
        gc.collect()
        assert found() is None


def test_a_log_that_nobody_holds_is_closed(folder: Path) -> None:
    """Though it has a thread that looks after its topics."""
    log = filled(folder, retention="1 day")
    handle = weakref.ref(log.store)
    before = len(os.listdir("/proc/self/fd"))
    del log
    gc.collect()
    assert handle() is None
    assert len(os.listdir("/proc/self/fd")) < before


def test_reading_leaves_no_file_open(folder: Path) -> None:
    """A program that reads for a year has as many descriptors in the end as after an hour."""
    with hw.open_log(str(folder)) as log:
        log.create_topic("raw", partitions=2, segment_bytes=4096)
        for number in range(40):
            log.append("raw", [b"%d" % number * 50])

        def use() -> None:
            log.read("raw")
            log.offsets_at("raw", 0)
            log.offsets("raw")
            with log.reader("raw") as reader:
                reader.poll(events_max=3)
                reader.poll(timeout_s=0.001)
            log.reader("raw").poll(events_max=1)
            next(iter(log.scan("raw")))

        use()
        before = descriptors()
        for _ in range(20):
            use()
        assert descriptors() <= before + 2
    assert not [path for path in open_paths() if str(folder) in path]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def open_paths() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


@pytest.mark.parametrize("delay_ms", range(5, 35, 3))
def test_closing_while_threads_use_it_says_closed_to_each(folder: Path, delay_ms: int) -> None:
    """Writers, readers and waiters end with `Closed` and nothing else, and everything acknowledged is there."""
    log = hw.open_log(str(folder), durability="os")
    log.create_topic("raw", partitions=2)
    acknowledged: list[int] = []
    errors: list[Exception] = []

    def use(work: Callable[[], object]) -> None:
        try:
            while True:
                work()
        except Exception as error:  # noqa: BLE001 (which kinds are allowed is the test)
            errors.append(error)

    def append() -> None:
        log.append("raw", [b"x"])
        acknowledged.append(1)

    with log.reader("raw") as reader:
        works: list[Callable[[], object]] = [
            append,
            append,
            lambda: log.read("raw"),
            lambda: reader.poll(timeout_s=5),
            lambda: log.offsets_at("raw", 0),
        ]
        threads = [threading.Thread(target=use, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        time.sleep(delay_ms / 1000)
        log.close()
        for thread in threads:
            thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert [repr(error) for error in errors if not isinstance(error, Closed)] == []
    with hw.open_log(str(folder)) as again:
        assert sum(map(len, again.offsets("raw").values())) >= len(acknowledged)


@pytest.mark.parametrize("days", [29, 31])
def test_a_named_producer_is_remembered_by_time_and_not_by_how_many_others_there_are(folder: Path, days: int) -> None:
    """Of producers without a name 1,000 are remembered, and they displace none with one, which is for 30 days."""
    now_us = 1_700_000_000_000_000

    def import_all(log: hw.Log) -> None:
        with log.producer(id="importer", linger_ms=0) as producer:
            for line in range(3):
                producer.send("raw", b"line %d" % line, sequence=line)

    with hw.open_log(str(folder), durability="os", clock=lambda: now_us) as log:
        log.create_topic("raw", partitions=1, segment_bytes=1 << 16)
        import_all(log)
        now_us += days * 86_400_000_000
        for number in range(1_300):
            with log.producer(linger_ms=0) as producer:
                producer.send("raw", b"%d" % number)
        log.append("raw", [b"x" * 1_000] * 200)
    with hw.open_log(str(folder), clock=lambda: now_us) as log:
        newest = max(folder.glob("topics/raw/0/*.frames"))
        segment = Segment(RealDisk(), str(newest.parent), int(newest.stem))
        assert len(segment.header.producers) == (1_001 if days < 30 else 1_000)
        segment.close()
        import_all(log)
        lines = [value for value in values_of(log, "raw") if value.startswith(b"line")]
        assert len(lines) == (3 if days < 30 else 6)


def test_a_segment_from_before_names_were_kept_apart_is_read(tmp_path: Path) -> None:
    """Its producers are those it names; one with a name counts as having appended when the segment began."""
    count, appended = 3, 1_700_000_000_000_000
    size = 48 + 36 * count
    size += -size % 64
    data = bytearray(size)
    struct.pack_into("<6sHqqqIII", data, 0, b"HWSEGM", 1, 7, 5, appended, 9, size, count)
    for number in range(count):
        struct.pack_into("<16sIqq", data, 48 + 36 * number, bytes([number + 1]) * 16, number, 10 + number, 7)
    struct.pack_into("<I", data, 44, crc32c(data))
    (tmp_path / segment_name(7)).write_bytes(data)
    segment = Segment(RealDisk(), str(tmp_path), 7)
    assert segment.start == size
    assert {name[:1]: (found.epoch, found.last, found.at) for name, found in segment.header.producers.items()} == {
        b"\x01": (0, 10, appended),
        b"\x02": (1, 11, appended),
        b"\x03": (2, 12, appended),
    }
    segment.close()
