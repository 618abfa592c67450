"""The archive: segments that retention gives up, kept as Parquet wherever `pyarrow.fs` reaches, and still read by offset.

    <archive>/<topic>.<topic id>/<partition>/<base, 20 digits>-<end, 20 digits>.parquet
    <archive>/<topic>.<topic id>/<partition>/manifest.json

A file has the topic's columns, `_headers` and `_deleted` where any event has them, `_appended` and `_offset`, in row groups of
64 k rows, with Parquet's own checksums of its pages. The manifest lists the files that count, in order, each with its offsets,
the greatest append and event times up to its end, and the crc32c of Parquet's footer, which has no checksum of its own. It is
JSON with a format number and the crc32c of that list, replaced as a whole after the file it names is there.

A segment is archived before the partition's head gives it up, under the `seal` lock. A process killed in between leaves a file that
the next one writes again, or one that stands in both places and is read from the partition. On a local disk file and manifest are
synced; other file systems are trusted to keep what they took.

Parquet and file systems are loaded where they are used: most logs have no archive.

Thread-safety: an archive may be used by many threads; one at a time adds to a partition.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from crc32c import crc32c

from headwater.log.disk.disk import RealDisk
from headwater.log.file.segments.sealed_segment import APPENDED_FIELD, BATCH_EVENTS, OFFSET_FIELD, Piece
from headwater.log.port.chunk import Chunk
from headwater.log.port.topic import Topic
from headwater.log.port.write import flags_of, physical_schema
from headwater.model.clock import NO_TIME
from headwater.model.errors import Damaged, FormatTooNew, InvalidInput, StorageError
from headwater.model.schema import project
from headwater.model.url import check_secret, said_of, without_password

FORMAT = 1

_MANIFEST = "manifest.json"
_NAME = re.compile(r"(\d{20})-(\d{20})\.parquet")
_EVER_US = 1 << 62
_RESTORE = "Restore this file of the archive from a copy."
_LIST_AGAIN = "Run `headwater doctor --repair`: it is written anew from the files of the archive."


class Archived(msgspec.Struct, frozen=True):
    """One file of the manifest: the offsets it stands for, and the times reached at its end."""

    name: str
    base: int
    end: int
    events: int
    running_after: int
    appended_after: int
    footer_crc: int


class _Manifest(msgspec.Struct, frozen=True):
    """The manifest as it is written; one without a checksum is from before there was one."""

    files: list[Archived]
    crc: int
    format: int = FORMAT


class Archive:
    """The archive of one topic."""

    def __init__(self, topic: Topic) -> None:
        assert topic.archive is not None
        self._files, root = open_file_system(topic.archive)
        self._folder = f"{root.rstrip('/')}/{topic.name}.{topic.id}"
        self._manifests: dict[int, list[Archived]] = {}

    def end(self, partition: int) -> int:
        """The offset behind the last that is archived; 0 where nothing is."""
        entries = self._manifest(partition, at_least=1 << 62)
        return entries[-1].end if entries else 0

    def add(self, partition: int, pieces: list[Piece], *, topic: Topic, end: int) -> None:
        """Archives the events of a segment that ends before an offset; one that is archived already is not again."""
        base, last = pieces[0].chunk.base_offset, pieces[-1]
        name = f"{base:020d}-{end:020d}.parquet"
        known = [entry for entry in self._manifest(partition, at_least=1 << 62) if entry.end <= base]
        with self._translated(name):
            self._files.create_dir(f"{self._folder}/{partition}", recursive=True)
            path = f"{self._folder}/{partition}/{name}"
            events = self._write_events(path, pieces, topic)
            with self._files.open_input_file(path) as file:
                footer_crc = _footer_crc(file)
            entry = Archived(name, base, end, events, last.running_after, last.appended_after, footer_crc)
            self.write_manifest(partition, [*known, entry])

    def open(self, partition: int, offset: int) -> ArchivedSegment:
        """The file that holds an offset."""
        running = NO_TIME
        for entry in self._manifest(partition, at_least=offset + 1):
            if entry.base <= offset < entry.end:
                return self.open_entry(partition, entry, running=running)
            running = entry.running_after
        raise Damaged(
            f"The archive {self._folder} does not hold event {offset} of partition {partition}.",
            advice="Restore it, or read from a later offset.",
        )

    def open_entry(self, partition: int, entry: Archived, *, running: int = NO_TIME) -> ArchivedSegment:
        """One file of the manifest; `running` is the greatest event time before it."""
        path = f"{self._folder}/{partition}/{entry.name}"
        with self._translated(path):
            return ArchivedSegment(path, entry, self._files.open_input_file(path), running)

    def entries(self, partition: int) -> list[Archived]:
        """All files of a partition, in order."""
        return self._manifest(partition, at_least=1 << 62)

    def manifest_path(self, partition: int) -> str:
        """Where the list of a partition's files stands."""
        return f"{self._folder}/{partition}/{_MANIFEST}"

    def found(self, partition: int, *, topic: Topic) -> list[Archived]:
        """What a manifest would list of the files that are there; `Damaged` unless all are whole and follow each other."""
        from pyarrow.fs import FileSelector

        with self._translated(self._folder):
            names = [info.base_name for info in self._files.get_file_info(FileSelector(f"{self._folder}/{partition}"))]
        entries: list[Archived] = []
        for found in sorted(filter(None, map(_NAME.fullmatch, names)), key=lambda found: found[0]):
            path = f"{self._folder}/{partition}/{found[0]}"
            with self._translated(path), self._files.open_input_file(path) as file:
                crc = _footer_crc(file)
            entry = Archived(found[0], int(found[1]), int(found[2]), 0, _EVER_US, _EVER_US, crc)
            if entries and entries[-1].end != entry.base:
                raise Damaged(f"{path} does not begin where the file before it ends.", advice="Restore the manifest.")
            events = self.check(partition, entry, topic=topic)
            entries.append(msgspec.structs.replace(entry, events=events))
        return entries

    def check(self, partition: int, entry: Archived, *, topic: Topic) -> int:
        """Reads every byte of a file; how many events it holds. `Damaged` where it is not what its name says."""
        segment, events, last, place = self.open_entry(partition, entry), 0, entry.base - 1, 0
        try:
            while found := segment.read(place, topic=topic, partition=partition):
                chunk, place = found
                offsets = chunk.all_offsets()
                if len(offsets) and (offsets[0] <= last or offsets[-1] >= entry.end or (np.diff(offsets) <= 0).any()):
                    raise Damaged(f"{segment.path} holds offsets that are not its own.", advice=_RESTORE)
                last = int(offsets[-1]) if len(offsets) else last
                events += len(offsets)
        finally:
            segment.close()
        return events

    def _write_events(self, path: str, pieces: list[Piece], topic: Topic) -> int:
        flags = 0
        for piece in pieces:
            flags |= flags_of(piece.chunk.batch)
        schema = physical_schema(topic.schema, flags).append(APPENDED_FIELD).append(OFFSET_FIELD)
        count = 0
        import pyarrow.parquet as pq

        with (
            self._files.open_output_stream(f"{path}.new") as stream,
            pq.ParquetWriter(stream, schema, compression="zstd", write_page_checksum=True) as writer,
        ):
            waiting: list[pa.RecordBatch] = []
            for piece in pieces:
                waiting.append(_complete(piece.chunk, schema))
                count += piece.chunk.batch.num_rows
                if sum(batch.num_rows for batch in waiting) >= BATCH_EVENTS:
                    writer.write_table(pa.Table.from_batches(waiting, schema), row_group_size=BATCH_EVENTS)
                    waiting = []
            if waiting:
                writer.write_table(pa.Table.from_batches(waiting, schema), row_group_size=BATCH_EVENTS)
        self._put(f"{path}.new", path)
        return count

    def write_manifest(self, partition: int, entries: list[Archived]) -> None:
        """Replaces the list of a partition's files."""
        path = f"{self._folder}/{partition}/{_MANIFEST}"
        with self._files.open_output_stream(f"{path}.new") as stream:
            crc = crc32c(msgspec.json.encode(entries))
            stream.write(msgspec.json.format(msgspec.json.encode(_Manifest(entries, crc))))
        self._put(f"{path}.new", path)
        self._manifests[partition] = entries

    def _put(self, path: str, to: str) -> None:
        """Gives a whole file its name; on a local disk both are synced."""
        is_local = self._files.type_name == "local"
        if is_local:
            file = RealDisk().open(path, "write")
            try:
                file.sync()
            finally:
                file.close()
        self._files.move(path, to)
        if is_local:
            RealDisk().sync_folder(to.rpartition("/")[0])

    def _manifest(self, partition: int, *, at_least: int) -> list[Archived]:
        """The files of a partition, read again unless they are known to reach an offset."""
        known = self._manifests.get(partition, [])
        if known and known[-1].end >= at_least:
            return known
        path = f"{self._folder}/{partition}/{_MANIFEST}"
        with self._translated(path):
            if not self._files.get_file_info(path).is_file:
                return []
            with self._files.open_input_stream(path) as stream:
                raw = stream.read()
        entries = _decoded(raw, path)
        self._manifests[partition] = entries
        return entries

    @contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException, msgspec.MsgspecError) as error:
            raise StorageError(
                f"The archive cannot be used: {path}: {error}",
                advice="Check the archive's URL and rights; nothing is removed from the log until it is archived.",
            ) from error


class ArchivedSegment:
    """One file of the archive opened for reading."""

    def __init__(self, path: str, entry: Archived, source: Any, running: int) -> None:
        self.path = path
        self.base = entry.base
        self.end_offset = entry.end
        import pyarrow.parquet as pq

        if _footer_crc(source) != entry.footer_crc:
            source.close()
            raise self._damaged("the checksum of its footer is wrong")
        self._file = pq.ParquetFile(source, page_checksum_verification=True)
        self._groups = self._file.num_row_groups
        self.running = running

    def find(self, offset: int) -> int:
        """The row group that holds an offset, or comes after it."""
        for number in range(self._groups):
            statistics = self._file.metadata.row_group(number).column(self._file.metadata.num_columns - 1).statistics
            if statistics is None or not statistics.has_min_max or statistics.max >= offset:
                return number
        return max(0, self._groups - 1)

    def read(self, number: int, *, topic: Topic, partition: int) -> tuple[Chunk, int] | None:
        """One row group as a chunk, and the number of the next; None behind the last."""
        if number > 0 and number >= self._groups:
            return None
        try:
            table = self._file.read_row_group(number) if self._groups else self._file.schema_arrow.empty_table()
        except (OSError, pa.ArrowException) as error:
            raise self._damaged(str(error)) from error
        batch = (
            pa.concat_batches(table.to_batches()) if table.num_rows else pa.RecordBatch.from_pylist([], table.schema)
        )
        offsets = batch.column("_offset").to_numpy()
        batch = batch.drop_columns(["_offset"])
        batch = project(batch, physical_schema(topic.schema, flags_of(batch)).append(APPENDED_FIELD))
        start = self.base if number == 0 else int(offsets[0])
        end = self.end_offset if number + 1 >= self._groups else self._first_of(number + 1)
        return Chunk(topic, partition, start, batch, None, offsets, end), number + 1

    def close(self) -> None:
        """Closes the file; chunks already read stay valid."""
        self._file.close(force=True)

    def _first_of(self, number: int) -> int:
        try:
            return int(self._file.read_row_group(number, columns=["_offset"]).column(0)[0].as_py())
        except (OSError, pa.ArrowException) as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, why: str) -> Damaged:
        return Damaged(f"{self.path} is damaged ({why}).", advice=_RESTORE)


def _decoded(raw: bytes, path: str) -> list[Archived]:
    try:
        manifest = msgspec.json.decode(raw, type=_Manifest | list[Archived])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged(f"{path} is damaged ({error}).", advice=_LIST_AGAIN) from error
    if isinstance(manifest, list):
        return manifest
    if manifest.format > FORMAT:
        raise FormatTooNew(
            f"{path} has format {manifest.format}; this Headwater reads up to {FORMAT}.", advice="Upgrade Headwater."
        )
    if manifest.crc != crc32c(msgspec.json.encode(manifest.files)):
        raise Damaged(f"{path} is damaged: its checksum is wrong.", advice=_LIST_AGAIN)
    return manifest.files


def _footer_crc(file: Any) -> int:
    """The checksum of what stands behind the last page; of everything where its length makes no sense."""
    size = file.size()
    length = 8 + int.from_bytes(file.read_at(4, max(0, size - 8)), "little")
    length = length if length <= size else size
    return crc32c(file.read_at(length, size - length))


def check_archive(topic: Topic) -> None:
    """Refuses a topic whose archive cannot be a place."""
    if topic.archive is not None:
        open_file_system(topic.archive)


def open_file_system(url: str) -> tuple[Any, str]:
    """The file system and the path in it that a URL names."""
    import pyarrow.fs as fs

    check_secret(url)
    try:
        found: tuple[Any, str] = fs.FileSystem.from_uri(url)
    except (pa.ArrowException, OSError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"archive={without_password(url)!r} does not name a place: {said_of(url, error)}.",
            advice="Use a URL such as file:///backup/log or s3://bucket/log.",
        ) from None
    return found


def _complete(chunk: Chunk, schema: pa.Schema) -> pa.RecordBatch:
    batch = chunk.batch.append_column(OFFSET_FIELD, pa.array(chunk.all_offsets()))
    if chunk.appended is not None:
        times = pa.array(np.full(batch.num_rows, chunk.appended, dtype=np.int64)).cast(APPENDED_FIELD.type)
        batch = batch.append_column(APPENDED_FIELD, times)
    columns = [
        batch.column(field.name) if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
