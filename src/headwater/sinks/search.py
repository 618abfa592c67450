"""A full-text index as a sink: `tantivy:///./index`, a folder that the tantivy library searches without a server.

A row becomes one document: STRING columns as words to search (the default tokenizer), numbers, BOOLEAN and TIMESTAMP as fields to compare;
`_key` is the key's text, by which a document is replaced or removed, and `_row` is the whole row as JSON (bytes, stored only), which is
what a hit shows. Columns of other types are in `_row` only.

    index = tantivy.Index.open("./index")
    hits = index.searcher().search(index.parse_query("red bicycle", ["title"]), 10).hits

The marker is in the index: a document whose `_ledger` is the stage, replaced by the very commit that adds a batch; so is the fencing
number. One writer has the index at a time, by tantivy's own lock, and only while a batch is applied; readers are never kept out.
A new column needs a new index: tantivy fixes the fields when it is made.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.databases.address import load_client, parse_address
from headwater.databases.keys import plain_key_texts
from headwater.log.arrow.json_types import row_texts
from headwater.model.errors import InvalidInput, NoAccess, Unreachable, Unsupported
from headwater.model.marker import Marker
from headwater.model.points import PROCESS
from headwater.sinks.ledger import NO_ENTRY, LedgerEntry, admits, check_unmoved
from headwater.sinks.sink import Refusal, Shape, ShapedSink

KEY, ROW, LEDGER = "_key", "_row", "_ledger"
KEY_BYTES_MAX = 65_000
HEAP_BYTES = 64 << 20
LEDGERS_MAX = 1_000

_OF_THE_DISK = ("os error", "IoError", "io::Error")
"""What tantivy says of all that goes wrong below it: it raises nothing but ValueError."""

_YEARS = (datetime(1700, 1, 1, tzinfo=UTC), datetime(2250, 1, 1, tzinfo=UTC))


class SearchSink(ShapedSink):
    """One index, fed by one stage."""

    def __init__(self, to: str, *, stage: str) -> None:
        address = parse_address(to, options=())
        super().__init__(address.shown, stage=stage)
        self.folder = Path(address.path)
        self._tantivy = load_client("tantivy", extra="search", purpose="The search sink")
        self._index: Any = None
        self._writer: Any = None
        self._number = 0

    def open(self, shape: Shape) -> None:
        self._shape = shape
        with self._told():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._index = self._tantivy.Index(_schema(self._tantivy, shape), path=str(self.folder), reuse=True)
            with self._locking():
                entry = self._entry()
                self._number = entry.number + 1
                self._enter(LedgerEntry(self._number, entry.last))
                self._end(commits=True)

    def attach(self, shape: Shape) -> None:
        super().attach(shape)
        with self._told():
            if not self._exists():
                raise Unreachable(
                    f"The folder {self.folder} has no index.", advice="The first run of the stage creates the index."
                )
            self._index = self._tantivy.Index.open(str(self.folder))

    def entry(self) -> LedgerEntry:
        with self._told():
            if self._index is None:
                if not self._exists():
                    return NO_ENTRY
                self._index = self._tantivy.Index.open(str(self.folder))
            return self._entry()

    def entries_in(self, searcher: Any) -> dict[str, LedgerEntry]:
        """What the index knows of every stage that writes to it, as a searcher sees it."""
        query = self._tantivy.Query.regex_query(self._index.schema, LEDGER, ".*")
        documents = [searcher.doc(hit) for _, hit in searcher.search(query, LEDGERS_MAX).hits]
        return {document[LEDGER][0]: msgspec.json.decode(document[ROW][0], type=LedgerEntry) for document in documents}

    def everything(self) -> Any:
        """The query that finds all documents."""
        return self._tantivy.Query.all_query()

    def searcher(self) -> Any:
        """The index as it is now."""
        with self._told():
            self._index.reload()
            return self._index.searcher()

    def begin(self, marker: Marker) -> bool:
        with self._told(), self._locking():
            begins = admits(self.stage, self._entry(), self._number, marker)
            if not begins:
                self._end(commits=False)
            return begins

    def begin_repair(self, marker: Marker | None) -> None:
        with self._told(), self._locking():
            check_unmoved(self.stage, self._entry(), marker)

    def upsert(self, rows: pa.Table) -> Sequence[Refusal]:
        keys = plain_key_texts(rows, self.shape.key)
        too_long = pc.greater(pc.binary_length(keys), KEY_BYTES_MAX).to_numpy(zero_copy_only=False)
        documents = zip(keys.to_pylist(), _documents(rows, keys), too_long.tolist(), strict=True)
        with self._told():
            for key, document, is_too_long in documents:  # one by one: tantivy takes no more at a time
                if not is_too_long:
                    self._writer.delete_documents_by_term(KEY, key)
                    self._writer.add_json(document)
        return [
            Refusal(int(row), f"The key has more than {KEY_BYTES_MAX:,} bytes, which is more than tantivy can index.")
            for row in np.flatnonzero(too_long)
        ]

    def delete(self, keys: pa.Table) -> None:
        with self._told():
            for key in plain_key_texts(keys, self.shape.key).to_pylist():
                self._writer.delete_documents_by_term(KEY, key)

    def commit(self, marker: Marker | None) -> None:
        with self._told():
            if marker is not None:
                self._enter(LedgerEntry(self._number, marker))
            PROCESS.reach("search: entered")
            self._end(commits=True)

    def rollback(self) -> None:
        if self._writer is not None:
            self._end(commits=False)

    def accept_new_checkpoint(self) -> Marker | None:
        entry = self.entry()
        if entry == NO_ENTRY:
            return None
        with self._told(), self._locking():
            entry = self._entry()
            self._enter(LedgerEntry(entry.number + 1, None))
            self._end(commits=True)
        return entry.last

    def close(self) -> None:
        self.rollback()

    def _exists(self) -> bool:
        return self.folder.is_dir() and self._tantivy.Index.exists(str(self.folder))

    @contextmanager
    def _locking(self) -> Iterator[None]:
        """Takes tantivy's lock, which stays taken until `_end`; an error gives it back."""
        self._writer = self._index.writer(HEAP_BYTES, 1)
        try:
            yield
        except BaseException:
            self.rollback()
            raise

    def _end(self, *, commits: bool) -> None:
        writer, self._writer = self._writer, None
        try:
            if commits:
                writer.commit()
            else:
                writer.rollback()
        finally:
            writer.wait_merging_threads()

    def _entry(self) -> LedgerEntry:
        self._index.reload()
        searcher = self._index.searcher()
        query = self._tantivy.Query.term_query(self._index.schema, LEDGER, self.stage)
        hits = searcher.search(query, 1).hits
        if not hits:
            return NO_ENTRY
        return msgspec.json.decode(searcher.doc(hits[0][1])[ROW][0], type=LedgerEntry)

    def _enter(self, entry: LedgerEntry) -> None:
        named = None if entry.last is None else msgspec.structs.replace(entry.last, stage=self.stage)
        text = b64encode(msgspec.json.encode(LedgerEntry(entry.number, named))).decode()
        self._writer.delete_documents_by_term(LEDGER, self.stage)
        self._writer.add_json(msgspec.json.encode({LEDGER: self.stage, ROW: text}).decode())

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            said = str(error)
            if "LockBusy" in said:
                raise Unreachable(
                    f"{self.url}: Another writer has the index open.",
                    advice="The sink retries the batch. Stop the other writer.",
                ) from None
            if "chema" in said:
                raise Unsupported(
                    f"{self.url} was created with other columns.",
                    advice="Use a new folder, because tantivy cannot add columns.",
                ) from None
            if any(word in said for word in _OF_THE_DISK):
                raise Unreachable(
                    f"{self.url}: {said}.", advice="The sink retries the batch. Check the disk."
                ) from None
            raise InvalidInput(
                f"{self.url}: {said}", advice="Pass a folder with an index of Headwater, or a new folder."
            ) from None
        except PermissionError as error:
            raise NoAccess(f"{self.url}: {error}.", advice="Check the permissions of the folder.") from None
        except (FileExistsError, NotADirectoryError) as error:
            raise InvalidInput(f"{self.url}: {error}.", advice="Pass a folder.") from None


def _schema(tantivy: Any, shape: Shape) -> Any:
    builder = tantivy.SchemaBuilder()
    for name in (KEY, LEDGER):
        builder.add_text_field(name, stored=True, tokenizer_name="raw", index_option="basic")
    builder.add_bytes_field(ROW, stored=True)
    for field in shape.schema:
        kind = _kind(field.type)
        if kind == "text":
            builder.add_text_field(field.name)
        elif kind is not None:
            getattr(builder, f"add_{kind}_field")(field.name, indexed=True, fast=True)
    return builder.build()


def _kind(type_: pa.DataType) -> str | None:
    is_ = pa.types
    if is_.is_string(type_):
        return "text"
    if is_.is_integer(type_):
        return "integer"
    if is_.is_floating(type_):
        return "float"
    if is_.is_boolean(type_):
        return "boolean"
    return "date" if is_.is_timestamp(type_) else None


def _documents(rows: pa.Table, keys: pa.Array) -> list[str]:
    """The rows as tantivy reads them: what is null, or has no place in a field, is left out of it."""
    whole = pa.chunked_array([row_texts(batch) for batch in rows.to_batches()]).combine_chunks()
    coded = pa.array([b64encode(text).decode() for text in whole.view(pa.binary()).to_pylist()], pa.string())
    parts = [_members(KEY, keys), _members(ROW, coded)]
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if _kind(field.type) is not None:
            parts.append(_members(field.name, _fitting(column.combine_chunks())))
    joined = pc.binary_join_element_wise(*parts, "")
    return pc.binary_join_element_wise("{", pc.utf8_slice_codeunits(joined, 1), "}", "").to_pylist()


def _members(name: str, column: pa.Array) -> pa.Array:
    """Each value as a member of a JSON object, after a comma; nothing where it is null."""
    texts = row_texts(pa.record_batch([column], names=[name]))
    inner = pc.binary_join_element_wise(",", pc.utf8_slice_codeunits(texts, 1, -1), "")
    return pc.if_else(column.is_valid(), inner, "")


def _fitting(column: pa.Array) -> pa.Array:
    """The values that a field can hold: finite numbers, and times that fit into nanoseconds."""
    none = pa.scalar(None, column.type)
    if pa.types.is_floating(column.type):
        return pc.if_else(pc.is_finite(column).fill_null(False), column, none)
    if pa.types.is_timestamp(column.type):
        times = column.cast(pa.timestamp("us", "UTC"))
        first, end = (pa.scalar(year, times.type) for year in _YEARS)
        fits = pc.and_(pc.greater_equal(times, first), pc.less(times, end)).fill_null(False)
        return pc.if_else(fits, times, pa.scalar(None, times.type))
    return column
