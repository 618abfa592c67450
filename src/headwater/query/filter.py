"""A filter over batches: an SQL condition such as `amount > 100 and page like '/shop%'`, evaluated by DuckDB."""

from __future__ import annotations

import tempfile

import duckdb
import pyarrow as pa

from headwater.model.errors import InvalidInput
from headwater.query.query import connect, first_sentence


class RowFilter:
    """A condition, checked against the columns of the batches."""

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
                f"The condition {self._expression!r:.80} of --where is not valid: {first_sentence(error)}",
                advice=f"Write one SQL condition over the columns {', '.join(batch.schema.names)}.",
            ) from None
        return batch.filter(kept["kept"].combine_chunks())
