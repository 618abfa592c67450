"""An index: where the frames of a closed segment stand, by offset and by time.

Format of `<base offset>.index`: magic "HWINDX", format u16, entries u64, crc32c u32 of the entries, then 48 bytes an
entry (offset, end offset, position, end position, greatest event time so far, append time; i64 each).

An index is never trusted beyond its checksum and can be deleted at any time: it is built again from the frames.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from crc32c import crc32c

from headwater.log.disk.atomic_file import replace_file
from headwater.log.disk.disk import Disk
from headwater.log.file.segments.frame import Frame

FORMAT = 1

_MAGIC = b"HWINDX"
_HEADER = struct.Struct("<6sHQI")
_ENTRY = np.dtype([(name, "<i8") for name in ("offset", "end_offset", "position", "end", "running", "appended")])


class Index:
    """The frames of one segment, in order."""

    def __init__(self, entries: Any) -> None:
        self.entries = entries

    @property
    def end(self) -> int:
        """The position behind the last frame."""
        return int(self.entries["end"][-1]) if len(self.entries) else 0

    @property
    def end_offset(self) -> int:
        """The offset behind the last frame's events."""
        return int(self.entries["end_offset"][-1]) if len(self.entries) else 0

    def with_more(self, more: Index) -> Index:
        """This one and the frames right behind it."""
        return Index(np.concatenate([self.entries, more.entries])) if len(more.entries) else self

    def find(self, offset: int) -> int:
        """The position of the frame that holds the offset, or the end position."""
        place = int(np.searchsorted(self.entries["offset"], offset, side="right")) - 1
        return int(self.entries["position"][max(place, 0)]) if len(self.entries) else 0

    def position_at(self, time: int, *, by: str) -> int | None:
        """The position of the first frame that reaches a time, or None; `by` is "running" or "appended"."""
        place = int(np.searchsorted(self.entries[by], time, side="left"))
        return int(self.entries["position"][place]) if place < len(self.entries) else None


def build_index(found: Iterable[tuple[int, Frame]]) -> Index:
    """An index of the frames a scan has found."""
    rows = [
        (frame.base_offset, frame.end_offset, position, position + frame.stride, frame.running_after, frame.appended)
        for position, frame in found
    ]
    return Index(np.array(rows, dtype=_ENTRY))


def save_index(disk: Disk, path: str, index: Index) -> None:
    """Puts the index at its path; one that a power loss has torn is built again."""
    data = index.entries.tobytes()
    head = _HEADER.pack(_MAGIC, FORMAT, len(index.entries), crc32c(data))
    replace_file(disk, path, [head, data], sync=False, sync_folder=False)


def load_index(disk: Disk, path: str) -> Index | None:
    """The saved index, or None where there is none that can be believed."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        raw = file.read_at(0, file.size())
    finally:
        file.close()
    if len(raw) < _HEADER.size:
        return None
    magic, version, count, crc = _HEADER.unpack_from(raw)
    data = raw[_HEADER.size :]
    if magic != _MAGIC or version != FORMAT or len(data) != count * _ENTRY.itemsize or crc32c(data) != crc:
        return None
    return Index(np.frombuffer(data, dtype=_ENTRY))
