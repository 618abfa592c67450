"""The doctor on what stands beside the events, archives, queues and groups: damage is named, and mended where it can be."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import headwater as hw
from headwater.log.doctor.doctor import examine
from headwater.log.queue.window import FAR_US, checked_number
from headwater.model.errors import HeadwaterError
from headwater.testing.contracts.case import values_of
from headwater.testing.contracts.groups.case import drain
from tests.rigs.log.damages import cut, flip

EVENTS = 60
SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.bench) for seed in range(3, 40))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with an archive, a queue without and one with order, and a group."""
    folder = tmp_path_factory.mktemp("whole")
    with hw.open_log(str(folder / "log")) as log:
        log.create_topic(
            "t", partitions=1, segment_bytes=4096, archive=(folder / "archive").as_uri(), retention_bytes=4096
        )
        for number in range(EVENTS):
            log.append("t", [{"key": b"%d" % (number % 7), "value": b"%d " % number + b"x" * 300}])
        with log.queue("t", group="plain") as plain, log.queue("t", group="keyed", order="key") as keyed:
            for queue in (plain, keyed):
                leases = queue.lease(events_max=7)
                queue.ack(leases[:3])
        with log.consumer("t", group="readers") as consumer:
            drain(consumer)
        log.tidy("t")
        assert log.offsets("t") == {0: range(EVENTS)}
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it in the same place, which is put back when the test is over."""
    kept = tmp_path / "kept"
    shutil.copytree(whole, kept)
    yield whole  # type: ignore[misc]
    for name in ("log", "archive"):
        shutil.rmtree(whole / name)
        shutil.copytree(kept / name, whole / name)


def parquet(folder: Path) -> list[Path]:
    return sorted((folder / "archive").rglob("*.parquet"))


def named(folder: Path, path: Path) -> list[str]:
    return [f.what for f in examine(str(folder / "log")).findings if path.name in f.path or path.name in f.what]


def test_all_of_it_is_looked_at(folder: Path) -> None:
    """And nothing is said of what is whole."""
    report = examine(str(folder / "log"))
    assert report.findings == [] and report.healthy
    assert len(parquet(folder)) > 2
    assert report.files > len(parquet(folder)) + 4


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("damage", [flip, cut])
def test_a_damaged_file_of_the_archive_is_named(
    folder: Path, damage: Callable[[Path, random.Random], str], seed: int
) -> None:
    """Wherever reading fails, or gives other events."""
    chance = random.Random(seed)
    path = chance.choice(parquet(folder))
    what = damage(path, chance)
    print(f"seed {seed}: {what} of {path.name}")
    found = named(folder, path)
    with hw.open_log(str(folder / "log")) as log:
        try:
            same = len(values_of(log, "t")) == EVENTS
        except HeadwaterError:
            same = False
    assert found or same, f"seed {seed}: {what}"
    if damage is cut:
        assert found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("damage", [flip, cut])
def test_a_damaged_manifest_is_written_again_from_its_files(
    folder: Path, damage: Callable[[Path, random.Random], str], seed: int
) -> None:
    """Its checksum says so; every event is there as before."""
    [path] = (folder / "archive").rglob("manifest.json")
    before = path.read_bytes()
    what = damage(path, random.Random(seed))
    print(f"seed {seed}: {what}")
    if path.read_bytes().split() == before.split():
        return  # a blank is no damage
    assert named(folder, path), what
    report = examine(str(folder / "log"), repair=True)
    assert report.healthy, report.findings
    assert examine(str(folder / "log")).findings == []
    with hw.open_log(str(folder / "log")) as log:
        assert [int(value.split()[0]) for value in values_of(log, "t")] == list(range(EVENTS))
        appended = [event.appended_us for event in log.reader("t").poll(events_max=EVENTS, timeout_s=0)]
        assert log.offsets_at("t", appended[20], by="appended") == {0: appended.index(appended[20])}


def test_an_archive_that_cannot_be_reached_is_named(folder: Path) -> None:
    """Looking goes on with the rest."""
    shutil.move(folder / "archive", folder / "elsewhere")
    report = examine(str(folder / "log"), repair=True)
    shutil.move(folder / "elsewhere", folder / "archive")
    assert not report.healthy and "archive" in report.findings[0].path
    assert examine(str(folder / "log")).findings == []


def test_a_missing_file_and_a_missing_manifest_are_named(folder: Path) -> None:
    """The manifest is written again; a file that is gone is gone."""
    [manifest] = (folder / "archive").rglob("manifest.json")
    manifest.unlink()
    assert named(folder, manifest)
    assert examine(str(folder / "log"), repair=True).healthy
    path = parquet(folder)[1]
    path.unlink()
    report = examine(str(folder / "log"), repair=True)
    assert not report.healthy and named(folder, path)


HEADER = {"magic": 0, "format": 6, "capacity": 8, "incarnation": 32, "has keys": 56, "topic id": 256}


@pytest.mark.parametrize("group", ["plain", "keyed"])
@pytest.mark.parametrize("field", [*HEADER, "floor", "next", "hint", "state", "later hint", "later next"])
def test_a_window_that_cannot_be_is_named_and_begun_anew(folder: Path, group: str, field: str) -> None:
    """A flipped bit in its header or in a state, or numbers that contradict each other; the events come again, none is lost."""
    path = folder / "log" / "queues" / group / "t" / "0.window"
    raw = bytearray(path.read_bytes())
    capacity, floor, following = (word & (1 << 52) - 1 for word in struct.unpack_from("<QQQ", raw, 8))
    assert floor == 3 and following >= 7
    at, bit = {
        **{name: (place, 0) for name, place in HEADER.items()},
        "format": (7, 0),
        "floor": (16 + 3, 1),
        "next": (24 + 1, 0),
        "hint": (48 + 6, 2),
        "state": (4096 + 8 * 4, 2),
    }.get(field, (0, 8))
    raw[at] ^= 1 << bit & 0xFF
    if field == "later hint":  # whole, and wrong all the same
        raw[48:56] = raw[80:88] = struct.pack("<Q", checked_number(FAR_US))
    if field == "later next":
        raw[24:32] = struct.pack("<Q", checked_number(following + 4096))
    path.write_bytes(raw)
    assert named(folder, path), field
    report = examine(str(folder / "log"), repair=True)
    assert (report.healthy and not path.exists()) or "has format" in str(report.findings)
    path.unlink(missing_ok=True)
    with (
        hw.open_log(str(folder / "log")) as log,
        log.queue("t", group=group, order="key" * (group == "keyed") or "none") as queue,
    ):
        seen: set[int] = set()
        while leases := queue.lease(timeout_s=0.05):
            seen |= {lease.event.offset for lease in leases}
            queue.ack(leases)
        assert seen == set(range(EVENTS)) and capacity == 4096


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["0.window", "queue"])
def test_a_cut_file_of_a_queue_is_named(folder: Path, name: str, seed: int) -> None:
    """A window is begun anew, and what a queue is, is made again from its windows."""
    path = folder / "log" / "queues" / "plain" / "t" / name
    what = cut(path, random.Random(seed))
    if path.stat().st_size == (4096 + 16 * 4096 if name == "0.window" else -1):
        return
    assert named(folder, path), what
    assert examine(str(folder / "log"), repair=True).healthy, what
    assert examine(str(folder / "log")).findings == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["queue", "generation", "roster", "0"])
def test_a_flipped_bit_is_named_where_there_are_checksums(folder: Path, name: str, seed: int) -> None:
    """In what queues and groups are, and in committed offsets; unless it does not count."""
    root = folder / "log" / ("queues/plain" if name == "queue" else "groups/readers")
    [path] = [one for one in root.rglob(name) if one.is_file()]
    chance = random.Random(seed)
    raw = bytearray(path.read_bytes())
    at = chance.choice([0, 2, 5]) if name in ("generation", "0") else chance.randrange(len(raw))
    raw[at] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)
    assert named(folder, path), f"seed {seed}: byte {at}"
    examine(str(folder / "log"), repair=True)
    if name in ("generation", "roster"):
        assert examine(str(folder / "log")).findings == []
        with hw.open_log(str(folder / "log")) as log:
            assert log.group("readers").lag.events == 0
            with log.consumer("t", group="readers") as consumer:
                assert drain(consumer) == []


def test_a_group_without_its_generation_is_named_and_mended(folder: Path) -> None:
    """Without that file nobody sees that there is a group."""
    path = folder / "log" / "groups" / "readers" / "generation"
    path.unlink()
    assert named(folder, path)
    assert examine(str(folder / "log"), repair=True).healthy
    with hw.open_log(str(folder / "log")) as log:
        assert log.group("readers").lag.events == 0
