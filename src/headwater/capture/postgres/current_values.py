"""The database as it is now, asked for what the stream does not send: large values that did not change, and generated columns.

Values go and come as the text that the stream has, so that they are read by the same functions. A question that cannot be answered, because
the table or a column is not there any more, is answered by nulls: the stream will say so too, and the table is copied again then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa

from headwater.capture.postgres.connection import PostgresDatabase
from headwater.capture.postgres.tables import PgColumn, PgTable
from headwater.capture.postgres.types import decoded, printed
from headwater.databases.address import quoted
from headwater.model.errors import HeadwaterError

ROWS_MAX = 20_000


class PresentDatabase:
    """Answers by statements over arrays of text, some thousand rows at a time."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    def values(self, table: PgTable, keys: dict[str, pa.Array], columns: list[str]) -> dict[str, pa.Array]:
        """Some columns of the rows with these keys, null where a row or a column is gone."""
        by_name = {column.name: column for column in table.columns}
        match = " and ".join(
            f"t.{quoted(name)} = asked.k{at}::{by_name[name].declared}" for at, name in enumerate(keys)
        )
        wanted = ", ".join(printed(f"t.{quoted(name)}") for name in columns)
        given = ", ".join("%s::text[]" for _ in keys)
        aliases = ", ".join(f"k{at}" for at in range(len(keys)))
        statement = (
            f"select {wanted} from unnest({given}) with ordinality as asked ({aliases}, number) "
            f"left join {table.sql} t on {match} order by asked.number"
        )
        return self._answers(statement, list(keys.values()), columns)

    def computed(self, table: PgTable, columns: dict[str, pa.Array], count: int) -> dict[str, pa.Array]:
        """The generated columns of rows with these columns."""
        made = [column for column in table.columns if column.generated and column.expression]
        used = [column for column in table.columns if column.name in columns and _is_used(column, made)]
        if not count or not used:
            return {column.name: pa.nulls(count, pa.binary()) for column in made}
        given = ", ".join("%s::text[]" for _ in used)
        aliases = ", ".join(f"c{at}" for at in range(len(used)))
        cast = ", ".join(f"c{at}::{column.declared} as {quoted(column.name)}" for at, column in enumerate(used))
        wanted = ", ".join(printed(f"({column.expression})::{column.declared}") for column in made)
        statement = (
            f"select {wanted} from (select number, {cast} from unnest({given}) with ordinality as asked ({aliases}, number)) "
            f"as {quoted(table.name)} order by number"
        )
        return self._answers(statement, [columns[column.name] for column in used], [column.name for column in made])

    def _answers(self, statement: str, given: list[pa.Array], names: list[str]) -> dict[str, pa.Array]:
        texts = [decoded(column) for column in given]
        answers: list[Sequence[str | None]] = []
        for begin in range(0, len(texts[0]), ROWS_MAX):
            part = [text.slice(begin, ROWS_MAX) for text in texts]
            answers += self._rows(statement, [text.to_pylist() for text in part], len(names), len(part[0]))
        columns = zip(*answers, strict=True) if answers else ([] for _ in names)
        return {
            name: pa.array(values, pa.string()).cast(pa.binary()) for name, values in zip(names, columns, strict=True)
        }

    def _rows(
        self, statement: str, parameters: list[list[str | None]], width: int, count: int
    ) -> list[Sequence[str | None]]:
        try:
            return self._database.ask(statement, parameters)
        except HeadwaterError as error:
            if error.retriable and self._database.is_lost():
                raise
            return [(None,) * width] * count


def _is_used(column: PgColumn, made: list[PgColumn]) -> bool:
    word = re.compile(rf'(?<![\w"]){re.escape(column.name)}(?![\w"])|{re.escape(quoted(column.name))}')
    return not column.generated and any(word.search(other.expression or "") for other in made)
