"""Beats: a stream that has one row for each partition of an operator's state in every batch, with the watermarks of that batch.

A partition that no event goes to must be visited too: event time passes there as well. And a task cannot tell by itself which partition it
is (a coalesce or a union behind the operator gives it another number), so the row says it.

The stream follows the inputs of its stage. A reader of an input writes down how far each batch goes, in a file of a folder that lives as
long as the run of the query (`Pace`); Spark asks the sources of a query in the order in which they stand in its plan, up to
`SOURCES_MAX` of them, and beats stand behind their inputs: so both go on in the same batch or not at all. What the watermarks are stands in
the inputs' own offsets, which Spark writes into the checkpoint before the batch runs: a batch that is run again has the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from headwater.log.disk.atomic_file import read_file, replace_file
from headwater.log.disk.disk import RealDisk
from headwater.model.clock import NO_TIME
from headwater.processing.checkpoint.offsets import BEAT, WATERMARK
from headwater.processing.spark.errors import crossing
from headwater.processing.spark.planned_rows import PlannedRowsReader
from headwater.processing.spark.types import to_arrow, to_spark

NAME = "headwater_beats"
SOURCES_MAX = 4
"""So many sources a query may have whose order is known: behind that Spark keeps them in a hash map."""

SCHEMA = pa.schema([pa.field("_p", pa.int32()), pa.field("_before", pa.int64()), pa.field("_until", pa.int64())])


_KEPT = ".json"


class Pace:
    """How far the next batch goes in each input of a stage, told from reader to reader."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._disk = RealDisk()

    def tell(self, topics: Sequence[str], offset: Mapping[str, Any]) -> None:
        """The input of these topics goes so far."""
        name = hashlib.blake2b(json.dumps(topics).encode(), digest_size=12).hexdigest()
        path, draft = f"{self._folder}/{name}{_KEPT}", f"{self._folder}/{name}.{os.getpid()}.new"
        pieces = [json.dumps(offset).encode()]
        replace_file(self._disk, path, pieces, point="pace:", sync=False, sync_folder=False, draft=draft)

    def told(self) -> dict[str, Any]:
        """What all inputs have told."""
        names = sorted(name for name in self._disk.names(self._folder) if name.endswith(_KEPT))
        return {name.removesuffix(_KEPT): json.loads(read_file(self._disk, f"{self._folder}/{name}")) for name in names}


class BeatsSource(DataSource):
    """The beats of a stage, for Spark. Options: `pace`, a folder, and `partitions`."""

    @classmethod
    def name(cls) -> str:
        """What stands in `format(…)`."""
        return NAME

    def schema(self) -> StructType:
        """The partition, and the watermarks before and after the batch."""
        return to_spark(SCHEMA)

    def streamReader(self, schema: StructType) -> BeatsReader:
        """For `spark.readStream`."""
        return BeatsReader(self.options["pace"], int(self.options["partitions"]), to_arrow(schema))


class Beat(InputPartition):
    """The beats of one batch."""

    def __init__(self, before: int, until: int) -> None:
        self.before, self.until = before, until


class BeatsReader(PlannedRowsReader, SupportsTriggerAvailableNow):
    """Reads beats."""

    def __init__(self, pace: str, partitions: int, schema: pa.Schema) -> None:
        self._pace, self._partitions, self._schema = pace, partitions, schema

    def initialOffset(self) -> dict[str, Any]:
        """Before everything."""
        return {BEAT: {}}

    def getDefaultReadLimit(self) -> ReadLimit:
        """The inputs have limits."""
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """The inputs know where they end."""

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """As far as the inputs go."""
        with crossing():
            return {BEAT: {**start[BEAT], **Pace(self._pace).told()}}

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Beats never wait."""
        return None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """One task."""
        beat = Beat(watermark_of(start[BEAT]), watermark_of(end[BEAT]))
        self.fetched = list(self.read(beat))
        return [beat]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """A row for each partition."""
        assert isinstance(partition, Beat)
        count = self._partitions
        columns = [range(count), [partition.before] * count, [partition.until] * count]
        yield pa.RecordBatch.from_arrays(
            [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)],
            schema=self._schema,
        )


def watermark_of(offsets: Mapping[str, Any]) -> int:
    """The watermark of a query at these offsets of its inputs: that of the one which is furthest behind."""
    found = [offset.get(WATERMARK, NO_TIME) for offset in offsets.values()]
    return min(found, default=NO_TIME)
