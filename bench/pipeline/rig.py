"""The rig: one Spark, one broker and the events on both sides, each made when first asked for and ended with the rig.

Sharing them over all figures is what makes the session warm, and saves minutes of starting and filling.
"""

from __future__ import annotations

import itertools
import shutil
import time
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

import headwater as hw
from bench.harness import Options, scratch
from bench.log.kafka_side import KafkaSide, kafka_side
from bench.pipeline.events import create, fill
from headwater.processing.source.spark_source import make_session
from headwater.processing.spark.session import SETTINGS, stop_session
from headwater.testing.servers import maven

TOPIC = "events"
PREFIX = "bench."
EVENTS = 5_000_000
EVENTS_QUICK = 500_000
CORES = 2
CONNECTOR = "Spark's Kafka connector"

# No release of the connector has all its parts on Maven Central; these work together, on plain connections.
_CONNECTOR_JARS = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)


class Rig:
    """What the pipeline is measured with; a context manager, and nothing runs after it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @cached_property
    def folder(self) -> Path:
        """A folder on the disk that is measured."""
        return self._stack.enter_context(scratch())

    @cached_property
    def spark(self) -> SparkSession:
        """Spark with the connector."""
        return self._session({"spark.jars": ",".join(str(jar) for jar in sorted(connector_jars().glob("*.jar")))})

    @cached_property
    def plain(self) -> SparkSession:
        """The same Spark with the settings for queries that Spark itself has, and so with its own way to write checkpoints."""
        plain = self.spark.newSession()
        for name in SETTINGS:
            if name.startswith("spark.sql."):
                plain.conf.unset(name)
        return plain

    @cached_property
    def kafka(self) -> KafkaSide:
        """A broker."""
        return self._stack.enter_context(kafka_side(self.folder))

    def log(self, events: int) -> str:
        """The URL of a log in a folder whose topic has so many events; it keeps them for whoever asks again."""
        folder = self.folder / f"log-{events}"
        if not folder.exists():
            with hw.open_log(str(folder)) as log:
                fill(log, TOPIC, events, at_once=EVENTS)
        return str(folder)

    @cached_property
    def kafka_url(self) -> str:
        """The URL of the log on the broker."""
        return f"kafka://{self.kafka.bootstrap}?prefix={PREFIX}"

    def on_kafka(self, events: int) -> str:
        """The topic of the log on the broker that has the same events as JSON."""
        topic = f"{TOPIC}-{events}"
        with hw.open_log(self.kafka_url) as log:
            if topic not in log.topics():
                fill(log, topic, events, at_once=EVENTS)
        return topic

    def new_topic(self, url: str) -> str:
        """An empty topic for such events in a log of ours."""
        topic = f"copy-{next(self._numbers)}"
        with hw.open_log(url) as log:
            create(log, topic)
        return topic

    def from_log(self, url: str, topic: str, *, stream: bool = True, **options: str) -> DataFrame:
        """A stream of ours, or a table, from the beginning."""
        reader = self.spark.readStream if stream else self.spark.read
        return reader.format("headwater").options(startingOffsets="earliest", log=url, topic=topic, **options).load()

    def from_connector(self, topic: str, *, stream: bool = True, spark: SparkSession | None = None) -> DataFrame:
        """The same of the connector."""
        spark = spark or self.spark
        reader = spark.readStream if stream else spark.read
        reader = reader.format("kafka").option("startingOffsets", "earliest")
        return reader.options(**{"kafka.bootstrap.servers": self.kafka.bootstrap, "subscribe": topic}).load()

    def new_checkpoint(self) -> Path:
        """Where a query may keep its progress."""
        return self.folder / f"checkpoint-{next(self._numbers)}"

    def start(
        self, writer: DataStreamWriter, *, checkpoint: Path | None = None, **trigger: Any
    ) -> tuple[StreamingQuery, Path]:
        """Start a query with a new checkpoint, and give that too."""
        checkpoint = checkpoint or self.new_checkpoint()
        return writer.option("checkpointLocation", str(checkpoint)).trigger(**trigger).start(), checkpoint

    def drain(self, writer: DataStreamWriter, events: int) -> float:
        """Run a query over everything that is there; events per second of the time that its batches take.

        Starting a query is a figure of its own (`whole_s`): it takes the same time for any number of events.
        """
        query, _ = self._run(writer)
        batches = query.recentProgress
        found = sum(batch["numInputRows"] for batch in batches)
        assert found == events, f"{found:,} of {events:,} events were read"
        return events / sum(batch["durationMs"]["triggerExecution"] for batch in batches) * 1000

    def whole_s(self, writer: DataStreamWriter) -> float:
        """Run a query over everything that is there; all seconds that it takes, from its start to its end."""
        return self._run(writer)[1]

    def _session(self, more: dict[str, str]) -> SparkSession:
        settings = {
            "spark.driver.memory": "4g",
            "spark.local.dir": str(self.folder / "spark"),
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            **more,
        }
        spark = make_session("bench", f"local[{CORES}]", settings)
        self._stack.callback(stop_session, spark)
        return spark

    def _run(self, writer: DataStreamWriter, checkpoint: Path | None = None) -> tuple[StreamingQuery, float]:
        start = time.perf_counter()
        query, checkpoint = self.start(writer, checkpoint=checkpoint, availableNow=True)
        query.awaitTermination()
        elapsed_s = time.perf_counter() - start
        shutil.rmtree(checkpoint)
        return query, elapsed_s


def connector_jars() -> Path:
    """The folder with the connector, fetched when it is first asked for."""
    return maven.fetch_jars("spark-kafka-connector-4.2.0", _CONNECTOR_JARS, alone=True)


def events_of(options: Options) -> int:
    """How many events the rates are measured with."""
    return EVENTS_QUICK if options.quick else EVENTS
