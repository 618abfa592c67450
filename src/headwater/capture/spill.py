"""A spill: the events of a large transaction, placed in their partitions and kept in files until its end has come.

The log appends the transaction from the mapped files, so memory holds one part of it at a time. The files lie in a folder of the capture,
are not synced, and mean nothing to anybody else: a capture that dies reads the transaction from its source again, and whoever starts
next empties the folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from headwater.log.arrow.placement import place
from headwater.log.port.topic import Topic
from headwater.log.port.write import Write


class _Part(NamedTuple):
    topic: Topic
    partitions: list[int]
    path: Path


class Spill:
    """The events of one transaction, in order. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: list[_Part] = []

    def add(self, writes: Iterable[Write]) -> None:
        """Keeps events of one topic, already placed."""
        parts = list(writes)
        if not parts:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{len(self._parts)}.arrow"
        with pa.ipc.new_file(str(path), parts[0].batch.schema) as writer:
            for write in parts:
                writer.write_batch(write.rows())
        self._parts.append(_Part(parts[0].topic, [write.partition for write in parts], path))

    def writes(self) -> Iterator[Write]:
        """The events again; their columns are mapped, not read."""
        for part in self._parts:
            with pa.memory_map(str(part.path)) as source:
                file = pa.ipc.open_file(source)
                for number, partition in enumerate(part.partitions):
                    yield Write(part.topic, partition, file.get_batch(number))

    def __bool__(self) -> bool:
        return bool(self._parts)

    def clear(self) -> None:
        """Forgets everything; what was mapped stays readable."""
        self._parts.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def placed(topic: Topic, batch: pa.RecordBatch) -> list[Write]:
    """Events on their way to the partitions that their keys belong to."""
    groups = place(batch, topic.key, topic.partitions, sticky=0).groups()
    return [Write(topic, partition, batch, indices) for partition, indices in groups]
