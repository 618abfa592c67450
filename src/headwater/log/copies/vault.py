"""A vault: where a backup lies. A folder of this machine, or a folder of any file system that pyarrow knows by URL.

Files are put there whole and under names that were never used before; none is ever changed. In a folder of this machine a file
has its name only once it is on disk, and closed segments of the same disk are linked instead of copied (they never change). A
folder of this machine has a lock, so that one backup at a time goes into it; elsewhere whoever makes backups has to see to that.
There, too, whoever restores a backup holds its manifest, together with others who do, and a backup removes an older manifest
and its files only when it holds that one alone. Elsewhere nothing can be held: a restore finds out that its backup was replaced, and
begins with the new one.

Thread-safety: none; it is used by one thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.fs as arrow_fs

from headwater.log.disk.atomic_file import replace_file
from headwater.log.disk.disk import Buffer, Disk, File, RealDisk, storage_error
from headwater.model.errors import Conflict, NoAccess, StorageError, Unsupported
from headwater.model.url import check_secret, said_of, without_password

PIECE_BYTES = 4 << 20

_LOCK = "lock"


class Vault(Protocol):
    """A place for the files of a backup."""

    url: str

    def names(self) -> list[str]:
        """The paths of all files in it, none where it does not exist."""

    def size(self, name: str) -> int | None:
        """A file's length, or None where there is none."""

    def pieces(self, name: str) -> Iterator[bytes]:
        """A file's bytes, in handy pieces."""

    def put(self, name: str, pieces: Iterable[Buffer]) -> None:
        """A new file; it is safe when this returns."""

    def link(self, path: str, name: str) -> bool:
        """A second name for a file of this machine's disk, if that can be."""

    def remove(self, name: str) -> None:
        """Removes a file."""

    def locked(self) -> Any:
        """A context in which no other backup goes into this vault."""

    def held(self, name: str, *, alone: bool = False) -> Any:
        """A context in which a file is held, with others or alone; it says whether the file is there and could be had."""

    def tidy(self) -> None:
        """Removes folders in which nothing is; the caller holds the lock."""


def open_vault(url: str, disk: Disk) -> Vault:
    """The vault at a path or URL; it may not exist yet."""
    if "://" not in url or url.startswith("file://"):
        return FolderVault(disk, os.path.abspath(url.removeprefix("file://")))
    check_secret(url)
    shown = without_password(url)
    try:
        system, folder = arrow_fs.FileSystem.from_uri(url)
    except (pa.ArrowException, ValueError, OSError, TypeError) as error:
        raise Unsupported(
            f"No file system was found for {shown!r}: {said_of(url, error)}.",
            advice="Use a folder, or a URL that pyarrow.fs knows, such as s3://bucket/folder.",
        ) from None
    return ArrowVault(system, folder, shown)


class FolderVault:
    """A folder of this machine."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self.url = folder
        self._disk = disk

    def names(self) -> list[str]:
        if not self._disk.exists(self.url):
            return []
        return sorted(self._walk(""))

    def size(self, name: str) -> int | None:
        try:
            file = self._disk.open(self._path(name))
        except FileNotFoundError:
            return None
        try:
            return file.size()
        finally:
            file.close()

    def pieces(self, name: str) -> Iterator[bytes]:
        return file_pieces(self._disk, self._path(name))

    def put(self, name: str, pieces: Iterable[Buffer]) -> None:
        path = self._path(name)
        make_folders(self._disk, os.path.dirname(path))
        replace_file(self._disk, path, self._with_points(pieces), point="backup: file")

    def _with_points(self, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
        for piece in pieces:
            yield piece
            self._disk.reach("backup: piece written")

    def link(self, path: str, name: str) -> bool:
        if not isinstance(self._disk, RealDisk):
            return False
        to = self._path(name)
        make_folders(self._disk, os.path.dirname(to))
        try:
            os.link(path, to)
        except FileNotFoundError:
            raise
        except OSError:
            return False
        self._disk.sync_folder(os.path.dirname(to))
        return True

    def remove(self, name: str) -> None:
        self._disk.remove(self._path(name))
        folder = os.path.dirname(self._path(name))
        while folder != self.url and not self._disk.names(folder):
            self._disk.remove_folder(folder)
            folder = os.path.dirname(folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        make_folders(self._disk, self.url)
        file = self._disk.open(self._path(_LOCK), "create")
        try:
            if not file.lock(wait=False):
                raise Conflict(f"Another backup into {self.url} is running.", advice="Wait until it has ended.")
            yield
        finally:
            file.close()

    @contextmanager
    def held(self, name: str, *, alone: bool = False) -> Iterator[bool]:
        file: File | None = None
        with suppress(FileNotFoundError):
            file = self._disk.open(self._path(name), "write" if alone else "read")
        try:
            # It may have been removed between the two.
            yield file is not None and file.lock(wait=False, shared=not alone) and self._disk.exists(self._path(name))
        finally:
            if file is not None:
                file.close()

    def tidy(self) -> None:
        for name in self._disk.names(self.url):
            self._remove_empty(self._path(name))

    def _remove_empty(self, folder: str) -> None:
        if is_folder(self._disk, folder):
            for name in self._disk.names(folder):
                self._remove_empty(f"{folder}/{name}")
            if not self._disk.names(folder):
                self._disk.remove_folder(folder)

    def _walk(self, folder: str) -> Iterator[str]:
        names: list[str] = []
        with suppress(FileNotFoundError):  # removed a moment ago
            names = self._disk.names(self._path(folder) if folder else self.url)
        for name in names:
            inside = f"{folder}/{name}" if folder else name
            if is_folder(self._disk, self._path(inside)):
                yield from self._walk(inside)
            elif inside != _LOCK:
                yield inside

    def _path(self, name: str) -> str:
        return f"{self.url}/{name}"


class ArrowVault:
    """A folder of a file system that pyarrow opens: S3, Google Cloud Storage, Azure, HDFS …"""

    def __init__(self, system: Any, folder: str, url: str) -> None:
        self.url = url
        self._system = system
        self._folder = folder.rstrip("/")

    def names(self) -> list[str]:
        selector = arrow_fs.FileSelector(self._folder, recursive=True, allow_not_found=True)
        with _told(self.url):
            found = self._system.get_file_info(selector)
        return sorted(
            info.path.removeprefix(f"{self._folder}/") for info in found if info.type == arrow_fs.FileType.File
        )

    def size(self, name: str) -> int | None:
        with _told(self.url):
            info = self._system.get_file_info(self._path(name))
        return info.size if info.type == arrow_fs.FileType.File else None

    def pieces(self, name: str) -> Iterator[bytes]:
        with _told(f"{self.url}/{name}"), self._system.open_input_stream(self._path(name)) as stream:
            while piece := stream.read(PIECE_BYTES):
                yield piece

    def put(self, name: str, pieces: Iterable[Buffer]) -> None:
        path = self._path(name)
        with _told(f"{self.url}/{name}"):
            self._system.create_dir(os.path.dirname(path), recursive=True)
            with self._system.open_output_stream(path) as stream:
                for piece in pieces:
                    stream.write(piece)

    def link(self, path: str, name: str) -> bool:
        return False

    def remove(self, name: str) -> None:
        with _told(f"{self.url}/{name}"):
            self._system.delete_file(self._path(name))

    @contextmanager
    def locked(self) -> Iterator[None]:
        yield

    @contextmanager
    def held(self, name: str, *, alone: bool = False) -> Iterator[bool]:
        yield self.size(name) is not None

    def tidy(self) -> None:
        """A bucket has no folders."""

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"


def make_folders(disk: Disk, folder: str) -> None:
    """A folder and those above it, all on disk with their names."""
    missing = []
    while not disk.exists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    if missing:
        disk.make_folder(missing[0])
        for made in missing:
            disk.sync_folder(os.path.dirname(made))


def file_pieces(disk: Disk, path: str, end: int | None = None) -> Iterator[bytes]:
    """The bytes of a file of the disk, up to `end`, in handy pieces."""
    file = disk.open(path)
    try:
        position = 0
        end = file.size() if end is None else end
        while position < end and (piece := file.read_at(position, min(PIECE_BYTES, end - position))):
            position += len(piece)
            yield piece
    finally:
        file.close()


def is_folder(disk: Disk, path: str) -> bool:
    """Whether a path that is there is a folder."""
    if isinstance(disk, RealDisk):
        return os.path.isdir(path)
    try:
        disk.names(path)
    except StorageError:
        return False
    return True


@contextmanager
def _told(where: str) -> Iterator[None]:
    """What a file system of others raises, in our words."""
    try:
        yield
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise NoAccess(f"{where}: {error}.", advice="Check the rights and the credentials.") from error
    except OSError as error:
        if error.errno:
            raise storage_error(error, where) from error
        raise StorageError(
            f"{where}: {error}.", advice="Check the address and the connection, then try again."
        ) from error
    except pa.ArrowException as error:
        raise StorageError(
            f"{where}: {error}.", advice="Check the address and the connection, then try again."
        ) from error
