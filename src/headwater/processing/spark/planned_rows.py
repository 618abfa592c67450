"""Fetched rows: how a stream reader hands the rows of a batch to Spark with the plan, without a task that reads them.

A task that reads needs a Python process, which takes longer than reading a few rows. Spark has a way around it for its simple readers
only, and knows them by their class; so a reader that holds rows calls itself one until they are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper


class PlannedRowsReader(DataSourceStreamReader):
    """A reader that may put the rows of the batch it plans into `fetched`, and then plans one task."""

    fetched: list[pa.RecordBatch] | None = None

    @property
    def __class__(self) -> type:
        return type(self) if self.fetched is None else _SimpleStreamReaderWrapper

    @__class__.setter
    def __class__(self, _: type) -> None:
        raise TypeError("A reader's class is not changed.")

    def getCache(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[pa.RecordBatch] | None:
        """The rows of the batch that was planned just now; Spark asks who holds some."""
        fetched, self.fetched = self.fetched, None
        return None if fetched is None else iter(fetched)
