"""Numbers at the ends of their types, above all unsigned ones: copied, changed, polled and compared, they are the same everywhere.

What is expected is what was written into the database, by a client of its own.
"""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from headwater.capture.capture import Capture
from headwater.capture.source_url import open_source
from headwater.log.log import open_log
from headwater.testing.servers.mariadb import MariaDbServer
from headwater.testing.servers.postgres import PostgresServer
from tests.capture.poll.test_capture_poll import AT_ONCE
from tests.rigs.capture.mysql import follow as follow_mysql
from tests.rigs.capture.mysql import rigged as rigged_mysql
from tests.rigs.capture.postgres import Rig, follow, rigged
from tests.verify.test_verify import verified

Row = dict[str, Any]

_CHANCE = random.Random(20)
EDGES_32 = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, *(_CHANCE.randrange(2**31, 2**32) for _ in range(4))]
EDGES_64 = [
    *EDGES_32,
    *(2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1),
    *(_CHANCE.randrange(2**63, 2**64) for _ in range(4)),
]

POSTGRES = """
create domain ref as oid;
create domain ref_of_ref as ref not null default 0;
create type pair as (a oid, b ref, c oid[]);
create table extremes (
    id oid primary key, touched bigint not null, plain oid, refs ref, deeper ref_of_ref, many oid[], many_refs ref[], pairs pair,
    all_pairs pair[],
    vector oidvector, transaction_ xid, whole xid8, command cid, class regclass, kind regtype, function_ regprocedure, role_ regrole,
    single "char", amount money, digits numeric(20, 0), big bigint, bits bit(64), place pg_lsn, small smallint,
    twice oid generated always as (plain) stored
)"""


def postgres_row(at: int, value: int) -> str:
    huge = EDGES_64[at % len(EDGES_64)]
    big = min(huge, 2**63 - 1)
    return f"""insert into extremes values ({value}, {at}, {value}, {value}, {value}, '{{0,NULL,{value}}}', '{{{value}}}',
        row({value}, {value}, '{{{value}}}'), array[row({value}, null, null)::pair], '0 {value}', '{value}', '{huge}', '{value}',
        {value}, {value}, {value}, {value}, chr({at % 127 + 1})::"char", {big} / 1000::numeric, {huge}, {big}, {big}::bit(64),
        '{value:X}/{value:X}', {-(2**15)})"""


@pytest.fixture
def postgres_rows(postgres: PostgresServer, tmp_path: Path) -> Any:
    with rigged(postgres, tmp_path) as rig:
        rig.run(*POSTGRES.split(";"), *(postgres_row(at, value) for at, value in enumerate(EDGES_32)))
        yield rig


def by_id(rows: list[Row]) -> dict[int, Row]:
    return {row["id"]: {name: value for name, value in row.items() if name != "touched"} for row in rows}


@pytest.mark.service("postgres")
def test_postgresql_gives_one_value_by_backfill_change_and_poll(postgres_rows: Rig) -> None:
    """A row that was copied, and is then changed in another column, keeps all of its values; `verify` finds nothing."""
    rig = postgres_rows
    with rig.capture("extremes") as capture:
        copied = by_id(rig.table("extremes"))
        assert sorted(copied) == sorted(EDGES_32)
        rig.run("update extremes set touched = touched + 1000")
        follow(capture, rig)
        assert by_id(rig.table("extremes")) == copied
        changed = [row for row in rig.history("extremes") if row["op"] == "u"]
        assert by_id([row["after"] for row in changed]) == copied
        columns = [name for name in copied[0] if "pairs" not in name and name != "primary_key"]
        report = verified(f"{rig.log.url}#extremes", f"{rig.url}?table=extremes", columns=columns)
        assert report.is_equal and report.rows == len(EDGES_32), report.differences[:3]
        rig.run("delete from extremes where plain > 2147483647")
        follow(capture, rig)
        assert sorted(by_id(rig.table("extremes"))) == [0, 1, 2**31 - 1]
    for value, row in copied.items():
        assert (row["plain"], row["refs"], row["deeper"], row["twice"]) == (value,) * 4
        assert (row["many"], row["many_refs"]) == ([0, None, value], [value])
        assert row["pairs"] == {"a": value, "b": value, "c": [value]}
        assert (row["transaction_"], row["command"], row["vector"]) == (str(value), str(value), f"0 {value}")


@pytest.mark.service("postgres")
def test_a_polled_postgresql_gives_the_same_values(postgres_rows: Rig, tmp_path: Path) -> None:
    """Walked over by an oid, too, whose order is that of its unsigned values."""
    rig = postgres_rows
    with rig.capture("extremes"):
        copied = by_id(rig.table("extremes"))
    assert [row["plain"] for row in copied.values()] == list(copied) and set(copied) == set(EDGES_32)
    for by in ("touched", "plain"):
        with open_log(tmp_path / f"by {by}") as log:
            url = rig.url.replace("postgresql://", "poll+postgresql://") + f"?table=extremes&by={by}{AT_ONCE}"
            capture = Capture(log, open_source(url, name="polled"), partitions=1)
            capture.open()
            capture.catch_up()
            capture.close()
            found = log.table("extremes").select([*copied[0], "touched"]).to_pylist()
            assert by_id(found) == copied


SET_64 = [f"e{at}" for at in range(64)]


@pytest.mark.service("mariadb")
def test_mariadb_gives_one_value_by_backfill_and_change(mariadb: MariaDbServer, tmp_path: Path) -> None:
    """Every unsigned type at its ends, as a value and as a part of the key; so do bits, years, and sets of 64 elements."""
    widths = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "bigint": 64}
    columns = ", ".join(f"{name}_u {name} unsigned, {name}_s {name}" for name in widths)
    bits = {f"bit_{width}": width for width in (2, 31, 32, 33, 63, 64)}
    elements = ", ".join(f"'{name}'" for name in SET_64)
    names = ", ".join(f"'{at}'" for at in range(300))
    with rigged_mysql(mariadb, tmp_path) as rig:
        rig.run(
            f"create table extremes (id bigint unsigned, number int unsigned, touched int, {columns}, "
            + ", ".join(f"{name} bit({width})" for name, width in bits.items())
            + f", y year, tags set({elements}), chosen enum({names}), filled int unsigned zerofill, price decimal(20, 2) unsigned, "
            "primary key (id, number))"
        )
        expected: dict[int, Row] = {}
        for at, value in enumerate(EDGES_64):
            row: Row = {"id": Decimal(value), "number": value % 2**32}
            for name, width in widths.items():
                row[f"{name}_u"] = value & (2**width - 1)
                row[f"{name}_s"] = (value & (2**width - 1)) - 2 ** (width - 1)
            row["bigint_u"] = Decimal(row["bigint_u"])
            row |= {name: value & (2**width - 1) for name, width in bits.items()}
            row["bit_64"] = Decimal(row["bit_64"])
            row["y"] = (0, 1901, 2155)[at % 3]
            row["tags"] = ",".join(name for bit, name in enumerate(SET_64) if value >> bit & 1)
            row["chosen"] = str((0, 127, 128, 254, 255, 256, 299)[at % 7])
            row["filled"], row["price"] = value % 2**32, Decimal(value % 10**18) / 100
            expected[value] = row
            values = ", ".join(f"'{item}'" if isinstance(item, str) else str(item) for item in row.values())
            rig.run(f"insert into extremes ({', '.join(row)}, touched) values ({values}, 0)")
        with rig.capture("extremes") as capture:
            assert plain(rig.table("extremes")) == expected
            rig.run("update extremes set touched = 1")
            follow_mysql(capture, rig)
            assert plain(rig.table("extremes")) == expected
            changed = [row for row in rig.history("extremes") if row["op"] == "u"]
            assert plain([row["after"] for row in changed]) == plain([row["before"] for row in changed]) == expected
            rig.run("delete from extremes where id >= 9223372036854775808")
            follow_mysql(capture, rig)
            assert sorted(plain(rig.table("extremes"))) == sorted(value for value in expected if value < 2**63)


def plain(rows: list[Row]) -> dict[int, Row]:
    kept = [{name: value for name, value in row.items() if name not in ("touched", "primary_key")} for row in rows]
    return {int(row["id"]): row for row in kept}


def test_sqlite_gives_one_value_by_backfill_change_and_poll(tmp_path: Path) -> None:
    """Its integers have 64 bits and a sign, whatever the column is called; what is larger is a REAL, there as here."""
    values = [*EDGES_32, 2**63 - 1, -(2**63), -(2**31), -(2**31) - 1, 2**53 + 1]
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute(
            "create table extremes (id integer primary key, touched integer, n unsigned big int, i int, b bigint unsigned)"
        )
        database.executemany("insert into extremes values (?, 0, ?, ?, ?)", [(value,) * 4 for value in values])
        database.commit()
        expected = {value: {"id": value, "n": value, "i": value, "b": value} for value in values}
        columns = ["id", "touched", "n", "i", "b"]
        with open_log(tmp_path / "log") as log:
            capture = Capture(log, open_source(f"sqlite:///{path}?table=extremes"), partitions=1)
            capture.open()
            capture.catch_up()
            assert by_id(log.table("extremes").select(columns).to_pylist()) == expected
            database.execute("update extremes set touched = id")
            database.commit()
            capture.catch_up()
            assert by_id(log.table("extremes").select(columns).to_pylist()) == expected
            capture.close()
            changed = [row["after"] for row in log.read("extremes.changes").to_pylist() if row["op"] == "u"]
            assert by_id([{name: row[name] for name in columns} for row in changed]) == expected
        with open_log(tmp_path / "polled") as log:
            polled = Capture(log, open_source(f"poll+sqlite:///{path}?table=extremes&by=n{AT_ONCE}"), partitions=1)
            polled.open()
            polled.catch_up()
            polled.close()
            assert by_id(log.table("extremes").select(columns).to_pylist()) == expected
