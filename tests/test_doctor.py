"""The doctor: finds every damage, repairs what can be made again, and leaves alone what only a backup has."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater as hw
from children import NOBODY, in_child
from damages import CUTS, FLIPS
from headwater.log.doctor import Report, examine
from specimen import KINDS, Snapshot, Specimen, files_of, look, specimen_in_memory, wrong

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
