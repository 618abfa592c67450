"""Copying: the backfill of one table, chunk by chunk, while changes go on.

A chunk shows the rows as they were somewhere between two positions. It is appended once the changes up to the later one are in the
log, without the rows that changed behind the earlier one: of these the log has something newer. When a table is refreshed, what its
topic has and no chunk had is removed at the end, unless it changed meanwhile.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from headwater.capture.source import TRUNCATE, BackfillChunk, Changes, SourceTable
from headwater.capture.topics import columns_of, key_values, keys_of_changes


class Copying:
    """The copying of one table by this process. Not thread-safe."""

    def __init__(self, table: SourceTable, *, refresh: bool) -> None:
        self.table = table
        self.held: BackfillChunk | None = None
        self.live: pa.Array | None = None
        """The keys of the topic, once a refresh has begun to read."""
        self.refresh = refresh
        self._seen: list[pa.Array] = []
        self._changed: list[tuple[pa.Array, pa.Array]] = []
        self._emptied = ""
        """Where the table was last truncated."""

    def hold(self, chunk: BackfillChunk) -> None:
        """The next chunk; what changed before it is in it, and need not be remembered any more."""
        self.held = chunk
        kept = []
        for positions, keys in self._changed:
            newer = pc.greater(positions, chunk.after)
            if pc.any(newer).as_py():
                kept.append((positions.filter(newer), keys.filter(newer)))
        self._changed = kept

    def see(self, changes: Changes) -> None:
        """Changes that are about to be appended."""
        for batch in changes.batches:
            if batch.table == self.table.name and batch.changes.num_rows:
                positions, keys = (
                    batch.changes.column("position").combine_chunks(),
                    keys_of_changes(columns_of(batch.changes), self.table),
                )
                self._changed.append((positions, keys))
                self._see_keys(keys)
                emptied = positions.filter(pc.equal(batch.changes.column("op").combine_chunks(), TRUNCATE))
                self._emptied = max([self._emptied, *emptied.to_pylist()])

    def is_due(self, position: str) -> bool:
        """Whether the chunk can be appended behind the changes up to a position."""
        return self.held is not None and position >= self.held.until

    def take(self) -> pa.Table:
        """The rows of the chunk that are still the newest; the chunk is done with."""
        assert self.held is not None
        chunk, self.held = self.held, None
        rows = chunk.rows if self._emptied <= chunk.after else chunk.rows.slice(0, 0)
        keys = key_values(rows, self.table)
        self._see_keys(keys)
        for _, changed in self._changed:
            newest = pc.invert(pc.is_in(keys, value_set=changed))
            rows, keys = rows.filter(newest), keys.filter(newest)
        return rows

    def gone(self) -> pa.Array | None:
        """After the last chunk of a refresh: the keys that the topic has and the table no longer."""
        if self.live is None:
            return None
        gone = self.live
        for keys in self._seen:
            gone = gone.filter(pc.invert(pc.is_in(gone, value_set=keys)))
        return gone

    def _see_keys(self, keys: pa.Array) -> None:
        if self.refresh and len(keys):
            self._seen.append(keys)
