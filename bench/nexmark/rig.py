"""The rig of Nexmark: auction houses of any size, and each query by ours, by Spark alone and by Flink, to sinks that do nothing.

One Spark runs our side and the peer's, one JVM of Flink all its queries: the first query of each pays for what a program does once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

import headwater as hw
from bench.nexmark.flink import PARALLELISM, PEER, Flink
from bench.state.rig import StateRig
from examples.nexmark.arrival import Arrival
from examples.nexmark.events import PERIOD_US, Nexmark
from examples.nexmark.generate import batches, create
from examples.nexmark.native import NATIVE
from examples.nexmark.ours import QUERIES
from examples.nexmark.topics import LATENESS, TIME, TOPICS
from headwater.processing.stages.skips import Skips
from headwater.testing.servers import ServerError

SEED = 7
LOG_COLUMNS = {"q12": ("_appended",)}


class House:
    """One auction house: so many events, in a log and in Parquet files."""

    def __init__(self, folder: Path, events: int, *, period_us: int = PERIOD_US) -> None:
        self.folder, self.events, self.period_us = folder, events, period_us

    @cached_property
    def url(self) -> str:
        """The log."""
        with hw.open_log(str(self.folder / "log")) as log:
            create(log)
            for tables in self._batches():
                for topic, table in tables.items():
                    log.append(topic, table)
        return str(self.folder / "log")

    @cached_property
    def files(self) -> Path:
        """The files: a folder for each topic, in it a file for each of Flink's tasks, which each have their events in order of time.

        Flink takes whole files in an order of its own, and drops what comes behind its watermark: more files would be events lost.
        When the log got an event is when it happened: files do not know it.
        """
        folder = self.folder / "files"
        with ExitStack() as stack:
            writers: dict[tuple[str, int], pq.ParquetWriter] = {}
            for tables in self._batches():
                for topic, table in tables.items():
                    table = table.append_column("_appended", table.column(TIME))
                    for task in range(PARALLELISM):
                        place = folder / topic / f"{task}.parquet"
                        if (topic, task) not in writers:
                            place.parent.mkdir(parents=True, exist_ok=True)
                            writers[topic, task] = stack.enter_context(pq.ParquetWriter(place, table.schema))
                        writers[topic, task].write_table(table.take(pa.array(range(task, len(table), PARALLELISM))))
        return folder

    def _batches(self) -> Iterator[dict[str, pa.Table]]:
        return batches(Nexmark(SEED, self.period_us), Arrival(0, self.events, seed=SEED))


class NexmarkRig(StateRig):
    """What Nexmark is measured with."""

    def __init__(self) -> None:
        super().__init__()
        self._houses: dict[int, House] = {}

    def house(self, events: int) -> House:
        """The house with so many events; it keeps them for whoever asks again."""
        if events not in self._houses:
            self._houses[events] = House(self.folder / f"house-{events}", events)
        return self._houses[events]

    def ours_s(self, name: str, house: House) -> float:
        """The seconds that the batches of a query take as an application runs it, but for its sink."""
        query = QUERIES[name]
        number = next(self._numbers)
        app = hw.App("nexmark", log=house.url, spark=self.spark, state=self.folder / f"state-{number}")
        inputs = [app.topic(each) for each in query.inputs]
        columns = LOG_COLUMNS.get(name, ())
        app.stream(*inputs, to=f"out-{number}", mode=query.mode, log_columns=columns)(query.function)
        with ExitStack() as stack:
            launch = app._launch()
            stack.callback(launch.close)
            supervisor = launch.start()
            stack.callback(supervisor.stop)
            plan = supervisor.stages[0].plan
            result = supervisor.inputs.result(plan, Skips(self.folder / "skips.json"))
            # An operator inside a source looks for its query's checkpoint.
            return self._batches_s(result.writeStream.format("noop").outputMode(query.mode), Path(plan.checkpoint))

    def spark_s(self, name: str, house: House) -> float:
        """The same by Spark alone, over the files."""
        query = NATIVE[name]
        inputs = (self._from_files(house, each, log=name in LOG_COLUMNS) for each in query.inputs)
        result: DataFrame = query.function(*inputs)
        return self._batches_s(result.writeStream.format("noop").outputMode(query.mode))

    def flink_s(self, name: str, house: House) -> float:
        """The seconds that Flink's job takes for the same, over the same files."""
        assert self.flink is not None
        return self.flink.run_s(name, house.files)

    @cached_property
    def flink(self) -> Flink | None:
        """Flink; without it, says once why."""
        try:
            return self._stack.enter_context(Flink(self.folder))
        except ServerError as error:
            print(f"{PEER} is left out: {error}", file=sys.stderr)
            return None

    def _from_files(self, house: House, topic: str, *, log: bool) -> DataFrame:
        schema = f"{TOPICS[topic].schema}, _appended TIMESTAMP"
        frame = self.spark.readStream.schema(schema).parquet(str(house.files / topic))
        frame = frame if log else frame.drop("_appended")
        return frame.withWatermark(TIME, LATENESS)

    def _batches_s(self, writer: DataStreamWriter, checkpoint: Path | None = None) -> float:
        stream, _ = self._run(writer, checkpoint)
        return sum(int(batch["durationMs"]["triggerExecution"]) for batch in stream.recentProgress) / 1000
