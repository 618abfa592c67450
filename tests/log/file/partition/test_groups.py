"""Groups of a local log: what a power loss, a damaged file, a read-only handle and retention do to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

import pytest

import headwater as hw
from headwater.log.disk.disk import RealDisk
from headwater.log.doctor.doctor import examine
from headwater.log.file import commit, recovery
from headwater.log.file import groups as group_files
from headwater.log.file.commit import CommitLog
from headwater.log.file.groups import recover_slot
from headwater.log.log import Log
from headwater.log.port.store import Bounds
from headwater.model.errors import Damaged, EventsMissed, GroupNotFound, NoAccess, PositionLost
from headwater.testing import Crashed, SimDisk
from headwater.testing.contracts.case import refused, values_of
from headwater.testing.contracts.groups.case import drain, numbered, numbers_of
from tests.rigs.log.specimen import AnotherBoot

PLANTED_SEEDS_MAX = 30


def copy_some(log: Log, *, events_max: int) -> bool:
    """One transaction from `t` to `out`; whether there was anything to copy."""
    with log.consumer("t", group="g", commit="manual") as consumer:
        events = consumer.poll(events_max=events_max, timeout_s=0)
        with log.transaction() as transaction:
            transaction.append("out", [{"n": event.value["n"]} for event in events])
            transaction.commit_offsets(consumer)
        return bool(events)


@pytest.mark.parametrize("seed", range(15))
def test_offsets_and_events_agree_after_a_power_loss(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it reached the disk, and whenever it came: what was copied is committed, and nothing else."""
    copy_through_power_losses(seed, monkeypatch)


PLANTED: dict[str, tuple[object, str, Callable[..., None]]] = {
    "groups are not recovered": (recovery, "recover_groups", lambda *_: None),
    "recorded offsets are not put back": (group_files, "recover_slot", lambda *of: recover_slot(*of[:2], None)),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_mistake_is_found_out(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mistake planted in the recovery, one of the histories above copies something twice or finds torn files."""
    monkeypatch.setattr(*PLANTED[mistake])
    for seed in range(PLANTED_SEEDS_MAX):
        try:
            copy_through_power_losses(seed, monkeypatch)
        except (AssertionError, Damaged):
            return
    pytest.fail(f"{PLANTED_SEEDS_MAX} histories, and nobody noticed that {mistake}.")


def copy_through_power_losses(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = Random(seed)
    monkeypatch.setattr(commit, "COMMITS_BYTES_MAX", chance.choice((400, 1 << 20)))
    disk = SimDisk(seed)
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("first")) as log:
        numbered(log, partitions=2, count=40)
        log.create_topic("out", "n INT", partitions=2)
    for life in range(4):
        process = f"life {life}"
        disk.crash_randomly(process, chance.choice((0.0, 0.002, 0.01)))
        try:
            log = hw.open_log(f"{disk.folder}/log", disk=disk.process(process))
            for _ in range(chance.randint(1, 4)):
                copy_some(log, events_max=chance.randint(1, 6))
        except Crashed:
            pass
        disk.power_loss()
    disk.heal()
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("last")) as log:
        copied = sorted(value["n"] for value in values_of(log, "out"))
        assert len(copied) == len(set(copied))
        if "g" in log.groups():
            assert 40 - log.group("g").lag.events == len(copied)
        while copy_some(log, events_max=7):
            pass
        assert sorted(value["n"] for value in values_of(log, "out")) == list(range(40))


def test_a_plain_commit_after_a_transaction_is_not_taken_back(tmp_path: Path) -> None:
    """The record of the transaction is older than the commit, and recovery knows."""
    disk = SimDisk(1)
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("first")) as log:
        numbered(log, partitions=1, count=20)
        log.create_topic("out", "n INT", partitions=1)
        copy_some(log, events_max=5)
        with log.consumer("t", group="g", commit="manual") as consumer:
            consumer.poll(events_max=10)
            consumer.commit()
        log.store.group("g", create=False).sync()
        disk.power_loss()
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("again")) as log:
        assert log.group("g").partitions[0].committed == 15


@pytest.mark.parametrize("seed", range(6))
def test_a_committed_offset_that_a_power_loss_took_back_is_refused(seed: int) -> None:
    """With `durability="os"` the events behind it may be gone; the consumer is told, and goes on where it is sent."""
    disk = SimDisk(seed)
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("before"), durability="os") as log:
        numbered(log, partitions=1, count=0)
        for number in range(20):
            log.append("t", [{"n": number}])
        with log.consumer("t", group="g") as consumer:
            drain(consumer)
        log.store.group("g", create=False).sync()
        disk.power_loss()
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("after")) as log:
        kept = log.offsets("t")[0].stop
        log.append("t", [{"n": 100}])
        with log.consumer("t", group="g") as consumer:
            if kept < 20:
                for _ in range(2):
                    with refused(PositionLost, "20", str(kept)):
                        consumer.poll(timeout_s=0)
                consumer.seek({0: kept})
            assert numbers_of(consumer.poll(timeout_s=0)) == [100]


class Retained:
    """A store whose first events are gone, as retention leaves it."""

    def __init__(self, store: object, first: int) -> None:
        self._store = store
        self._first = first

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def bounds(self, names: Sequence[str]) -> Mapping[tuple[str, int], Bounds]:
        return {place: Bounds(self._first, bound.end) for place, bound in self._store.bounds(names).items()}


def test_a_consumer_that_retention_overtook_is_told_what_it_missed() -> None:
    """Or skips it and counts, if it asked for that."""
    with hw.open_log("memory://") as log:
        numbered(log, partitions=1, count=30)
        with log.consumer("t", group="g") as consumer:
            consumer.poll(events_max=5)
        late = Log(Retained(log.store, 12), "fsync", log._clock)
        with late.consumer("t", group="g") as consumer:
            for _ in range(2):
                with refused(EventsMissed, "5 to 11", "'g'"):
                    consumer.poll(timeout_s=0)
            consumer.seek("earliest")
            assert numbers_of(consumer.poll(events_max=3, timeout_s=0)) == [12, 13, 14]
        later = Log(Retained(log.store, 20), "fsync", log._clock)
        with later.consumer("t", group="g", missed="skip") as consumer:
            assert numbers_of(consumer.poll(timeout_s=0)) == list(range(20, 30))
            assert consumer.missed == 5


def test_a_read_only_handle_sees_groups_and_joins_none(tmp_path: Path) -> None:
    """`lag` of a log that may only be read works."""
    folder = str(tmp_path / "log")
    with hw.open_log(folder) as log:
        numbered(log, count=10)
        with log.consumer("t", group="g") as consumer:
            consumer.poll(events_max=4)
            with hw.open_log(folder, read_only=True) as looking:
                assert looking.groups() == ["g"]
                assert [member.partitions for member in looking.group("g").members] == [consumer.assignment()]
                with refused(NoAccess, "read-only"):
                    looking.consumer("t", group="g")
                with refused(GroupNotFound, "other"):
                    looking.group("other")


def test_a_damaged_roster_is_named(tmp_path: Path) -> None:
    """It holds nothing that is not made again; the offsets are elsewhere."""
    folder = tmp_path / "log"
    with hw.open_log(str(folder)) as log:
        numbered(log, count=10)
        with log.consumer("t", group="g") as consumer:
            drain(consumer)
        roster = folder / "groups" / "g" / "roster"
        roster.write_bytes(b"noise")
        with refused(Damaged, "roster"):
            log.group("g")
        roster.unlink()
        with log.consumer("t", group="g") as consumer:
            assert consumer.poll(timeout_s=0) == []


def test_the_doctor_finds_and_mends_a_groups_files(tmp_path: Path) -> None:
    """The newest offset that is whole; where none is, it says so, and the group passes over nothing."""
    folder = tmp_path / "log"
    with hw.open_log(str(folder)) as log:
        numbered(log, partitions=1, count=10)
        with log.consumer("t", group="g") as consumer:
            consumer.poll(events_max=4)
            consumer.poll(events_max=4)
    assert examine(str(folder)).findings == []
    slot = folder / "groups" / "g" / "offsets" / "t" / "0"
    (folder / "groups" / "g" / "roster").write_bytes(b"noise")
    content = bytearray(slot.read_bytes())
    content[512:520] = b"\0" * 8  # the word that says which of the two versions counts
    slot.write_bytes(content)
    report = examine(str(folder))
    assert sorted(Path(finding.path).name for finding in report.findings) == ["0", "roster"]
    assert examine(str(folder), repair=True).healthy
    assert examine(str(folder)).findings == []
    with hw.open_log(str(folder)) as log:
        assert log.group("g").partitions[0].committed == 8
    for broken in (bytes(content[:512]) + b"\0" * 3584, bytes(content[:5]), b""):
        slot.write_bytes(broken)
        assert not examine(str(folder)).healthy
        [found] = examine(str(folder), repair=True).findings
        assert found.repaired and "is lost" in found.note and "'t'" in found.note
        assert slot.with_name("0.damaged").read_bytes() == broken
        assert examine(str(folder)).findings == []
        with hw.open_log(str(folder)) as log, log.consumer("t", group="g", start="latest") as consumer:
            assert numbers_of(drain(consumer)) == list(range(10))


@pytest.mark.parametrize("left", [0, 5, 600])
def test_a_group_whose_offset_was_cut_is_reset_or_deleted(tmp_path: Path, left: int) -> None:
    """Without the doctor, and the other groups and transactions go on; what cannot be read is not made up."""
    folder = tmp_path / "log"
    with hw.open_log(str(folder)) as log:
        numbered(log, partitions=2, count=20)
        log.create_topic("out", partitions=1)
        for group in ("g", "other"):
            with log.consumer("t", group=group) as consumer:
                drain(consumer)
    slot = folder / "groups" / "g" / "offsets" / "t" / "1"
    whole = slot.read_bytes()
    for disk in (RealDisk(), AnotherBoot()):
        os.truncate(slot, left)
        with hw.open_log(str(folder), disk=disk) as log:
            assert log.groups() == ["g", "other"]
            with refused(Damaged, str(slot)):
                log.group("g")
            with refused(Damaged, str(slot)):
                log.reset_group("g", to={0: 3})
            assert log.group("other").lag.events == 0
            with log.consumer("t", group="other", commit="manual") as consumer, log.transaction() as transaction:
                transaction.append("out", [b"x"])
                transaction.commit_offsets(consumer)
            log.store.group("g", create=False).sync()
            assert log.reset_group("g", to="earliest") == {("t", 0): 0, ("t", 1): 0}
            assert [part.committed for part in log.group("g").partitions] == [0, 0]
        slot.write_bytes(whole)
    os.truncate(slot, left)
    with hw.open_log(str(folder)) as log:
        log.delete_group("g")
        assert log.groups() == ["other"]
        with log.consumer("t", group="g") as consumer:
            assert sorted(numbers_of(drain(consumer))) == list(range(20))


def test_a_commit_log_without_offsets_keeps_its_format(tmp_path: Path) -> None:
    """An older Headwater reads it; with the first offsets in it, it must refuse it."""
    folder = str(tmp_path / "log")
    with hw.open_log(folder) as log:
        numbered(log, partitions=1, count=10)
        log.create_topic("out", "n INT", partitions=1)
        log.append("out", [{"n": -1}], atomic=True)
        assert (tmp_path / "log" / "commits").read_bytes()[6] == 1
        copy_some(log, events_max=3)
        assert (tmp_path / "log" / "commits").read_bytes()[6] == 2
        commits = CommitLog(RealDisk(), folder, writable=False)
        decided = list(commits.decided()[1].values())
        commits.close()
        assert [len(decision.offsets) for decision in decided] == [0, 1]
        assert decided[1].offsets[0].offset == 3


def test_a_topic_may_be_called_like_anything_in_a_groups_folder(tmp_path: Path) -> None:
    """Names of topics and of our own files never meet."""
    with hw.open_log(str(tmp_path / "log")) as log:
        for name in ("lock", "roster", "members", "generation", "offsets"):
            numbered(log, name, partitions=1, count=3)
        with log.consumer(pattern=".*", group="members") as consumer:
            assert len(drain(consumer)) == 15
        assert log.group("members").lag.events == 0
