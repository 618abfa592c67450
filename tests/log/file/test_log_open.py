"""A local log that is opened: by path or URL, read only, without rights, or where none is."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import headwater as hw
from headwater.log.memory import store as memory  # noqa: F401 (a child with another user may not be able to load them)
from headwater.model.errors import InvalidInput, LogNotFound, NoAccess, StorageError, Unsupported
from headwater.testing.contracts.case import refused, values_of
from tests.rigs.children import NOBODY, in_child
from tests.rigs.log.folders import filled, open_folders

ROOT = os.getuid() == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can reach."""
    yield from open_folders()


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
        ("a\0b", InvalidInput),
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


@pytest.mark.skipif(not ROOT, reason="needs two users")
def test_users_of_one_group_share_a_log(folder: Path) -> None:
    """With umask 002 and a folder that gives its group to what is made in it, each does everything with what others made."""
    folder.mkdir()
    os.chown(folder, 0, STAFF)
    folder.chmod(0o2775)

    def use(name: str, where: Path = folder) -> list[bytes]:
        with hw.open_log(str(where)) as log:
            log.create_topic("raw", partitions=2, segment_bytes=4096, retention_bytes=1, exist_ok=True)
            log.create_topic(f"of-{name[0]}", partitions=1)
            log.append("raw", [name.encode() + b"x" * 500] * 20)
            log.append("raw", [name.encode()], atomic=True)
            with log.producer(id="shared") as producer:
                producer.send("raw", name.encode()).result()
            with log.consumer("raw", group="readers", missed="skip") as consumer:
                assert consumer.poll(timeout_s=10)
            with log.queue("raw", group="workers", deliveries_max=1) as queue:
                leases = queue.lease(events_max=10, timeout_s=10)
                queue.ack(leases[:3])
                queue.reject(leases[3:5], "poison")
                with log.transaction() as unit:
                    unit.append(f"of-{name[0]}", [b"done"])
                    unit.ack(leases[5:])
                queue.redrive()
            log.stage("shared")
            log.seal("raw")
            log.tidy("raw")
            log.alter_topic("raw", partitions=2 * log.topic("raw").partitions)
            return [event.value[:1] for event in log.reader("raw", missed="skip").poll(events_max=10_000)]

    use("loads every module while they may be read", folder.with_name("other"))
    for name, user in (("a", 1_001), ("b", 1_002), ("c", 1_001)):
        assert as_member(lambda name=name: use(name), user)
    for path in folder.rglob("*"):
        mode = path.stat().st_mode
        assert path.stat().st_gid == STAFF and mode & 0o070 >= (0o070 if path.is_dir() else 0o060), path


@pytest.mark.skipif(not ROOT, reason="needs two users")
def test_one_who_may_only_read_is_told_so_where_something_is_written(folder: Path) -> None:
    """In one sentence with its code, whatever was to be written; reading works, with a log that is opened for that."""
    filled(folder).close()

    def use() -> tuple[str, int]:
        with pytest.raises(NoAccess) as refusal:
            hw.open_log(str(folder)).append("raw", [b"x"])
        with hw.open_log(str(folder), read_only=True) as log:
            for attempt in (
                lambda: log.append("raw", [b"x"]),
                lambda: log.create_topic("more"),
                lambda: log.producer(id="me"),
                lambda: log.consumer("raw", group="mine").poll(timeout_s=0),
                lambda: log.queue("raw").lease(timeout_s=0),
                lambda: log.tidy("raw"),
            ):
                with pytest.raises(NoAccess, match="read-only"):
                    attempt()
            return str(refusal.value), len(values_of(log, "raw"))

    said, events = as_nobody(use)
    assert events == 10
    assert "refused access" in said and "read_only=True" in said and "\n" not in said.split(". ")[0]


STAFF = 4_242


def as_member(work: Callable[[], Any], user: int) -> Any:
    """What the function gives in a process of a user of the group, whose files are the group's to write."""

    def use() -> Any:
        os.umask(0o002)
        os.setgroups([STAFF])
        os.setgid(user)
        os.setuid(user)
        return work()

    return in_child(use)


def test_a_log_that_was_renamed_while_it_was_open_is_told_to_be_gone(tmp_path: Path) -> None:
    """Nobody meets an error of the operating system: what needs a file by its name is refused, what has it open goes on in it."""
    log = hw.open_log(tmp_path / "log")
    log.create_topic("t", partitions=1)
    with log.producer(id="p") as producer:
        producer.send("t", b"v", sequence=1)
    reader = log.reader("t", start="earliest")
    (tmp_path / "log").rename(tmp_path / "elsewhere")
    stored = 1
    for use in (lambda: log.append("t", [{"value": b"v"}]), lambda: log.producer(id="p").close()):
        with suppress(LogNotFound):
            stored += len(use() or ())
    for use in (
        lambda: log.read("t"),
        lambda: reader.poll(timeout_s=0.1),
        lambda: log.offsets("t"),
        lambda: log.seal("t"),
    ):
        with suppress(LogNotFound):
            use()
    for use in (
        log.topics,
        lambda: log.producer(id="another"),
        lambda: log.consumer("t", group="g").poll(),
        lambda: log.create_topic("u"),
        lambda: log.alter_topic("t", event_bytes_max=5000),
        lambda: log.delete_topic("t"),
        lambda: log.backup(tmp_path / "backup"),
    ):
        with pytest.raises(LogNotFound, match="is gone"):
            use()
    log.close()
    with hw.open_log(tmp_path / "elsewhere") as again:
        assert again.read("t").num_rows == stored


@pytest.mark.parametrize("name", ["topics/t/topic", "topics/t/0/head", "headwater", "state"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    """Opening a pipe waits for somebody at its other end."""
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("t", partitions=1)
    (tmp_path / "log" / name).unlink()
    os.mkfifo(tmp_path / "log" / name)

    def use(*, read_only: bool) -> None:
        with hw.open_log(tmp_path / "log", read_only=read_only) as log:
            for topic in log.topics():
                log.topic(topic)
                log.read(topic)

    for read_only in (True, False):
        with pytest.raises(StorageError, match=name):
            use(read_only=read_only)
