"""A captured table held against its database: what the capture adds to it is no difference."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import headwater as hw
from headwater.capture.capture import Capture
from headwater.capture.source_url import open_source
from headwater.verify.comparison import VerifyReport, compare, open_pair

TABLES = {
    "users": "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, city TEXT)",
    "stock": "CREATE TABLE stock (shop TEXT NOT NULL, product INTEGER NOT NULL, pieces INTEGER, PRIMARY KEY (shop, product))",
}
ROWS = {
    "users": "INSERT INTO users VALUES (1, 'Ada', 'London'), (2, 'Bob', NULL)",
    "stock": "INSERT INTO stock VALUES ('north', 1, 5), ('north', 2, 0), ('south', 1, 7)",
}


def change(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / "shop.db", isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)


def catch_up(folder: Path) -> None:
    with hw.open_log(folder / "log") as log:
        capture = Capture(log, open_source(f"sqlite:///{folder}/shop.db"))
        capture.open()
        capture.catch_up()
        capture.close()


def verified(source: str, target: str) -> VerifyReport:
    pair = open_pair(source, target)
    try:
        return compare(pair, settle_s=0.2)
    finally:
        pair.close()


@pytest.mark.parametrize("table", TABLES)
def test_the_log_is_held_against_the_database(tmp_path: Path, table: str) -> None:
    """In both directions, also with a key of several columns, which the log has as one."""
    change(tmp_path, *TABLES.values(), *ROWS.values())
    catch_up(tmp_path)
    here, there = f"sqlite:///{tmp_path}/shop.db?table={table}", f"{tmp_path}/log#{table}"
    rows = {"users": 2, "stock": 3}[table]
    for source, target in ((here, there), (there, here)):
        report = verified(source, target)
        assert (report.is_equal, report.rows) == (True, rows)
    change(tmp_path, "UPDATE users SET city = 'Rome' WHERE id = 2", "DELETE FROM stock WHERE shop = 'south'")
    report = verified(here, there)
    (found,) = report.differences
    wanted = {
        "users": ("different", {"id": 2}, ("city",)),
        "stock": ("extra", {"shop": "south", "product": 1}, ()),
    }
    assert (found.kind, dict(found.key), found.columns) == wanted[table]
    catch_up(tmp_path)
    assert verified(here, there).is_equal
