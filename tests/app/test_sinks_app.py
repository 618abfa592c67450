"""Sinks inside an application: one run feeds every target from a table and from a view, deletions too; what is refused is told once."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.app import launch
from headwater.model.errors import AppFailed, InvalidApp
from headwater.testing.servers.debian import RedisServer
from headwater.testing.servers.server import free_port
from tests.rigs.app.sink_targets import EMBEDDED, Target
from tests.verify.test_verify import verified

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCHEMA = "id STRING NOT NULL, name STRING NOT NULL, n BIGINT, amount DOUBLE"


def per_name(users: Any) -> DataFrame:
    return users.changes.groupBy("name").count()


def row(n: int, key: int | None = None) -> dict[str, Any]:
    return {"id": f"k{n if key is None else key}", "name": f"name {n % 3}", "n": n, "amount": n / 2}


def declare(log: str, spark: SparkSession, targets: list[Target], files: Path) -> hw.App:
    app = hw.App("shop", log=log, spark=spark)
    users = app.table("users", schema=SCHEMA, key="id")
    app.view(users, key="name")(per_name)
    for target in targets:
        app.sink(users, to=target.url, name=f"to.{target.kind}")
    app.sink(per_name, to=f"sqlite:///{files}/names.db", name="names")
    return app


@pytest.fixture
def late_redis() -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of a Redis that is not there yet, and what starts it."""
    import redis

    port, started = free_port(), list[subprocess.Popen[bytes]]()

    def start() -> None:
        words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        started.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))

    yield f"redis://127.0.0.1:{port}/0", start
    for process in started:
        with redis.Redis("127.0.0.1", port) as client:
            client.shutdown(nosave=True)
        process.wait(10)


@pytest.mark.service("postgres")
@pytest.mark.service("redis")
@pytest.mark.parametrize(
    "kinds",
    [
        ("sqlite", "postgres", "redis-hash"),
        pytest.param((*EMBEDDED, "postgres", "redis-json"), marks=pytest.mark.bench),
    ],
    ids=["some", "all"],
)
def test_every_target_follows_a_table(
    kinds: tuple[str, ...],
    make_target: Callable[[str], Target],
    redis_server: RedisServer,
    late_redis: tuple[str, Callable[[], None]],
    tmp_path: Path,
    spark: SparkSession,
) -> None:
    """Large batches come by files and small ones at once; a row that PostgreSQL refuses is a dead letter there and nowhere else; a target
    that is down does not hold up the others, and is brought up when it comes back. `verify` agrees with each plain client."""
    late, start_late = late_redis
    log = hw.open_log(str(tmp_path / "log"))
    targets = [make_target(kind) for kind in kinds]
    app = declare(log.url, spark, targets, tmp_path)
    app.sink("users", to=f"{late}?as=json", name="to.late")
    log.create_topic("users", SCHEMA, key="id", compact=True, partitions=2)
    log.append("users", [row(n) for n in range(12_000)])
    expected = {f"k{n}": row(n) for n in range(12_000)}
    app.start()
    try:
        eventually(lambda: "[unreachable]" in (stage_of(app, "to.late").error or ""), "the one that is down")
        start_late()
        for target in targets:
            eventually(lambda target=target: target.rows() == expected, target.kind)

        bad = {"id": "bad", "name": "a\0b", "n": 1, "amount": 1.0}
        log.append("users", [row(n + 50_000, key=n) for n in range(100)])
        log.append("users", [bad, {"id": "k7", "_deleted": True}, {"id": "k8", "_deleted": True}, row(1, key=8)])
        expected |= {f"k{n}": row(n + 50_000, key=n) for n in range(100)}
        expected |= {"k8": row(1, key=8), "bad": bad}
        del expected["k7"]
        for target in targets:
            held = {key: one for key, one in expected.items() if key != "bad" or target.kind != "postgres"}
            eventually(lambda target=target, held=held: target.rows() == held, target.kind)
        eventually(lambda: is_equal(f"{log.url}#users", f"{late}?as=json"), "the one that came back")
        eventually(lambda: stage_of(app, "to.postgres").dead == 1, "the dead letter")
        check_verified(log, targets, tmp_path)
    finally:
        app.stop()
    dead = log.read("to.postgres.dead").to_pylist()
    assert [(one["topic"], json.loads(one["event"])) for one in dead] == [("users", bad)]
    assert [name for name in log.topics() if name.endswith(".dead")] == ["to.postgres.dead"]
    with sqlite3.connect(tmp_path / "names.db") as names:
        counted = dict(names.execute('select name, "count" from per_name'))
    assert counted == {one["name"]: one["count"] for one in app.views["per_name"].rows().to_pylist()}
    log.close()


@pytest.mark.service("postgres")
def test_columns_that_come_while_it_runs_come_with_their_values(
    make_target: Callable[[str], Target], tmp_path: Path, spark: SparkSession
) -> None:
    """In a table, in files and in another topic; the first rows that have them are in the batch that is planned again."""
    log = hw.open_log(str(tmp_path / "log"))
    table, files = make_target("postgres"), tmp_path / "files"
    app = hw.App("shop", log=log.url, spark=spark)
    users = app.table("users", schema=SCHEMA, key="id")
    app.sink(users, to=table.url, name="to.table")
    app.sink(users, to=str(files), name="to.files")
    app.sink(users, to="copies", name="to.topic")
    app.start()
    expected: dict[str, dict[str, Any]] = {}
    try:
        for step, more in enumerate([{}, {"note": "a note"}, {"note": "another", "place": "here"}]):
            log.alter_topic("users", schema=", ".join([SCHEMA, *(f"{name} STRING" for name in more)]))
            rows = [{**row(n), **more} for n in range(step * 50, step * 50 + 100)]
            log.append("users", rows[:60])
            log.append("users", rows[60:])
            expected.update({one["id"]: one for one in rows})
            eventually(lambda: bare(table.rows()) == bare(expected), f"the table at step {step}")
        eventually(lambda: newest_in_topic(log) == bare(expected), "the topic")
        eventually(lambda: newest_in(files) == bare(expected), "the files")
        assert verified(f"{log.url}#users", table.url).is_equal
        assert [(stage.restarts, stage.error) for stage in app.status().stages] == [(0, None)] * 3
    finally:
        app.stop()
    log.close()


def test_columns_that_come_while_it_is_planned_again_are_not_lost(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a topic's columns and the plan of what is read."""
    log = hw.open_log(str(tmp_path / "log"))
    app = hw.App("shop", log=log.url, spark=spark)
    app.sink(app.table("users", schema=SCHEMA, key="id"), to="copies", name="to.topic")
    app.start()
    columns = [SCHEMA]

    def add_column(name: str) -> None:
        log.alter_topic("users", schema=", ".join([*columns, f"{name} STRING"]))
        columns.append(f"{name} STRING")

    def make_late(*arguments: Any) -> None:
        made(*arguments)
        if len(columns) == 2:
            add_column("place")

    made = launch.make_output
    monkeypatch.setattr(launch, "make_output", make_late)
    try:
        log.append("users", [row(1)])
        eventually(lambda: len(log.read("copies")) == 1, "the first row")
        add_column("note")
        eventually(lambda: len(columns) == 3, "the second column")
        log.append("users", [last := {**row(1), "note": "a note", "place": "here"}])
        eventually(lambda: newest_in_topic(log) == bare([last]), "both columns")
    finally:
        app.stop()
    log.close()


def test_a_copy_in_a_topic_has_the_key_of_what_is_copied(tmp_path: Path, spark: SparkSession) -> None:
    """Of a table, declared or captured, of a view's changes, or as it was told: what comes of one row keeps its order. A topic that is
    there already, with another key or without one, is taken as it is."""
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        database.execute("CREATE TABLE orders (order_id INTEGER PRIMARY KEY, amount REAL)")
        database.executemany("INSERT INTO orders VALUES (?, ?)", [(n, n / 2) for n in range(100)])
        database.commit()
    log = hw.open_log(str(tmp_path / "log"))
    log.create_topic("users", SCHEMA, key="id", compact=True)
    log.create_topic("keyless", SCHEMA)
    log.create_topic("by_name", SCHEMA, key="name")
    for turn in range(2):
        for n in range(turn * 500, turn * 500 + 500, 50):
            log.append("users", [row(m, key=m % 7) for m in range(n, n + 50)])
        app = hw.App("shop", log=log.url, spark=spark)
        users = app.table("users", schema=SCHEMA, key="id")
        app.view(users, key="name")(per_name)
        app.sink(users, to="copies", name="copied")
        app.sink(users, to="named", key="name", name="as_told")
        app.sink(per_name, to="counts", name="counted")
        app.sink(app.table("orders", source=f"sqlite:///{tmp_path}/shop.db"), to="bought")
        app.sink(users, to="keyless", name="without")
        app.sink(users, to="by_name", name="otherwise")
        app.run(available_now=True)
    keys = {"copies": "id", "named": "name", "counts": "key", "bought": "order_id", "keyless": None, "by_name": "name"}
    assert {topic: log.topic(topic).key for topic in keys} == keys
    assert log.read("bought").num_rows == 100
    for topic in ("copies", "named", "by_name"):
        check_order(log, topic)
    log.close()


def counted(version: int) -> Callable[[DataFrame], DataFrame]:
    """What a view is made by: each version another code, the third with a column more and without a name that the others have."""

    def once(sent: DataFrame) -> DataFrame:
        return sent.groupBy("name").agg(F.count("*").alias("n"))

    def twice(sent: DataFrame) -> DataFrame:
        return sent.where("name <> 'name 1'").groupBy("name").agg((2 * F.count("*")).alias("n"))

    def most(sent: DataFrame) -> DataFrame:
        return sent.where("name <> 'name 2'").groupBy("name").agg(F.count("*").alias("n"), F.max("n").alias("most"))

    return (once, twice, most)[version]


def on_from(changes: DataFrame) -> DataFrame:
    """A running difference of a view's changes: what goes out of a sum comes off it, so it is right only if every change comes once."""
    sums = changes.select(
        F.lit("all").alias("what"),
        (F.coalesce("new.n", F.lit(0)) - F.coalesce("old.n", F.lit(0))).alias("more"),
    )
    return sums.groupBy("what").agg(F.sum("more").alias("total"))


def test_what_reads_a_view_follows_it_when_its_code_changes(tmp_path: Path, spark: SparkSession) -> None:
    """A sink, a copy of the changes and a view of the view have what the new code gives: rows that it no longer gives are gone, and
    columns that it adds are there. In a run over what is there, and while it runs; `verify` says so."""
    log = hw.open_log(str(tmp_path / "log"))
    log.create_topic("sent", SCHEMA, key="id")
    target = f"sqlite:///{tmp_path}/names.db?table=names"

    def declare(version: int) -> hw.App:
        app = hw.App("shop", log=log.url, spark=spark)
        app.view(app.topic("sent"), key="name", name="per_name")(counted(version))
        app.sink("per_name.changes", to=target, name="to.names")
        app.sink("per_name.changes", to="copied", name="to.copied")
        app.view("per_name.changes", key="what", name="overall")(on_from)
        return app

    def has_followed(app: hw.App) -> bool:
        with app.views["per_name"] as view, app.views["overall"] as overall:
            rows = {one["name"]: one for one in view.rows().to_pylist()}
            total = overall.get(what="all")
        with closing(sqlite3.connect(tmp_path / "names.db")) as database:
            database.row_factory = sqlite3.Row
            held = {one["name"]: dict(one) for one in database.execute("select * from names")}
        copies = log.read("copied", columns=["_partition", "_offset", "key", "new"]).to_pylist()
        copied = {one["key"]: one["new"] for one in copies}
        report = verified(f"{log.url}#per_name", target)
        return (
            rows == held == {key: new for key, new in copied.items() if new is not None}
            and total == {"what": "all", "total": sum(one["n"] for one in rows.values())}
            and report.is_equal
            and (report.exact, report.behind) == (True, 0)
        )

    for version in (0, 1):
        log.append("sent", [row(n) for n in range(30)])
        app = declare(version)
        app.run(available_now=True)
        assert has_followed(app), version
    last = declare(2)
    last.start()
    try:
        eventually(lambda: "most" in last.views["per_name"].rows().schema.names, "the swap")
        log.append("sent", [row(n) for n in range(100)])
        eventually(lambda: {one["most"] for one in last.views["per_name"].rows().to_pylist()} == {99, 97}, "the events")
        eventually(lambda: has_followed(last), "its readers")
    finally:
        last.stop()
    log.close()


def test_a_view_whose_readers_cannot_take_its_new_rows_is_refused(tmp_path: Path, spark: SparkSession) -> None:
    """Before anything runs, and with the column: a number that becomes text has no place in the changes that are there."""
    log = hw.open_log(str(tmp_path / "log"))
    log.create_topic("sent", SCHEMA, key="id")
    log.append("sent", [row(n) for n in range(30)])

    def as_text(sent: DataFrame) -> DataFrame:
        return counted(0)(sent).select("name", F.col("n").cast("string").alias("n"))

    for code in (counted(0), as_text):
        app = hw.App("shop", log=log.url, spark=spark)
        app.view(app.topic("sent"), key="name", name="per_name")(code)
        app.sink("per_name.changes", to=f"sqlite:///{tmp_path}/names.db", name="to.names")
        if code is as_text:
            with pytest.raises(InvalidApp, match=r"is read by other stages.*new\.n"):
                app.run(available_now=True)
        else:
            app.run(available_now=True)
    alone = hw.App("shop", log=log.url, spark=spark)
    alone.view(alone.topic("sent"), key="name", name="per_name")(as_text)
    told = alone.run(available_now=True).notes[0]
    assert "per_name.changes cannot hold the new rows" in told and "per_name.changes.2" in told
    with alone.views["per_name"] as view:
        assert {one["n"] for one in view.rows().to_pylist()} == {"10"}
    log.close()


def check_order(log: hw.Log, topic: str) -> None:
    """Every row once, those of a key in one partition and in the order in which they came."""
    rows = log.read(topic, columns=["id", "name", "n", "_partition", "_offset"]).to_pylist()
    assert sorted(one["n"] for one in rows) == list(range(1000))
    of_key: dict[str, list[tuple[int, int, int]]] = {}
    for one in rows:
        of_key.setdefault(one[log.topic(topic).key], []).append((one["_partition"], one["_offset"], one["n"]))
    for places in of_key.values():
        assert len({partition for partition, _, _ in places}) == 1
        if topic == "copies":  # of another key, rows come from several partitions
            assert [n for _, _, n in sorted(places)] == sorted(n for _, _, n in places)


def bare(rows: dict[str, dict[str, Any]] | list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last row of each key, without what is null."""
    each = rows.values() if isinstance(rows, dict) else rows
    return {one["id"]: {name: value for name, value in one.items() if value is not None} for one in each}


def newest_in_topic(log: hw.Log) -> dict[str, dict[str, Any]]:
    """The same of the topic of copies: rows of one key are in one partition."""
    return bare(log.read("copies").to_pylist())


def newest_in(files: Path) -> dict[str, dict[str, Any]]:
    """The rows of files in which each has as many columns as it was written with; a key's last one has the most."""
    query = f"""select * exclude (filename) from read_parquet('{files}/**/*.parquet', union_by_name=true, filename=true)
        qualify row_number() over (partition by id order by place is null, note is null) = 1"""
    return bare(duckdb.sql(query).to_arrow_table().to_pylist())


def check_verified(log: hw.Log, targets: list[Target], folder: Path) -> None:
    """Only the row that PostgreSQL refused differs, anywhere."""
    for target in targets:
        report = verified(f"{log.url}#users", target.url)
        differing = [("missing", "bad")] if target.kind == "postgres" else []
        assert [(one.kind, one.key["id"]) for one in report.differences] == differing, target.kind
        assert (report.exact, report.stage) == (True, f"shop.to.{target.kind}")
    eventually(lambda: is_equal(f"{log.url}#per_name", f"sqlite:///{folder}/names.db?table=per_name"), "the view")


def is_equal(source: str, target: str) -> bool:
    try:
        return verified(source, target, settle_s=0.2).is_equal
    except hw.HeadwaterError:
        return False


def stage_of(app: hw.App, name: str) -> Any:
    status = app.status()
    assert status is not None
    return next(stage for stage in status.stages if stage.name == name)


def eventually(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            if is_true():
                return
        except (sqlite3.Error, duckdb.Error, OSError, AssertionError, KeyError, ValueError):
            pass  # not there yet
        except Exception as error:
            if type(error).__module__.split(".")[0] not in ("psycopg", "deltalake", "redis"):
                raise
        assert time.monotonic() < deadline, what
        time.sleep(0.3)


def test_a_sink_without_a_key_or_with_a_wrong_address_is_refused(tmp_path: Path, spark: SparkSession) -> None:
    """Before anything is started."""
    log = hw.open_log(str(tmp_path / "log"))
    log.create_topic("events", "a STRING, b BIGINT")
    for to, key, said in [
        ("sqlite:///x.db", None, "has no key"),
        ("sqlite:///x.db", "c", "no column 'c'"),
        ("gopher://x", "a", "no sink for gopher"),
    ]:
        app = hw.App("wrong", log=log.url, spark=spark)
        app.sink("events", to=to, key=key)
        with pytest.raises((InvalidApp, hw.HeadwaterError), match=said):
            app.run(available_now=True)
    app = hw.App("down", log=log.url, spark=spark)
    app.sink("events", to=f"sqlite:///{tmp_path}/no/folder/x.db", key="a")
    with pytest.raises(AppFailed):
        app.run(available_now=True)
    log.close()
