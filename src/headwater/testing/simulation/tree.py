"""The names of a simulated disk: folders, what they show now, and what they hold on the platter.

Every change of names (create, make a folder, rename, remove) is one operation over one or two entries. It is pending until
one of its folders is synced. A power loss keeps any subset of the pending operations, each one whole (a rename is atomic),
but never an operation without those before it that changed the same entry. Syncing a file does not sync its name.

Not thread-safe: the disk's mutex is held around every call.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from headwater.testing.simulation.file import Inode

OPERATIONS_MAX = 1024


class Folder:
    """The entries of one folder: as every process sees them, and as they are on the platter."""

    def __init__(self) -> None:
        self.entries: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}


Node: TypeAlias = Inode | Folder


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """One name in one folder and what it means after an operation; `None` when it is gone."""

    folder: Folder
    name: str
    node: Node | None

    def place(self) -> tuple[int, str]:
        """What two operations on the same entry share."""
        return id(self.folder), self.name


class Tree:
    """All names of one simulated disk. Paths are absolute; `/` is always there."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._root = Folder()
        self._pending: list[tuple[FolderEntry, ...]] = []

    def find(self, path: str) -> Node | None:
        """The file or folder of that name; `NotADirectoryError` when the way to it leads through a file."""
        node: Node | None = self._root
        for name in _names(path):
            if isinstance(node, Inode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            node = node.entries.get(name) if node is not None else None
        return node

    def locate(self, path: str) -> tuple[Folder, str]:
        """The folder that holds the path's last name."""
        *parents, name = _names(path)
        folder = self.find("/".join(parents))
        if not isinstance(folder, Folder):
            code = errno.ENOENT if folder is None else errno.ENOTDIR
            raise OSError(code, os.strerror(code), path)
        return folder, name

    def make_folders(self, path: str) -> None:
        """Makes the folder and those above it where they are missing."""
        folder = self._root
        names = list(_names(path))
        for place, name in enumerate(names):
            node = folder.entries.get(name)
            if node is None:
                node = Folder()
                self.change(FolderEntry(folder, name, node))
            if not isinstance(node, Folder):
                code = errno.EEXIST if place == len(names) - 1 else errno.ENOTDIR
                raise OSError(code, os.strerror(code), path)
            folder = node

    def rename(self, path: str, to: str) -> None:
        """Moves a file or a folder in one operation."""
        source, name = self.locate(path)
        target, new_name = self.locate(to)
        node, replaced = source.entries.get(name), target.entries.get(new_name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if node is replaced:
            return
        if replaced is not None and isinstance(node, Folder) != isinstance(replaced, Folder):
            code = errno.EISDIR if isinstance(replaced, Folder) else errno.ENOTDIR
            raise OSError(code, os.strerror(code), to)
        if isinstance(replaced, Folder) and replaced.entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), to)
        self.change(FolderEntry(source, name, None), FolderEntry(target, new_name, node))

    def removals(self, path: str) -> list[FolderEntry]:
        """The operations that remove a file or a folder with all that is in it, in the order in which they can happen."""
        folder, name = self.locate(path)
        node = folder.entries.get(name)
        inner = [
            entry
            for child in (node.entries if isinstance(node, Folder) else ())
            for entry in self.removals(f"{path}/{child}")
        ]
        return [*inner, FolderEntry(folder, name, None)] if node is not None else []

    def change(self, *entries: FolderEntry) -> None:
        """One operation: seen at once by every process, and pending for the platter."""
        _apply(entries, durable=False)
        self._pending.append(entries)
        if len(self._pending) > OPERATIONS_MAX:
            self._write_back(OPERATIONS_MAX // 2)

    def sync(self, folder: Folder) -> None:
        """The folder's operations reach the platter, with those before them that they stand on."""
        needed: set[tuple[int, str]] = set()
        synced: list[tuple[FolderEntry, ...]] = []
        left: list[tuple[FolderEntry, ...]] = []
        for operation in reversed(self._pending):
            places = {entry.place() for entry in operation}
            if places & needed or any(entry.folder is folder for entry in operation):
                needed |= places
                synced.append(operation)
            else:
                left.append(operation)
        for operation in reversed(synced):
            _apply(operation, durable=True)
        self._pending = left[::-1]

    def sync_all(self) -> None:
        """Every operation reaches the platter."""
        self._write_back(len(self._pending))

    def lose_power(self) -> None:
        """Any subset of the pending operations survives, as far as the names they stand on do; then all files lose power."""
        lost: set[tuple[int, str]] = set()
        chance = self._random.choice((0.0, 0.5, 1.0))
        for operation in self._pending:
            places = {entry.place() for entry in operation}
            if self._random.random() < chance and not places & lost:
                _apply(operation, durable=True)
            else:
                lost |= places
        self._pending.clear()
        self._restart(self._root)
        for _, inode in self.files():
            inode.lose_power()

    def files(self) -> Iterator[tuple[str, Inode]]:
        """Every file that has a name, with its path."""
        folders: list[tuple[str, Folder]] = [("", self._root)]
        for path, folder in folders:
            for name, node in folder.entries.items():
                if isinstance(node, Folder):
                    folders.append((f"{path}/{name}", node))
                else:
                    yield f"{path}/{name}", node

    def _write_back(self, count: int) -> None:
        for operation in self._pending[:count]:
            _apply(operation, durable=True)
        del self._pending[:count]

    def _restart(self, folder: Folder) -> None:
        folder.entries = dict(folder.durable)
        for node in folder.entries.values():
            if isinstance(node, Folder):
                self._restart(node)


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


def _apply(operation: tuple[FolderEntry, ...], *, durable: bool) -> None:
    for entry in operation:
        entries = entry.folder.durable if durable else entry.folder.entries
        if entry.node is None:
            entries.pop(entry.name, None)
        else:
            entries[entry.name] = entry.node
