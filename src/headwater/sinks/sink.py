"""A sink: a system outside that holds the newest row of each key, kept in step by one stage, picked by the scheme of its URL.

| URL | what a row becomes |
|---|---|
| `sqlite:///shop.db?table=users`, `duckdb:///…`, `postgresql://…/shop?table=users` | a row |
| `redis://host/0?prefix=users:&as=hash` (or `json`, `set`) | a hash, a string with JSON, a member of a set |
| `tantivy:///./index`, `opensearch://host:9200/users` | a document |
| `delta:///./warehouse/users?partition_by=country` | a row of a Delta table |

A batch is applied by `write_batch`: `begin` (fence and marker are looked at, in the target), `upsert` and `delete` for each piece of it,
`commit` (the marker goes in together with the rows). Each key is in a batch once, as its newest event has it; a deleted one
is removed. Rows that the target will never take are dead letters: they are told to the log *before* the commit, by
the batch's own marker, so a crash in between tells them once.

The work is done by the driver, in one transaction of the target, not by Spark's tasks: a reader sees whole batches in
order (so what a source changed in one transaction appears in one moment), embedded targets take one writer only, and one ledger entry
then decides. What travels is Arrow; tasks have picked each key's newest row before, in parallel (see `processing.sink.batch_tables`).
Redis and OpenSearch have no transactions of that size: they are written in pieces, and the marker comes with the last.

A target that is down raises `Unreachable`, which the application's runner retries with back-off; one that is slow is waited for, while the
log keeps what comes. Thread-safety: one thread at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import islice
from typing import Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log.arrow.json_types import row_texts
from headwater.model.errors import InvalidInput, Unsupported
from headwater.model.marker import Marker
from headwater.model.points import PROCESS
from headwater.model.schema import DELETED
from headwater.sinks.ledger import LedgerEntry
from headwater.sinks.newest_rows import PLACE, Pieces

SCHEMES = {
    "sqlite": ("headwater.sinks.sqlite", "SqliteSink"),
    "duckdb": ("headwater.sinks.duckdb", "DuckdbSink"),
    "postgresql": ("headwater.sinks.postgres", "PostgresSink"),
    "postgres": ("headwater.sinks.postgres", "PostgresSink"),
    "redis": ("headwater.sinks.redis", "RedisSink"),
    "rediss": ("headwater.sinks.redis", "RedisSink"),
    "tantivy": ("headwater.sinks.search", "SearchSink"),
    "delta": ("headwater.sinks.delta", "DeltaSink"),
    "opensearch": ("headwater.sinks.opensearch", "OpenSearchSink"),
    "opensearch+https": ("headwater.sinks.opensearch", "OpenSearchSink"),
}
REFUSED_MAX = 1_000
"""So many rows of one batch become dead letters; where more are refused, it is the target that is to be corrected."""


class Shape(msgspec.Struct, frozen=True):
    """What is written: columns, the key among them, and the name of a table that the URL does not name."""

    name: str
    schema: pa.Schema
    key: tuple[str, ...]


class Refusal(msgspec.Struct, frozen=True):
    """A row that the target will never take: its index in the piece, and why."""

    row: int
    reason: str


class Sink(Protocol):
    """One target, fed by one stage. `url` has no password in it."""

    url: str
    stage: str

    def open(self, shape: Shape) -> None:
        """Makes what is missing in the target, and becomes the stage's writer: whoever was it before is refused from now on."""

    def attach(self, shape: Shape) -> None:
        """Makes ready to read the ledger and to repair, and takes nothing from the writer."""

    def entry(self) -> LedgerEntry:
        """What the target knows of the stage."""

    @property
    def last(self) -> Marker | None:
        """The marker of the batch that was applied last."""

    def begin(self, marker: Marker) -> bool:
        """Begins to apply a batch; False where it was applied before, and nothing is begun."""

    def begin_repair(self, marker: Marker | None) -> None:
        """Begins to apply rows as of the last marker, which must be this one; `Conflict`."""

    def upsert(self, rows: pa.Table) -> Sequence[Refusal]:
        """Puts rows in place of what their keys had; those that were refused are left out."""

    def delete(self, keys: pa.Table) -> None:
        """Removes the rows of keys."""

    def commit(self, marker: Marker | None) -> None:
        """Makes everything count, with the marker; without one (a repair) the ledger stays."""

    def rollback(self) -> None:
        """Forgets what was begun; does nothing where nothing was."""

    def accept_new_checkpoint(self) -> Marker | None:
        """Forgets the last marker, so that the next batch may be the first of a query; returns it."""

    def close(self) -> None:
        """Frees connections."""


class ShapedSink(ABC):
    """What the sinks have in common: a stage, the URL of its target, and the shape of what is written, known once it is attached."""

    def __init__(self, url: str, *, stage: str) -> None:
        self.url = url
        self.stage = stage
        self._shape: Shape | None = None

    @property
    def shape(self) -> Shape:
        """What is written."""
        assert self._shape is not None, "the sink was not opened"
        return self._shape

    def attach(self, shape: Shape) -> None:
        """Makes ready to read the ledger and to repair, and takes nothing from the writer."""
        self._shape = shape

    @abstractmethod
    def entry(self) -> LedgerEntry:
        """What the target knows of the stage."""

    @property
    def last(self) -> Marker | None:
        """The marker of the batch that was applied last."""
        return self.entry().last


class Dead(msgspec.Struct, frozen=True):
    """A row that was refused, as its dead letter tells it."""

    partition: int
    offset: int
    event: str
    error: str


class Written(msgspec.Struct, frozen=True):
    """What became of a batch."""

    written: bool
    upserts: int = 0
    deletes: int = 0
    dead: int = 0


Tell = Callable[[Sequence[Dead]], None]


def is_target(to: str) -> bool:
    """Whether this is the URL of a target, not a topic's name or a folder."""
    scheme, found, _ = to.partition("://")
    return bool(found) and scheme != "file"


def column_names(text: str) -> tuple[str, ...]:
    """The columns that an option of a URL names, with commas between."""
    return tuple(name for name in text.split(",") if name)


def open_sink(to: str, *, stage: str) -> Sink:
    """The sink of a URL; nothing is connected yet."""
    scheme = to.partition("://")[0]
    if scheme not in SCHEMES:
        raise Unsupported(
            f"Headwater has no sink for {scheme}://.",
            advice=f"Use one of {', '.join(f'{known}://' for known in SCHEMES)}, a folder, or the name of a topic.",
        )
    module, name = SCHEMES[scheme]
    sink: Sink = getattr(import_module(module), name)(to, stage=stage)
    return sink


def write_batch(
    sink: Sink,
    marker: Marker,
    pieces: Pieces,
    *,
    tell: Tell,
) -> Written:
    """Applies a batch once; `tell` writes dead letters, and is called before the batch counts."""
    if not sink.begin(marker):
        return Written(written=False)
    try:
        PROCESS.reach("sink: begun")
        upserts, deletes, dead = apply_pieces(sink, pieces)
        if dead:
            tell(dead)
            PROCESS.reach("sink: dead letters told")
        sink.commit(marker)
        PROCESS.reach("sink: committed")
    except BaseException:
        sink.rollback()
        raise
    return Written(written=True, upserts=upserts, deletes=deletes, dead=len(dead))


def apply_pieces(sink: Sink, pieces: Pieces) -> tuple[int, int, list[Dead]]:
    """Applies the rows of one table; how many were put and removed, and those that were refused."""
    keyless = islice(pieces.without_key(), REFUSED_MAX + 1)
    dead = [Dead(*_place(piece, row), _event(piece, row), "The row has no key.") for piece, row in keyless]
    check_refused(sink, dead)
    upserts = deletes = 0
    for piece in pieces:
        is_gone = piece.column(DELETED.name)
        gone = piece.filter(is_gone)
        rows = piece.filter(pc.invert(is_gone))
        if gone.num_rows:
            sink.delete(gone.select(list(pieces.key)))
            deletes += gone.num_rows
        if rows.num_rows:
            refused = sink.upsert(rows.drop_columns([*PLACE, DELETED.name]))
            dead += [Dead(*_place(rows, one.row), _event(rows, one.row), one.reason) for one in refused]
            upserts += rows.num_rows - len(refused)
        check_refused(sink, dead)
        PROCESS.reach("sink: piece applied")
    return upserts, deletes, dead


def check_refused(sink: Sink, dead: Sequence[Dead]) -> None:
    """Refuses to throw away more than a few rows; `InvalidInput`."""
    if len(dead) > REFUSED_MAX:
        raise InvalidInput(
            f"{sink.url} rejected more than {REFUSED_MAX:,} rows of one batch. The last error is: {dead[-1].error}",
            advice="The sink wrote nothing. Correct the target or the rows, and restart the stage.",
        )


def refused_rows(
    count: int, attempt: Callable[[int, int], str | None], *, found_max: int = REFUSED_MAX
) -> Iterable[Refusal]:
    """Applies rows by halves: `attempt(start, end)` applies a range and returns None, or undoes it and says why not."""
    waiting, found = [(0, count)], 0
    while waiting:
        start, end = waiting.pop()
        reason = attempt(start, end)
        if reason is None:
            continue
        if end - start > 1:
            middle = (start + end) // 2
            waiting += [(middle, end), (start, middle)]
            continue
        found += 1
        yield Refusal(start, reason)
        if found > found_max:
            return


def _place(piece: pa.Table, row: int) -> tuple[int, int]:
    partition, offset = PLACE
    return piece.column(partition)[row].as_py(), piece.column(offset)[row].as_py()


def _event(piece: pa.Table, row: int) -> str:
    one = piece.slice(row, 1).drop_columns([*PLACE, DELETED.name]).combine_chunks()
    return row_texts(one.to_batches()[0])[0].as_py()
