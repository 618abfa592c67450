"""An operator's state: tables of every kind against plain Python, versions, repeated batches, another number of partitions, damage."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as arrow_fs
import pytest

from headwater.model.errors import Conflict, Damaged, FormatTooNew, InvalidInput, KeyTooLarge, StorageError, Unsupported
from headwater.processing.state import files as state_files
from headwater.processing.state import sorted_runs
from headwater.processing.state.sorted_runs import AT, H1, H2, Found, Keys, column, tidied
from headwater.processing.state.state import State, StateStore, TableSpec, check_uid, fingerprint_of

VALUE = [pa.field("v", pa.int64())]
SPECS = {"last": TableSpec("keyed", VALUE), "all": TableSpec("gathered", VALUE), "due": TableSpec("timed", VALUE)}


def store_in(
    folder: Path | str, *, partition: int = 0, partitions: int = 1, query: str = "q", fingerprint: str = "f"
) -> StateStore:
    return StateStore(
        str(folder), uid="op", query=query, fingerprint=fingerprint, partition=partition, partitions=partitions, specs=SPECS
    )  # fmt: skip


def hashes(keys: list[int]) -> dict[str, pa.Array]:
    """Two hashes of small numbers; some keys share the first."""
    return {
        H1: pa.array([(key // 2) * 7919 % 1009 - 500 for key in keys], pa.int64()),
        H2: pa.array([key * 31 % 64 for key in keys], pa.int64()),
    }


class Model:
    """The same in plain Python."""

    def __init__(self) -> None:
        self.last: dict[int, list[int]] = {}
        self.all: dict[int, list[int]] = defaultdict(list)
        self.due: list[tuple[int, int, int]] = []


def change(random: Random, state: State, model: Model, *, until: int) -> None:
    """What a batch does, to both."""
    keys = [random.randrange(40) for _ in range(random.randint(0, 12))]
    sets = {key: [random.randrange(1000) for _ in range(random.randint(1, 3))] for key in keys}
    flat = [(key, value) for key, values in sets.items() for value in values]
    rows = pa.table({**hashes([key for key, _ in flat]), "v": pa.array([value for _, value in flat], pa.int64())})
    state["last"].put(rows)
    model.last |= sets
    gone = [key for key in list(model.last) if random.random() < 0.1]
    state["last"].remove(Keys.of(pa.table(hashes(gone))))
    for key in gone:
        del model.last[key]
    state["all"].put(rows)
    for key, value in flat:
        model.all[key].append(value)
    times = [until + random.randint(1, 30) for _ in flat]
    state["due"].put(rows.append_column(AT, pa.array(times, pa.int64())))
    model.due += [(at, key, value) for at, (key, value) in zip(times, flat, strict=True)]


def check_same(state: State, model: Model, random: Random) -> None:
    asked = sorted(random.sample(range(40), 15))
    keys = Keys.of(pa.table(hashes(asked)))
    place = {tuple(half[0].as_py() for half in hashes([key]).values()): key for key in range(40)}
    for name, expected in (("last", model.last), ("all", model.all)):
        found: dict[int, list[int]] = defaultdict(list)
        rows, numbers = state[name].find(keys)
        for row, number in zip(rows.to_pylist(), numbers.tolist(), strict=True):
            assert (row[H1], row[H2]) == (keys.h1[number], keys.h2[number])
            found[place[row[H1], row[H2]]].append(row["v"])
        assert found == {key: expected[key] for key in asked if expected.get(key)}, name
    everything = state["last"].rows().to_pylist()
    assert sorted(row["v"] for row in everything) == sorted(v for values in model.last.values() for v in values)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_tables_equal_plain_python_through_versions_and_repeated_batches(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch is run once or twice, from the same version; partitions change in number now and then, and parts are small.

    Files are mapped or read.
    """
    if seed % 3:
        monkeypatch.setattr(sorted_runs, "PART_BYTES", 300)
        monkeypatch.setattr(sorted_runs, "SMALL_ROWS", 10)
    if seed % 2:
        monkeypatch.setattr(state_files, "_MAPPED_BYTES_MIN", 0)
    random, model, until, partitions = Random(seed), Model(), 0, 1
    for epoch in range(40):
        after = until + random.randint(0, 20)
        if epoch and random.random() < 0.2:
            partitions = random.randint(1, 4)
        for _ in range(random.choice([1, 1, 2])):
            again = Random(seed * 1000 + epoch)
            stores = [store_in(tmp_path, partition=p, partitions=partitions) for p in range(partitions)]
            states = [store.load(epoch - 1) for store in stores]
            fresh = copy_of(model)
            change(again, Routed(states), fresh, until=until)
            taken = [row for state in states for row in state["due"].take(after).to_pylist()]
            for store, state in zip(stores, states, strict=True):
                store.save(state, epoch)
        expected = sorted((at, value) for at, _, value in fresh.due if at <= after)
        assert sorted((row[AT], row["v"]) for row in taken) == expected
        fresh.due = [row for row in fresh.due if row[0] > after]
        model, until = fresh, after
        loaded = Routed([store.load(epoch) for store in stores])
        check_same(loaded, model, again)
    files = [path for path in tmp_path.rglob("*.state") if f"-of-{partitions:05d}" in str(path)]
    assert len(files) <= partitions * 12


def copy_of(model: Model) -> Model:
    copy = Model()
    copy.last = dict(model.last)
    copy.all = defaultdict(list, {key: list(values) for key, values in model.all.items()})
    copy.due = list(model.due)
    return copy


class Routed:
    """Some partitions as one: rows go where their key belongs."""

    def __init__(self, states: list[State]) -> None:
        self.states = states

    def __getitem__(self, name: str) -> RoutedTable:
        return RoutedTable([state[name] for state in self.states])


class RoutedTable:
    def __init__(self, tables: list) -> None:
        self.tables = tables

    def put(self, rows: pa.Table) -> None:
        for number, table in enumerate(self.tables):
            table.put(rows.filter(pa.array(column(rows, H1) % len(self.tables) == number)))

    def remove(self, keys: Keys) -> None:
        for number, table in enumerate(self.tables):
            table.remove(keys.only(keys.h1 % len(self.tables) == number))

    def find(self, keys: Keys) -> Found:
        found = [table.find(keys) for table in self.tables]
        return pa.concat_tables(rows for rows, _ in found), np.concatenate([numbers for _, numbers in found])

    def rows(self) -> pa.Table:
        return pa.concat_tables(table.rows() for table in self.tables)


def filled(folder: Path | str, epochs: int = 3, **more: object) -> None:
    for epoch in range(epochs):
        store = store_in(folder, **more)
        state = store.load(epoch - 1)
        keys = [epoch] if epoch else list(range(100, 140))
        state["last"].put(pa.table({**hashes(keys), "v": pa.array(keys, pa.int64())}))
        store.save(state, epoch)


def test_runs_are_merged_by_size() -> None:
    """A small change never rewrites what is large, and runs stay few."""
    assert [tidied(sizes) for sizes in ([], [5], [100, 1], [100, 26], [100, 4, 1], [100, 3, 1], [12, 3, 1])] == [
        0, 0, 0, 2, 0, 2, 3,
    ]  # fmt: skip


def test_what_only_old_versions_need_is_removed(tmp_path: Path) -> None:
    filled(tmp_path, 30)
    assert len(list(tmp_path.rglob("*.state"))) <= 6
    assert store_in(tmp_path).load(28)["last"].rows().num_rows > 60, "the batch before may be run again"


def test_a_version_that_is_begun_is_none_until_the_disk_has_it(tmp_path: Path) -> None:
    """Nothing is there, and nothing is removed, before the rest is done; a batch that is run again begins anew."""
    filled(tmp_path, 10)
    before = {path.name for path in tmp_path.rglob("*.state")}
    store = store_in(tmp_path)
    for _ in range(2):
        finish = store.begin_save(store.load(9), 10)
        assert {path.name for path in tmp_path.rglob("*.state")} == before
    finish()
    assert store.load(10)["last"].rows().num_rows == store.load(9)["last"].rows().num_rows
    assert len({path.name for path in tmp_path.rglob("*.state")} - before) == 1


def test_small_files_are_not_mapped(tmp_path: Path) -> None:
    """One that is mapped stays on the disk after it was removed, until a batch lets go of it and waits for that."""
    filled(tmp_path, 30)
    assert store_in(tmp_path).load(29)["last"].rows().num_rows > 60
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("other", "said"), [({"query": "another"}, "belongs to another query"), ({"fingerprint": "x"}, "other settings")]
)
def test_state_of_others_is_refused(tmp_path: Path, other: dict[str, str], said: str) -> None:
    filled(tmp_path)
    with pytest.raises(Conflict, match=said):
        store_in(tmp_path, **other).load(2)


def test_a_missing_version_is_told(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(Damaged, match="Version 7 of the state of operator 'op' is missing"):
        store_in(tmp_path).load(7)
    newest = max(tmp_path.rglob("*.state"))
    for path in tmp_path.rglob("*.state"):
        if path != newest:
            path.unlink()
    with pytest.raises(Damaged, match="is missing"):
        store_in(tmp_path).load(2)["last"].rows()


@pytest.mark.parametrize("seed", range(8))
def test_damage_is_found(tmp_path: Path, seed: int) -> None:
    """A flipped bit anywhere, or a file that was cut."""
    random = Random(seed)
    filled(tmp_path, 1)
    [path] = tmp_path.rglob("*.state")
    content = bytearray(path.read_bytes())
    if seed % 4 == 0:
        content = content[: random.randrange(len(content))]
    else:
        padding = set(range(8, 64))
        place = random.choice([place for place in range(8, len(content)) if place not in padding])
        content[place] ^= 1 << random.randrange(8)
    path.write_bytes(content)
    with pytest.raises(Damaged, match=r"is damaged.*--rebuild-state"):
        read_all(store_in(tmp_path).load(0))


def read_all(state: State) -> None:
    for table in state.tables.values():
        table.rows()


def test_hostile_names_and_places(tmp_path: Path) -> None:
    for uid in ("", "../x", "a/b", ".x", "x" * 300):
        with pytest.raises(InvalidInput):
            check_uid(uid)
    assert check_uid("app.stage-1") == "app.stage-1"
    with pytest.raises(Unsupported, match="No file system"):
        StateStore("nowhere://x", uid="op", query="q", fingerprint="f", partition=0, partitions=1, specs=SPECS)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        filled(tmp_path / "file")


def test_a_url_of_pyarrow_serves_as_well(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    filled(Path(url.replace("file://", "")), 2)
    store = StateStore(url, uid="op", query="q", fingerprint="f", partition=0, partitions=1, specs=SPECS)
    assert store.load(1)["last"].rows().num_rows == 41


def test_file_systems_that_cannot_be_mapped_serve_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are read by ranges then, drafts are moved; damage is found, another number of partitions goes on."""

    def elsewhere(url: str) -> tuple[Any, str]:
        return arrow_fs.SubTreeFileSystem(str(tmp_path), arrow_fs.LocalFileSystem()), url.removeprefix("far://")

    monkeypatch.setattr(state_files, "_file_system", elsewhere)
    monkeypatch.setattr(sorted_runs, "PART_BYTES", 300)
    filled("far://there", 8)
    loaded = [store_in("far://there", partition=number, partitions=2).load(7) for number in range(2)]
    assert sum(state["last"].rows().num_rows for state in loaded) == 47
    for epoch in (8, 9):
        for number in range(2):
            store = store_in("far://there", partition=number, partitions=2)
            store.save(store.load(epoch - 1), epoch)
    assert {path.name for path in tmp_path.glob("there/op/*")} == {"00000-of-00002", "00001-of-00002"}
    assert not list(tmp_path.rglob("*.new"))
    for path in tmp_path.rglob("*.state"):
        path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(Damaged):
        store_in("far://there", partition=0, partitions=2).load(9)


def test_a_newer_format_is_told(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    [path] = tmp_path.rglob("*.state")
    path.write_bytes(path.read_bytes().replace(state_files.MAGIC, b"HWSTATE9"))
    with pytest.raises(FormatTooNew, match="newer Headwater"):
        store_in(tmp_path).load(0)


def test_what_somebody_else_left_unfinished_is_swept(tmp_path: Path) -> None:
    """Of earlier versions: one of this version may still be written by a task that Spark runs twice."""
    filled(tmp_path, 2)
    [folder] = tmp_path.glob("op/*")
    (folder / "000000000001.state.1-a.new").write_bytes(b"x")
    (folder / "000000000002.state.1-b.new").write_bytes(b"x")
    (folder / "000000000003.state.1-c.new").write_bytes(b"x")
    store = store_in(tmp_path)
    store.save(store.load(1), 2)
    assert sorted(path.name[:12] for path in folder.glob("*.new")) == ["000000000002", "000000000003"]


@pytest.mark.parametrize("keys", [1, 300, 70_000])
def test_rows_are_numbered_and_ordered_by_their_keys(keys: int) -> None:
    """Few keys and more than 16 bits count; also where two share their first hash; rows of a key stay as they were."""
    random = np.random.default_rng(keys)
    number = random.integers(0, keys, 100_000)
    h1, h2 = number // 2 * 7919 - 10**12, number  # each first hash is that of two keys
    found = Keys.of(pa.table({H1: h1, H2: h2}))
    distinct, expected = np.unique(number, return_inverse=True)
    assert (found.row == expected).all() and (found.h2 == distinct).all() and (h2[found.one] == distinct).all()
    order = sorted_runs.order_by(found.row)
    assert (order == np.argsort(number, kind="stable")).all()


@pytest.mark.slow
def test_a_state_larger_than_memory_is_found_in_and_merged(tmp_path: Path) -> None:
    """What is allocated goes with the parts and the batch, not with the rows that are kept."""
    script = f"from tests.processing.state import test_state; print(test_state.most_allocated({str(tmp_path)!r}))"
    root = Path(__file__).parents[3]
    paths = os.pathsep.join(map(str, (root / "src", root)))
    told = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
        capture_output=True,
        text=True,
    )
    kept = sum(path.stat().st_size for path in tmp_path.rglob("*.state"))
    assert kept > 30 << 20
    assert int(told.stdout) < kept / 4, f"{told.stdout} of {kept}"


def most_allocated(folder: str) -> int:
    """How many bytes Arrow and NumPy hold at most, while many small batches change a large state."""
    sorted_runs.PART_BYTES, sorted_runs.SMALL_ROWS = 1 << 17, 5_000  # type: ignore[misc]
    specs, random = {"last": TableSpec("keyed", [pa.field("v", pa.string())])}, np.random.default_rng(1)
    store = StateStore(folder, uid="op", query="q", fingerprint="f", partition=0, partitions=1, specs=specs)
    for epoch in range(70):
        if epoch == 20:
            tracemalloc.start()
        fresh = np.arange(epoch * 20_000, epoch * 20_000 + 20_000)
        keys = fresh if epoch < 20 else random.choice(400_000, 5_000, replace=False)
        state = store.load(epoch - 1)
        rows = pa.table({H1: keys * 7919, H2: keys, "v": pa.repeat("x" * 50, len(keys))})
        assert state["last"].find(Keys.of(rows))[0].num_rows == (0 if epoch < 20 else len(keys))
        state["last"].put(rows)
        store.save(state, epoch)
    return pa.default_memory_pool().max_memory() + tracemalloc.get_traced_memory()[1]


def test_a_key_that_explodes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a key are in one part, however many; what no task could hold is refused with what to do."""
    monkeypatch.setattr(sorted_runs, "PART_BYTES", 1 << 16)
    store = store_in(tmp_path)
    state = store.load(-1)
    one = np.full(1_000_000, 7)
    state["all"].put(pa.table({H1: one, H2: one, "v": np.arange(1_000_000)}))
    state["all"].put(pa.table({**hashes(list(range(50))), "v": pa.array(range(50))}))
    store.save(state, 0)
    keys = Keys.of(pa.table({H1: one[:1], H2: one[:1]}))
    assert store_in(tmp_path).load(0)["all"].find(keys)[0].num_rows == 1_000_000
    monkeypatch.setattr(sorted_runs, "FOUND_BYTES_MAX", 10 << 20)
    with pytest.raises(KeyTooLarge, match=r"one key alone has 1,000,000 rows.*finer key or a shorter time"):
        store_in(tmp_path).load(0)["all"].find(keys)
    sorted_runs.check_fits([pa.table({"v": np.arange(1_000_000)})])
    with pytest.raises(KeyTooLarge, match=r"brings 0.0 GB of rows.*events_max="):
        sorted_runs.check_fits([pa.table({"v": np.arange(1_000_000)})] * 2)


def test_fingerprints_differ() -> None:
    assert fingerprint_of("dedupe", 1) != fingerprint_of("dedupe", 2)
