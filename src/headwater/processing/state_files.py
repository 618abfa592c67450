"""State files: what one partition of an operator's state is kept in, a file for each version.

    <state>/<uid>/<partition>-of-<partitions>/<epoch, 12 digits>.state

    magic "HWSTATE1"; runs of rows (Arrow streams, each at a multiple of 64); footer (JSON); its length u32; its crc32c u32; the magic again

The footer says whose state it is (operator, fingerprint, query), which version, and of which runs each table consists: those in this
file, and those in files of earlier versions, which stay as long as a version that may be needed names them. A file is written under
another name and renamed when it is on disk; one that exists is never changed, only replaced by the same, when Spark runs a batch again.

A folder is one of this machine, whose files are mapped, or one of any file system that pyarrow knows by URL, from which files are read
whole. Checksums are compared when a process sees a file for the first time.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.fs as arrow_fs
from crc32c import crc32c

from headwater.model.errors import Damaged, StorageError, Unsupported

MAGIC = b"HWSTATE1"
ENDING = ".state"
_TAIL = struct.Struct("<II8s")
_ALIGN = 64
_FILES_OPEN_MAX = 512


class RunAt(msgspec.Struct, frozen=True, array_like=True):
    """Where a run stands: in the file of which version, and how many rows it has."""

    epoch: int
    rows: int


class Section(msgspec.Struct, frozen=True, array_like=True):
    """A run's bytes in its file."""

    start: int
    length: int
    crc: int


class Version(msgspec.Struct, frozen=True):
    """What a file says of its version: whose it is, and of which runs each table consists, from old to new."""

    uid: str
    fingerprint: str
    query: str
    partition: int
    partitions: int
    epoch: int
    tables: Mapping[str, Sequence[RunAt]]
    floors: Mapping[str, int] = {}
    sections: Mapping[str, Section] = {}

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

    def epochs(self) -> list[int]:
        """The versions that are there, from old to new."""
        return sorted(int(name.removesuffix(ENDING)) for name in self.names() if _is_version(name))

    def names(self) -> list[str]:
        """All files and folders in it."""
        with _told(self.url):
            selector = arrow_fs.FileSelector(self._path, allow_not_found=True)
            return sorted(info.base_name for info in self._system.get_file_info(selector))

    def version(self, epoch: int) -> Version:
        """What the file of a version says."""
        return self._file(epoch)[0]

    def rows(self, name: str, epoch: int) -> pa.Table:
        """The run of a table that stands in the file of a version."""
        version, content = self._file(epoch)
        section = version.sections[name]
        return pa.ipc.open_stream(content.slice(section.start, section.length)).read_all()

    def write(self, version: Version, runs: Mapping[str, pa.Table]) -> None:
        """Writes a version with the runs that are new in it."""
        pieces, sections = [MAGIC], {}
        position = len(MAGIC)
        for name, rows in runs.items():
            padding = -position % _ALIGN
            content = _serialised(rows)
            sections[name] = Section(position + padding, content.size, crc32c(content))
            pieces += [bytes(padding), content]
            position += padding + content.size
        footer = msgspec.json.encode(msgspec.structs.replace(version, sections=sections))
        pieces += [footer, _TAIL.pack(len(footer), crc32c(footer), MAGIC)]
        with _told(self.url):
            self._put(_name_of(version.epoch), pieces)

    def remove(self, epoch: int) -> None:
        """Removes the file of a version, if it is there."""
        with _told(self.url):
            try:
                self._system.delete_file(f"{self._path}/{_name_of(epoch)}")
            except FileNotFoundError:
                pass

    def _put(self, name: str, pieces: Sequence[Any]) -> None:
        path = f"{self._path}/{name}"
        self._system.create_dir(self._path, recursive=True)
        if not self._is_local:  # a file of an object store is there when it is whole
            with self._system.open_output_stream(path) as stream:
                for piece in pieces:
                    stream.write(piece)
            return
        draft = f"{path}.{os.getpid()}.new"
        with open(draft, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fdatasync(file.fileno())
        os.replace(draft, path)
        folder = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _file(self, epoch: int) -> tuple[Version, pa.Buffer]:
        path = f"{self._path}/{_name_of(epoch)}"
        with _told(self.url):
            info = self._system.get_file_info(path)
            if info.type != arrow_fs.FileType.File:
                raise Damaged(
                    f"Version {epoch} of the state in {self.url} is missing.",
                    advice="Restore the folder, or remove the operator's state to have it rebuilt from the log.",
                )
            return _read(self._system if not self._is_local else None, path, info.size, info.mtime_ns)


def _name_of(epoch: int) -> str:
    return f"{epoch:012d}{ENDING}"


def _is_version(name: str) -> bool:
    return name.endswith(ENDING) and name.removesuffix(ENDING).isdigit()


def _serialised(rows: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows.combine_chunks())
    return sink.getvalue()


@lru_cache(maxsize=_FILES_OPEN_MAX)
def _read(system: Any, path: str, size: int, mtime: int) -> tuple[Version, pa.Buffer]:
    """A file, checked; the size and the time tell whether it is still the one that was seen before."""
    if system is None:
        content = pa.memory_map(path).read_buffer()
    else:
        with system.open_input_file(path) as file:
            content = file.read_buffer()
    if content.size < len(MAGIC) + _TAIL.size:
        raise _damaged(path, "it is too short")
    length, crc, magic = _TAIL.unpack(content.slice(content.size - _TAIL.size).to_pybytes())
    start = content.size - _TAIL.size - length
    if magic != MAGIC or start < len(MAGIC):
        raise _damaged(path, "its end is not that of a state file")
    footer = content.slice(start, length)
    if crc32c(footer) != crc:
        raise _damaged(path, "its footer does not match its checksum")
    version = msgspec.json.decode(footer, type=Version)
    for name, section in version.sections.items():
        if crc32c(content.slice(section.start, section.length)) != section.crc:
            raise _damaged(path, f"the rows of table {name!r} do not match their checksum")
    return version, content


@lru_cache(maxsize=64)
def _file_system(url: str) -> tuple[Any, str]:
    if "://" not in url:
        return arrow_fs.LocalFileSystem(), os.path.abspath(url)
    try:
        return arrow_fs.FileSystem.from_uri(url)
    except (pa.ArrowException, ValueError, OSError, TypeError) as error:
        raise Unsupported(
            f"There is no file system for {url!r}: {str(error).splitlines()[0]}.",
            advice="Use a folder, or a URL that pyarrow.fs knows, such as s3://bucket/folder.",
        ) from None


def _damaged(path: str, what: str) -> Damaged:
    return Damaged(
        f"State file {path} is damaged: {what}.",
        advice="Restore it, or remove the operator's state to have it rebuilt from the log.",
    )


@contextmanager
def _told(where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise StorageError(
            f"The state in {where} cannot be used: {error}.", advice="Check the folder, its rights and its disk."
        ) from error
