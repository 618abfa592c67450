"""A sealed segment: a standard Arrow IPC file that Polars, DuckDB and pandas read without us.

Format of `<base offset, 20 digits>.arrow`: the topic's columns, `_headers` and `_deleted` where any event has them, and
`_appended`; batches of 64 k rows, LZ4 where it helps. The footer's metadata holds under the key "headwater" a table as
base64 text:

    header: magic "HWSEAL", format u16, schema id u32, flags u32, batches u32, base offset i64, end offset i64
    a batch: position u64, bytes u64, base offset i64, events u32, crc32c u32 of its whole message, time min i64,
             time max i64, running before i64, running after i64, appended before i64, appended after i64
    crc32c u32 of all that

A compacted segment has format 2: its header goes on with the time of its first compaction i64 and the number of its tombstones
u32, and the column `_offset` stands last. It stands for all offsets from its base to its end, a batch for those from its base
to the next one's; the events that are left of them may be none.

Arrow's format has no checksums, so each batch is found by this table and believed only if its crc32c holds. The table
has a fixed length, is written as dots first, and is filled in when the checksums are known.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from headwater.log.disk.disk import Disk
from headwater.log.file.segments import frame as frames
from headwater.log.port.chunk import Chunk
from headwater.log.port.topic import Topic
from headwater.log.port.write import flags_of, physical_schema
from headwater.model.clock import NO_TIME
from headwater.model.errors import Damaged, FormatTooNew
from headwater.model.schema import project

FORMAT = 2
BATCH_EVENTS = 65_536
OFFSET_FIELD = pa.field("_offset", pa.int64(), nullable=False)
APPENDED_FIELD = pa.field("_appended", pa.timestamp("us", tz="UTC"), nullable=False)

_MAGIC = b"HWSEAL"
_KEY = b"headwater"
_HEADER = struct.Struct("<6sHIIIqq")
_COMPACTED = struct.Struct("<qI")
_BATCH = struct.Struct("<QQqIIqqqqqq")
_CHECKSUM = struct.Struct("<I")
_START = b"headwater-batches:"
_WORTHWHILE = 0.9


class Compacted(msgspec.Struct, frozen=True, gc=False):
    """What a compacted segment says of itself: when it was compacted first, and how many tombstones are left in it."""

    at_us: int
    tombstones: int


class SealedBatch(msgspec.Struct, frozen=True, gc=False):
    """One batch's line in the table."""

    position: int
    length: int
    base_offset: int
    count: int
    crc: int
    time_min: int
    time_max: int
    running_before: int
    running_after: int
    appended_before: int
    appended_after: int


def sealed_name(base: int) -> str:
    """The file's name."""
    return f"{base:020d}.arrow"


class Sealed:
    """One `.arrow` segment opened for reading."""

    def __init__(self, disk: Disk, folder: str, base: int) -> None:
        self.base = base
        self.path = f"{folder}/{sealed_name(base)}"
        file = disk.open(self.path)
        try:
            self._view = file.view(file.size())
        finally:
            file.close()
        table = self._read_table()
        self.schema_id, self.flags, self.end_offset = table.schema_id, table.flags, table.end
        self.compacted, self.batches = table.compacted, table.batches
        self._offsets = np.array([batch.base_offset for batch in self.batches], dtype=np.int64)

    @property
    def running_before(self) -> int:
        """The greatest event time the partition had reached when the segment began."""
        return self.batches[0].running_before

    @property
    def appended_before(self) -> int:
        """When the last event before the segment was appended."""
        return self.batches[0].appended_before

    @property
    def count(self) -> int:
        """How many events it holds."""
        return sum(batch.count for batch in self.batches)

    @property
    def size(self) -> int:
        """Its bytes."""
        return int(self._view.size)

    def find(self, offset: int) -> int:
        """The number of the batch that holds an offset."""
        return max(int(np.searchsorted(self._offsets, offset, side="right")) - 1, 0)

    def batch_at(self, time: int, *, by: str) -> int | None:
        """The number of the first batch that reaches a time, or None; `by` is "running" or "appended"."""
        for number, batch in enumerate(self.batches):
            if (batch.running_after if by == "running" else batch.appended_after) >= time:
                return number
        return None

    def read(self, number: int, *, topic: Topic, partition: int) -> tuple[Chunk, int] | None:
        """One batch as a chunk, and the number of the next; None behind the last."""
        if number >= len(self.batches):
            return None
        entry = self.batches[number]
        batch = self._load(entry, topic)
        if self.compacted is None:
            return Chunk(topic, partition, entry.base_offset, batch, None, running=entry.running_before), number + 1
        offsets = batch.column(batch.num_columns - 1).to_numpy()
        batch = batch.select(batch.schema.names[:-1])
        end = self.batches[number + 1].base_offset if number + 1 < len(self.batches) else self.end_offset
        return Chunk(topic, partition, entry.base_offset, batch, None, offsets, end, entry.running_before), number + 1

    def pieces(self, topic: Topic, partition: int) -> Iterator[Piece]:
        """Its events, to be written again."""
        for number, entry in enumerate(self.batches):
            found = self.read(number, topic=topic, partition=partition)
            assert found is not None
            times = (entry.running_before, entry.running_after, entry.appended_before, entry.appended_after)
            yield Piece(found[0], *times)

    def check_batches(self, topic: Topic) -> Iterator[Damaged]:
        """Every batch that fails its checksum."""
        for entry in self.batches:
            try:
                self._load(entry, topic)
            except Damaged as error:
                yield error

    def check_footer(self, topic: Topic) -> Iterator[Damaged]:
        """What other programs would stumble over although we read the events: damage around them."""
        try:
            reader = pa.ipc.open_file(self._view)
            expected = self._schema(topic.schemas[self.schema_id])
            if reader.schema != expected or reader.num_record_batches != len(self.batches):
                raise pa.ArrowInvalid("its schema or its number of batches is not that of the events")
            rows = sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))
            if rows != self.count:
                raise pa.ArrowInvalid("its number of rows is not that of the events")
        except (pa.ArrowException, OSError) as error:
            yield Damaged(
                f"{self.path}: Arrow's own footer is damaged ({error}).",
                advice="Headwater still reads the events; other programs may not. Run `headwater doctor --repair`.",
            )

    def close(self) -> None:
        """Nothing stays open: the mapping lives as long as the batches read from it."""

    def _load(self, entry: SealedBatch, topic: Topic) -> pa.RecordBatch:
        whole = entry.position + entry.length <= self._view.size
        data = self._view.slice(entry.position, entry.length if whole else 0)
        if not whole or crc32c(data) != entry.crc:
            last = entry.base_offset + entry.count - 1
            raise frames.damaged(self.path, entry.position, f"events {entry.base_offset} to {last}")
        if self.schema_id > topic.schema_id:
            raise frames.damaged(self.path, entry.position, f"schema {self.schema_id} is unknown")
        batch = pa.ipc.read_record_batch(data, self._schema(topic.schemas[self.schema_id]))
        if self.schema_id != topic.schema_id:
            batch = project(batch, self._schema(topic.schema))
        return batch

    def _schema(self, schema: pa.Schema) -> pa.Schema:
        return _file_schema(schema, self.flags, is_compacted=self.compacted is not None)

    def _read_table(self) -> _Table:
        try:
            metadata = pa.ipc.open_file(self._view).metadata
        except (pa.ArrowException, OSError):
            metadata = None
        text = (metadata or {}).get(_KEY) or self._search_table()
        table = _decode_table(text)
        if table is None:
            raise frames.damaged(self.path, self._view.size, "the table of batches in the footer")
        if table.version > FORMAT:
            raise FormatTooNew(
                f"{self.path} has format {table.version}; this Headwater reads up to {FORMAT}.",
                advice="Upgrade Headwater.",
            )
        if table.base != self.base:
            raise frames.damaged(self.path, 0, f"it holds the events from {table.base} on")
        return table

    def _search_table(self) -> bytes:
        """The table found by its first bytes, where Arrow's footer around it is damaged."""
        raw = memoryview(self._view)
        tail = bytes(raw[max(0, raw.nbytes - (16 << 20)) :])
        at = tail.rfind(_START)
        end = tail.find(b"\0", at)
        return tail[at:end] if at >= 0 else b""


class Piece(msgspec.Struct, frozen=True):
    """Some events to be sealed, with the partition's greatest event time and last append time before and after them."""

    chunk: Chunk
    running_before: int
    running_after: int
    appended_before: int
    appended_after: int


class _Table(msgspec.Struct, frozen=True):
    version: int
    schema_id: int
    flags: int
    base: int
    end: int
    compacted: Compacted | None
    batches: list[SealedBatch]


def encode_sealed(pieces: Iterable[Piece], *, topic: Topic, compacted: Compacted | None = None) -> bytearray:
    """The bytes of a sealed segment, or of a compacted one."""
    groups = list(_regroup(pieces))
    flags = 0
    for group in groups:
        flags |= flags_of(group.chunk.batch)
    whole = _file_schema(topic.schema, flags, is_compacted=compacted is not None)
    batches = [_complete(group.chunk, whole) for group in groups]
    blank = _START + b"." * len(base64.b64encode(bytes(_table_bytes(len(groups), is_compacted=compacted is not None))))
    data, places = _write_file(whole, batches, blank)
    table = _Table(
        version=1 if compacted is None else 2,
        schema_id=topic.schema_id,
        flags=flags,
        base=groups[0].chunk.base_offset,
        end=groups[-1].chunk.end_offset,
        compacted=compacted,
        batches=[
            _entry(group, batch, place, data, topic.time)
            for group, batch, place in zip(groups, batches, places, strict=True)
        ],
    )
    text = _START + base64.b64encode(_encode_table(table))
    at = data.rfind(blank)
    if at <= 0 or len(text) != len(blank):
        raise AssertionError("the table does not fit its place")  # under `python -O`, too
    data[at : at + len(text)] = text
    return data


def _write_file(
    schema: pa.Schema, batches: list[pa.RecordBatch], blank: bytes
) -> tuple[bytearray, list[tuple[int, int]]]:
    """The Arrow file with a blank table, and where each batch's message stands in it."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=_compression(batches[0]))
    places = []
    with pa.ipc.new_file(sink, schema, options=options, metadata={_KEY: blank}) as writer:
        for batch in batches:
            start = sink.tell()
            writer.write_batch(batch)
            places.append((start, sink.tell() - start))
    data = bytearray(sink.getvalue())
    (schema_bytes,) = struct.unpack_from("<i", data, 12)
    first = 16 + schema_bytes
    places[0] = (first, places[0][1] - first)
    return data, places


def _regroup(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Pieces of about `BATCH_EVENTS` rows: small ones are joined, their append times kept row by row."""
    held: list[Piece] = []
    rows = 0
    for piece in pieces:
        held.append(piece)
        rows += piece.chunk.batch.num_rows
        if rows >= BATCH_EVENTS:
            yield _join(held)
            held, rows = [], 0
    if held:
        yield _join(held)


def _join(held: list[Piece]) -> Piece:
    tables = [pa.Table.from_batches([_with_appended(piece.chunk)]) for piece in held]
    joined = pa.concat_tables(tables, promote_options="default").combine_chunks()
    batch = joined.to_batches()[0] if joined.num_rows else _with_appended(held[0].chunk)
    offsets, end = None, -1
    if held[0].chunk.offsets is not None:
        offsets = np.concatenate([piece.chunk.offsets for piece in held])
        end = held[-1].chunk.end_offset
    chunk = msgspec.structs.replace(held[0].chunk, batch=batch, appended=None, offsets=offsets, end=end)
    return Piece(
        chunk, held[0].running_before, held[-1].running_after, held[0].appended_before, held[-1].appended_after
    )


def _with_appended(chunk: Chunk) -> pa.RecordBatch:
    if chunk.appended is None:
        return chunk.batch
    times = np.full(chunk.batch.num_rows, chunk.appended, dtype=np.int64)
    return chunk.batch.append_column(APPENDED_FIELD, pa.array(times).cast(APPENDED_FIELD.type))


def _file_schema(schema: pa.Schema, flags: int, *, is_compacted: bool) -> pa.Schema:
    schema = physical_schema(schema, flags).append(APPENDED_FIELD)
    return schema.append(OFFSET_FIELD) if is_compacted else schema


def _complete(chunk: Chunk, schema: pa.Schema) -> pa.RecordBatch:
    batch = chunk.batch
    if "_offset" in schema.names:
        batch = batch.append_column(OFFSET_FIELD, pa.array(chunk.all_offsets()))
    columns = [
        batch.column(field.name) if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _compression(sample: pa.RecordBatch) -> str | None:
    """LZ4, unless the data is such that it saves nothing: then reading stays a matter of mapping the file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, sample.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(sample)
    return "lz4" if sink.tell() < _WORTHWHILE * sample.nbytes else None


def _entry(
    group: Piece, batch: pa.RecordBatch, place: tuple[int, int], data: bytearray, time_column: str | None
) -> SealedBatch:
    position, length = place
    time: dict[str, int | None] = {"min": None, "max": None}
    if time_column is not None:
        time = pc.min_max(batch.column(time_column).cast(pa.int64())).as_py()
    return SealedBatch(
        position=position,
        length=length,
        base_offset=group.chunk.base_offset,
        count=batch.num_rows,
        crc=crc32c(memoryview(data)[position : position + length]),
        time_min=_or_none(time["min"]),
        time_max=_or_none(time["max"]),
        running_before=group.running_before,
        running_after=group.running_after,
        appended_before=group.appended_before,
        appended_after=group.appended_after,
    )


def _or_none(time: int | None) -> int:
    return NO_TIME if time is None else time


def _table_bytes(batches: int, *, is_compacted: bool) -> int:
    return _HEADER.size + (_COMPACTED.size if is_compacted else 0) + _BATCH.size * batches + _CHECKSUM.size


def _encode_table(table: _Table) -> bytes:
    data = _HEADER.pack(_MAGIC, table.version, table.schema_id, table.flags, len(table.batches), table.base, table.end)
    if table.compacted is not None:
        data += _COMPACTED.pack(*msgspec.structs.astuple(table.compacted))
    data += b"".join(_BATCH.pack(*msgspec.structs.astuple(row)) for row in table.batches)
    return data + _CHECKSUM.pack(crc32c(data))


def _decode_table(text: bytes) -> _Table | None:
    try:
        data = base64.b64decode(text.removeprefix(_START), validate=True)
    except ValueError:
        return None
    least = _table_bytes(0, is_compacted=False)
    if len(data) < least or _CHECKSUM.pack(crc32c(data[: -_CHECKSUM.size])) != data[-_CHECKSUM.size :]:
        return None
    magic, version, schema_id, flags, count, base, end = _HEADER.unpack_from(data)
    if magic != _MAGIC or (version <= FORMAT and len(data) != _table_bytes(count, is_compacted=version == 2)):
        return None
    if version > FORMAT:
        return _Table(version, schema_id, flags, base, end, None, [])
    compacted, at = None, _HEADER.size
    if version == 2:
        compacted, at = Compacted(*_COMPACTED.unpack_from(data, at)), at + _COMPACTED.size
    batches = [SealedBatch(*_BATCH.unpack_from(data, at + number * _BATCH.size)) for number in range(count)]
    return _Table(version, schema_id, flags, base, end, compacted, batches)
