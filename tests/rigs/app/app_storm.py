"""A storm over a whole application: driver, JVM and Python workers are killed while producers write, at random and at named steps.

The application has a stateless stream, a view of windows over it, a stream by an operator, and a folder of files; the whole one also
windows that are written when they are closed, a stream in update mode, and a stream of the view's changes. The oracle is DuckDB over
the clicks.

As a program it is the driver: `python app_storm.py FOLDER`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.log.log import Log
from headwater.processing.checkpoint.offsets import places_of
from headwater.sinks.files import FileSink
from headwater.views.store_url import open_view_store
from headwater.views.view import open_view
from tests.rigs.app.storm_orders import environment, kill_session, session_of

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
FLUSHES = [f"flush{number}" for number in range(8)]
"""Pages of the last clicks, some in each partition: time goes on in all of them."""

PAGES = [f"/{number}" for number in range(7)]
TRIGGER = "1 second"
LATENESS = "30 minutes"
GOES_ON_S = 600.0


def declare(folder: Path, *, spark: SparkSession | None = None) -> hw.App:
    """The application, whole where a file says so; with Spark's settings as users have them, but for two partitions of state."""
    settings = {"spark.sql.shuffle.partitions": "2", "spark.driver.memory": "1g"}
    app = hw.App("storm", log=f"{folder}/log", spark=spark, master="local[2]", conf=settings)
    clicks = app.topic(
        "clicks",
        schema="producer INT, n BIGINT, page STRING, at TIMESTAMP",
        key="page",
        time="at",
        lateness=LATENESS,
        partitions=2,
    )
    app.stream(clicks, to="cleaned", key="page", time="at", lateness=LATENESS, trigger=TRIGGER)(cleaned)
    app.view(cleaned, key=["page", "minute"], trigger=TRIGGER)(per_page)
    app.stream(clicks, to="pace", key="page", trigger=TRIGGER)(pace)
    if (folder / "whole").exists():
        app.stream(clicks, to="minutes", key="page", trigger=TRIGGER)(minutes)
        app.stream(clicks, to="totals", key="page", mode="update", trigger=TRIGGER)(totals)
        app.stream(per_page, to="moves", key="key", trigger=TRIGGER)(moves)
    app.sink(cleaned, to=f"{folder}/files", name="files", trigger=TRIGGER)
    return app


def cleaned(clicks: DataFrame) -> DataFrame:
    return clicks.where("n % 5 <> 0").select("page", "producer", "n", "at")


def pace(clicks: DataFrame) -> DataFrame:
    counted = hw.sliding(clicks, by="page", over="1 minute", at="at", clicks="count")
    return counted.select("page", "producer", "n", "clicks")


def minutes(clicks: DataFrame) -> DataFrame:
    counted = clicks.groupBy(F.window("at", "1 minute"), "page").agg(
        F.count("*").alias("clicks"), F.sum("n").alias("n")
    )
    return counted.select("page", F.col("window.start").alias("minute"), "clicks", "n")


def totals(clicks: DataFrame) -> DataFrame:
    return clicks.groupBy("page").agg(F.count("*").alias("clicks"), F.sum("n").alias("n"))


def per_page(cleaned: DataFrame) -> DataFrame:
    counted = cleaned.groupBy(F.window("at", "1 minute"), "page").agg(
        F.count("*").alias("clicks"), F.sum("n").alias("n")
    )
    return counted.select("page", F.col("window.start").alias("minute"), "clicks", "n")


def moves(changes: DataFrame) -> DataFrame:
    return changes.select("key", "op", F.col("new.clicks").alias("clicks"), "epoch")


def click(producer: int, n: int) -> dict[str, Any]:
    """A producer's n-th click; its time is a little out of order, and never late."""
    chance = random.Random(f"{producer}.{n}")
    at = NOON + timedelta(seconds=n * 0.2 - chance.random() * 20)
    return {"producer": producer, "n": n, "page": chance.choice(PAGES), "at": at}


def produce(folder: Path, producer: int, *, per_second: float) -> int:
    """Sends clicks until a file says to stop; how many were acknowledged. For a process of its own."""
    sent = 0
    with hw.open_log(f"{folder}/log") as log, log.producer() as out:
        while not (folder / "enough").exists():
            for _ in range(max(1, int(per_second / 10))):
                out.send("clicks", click(producer, sent))
                sent += 1
            out.flush()
            time.sleep(0.1)
    return sent


class Life:
    """One run of the application, in a session of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with (folder / "driver.txt").open("ab") as output:
            self.driver = subprocess.Popen(
                ["env", "--default-signal=INT", sys.executable, __file__, str(folder)],
                start_new_session=True,
                env=environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.session = self.driver.pid

    def jvm(self) -> int:
        """The process of Spark's JVM; one that it is just starting has its name for a moment, too."""
        return min(process for process, command in session_of(self.session).items() if "java" in command.split()[0])

    def workers(self) -> list[int]:
        """Spark's Python processes: those that tasks run in, those that plan a stream's batches, and what these are forked from."""
        kinds = (" -m pyspark", " -m headwater.processing.")
        return [
            process for process, command in session_of(self.session).items() if any(kind in command for kind in kinds)
        ]

    def wait_for(self, done: Callable[[], bool], what: str) -> None:
        """Waits; a driver that ended in the meantime is an error."""
        deadline = time.monotonic() + GOES_ON_S
        while not done():
            assert self.driver.poll() is None, f"the driver ended before {what}:\n{self.told()}"
            assert time.monotonic() < deadline, f"not in {GOES_ON_S} s: {what}\n{self.told()}"
            time.sleep(0.02)

    def wait_for_end(self) -> int:
        """The exit status of the driver, when all of its session is gone."""
        try:
            return self.driver.wait(GOES_ON_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver goes on without end\n{self.told()}") from None
        finally:
            kill_session(self.session)

    def kill(self, *processes: int) -> None:
        """At once."""
        for process in processes:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def told(self) -> str:
        """The last status and output, for whoever looks for the reason."""
        status = declare(self._folder).status()
        lines = (self._folder / "driver.txt").read_text(errors="replace").splitlines()
        return "\n".join([*(str(stage) for stage in (status.stages if status else ())), *lines[-30:]])


def epochs(log: Log, folder: Path) -> dict[str, int]:
    """The batch that each stage wrote last."""
    found = {name: log.store.stage_state(f"storm.{name}").last for name in declare(folder).graph.stages}
    found["files"] = FileSink(f"{folder}/files", stage="files").last
    return {name: -1 if last is None else last.epoch for name, last in found.items()}


def finish(folder: Path, spark: SparkSession) -> None:
    """Closes all windows, and lets the application go on to the end of everything."""
    with hw.open_log(f"{folder}/log") as log:
        at = NOON + timedelta(days=2)
        ends = log.append(
            "clicks", [{"producer": -1, "n": n, "page": page, "at": at} for n, page in enumerate(FLUSHES, 1)]
        )
        assert len(ends) == log.topic("clicks").partitions
    last = declare(folder, spark=spark).run(available_now=True)
    assert {stage.state for stage in last.stages} == {"done"}, last


def check(folder: Path, *, clicks: int | None = None) -> None:
    """Topics, view, changes and files equal the oracle: no gap, no duplicate."""
    ask = duckdb.connect()
    with hw.open_log(f"{folder}/log") as log:
        given = log.read("clicks", columns=["producer", "n", "page", "at"])
        assert clicks is None or given.num_rows == clicks + len(FLUSHES)
        ask.register("clicks", given)
        for topic in {"cleaned", "pace", "minutes", "totals", "moves"} & set(log.topics()):
            ask.register(topic, log.read(topic, columns=[*log.topic(topic).schema.names, "_partition", "_offset"]))
        changes = log.read("per_page.changes")
        ask.register("changes", changes)
        ends = {number: span.stop for number, span in log.offsets("per_page.changes").items()}
        with open_view(f"sqlite:///{folder}/log/views.db", "per_page", log=log) as view:
            ask.register("per_page", found := view.rows())
            view_rows = found.to_pylist()
        store = open_view_store(f"sqlite:///{folder}/log/views.db")
        assert [stored.applied.positions for stored in store.stored()] == [ends]
        store.close()
        wanted = 'SELECT page, producer, n, "at" FROM clicks WHERE n % 5 <> 0'
        same(ask, 'SELECT page, producer, n, "at" FROM cleaned', wanted)
        same(ask, f"SELECT page, producer, n, \"at\" FROM read_parquet('{folder}/files/*.parquet')", wanted)
        in_order(ask, "cleaned", "n", "page, producer, _partition")
        counted = 'SELECT page, time_bucket(interval 1 minute, "at"), count(*), sum(n)'
        same(ask, "FROM per_page", f"{counted} FROM ({wanted}) GROUP BY ALL")
        check_changes(changes.to_pylist(), view_rows)
        minute = 'PARTITION BY page ORDER BY "at" RANGE BETWEEN INTERVAL 1 MINUTE PRECEDING AND CURRENT ROW'
        passed = f"SELECT page, producer, n, count(*) OVER ({minute}) FROM clicks WHERE page NOT LIKE 'flush%'"
        same(ask, "SELECT page, producer, n, clicks FROM pace", passed)
        if "totals" in log.topics():
            closed = f"{counted} FROM clicks WHERE page NOT LIKE 'flush%' GROUP BY ALL"
            same(ask, "SELECT page, minute, clicks, n FROM minutes", closed)
            per_key = "SELECT page, count(*), sum(n) FROM clicks GROUP BY ALL"
            same(ask, "SELECT page, max(clicks), max_by(n, clicks) FROM totals GROUP BY page", per_key)
            in_order(ask, "totals", "clicks", "page")
            same(ask, "SELECT key, op, clicks, epoch FROM moves", "SELECT key, op, new.clicks, epoch FROM changes")


def check_point(folder: Path) -> dict[str, int]:
    """At any moment, whoever was killed: what each stage has given is what its inputs give up to where its marker says, no more and no
    less, and no marker is ahead of its inputs. So all stages stand at points that follow from each other. How far each is, in events."""
    ask = duckdb.connect()
    with hw.open_log(f"{folder}/log") as log:
        for topic in ("clicks", "cleaned"):
            ask.register(topic, log.read(topic, columns=[*log.topic(topic).schema.names, "_partition", "_offset"]))
        ask.register("changes", log.read("per_page.changes"))
        markers = {name: log.store.stage_state(f"storm.{name}").last for name in ("cleaned", "per_page")}
        markers["files"] = FileSink(f"{folder}/files", stage="storm.files").last
        reads = {"cleaned": "clicks", "per_page": "cleaned", "files": "cleaned"}
        for name, topic in reads.items():
            marker = markers[name]
            ends = {at[1]: end for at, end in ({} if marker is None else places_of(marker.ends)).items()}
            held = {number: span.stop for number, span in log.offsets(topic).items()}
            assert all(end <= held[number] for number, end in ends.items()), f"{name} is ahead of {topic}"
            condition = " OR ".join(f"_partition = {n} AND _offset < {end}" for n, end in ends.items()) or "false"
            ask.execute(f"CREATE VIEW read_by_{name} AS SELECT * FROM {topic} WHERE {condition}")
    wanted = 'SELECT page, producer, n, "at" FROM'
    same(ask, f"{wanted} cleaned", f"{wanted} read_by_cleaned WHERE n % 5 <> 0", may_be_empty=True)
    written = f"read_parquet('{folder}/files/*.parquet')" if list(folder.glob("files/*.parquet")) else "cleaned LIMIT 0"
    same(ask, f"{wanted} {written}", f"{wanted} read_by_files", may_be_empty=True)
    newest = "SELECT last(new ORDER BY epoch) AS row FROM changes GROUP BY key"
    counted = 'SELECT page, time_bucket(interval 1 minute, "at") AS minute, count(*) AS clicks, sum(n) AS n'
    given = f"SELECT row.page, row.minute, row.clicks, row.n FROM ({newest})"
    same(ask, given, f"{counted} FROM read_by_per_page GROUP BY ALL", may_be_empty=True)
    return {name: ask.execute(f"SELECT count(*) FROM read_by_{name}").fetchall()[0][0] for name in reads}


def check_changes(changes: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    """Applied one after the other to what was there before, they give what is there now."""
    rows: dict[str, dict[str, Any]] = {}
    for change in changes:
        assert rows.get(change["key"]) == change["old"] != change["new"], change
        rows[change["key"]] = change["new"]
    assert sorted(map(str, rows.values())) == sorted(map(str, now))
    assert [change["epoch"] for change in changes] == sorted(change["epoch"] for change in changes)


def same(ask: duckdb.DuckDBPyConnection, found: str, wanted: str, *, may_be_empty: bool = False) -> None:
    """Two queries give the same rows, each as often."""
    assert may_be_empty or ask.execute(f"SELECT count(*) FROM ({wanted})").fetchall() != [(0,)], wanted
    for more, less in ((found, wanted), (wanted, found)):
        assert ask.execute(f"({more}) EXCEPT ALL ({less}) LIMIT 5").fetchall() == [], f"{more}  EXCEPT  {less}"


def in_order(ask: duckdb.DuckDBPyConnection, table: str, column: str, within: str) -> None:
    """A column rises with the offsets of a partition."""
    before = f"lag({column}) OVER (PARTITION BY {within} ORDER BY _offset)"
    assert ask.execute(f"SELECT * FROM (SELECT *, {before} AS b FROM {table}) WHERE b >= {column}").fetchall() == []


def drive(folder: Path) -> None:
    """Runs the application until it is killed; what fails for good ends it."""
    last = declare(folder).run()
    for stage in last.stages:
        if stage.state == "failed":
            print(f"{stage.name} failed: {stage.error}", flush=True)
    raise SystemExit(any(stage.state == "failed" for stage in last.stages))


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
