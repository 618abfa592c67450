"""Heartbeats: what says of a partition to which nobody appends that event time has passed there too.

Whoever works by event time waits for the partition that is furthest behind; one that nobody writes to any more would hold up all others
for ever. A heartbeat is no event and has no offset. It says: before the event with this offset, which is yet to come, time had
reached so far. So an event that is appended behind it and is older comes too late, as if another event had been there.

The file `heartbeats` in the folder of a partition, made with the first one, begins with "HWBEAT" and a format u16; then records of 24
bytes, little-endian:

    0  offset i64    8  event time i64, in µs    16  crc32c of the first 16 bytes u32    20  zero u32

They are appended and synced by the holder of the partition's append lock, so offsets never go down; a torn or damaged record counts as
none. When the file has grown, the last of each offset is kept, and of those below the first event that is left only the greatest.
"""

from __future__ import annotations

import struct
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from headwater.log.disk.atomic_file import replace_file
from headwater.log.disk.disk import Disk, File
from headwater.log.port.lateness import Heartbeat, add_heartbeat, reached_by
from headwater.model.errors import FormatTooNew

if TYPE_CHECKING:
    from headwater.log.file.partition.partition import Partition

FILE = "heartbeats"
REWRITE_BYTES = 64 << 10

FORMAT = 1

_BEGIN = struct.Struct("<6sH")
_MAGIC = b"HWBEAT"
_PAIR = struct.Struct("<qq")
_RECORD = np.dtype([("offset", "<i8"), ("time", "<i8"), ("crc", "<u4"), ("zero", "<u4")])


def read_heartbeats(disk: Disk, folder: str) -> list[Heartbeat]:
    """Those of a partition in order, each later in time than the one before."""
    path = f"{folder}/{FILE}"
    if not disk.exists(path):
        return []
    with closing(disk.open(path)) as file:
        data = file.read_at(0, _whole(file))
    magic, known = _BEGIN.unpack_from(data) if len(data) >= _BEGIN.size else (b"", 0)
    if magic == _MAGIC and known > FORMAT:
        raise FormatTooNew(
            f"{path} was written by a newer version of Headwater.",
            advice="Upgrade Headwater in every program that uses this log.",
        )
    records = np.frombuffer(data[_BEGIN.size :], _RECORD)
    is_last = np.append(records["offset"][1:] != records["offset"][:-1], np.ones(min(len(records), 1), bool))
    last = _checked(records[is_last])
    # An empty partition may have thousands for one offset, and only the last of them counts, unless that one is damaged.
    beats = _checked(records) if None in last else last
    found: list[Heartbeat] = []
    for beat in beats:
        if beat is not None:
            add_heartbeat(found, beat)
    return found


def tell_time(disk: Disk, partition: Partition, time: int, *, appended_before: int) -> bool:
    """Event time has come so far in a partition, unless something was appended to it since; returns whether that is news."""
    with partition.appending():
        mark = partition.written()
        is_busy = mark.end > 0 and mark.appended >= appended_before
        told = reached_by(read_heartbeats(disk, partition.folder), mark.end)
        if is_busy or max(mark.running, told) >= time:
            return False
        _write(disk, partition.folder, Heartbeat(mark.end, time), first=partition.oldest())
        return True


def _write(disk: Disk, folder: str, beat: Heartbeat, *, first: int) -> None:
    path = f"{folder}/{FILE}"
    is_new = not disk.exists(path)
    with closing(disk.open(path, "create")) as file:
        end = _whole(file)
        if end < REWRITE_BYTES:
            file.write_at(0 if end == _BEGIN.size else end, [_begin() if end == _BEGIN.size else b"", _record(beat)])
            file.sync()
            disk.reach("heartbeat: written")
    if is_new:
        disk.sync_folder(folder)
    if end >= REWRITE_BYTES:
        _rewrite(disk, folder, beat, first)


def _rewrite(disk: Disk, folder: str, beat: Heartbeat, first: int) -> None:
    beats = read_heartbeats(disk, folder)
    add_heartbeat(beats, beat)
    below = [each for each in beats if each.offset <= first]
    kept = below[-1:] + beats[len(below) :]
    replace_file(disk, f"{folder}/{FILE}", [b"".join([_begin(), *map(_record, kept)])], point="heartbeat: file")


def _whole(file: File) -> int:
    """Where the last record ends that is there whole; a file that was only begun counts as begun."""
    return _BEGIN.size + max(0, file.size() - _BEGIN.size) // _RECORD.itemsize * _RECORD.itemsize


def _begin() -> bytes:
    return _BEGIN.pack(_MAGIC, FORMAT)


def _checked(records: Any) -> list[Heartbeat | None]:
    """Records of the file; None in place of one that is torn or damaged."""
    beats = [Heartbeat(*pair) for pair in zip(records["offset"].tolist(), records["time"].tolist(), strict=True)]
    return [beat if _crc(beat) == crc else None for beat, crc in zip(beats, records["crc"].tolist(), strict=True)]


def _record(beat: Heartbeat) -> bytes:
    return np.array([(beat.offset, beat.time, _crc(beat), 0)], _RECORD).tobytes()


def _crc(beat: Heartbeat) -> int:
    return crc32c(_PAIR.pack(*beat))
