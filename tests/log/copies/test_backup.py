"""Backups: taken while others write, incremental, checked byte by byte, and restored whole or not at all."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow.fs as arrow_fs
import pytest

import headwater as hw
from headwater.log.copies import backup, restore
from headwater.log.copies.backup import BackedUp
from headwater.log.copies.vault import ArrowVault
from headwater.log.doctor.doctor import examine
from headwater.log.file.store import LocalStore
from headwater.model.errors import (
    Closed,
    Conflict,
    Damaged,
    DiskFull,
    Diverged,
    InvalidInput,
    NoAccess,
    NotFound,
    PositionLost,
    Unsupported,
)
from headwater.testing import SimDisk
from headwater.testing.servers.s3 import S3Server
from tests.rigs.children import NOBODY, in_child, let_others_in
from tests.rigs.commands import Command, refused
from tests.rigs.log.copies import check_equal

SCHEMA = "id STRING NOT NULL, v BIGINT, text STRING"


def fill(log: hw.Log, *, batches: int = 20) -> None:
    """Events over several segments of two topics, with headers, deletions, transactions and a named producer."""
    if "t" not in log.topics():
        log.create_topic("t", SCHEMA, key="id", partitions=3, segment_bytes=4096)
        log.create_topic("empty", partitions=1)
    for number in range(batches):
        log.append("t", [{"id": f"k{row % 7}", "v": row + number, "text": "x" * row} for row in range(20)])
    log.append("t", [{"id": "k1", "_deleted": True}])
    with log.transaction() as transaction:
        transaction.append("t", [{"id": f"z{row}"} for row in range(30)])
    with log.producer(id="p") as producer:
        producer.send("t", {"id": "k2", "v": 1}, headers={"h": b"\xff"}, sequence=batches)


def files_of(folder: Path) -> dict[str, Path]:
    """The files of a backup, by their names in it."""
    return {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


@pytest.fixture
def backed_up(tmp_path: Path) -> Path:
    """A folder with a log `log` and its backup `backup`."""
    with hw.open_log(tmp_path / "log") as log:
        fill(log)
        log.seal("t")
        fill(log)
        log.backup(tmp_path / "backup")
    return tmp_path


def test_a_restored_log_equals_its_source_and_is_healthy(backed_up: Path) -> None:
    """By offset, append time, key, header and deletion; and it goes on where the other ended."""
    restored = hw.restore_log(backed_up / "backup", backed_up / "restored")
    events = check_equal(backed_up / "log", backed_up / "restored")
    assert events == restored.events > 800
    assert examine(str(backed_up / "restored")).findings == []
    with hw.open_log(backed_up / "restored") as log:
        before = log.offsets("t")
        fill(log)
        assert all(log.offsets("t")[number].stop > span.stop for number, span in before.items())
        log.create_topic("more", "n INT")
    assert examine(str(backed_up / "restored")).healthy


def test_a_second_backup_copies_only_what_is_new(tmp_path: Path) -> None:
    """Closed segments are linked on the same disk; those that were sealed in between are linked as they are now; old files go."""
    with hw.open_log(tmp_path / "log") as log:
        fill(log)
        first = log.backup(tmp_path / "backup")
        assert first.linked > 5
        names = files_of(tmp_path / "backup")
        segment = next(path for name, path in names.items() if name.endswith("/t/0/00000000000000000000.frames"))
        assert segment.stat().st_ino == (tmp_path / "log/topics/t/0/00000000000000000000.frames").stat().st_ino
        second = log.backup(tmp_path / "backup")
        assert (second.copied, second.linked, second.kept) == (0, 0, first.copied + first.linked)
        sealed = log.seal("t")
        log.append("t", [{"id": "k1", "v": 7}])
        third = log.backup(tmp_path / "backup")
        assert (third.copied, third.linked, third.kept) == (1, sealed, second.kept - sealed - 1)
        assert third.copied_bytes < 10_000
        fourth = log.backup(tmp_path / "backup")
        assert (fourth.copied, fourth.linked, fourth.kept) == (0, 0, second.kept)
        assert len(list(tmp_path.glob("backup/manifest-*"))) == 1
        assert len(files_of(tmp_path / "backup")) == 1 + fourth.kept
    hw.restore_log(tmp_path / "backup", tmp_path / "restored")
    check_equal(tmp_path / "log", tmp_path / "restored")
    assert examine(str(tmp_path / "restored")).findings == []


def test_what_stands_beside_the_topics_comes_along(tmp_path: Path) -> None:
    """Folders that others made, files in a topic's folder, and the epochs and sequences of named producers."""
    with hw.open_log(tmp_path / "log") as log:
        fill(log)
        for path, content in {
            "groups/billing/offsets": b"\0" * 4096,
            "groups/billing/lock": b"",
            "queues/q/deep/deeper/leases": os.urandom(3_000_000),
            "note": b"mine",
            "topics/t/archive": b"list",
            "topics/t/1/extra": b"part",
        }.items():
            (tmp_path / "log" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "log" / path).write_bytes(content)
        (tmp_path / "log/queues/none").mkdir()
        log.backup(tmp_path / "backup")
        fence = log.store.register_producer("p")
    hw.restore_log(tmp_path / "backup", tmp_path / "restored")
    for path in ("groups/billing/offsets", "groups/billing/lock", "queues/q/deep/deeper/leases", "note",
                 "topics/t/archive", "topics/t/1/extra"):  # fmt: skip
        assert (tmp_path / "restored" / path).read_bytes() == (tmp_path / "log" / path).read_bytes()
    assert (tmp_path / "restored/queues/none").is_dir()
    with hw.open_log(tmp_path / "restored") as log:
        assert log.store.register_producer("p") == fence
        with log.producer(id="p") as producer:
            before = sum(map(len, log.offsets("t").values()))
            producer.send("t", {"id": "k2", "v": 1}, sequence=20)
        assert sum(map(len, log.offsets("t").values())) == before, "the producer's sequence was forgotten"


def test_positions_behind_the_backup_are_lost_and_others_are_not(tmp_path: Path) -> None:
    """Also those of a second restored log, and after the original has lived through more."""
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("t", "n INT", partitions=1)
        log.append("t", [{"n": n} for n in range(10)])
        inside = log.reader("t", start="latest").positions()
        log.backup(tmp_path / "backup")
        log.append("t", [{"n": 99}])
        behind = log.reader("t", start="latest").positions()
    hw.restore_log(tmp_path / "backup", tmp_path / "one")
    with hw.open_log(tmp_path / "one") as log:
        log.append("t", [{"n": 50}, {"n": 51}])
        assert [event.value["n"] for event in log.reader("t", start=inside).poll()] == [50, 51]
        with pytest.raises(PositionLost, match="restored"):
            log.reader("t", start=behind)
        own = log.reader("t", start="latest").positions()
    hw.restore_log(tmp_path / "backup", tmp_path / "two")
    with hw.open_log(tmp_path / "two") as log:
        with pytest.raises(PositionLost):
            log.reader("t", start=own)
        ids = {(tmp_path / name / "headwater").read_text() for name in ("log", "one", "two")}
        assert len(ids) == 3


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.unlink()
    path.write_bytes(raw)


def cut(path: Path) -> None:
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw[:-1])


@pytest.mark.parametrize("harm", [flip, cut, os.unlink], ids=["flip", "cut", "missing"])
def test_every_damaged_file_is_named_and_nothing_is_restored(backed_up: Path, harm: Callable[[Path], None]) -> None:
    """Each file in turn, the manifest too."""
    shutil.copytree(backed_up / "backup", backed_up / "good")
    names = list(files_of(backed_up / "good"))
    assert len(names) > 10
    for name in [*names[:3], *names[-8:]]:
        shutil.rmtree(backed_up / "backup")
        shutil.copytree(backed_up / "good", backed_up / "backup")
        harm(backed_up / "backup" / name)
        with pytest.raises(NotFound if harm is os.unlink and name.startswith("manifest") else Damaged) as refusal:
            hw.restore_log(backed_up / "backup", backed_up / "restored")
        assert name in str(refusal.value) or isinstance(refusal.value, NotFound)
        assert sorted(path.name for path in backed_up.iterdir()) == ["backup", "good", "log"]
    hw.restore_log(backed_up / "good", backed_up / "restored")


def test_a_damaged_log_is_not_backed_up_over_a_good_backup(tmp_path: Path) -> None:
    """New events that fail their checksum are named; the earlier backup stays as it was."""
    with hw.open_log(tmp_path / "log") as log:
        fill(log)
        log.backup(tmp_path / "backup")
        before = files_of(tmp_path / "backup")
        fill(log)
        newest = max((tmp_path / "log/topics/t/1").glob("*.frames"))
        with newest.open("r+b") as file:
            file.seek(300)
            file.write(b"\xff\xff\xff")
        with pytest.raises(Damaged, match=newest.name):
            log.backup(tmp_path / "backup")
    assert set(before) <= set(files_of(tmp_path / "backup"))
    hw.restore_log(tmp_path / "backup", tmp_path / "restored")
    assert examine(str(tmp_path / "restored")).findings == []


def test_wrong_places_are_refused(backed_up: Path) -> None:
    with hw.open_log(backed_up / "log") as log, hw.open_log("memory://") as memory:
        for to in (backed_up / "log", backed_up / "log/inside", backed_up):
            with pytest.raises(InvalidInput):
                log.backup(to)
        (backed_up / "full").mkdir()
        (backed_up / "full/mine").write_text("precious")
        with pytest.raises(InvalidInput, match="mine"):
            log.backup(backed_up / "full")
        assert os.listdir(backed_up / "full") == ["mine"]
        with pytest.raises(Unsupported):
            memory.backup(backed_up / "new")
        with pytest.raises(Unsupported):
            log.backup("nosuch://bucket")
    with hw.open_log(backed_up / "another") as another, pytest.raises(Diverged, match="another log"):
        another.backup(backed_up / "backup")
    with pytest.raises(NotFound):
        hw.restore_log(backed_up / "nothing", backed_up / "new")
    for to in (backed_up / "log", backed_up / "full", backed_up / "full/mine", backed_up / "backup/inside"):
        with pytest.raises(InvalidInput):
            hw.restore_log(backed_up / "backup", to)
    with pytest.raises(Unsupported):
        hw.restore_log(backed_up / "backup", "memory://")
    (backed_up / "hollow").mkdir()
    assert hw.restore_log(backed_up / "backup", backed_up / "hollow").events > 0


def test_one_backup_at_a_time_goes_into_a_folder(tmp_path: Path) -> None:
    with hw.open_log(tmp_path / "log") as log:
        fill(log)
        refusals: list[Conflict] = []

        def meanwhile(progress: object) -> None:
            if not refusals:
                with pytest.raises(Conflict) as refusal:
                    log.backup(tmp_path / "backup")
                refusals.append(refusal.value)

        log.backup(tmp_path / "backup", on_progress=meanwhile)
        assert len(refusals) == 1


def test_writers_and_sealers_go_on_while_a_backup_runs(tmp_path: Path) -> None:
    """Between any two files of a backup others append, commit, seal and create."""
    with hw.open_log(tmp_path / "log") as log:
        fill(log)
        held = log.read("t").num_rows
        rounds = []

        def meanwhile(progress: BackedUp) -> None:
            rounds.append(progress)
            fill(log, batches=1)
            assert log.seal("t") == 0 or progress.events, "a segment was replaced while it was to be copied"
            log.create_topic(f"new.{len(rounds)}", "n INT", partitions=1)

        done = log.backup(tmp_path / "backup", on_progress=meanwhile)
        assert done.events == held and len(rounds) > 10
    hw.restore_log(tmp_path / "backup", tmp_path / "restored")
    with hw.open_log(tmp_path / "restored") as log, hw.open_log(tmp_path / "log") as source:
        assert log.topics() == ["empty", "t"]
        columns = ["id", "v", "_partition", "_offset", "_appended"]
        ends = {number: span.stop for number, span in log.offsets("t").items()}
        assert log.read("t", columns=columns) == source.read("t", end=ends, columns=columns)


@pytest.mark.service("s3")
def test_a_bucket_takes_backups_too(tmp_path: Path, s3: S3Server) -> None:
    """By the URL of any file system that pyarrow knows; here of a real server of S3's protocol. What is damaged there is named."""
    url = s3.url("backup")
    system, folder = arrow_fs.FileSystem.from_uri(url)
    with hw.open_log(tmp_path / "log") as log:
        fill(log)
        first = log.backup(url)
        fill(log)
        second = log.backup(url)
    assert first.linked == second.linked == 0 < second.kept
    hw.restore_log(url, tmp_path / "restored")
    check_equal(tmp_path / "log", tmp_path / "restored")
    files = system.get_file_info(arrow_fs.FileSelector(folder, recursive=True))
    victim = max(file.path for file in files if file.path.endswith(".frames"))
    with system.open_input_stream(victim) as stream:
        raw = bytearray(stream.read())
    raw[len(raw) // 2] ^= 4
    with system.open_output_stream(victim) as stream:
        stream.write(raw)
    with pytest.raises(Damaged, match=os.path.basename(victim)) as caught:
        hw.restore_log(url, tmp_path / "again")
    assert "zebra" not in str(caught.value)
    assert not (tmp_path / "again").exists()


def test_a_full_disk_leaves_the_earlier_backup(tmp_path: Path) -> None:
    """On the simulated disk: a backup that finds no room, and a restore that finds none."""
    disk = SimDisk(5)
    process = disk.process("one")
    with hw.open_log("/disk/log", disk=process) as log:
        fill(log)
        log.backup("/disk/backup")
        fill(log)
        for room in (1_000, 6_000):
            disk.capacity_bytes = used_bytes(disk, process) + room
            with pytest.raises(DiskFull):
                log.backup("/disk/backup")
        with pytest.raises(DiskFull):
            hw.restore_log("/disk/backup", "/disk/restored", disk=process)
        assert not process.exists("/disk/restored") and not process.exists("/disk/.restored.restoring")
        disk.capacity_bytes = None
        assert hw.restore_log("/disk/backup", "/disk/restored", disk=process).events > 400
        log.backup("/disk/backup")
    assert examine("/disk/restored", disk=process).healthy


def used_bytes(disk: SimDisk, process: object) -> int:
    """How much the simulated disk holds."""
    disk.capacity_bytes = 1 << 40
    return (1 << 40) - process.free_bytes("/disk")


@pytest.mark.parametrize("seed", range(5))
def test_a_power_loss_after_a_backup_or_a_restore_loses_neither(seed: int) -> None:
    """What was reported as done is on the platter: its bytes and its names."""
    disk = SimDisk(seed)
    with hw.open_log("/disk/log", disk=disk.process("one")) as log:
        fill(log)
        held = log.backup("/disk/backup").events
    disk.power_loss()
    process = disk.process("two")
    assert hw.restore_log("/disk/backup", "/disk/deep/er/restored", disk=process).events == held
    disk.power_loss()
    process = disk.process("three")
    with hw.open_log("/disk/deep/er/restored", disk=process) as log:
        assert log.read("t").num_rows == held
    assert examine("/disk/deep/er/restored", disk=process).healthy


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_missing_rights_are_told(backed_up: Path) -> None:
    let_others_in(backed_up)

    def back_up() -> None:
        with hw.open_log(backed_up / "log", read_only=True) as log:
            log.backup(backed_up / "elsewhere")

    with pytest.raises(NoAccess):
        in_child(back_up, user=NOBODY)
    with pytest.raises(NoAccess):
        in_child(lambda: hw.restore_log(backed_up / "backup", backed_up / "restored"), user=NOBODY)


def test_an_interrupted_restore_leaves_nothing(backed_up: Path) -> None:
    def interrupt(progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hw.restore_log(backed_up / "backup", backed_up / "restored", on_progress=interrupt)
    assert sorted(path.name for path in backed_up.iterdir()) == ["backup", "log"]


def test_two_restores_into_one_folder_do_not_mix(backed_up: Path) -> None:
    refusals: list[object] = []

    def meanwhile(progress: object) -> None:
        if not refusals:
            other = threading.Thread(target=second)
            other.start()
            other.join()

    def second() -> None:
        try:
            hw.restore_log(backed_up / "backup", backed_up / "restored")
        except Conflict as refusal:
            refusals.append(refusal)

    hw.restore_log(backed_up / "backup", backed_up / "restored", on_progress=meanwhile)
    assert len(refusals) == 1
    check_equal(backed_up / "log", backed_up / "restored")


@pytest.mark.parametrize("sealed", [False, True])
def test_other_events_at_the_same_offsets_are_copied(tmp_path: Path, sealed: bool) -> None:
    """A power loss may take events back, and others get their places: same offsets, same lengths, another content."""
    folder, kept = tmp_path / "log", tmp_path / "as it was"
    with hw.open_log(folder) as log:
        log.create_topic("t", SCHEMA, key="id", partitions=1, segment_bytes=4096)
    shutil.copytree(folder, kept)
    for text in ("a", "b"):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        with hw.open_log(folder) as log:
            for number in range(20):
                log.append("t", [{"id": "k", "v": number, "text": text * 500}])
            if sealed:
                log.seal("t")
            log.backup(tmp_path / "backup")
    hw.restore_log(tmp_path / "backup", tmp_path / "restored")
    assert check_equal(folder, tmp_path / "restored") == 20


def arrow_vault(url: str, disk: object) -> ArrowVault:
    """A folder as a bucket has it: without links, and nothing in it can be held."""
    return ArrowVault(arrow_fs.LocalFileSystem(), url, url)


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_backup_that_ends_while_one_is_restored_does_no_harm(
    backed_up: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restore has the one that it began with, which the next backup removes; from a bucket it has the newer one."""
    if kind == "bucket":
        for module in (backup, restore):
            monkeypatch.setattr(module, "open_vault", arrow_vault)
    taken = []

    def meanwhile(progress: object) -> None:
        if not taken:
            with hw.open_log(backed_up / "log") as log:
                held = log.read("t").num_rows
                fill(log)
                taken.extend([held, log.backup(backed_up / "backup").events])

    restored = hw.restore_log(backed_up / "backup", backed_up / "restored", on_progress=meanwhile)
    assert restored.events == taken[kind == "bucket"]
    with hw.open_log(backed_up / "restored") as log:
        assert log.read("t").num_rows == restored.events
    assert examine(str(backed_up / "restored")).findings == []
    with hw.open_log(backed_up / "log") as log:
        log.backup(backed_up / "backup")
    assert len(list(backed_up.glob("backup/manifest-*"))) == 1
    assert hw.restore_log(backed_up / "backup", backed_up / "newest").events == taken[1]
    assert sorted(path.name for path in backed_up.iterdir()) == ["backup", "log", "newest", "restored"]


def test_a_backup_that_is_replaced_again_and_again_is_not_called_damaged(
    backed_up: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be held a restore gives up with the reason, and leaves nothing."""
    monkeypatch.setattr(restore, "TRIES", 2)
    for module in (backup, restore):
        monkeypatch.setattr(module, "open_vault", arrow_vault)

    def meanwhile(progress: object) -> None:
        with hw.open_log(backed_up / "log") as log:
            fill(log, batches=1)
            log.backup(backed_up / "backup")

    with pytest.raises(Conflict, match="Newer backups"):
        hw.restore_log(backed_up / "backup", backed_up / "restored", on_progress=meanwhile)
    assert sorted(path.name for path in backed_up.iterdir()) == ["backup", "log"]
    hw.restore_log(backed_up / "backup", backed_up / "restored")
    check_equal(backed_up / "log", backed_up / "restored")


def test_a_file_that_vanishes_while_it_is_restored_is_named_and_nothing_is_left(backed_up: Path) -> None:
    """As far as anybody can see the backup is damaged then: its manifest is still there."""

    def remove(progress: object) -> None:
        for path in backed_up.glob("backup/*/t/2/*"):
            path.unlink(missing_ok=True)

    with pytest.raises(Damaged, match=r"t/2/.* is missing"):
        hw.restore_log(backed_up / "backup", backed_up / "restored", on_progress=remove)
    assert sorted(path.name for path in backed_up.iterdir()) == ["backup", "log"]


def test_what_others_left_unfinished_is_removed(backed_up: Path) -> None:
    """Folders of a restore of another backup that was killed, and folders in which a killed backup put nothing."""
    (backed_up / ".restored.restoring/of another/one").mkdir(parents=True)
    hw.restore_log(backed_up / "backup", backed_up / "restored")
    assert sorted(path.name for path in backed_up.iterdir()) == ["backup", "log", "restored"]
    empty = backed_up / "backup/00000000000000000007"
    (empty / "t/0").mkdir(parents=True)
    with hw.open_log(backed_up / "log") as log:
        log.backup(backed_up / "backup")
    assert not empty.exists()


def test_the_commands_tell_in_json_and_refuse_in_words(command: Command) -> None:
    with hw.open_log("data") as log:
        fill(log)
        held = log.read("t").num_rows
    (taken,) = command("backup", "data", "backup").rows
    (made,) = command("restore", "backup", "restored").rows
    assert taken["events"] == made["events"] == held and taken["taken_us"] == made["taken_us"]
    assert command("doctor", "--log", "restored").code == 0
    refused(command("restore", "backup", "restored"), "invalid_input", "not empty")
    refused(command("restore", "data", "new"), "not_found")
    refused(command("backup", "data", "data/inside"), "invalid_input")
    refused(command("backup", "nothing", "new"), "log_not_found")
    refused(command("backup", "memory://", "new"), "unsupported")
    flip(max(Path("backup").rglob("*.frames")))
    refused(command("restore", "backup", "new"), "damaged", ".frames", "Nothing was restored")


def test_a_close_waits_for_a_backup_that_stands_still(tmp_path: Path) -> None:
    """Though that passes the gate again and again; and a thread that closes what it holds itself does not wait for itself."""
    log = hw.open_log(str(tmp_path / "log"))
    log.create_topic("t")
    store = log.store
    assert isinstance(store, LocalStore)
    closing = threading.Thread(target=log.close)
    with store.standing_still():
        assert store.topics() == ["t"]
        closing.start()
        closing.join(0.3)
        assert closing.is_alive()
        with store.between_transactions() as state:
            assert state.incarnation == 0
    closing.join(30)
    assert not closing.is_alive()
    with pytest.raises(Closed), store.standing_still():
        raise AssertionError("it was closed")
    log = hw.open_log(str(tmp_path / "log"))
    assert isinstance(log.store, LocalStore)
    with log.store.gate.staying():
        log.close()
