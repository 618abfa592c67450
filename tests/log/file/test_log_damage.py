"""Damage to a local log's files: it is noticed and named, or it changes nothing; never is wrong data served."""

from __future__ import annotations

import base64
import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from crc32c import crc32c

import headwater as hw
from headwater.log.file.segments import sealed_segment
from headwater.testing.contracts.case import refused
from tests.rigs.children import in_child
from tests.rigs.log.damages import CUTS, FLIPS, Damage
from tests.rigs.log.specimen import KINDS, LOOKS, WRITES, Specimen, files_of, look, specimen_in_memory, wrong

TRIALS = [10, pytest.param(400, marks=pytest.mark.bench)]


@pytest.fixture(scope="module")
def specimen() -> Iterator[Specimen]:
    with specimen_in_memory() as specimen:
        yield specimen


def try_damages(specimen: Specimen, kind: str, damages: list[Damage], trials: int) -> list[str]:
    """What went wrong over many seeded damages, each on a fresh copy."""
    snapshot, truth = specimen
    failures = []
    for seed in range(trials):
        chance = random.Random(f"{kind} {seed}")
        snapshot.restore()
        path = chance.choice(files_of(snapshot.folder, kind))
        what = damages[seed % len(damages)](path, chance)
        failures += [
            f"seed {seed}, {what} of {path.name}: {text}" for text in wrong(look(snapshot.folder), truth, path)
        ]
    snapshot.restore()
    return failures


@pytest.mark.slow
@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_named_or_changes_nothing(specimen: Specimen, kind: str, trials: int) -> None:
    """In every kind of file; also what is appended afterwards is stored beside the truth or refused."""
    failures = in_child(lambda: try_damages(specimen, kind, FLIPS, trials), timeout_s=60 + 5 * trials)
    assert not failures, "\n".join(failures[:10])


@pytest.mark.slow
@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_file_is_named_or_changes_nothing(specimen: Specimen, kind: str, trials: int) -> None:
    """Shorter than it was, or with a hole of zeros: never a crash, never other events."""
    failures = in_child(lambda: try_damages(specimen, kind, CUTS, trials), timeout_s=60 + 5 * trials)
    assert not failures, "\n".join(failures[:10])


@pytest.mark.parametrize("left", [1 / 10, 1 / 2, 9 / 10])
def test_a_closed_segment_without_its_end_is_noticed(specimen: Specimen, left: float) -> None:
    """Its last frames are gone and the rest is whole: not even a search by time takes it for a shorter one."""
    snapshot, truth = specimen
    for path in files_of(snapshot.folder, "frames"):
        snapshot.restore()
        starts = frame_starts(path)
        os.truncate(path, starts[int(len(starts) * left)])
        seen = in_child(lambda: look(snapshot.folder))
        assert not list(wrong(seen, truth, path))
        assert any(isinstance(value, hw.HeadwaterError) for value in seen.values())
    snapshot.restore()


@pytest.mark.parametrize("left", [0, 1, 1000, "all but the last frame", None])
def test_nothing_is_acknowledged_onto_a_segment_that_was_cut(specimen: Specimen, left: int | str | None) -> None:
    """What is written behind the gap would never be read again; one that is gone (None) is not made anew either."""
    snapshot, _ = specimen
    for name, write in WRITES.items():
        snapshot.restore()
        path = sorted((snapshot.folder / "topics" / "raw" / "0").glob("*.frames"))[-1]
        if left is None:
            path.unlink()
        else:
            os.truncate(path, left if isinstance(left, int) else frame_starts(path)[-1])
        size = path.stat().st_size if path.exists() else None
        with hw.open_log(snapshot.folder) as log:
            for _ in range(2):
                with refused(hw.errors.Damaged, str(path)):
                    write(log)
        assert (path.stat().st_size if path.exists() else None) == size, name
    snapshot.restore()


def frame_starts(path: Path) -> list[int]:
    """Where the frames of a segment begin."""
    content = path.read_bytes()
    return [at for at in range(0, len(content), 64) if content[at : at + 4] == b"HWF1"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_newer_format_is_refused_by_name(specimen: Specimen, kind: str) -> None:
    """Whoever meets the file says that Headwater is too old for it; an index is built again instead."""
    snapshot, truth = specimen
    for path in files_of(snapshot.folder, kind):
        snapshot.restore()
        raise_format(path, kind)
        seen = in_child(lambda: look(snapshot.folder))
        if kind == "index":
            assert seen == truth
            continue
        refusals = [error for error in seen.values() if isinstance(error, Exception)]
        assert refusals, f"{path} was read"
        for error in refusals:
            assert isinstance(error, hw.errors.FormatTooNew), f"{type(error).__name__}: {error}"
            assert str(path) in str(error) and error.advice
        assert not list(wrong(seen, truth, path))
    snapshot.restore()


def raise_format(path: Path, kind: str) -> None:
    """Writes a later format's number into the file (one kind has three), with its checksum where the number is summed."""
    content = bytearray(path.read_bytes())
    if kind in ("log", "topic", "incarnations"):
        first, _, body = bytes(content).partition(b"\n")
        words = first.split(b" ")
        path.write_bytes(b" ".join([*words[:2], b"%d" % (int(words[2]) + 1), words[3]]) + b"\n" + body)
        return
    if kind == "sealed":
        at = content.rfind(b"headwater-batches:") + len(b"headwater-batches:")
        end = content.find(b"\0", at)
        table = bytearray(base64.b64decode(content[at:end]))
        struct.pack_into("<H", table, 6, sealed_segment.FORMAT + 1)
        table[-4:] = struct.pack("<I", crc32c(bytes(table[:-4])))
        content[at:end] = base64.b64encode(table)
    else:
        struct.pack_into("<H", content, 6, struct.unpack_from("<H", content, 6)[0] + 3)
    path.write_bytes(content)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file_is_an_error_or_is_made_again(specimen: Specimen, kind: str) -> None:
    """Somebody removed it: no crash, no other events than there were."""
    snapshot, truth = specimen
    for path in files_of(snapshot.folder, kind):
        snapshot.restore()
        path.unlink()
        seen = in_child(lambda: look(snapshot.folder))
        for name, value in seen.items():
            assert value == truth[name] or isinstance(value, hw.HeadwaterError), f"{path.name}, {name}: {value!r:.300}"
    snapshot.restore()


def test_all_indexes_can_be_deleted_while_the_log_is_used(specimen: Specimen) -> None:
    """They are built again from the frames."""
    snapshot, truth = specimen
    snapshot.restore()
    with hw.open_log(str(snapshot.folder)) as log:
        for name, use in LOOKS.items():
            for path in files_of(snapshot.folder, "index"):
                path.unlink()
            assert use(log) == truth[name]
    snapshot.restore()


def test_damage_to_one_topic_leaves_the_others_usable(specimen: Specimen) -> None:
    """Its neighbours are read, written and made as ever."""
    snapshot, truth = specimen
    snapshot.restore()
    for path in (snapshot.folder / "topics" / "orders").rglob("*"):
        if path.is_file():
            path.write_bytes(b"\xff" * path.stat().st_size)
    with hw.open_log(str(snapshot.folder)) as log:
        assert log.topics() == ["orders", "raw"]
        assert LOOKS["events of raw"](log) == truth["events of raw"]
        log.append("raw", [b"more"])
        log.append("raw", [b"more"], atomic=True)
        log.create_topic("new")
        with log.reader("raw") as reader:
            assert len(reader.poll(events_max=1000)) == len(truth["events of raw"]) + 2
        with pytest.raises(hw.errors.Damaged, match="orders"):
            log.read("orders")
    snapshot.restore()
