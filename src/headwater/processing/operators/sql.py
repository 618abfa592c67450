"""SQL over Arrow tables, for operators whose work is sorting, ranking and adding up: DuckDB, in the process that asks.

A database takes longer to open than a batch takes to compute, so each process opens one and keeps it; it holds no data, and a question
sees the tables that it is given and no others. One thread, because Spark runs a task on each processor already.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    import duckdb


def ask(sql: str, **tables: pa.Table) -> pa.Table:
    """The answer to one SELECT over these tables."""
    with _database(os.getpid()).cursor() as database:
        for name, table in tables.items():
            database.register(name, table)
        return database.sql(sql).to_arrow_table()


@cache
def _database(process: int) -> duckdb.DuckDBPyConnection:
    """The database of a process; one that was forked opens its own."""
    import duckdb

    return duckdb.connect(config={"threads": 1})
