"""The figures of sinks: `python -m bench.sinks` writes `bench/results/sinks.json`.

Rows of a keyed topic go through a Spark stage into each target, with the ledger, in batches of 250,000. Beside that is what one would
write instead: Spark's JDBC writer (which can only append, and appends again what a failed batch had written), psycopg's `executemany`, a
loop over redis-py with and without a pipeline, `executemany` of sqlite3, a loop that adds documents to tantivy, `write_deltalake`.
`--quick` shrinks everything.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import redis
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from bench.harness import Figure, Options, Target, main, measure
from bench.pipeline.rig import Rig
from headwater.app.outputs.sinks import EVENTS_MAX, LOG_COLUMNS, TargetWriter
from headwater.model.schema import to_arrow_schema
from headwater.processing.graph.graph import StageNode
from headwater.sinks.sink import Shape
from headwater.testing.servers import maven
from headwater.testing.servers.debian import RedisServer
from headwater.testing.servers.postgres import PostgresServer

ROWS, ROWS_QUICK = 500_000, 100_000
LOOP_SHARE = 10
"""A loop with one round trip for each row is measured with so many times fewer rows."""

TOPIC = "users"
COLUMNS = "id STRING, name STRING, age BIGINT, amount DOUBLE, seen TIMESTAMP"
SHAPE = Shape(TOPIC, to_arrow_schema(COLUMNS), ("id",))
PAGE = 1_000
UPSERT = (
    "insert into users (id, name, age, amount, seen) values ({marks}) on conflict (id) do update set "
    "name = excluded.name, age = excluded.age, amount = excluded.amount, seen = excluded.seen"
)
CREATE = "create table users (id text primary key, name text, age bigint, amount double precision, seen timestamp)"
_JDBC = ("org.postgresql:postgresql:42.7.4",)


class SinkRig(Rig):
    """Spark with PostgreSQL's driver, the servers, and a topic of rows."""

    @cached_property
    def spark(self) -> SparkSession:
        jars = maven.fetch_jars("postgresql-jdbc-42.7.4", _JDBC, alone=True)
        return self._session({"spark.jars": ",".join(str(jar) for jar in sorted(jars.glob("*.jar")))})

    @cached_property
    def postgres(self) -> PostgresServer:
        return self._stack.enter_context(PostgresServer())

    @cached_property
    def redis(self) -> RedisServer:
        return self._stack.enter_context(RedisServer(parent_folder=self.folder))

    def log(self, events: int) -> str:
        folder = self.folder / f"rows-{events}"
        if not folder.exists():
            with hw.open_log(str(folder)) as log:
                log.create_topic(TOPIC, COLUMNS, key="id")
                log.append(TOPIC, rows(events))
        return str(folder)

    def written(self, to: str, events: int) -> float:
        """Rows a second of a stage that fills an empty target."""
        number = next(self._numbers)
        checkpoint = self.folder / f"checkpoint-{number}"
        node = StageNode(name="sink", kind="sink", inputs=(TOPIC,), function=None, to=to)
        with hw.open_log(self.log(events)) as log:
            folder = self.folder / f"leaving-{number}"
            writer = TargetWriter(
                log, node, SHAPE, name=f"bench.{number}", checkpoint=str(checkpoint), folder=folder, of_view=False
            )
            write = writer.begin()
            rate = self.batches(events, checkpoint, lambda frame, epoch: _nothing(write(frame, epoch)))
            writer.close()
        return rate

    def by_jdbc(self, events: int) -> float:
        """The same by Spark's own writer, two connections, batches of 10,000 in one statement."""
        checkpoint = self.folder / f"checkpoint-{next(self._numbers)}"
        url = f"jdbc:postgresql://127.0.0.1:{self.postgres.port}/postgres?user=postgres&reWriteBatchedInserts=true"

        def write(frame: DataFrame, epoch: int) -> None:
            named = frame.drop(*LOG_COLUMNS).write.format("jdbc").option("driver", "org.postgresql.Driver")
            named.options(url=url, dbtable="users", batchsize="10000").mode("append").save()

        return self.batches(events, checkpoint, write)

    def batches(self, events: int, checkpoint: Path, write: Callable[[DataFrame, int], None]) -> float:
        """Rows by the time that the batches of a stream take."""
        columns = ",".join([*SHAPE.schema.names, *LOG_COLUMNS])
        frame = self.from_log(self.log(events), TOPIC, columns=columns, maxOffsetsPerTrigger=str(EVENTS_MAX))
        query = frame.writeStream.foreachBatch(write).option("checkpointLocation", str(checkpoint))
        running = query.trigger(availableNow=True).start()
        running.awaitTermination()
        progress = running.recentProgress
        assert sum(batch["numInputRows"] for batch in progress) >= events
        return events / sum(batch["durationMs"]["triggerExecution"] for batch in progress) * 1000

    def pages(self, events: int) -> Iterator[list[tuple[Any, ...]]]:
        """The rows as a plain program has them."""
        with hw.open_log(self.log(events), read_only=True) as log:
            for batch in log.scan(TOPIC):
                for start in range(0, batch.num_rows, PAGE):
                    page = batch.slice(start, PAGE)
                    yield list(zip(*(column.to_pylist() for column in page.columns), strict=True))


def postgres(rig: SinkRig, options: Options) -> list[Figure]:
    """COPY and merge beside Spark's JDBC writer and beside psycopg."""
    events = ROWS_QUICK if options.quick else ROWS
    to = f"{rig.postgres.url}?table=users"

    def emptied(run: Callable[[], float], *, make: bool) -> Callable[[], float]:
        def measured() -> float:
            with psycopg.connect(rig.postgres.url, autocommit=True) as connection:
                connection.execute("drop table if exists users")
                if make:
                    connection.execute(CREATE.replace("timestamp)", "timestamptz)"))
            return run()

        return measured

    def executemany() -> float:
        began = time.perf_counter()
        with psycopg.connect(rig.postgres.url) as connection, connection.cursor() as cursor:
            for page in rig.pages(events):
                cursor.executemany(UPSERT.format(marks="%s, %s, %s, %s, %s"), page)
        return events / (time.perf_counter() - began)

    ours = emptied(lambda: rig.written(to, events), make=False)
    jdbc = measure(options, ours, emptied(lambda: rig.by_jdbc(events), make=True))
    loop = measure(options, ours, emptied(executemany, make=True))
    what = "rows of a topic merged into an empty table, with the ledger"
    return [
        Figure("postgres_jdbc", what, "rows/s", jdbc, "Spark's JDBC writer, appending by two connections"),
        Figure("postgres_executemany", what, "rows/s", loop, "psycopg executemany, 1,000 a time", Target(">=", 1.0)),
    ]


def in_redis(rig: SinkRig, options: Options) -> list[Figure]:
    """Scripts of 4,000 rows beside redis-py, one by one and pipelined."""
    events = ROWS_QUICK if options.quick else ROWS
    address = f"redis://127.0.0.1:{rig.redis.port}/0"

    def ours() -> float:
        _flush(address)
        return rig.written(f"{address}?prefix=users:&as=hash", events)

    def loop(events: int, *, pipelined: bool) -> float:
        _flush(address)
        began = time.perf_counter()
        with redis.Redis.from_url(address) as client:
            for page in rig.pages(events):
                to: Any = client.pipeline(transaction=False) if pipelined else client
                for key, name, age, amount, seen in page:
                    fields = {"id": key, "name": name, "age": age, "amount": amount, "seen": seen.isoformat()}
                    to.hset(f"users:{key}", mapping=fields)
                if pipelined:
                    to.execute()
        return events / (time.perf_counter() - began)

    one = measure(options, ours, lambda: loop(events // LOOP_SHARE, pipelined=False))
    many = measure(options, ours, lambda: loop(events, pipelined=True))
    what = "rows of a topic as hashes, with the ledger"
    return [
        Figure("redis_loop", what, "rows/s", one, "redis-py, hset for each row", Target(">=", 3.0)),
        Figure("redis_pipeline", what, "rows/s", many, "redis-py, pipelines of 1,000", Target(">=", 1.0)),
    ]


def embedded(rig: SinkRig, options: Options) -> list[Figure]:
    """SQLite, DuckDB, tantivy and Delta, each beside its own client."""
    events = ROWS_QUICK if options.quick else ROWS

    def ours(url: Callable[[Path], str]) -> Callable[[], float]:
        return lambda: rig.written(url(rig.folder / f"target-{next(rig._numbers)}"), events)

    def by_sqlite() -> float:
        began = time.perf_counter()
        connection = sqlite3.connect(rig.folder / f"target-{next(rig._numbers)}.db")
        connection.execute(CREATE)
        for page in rig.pages(events):
            rows = [(*row[:4], row[4].isoformat()) for row in page]
            connection.executemany(UPSERT.format(marks="?, ?, ?, ?, ?"), rows)
        connection.commit()
        connection.close()
        return events / (time.perf_counter() - began)

    def by_tantivy() -> float:
        import tantivy

        folder = rig.folder / f"target-{next(rig._numbers)}"
        folder.mkdir()
        builder = tantivy.SchemaBuilder().add_text_field("id", stored=True, tokenizer_name="raw")
        builder = builder.add_text_field("name").add_integer_field("age", indexed=True, fast=True)
        schema = builder.add_float_field("amount", indexed=True, fast=True).add_date_field("seen", fast=True).build()
        began = time.perf_counter()
        writer = tantivy.Index(schema, path=str(folder)).writer(64 << 20, 1)
        for page in rig.pages(events):
            for key, name, age, amount, seen in page:
                writer.add_document(tantivy.Document(id=key, name=name, age=age, amount=amount, seen=seen))
        writer.commit()
        writer.wait_merging_threads()
        return events / (time.perf_counter() - began)

    def by_delta() -> float:
        import deltalake

        began = time.perf_counter()
        with hw.open_log(rig.log(events), read_only=True) as log:
            deltalake.write_deltalake(str(rig.folder / f"target-{next(rig._numbers)}"), log.read(TOPIC))
        return events / (time.perf_counter() - began)

    what = "rows of a topic into an empty target, with the ledger"
    sides = [
        ("sqlite", lambda path: f"sqlite:///{path}.db?table=users", by_sqlite, "sqlite3 executemany"),
        ("duckdb", lambda path: f"duckdb:///{path}.duckdb?table=users", None, None),
        ("tantivy", lambda path: f"tantivy:///{path}", by_tantivy, "tantivy add_document for each row"),
        ("delta", lambda path: f"delta:///{path}", by_delta, "write_deltalake, appending, in one piece"),
    ]
    return [Figure(name, what, "rows/s", measure(options, ours(url), peer), said) for name, url, peer, said in sides]


def rows(count: int) -> pa.Table:
    """Rows with keys of their own, in any order."""
    chance = np.random.default_rng(11)
    order = pa.array(chance.permutation(count))
    return pa.table(
        {
            "id": pc.binary_join_element_wise("user ", order.cast(pa.string()), ""),
            "name": pc.binary_join_element_wise("a name of some length ", order.cast(pa.string()), ""),
            "age": pa.array(chance.integers(0, 99, count)),
            "amount": pa.array(chance.random(count)),
            "seen": pa.array(1_770_000_000_000_000 + np.arange(count), pa.int64()).cast(pa.timestamp("us", "UTC")),
        }
    )


def _flush(address: str) -> None:
    with redis.Redis.from_url(address) as client:
        client.flushall()


def _nothing(result: object) -> None:
    """Spark wants nothing back."""


if __name__ == "__main__":
    with SinkRig() as rig:
        benches = {
            "postgres": lambda options: postgres(rig, options),
            "redis": lambda options: in_redis(rig, options),
            "embedded": lambda options: embedded(rig, options),
        }
        status = main("sinks", benches)
    raise SystemExit(status)
