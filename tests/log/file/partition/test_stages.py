"""Stages whose holders are killed at every point, at random, and by a power loss: real processes, and an oracle of plain loops."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

import headwater as hw
from headwater.log.clients.stage import Stage
from headwater.log.disk.disk import RealDisk
from headwater.log.doctor.doctor import examine
from headwater.log.file import commit
from headwater.log.port.stage import check_query
from headwater.model.errors import CheckpointConflict, Damaged, Fenced
from headwater.testing import Crashed, SimDisk
from headwater.testing.contracts.case import refused, values_of
from headwater.testing.crash.disk import CrashingDisk, RandomCrashDisk, of_boot
from headwater.testing.crash.points import crash_points, stage_points
from tests.rigs.children import Child, in_child
from tests.rigs.memory_folders import memory_folder

EPOCHS = 12
TRANSACTION_POINTS = [point for point in crash_points() if point.startswith(("transaction:", "commit:", "settle:"))]


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


def disk_of_boot(boot: int, point: str = "", nth: int = 1) -> RealDisk:
    return of_boot(CrashingDisk(point, nth) if point else RealDisk(), boot)


def make_topics(folder: Path, disk: RealDisk | None = None) -> None:
    with hw.open_log(str(folder / "log"), disk=disk) as log:
        log.create_topic("a", "n INT, k STRING", key="k", partitions=3)
        log.create_topic("b", "n INT, k STRING", key="k", partitions=1)


def rows_of(epoch: int) -> list[dict[str, object]]:
    return [{"n": 10 * epoch + number, "k": f"k{number}"} for number in range(epoch % 4 + 1)]


def test_a_query_that_cannot_go_on_is_told_before_it_takes_the_stage() -> None:
    """Another one, or one that has not begun; a stage that has written nothing takes any."""
    last = hw.Marker(query="q", epoch=4, stage="s")
    for query in (None, "q", "another"):
        check_query("s", None, query)
    check_query("s", last, "q")
    for query, word in [(None, "no batch yet"), ("another", "'another'")]:
        with refused(CheckpointConflict, "'s'", "epoch 4 of query 'q'", word, "--accept-new-checkpoint STAGE=marker"):
            check_query("s", last, query)


def run_stage(folder: Path, disk: RealDisk, *, epochs: int = EPOCHS) -> None:
    """As Spark does: the last batch is always written again, since nobody knows whether it was."""
    with hw.open_log(str(folder / "log"), disk=disk) as log:
        stage = log.stage("s")
        start = 0 if stage.last is None else stage.last.epoch
        for epoch in range(start, epochs):
            commit_epoch(stage, epoch)


def commit_epoch(stage: Stage, epoch: int) -> None:
    # Later markers need more room than a file begins with.
    ends = {str(number): 10**15 + epoch for number in range(1 + 80 * epoch)}
    stage.commit(hw.Marker(query="q", epoch=epoch, ends=ends), [("a", rows_of(epoch)), ("b", rows_of(epoch))])


def check(folder: Path, disk: RealDisk | None = None, *, epochs: int = EPOCHS) -> None:
    """Every batch once, in both topics, and in the order of epochs."""
    wanted = [row["n"] for epoch in range(epochs) for row in rows_of(epoch)]
    with hw.open_log(str(folder / "log"), disk=disk) as log:
        assert [value["n"] for value in values_of(log, "b")] == wanted
        assert sorted(value["n"] for value in values_of(log, "a")) == sorted(wanted)
        last = log.stage("s").last
        assert last is not None
        assert last.epoch == epochs - 1


@pytest.mark.slow
@pytest.mark.parametrize("point", [*stage_points(), *TRANSACTION_POINTS])
def test_a_holder_dies_at_a_point(folder: Path, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two steps of opening, committing, publishing and recovering: the next one goes on, exactly once."""
    monkeypatch.setattr(commit, "COMMITS_BYTES_MAX", 6000)
    make_topics(folder, disk_of_boot(0))
    if "recovered" in point:
        in_child(lambda: run_stage(folder, disk_of_boot(0), epochs=5))
    if "settle" in point:
        Child(lambda: run_stage(folder, disk_of_boot(1, "commit: recorded", 3))).wait()
    killed = 0
    for nth in (1, 2, 3):
        boot = nth if "recovered" in point else 1
        status = Child(lambda nth=nth, boot=boot: run_stage(folder, disk_of_boot(boot, point, nth))).wait()
        killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed, "the point is not reached"
    in_child(lambda: run_stage(folder, disk_of_boot(4)))
    check(folder, disk_of_boot(4))


@pytest.mark.slow
@pytest.mark.covers("Trident", backends=["file"])
@pytest.mark.parametrize("seed", range(8))
def test_holders_die_anywhere(folder: Path, seed: int) -> None:
    """Also in the middle of a write: replayed batches leave the topics as they were."""
    print(f"seed {seed}")
    make_topics(folder)
    lives = 0
    while lives < 60:
        boot = lives if Random(seed * 1000 + lives).random() < 0.2 else 0
        disk = of_boot(RandomCrashDisk(seed * 1000 + lives, 0.003), boot)
        lives += 1
        if not os.WIFSIGNALED(Child(lambda disk=disk: run_stage(folder, disk)).wait()):
            break
    print(f"{lives} lives")
    in_child(lambda: run_stage(folder, RealDisk()))
    check(folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_marker_and_events_agree_after_a_power_loss(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it reached the disk, and whenever it came: what was acknowledged is there, and no batch twice."""
    print(f"seed {seed}")
    chance, disk, acknowledged = Random(seed), SimDisk(seed), -1
    monkeypatch.setattr(commit, "COMMITS_BYTES_MAX", chance.choice((3000, 1 << 20)))
    make_topics(Path(disk.folder), disk.process("first"))
    for life in range(5):
        process = f"life {life}"
        disk.crash_randomly(process, chance.choice((0.0, 0.002, 0.01)))
        try:
            stage = hw.open_log(f"{disk.folder}/log", disk=disk.process(process)).stage("s")
            last = stage.last
            for epoch in range(0 if last is None else last.epoch, acknowledged + chance.randint(2, 4)):
                commit_epoch(stage, epoch)
                acknowledged = epoch
        except Crashed:
            pass
        disk.power_loss()
    disk.heal()
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("look")) as log:
        last = log.stage("s").last
        written = -1 if last is None else last.epoch
        assert acknowledged <= written <= acknowledged + 1
        assert [value["n"] for value in values_of(log, "b")] == [r["n"] for e in range(written + 1) for r in rows_of(e)]
    run_stage(Path(disk.folder), disk.process("last"), epochs=30)
    check(Path(disk.folder), disk.process("end"), epochs=30)


def test_a_holder_that_slept_is_fenced(folder: Path) -> None:
    """Stopped between two batches until somebody else has gone on with the stage; then it wakes."""
    make_topics(folder)

    def sleep() -> str:
        with hw.open_log(str(folder / "log")) as log:
            stage = log.stage("s")
            commit_epoch(stage, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            try:
                commit_epoch(stage, 1)
            except Fenced:
                return "fenced"
        return "committed"

    zombie = Child(sleep)
    _, status = os.waitpid(zombie.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)  # woken before it sleeps, it would sleep for ever
    in_child(lambda: run_stage(folder, RealDisk(), epochs=1))
    os.kill(zombie.pid, signal.SIGCONT)
    assert zombie.result() == "fenced"
    check(folder, epochs=1)


def test_stages_are_in_a_backup(folder: Path) -> None:
    """With the events of the same moment: a restored log refuses a checkpoint that is ahead of it."""
    make_topics(folder)
    run_stage(folder, RealDisk(), epochs=4)
    with hw.open_log(str(folder / "log")) as log:
        log.backup(folder / "backup")
    run_stage(folder, RealDisk(), epochs=6)
    hw.restore_log(str(folder / "backup"), str(folder / "again" / "log"))
    check(folder / "again", epochs=4)
    run_stage(folder / "again", RealDisk())
    check(folder / "again")


@pytest.mark.parametrize("slots", [(0,), (1,), (0, 1)])
def test_a_damaged_marker_is_found_and_never_guessed(folder: Path, slots: tuple[int, ...]) -> None:
    """The stage refuses to work, also where the older marker is whole; the doctor names the file; other stages go on."""
    make_topics(folder)
    run_stage(folder, RealDisk(), epochs=2)
    path = folder / "log" / "stages" / "s" / "marker"
    raw = bytearray(path.read_bytes())
    for slot in slots:
        raw[16 + slot * (len(raw) - 16) // 2 + 20] ^= 0x10
    path.write_bytes(raw)
    with hw.open_log(str(folder / "log")) as log:
        with refused(Damaged, "marker"):
            commit_epoch(log.stage("s"), 2)
        assert log.stage("other").commit(hw.Marker(query="q", epoch=0), [("b", rows_of(0))]).written
    report = examine(str(folder / "log"))
    assert any("stages/s/marker" in str(finding) for finding in report.findings), report.findings


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_batch_that_was_placed_before_its_topic_was_split_is_placed_again(tmp_path: Path, kind: str) -> None:
    """Tasks place their rows, and a split may come before the driver commits them."""
    with hw.open_log("memory://" if kind == "memory" else str(tmp_path / "log")) as log:
        log.create_topic("t", "k STRING", key="k", partitions=2)
        rows = [{"k": f"k{number}"} for number in range(40)]
        writes = log.appender.place("t", rows)
        log.alter_topic("t", partitions=6)
        stage = log.stage("app.s")
        assert stage.commit_writes(hw.Marker(query="q", epoch=0), writes).written
        log.append("t", rows)
        found = [(event.key, event.partition) for event in log.reader("t").poll(events_max=100)]
    assert len(found) == 80 and len(set(found)) == 40, "both batches went to the same partitions"
