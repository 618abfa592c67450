"""The payload: the events of 10-byte key and 100-byte value that every figure of the log is measured with.

Made once, outside the timed part, from a seed; values are random bytes, so nothing gains by compression.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pyarrow as pa

KEY_BYTES = 10
VALUE_BYTES = 100
EVENT_BYTES = KEY_BYTES + VALUE_BYTES
KEYS = 100_000


@dataclass(frozen=True)
class Payload:
    """The same events twice: as Python bytes for one-by-one calls and as an Arrow table for bulk ones."""

    keys: list[bytes]
    values: list[bytes]
    table: pa.Table

    def __len__(self) -> int:
        return len(self.keys)

    def tables(self, rows: int) -> list[pa.Table]:
        """The table in pieces of `rows`."""
        return [self.table.slice(start, rows) for start in range(0, len(self), rows)]


def make_payload(events: int, *, seed: int = 1) -> Payload:
    source = random.Random(seed)
    names = [b"k%09d" % source.randrange(10**9) for _ in range(KEYS)]
    keys = source.choices(names, k=events)
    block = source.randbytes(events * VALUE_BYTES)
    values = [block[start : start + VALUE_BYTES] for start in range(0, len(block), VALUE_BYTES)]
    table = pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})
    assert len(keys[0]) == KEY_BYTES and table.num_rows == events
    return Payload(keys=keys, values=values, table=table)
