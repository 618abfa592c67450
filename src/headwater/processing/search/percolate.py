"""`hw.percolate`: each document with the saved searches that match it, as they were at the document's time.

Every partition of the state has all searches, and a share of the documents: changes of searches are sent to every partition, documents
by a hash of their columns. So a document is matched in one place, and searches cost their memory once for each Python process, which
keeps the index that it made (see `index`). With event time a document waits until the watermark has passed it: then no change of a search
that it should see is still to come. Without it, documents are matched with the searches of their own batch and of those before.

A search that says nothing is parked with its reason. It matches nothing until its next version, and the others go on.

State: `waiting`, documents that the watermark has not passed; `searches`, the versions of searches in the order in which they came, each
with its query as it was read; `parked`, the searches that are, with their reasons; `summary`, one row with what the stage's index is made
of, and how many searches there are, are parked, and are checked with every document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import MapType, StringType, TimestampType

from headwater.model.errors import InvalidInput
from headwater.model.schema import DELETED
from headwater.processing.expressions.expression import compile_condition
from headwater.processing.graph.table import Table
from headwater.processing.operators.copies import copied
from headwater.processing.operators.operator import MAX_TIME, Input, Time, in_log_order, operate
from headwater.processing.operators.row_order import in_fixed_order, time_column, times_of
from headwater.processing.search.analysis import Analyzer
from headwater.processing.search.documents import Documents
from headwater.processing.search.fields import SearchFields
from headwater.processing.search.grammar import parse_search
from headwater.processing.search.highlights import HIGHLIGHTS, Highlighter
from headwater.processing.search.index import GONE, QUERY, SINCE, IndexShelf, IndexStamp, SearchIndex
from headwater.processing.search.query import Where, decoded, encoded, required
from headwater.processing.spark.hashing import hashes_of
from headwater.processing.spark.types import to_arrow
from headwater.processing.state.sorted_runs import AT, H1, H2, MIN_TIME, Keys, column
from headwater.processing.state.state import State, TableSpec
from headwater.processing.time.event_time import MARK

Ties = Literal["table", "event"]
SEARCH, SAID, CONDITION = "search", "query", "where"
"""The columns of the table of searches: its key, the text in the query language, and an SQL condition, which it need not have."""

REASON, FOUND = "reason", "highlights"
PIECE_BYTES_MAX = 32 << 20
"""So much text is matched at once."""

STAMPS_KEPT = 64
READ_KEPT = 65_536
_WAITING, _SEARCHES, _PARKED, _SUMMARY = "waiting", "searches", "parked", "summary"
_SPREAD = "_spread"


def percolate(
    documents: DataFrame,
    searches: Table | DataFrame,
    text: str | Sequence[str],
    *,
    at: str | None = None,
    searches_at: str | None = None,
    ties: Ties = "table",
    language: str | None = None,
    places: Mapping[str, tuple[str, str]] | None = None,
    highlights: bool = False,
    uid: str | None = None,
) -> DataFrame:
    """A row for each document and each search that matches it: the document's columns, then the search's own.

    hw.percolate(ads, searches, text=["title", "body"], at="at")

    `searches` is a table of the application, or a DataFrame of its changes, with the columns `search` (the key), `query`, and perhaps
    `where`, an SQL condition over the document's columns. `text` names the columns whose words are searched, `language` their language,
    `places={"home": ("lat", "lon")}` coordinates. At equal times a change of a search comes first (`ties="table"`), or the document does
    (`ties="event"`). `highlights=True` adds a column with the places of what was found: field, start, end.
    """
    if ties not in ("table", "event"):
        raise InvalidInput(f"ties={ties!r} is not a rule for equal times.", advice='Use "table" or "event".')
    changes = searches.versions if isinstance(searches, Table) else searches
    _check_searches(changes)
    is_timed = at is not None or _has_time(documents)
    operator = Percolate(
        to_arrow(documents.schema), to_arrow(changes.schema), [text] if isinstance(text, str) else list(text),
        at=time_column(documents, at) if is_timed else None,
        searches_at=time_column(changes, searches_at) if is_timed else None,
        ties=ties, language=language, places=places, highlights=highlights, in_log_order=in_log_order(changes),
    )  # fmt: skip
    return operate(operator, [Input(_spread(documents), [_SPREAD]), copied(changes)], uid=uid)


def _spread(documents: DataFrame) -> DataFrame:
    """The documents with a number by which they are spread over partitions: the same whenever a batch is run again."""
    hashed = [F.col(f"`{field.name}`") for field in documents.schema if not isinstance(field.dataType, MapType)]
    return documents.withColumn(_SPREAD, F.xxhash64(*hashed))


def _has_time(documents: DataFrame) -> bool:
    """Whether documents have an event time that is declared, or a single one that may be meant."""
    times = [field for field in documents.schema if isinstance(field.dataType, TimestampType)]
    return len(times) == 1 or any(MARK in (field.metadata or {}) for field in times)


def _check_searches(changes: DataFrame) -> None:
    for name in (SEARCH, SAID):
        if name not in changes.columns or not isinstance(changes.schema[name].dataType, StringType):
            raise InvalidInput(
                f"The table of searches has no STRING column {name!r}.",
                advice=f"It needs {SEARCH!r}, its key, and {SAID!r}, the text of a search. Rename columns with select().",
            )


class Percolate:
    """The operator."""

    name = "percolate"

    def __init__(
        self, documents: pa.Schema, searches: pa.Schema, text: Sequence[str], *, at: str | None, searches_at: str | None,
        ties: Ties = "table", language: str | None = None, places: Mapping[str, tuple[str, str]] | None = None,
        highlights: bool = False, in_log_order: bool = True,
    ) -> None:  # fmt: skip
        """Without `at` documents are matched in the order of batches."""
        self.settings = (
            tuple(text),
            at,
            searches_at,
            ties,
            language,
            tuple(sorted((places or {}).items())),
            highlights,
        )
        self._fields = SearchFields.of(documents, text, places)
        self._analyzer = Analyzer(language)
        self._own = documents.names
        self._more = [name for name in searches.names if name not in (SAID, CONDITION, searches_at, DELETED.name)]
        self._has_conditions, self._documents = CONDITION in searches.names, documents
        taken = {*self._own, FOUND} if highlights else set(self._own)
        twice = sorted(taken & set(self._more))
        if twice:
            raise InvalidInput(
                f"Both the documents and the searches have a column {twice[0]!r}.", advice="Rename one of them."
            )
        fields = [*documents, *(searches.field(name).with_nullable(True) for name in self._more)]
        self.schema = pa.schema([*fields, pa.field(FOUND, HIGHLIGHTS)] if highlights else fields)
        self._highlighter = Highlighter(self._fields, self._analyzer) if highlights else None
        if at is not None:
            self.keeps = self.at = at
        self._at, self._searches_at, self._is_table_first = at, searches_at, ties == "table"
        self._in_log_order, self._deletes = in_log_order, DELETED.name in searches.names
        more = [pa.field(f"c{number}", searches.field(name).type) for number, name in enumerate(self._more)]
        own = [pa.field(f"r{number}", field.type) for number, field in enumerate(documents)]
        versions = [pa.field(SINCE, pa.int64()), pa.field(GONE, pa.bool_()), pa.field(QUERY, pa.binary()), *more]
        counts = [pa.field(name, pa.int64()) for name in ("batch", "versions", "searches", "parked", "always")]
        stamps = [pa.field(name, pa.list_(pa.int64())) for name in ("counts", "digests")]
        said = [pa.field(name, pa.string()) for name in (SEARCH, SAID, REASON)]
        self.tables = {
            _WAITING: TableSpec("timed", own),
            _SEARCHES: TableSpec("timed", versions, is_copied=True),
            _PARKED: TableSpec("keyed", said, is_copied=True),
            _SUMMARY: TableSpec("keyed", [*counts, *stamps], is_copied=True),
        }

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """The documents that the watermark has passed, with the searches that match them."""
        summary = _Summary(state)
        before = summary.batch if self._at is None else time.before
        rows = self._ordered(inputs[1])
        if self._at is None and not self._is_table_first and time.until < MAX_TIME:
            index = self._index(state, summary, before)  # documents first, then the changes of their batch
            result = self._matched(index, self._renamed(inputs[0]), np.full(inputs[0].num_rows, summary.batch))
            self._learn(state, summary, rows)
        else:
            self._learn(state, summary, rows)
            index = self._index(state, summary, before)
            due, times = self._due(state, inputs[0], summary, time)
            result = self._matched(index, due, times)
        kept = index.numbers()
        known = summary.versions
        if index.stamp.versions == known:
            state[_SEARCHES].keeps = lambda table: pa.array(np.isin(column(table, AT), kept))
        summary.save(index)
        return result

    def _due(self, state: State, rows: pa.Table, summary: _Summary, time: Time) -> tuple[pa.Table, Any]:
        """The documents that can be matched now, and their times."""
        if self._at is None:
            return self._renamed(rows), np.full(rows.num_rows, summary.batch)
        times = times_of(rows, self._at)
        own = self._renamed(rows)
        waiting = pa.table({H1: rows.column(H1), H2: rows.column(H2), AT: pa.array(times, pa.int64())})
        waiting = pa.table([*waiting.columns, *own.columns], [*waiting.column_names, *own.column_names])
        state[_WAITING].put(waiting.filter(pa.array(times > time.before)))
        due = state[_WAITING].take(time.until)
        return due, column(due, AT)

    def _renamed(self, rows: pa.Table) -> pa.Table:
        return pa.table({f"r{number}": rows.column(name) for number, name in enumerate(self._own)})

    def _ordered(self, rows: pa.Table) -> pa.Table:
        """Changes of searches in the order of the log, or in one of their own; the state has them by their key, not their copy."""
        if not self._in_log_order and self._searches_at is not None:
            rows = in_fixed_order(rows, self._searches_at)
        h1, h2 = hashes_of([_whole(rows.column(SEARCH))])
        return rows.set_column(rows.schema.get_field_index(H1), H1, pa.array(h1)).set_column(
            rows.schema.get_field_index(H2), H2, pa.array(h2)
        )

    def _learn(self, state: State, summary: _Summary, rows: pa.Table) -> None:
        """Puts changes of searches into the state, as they were read."""
        summary.batch += 1
        if not rows.num_rows:
            return
        count = rows.num_rows
        gone = rows.column(DELETED.name).fill_null(False) if self._deletes else pa.array(np.zeros(count, bool))
        since = np.full(count, summary.batch) if self._searches_at is None else times_of(rows, self._searches_at)
        conditions = rows.column(CONDITION).to_pylist() if self._has_conditions else [None] * count
        read = [
            (None, None) if is_gone else self._read(said, condition)
            for said, condition, is_gone in zip(
                rows.column(SAID).to_pylist(), conditions, gone.to_pylist(), strict=True
            )
        ]
        more = {f"c{number}": rows.column(name) for number, name in enumerate(self._more)}
        number = pa.array(np.arange(count) + summary.versions + 1)
        query = pa.array([query for query, _ in read], pa.binary())
        versions = pa.table(
            {
                H1: rows.column(H1),
                H2: rows.column(H2),
                AT: number,
                SINCE: pa.array(since),
                GONE: gone,
                QUERY: query,
                **more,
            }
        )
        state[_SEARCHES].put(versions)
        summary.add(count, _digest(summary.stamps[-1].digest, versions))
        reasons = pa.array([reason for _, reason in read], pa.string())
        self._park(state, rows.select([H1, H2, SEARCH, SAID]).append_column(REASON, reasons))

    def _read(self, said: str | None, where: str | None) -> tuple[bytes | None, str | None]:
        language = self._analyzer.language
        said = said if said is not None and not said.isspace() else ""
        return _read(said, (where or "").strip(), self._fields, language, self._documents)

    def _park(self, state: State, rows: pa.Table) -> None:
        """Of each search that was changed the last version counts."""
        keys = Keys.of(rows)
        last = np.zeros(len(keys), np.int64)
        np.maximum.at(last, keys.row, np.arange(rows.num_rows))
        is_parked = np.asarray(rows.column(REASON).is_valid())[last]
        state[_PARKED].remove(keys.only(~is_parked))
        state[_PARKED].put(rows.take(pa.array(np.sort(last[is_parked]))))

    def _index(self, state: State, summary: _Summary, before: int) -> SearchIndex:
        """The index of all versions in the state."""
        schema = state[_SEARCHES].spec.schema
        index = shelf(self._fields, schema).take(set(summary.stamps), before)
        index.add(state[_SEARCHES].between(index.stamp.versions or MIN_TIME, MAX_TIME), summary.stamps[-1])
        index.forget(before)
        return index

    def _matched(self, index: SearchIndex, due: pa.Table, times: Any) -> pa.Table:
        found = [self.schema.empty_table()]
        for start, end in _pieces(due):
            piece = due.slice(start, end - start)
            own = pa.table({name: piece.column(f"r{number}") for number, name in enumerate(self._own)})
            documents = Documents(own, self._fields, self._analyzer)
            row, version = index.matches(documents, times[start:end], is_equal=self._is_table_first or self._at is None)
            given = {name: own.column(name).take(pa.array(row)) for name in self._own}
            versions = index.rows(version)
            given |= {name: versions.column(f"c{number}") for number, name in enumerate(self._more)}
            if self._highlighter is not None:
                given[FOUND] = _highlights(self._highlighter, own, row, versions.column(QUERY))
            found.append(pa.table(given).cast(self.schema))
        return pa.concat_tables(found)


class _Summary:
    """What the state says of itself: how many batches and versions there were, and what the last indexes were made of."""

    def __init__(self, state: State) -> None:
        self._table = state[_SUMMARY]
        rows = self._table.rows().to_pylist()
        row: dict[str, Any] = rows[0] if rows else {"batch": 0, "versions": 0, "counts": [0], "digests": [0]}
        self.batch, self.versions = row["batch"], row["versions"]
        self.stamps = [IndexStamp(*each) for each in zip(row["counts"], row["digests"], strict=True)]

    def add(self, count: int, digest: int) -> None:
        """So many versions more."""
        self.versions += count
        self.stamps = [*self.stamps[-STAMPS_KEPT:], IndexStamp(self.versions, digest)]

    def save(self, index: SearchIndex) -> None:
        """Puts it into the state."""
        row = {
            H1: 0, H2: 0, "batch": self.batch, "versions": self.versions, "searches": index.searches, "parked": index.parked,
            "always": index.always, "counts": [each.versions for each in self.stamps],
            "digests": [each.digest for each in self.stamps],
        }  # fmt: skip
        schema = pa.schema([field for field in self._table.spec.schema if field.name in row])
        self._table.put(pa.Table.from_pylist([row], schema))


@lru_cache(4)
def shelf(fields: SearchFields, schema: pa.Schema) -> IndexShelf:
    """The indexes that this process has made for such documents and searches."""
    return IndexShelf(lambda: SearchIndex(fields, schema))


@lru_cache(READ_KEPT)
def _read(
    said: str, where: str, fields: SearchFields, language: str | None, documents: pa.Schema
) -> tuple[bytes | None, str | None]:
    """A query for the state, or the reason why there is none. All partitions of a process need the same ones."""
    try:
        if where:
            compile_condition(where, documents)
        if where and not said:
            return encoded(Where(where)), None
        query = parse_search(said, fields, Analyzer(language))
        return encoded(required(query, Where(where)) if where else query), None
    except InvalidInput as error:
        return None, str(error)


def _highlights(highlighter: Highlighter, documents: pa.Table, row: Any, queries: pa.ChunkedArray) -> pa.Array:
    """The highlights of each match; the words of a document are looked for once, and each query is read once."""
    words = lru_cache(8)(lambda at: highlighter.words(documents.slice(at, 1).to_pylist()[0]))
    query = lru_cache(65_536)(decoded)
    found = [highlighter.of(words(at), query(said)) for at, said in zip(row.tolist(), queries.to_pylist(), strict=True)]
    return pa.array(found, HIGHLIGHTS)


def _digest(before: int, versions: pa.Table) -> int:
    """A number that says of which versions an index was made."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, versions.schema) as writer:
        writer.write_table(versions.combine_chunks())
    hashed = hashlib.blake2b(before.to_bytes(8, "little", signed=True), digest_size=8)
    hashed.update(sink.getvalue())
    return int.from_bytes(hashed.digest(), "little", signed=True)


def _whole(values: pa.ChunkedArray) -> pa.Array:
    return values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)


def _pieces(rows: pa.Table) -> Iterator[tuple[int, int]]:
    """Rows from and to, so that a piece has about as much as is matched at once."""
    count = max(1, -(-rows.nbytes // PIECE_BYTES_MAX))
    ends = np.linspace(0, rows.num_rows, count + 1).astype(np.int64).tolist()
    yield from ((start, end) for start, end in pairwise(ends) if end > start)
