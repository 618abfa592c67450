"""Skips: the events that a stage leaves out, because each of them failed by itself (see `poison`).

<state>/skipped/<stage>.json    {"<topic>": [[<partition>, <offset>], …]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from headwater.log.disk.atomic_file import read_file, replace_file
from headwater.log.disk.disk import Disk, RealDisk
from headwater.processing.checkpoint.offsets import At


class Skips:
    """The events that a stage leaves out."""

    def __init__(self, path: Path, *, disk: Disk | None = None) -> None:
        self._path = str(path)
        self._disk: Disk = disk or RealDisk()
        self._found: dict[str, list[tuple[int, int]]] = {}
        with suppress(FileNotFoundError):
            read = json.loads(read_file(self._disk, self._path))
            self._found = {
                topic: [(partition, offset) for partition, offset in places] for topic, places in read.items()
            }

    def condition(self, topic: str) -> str | None:
        """What the source is to keep of a topic, in SQL."""
        places = self._found.get(topic)
        if not places:
            return None
        return " AND ".join(f"NOT (_partition = {partition} AND _offset = {offset})" for partition, offset in places)

    def add(self, events: Iterable[tuple[At, int]]) -> None:
        """Remembers single events, whole or not at all; when it returns, on the disk."""
        for (topic, partition), offset in events:
            self._found.setdefault(topic, []).append((partition, offset))
        folder = self._path.rpartition("/")[0]
        self._disk.make_folder(folder)
        self._disk.sync_folder(folder.rpartition("/")[0])
        replace_file(self._disk, self._path, [json.dumps(self._found).encode()], point="skips:")
