"""Captured tables in an application: declared with their source, followed while it runs, shown in plan and status."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from headwater.model.errors import AppFailed, InvalidApp, NotCapturable
from headwater.processing.graph.table import Table
from tests.rigs.wait import wait_until


def names(users: Table) -> DataFrame:
    return users.changes.select("id", "name")


def totals(orders: Table) -> DataFrame:
    return orders.changes.select("order_id", "amount")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT)")
        connection.execute("CREATE TABLE orders (order_id INTEGER PRIMARY KEY, amount REAL)")
        connection.execute("INSERT INTO users VALUES (1, 'ada'), (2, 'bob')")
        connection.execute("INSERT INTO orders VALUES (10, 1.5)")
        yield connection


def declared(folder: Path, spark: SparkSession | None = None) -> hw.App:
    """Two tables of one database; one of them has another name in the log."""
    app = hw.App("shop", log=folder / "log", spark=spark)
    users = app.table("users", source=f"sqlite:///{folder}/shop.db")
    orders = app.table("bought", source=f"sqlite:///{folder}/shop.db?table=orders")
    app.view(users, key="id")(names)
    app.view(orders, key="order_id")(totals)
    return app


def test_what_the_database_says_itself_is_not_declared(tmp_path: Path) -> None:
    """Nothing is opened or made before the application runs."""
    app = hw.App("shop", log=tmp_path / "log")
    with pytest.raises(InvalidApp, match="from a database, which defines schema"):
        app.table("users", "id BIGINT", source="sqlite:///shop.db")
    with pytest.raises(InvalidApp, match="not the URL of a database"):
        app.table("users", source="shop.db")
    with pytest.raises(InvalidApp, match="2 tables"):
        app.table("users", source="sqlite:///shop.db?table=a,b")
    app.table("users", source="postgresql://me:secret@host/shop")
    app.view("users", key="id")(names)
    assert "users (captured from postgresql://me:***@host/shop)" in app.graph.draw()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_batch_brings_what_the_database_has_now(
    tmp_path: Path, database: sqlite3.Connection, spark: SparkSession
) -> None:
    """And the next one what came since; `plan` makes nothing."""
    app = declared(tmp_path, spark)
    assert "users (captured from sqlite:///" in app.plan()
    assert database.execute("SELECT count(*) FROM sqlite_master WHERE type = 'trigger'").fetchone() == (0,)
    status = app.run(available_now=True)
    assert [(stage.kind, stage.to, stage.events) for stage in status.stages[:1]] == [("capture", "users, bought", 3)]
    assert app.views["names"].get(id=1) == {"id": 1, "name": "ada"}
    database.execute("UPDATE users SET name = 'Ada' WHERE id = 1")
    database.execute("INSERT INTO orders VALUES (11, 2.5)")
    app.run(available_now=True)
    assert app.views["names"].get(id=1) == {"id": 1, "name": "Ada"}
    assert app.views["totals"].rows().num_rows == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_running_application_follows_the_database(
    tmp_path: Path, database: sqlite3.Connection, spark: SparkSession
) -> None:
    """A table that cannot be followed any more is told as a failure; the application goes on with the others."""
    app = declared(tmp_path, spark)
    app.start()
    try:
        database.execute("INSERT INTO users VALUES (3, 'eve')")
        wait_until(lambda: "names" in app.views and is_there(app, 3))
        status = app.status()
        assert status is not None
        assert [stage.state for stage in status.stages] == ["running"] * 3
        database.execute("DROP TABLE orders")
        database.execute("INSERT INTO users VALUES (4, 'joe')")
        wait_until(lambda: is_there(app, 4))
        status = app.status()
        assert status is not None
        assert status.stages[0].state == "failed"
        assert "Table 'orders' does not exist" in (status.stages[0].error or "")
    finally:
        app.stop()
    assert database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'headwater:shop:changes'").fetchone() == (
        1,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_table_that_is_not_there_is_told_before_anything_starts(
    tmp_path: Path, database: sqlite3.Connection, spark: SparkSession
) -> None:
    """With the tables that are."""
    app = hw.App("shop", log=tmp_path / "log", spark=spark)
    app.view(app.table("nobody", source=f"sqlite:///{tmp_path}/shop.db"), key="id")(names)
    with pytest.raises(NotCapturable, match="orders, users"):
        app.run(available_now=True)
    database.execute("CREATE TABLE nobody (id INTEGER PRIMARY KEY, name TEXT, committed TEXT)")
    with pytest.raises((NotCapturable, AppFailed), match="'committed'"):
        app.run(available_now=True)


def is_there(app: hw.App, number: int) -> bool:
    return app.views["names"].get(id=number) is not None
