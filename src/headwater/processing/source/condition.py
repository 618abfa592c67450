"""A condition: the `filter` option, a piece of Spark SQL that picks rows where they are read.

It is parsed as Spark SQL and may name the topic's columns and the log's own. The expression language of Headwater answers it for a whole
Arrow batch at a time, with Spark's results. A condition that the language does not have, or that could fail for a row, is answered by
DuckDB: only the columns that it names go in, and only one boolean for each row comes out. What Spark gets is the log's own memory. As in a
WHERE clause, a row for which the condition is neither true nor false is not picked.

What could give another answer when a lost task is run again (random numbers, the present) is refused, and so is everything that is not a
condition on one row. DuckDB is loaded with the first condition that needs it: Spark starts a Python process for every query, and few do.
Thread-safety: a `Filter` belongs to one thread.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from headwater.model.errors import InvalidInput

if TYPE_CHECKING:
    import duckdb

CONDITIONS_MAX = 16

_EVENTS = "__events__"
_PRESENT = {"current_timestamp", "current_date", "current_time", "localtimestamp", "localtime"}


class Condition(msgspec.Struct, frozen=True):
    """A condition that was read and understood: the columns that it needs, DuckDB's way to say it, and ours where there is one."""

    columns: tuple[str, ...]
    sql: str
    expression: Any = None


@lru_cache(maxsize=CONDITIONS_MAX)
def parse_condition(text: str, columns: tuple[pa.Field, ...]) -> Condition:
    """The condition of a SQL text on these columns; `InvalidInput` says what is wrong and where.

    Every task of a worker asks for the same one again, so it is understood once.
    """
    import sqlglot  # 0.2 s, for those who filter
    from sqlglot import expressions as sql

    try:
        tree: Any = sqlglot.parse_one(text, dialect="spark")
    except sqlglot.errors.SqlglotError as error:
        raise _refused(text, _place(error)) from None
    no_row: tuple[Any, ...] = (sql.Query, sql.AggFunc, sql.Window, sql.Command, sql.Block, sql.DDL, sql.Star)
    wrong = next(tree.find_all(*no_row), None)
    if wrong is not None or not isinstance(tree, sql.Expression):
        shown = (wrong or tree).sql("spark")
        raise _refused(text, f"{shown!r} is not a condition on one row")
    known = {field.name: field for field in columns}
    names = {name.lower(): name for name in known}
    found: dict[str, None] = {}
    for column in tree.find_all(sql.Column):
        name = column.parts[0].name
        if name.lower() not in names:
            raise InvalidInput(
                f"Option filter={text!r} names the column {name!r}, which does not exist.",
                advice=f"Its columns are {', '.join(known)}.",
            )
        found[names[name.lower()]] = None
    expression = _expression(text, pa.schema([known[name] for name in found]))
    if expression is not None:
        return Condition(tuple(found), "", expression)
    condition = Condition(tuple(found), tree.sql("duckdb"))
    called = {function.sql("duckdb").partition("(")[0].strip().lower() for function in tree.find_all(sql.Func)}
    _check_answer(text, condition, called, pa.schema([known[name] for name in found]))
    return condition


class Filter:
    """Picks the rows of batches by a condition."""

    def __init__(self, condition: Condition) -> None:
        self.condition = condition

    def mask(self, batch: pa.RecordBatch) -> pa.Array:
        """For each row whether it is picked."""
        if self.condition.expression is not None:
            columns = {name: batch.column(name) for name in self.condition.columns}
            return self.condition.expression.evaluate(columns, batch.num_rows).fill_null(False)
        rows = batch.select(list(self.condition.columns)) if self.condition.columns else _numbered(batch.num_rows)
        return _answer(self._connection, self.condition, pa.Table.from_batches([rows])).combine_chunks()

    @cached_property
    def _connection(self) -> duckdb.DuckDBPyConnection:
        return _connect()


def _expression(text: str, columns: pa.Schema) -> Any:
    """The condition in our own language; None where it is not in it, or could fail, as a division can. DuckDB then says what is wrong."""
    from headwater.processing.expressions.expression import compile_condition

    try:
        expression = compile_condition(text, columns)
    except InvalidInput:
        return None
    return None if expression.may_fail else expression


def _connect() -> duckdb.DuckDBPyConnection:
    """A DuckDB that sees only what is registered with it, works in the caller's thread and keeps the order of rows."""
    import duckdb

    connection = duckdb.connect(":memory:", config={"python_enable_replacements": "false", "threads": "1"})
    connection.execute("set TimeZone = 'UTC'")
    connection.execute("set enable_external_access = false")
    return connection


def _answer(connection: duckdb.DuckDBPyConnection, condition: Condition, rows: pa.Table) -> pa.ChunkedArray:
    connection.register(_EVENTS, rows)
    try:
        answer = connection.sql(f"select coalesce(({condition.sql}), false) from {_EVENTS}").to_arrow_table()
    finally:
        connection.unregister(_EVENTS)
    return answer.column(0)


def _numbered(count: int) -> pa.RecordBatch:
    """A condition without columns, such as `true`, still has one answer for each row."""
    return pa.record_batch([pa.nulls(count, pa.bool_())], names=["_"])


def _check_answer(text: str, condition: Condition, called: set[str], columns: pa.Schema) -> None:
    import duckdb

    connection = _connect()
    try:
        unstable = connection.sql("select function_name from duckdb_functions() where stability <> 'CONSISTENT'")
        changing = called & ({name for (name,) in unstable.fetchall()} | _PRESENT)
        if changing:
            raise InvalidInput(
                f"Option filter={text!r} calls {min(changing)}, which gives a different answer each time.",
                advice="A repeated task must give the same rows. Filter in Spark instead.",
            )
        rows = columns.empty_table() if condition.columns else pa.Table.from_batches([_numbered(0)])
        answer = _answer(connection, condition, rows)
    except duckdb.Error as error:
        raise _refused(text, str(error).strip().partition("\n")[0]) from None
    finally:
        connection.close()
    if answer.type != pa.bool_():
        raise _refused(text, f"it gives {answer.type}, not true or false")


def _place(error: Any) -> str:
    details = (getattr(error, "errors", None) or [{}])[0]
    if not details.get("highlight"):
        return "its quotes or brackets do not match"
    return f"not understood at {details['highlight']!r}, line {details['line']}, column {details['col']}"


def _refused(text: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"Option filter={text!r} is not a condition: {why}.",
        advice="Write a WHERE clause of Spark SQL, such as \"amount > 10 AND page LIKE '/shop/%'\".",
    )
