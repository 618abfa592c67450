"""Nexmark: `python -m bench.nexmark` writes `bench/results/nexmark.json`.

Each query as a stream over the same events, to a sink that does nothing: ours from a log in a folder, by our operators where the
application uses them; the peer is plain Spark over Parquet files, for the queries that its streaming can run. A rate is all events of
the auction house by the time that the batches take. `--only q4` runs one query, `--quick` shrinks everything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

import headwater as hw
from bench.harness import Figure, Options, Target, main, measure
from bench.state_rig import StateRig
from examples.nexmark.arrival import Arrival
from examples.nexmark.events import PERIOD_US, Nexmark
from examples.nexmark.generate import batches, create
from examples.nexmark.native import NATIVE
from examples.nexmark.ours import QUERIES
from examples.nexmark.topics import LATENESS, TIME
from headwater.processing.poison import Skips
from headwater.processing.types import to_spark

EVENTS, EVENTS_QUICK = 5_000_000, 200_000
SEED = 7
LOG_COLUMNS = {"q12": ("_appended",)}
PEER = "Spark over Parquet"


class House(StateRig):
    """One auction house, in a log and in Parquet files."""

    events = EVENTS

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
        """The files: a folder for each topic. When the log got an event is when it happened: files do not know it."""
        for number, tables in enumerate(self._batches()):
            for topic, table in tables.items():
                (self.folder / "files" / topic).mkdir(parents=True, exist_ok=True)
                pq.write_table(
                    table.append_column("_appended", table.column(TIME)),
                    self.folder / "files" / topic / f"{number:05}.parquet",
                )
        return self.folder / "files"

    def ours(self, name: str) -> DataStreamWriter:
        """A query as an application runs it, but for its sink."""
        query = QUERIES[name]
        app = hw.App("nexmark", log=self.url, spark=self.spark, state=self.folder / f"state-{next(self._numbers)}")
        inputs = [app.topic(each) for each in query.inputs]
        app.stream(*inputs, to=f"out-{next(self._numbers)}", mode=query.mode, log_columns=LOG_COLUMNS.get(name, ()))(
            query.function
        )
        launch = app._launch()
        self._stack.callback(launch.close)
        runner = launch.start()
        self._stack.callback(runner.stop)
        plan = runner.stages[0].plan
        result = runner.result(plan, Skips(self.folder / "skips.json"))
        return result.writeStream.format("noop").outputMode(query.mode)

    def peer(self, name: str) -> DataStreamWriter:
        """The same by Spark alone."""
        query = NATIVE[name]
        result: DataFrame = query.function(*(self._from_files(each, log=name in LOG_COLUMNS) for each in query.inputs))
        return result.writeStream.format("noop").outputMode(query.mode)

    def _from_files(self, topic: str, *, log: bool) -> DataFrame:
        schema = to_spark(hw.open_log(self.url, read_only=True).topic(topic).schema).add("_appended", "timestamp")
        frame = self.spark.readStream.schema(schema).parquet(str(self.files / topic))
        frame = frame if log else frame.drop("_appended")
        return frame.withWatermark(TIME, LATENESS)

    def _batches(self) -> Iterator[dict[str, pa.Table]]:
        return batches(Nexmark(SEED, PERIOD_US), Arrival(0, self.events, seed=SEED))


def query(rig: House, name: str, options: Options) -> list[Figure]:
    """One query."""
    rig.events = EVENTS_QUICK if options.quick else EVENTS

    def timed(writer: Callable[[str], DataStreamWriter]) -> float:
        stream, _ = rig._run(writer(name))
        took_ms = sum(int(batch["durationMs"]["triggerExecution"]) for batch in stream.recentProgress)
        return rig.events / took_ms * 1000

    peer = partial(timed, rig.peer) if name in NATIVE else None
    pair = measure(options, partial(timed, rig.ours), peer)
    what = (QUERIES[name].function.__doc__ or name).strip().removeprefix(f"{name}: ")
    by = PEER if peer else "Spark's streaming refuses it"
    return [Figure(name, what, "events/s", pair, by, Target(">=", 1.0) if peer else None)]


if __name__ == "__main__":
    with House() as house:
        sys.exit(main("nexmark", {name: partial(query, house, name) for name in QUERIES}))
