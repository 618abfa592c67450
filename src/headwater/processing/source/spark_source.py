"""The data source "headwater": topics as DataFrames, in any Spark program.

    hw.register(spark)
    spark.readStream.format("headwater").option("log", "./data").option("topic", "orders").load()

One source serves both logs; on `kafka://` the tasks read with confluent-kafka, so no connector jar is needed. `docs/spark.md` has the
options. Everything here runs in Python processes that Spark starts; they are given the options and the schema, and open the log
by its URL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import IO, Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from headwater.processing.checkpoint.offsets import EARLIEST, LATEST
from headwater.processing.operators.beats import BeatsSource
from headwater.processing.source.load import Load
from headwater.processing.source.operator_input import from_option
from headwater.processing.source.options import read_options
from headwater.processing.source.range_reader import OffsetRange, TableSnapshot
from headwater.processing.source.stream import StreamReader
from headwater.processing.source.topic_subscription import TopicSubscription
from headwater.processing.spark.errors import crossing
from headwater.processing.spark.log_cache import log_for_reading
from headwater.processing.spark.session import check_reachable, is_local_master, start_session
from headwater.processing.spark.types import to_spark

NAME = "headwater"


def make_session(
    name: str,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    *,
    log: str | None = None,
    said: IO[bytes] | None = None,
) -> SparkSession:
    """Starts Spark as our queries want it, or gives the session that runs already, with topics readable and writable in it.

    The arguments are those of `start_session`.
    """
    spark = start_session(name, master, conf, log=log, said=said)
    register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Makes topics readable and writable in a Spark session, as `spark.read.format("headwater")` and the like."""
    local = is_local_master(spark.sparkContext.master or "local")
    spark.dataSource.register(HeadwaterSource if local else RemoteSource)
    spark.dataSource.register(BeatsSource)


class HeadwaterSource(DataSource):
    """Topics of a log, for Spark."""

    master = "local"

    @classmethod
    def name(cls) -> str:
        """What stands in `format(…)`."""
        return NAME

    def schema(self) -> StructType:
        """The columns that the options ask for; all options are checked here, when the DataFrame is made."""
        with crossing():
            options = read_options(self.options)
            check_reachable(options.log, self.master)
            if options.operator is not None:
                gives: StructType = from_option(options.operator).gives
                return gives
            subscription = TopicSubscription(log_for_reading(options.log), options)
            schema = to_spark(subscription.schema())
            subscription.condition()
            return schema

    def streamReader(self, schema: StructType) -> StreamReader:
        """For `spark.readStream`."""
        return StreamReader(Load(self.options, schema, "stream", self.master))

    def reader(self, schema: StructType) -> BatchReader:
        """For `spark.read`."""
        return BatchReader(Load(self.options, schema, "batch", self.master))

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        """For `df.writeStream`."""
        with crossing():
            check_reachable(self.options.get("log", ""), self.master)
            return _sink().StreamWriter(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """For `df.write`."""
        with crossing():
            check_reachable(self.options.get("log", ""), self.master)
            return _sink().BatchWriter(self.options, schema, overwrite)


class RemoteSource(HeadwaterSource):
    """The same in a session whose tasks run on other machines, where a folder of this one is not to be found."""

    master = "elsewhere"


class BatchReader(DataSourceReader):
    """Reads topics up to where they end when the DataFrame is planned; every task run again reads the same."""

    def __init__(self, query: Load) -> None:
        self._query = query

    def partitions(self) -> list[InputPartition]:
        """The tasks."""
        with crossing():
            subscription, options = self._query.checked, self._query.options
            topics = {topic.name: topic for topic in subscription.topics()}
            found = list(topics.values())
            ends = subscription.resolve("endingOffsets", LATEST if options.ending is None else options.ending, found)
            if options.as_of is not None:
                as_of = None if options.as_of == "latest" else int(options.as_of)
                return [
                    TableSnapshot(
                        topic, {at: end for (name, at), end in ends.items() if name == topic.name}, as_of=as_of
                    )
                    for topic in found
                ]
            where = EARLIEST if options.starting is None else options.starting
            starts = subscription.resolve("startingOffsets", where, found)
            bounds = subscription.bounds(found)
            skips = where == EARLIEST or not options.fails_on_loss
            ranges = [
                OffsetRange(topics[at[0]], at[1], subscription.check_kept(at, start, bounds[at]), ends[at], skips=skips)
                for at, start in sorted(starts.items())
            ]
            return self._query.split([wanted for wanted in ranges if wanted.start < wanted.end])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task."""
        return self._query.read(partition)


def _sink() -> Any:
    """What writes; loaded for those who write."""
    return import_module("headwater.processing.sink.spark_sink")
