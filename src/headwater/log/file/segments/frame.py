"""A frame: one batch of events as it stands in an active segment.

Format (little-endian; the 128-byte header is followed by the payload, then zeros up to the next multiple of 64):

    0  magic "HWF1"        4  flags u32             8  payload bytes u64    16  base offset i64
   24  events u32         28  schema id u32        32  time min i64         40  time max i64
   48  running before i64 56  running after i64    64  appended i64         72  producer id 16 bytes
   88  producer epoch u32 92  chain u32            96  sequence first i64  104  sequence last i64
  112  transaction u64   120  payload crc32c u32  124  header crc32c u32

The payload is one Arrow IPC message (a record batch without its schema; the topic keeps the schemas by id). Times are
microseconds since 1970; `NO_TIME` where there is none.

Invariants, checked when a frame is read:
- both checksums hold, and `chain` equals the header checksum of the frame before it. A complete frame left behind a
  shorter one by a writer that died therefore never looks like a continuation, wherever it happens to start;
- base offsets are dense: a frame starts where the one before it ended;
- `running before`/`running after` is the maximum event time of the partition before and after this frame. It is
  written, not derived, so whether an event is late never depends on how readers cut their batches.

The flags say which optional columns the batch has (`HAS_HEADERS`, `HAS_DELETED`), and `CONTINUES` that the batch goes on
in the next frame: a batch too large for one frame is recovered whole or not at all.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from crc32c import crc32c

from headwater.log.arrow.columns import extremes
from headwater.log.port.write import Stamp, Write, flags_of, physical_schema
from headwater.model.clock import NO_TIME
from headwater.model.errors import Damaged

HEADER_BYTES = 128
CONTINUES = 4
FRAME_EVENTS_MAX = 65_536
FRAME_BYTES_MAX = 16 << 20

_MAGIC = b"HWF1"
_ALIGNMENT = 64
_CHECKED_BYTES = HEADER_BYTES - 4
_PIECES_ROWS_MIN = 4096
_PIECES_BYTES_MIN = 1 << 20
_HEADER = struct.Struct("<4sIQqIIqqqqq16sIIqqQI")
_CHECKSUM = struct.Struct("<I")
_PADDING = bytes(_ALIGNMENT)


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A frame's header."""

    magic: bytes
    flags: int
    payload_bytes: int
    base_offset: int
    count: int
    schema_id: int
    time_min: int
    time_max: int
    running_before: int
    running_after: int
    appended: int
    producer: bytes
    epoch: int
    chain: int
    sequence_first: int
    sequence_last: int
    transaction: int
    payload_crc: int
    header_crc: int

    @property
    def end_offset(self) -> int:
        """The offset of the event that would come next."""
        return self.base_offset + self.count

    @property
    def stride(self) -> int:
        """How many bytes the frame takes in its segment."""
        return stride_of(self.payload_bytes)


class Payload(msgspec.Struct, frozen=True):
    """A batch made ready outside every lock: serialised, summed, its times looked at.

    Of a copy: `at` is the offset that its first event must get, `appended` the append time to keep.
    """

    buffers: Sequence[Any]
    size: int
    crc: int
    count: int
    flags: int
    schema_id: int
    time_min: int
    time_max: int
    times: Any
    stamp: Stamp
    at: int | None = None
    appended: int | None = None

    @property
    def stride(self) -> int:
        """How many bytes its frame will take."""
        return stride_of(self.size)


def payloads_of(write: Write) -> Iterator[Payload]:
    """The events cut into frames of a size that is good to read, all with the batch's stamp."""
    rows = 1
    if write.batch.num_rows > 1:
        size = pa.ipc.get_record_batch_size(write.batch)
        rows = min(FRAME_EVENTS_MAX, max(1, FRAME_BYTES_MAX * write.batch.num_rows // size))
    for start, end in write.runs():
        for first in range(start, end, rows):
            count = min(rows, end - first)
            yield prepare(
                write.rows(first, count),
                schema=write.topic.schema,
                schema_id=write.topic.schema_id,
                time_column=write.topic.time,
                stamp=write.stamp,
                continues=first + count < write.count,
                at=None if write.at is None else write.at + first,
                appended=None if write.appended is None else int(write.appended[first]),
            )


def prepare(
    batch: pa.RecordBatch,
    *,
    schema: pa.Schema,
    schema_id: int,
    time_column: str | None,
    stamp: Stamp,
    continues: bool = False,
    at: int | None = None,
    appended: int | None = None,
) -> Payload:
    """Serialises a batch: the expensive part of an append, done before any lock is taken.

    `schema` are the columns that the topic has under `schema_id`: a batch that differs could never be read again.
    """
    flags = flags_of(batch)
    if not batch.schema.equals(physical_schema(schema, flags)):
        raise AssertionError(f"{batch.schema} is not the topic's {schema}")  # under `python -O`, too
    times = None
    time_min = time_max = NO_TIME
    if time_column is not None:
        times = _times(batch.column(time_column))
        if len(times):
            time_min, time_max = extremes(times)
    buffers = _serialise(batch)
    crc = 0
    for buffer in buffers:
        crc = crc32c(buffer, crc)
    return Payload(
        buffers=buffers,
        size=sum(len(buffer) for buffer in buffers),
        crc=crc,
        count=batch.num_rows,
        flags=flags | (CONTINUES if continues else 0),
        schema_id=schema_id,
        time_min=time_min,
        time_max=time_max,
        times=times,
        stamp=stamp,
        at=at,
        appended=appended,
    )


def encode(
    payload: Payload, *, base_offset: int, running: int, future_us: int, appended: int, chain: int, transaction: int
) -> tuple[bytes, int, int]:
    """The header for a payload at its place in the partition, with its `running after` and its checksum.

    Event times beyond `future_us` do not advance the running maximum: one clock in 2099 must not make the world late.
    """
    stamp, running_after = payload.stamp, max(running, _advance(payload, appended, future_us))
    head = _HEADER.pack(
        _MAGIC,
        payload.flags,
        payload.size,
        base_offset,
        payload.count,
        payload.schema_id,
        payload.time_min,
        payload.time_max,
        running,
        running_after,
        appended,
        stamp.producer,
        stamp.epoch,
        chain,
        stamp.sequence_first,
        stamp.sequence_last,
        transaction,
        payload.crc,
    )
    crc = crc32c(head)
    return head + _CHECKSUM.pack(crc), running_after, crc


def stride_of(payload_bytes: int) -> int:
    """How many bytes a frame takes whose payload has this length."""
    return HEADER_BYTES + payload_bytes + (-payload_bytes % _ALIGNMENT)


def padding(payload_bytes: int) -> bytes:
    """The zeros between a payload and the next frame."""
    return _PADDING[: -payload_bytes % _ALIGNMENT]


def decode(data: memoryview, position: int) -> Frame | None:
    """The header at `position`, or None where no intact header stands (the end, or a torn write)."""
    if not has_intact_header(data, position):
        return None
    fields = (*_HEADER.unpack_from(data, position), *_CHECKSUM.unpack_from(data, position + _CHECKED_BYTES))
    return Frame(*fields)


def has_intact_header(data: memoryview, position: int) -> bool:
    """Whether a whole header stands at `position`."""
    if position + HEADER_BYTES > data.nbytes or data[position : position + 4] != _MAGIC:
        return False
    (crc,) = _CHECKSUM.unpack_from(data, position + _CHECKED_BYTES)
    return bool(crc32c(data[position : position + _CHECKED_BYTES]) == crc)


def load(frame: Frame, source: pa.Buffer, position: int, *, schema: pa.Schema, path: str) -> pa.RecordBatch:
    """The frame's batch, without copying it; `Damaged` when its checksum fails."""
    if not is_intact(frame, source, position):
        raise damaged(path, position, f"events {frame.base_offset} to {frame.end_offset - 1}")
    data = source.slice(position + HEADER_BYTES, frame.payload_bytes)
    try:
        return pa.ipc.read_record_batch(data, physical_schema(schema, frame.flags))
    except pa.ArrowException as error:
        raise damaged(path, position, f"events {frame.base_offset} to {frame.end_offset - 1}: {error}") from error


def is_intact(frame: Frame, source: pa.Buffer, position: int) -> bool:
    """Whether the frame's payload is whole."""
    start = position + HEADER_BYTES
    if start + frame.payload_bytes > source.size:
        return False
    return bool(crc32c(source.slice(start, frame.payload_bytes)) == frame.payload_crc)


def damaged(path: str, position: int, what: str) -> Damaged:
    """The error for bytes that fail their checksum."""
    return Damaged(
        f"{path} is damaged at byte {position} ({what}): the checksum is wrong.",
        advice="The events were not served. Run `headwater doctor` on this log; restore them from a mirror or a backup.",
    )


def _serialise(batch: pa.RecordBatch) -> list[Any]:
    """The batch's IPC message; of a large one the pieces it consists of, so that its columns are never copied."""
    if batch.num_rows < _PIECES_ROWS_MIN and batch.get_total_buffer_size() < _PIECES_BYTES_MIN:
        return [batch.serialize()]
    pieces = _Pieces()
    writer = pa.ipc.new_stream(pa.PythonFile(pieces, mode="w"), batch.schema)
    writer.write_batch(batch.slice(0, 0))
    pieces.taken = []
    writer.write_batch(batch)
    return pieces.taken


class _Pieces:
    """A file for Arrow's writer that keeps the buffers it is handed instead of copying them."""

    closed = False

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self._size = 0

    def write(self, piece: Any) -> int:
        self.taken.append(piece)
        self._size += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing to free."""


def _times(column: pa.Array) -> Any:
    """Event times as int64; nulls do not count."""
    if column.null_count:
        column = column.drop_null()
    return np.frombuffer(column.buffers()[1], dtype=np.int64, count=len(column), offset=column.offset * 8)


def _advance(payload: Payload, appended: int, future_us: int) -> int:
    if payload.time_max <= appended + future_us:
        return payload.time_max
    plausible = payload.times[payload.times <= appended + future_us]
    return int(plausible.max()) if len(plausible) else NO_TIME
