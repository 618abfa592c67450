"""Compaction of the local log: whatever is interleaved with it, the table is that of the whole history.

The oracle is a list of what was appended, by offset; it shares nothing with the log. `-m bench` runs many more rounds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pytest

from headwater.log.clients.reader import Reader
from headwater.log.disk.disk import RealDisk
from headwater.log.doctor.doctor import examine
from headwater.log.file.upkeep.compaction import last_of_each
from headwater.log.file.upkeep.retention import segment_sizes
from headwater.log.log import Log, open_log
from headwater.testing import SimDisk
from headwater.testing.crash.disk import CrashingDisk, RandomCrashDisk
from headwater.testing.crash.points import keeping_points
from headwater.testing.simulation.process import Crashed
from tests.rigs.children import Child

HOUR = 3_600_000_000
COLUMNS = "k STRING, n BIGINT, text STRING"
POINTS = [point for point in keeping_points() if point.startswith("compaction:")]
SETTINGS: dict[str, Any] = {"key": "k", "partitions": 1, "segment_bytes": 4096, "compact": True, "tombstones": "1 hour"}

History = list[tuple[str, int | None]]
"""What was appended, by offset: a key, and its value or None where it was deleted."""


def rows_of(events: History) -> list[dict[str, Any]]:
    return [
        {"k": key, "n": -1, "text": "", "_deleted": True}
        if n is None
        else {"k": key, "n": n, "text": "x" * (n * 37 % 300), "_deleted": False}
        for key, n in events
    ]


def some_events(chance: random.Random, start: int, count: int) -> History:
    return [
        (f"key-{chance.randint(0, 12)}", None if chance.random() < 0.2 else start + number) for number in range(count)
    ]


def table_of(history: History) -> dict[str, int]:
    newest = dict(history)
    return {key: n for key, n in newest.items() if n is not None}


def check_log(log: Log, history: History) -> None:
    """The table is the whole history's; every event is what it was; the last event of each key is there."""
    assert dict(zip(*log.table("t").select(["k", "n"]).to_pydict().values(), strict=True)) == table_of(history)
    rows = log.read("t", columns=["_offset", "k", "n", "text", "_deleted"]).to_pylist()
    offsets = [row.pop("_offset") for row in rows]
    assert offsets == sorted(set(offsets))
    assert rows == rows_of([history[offset] for offset in offsets])
    last = {key: offset for offset, (key, _) in enumerate(history)}
    assert {offset for offset in last.values() if history[offset][1] is not None} <= set(offsets)


class Follower:
    """A reader that builds a table of its own, a few events at a time."""

    def __init__(self, log: Log, now_us: int) -> None:
        self.began_us = now_us
        self.table: dict[str, int] = {}
        self.reader: Reader = log.reader("t")

    def follow(self, events_max: int) -> None:
        for event in self.reader.poll(events_max=events_max, timeout_s=0):
            if event.value is None:
                self.table.pop(event.key, None)
            else:
                self.table[event.key] = event.value["n"]


def run_history(seed: int) -> SimDisk:
    """Appends, compactions, reads, kills and power losses in any order, on the simulated disk."""
    disk, chance = SimDisk(seed), random.Random(seed)
    now = [1_700_000_000_000_000]
    history: History = []

    def opened(name: str) -> Log:
        return open_log("/disk/log", disk=disk.process(name), clock=lambda: now[0])

    opened("maker").create_topic("t", COLUMNS, **SETTINGS)
    follower = Follower(opened("reader"), now[0])
    for life in range(10):
        name = f"writer-{life}"
        log = opened(name)
        try:
            for _ in range(chance.randint(2, 5)):
                for _ in range(chance.randint(1, 12)):
                    events = some_events(chance, len(history), chance.randint(1, 4))
                    log.append("t", rows_of(events))
                    history += events
                follower.follow(chance.randint(1, 30))
                now[0] += chance.choice((0, HOUR // 5, HOUR // 2, 2 * HOUR))
                if chance.random() < 0.5:
                    disk.crash_at(
                        name,
                        chance.choice([*POINTS, "seal: written", "seal: named", "seal: renamed"]),
                        chance.randint(1, 3),
                    )
                log.tidy("t")
                disk.heal()
                check_log(log, history)
            log.close()
        except Crashed:
            disk.heal()
        lost_power = chance.random() < 0.3
        if lost_power:
            disk.power_loss()
        check_log(opened(f"checker-{life}"), history)
        if now[0] - follower.began_us <= HOUR and not lost_power:
            while follower.reader.lag():
                follower.follow(10)
            assert follower.table == table_of(history), f"seed {seed}: a reader missed something"
        if lost_power or chance.random() < 0.3 or now[0] - follower.began_us > HOUR:
            follower = Follower(opened(f"reader-{life}"), now[0])
    assert examine("/disk/log", disk=disk.process("doctor")).healthy
    return disk


def test_any_interleaving_leaves_the_table_of_the_whole_history() -> None:
    """Some histories by seed, which reach every point of a compaction."""
    reached: set[str] = set()
    for seed in range(5):
        try:
            reached |= set(run_history(seed).points)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert set(POINTS) <= reached


def test_a_deleted_key_never_comes_back() -> None:
    """Every compaction is killed after its first file, for days: a tombstone goes only after all that it deletes."""
    disk, now = SimDisk(3), [1_700_000_000_000_000]
    log = open_log("/disk/log", disk=disk.process("maker"), clock=lambda: now[0])
    log.create_topic("t", COLUMNS, **SETTINGS)
    history: History = []
    for n in range(0, 60, 2):
        history += [("gone", n), (f"key-{n}", n + 1)]
        log.append("t", rows_of(history[-2:]))
    history += [("gone", None), *((f"key-{n}", n) for n in range(5))]
    log.append("t", rows_of(history[-6:]))
    history += filled(log, 40, start=len(history))
    for life in range(20):
        disk.crash_at(f"life-{life}", "compaction: replaced one")
        log = open_log("/disk/log", disk=disk.process(f"life-{life}"), clock=lambda: now[0])
        try:
            log.tidy("t")
        except Crashed:
            disk.heal()
        check_log(open_log("/disk/log", disk=disk.process(f"look-{life}"), clock=lambda: now[0]), history)
        now[0] += 2 * HOUR
    assert "gone" not in log_keys(disk, now[0])


@pytest.mark.parametrize("seed", range(10))
def test_a_name_that_a_dead_process_gave_is_on_disk_before_what_it_replaces_goes(seed: int) -> None:
    """Killed between the rename and the sync, of a sealed or of a merged file; the next goes on, and the power fails."""
    disk, now = SimDisk(seed), [1_700_000_000_000_000]

    def opened(name: str) -> Log:
        return open_log("/disk/log", disk=disk.process(name), clock=lambda: now[0])

    log = opened("maker")
    log.create_topic("t", COLUMNS, **SETTINGS)
    history = filled(log, 200)
    for life, nth in enumerate((1, 1 + seed, 2, 1)):
        disk.crash_at(f"killed-{life}", "seal: named", nth)
        disk.crash_at(f"next-{life}", ("seal: removed", "compaction: removed one")[seed % 2], 1 + seed % 3)
        for name in (f"killed-{life}", f"next-{life}"):
            try:
                opened(name).tidy("t")
            except Crashed:
                continue
        disk.heal()
        disk.power_loss()
        check_log(opened(f"look-{life}"), history)
        now[0] += 2 * HOUR
        history += filled(opened(f"more-{life}"), 60, start=len(history))


def log_keys(disk: SimDisk, now_us: int) -> list[str]:
    log = open_log("/disk/log", disk=disk.process("last"), clock=lambda: now_us)
    log.tidy("t")
    return log.read("t")["k"].to_pylist()


@pytest.mark.bench
@pytest.mark.timeout(1800)
def test_any_interleaving_of_many() -> None:
    """As above, some hundred times."""
    for seed in range(1000, 1300):
        try:
            run_history(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def run_killed(folder: Path, seed: int, point: str | None) -> None:
    """Real processes: one appends and compacts until it is killed, one reads on; twice, then the log is checked."""
    log_folder, account = str(folder / "log"), folder / "account"
    # Only files without tombstones that a reader may still need are merged, and only then is one of them removed.
    reader_sees_all = seed % 2 == 0 and point != "compaction: removed one"
    with open_log(log_folder) as log:
        log.create_topic("t", COLUMNS, **SETTINGS | {"tombstones": "1 hour" if reader_sees_all else "0 seconds"})

    def write(life: int) -> None:
        disk = RandomCrashDisk(seed * 10 + life, 0.002) if point is None else CrashingDisk(point, 1 + seed % 3)
        chance = random.Random(seed * 10 + life)
        with open_log(log_folder, disk=disk) as log, account.open("ab", buffering=0) as lines:
            while True:
                number = log.offsets("t")[0].stop
                events = some_events(chance, number, chance.randint(1, 4))
                lines.write(json.dumps({"begun": events}).encode() + b"\n")
                offsets = log.append("t", rows_of(events))[0]
                lines.write(json.dumps({"stored": offsets.start}).encode() + b"\n")
                if chance.random() < 0.05:
                    log.tidy("t")

    def read(stop: int) -> dict[str, int]:
        with open_log(log_folder) as log:
            follower = Follower(log, 0)
            while not os.path.exists(folder / f"stop-{stop}") or follower.reader.lag():
                follower.follow(20)
            return follower.table

    for life in range(2):
        reader = Child(lambda life=life: read(life))
        writer = Child(lambda life=life: write(life))
        status = writer.wait()
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"seed {seed}: status {status}"
        history = history_of(account, log_folder)
        (folder / f"stop-{life}").touch()
        seen = reader.result()
        if reader_sees_all:
            assert seen == table_of(history), f"seed {seed}: a reader missed something"
    with open_log(log_folder) as log:
        check_log(log, history)
        log.tidy("t")
        check_log(log, history)
    assert examine(log_folder).healthy


def history_of(account: Path, folder: str) -> History:
    """What was stored, in order. One more append says where the log ends, and so whether the dead writer's last is in it."""
    with open_log(folder) as log:
        first = log.append("t", rows_of([("last", 1)]))[0].start
    with account.open("a") as lines:
        lines.write(json.dumps({"begun": [("last", 1)]}) + "\n" + json.dumps({"stored": first}) + "\n")
    history: History = []
    begun: list[History] = []
    for text in account.read_text().splitlines():
        line = json.loads(text)
        if "begun" in line:
            begun.append([(key, n) for key, n in line["begun"]])
            continue
        *unknown, stored = begun
        for events in unknown:
            history += events if line["stored"] > len(history) else []
        assert line["stored"] == len(history), "an acknowledged event is lost or moved"
        history += stored
        begun = []
    return history


@pytest.mark.slow
@pytest.mark.covers("Kafka")
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_any_point(seed: int) -> None:
    """With SIGKILL, at each point of a compaction or anywhere; nothing is lost, nothing deleted comes back."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        run_killed(Path(folder), seed, [*POINTS, None][seed % (len(POINTS) + 1)])


@pytest.mark.bench
@pytest.mark.timeout(1800)
def test_killed_at_any_point_many_times() -> None:
    """As above, a hundred times."""
    for seed in range(100, 200):
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
            run_killed(Path(folder), seed, [*POINTS, None][seed % (len(POINTS) + 1)])


def files_of(folder: Path) -> list[Path]:
    return sorted((folder / "topics" / "t" / "0").glob("*.arrow"))


def filled(log: Log, count: int, *, start: int = 0, keys: int = 3) -> History:
    history = [(f"key-{n % keys}", n) for n in range(start, start + count)]
    for at in range(0, count, 5):
        log.append("t", rows_of(history[at : at + 5]))
    return history


def test_a_compacted_segment_is_a_standard_arrow_file(tmp_path: Path) -> None:
    """With the offsets in a column, for whoever reads it without us."""
    with open_log(str(tmp_path)) as log:
        log.create_topic("t", COLUMNS, **SETTINGS)
        filled(log, 100)
        log.tidy("t")
        frame = polars.concat([polars.read_ipc(path) for path in files_of(tmp_path)])
        kept = log.read("t", columns=["_offset"])["_offset"].to_pylist()
        assert frame["_offset"].to_list() == kept[: len(frame)]
        assert len(frame) == 3


def test_settled_neighbours_become_one_file(tmp_path: Path) -> None:
    """Small ones, when no reader needs their tombstones any more; and the doctor knows a file that a crash left."""
    now = [1_700_000_000_000_000]
    with open_log(str(tmp_path), clock=lambda: now[0]) as log:
        log.create_topic("t", COLUMNS, **SETTINGS)
        history = filled(log, 200)
        log.tidy("t")
        many = files_of(tmp_path)
        second = many[1].read_bytes()
        assert len(many) > 3
        now[0] += 2 * HOUR
        history += filled(log, 60, start=200)
        log.tidy("t")
        few = files_of(tmp_path)
        assert len(few) < len(many)
        check_log(log, history)
        many[1].write_bytes(second)
        check_log(log, history)
    report = examine(str(tmp_path), repair=True)
    assert report.healthy
    assert ["merged" in finding.what for finding in report.findings] == [True]
    assert files_of(tmp_path) == few
    assert examine(str(tmp_path)).findings == []
    many[1].write_bytes(second)
    with open_log(str(tmp_path), clock=lambda: now[0]) as log:
        sizes = segment_sizes(RealDisk(), log.store.handles.partition("t", 0))
        log.alter_topic("t", compact=False, retention_bytes=sum(sizes.values()) - sizes[0])
        log.tidy("t")
        first = log.offsets("t")[0].start
        assert first >= int(few[1].name[:20]), "a file came back that was merged into one that is gone"
        assert min(int(path.name[:20]) for path in files_of(tmp_path)) >= first


def test_a_damaged_compacted_segment_is_noticed(tmp_path: Path) -> None:
    """Any flipped bit is named or does no harm; Arrow's own footer is made again."""
    with open_log(str(tmp_path)) as log:
        log.create_topic("t", COLUMNS, **SETTINGS)
        history = filled(log, 100, keys=40)
        log.tidy("t")
        path = files_of(tmp_path)[-1]
        whole = path.read_bytes()
    chance = random.Random(5)
    for _ in range(40):
        content = bytearray(whole)
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        with open_log(str(tmp_path)) as log:
            try:
                check_log(log, history)
            except log_errors():
                assert examine(str(tmp_path)).findings
    path.write_bytes(whole)
    assert examine(str(tmp_path)).findings == []


def log_errors() -> type[Exception]:
    from headwater.model.errors import Damaged

    return Damaged


def test_it_waits_until_enough_has_come(tmp_path: Path) -> None:
    """In the background; on demand it is done at once."""
    with open_log(str(tmp_path)) as log:
        log.create_topic("t", COLUMNS, **SETTINGS)
        filled(log, 300, keys=200)
        assert log.tidy("t") > 0
        filled(log, 30, start=300, keys=200)
        assert log.store.tidy("t", dirty_share_min=0.5) == 0
        filled(log, 300, start=330, keys=200)
        assert log.store.tidy("t", dirty_share_min=0.5) > 0


def test_the_last_row_of_each_key_is_found_in_any_pieces() -> None:
    """Against a loop; keys may be missing, and of any type."""
    chance = random.Random(11)
    for values in (
        [chance.choice(["a", "b", "c", None]) for _ in range(500)],
        [chance.choice([1, 2, 3, None]) for _ in range(500)],
        [],
    ):
        cuts = sorted(chance.randint(0, len(values)) for _ in range(4))
        pieces = [values[a:b] for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True)]
        type_ = pa.int64() if 1 in values else pa.string()
        newest = {value: row for row, value in enumerate(values)}
        expected = [value is None or newest[value] == row for row, value in enumerate(values)]
        assert last_of_each(pa.chunked_array([pa.array(piece, type_) for piece in pieces])).tolist() == expected
