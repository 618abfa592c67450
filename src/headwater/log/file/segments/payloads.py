"""Payloads: the events of a write, cut into frames of a size that is good to read."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from headwater.log.file.segments.frame import Payload, prepare
from headwater.log.port.store import Write

FRAME_EVENTS_MAX = 65_536
FRAME_BYTES_MAX = 16 << 20


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
