"""A chunk: some consecutive events of one partition, as a store hands them out."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from headwater.log.port.topic import Topic


class Chunk(msgspec.Struct, frozen=True):
    """Some consecutive events of one partition, as a store hands them out.

    `batch` holds the columns of `topic`, then `_headers` and `_deleted` where any event has them, and `_appended`
    where `appended` is None. Offsets run from `base_offset` without gaps; or, where compaction left some, they are given
    in `offsets`, and the chunk stands for everything from `base_offset` to `end`, though its first and last events may lie
    further inside, or there may be none. `running` is the greatest event time of the partition before the chunk, where the store
    knows it and the chunk is whole.
    """

    topic: Topic
    partition: int
    base_offset: int
    batch: pa.RecordBatch
    appended: int | None
    offsets: Any = None
    end: int = -1
    running: int | None = None

    @property
    def end_offset(self) -> int:
        """The offset after the last event, and after the gap that follows it."""
        return self.base_offset + self.batch.num_rows if self.offsets is None else self.end

    def all_offsets(self) -> Any:
        """The offset of each event, as an array."""
        if self.offsets is not None:
            return self.offsets
        return np.arange(self.base_offset, self.base_offset + self.batch.num_rows, dtype=np.int64)

    def offset_of(self, row: int) -> int:
        """The offset of the event in a row."""
        return self.base_offset + row if self.offsets is None else int(self.offsets[row])

    def slice(self, start: int, end: int) -> Chunk:
        """The events with offsets from `start` to `end`."""
        if self.offsets is None:
            batch = self.batch.slice(start - self.base_offset, end - start)
            return msgspec.structs.replace(self, base_offset=start, batch=batch, running=None)
        first, last = (int(row) for row in np.searchsorted(self.offsets, (start, end)))
        return msgspec.structs.replace(
            self,
            base_offset=start,
            batch=self.batch.slice(first, last - first),
            offsets=self.offsets[first:last],
            end=end,
            running=None,
        )

    def slice_events(self, events_max: int) -> Chunk:
        """Its first events, with the gap that follows them."""
        if self.batch.num_rows <= events_max:
            return self
        return self.slice(self.base_offset, self.offset_of(events_max))
