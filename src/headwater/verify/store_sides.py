"""Redis, search indexes, a Delta table and a folder of Parquet files as sides.

Redis gives no moment: keys are read one after the other while others write. OpenSearch gives one of the rows, and the marker is
elsewhere. A difference found there is looked at again, by `compare`. A tantivy index and a Delta table give versions, with the marker
inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from headwater.databases.address import parse_address
from headwater.log.arrow.columns import ARROW_ERRORS
from headwater.log.arrow.json_types import from_json_texts
from headwater.model.errors import HeadwaterError, InvalidInput, NotFound, Unsupported
from headwater.sinks.delta import DeltaSink
from headwater.sinks.opensearch import OpenSearchSink
from headwater.sinks.redis import RedisSink, from_field_texts
from headwater.sinks.search import LEDGER, ROW, SearchSink
from headwater.sinks.sink import Shape, Sink
from headwater.verify.side import Follows, Look, Places, SinkSide, chosen, nullable, picked
from headwater.verify.table_sides import conformed

T = TypeVar("T")

_CHUNK_ROWS = 20_000
_SCAN = 2_000
_NO_ROWS = (HeadwaterError, *ARROW_ERRORS, AttributeError)
"""What is raised where a value that somebody else wrote is read as a row."""


class _StoreLook:
    """Rows from a function that gives them in pieces."""

    def __init__(
        self, shape: Shape, read: Callable[[], Iterator[pa.Table]], follows: Follows | None, *, is_moment: bool
    ) -> None:
        self._shape = shape
        self._read = read
        self.follows = follows
        self.is_moment = self.is_final = is_moment
        self.unreadable: list[str] = []

    def chunks(self) -> Iterator[pa.Table]:
        return self._read()

    def rows(self, keys: pa.Table) -> pa.Table:
        return picked(self.chunks(), keys, self._shape)


class RedisSide(SinkSide):
    """The keys of a prefix."""

    _sink: RedisSink

    @contextmanager
    def look(self, *, at: Places | None = None, topic: str | None = None, stage: str | None = None) -> Iterator[Look]:
        assert self._shape is not None
        yield RedisLook(self._sink, self._shape, chosen(self._sink.entries(), topic=topic, stage=stage))

    def take(self, shape: Shape) -> None:
        if self._sink.style == "set":
            raise Unsupported(
                f"{self.url}: Sets contain members, not rows.", advice="Compare keys with as=hash or as=json."
            )
        super().take(shape)


class RedisLook:
    """Keys as they are found, one after the other."""

    is_moment = is_final = False

    def __init__(self, sink: RedisSink, shape: Shape, follows: Follows | None) -> None:
        self._sink = sink
        self._shape = shape
        self.follows = follows
        self.unreadable: list[str] = []

    def chunks(self) -> Iterator[pa.Table]:
        with self._sink.told():
            names: list[bytes] = []
            pattern = _literal(self._sink.prefix) + "*"
            seen: set[bytes] = set()
            for name in self._sink.client.scan_iter(pattern, count=_SCAN):
                if name in seen:
                    continue
                seen.add(name)
                names.append(name)
                if len(names) >= _SCAN:
                    yield self._table(names)
                    names = []
            if names:
                yield self._table(names)

    def rows(self, keys: pa.Table) -> pa.Table:
        with self._sink.told():
            names = [name.encode() for name in self._sink.names_of(keys).to_pylist()]
            parts = [self._table(names[at : at + _SCAN]) for at in range(0, len(names), _SCAN)]
        return pa.concat_tables([nullable(self._shape.schema).empty_table(), *parts])

    def _table(self, names: Sequence[bytes]) -> pa.Table:
        pipeline = self._sink.client.pipeline(transaction=False)
        for name in names:
            if self._sink.style == "hash":
                pipeline.hgetall(name)
            else:
                pipeline.get(name)
        found = pipeline.execute(raise_on_error=False)
        rows = [
            (name.decode(errors="backslashreplace"), value)
            for name, value in zip(names, found, strict=True)
            if value is not None and value != {}  # gone since its name was found
        ]
        make = self._of_hashes if self._sink.style == "hash" else self._of_texts
        return _readable(rows, make, self._shape, self.unreadable)

    def _of_hashes(self, hashes: list[dict[bytes, bytes]]) -> pa.Table:
        schema = nullable(self._shape.schema)
        columns = [from_field_texts([one.get(field.name.encode()) for one in hashes], field) for field in schema]
        return pa.Table.from_arrays(columns, schema=schema)

    def _of_texts(self, texts: list[bytes]) -> pa.Table:
        return _of_json([text.decode() for text in texts], self._shape)


class SearchSide(SinkSide):
    """The documents of an index."""

    _sink: SearchSink

    @contextmanager
    def look(self, *, at: Places | None = None, topic: str | None = None, stage: str | None = None) -> Iterator[Look]:
        assert self._shape is not None
        shape, searcher = self._shape, self._sink.searcher()
        hits = [hit for _, hit in searcher.search(self._sink.everything(), max(1, searcher.num_docs)).hits]

        def read() -> Iterator[pa.Table]:
            for start in range(0, len(hits), _CHUNK_ROWS):
                documents = [searcher.doc(hit) for hit in hits[start : start + _CHUNK_ROWS]]
                texts = [bytes(found[ROW][0]).decode() for found in documents if not found.get_first(LEDGER)]
                yield _of_json(texts, shape)

        follows = chosen(self._sink.entries_in(searcher), topic=topic, stage=stage)
        yield _StoreLook(shape, read, follows, is_moment=True)


class OpenSearchSide(SinkSide):
    """The documents of an index of OpenSearch."""

    _sink: OpenSearchSink

    @contextmanager
    def look(self, *, at: Places | None = None, topic: str | None = None, stage: str | None = None) -> Iterator[Look]:
        assert self._shape is not None
        yield OpenSearchLook(self._sink, self._shape, chosen(self._sink.entries(), topic=topic, stage=stage))


class OpenSearchLook:
    """Documents as they are found."""

    is_moment = is_final = False

    def __init__(self, sink: OpenSearchSink, shape: Shape, follows: Follows | None) -> None:
        self._sink = sink
        self._shape = shape
        self.follows = follows
        self.unreadable: list[str] = []

    def chunks(self) -> Iterator[pa.Table]:
        yield from map(self._table, self._sink.pages(_SCAN))

    def rows(self, keys: pa.Table) -> pa.Table:
        pages = [self._sink.documents(keys.slice(at, _SCAN)) for at in range(0, keys.num_rows, _SCAN)]
        return pa.concat_tables([nullable(self._shape.schema).empty_table(), *map(self._table, pages)])

    def _table(self, documents: Sequence[tuple[str, str]]) -> pa.Table:
        return _readable(documents, lambda texts: _of_json(texts, self._shape), self._shape, self.unreadable)


class DeltaSide(SinkSide):
    """A version of a Delta table."""

    _sink: DeltaSink

    def shape(self) -> Shape | None:
        schema = self._sink.load().to_pyarrow_dataset().schema
        return Shape(self._sink.folder.name, schema, ())

    @contextmanager
    def look(self, *, at: Places | None = None, topic: str | None = None, stage: str | None = None) -> Iterator[Look]:
        assert self._shape is not None
        shape, table = self._shape, self._sink.load()
        follows = chosen(self._sink.entries_in(table), topic=topic, stage=stage)
        yield _StoreLook(shape, lambda: _of_dataset(table.to_pyarrow_dataset(), shape), follows, is_moment=True)


class ParquetSide:
    """A folder of Parquet files with one row of each key."""

    def __init__(self, url: str) -> None:
        self._path = parse_address(url, options=()).path if "://" in url else url
        self.url = url
        self._shape: Shape | None = None

    def shape(self) -> Shape | None:
        return Shape(self._path, self._dataset().schema, ())

    def take(self, shape: Shape) -> None:
        self._shape = shape

    @contextmanager
    def look(self, *, at: Places | None = None, topic: str | None = None, stage: str | None = None) -> Iterator[Look]:
        assert self._shape is not None
        shape, dataset = self._shape, self._dataset()
        yield _StoreLook(shape, lambda: _of_dataset(dataset, shape), None, is_moment=True)

    def repairs(self, stage: str) -> Sink:
        raise Unsupported(
            f"{self.url}: A repair cannot change files in place.", advice="Use delta:/// for rows that change."
        )

    def close(self) -> None:
        """Nothing is kept open."""

    def _dataset(self) -> Any:
        try:
            return ds.dataset(self._path, format="parquet", partitioning="hive")
        except FileNotFoundError:
            raise NotFound(
                f"The folder {self._path} does not exist.", advice="Pass a folder with Parquet files."
            ) from None
        except (*ARROW_ERRORS, OSError) as error:
            raise InvalidInput(
                f"{self._path}: {str(error).splitlines()[0]}", advice="Pass a folder that contains only Parquet files."
            ) from None


def _of_dataset(dataset: Any, shape: Shape) -> Iterator[pa.Table]:
    missing = [name for name in shape.schema.names if name not in dataset.schema.names]
    if missing:
        raise NotFound(
            f"{shape.name!r} has no column {missing[0]!r} in this system.",
            advice="Use --columns to compare only columns that both sides have.",
        )
    for batch in dataset.to_batches(columns=shape.schema.names, batch_size=_CHUNK_ROWS):
        yield conformed(pa.Table.from_batches([batch]), shape)


def _of_json(texts: Sequence[str], shape: Shape) -> pa.Table:
    """Rows from their JSON; a column that it lacks is null."""
    schema = nullable(shape.schema)
    whole = from_json_texts(texts, pa.field("row", pa.struct(list(schema))))
    columns = [pc.struct_field(whole, name) for name in schema.names] if len(texts) else None
    return schema.empty_table() if columns is None else pa.Table.from_arrays(columns, schema=schema)


def _readable(
    named: Sequence[tuple[str, T]], make: Callable[[list[T]], pa.Table], shape: Shape, unreadable: list[str]
) -> pa.Table:
    """The rows that values are, each with its name; what is no row of ours is named as unreadable, and left out."""

    def rows_of(values: list[T]) -> pa.Table:
        rows = make(values)
        if any(rows.column(name).null_count for name in shape.key):
            raise InvalidInput("A row has no key.", advice="Remove the row, which another program wrote.")
        return rows

    try:
        return rows_of([value for _, value in named])
    except _NO_ROWS:
        tables = [nullable(shape.schema).empty_table()]
    for name, value in named:
        try:
            tables.append(rows_of([value]))
        except _NO_ROWS:
            unreadable.append(name)
    return pa.concat_tables(tables)


def _literal(prefix: str) -> str:
    """A prefix as a pattern of Redis: no character of it means anything else."""
    return "".join("\\" + char if char in "*?[]\\^-" else char for char in prefix)
