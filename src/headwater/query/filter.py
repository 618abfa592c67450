"""A filter over batches: an SQL expression such as `amount > 100 and page like '/shop%'`, answered by DuckDB."""

from __future__ import annotations

import tempfile

import duckdb
import pyarrow as pa

from headwater.model.errors import InvalidInput
from headwater.query.query import connect, first_sentence


class RowFilter:
    """The expression, checked against the columns that it will see."""

    def __init__(self, expression: str, schema: pa.Schema) -> None:
        self._expression = expression
        self._connection = connect(tempfile.gettempdir())
        self.apply(pa.RecordBatch.from_pylist([], schema=schema))

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows for which the expression is true, in their order."""
        try:
            rows = self._connection.from_arrow(pa.Table.from_batches([batch]))
            kept = rows.project(f"({self._expression})::boolean as kept").to_arrow_table()
        except duckdb.Error as error:
            raise InvalidInput(
                f"--where {self._expression!r:.80}: {first_sentence(error)}",
                advice=f"Write one SQL condition over {', '.join(batch.schema.names)}.",
            ) from None
        return batch.filter(kept["kept"].combine_chunks())
