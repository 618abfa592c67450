"""The doctor: finds every damage, repairs what can be made again, and leaves alone what only a backup has."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater as hw
from headwater.log.doctor.doctor import Report, examine
from headwater.model.errors import Damaged, DiskFull
from headwater.testing import SimDisk
from tests.rigs.children import NOBODY, in_child
from tests.rigs.log.damages import CUTS, FLIPS
from tests.rigs.log.specimen import KINDS, Snapshot, Specimen, files_of, look, specimen_in_memory, wrong

TRIALS = [4, pytest.param(200, marks=pytest.mark.bench)]
MADE_AGAIN = ["state", "commits", "head", "index"]


@pytest.fixture(scope="module")
def specimen() -> Iterator[Specimen]:
    with specimen_in_memory() as specimen:
        yield specimen


def test_a_whole_log_is_healthy(specimen: Specimen) -> None:
    """Every event and every file has been looked at, and nothing is said."""
    snapshot, truth = specimen
    for repair in (False, True):
        report = examine(str(snapshot.folder), repair=repair)
        assert report.findings == []
        assert report.healthy
        assert report.events == len(truth["events of orders"]) + len(truth["events of raw"])
        assert report.files >= sum(len(files_of(snapshot.folder, kind)) for kind in KINDS)


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_users_would_meet_the_doctor_finds_first(specimen: Specimen, kind: str, trials: int) -> None:
    """Wherever the log refuses something, the doctor names the file; looking changes no byte."""
    failures = in_child(lambda: list(examine_damaged(specimen, kind, trials)), timeout_s=60 + 5 * trials)
    assert not failures, "\n".join(failures[:10])


def examine_damaged(specimen: Specimen, kind: str, trials: int) -> Iterator[str]:
    snapshot, _ = specimen
    for what, path in damaged(snapshot, kind, trials):
        before = content(snapshot.folder)
        report = examine(str(snapshot.folder))
        if content(snapshot.folder) != before:
            yield f"{what}: the doctor has changed something"
        named = [finding for finding in report.findings if names(finding.path, path) or path.name in finding.what]
        refused = [name for name, seen in look(snapshot.folder).items() if isinstance(seen, Exception)]
        if refused and not named:
            yield f"{what}: {refused} refused, and the doctor says {report.findings}"
        if refused and report.healthy:
            yield f"{what}: {refused} refused, and the doctor says healthy"


@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
def test_one_who_may_only_read_sees_a_healthy_log_as_healthy(tmp_path: Path) -> None:
    """Looking opens nothing for writing: producers, groups, queues and stages included."""
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        folder = f"{parent}/log"
        with hw.open_log(folder) as log:
            log.create_topic("t", partitions=1)
            log.stage("s")
            with log.producer(id="p") as producer:
                producer.send("t", b"x", sequence=1)
            with log.consumer("t", group="g") as consumer:
                consumer.poll()
            with log.queue("t") as queue:
                queue.ack(queue.lease())
        assert in_child(lambda: [finding.what for finding in examine(folder).findings], user=NOBODY) == []


def test_no_finding_sends_one_to_the_doctor(specimen: Specimen) -> None:
    """Whoever reads it is there already."""
    snapshot, _ = specimen
    for kind in KINDS:
        for _, path in damaged(snapshot, kind, 3):
            for repair in (False, True):
                for finding in examine(str(snapshot.folder), repair=repair).findings:
                    assert "headwater doctor" not in finding.advice or "repair failed" in finding.advice, (
                        path,
                        finding,
                    )
    snapshot.restore()


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_log_that_was_repaired_shows_the_truth(specimen: Specimen, kind: str, trials: int) -> None:
    """Healthy means: everything is as it was. What is not repaired is refused as before, never made up."""
    failures = in_child(lambda: list(repair_damaged(specimen, kind, trials)), timeout_s=60 + 5 * trials)
    assert not failures, "\n".join(failures[:10])


def repair_damaged(specimen: Specimen, kind: str, trials: int) -> Iterator[str]:
    snapshot, truth = specimen
    for what, path in damaged(snapshot, kind, trials):
        report = examine(str(snapshot.folder), repair=True)
        is_newer = any("has format" in finding.what for finding in report.findings)
        if kind in MADE_AGAIN and not report.healthy and not is_newer:
            yield f"{what}: was not repaired: {report.findings}"
        again = examine(str(snapshot.folder))
        seen = look(snapshot.folder)
        yield from (f"{what}: {text}" for text in wrong(seen, truth, path))
        refused = [name for name, value in seen.items() if isinstance(value, Exception)]
        if report.healthy and (refused or not again.healthy):
            yield f"{what}: was called healthy, and {refused} refused; findings again: {again.findings}"


def damaged(snapshot: Snapshot, kind: str, trials: int) -> Iterator[tuple[str, Path]]:
    """Seeded damages to files of that kind, one after the other, each on a fresh copy."""
    for seed in range(trials):
        chance = random.Random(f"doctor {kind} {seed}")
        snapshot.restore()
        path = chance.choice(files_of(snapshot.folder, kind))
        what = [*FLIPS, *CUTS][seed % 4](path, chance)
        yield f"seed {seed}, {what} of {path.name}", path
    snapshot.restore()


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(found: str, path: Path) -> bool:
    """A finding may name a segment without its kind."""
    return found in (str(path), str(path.with_suffix("")))


@pytest.mark.parametrize("kind", ["state", "commits", "head", "index", "frames", "sealed", "topic"])
def test_a_missing_file_is_found(specimen: Specimen, kind: str) -> None:
    """What can be made again is; missing events are counted out."""
    snapshot, truth = specimen
    for path in files_of(snapshot.folder, kind):
        snapshot.restore()
        path.unlink()
        report: Report = in_child(lambda: examine(str(snapshot.folder), repair=True))
        if kind == "index":
            assert report.healthy
            continue
        assert report.findings, path
        if kind in MADE_AGAIN:
            assert report.healthy, report.findings
            assert in_child(lambda: look(snapshot.folder)) == truth
        else:
            assert not report.healthy
    snapshot.restore()


MUST_BE_THERE = [
    "catalog.lock",
    "commit.lock",
    "topics/orders/signal",
    *(f"topics/{name}/0/{file}" for name in ("orders", "raw") for file in ("lock", "sync", "seal")),
]


@pytest.mark.parametrize("name", MUST_BE_THERE)
def test_a_missing_lock_is_found_and_made_again(specimen: Specimen, name: str, tmp_path: Path) -> None:
    """It has no content, so a repair makes it; until then nobody is told that the topic was deleted."""
    snapshot, truth = specimen
    snapshot.restore()
    path = snapshot.folder / name
    path.unlink()
    report = examine(str(snapshot.folder))
    assert not report.healthy and str(path) in {finding.path for finding in report.findings}
    for seen in in_child(lambda: look(snapshot.folder)).values():
        assert not isinstance(seen, Exception) or (isinstance(seen, Damaged) and f"{path} is missing" in str(seen))
    if name.endswith("seal"):
        with hw.open_log(snapshot.folder) as log, pytest.raises(Damaged, match=r"seal is missing.*doctor --repair"):
            log.backup(tmp_path / "backup")
    snapshot.restore()  # whoever looks sends events, too
    path.unlink()
    assert examine(str(snapshot.folder), repair=True).healthy
    assert examine(str(snapshot.folder)).findings == []
    assert in_child(lambda: look(snapshot.folder)) == truth
    snapshot.restore()


def test_locks_of_groups_and_stages_are_found_and_made_again(tmp_path: Path) -> None:
    """A consumer and a stage say which one is missing."""
    folder = tmp_path / "log"

    def use() -> None:
        with hw.open_log(folder) as log:
            log.create_topic("t", partitions=1, exist_ok=True)
            log.stage("s")
            with log.consumer("t", group="g") as consumer:
                consumer.poll()

    use()
    for name in ("groups/g/lock", "stages/s/lock"):
        (folder / name).unlink()
        with pytest.raises(Damaged, match=f"{name} is missing"):
            use()
        assert f"{folder}/{name}" in {finding.path for finding in examine(str(folder)).findings}
        assert examine(str(folder), repair=True).healthy
        use()


def test_a_missing_partition_and_a_missing_description_are_named(specimen: Specimen) -> None:
    """Neither is a topic that was deleted."""
    snapshot, _ = specimen
    for name in ("topics/raw/0", "topics/raw/topic"):
        snapshot.restore()
        path = snapshot.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert str(path) in {finding.path for finding in examine(str(snapshot.folder)).findings}
        with hw.open_log(snapshot.folder) as log, pytest.raises(Damaged, match=f"{name} is missing"):
            log.read("raw")
    snapshot.restore()


def test_what_was_to_replace_a_file_is_a_leftover_wherever_it_is(tmp_path: Path) -> None:
    """Of producers, groups, queues and stages too; but a topic or a group may be named so."""
    folder = tmp_path / "log"
    with hw.open_log(folder) as log:
        for name in ("t", "t.new"):
            log.create_topic(name, partitions=1)
            log.append(name, [{"key": b"k", "value": b"v"}])
            log.stage(f"stage of {name}".replace(" ", "-"))
            with log.producer(id="p") as producer:
                producer.send(name, b"x", sequence=1)
            with log.consumer(name, group=f"g.{name}") as consumer:
                consumer.poll()
                consumer.commit()
            with log.queue(name, group="q.new") as queue:
                queue.ack(queue.lease())
    assert examine(str(folder)).findings == []
    drafts = [folder / f"{path.relative_to(folder)}.new" for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in drafts:
        path.write_bytes(b"half")
    with hw.open_log(folder) as log:
        with log.producer(id="p") as producer:
            producer.send("t", b"x", sequence=2)
        log.backup(tmp_path / "backup")
    report = examine(str(folder))
    assert {finding.severity for finding in report.findings} == {"warning"}
    assert {finding.path for finding in report.findings} == {str(path) for path in drafts if path.exists()}
    assert examine(str(folder), repair=True).healthy and examine(str(folder)).findings == []
    hw.restore_log(tmp_path / "backup", tmp_path / "restored")
    with hw.open_log(tmp_path / "restored") as log:
        assert log.read("t.new").num_rows == 2 and set(log.groups()) >= {"g.t", "g.t.new"}
    assert examine(str(tmp_path / "restored")).findings == []


def test_a_full_disk_leaves_no_draft() -> None:
    """What was begun would take up the room that is missing, and nobody would write it to its end."""
    disk = SimDisk(1)
    process = disk.process("one")
    with hw.open_log("/disk/log", disk=process) as log:
        log.create_topic("t", partitions=1)
        disk.capacity_bytes = 1 << 40
        disk.capacity_bytes = (1 << 40) - process.free_bytes("/disk")
        with pytest.raises(DiskFull):
            log.producer(id="p")
        with pytest.raises(DiskFull):
            log.alter_topic("t", event_bytes_max=5000)
        names = [*process.names("/disk/log/producers"), *process.names("/disk/log/topics/t")]
        assert not [name for name in names if name.endswith(".new")]
        disk.capacity_bytes = None
        log.producer(id="p").close()
    assert examine("/disk/log", disk=process).findings == []


def test_what_a_crash_left_over_is_removed(specimen: Specimen) -> None:
    """Half-made files and folders do no harm, and a repair takes them away."""
    snapshot, truth = specimen
    snapshot.restore()
    leftovers = [
        snapshot.folder / "state.new",
        snapshot.folder / "topics" / "raw" / "topic.new",
        snapshot.folder / "topics" / "raw" / "0" / "00000000000000000000.arrow.new",
        snapshot.folder / "topics" / ".half.made" / "topic",
    ]
    for path in leftovers:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    report = examine(str(snapshot.folder))
    assert {finding.severity for finding in report.findings} == {"warning"}
    assert report.healthy
    assert len(report.findings) == 4
    examine(str(snapshot.folder), repair=True)
    assert not any(path.exists() for path in leftovers)
    assert examine(str(snapshot.folder)).findings == []
    assert in_child(lambda: look(snapshot.folder)) == truth
    snapshot.restore()


def test_a_folder_without_a_log_is_not_examined(tmp_path: Path) -> None:
    """There is nothing to say about it."""
    with pytest.raises(hw.errors.LogNotFound):
        examine(str(tmp_path))
