"""State files: what one partition of an operator's state is kept in, a file for each version.

    <state>/<uid>/<partition>-of-<partitions>/<epoch, 12 digits>.state

    magic "HWSTATE1"; parts of runs (Arrow streams, each at a multiple of 64); footer (JSON); its length u32; its crc32c u32; the magic

The footer says whose state it is (operator, fingerprint, query), which version, where the parts of its own runs are and their checksums,
and of which runs each table consists: those in this file, and those in files of earlier versions, which stay as long as a version that
may be needed names them. A file is written under another name and renamed when it is on disk; one that exists is never changed, only
replaced, when Spark runs a batch again: by the same, or, where that was begun ahead and never written down, by what the batch became.

A folder is one of this machine, whose files are mapped (small ones read), or one of any file system that pyarrow knows by URL, from
which parts are read as they are needed. A checksum is compared when a process needs a part for the first time.
"""

from __future__ import annotations

import os
import re
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.fs as arrow_fs
from crc32c import crc32c

from headwater.log.disk.disk import RealDisk
from headwater.model.errors import Damaged, FormatTooNew, StorageError, Unreachable, Unsupported
from headwater.model.url import bare, check_secret, said_of, without_password
from headwater.processing.state.sorted_runs import Kind, RunPart, SortedRun, column, in_parts, order_of

MAGIC = b"HWSTATE1"
ENDING, DRAFT = ".state", ".new"
REBUILD = "Have it rebuilt from the log with `headwater run … --rebuild-state STAGE`, or put the folder back."
_TAIL = struct.Struct("<II8s")
_ALIGN = 64
_FILES_OPEN_MAX = 64
_MAPPED_BYTES_MIN = 256 << 10
"""Smaller files are read. Most of them are removed soon, and a mapped one is only removed by whoever lets go of it: the next batch, which
then waits for the disk."""

_PARTS_FETCHED_MAX = 32
_PASSING = re.compile(
    r"AWS Error (NETWORK_CONNECTION|REQUEST_TIMEOUT|SERVICE_UNAVAILABLE|SLOW_DOWN|THROTTLING|INTERNAL_FAILURE)\b"
)
"""What pyarrow says of an object store that may answer later."""


class RunAt(msgspec.Struct, frozen=True, array_like=True):
    """Where a run stands: in the file of which version, and how many rows it has."""

    epoch: int
    rows: int


class Section(msgspec.Struct, frozen=True, array_like=True):
    """A part's bytes in its file, and what its rows are ordered by."""

    start: int
    length: int
    crc: int
    rows: int
    first: int
    last: int


class Version(msgspec.Struct, frozen=True):
    """What a file says of its version: whose it is, and of which runs each table consists, from old to new."""

    uid: str
    fingerprint: str
    query: str
    partition: int
    partitions: int
    epoch: int
    tables: Mapping[str, Sequence[RunAt]]
    kinds: Mapping[str, Kind] = {}
    floors: Mapping[str, int] = {}
    watermark: int | None = None
    sections: Mapping[str, Sequence[Section]] = {}

    @property
    def needs(self) -> set[int]:
        """The versions whose files it needs, its own among them."""
        return {self.epoch, *(run.epoch for runs in self.tables.values() for run in runs)}


class StateFolder:
    """The folder of one partition of one operator's state."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._system, self._path = _file_system(url)
        self._is_local = isinstance(self._system, arrow_fs.LocalFileSystem)

    @property
    def shown(self) -> str:
        """The URL as it may be shown."""
        return without_password(self.url)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return bare(self.url).rpartition("/")[2]

    def epochs(self) -> list[int]:
        """The versions that are there, from old to new."""
        found = (_epoch_of(name) for name in self.names() if name.endswith(ENDING))
        return sorted(epoch for epoch in found if epoch is not None)

    def names(self, *, folders_only: bool = False) -> list[str]:
        """All files and folders in it."""
        with _told(self.url):
            if self._is_local:  # by the operating system, which also knows names that are not UTF-8
                if not os.path.exists(self._path):
                    return []
                with os.scandir(self._path) as entries:
                    return sorted(entry.name for entry in entries if not folders_only or entry.is_dir())
            found = self._system.get_file_info(arrow_fs.FileSelector(self._path, allow_not_found=True))
            return sorted(
                info.base_name for info in found if not folders_only or info.type == arrow_fs.FileType.Directory
            )

    def version(self, epoch: int) -> Version:
        """What the file of a version says."""
        return self._file(epoch).version

    def size(self, epoch: int) -> int:
        """The bytes of a version's own file."""
        return self._file(epoch).size

    def run(self, version: Version, name: str, at: RunAt) -> SortedRun:
        """A run that a version has of a table."""
        file = self._file(at.epoch)
        found = SortedRun(
            RunPart(section.first, section.last, section.rows, partial(file.part, name, section))
            for section in file.version.sections.get(name, ())
        )
        if found.num_rows != at.rows:
            raise Damaged(
                f"Version {at.epoch} of the state in {self.shown} differs from the one that version {version.epoch} was built on.",
                advice=REBUILD,
            )
        return found

    def write(self, version: Version, runs: Mapping[str, Iterable[pa.Table]]) -> None:
        """Writes a version with the runs that are new in it, piece by piece; a run without rows is none."""
        self.draft(version, runs)()

    def draft(self, version: Version, runs: Mapping[str, Iterable[pa.Table]]) -> Callable[[], None]:
        """The same up to where the disk is to be waited for; what it gives does the rest, in any thread."""
        with _told(self.url):
            self._system.create_dir(self._path, recursive=True)
            path = f"{self._path}/{_name_of(version.epoch)}"
            draft = f"{path}.{os.getpid()}-{uuid.uuid4().hex[:8]}{DRAFT}"
            with open(draft, "wb") if self._is_local else self._system.open_output_stream(draft) as stream:
                _write(stream.write, version, runs)
        return partial(self._keep, draft, path)

    def collect(self, epoch: int) -> None:
        """Removes what a batch needs no more when it has saved its version, and what was begun of earlier ones by somebody who died.

        The version before is needed, with all that it names: the batch may be run again.
        """
        names = self.names()
        there = {old: name for name in names if name.endswith(ENDING) and (old := _epoch_of(name)) is not None}
        if epoch - 1 in there:
            needed = self.version(epoch - 1).needs
            for old, name in there.items():
                if old < epoch and old not in needed:
                    self._delete(name)
        for name in names:
            begun = _epoch_of(name.partition(".")[0] + ENDING) if name.endswith(DRAFT) else None
            if begun is not None and begun < epoch:
                self._delete(name)

    def remove_all(self) -> None:
        """Removes the folder and everything in it."""
        with _told(self.url):
            try:
                self._system.delete_dir(self._path)
            except FileNotFoundError:
                pass

    def _delete(self, name: str) -> None:
        with _told(self.url):
            try:
                self._system.delete_file(f"{self._path}/{name}")
            except FileNotFoundError:
                pass

    def _keep(self, draft: str, path: str) -> None:
        """Gives a draft the name of its version when it is on disk; returns when the name is, too."""
        with _told(self.url):
            if not self._is_local:
                self._system.move(draft, path)
                return
            disk = RealDisk()
            handle = os.open(draft, os.O_RDONLY)
            try:
                os.fdatasync(handle)
            finally:
                os.close(handle)
            disk.reach("state: drafted")
            os.replace(draft, path)
            disk.sync_folder(self._path)
            disk.reach("state: saved")

    def _file(self, epoch: int) -> _File:
        path = f"{self._path}/{_name_of(epoch)}"
        with _told(self.url):
            found = self._look_at(path)
            if found is None:
                raise Damaged(f"Version {epoch} of the state in {self.shown} is missing.", advice=REBUILD)
            return _file(self.url, path, *found)

    def _look_at(self, path: str) -> tuple[int, int | None] | None:
        """The size of a file, and when it was written; None where there is none."""
        if self._is_local:
            try:
                seen = os.stat(path)
            except FileNotFoundError:
                return None
            return seen.st_size, seen.st_mtime_ns
        info = self._system.get_file_info(path)
        return (info.size, info.mtime_ns) if info.type == arrow_fs.FileType.File else None


class _File:
    """A file of a version, opened: mapped, or read by ranges."""

    def __init__(self, system: Any, path: str, size: int) -> None:
        self.path, self.size = path, size
        self._system = system
        self._whole = _whole(path, size) if system is None and size else None
        self._parts: dict[int, pa.Table] = {}
        self.version = self._footer()

    def part(self, table: str, section: Section) -> pa.Table:
        """The rows of a part. Mapped ones stay at hand, and cost nothing; of others a few do."""
        if self._system is not None:
            return _fetched(self, table, section)
        found = self._parts.get(section.start)
        if found is None:
            found = self._parts[section.start] = self.checked(table, section)
        return found

    def checked(self, table: str, section: Section) -> pa.Table:
        """The rows of a part, whose checksum is right."""
        content = self._bytes(section.start, section.length)
        if content.size != section.length or crc32c(content) != section.crc:
            raise _damaged(self.path, f"the rows of table {table!r} do not match their checksum")
        return pa.ipc.open_stream(content).read_all()

    def _bytes(self, start: int, length: int) -> pa.Buffer:
        if self._whole is not None:
            return self._whole.slice(start, length)
        with _told(self.path), self._system.open_input_file(self.path) as file:
            return file.read_buffer(length) if file.seek(start) >= 0 else pa.py_buffer(b"")

    def _footer(self) -> Version:
        if self.size < len(MAGIC) + _TAIL.size:
            raise _damaged(self.path, "it is too short")
        length, crc, magic = _TAIL.unpack(self._bytes(self.size - _TAIL.size, _TAIL.size).to_pybytes())
        start = self.size - _TAIL.size - length
        if magic != MAGIC and self._bytes(0, len(MAGIC)).to_pybytes() == magic:
            raise FormatTooNew(
                f"State file {self.path} was written by a newer Headwater.", advice="Run the version that wrote it."
            )
        if magic != MAGIC or start < len(MAGIC):
            raise _damaged(self.path, "its end is not that of a state file")
        footer = self._bytes(start, length)
        if crc32c(footer) != crc:
            raise _damaged(self.path, "its footer does not match its checksum")
        return msgspec.json.decode(footer, type=Version)


def _whole(path: str, size: int) -> pa.Buffer:
    if size > _MAPPED_BYTES_MIN:
        return pa.memory_map(path).read_buffer()
    with open(path, "rb") as file:
        return pa.py_buffer(file.read())


@lru_cache(maxsize=_FILES_OPEN_MAX)
def _file(folder: str, path: str, size: int, mtime: int | None) -> _File:
    """The size and the time tell whether a file is still the one that was seen before."""
    system, _ = _file_system(folder)
    return _File(None if isinstance(system, arrow_fs.LocalFileSystem) else system, path, size)


@lru_cache(maxsize=_PARTS_FETCHED_MAX)
def _fetched(file: _File, table: str, section: Section) -> pa.Table:
    return file.checked(table, section)


def _write(write: Any, version: Version, runs: Mapping[str, Iterable[pa.Table]]) -> None:
    write(MAGIC)
    position = len(MAGIC)
    tables = {name: list(held) for name, held in version.tables.items()}
    sections: dict[str, list[Section]] = {}
    for name, pieces in runs.items():
        kind, found = version.kinds[name], list[Section]()
        for rows in in_parts(pieces, kind):
            padding, content, order = -position % _ALIGN, _serialised(rows), column(rows, order_of(kind))
            write(bytes(padding))
            write(content)
            start, position = position + padding, position + padding + content.size
            found.append(Section(start, content.size, crc32c(content), rows.num_rows, int(order[0]), int(order[-1])))
        if found:
            sections[name] = found
            tables[name].append(RunAt(version.epoch, sum(section.rows for section in found)))
    footer = msgspec.json.encode(msgspec.structs.replace(version, tables=tables, sections=sections))
    write(footer)
    write(_TAIL.pack(len(footer), crc32c(footer), MAGIC))


def _serialised(rows: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows.combine_chunks())
    return sink.getvalue()


def _name_of(epoch: int) -> str:
    return f"{epoch:012d}{ENDING}"


def _epoch_of(name: str) -> int | None:
    digits = name.removesuffix(ENDING)
    return int(digits) if digits.isdigit() else None


@lru_cache(maxsize=64)
def _file_system(url: str) -> tuple[Any, str]:
    if "://" not in url:
        return arrow_fs.LocalFileSystem(), os.path.abspath(url)
    check_secret(url)
    try:
        return arrow_fs.FileSystem.from_uri(url)
    except (pa.ArrowException, ValueError, OSError, TypeError) as error:
        raise Unsupported(
            f"No file system is known for {without_password(url)!r}: {said_of(url, error)}.",
            advice="Use a folder, or a URL that pyarrow.fs knows, such as s3://bucket/folder.",
        ) from None


def _damaged(path: str, what: str) -> Damaged:
    return Damaged(f"State file {path} is damaged: {what}.", advice=REBUILD)


@contextmanager
def _told(url: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        where = without_password(url)
        if _PASSING.search(str(error)):
            raise Unreachable(
                f"The state in {where} cannot be reached: {error}.",
                advice="Check its address, and whether its server runs.",
            ) from error
        raise StorageError(
            f"The state in {where} cannot be used: {error}.", advice="Check the folder, its rights and its disk."
        ) from error
