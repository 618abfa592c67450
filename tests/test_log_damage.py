"""Damage to a local log's files: it is noticed and named, or it changes nothing; never is wrong data served."""

from __future__ import annotations

import base64
import os
import random
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

import headwater as hw
from children import in_child
from specimen import CHANGES, KINDS, LOOKS, Snapshot, files_of, make_specimen

TRIALS = [10, pytest.param(400, marks=pytest.mark.bench)]
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Damage is not about syncing, so it is tried where a sync costs nothing."""

Damage = Callable[[Path, random.Random], object]
Specimen = tuple[Snapshot, dict[str, Any]]


@pytest.fixture(scope="module")
def specimen() -> Iterator[tuple[Snapshot, dict[str, Any]]]:
    """The log's files, and what it shows when nothing is damaged."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as parent:
        folder = Path(parent) / "log"
        make_specimen(folder)
        assert all(files_of(folder, kind) for kind in KINDS)
        snapshot = Snapshot(folder)
        truth = look(folder)
        snapshot.restore()
        assert not [name for name, seen in truth.items() if isinstance(seen, Exception)], truth
        yield snapshot, truth


def look(folder: Path) -> dict[str, Any]:
    """Everything the log shows and does, or the error in its place."""
    try:
        log = hw.open_log(str(folder))
    except Exception as error:  # noqa: BLE001 (which kinds are allowed is the test)
        return dict.fromkeys([*LOOKS, *CHANGES], error)
    seen: dict[str, Any] = {}
    with log:
        for name, use in {**LOOKS, **CHANGES}.items():
            try:
                seen[name] = use(log)
            except Exception as error:  # noqa: BLE001 (which kinds are allowed is the test)
                seen[name] = error
    return seen


def wrong(seen: dict[str, Any], truth: dict[str, Any], damaged: Path) -> Iterator[str]:
    """What is neither the truth nor an error of ours that names the damaged file."""
    for name, value in seen.items():
        if isinstance(value, hw.HeadwaterError):
            if str(damaged) not in str(value) or not value.advice:
                yield f"{name}: {type(value).__name__}: {value}"
        elif isinstance(value, Exception):
            yield f"{name}: {type(value).__name__} is not ours: {value}"
        elif value != truth[name]:
            yield f"{name}: is {value!r:.200}, should be {truth[name]!r:.200}"


def try_damages(specimen: Specimen, kind: str, damages: dict[str, Damage], trials: int) -> list[str]:
    """What went wrong over many seeded damages, each on a fresh copy."""
    snapshot, truth = specimen
    failures = []
    for seed in range(trials):
        chance = random.Random(f"{kind} {seed}")
        snapshot.restore()
        path = chance.choice(files_of(snapshot.folder, kind))
        name = sorted(damages)[seed % len(damages)]
        what = damages[name](path, chance)
        failures += [
            f"seed {seed}, {name} {what} of {path.name}: {text}" for text in wrong(look(snapshot.folder), truth, path)
        ]
    snapshot.restore()
    return failures


def flip(path: Path, chance: random.Random) -> str:
    """Flips one bit, more often than not where there is something."""
    content = bytearray(path.read_bytes())
    places = [at for at, byte in enumerate(content) if byte] if chance.random() < 0.7 else range(len(content))
    at, bit = chance.choice(places), chance.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"byte {at} bit {bit}"


def flip_word(path: Path, chance: random.Random) -> str:
    """Flips a bit near the beginning of a file, or of one of its facts: where a few bytes decide about everything."""
    content = bytearray(path.read_bytes())
    at = min(chance.choice([0, 512, 1024, 1536]) + chance.randrange(8), len(content) - 1)
    bit = chance.choice([0, 0, 0, 1, chance.randrange(8)])
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"byte {at} bit {bit}"


def zero(path: Path, chance: random.Random) -> str:
    """Puts zeros where a sector was."""
    content = bytearray(path.read_bytes())
    at = chance.randrange(0, len(content), 512)
    content[at : at + 512] = bytes(len(content[at : at + 512]))
    path.write_bytes(content)
    return f"sector at {at}"


def cut(path: Path, chance: random.Random) -> str:
    """Cuts the file: to nothing, by one byte, at a page or anywhere."""
    size = path.stat().st_size
    length = chance.choice([0, 1, size - 1, size // 4096 * 4096, chance.randrange(size), size // 2])
    os.truncate(path, length)
    return f"from {size} to {length}"


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_named_or_changes_nothing(specimen: Specimen, kind: str, trials: int) -> None:
    """In every kind of file; also what is appended afterwards is stored beside the truth or refused."""
    failures = in_child(
        lambda: try_damages(specimen, kind, {"flip": flip, "flip word": flip_word}, trials), timeout_s=60 + trials
    )
    assert not failures, "\n".join(failures[:10])


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_file_is_named_or_changes_nothing(specimen: Specimen, kind: str, trials: int) -> None:
    """Shorter than it was, or with a hole of zeros: never a crash, never other events."""
    failures = in_child(lambda: try_damages(specimen, kind, {"cut": cut, "zero": zero}, trials), timeout_s=60 + trials)
    assert not failures, "\n".join(failures[:10])


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
    """Writes the next format's number into the file, with its checksum where the number is summed."""
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
        struct.pack_into("<H", table, 6, 2)
        table[-4:] = struct.pack("<I", crc32c(bytes(table[:-4])))
        content[at:end] = base64.b64encode(table)
    else:
        struct.pack_into("<H", content, 6, struct.unpack_from("<H", content, 6)[0] + 1)
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
