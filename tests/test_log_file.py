"""The local log as a folder: how it is opened, shared and closed, and what others may do to it."""

from __future__ import annotations

import gc
import os
import shutil
import stat
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest

import headwater as hw
from children import NOBODY, in_child
from headwater.log import local, memory  # noqa: F401 (a child with another user may not be able to load them)
from headwater.log.disk import RealDisk
from headwater.log.log import Log
from headwater.model.errors import (
    Closed,
    InvalidInput,
    LogNotFound,
    NoAccess,
    StorageError,
    Unsupported,
)
from headwater.testing.contract_case import ORDERS, events_of, orders, refused, values_of

ROOT = os.getuid() == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can reach."""
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        yield Path(parent) / "log"


def filled(folder: Path, *, events: int = 10, **settings: Any) -> Log:
    """A log with one topic of bytes in one partition."""
    log = hw.open_log(str(folder))
    log.create_topic("raw", partitions=1, **settings)
    log.append("raw", [b"%d" % number for number in range(events)])
    return log


def as_nobody(work: Callable[[], Any]) -> Any:
    """What the function gives in a process without rights."""
    return in_child(work, user=NOBODY if ROOT else None)


@pytest.mark.parametrize("form", ["{}", "file://{}", "{}/", "{}/../log"])
def test_a_log_is_opened_by_path_or_url(folder: Path, form: str) -> None:
    """It is the same log, and says where it is."""
    filled(folder).close()
    with hw.open_log(form.format(folder)) as log:
        assert log.url == f"file://{folder}"
        assert len(values_of(log, "raw")) == 10


def test_a_path_object_is_a_path(folder: Path) -> None:
    """Everybody has one."""
    filled(folder).close()
    with hw.open_log(folder) as log:
        assert len(values_of(log, "raw")) == 10


def test_a_relative_path_means_the_folder_it_meant_when_it_was_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may change its folder afterwards."""
    monkeypatch.chdir(folder.parent)
    with hw.open_log("./log") as log:
        log.create_topic("raw", partitions=1)
        monkeypatch.chdir("/")
        log.append("raw", [b"x"])
        log.create_topic("other")
    assert (folder / "topics" / "other").is_dir()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("", InvalidInput),
        ("file://", InvalidInput),
        ("http://example.org/log", Unsupported),
        ("nonsense://x", Unsupported),
        (None, InvalidInput),
        (7, InvalidInput),
    ],
)
def test_a_url_that_names_no_log_is_refused(url: Any, error: type[hw.HeadwaterError]) -> None:
    """With what can be opened."""
    with refused(error):
        hw.open_log(url)


def test_an_offset_that_is_not_there_names_those_that_are(folder: Path) -> None:
    """From the first to the last."""
    with filled(folder) as log:
        with refused(InvalidInput, "offsets 0 to 9;"):
            log.reader("raw", start={0: 11})
        log.create_topic("empty", partitions=1)
        with refused(InvalidInput, "holds no events"):
            log.reader("empty", start={0: 1})


def test_a_place_where_no_log_can_be_is_told_as_such(folder: Path) -> None:
    """Not as damage: there is nothing for the doctor to look at."""
    with refused(NoAccess, "/proc/nowhere", "path"):
        hw.open_log("/proc/nowhere")
    with refused(InvalidInput, "names no log", "kafka://host:9092"):
        hw.open_log("kafka://")


@pytest.mark.parametrize("more", [{"durability": "perhaps"}, {"read_only": True, "create": True}])
def test_opening_with_settings_that_cannot_work(folder: Path, more: dict[str, Any]) -> None:
    """A durability nobody knows is refused at once; read-only never makes a log."""
    with pytest.raises(hw.HeadwaterError) as caught:
        hw.open_log(str(folder), **more)
    assert caught.value.advice
    assert not folder.exists()


def test_a_log_that_is_not_there_is_not_made_unless_asked(folder: Path) -> None:
    """A typing mistake in a path is found at once."""
    for more in ({"create": False}, {"read_only": True}):
        with refused(LogNotFound, str(folder)):
            hw.open_log(str(folder), **more)
    assert not folder.exists()


def test_a_file_is_not_a_log(folder: Path) -> None:
    """The error names it."""
    folder.write_text("not a folder")
    with pytest.raises(hw.HeadwaterError, match=str(folder)) as caught:
        hw.open_log(str(folder))
    assert caught.value.advice
    with pytest.raises(hw.HeadwaterError, match=str(folder)):
        hw.open_log(str(folder / "below"))
    assert folder.read_text() == "not a folder"


def test_a_log_opened_read_only_is_read_and_followed_and_never_written(folder: Path) -> None:
    """Not one byte of it, whatever is asked."""
    log = filled(folder)
    with log.consumer("raw", group="g") as consumer:
        consumer.poll(events_max=4)
    with log.queue("raw") as queue:
        queue.ack(queue.lease(events_max=2))
    before = fingerprint(folder)
    with hw.open_log(str(folder), read_only=True) as reading:
        assert len(values_of(reading, "raw")) == 10
        assert reading.table("raw").num_rows == 0
        assert reading.offsets_at("raw", 0) == {0: 0}
        writes: list[Callable[[], object]] = [
            lambda: reading.append("raw", [b"x"]),
            lambda: reading.append("raw", [b"x"], atomic=True),
            lambda: reading.create_topic("new"),
            lambda: reading.alter_topic("raw", lateness="1 second"),
            lambda: reading.delete_topic("raw"),
            lambda: reading.producer(id="x"),
            lambda: reading.producer().send("raw", b"x").result(),
            lambda: reading.consumer("raw", group="g"),
            lambda: reading.reset_group("g", to="earliest"),
            lambda: reading.delete_group("g"),
            lambda: reading.queue("raw").lease(),
            lambda: reading.delete_queue("raw"),
            lambda: reading.request("raw", b"x", timeout_s=0.1),
            lambda: reading.stage("s"),
            lambda: reading.seal("raw"),
            lambda: reading.tidy("raw"),
        ]
        for write in writes:
            with pytest.raises(StorageError, match="read-only") as caught:
                write()
            assert caught.value.advice
        assert fingerprint(folder) == before
        assert (reading.groups(), reading.group("g").partitions[0].committed) == (["g"], 4)
        with reading.reader("raw", start="latest") as reader:
            assert reader.poll(timeout_s=0) == []
            log.append("raw", [b"followed"])
            assert [event.value for event in reader.poll(timeout_s=10)] == [b"followed"]
    log.close()


def fingerprint(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_without_rights_is_refused_by_name(folder: Path) -> None:
    """Reading, making and writing: what the operating system refuses is said in our words."""
    filled(folder).close()

    def use() -> list[str]:
        codes = []
        for attempt in (
            lambda: hw.open_log(str(folder)),
            lambda: hw.open_log(str(folder), read_only=True),
            lambda: hw.open_log(str(folder.parent / "new")),
        ):
            with pytest.raises(hw.HeadwaterError, match=str(folder.parent)) as caught:
                attempt()
            assert caught.value.advice
            codes.append(caught.value.code)
        return codes

    folder.chmod(0)
    folder.parent.chmod(0o555)
    try:
        assert as_nobody(use) == [NoAccess.code] * 3
    finally:
        folder.parent.chmod(0o755)
        folder.chmod(0o755)


@pytest.mark.skipif(not ROOT, reason="needs two users")
def test_a_user_who_may_only_read_opens_it_read_only(folder: Path) -> None:
    """The error says so; everything but writing then works, following included."""
    log = filled(folder)

    def use() -> list[bytes]:
        with refused(NoAccess, "read_only=True"):
            hw.open_log(str(folder))
        with hw.open_log(str(folder), read_only=True) as reading, reading.reader("raw") as reader:
            assert len(reader.poll()) == 10
            log_file.touch()
            return [event.value for event in reader.poll(timeout_s=20)]

    log_file = Path(tempfile.mkstemp(prefix="ready")[1])
    log_file.unlink()

    def append_when_ready() -> None:
        while not log_file.exists():
            time.sleep(0.005)
        log.append("raw", [b"followed"])

    writer = threading.Thread(target=append_when_ready)
    writer.start()
    assert as_nobody(use) == [b"followed"]
    writer.join()
    log_file.unlink()
    log.close()


@pytest.mark.skipif(not ROOT, reason="needs two users")
def test_a_partition_without_rights_refuses_its_events_only(folder: Path) -> None:
    """The others go on."""
    log = filled(folder)
    log.create_topic("other", partitions=1)
    log.close()
    subprocess.run(["chown", "-R", str(NOBODY), str(folder)], check=True)
    for path in (folder / "topics" / "raw").rglob("*"):
        os.chown(path, 0, 0)
        path.chmod(stat.S_IRUSR)

    def use() -> int:
        with hw.open_log(str(folder)) as mine:
            with pytest.raises(NoAccess, match="raw"):
                mine.append("raw", [b"x"])
            mine.append("other", [b"x"])
            return len(values_of(mine, "other"))

    assert as_nobody(use) == 1


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


class Held:
    """Something that a program has at hand while it waits for a receipt."""


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
