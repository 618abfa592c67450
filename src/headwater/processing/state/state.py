"""The state of an operator in one partition: tables of rows that live from batch to batch, each batch a version of its own.

A task loads the version of the batch before, changes it and saves its own. Spark may run a batch several times: each time it begins with
the same version and writes the same one. When batch N runs, N-1 is committed, so what only versions before N-1 need is removed.

What is loaded must be what was saved last: by this operator, with these settings and columns (the fingerprint), by this query, in the
version before. Anything else is refused with what to do about it; nothing is guessed. The number of partitions may be another one: then
each new partition writes the version before for itself, with its rows out of all old ones, and goes on from that; the old ones stay until
two batches more have been saved. A kill on the way leaves what there was.

Nothing is in memory as a whole: rows are looked for where they may be, and runs are merged part by part (see `sorted_runs`).

Thread-safety: none; a state belongs to one task. Only what `begin_save` gives may be called by another thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from headwater.model.errors import Conflict, Damaged, InvalidInput
from headwater.model.url import inside, without_password
from headwater.processing.state import sorted_runs
from headwater.processing.state.files import REBUILD, RunAt, StateFolder, Version
from headwater.processing.state.sorted_runs import AT, GONE, H1, H2, MIN_TIME, Keys, Kind, SortedRun

OWNER = "_owner"
"""In a table whose key is finer than the operator's: the first hash of the operator's key, by which a row belongs to a partition."""

KEY_FIELDS = [pa.field(H1, pa.int64()), pa.field(H2, pa.int64())]

FOLDERS_KEPT_MAX = 1024
"""The URLs of the folders of this many partitions are kept in a process."""

By = Literal["hash", "topic"]
"""Which keys a state partition has: by their first hash, or those of a partition of the topic that is read (see `source_operator`)."""

Keep = Callable[[pa.Table], Any]
"""Which rows may still be needed; asked when runs are merged."""

Fold = Callable[[pa.Table], pa.Table]
"""Fewer rows that mean the same; asked when runs are merged. It is given all rows of a time, or of a key, at once."""


class TableSpec(msgspec.Struct, frozen=True, dict=True):
    """A table of an operator's state: what its rows mean (see `sorted_runs`), and their columns beside the key's hashes.

    With `is_copied` every partition has all rows, whatever their key.
    """

    kind: Kind
    fields: Sequence[pa.Field]
    is_copied: bool = False

    @cached_property
    def schema(self) -> pa.Schema:
        """All columns."""
        more = {"keyed": [pa.field(GONE, pa.bool_())], "timed": [pa.field(AT, pa.int64())], "gathered": []}[self.kind]
        return pa.schema([*KEY_FIELDS, *more, *self.fields])

    @cached_property
    def empty(self) -> pa.Table:
        """No rows, with all columns."""
        return self.schema.empty_table()


class StateTable:
    """One table: what earlier versions hold, and what this batch adds."""

    def __init__(self, spec: TableSpec, held: Sequence[tuple[RunAt, SortedRun]] = (), *, floor: int = MIN_TIME) -> None:
        self.spec = spec
        self.floor = floor
        self.keeps: Keep | None = None
        self.folds: Fold | None = None
        self._held = [(at, run) for at, run in held if spec.kind != "timed" or _reaches(run, floor)]
        self._fresh: list[SortedRun] = []

    def __len__(self) -> int:
        """How many rows there are; some may have been replaced by others."""
        return sum(run.num_rows for run in self._runs())

    def find(self, keys: Keys) -> sorted_runs.Found:
        """The rows of keys, and for each the number of its key; `KeyTooLarge` where a batch cannot hold them."""
        return sorted_runs.find(self._runs(), self.spec.kind, keys) or (self.empty(), np.zeros(0, np.int64))

    def put(self, rows: pa.Table) -> None:
        """Adds rows. In a keyed table they replace what there was of their keys."""
        if not rows.num_rows:
            return
        if self.spec.kind == "keyed" and GONE not in rows.column_names:
            rows = rows.append_column(GONE, pa.repeat(pa.scalar(False), rows.num_rows))
        schema = self.spec.schema
        if not rows.schema.equals(schema, check_metadata=True):
            rows = rows.select(schema.names).cast(schema)
        self._fresh.append(SortedRun.of(rows, self.spec.kind))

    def remove(self, keys: Keys) -> None:
        """Forgets keys of a keyed table."""
        if not len(keys):
            return
        columns: dict[str, Any] = {
            H1: pa.array(keys.h1),
            H2: pa.array(keys.h2),
            GONE: pa.repeat(pa.scalar(True), len(keys)),
        }
        nulls = {field.name: pa.nulls(len(keys), field.type) for field in self.spec.fields}
        self.put(pa.table(columns | nulls))

    def take(self, until: int) -> pa.Table:
        """The rows of a timed table up to a time, in its order; they are no longer in it."""
        found = self.between(self.floor, until)
        self.drop(until)
        return found

    def drop(self, until: int) -> None:
        """Forgets the rows of a timed table up to a time."""
        self.floor = max(self.floor, until)

    def between(self, after: int, until: int) -> pa.Table:
        """The rows of a timed table later than `after`, up to `until`."""
        found = sorted_runs.between(self._runs(), max(after, self.floor), until)
        return self.empty() if found is None else found

    def rows(self) -> pa.Table:
        """Everything that is in it, in memory."""
        return pa.concat_tables([self.empty(), *self.pieces()])

    def pieces(self) -> Iterator[pa.Table]:
        """Everything that is in it, in its order, piece by piece."""
        held = self._runs()
        if self.spec.kind == "timed":
            held = [run.above(self.floor) for run in held]
        return sorted_runs.merged(held, self.spec.kind, is_oldest=True)

    def empty(self) -> pa.Table:
        """No rows, with the right columns."""
        return self.spec.empty

    def next_runs(self) -> tuple[list[RunAt], Iterable[pa.Table]]:
        """The runs that the version which comes now has from earlier ones, and the rows of its own."""
        held, fresh, kind = self._held, self._fresh, self.spec.kind
        if kind == "timed":
            held = [(at, run) for at, run in held if _reaches(run, self.floor)]
            fresh = [run.above(self.floor) for run in fresh if _reaches(run, self.floor)]
        if not fresh:
            return [at for at, _ in held], ()
        if len(fresh) > 1 or not held:
            own = pa.concat_tables([self.empty(), *sorted_runs.merged(fresh, kind, is_oldest=not held)])
            fresh = [SortedRun.of(own, kind)]
        count = sorted_runs.tidied([*(run.num_rows for _, run in held), fresh[0].num_rows]) - 1
        if count <= 0:
            return [at for at, _ in held], [part.table() for part in fresh[0].parts]
        older, held = [run for _, run in held[-count:]], held[:-count]
        if kind == "timed":
            older = [run.above(self.floor) for run in older]
        merged = sorted_runs.merged([*older, *fresh], kind, is_oldest=not held, keeps=self.keeps)
        return [at for at, _ in held], merged if self.folds is None else map(self.folds, merged)

    def _runs(self) -> list[SortedRun]:
        return [run for _, run in self._held] + self._fresh


def _reaches(run: SortedRun, floor: int) -> bool:
    return any(part.last > floor for part in run.parts)


class State:
    """All tables of an operator in one partition."""

    def __init__(self, tables: Mapping[str, StateTable]) -> None:
        self.tables = tables

    def __getitem__(self, name: str) -> StateTable:
        return self.tables[name]


class StateStore:
    """Loads and saves the versions of one operator's state in one partition."""

    def __init__(
        self, url: str, *, uid: str, query: str, fingerprint: str, partition: int, partitions: int,
        specs: Mapping[str, TableSpec], by: By = "hash",
    ) -> None:  # fmt: skip
        self._layout = StateLayout(partitions, by)
        self._root, folder = _folders(url, uid, self._layout, partition)
        self._folder = StateFolder(folder)
        kinds = {name: spec.kind for name, spec in specs.items()}
        self._blank = Version(uid, fingerprint, query, partition, partitions, -1, {}, kinds)
        self._specs = specs

    def load(self, before: int) -> State:
        """The state of version `before`; nothing at all where a query begins (-1).

        Where there are partitions of another number, the version is written anew for this one first, out of all of them.
        """
        if before < 0:
            return State({name: StateTable(spec) for name, spec in self._specs.items()})
        if before not in self._folder.epochs():
            self._rescale(before)
        version = self._checked(self._folder.version(before), self._folder)
        return State({name: _table(self._folder, version, name, spec) for name, spec in self._specs.items()})

    def save(self, state: State, epoch: int, *, watermark: int | None = None) -> None:
        """Saves the version of a batch, and removes what no batch will ask for again."""
        self.begin_save(state, epoch, watermark=watermark)()

    def begin_save(self, state: State, epoch: int, *, watermark: int | None = None) -> Callable[[], None]:
        """The same up to where the disk is to be waited for; what it gives does the rest, in any thread."""
        tables, fresh = {}, {}
        for name, table in state.tables.items():
            tables[name], fresh[name] = table.next_runs()
        floors = {name: table.floor for name, table in state.tables.items() if table.floor > MIN_TIME}
        version = msgspec.structs.replace(self._blank, epoch=epoch, tables=tables, floors=floors, watermark=watermark)
        keep = self._folder.draft(version, fresh)

        def finish() -> None:
            keep()
            self._collect(epoch)

        return finish

    def _collect(self, epoch: int) -> None:
        self._folder.collect(epoch)
        if self._blank.partition == 0:
            for folders in layouts(self._root, but=self._layout).values():
                if all(old <= epoch - 2 for folder in folders for old in folder.epochs()):
                    for folder in folders:
                        folder.remove_all()

    def _checked(self, version: Version, folder: StateFolder) -> Version:
        ours = self._blank
        if version.fingerprint != ours.fingerprint:
            raise Conflict(
                f"The state in {folder.shown} was made by operator {version.uid!r} with other settings or columns: it has rows in it as "
                "they were.",
                advice="Undo the change, or where the topic has got a column, select() those of before in front of the operator; or "
                f"give the changed operator another uid=. {REBUILD}",
            )
        if version.query != ours.query:
            raise Conflict(
                f"The state in {folder.shown} belongs to another query ({version.query}).",
                advice=f"Each query needs a state of its own: give it another state= or uid=, or restore its checkpoint. {REBUILD}",
            )
        return version

    def _rescale(self, before: int) -> None:
        """Writes this partition's version out of the partitions of another number of them, which stay until it is safe."""
        complete = (
            folders
            for layout, folders in layouts(self._root, but=self._layout).items()
            if layout.by == self._layout.by == "hash"
            and len(folders) == layout.partitions
            and all(before in folder.epochs() for folder in folders)
        )
        folders = next(complete, None)
        if folders is None:
            raise Damaged(
                f"Version {before} of the state of operator {self._blank.uid!r} is missing in {without_password(self._root)}.",
                advice=REBUILD,
            )
        versions = [self._checked(folder.version(before), folder) for folder in folders]
        write_whole(
            self._folder, msgspec.structs.replace(self._blank, epoch=before), list(zip(folders, versions, strict=True)),
            keeps=self._mine, copied={name for name, spec in self._specs.items() if spec.is_copied},
        )  # fmt: skip

    def _mine(self, rows: pa.Table) -> Any:
        ours, owner = self._blank, OWNER if OWNER in rows.column_names else H1
        return pa.array(partition_of(sorted_runs.column(rows, owner), ours.partitions) == ours.partition)


def _table(folder: StateFolder, version: Version, name: str, spec: TableSpec) -> StateTable:
    held = [(at, folder.run(version, name, at)) for at in version.tables.get(name, ())]
    return StateTable(spec, held, floor=version.floors.get(name, MIN_TIME))


def held_runs(folder: StateFolder, version: Version, name: str) -> list[SortedRun]:
    """The runs of a table of a version, without what was taken of them."""
    found = [folder.run(version, name, at) for at in version.tables.get(name, ())]
    is_timed, floor = version.kinds[name] == "timed", version.floors.get(name, MIN_TIME)
    return [run.above(floor) for run in found] if is_timed else found


def write_whole(
    folder: StateFolder, version: Version, parts: Sequence[tuple[StateFolder, Version]], *, keeps: Keep | None = None,
    copied: Collection[str] = (),
) -> None:  # fmt: skip
    """Writes a version that needs no other, of the rows that some partitions have together; each key is in one of them.

    Tables that are `copied` are the same in all of them.
    """
    first = parts[0][1]
    tables = {}
    for name, kind in first.kinds.items():
        held = [run for there, each in (parts[:1] if name in copied else parts) for run in held_runs(there, each, name)]
        tables[name] = sorted_runs.merged(held, kind, is_oldest=True, keeps=None if name in copied else keeps)
    floors = {name: min(each.floors.get(name, MIN_TIME) for _, each in parts) for name in first.floors}
    known = [each.watermark for _, each in parts if each.watermark is not None]
    version = msgspec.structs.replace(
        version,
        tables={name: [] for name in tables},
        kinds=first.kinds,
        floors=floors,
        watermark=min(known, default=None),
    )
    folder.write(version, tables)


class StateLayout(NamedTuple):
    """How a state is divided: into how many partitions, and by what."""

    partitions: int
    by: By = "hash"

    def folder(self, partition: int) -> str:
        """The name of a partition's folder."""
        return f"{partition:05d}-of-{self.partitions:05d}{_BY_TOPIC if self.by == 'topic' else ''}"


_BY_TOPIC = ".topic"


@lru_cache(maxsize=FOLDERS_KEPT_MAX)
def _folders(url: str, uid: str, layout: StateLayout, partition: int) -> tuple[str, str]:
    """The folder of an operator's state, and in it that of one partition: the same ones in every batch."""
    root = inside(url, uid)
    return root, inside(root, layout.folder(partition))


def layouts(root: str, *, but: StateLayout | None = None) -> dict[StateLayout, list[StateFolder]]:
    """The folders of an operator's partitions, by how many there are to be, and of what; `but` leaves some out."""
    found: dict[StateLayout, list[StateFolder]] = {}
    for name in StateFolder(root).names():
        number, _, count = name.removesuffix(_BY_TOPIC).partition("-of-")
        if number.isdigit() and count.isdigit():
            layout = StateLayout(int(count), "topic" if name.endswith(_BY_TOPIC) else "hash")
            if layout != but:
                found.setdefault(layout, []).append(StateFolder(inside(root, name)))
    return found


def partition_of(h1: Any, partitions: int) -> Any:
    """Which state partition keys belong to, by their first hash."""
    return np.mod(h1, partitions)


def fingerprint_of(*parts: object) -> str:
    """A short text that is another one when any part is."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def check_uid(uid: str) -> str:
    """The name of an operator's state is the name of a folder."""
    if not uid or len(uid) > 200 or not all(sign.isalnum() or sign in "._-" for sign in uid) or uid[0] in ".-":
        raise InvalidInput(
            f"uid={uid!r:.80} is not a valid name for a state.", advice="Use letters, digits, dots and dashes."
        )
    return uid
