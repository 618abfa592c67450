"""The bids that patterns are found in: Nexmark's, any number of them, in each form that a side reads.

The peers have them as they read them best: Flink as Parquet files with the columns that it needs, Esper as objects in memory, made from
a file of plain numbers.

A bid comes 0.7 s after the event before it. So a pattern's ten minutes end some matches, and no two bids lie exactly ten minutes apart:
there the peers differ. After the last bid each partition has a closing one, an hour later, so that ours has no bid that still waits for
the watermark. A closing bid is the only one of its auction and of its bidder, and is in no match.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import headwater as hw
from bench.nexmark.flink import PARALLELISM
from examples.nexmark.draws import Numbers
from examples.nexmark.events import AUCTIONS, BIDS, CYCLE, PERSONS, Nexmark
from examples.nexmark.topics import TIME, TOPICS

TOPIC = "bids"
SEED = 7
PERIOD_US = 700_000
COLUMNS = ("auction", "bidder", "price", TIME)
CLOSERS = 64
_CLOSERS_FIRST_ID = 1_000_000_000
_CLOSE_AFTER_US = 3_600_000_000
_BIDS_PER_APPEND = 250_000


class Bids:
    """So many bids and their closing ones, kept in a folder."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self.count = folder, count

    def __len__(self) -> int:
        return self.count + CLOSERS

    @cached_property
    def url(self) -> str:
        """A log that has them in a topic with the key `auction`."""
        with hw.open_log(str(self._folder / "log")) as log:
            log.create_topic(TOPIC, **TOPICS[TOPIC].declared(), partitions=4)
            for table in self._tables():
                log.append(TOPIC, table)
        return str(self._folder / "log")

    @cached_property
    def files(self) -> Path:
        """A folder with a Parquet file for each of Flink's tasks, which has every second bid in order of time."""
        folder = self._folder / "files"
        folder.mkdir(parents=True)
        table = self.table
        for task in range(PARALLELISM):
            pq.write_table(table.take(pa.array(range(task, len(table), PARALLELISM))), folder / f"{task}.parquet")
        return folder

    @cached_property
    def numbers(self) -> Path:
        """A file with four little-endian integers for each: auction, bidder, price and the time in milliseconds."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / "bids.numbers"
        columns = [self.table.column(name).cast(pa.int64()).to_numpy() for name in COLUMNS]
        columns[-1] = columns[-1] // 1_000
        np.stack(columns, axis=1).astype("<i8").tofile(file)
        return file

    @cached_property
    def table(self) -> pa.Table:
        """All of them, the columns that patterns need."""
        return pa.concat_tables([table.select(COLUMNS) for table in self._tables()])

    def _tables(self) -> Iterator[pa.Table]:
        events = Nexmark(SEED, PERIOD_US)
        for first in range(0, self.count, _BIDS_PER_APPEND):
            yield events.bids(_event_numbers(np.arange(first, min(first + _BIDS_PER_APPEND, self.count))))
        last = _event_numbers(np.array([self.count]))[0]
        closers = events.bids(last + _CLOSE_AFTER_US // PERIOD_US + np.arange(CLOSERS))
        for column in ("auction", "bidder"):
            place = closers.schema.get_field_index(column)
            closers = closers.set_column(place, column, pa.array(_CLOSERS_FIRST_ID + np.arange(CLOSERS)))
        yield closers


def _event_numbers(bids: Numbers) -> Numbers:
    """The event numbers of bids that are counted from 0."""
    return bids // BIDS * CYCLE + PERSONS + AUCTIONS + bids % BIDS
