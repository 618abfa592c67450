"""A table in a Parquet or Arrow file: `export` writes it, `import` and `produce` read it, batch by batch.

The columns are those of the topic, all nullable (a tombstone may have only its key), then `_headers` and `_deleted`. The
schema's metadata has the topic's settings under `headwater`, in the form of the log's own topic file, so that
`import --create` can create the same topic. Files of other programs have no such metadata, and can be read too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as parquet

from headwater.log.port.topic import Topic, topic_from_json, topic_to_json
from headwater.model.errors import InvalidInput
from headwater.model.schema import DELETED, HEADERS

ROWS = 65_536

_KEY = b"headwater"


def table_schema(topic: Topic) -> pa.Schema:
    """The columns of an exported table, with the topic in their metadata."""
    fields = [column.with_nullable(True) for column in topic.schema]
    note = json.dumps(topic_to_json(topic)).encode("utf-8")
    return pa.schema([*fields, HEADERS, DELETED], metadata={_KEY: note})


class TableFileWriter:
    """An exported table on its way to a file."""

    def __init__(self, stream: Any, topic: Topic, *, form: Literal["parquet", "arrow"]) -> None:
        self._schema = table_schema(topic)
        self._writer: Any
        if form == "parquet":
            self._writer = parquet.ParquetWriter(stream, self._schema, compression="zstd")
        else:
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writer = pa.ipc.new_file(stream, self._schema, options=options)

    def write(self, batch: pa.RecordBatch) -> None:
        """Adds rows."""
        self._writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=self._schema))

    def close(self) -> None:
        """Writes the end of the file."""
        self._writer.close()


class TableFile:
    """A table in a file, opened for reading."""

    def __init__(self, stream: Any, name: str, *, form: str) -> None:
        self._name = name
        self._kind = "Parquet file" if form == "parquet" else "Arrow file"
        self.share_read = 0.0
        try:
            self._file: Any = parquet.ParquetFile(stream) if form == "parquet" else pa.ipc.open_file(stream)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from None
        self.schema: pa.Schema = self._file.schema_arrow if form == "parquet" else self._file.schema
        self._is_parquet = form == "parquet"

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Its rows, in batches of bounded size."""
        try:
            if self._is_parquet:
                total, rows = max(self._file.metadata.num_rows, 1), 0
                for batch in self._file.iter_batches(batch_size=ROWS):
                    rows += batch.num_rows
                    self.share_read = rows / total
                    yield batch
            else:
                for number in range(self._file.num_record_batches):
                    whole = self._file.get_batch(number)
                    self.share_read = (number + 1) / self._file.num_record_batches
                    for first in range(0, whole.num_rows, ROWS):
                        yield whole.slice(first, ROWS)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from None

    def topic_settings(self) -> dict[str, Any]:
        """What to pass to `create_topic`: what the note says, or just the columns."""
        note = (self.schema.metadata or {}).get(_KEY)
        if note is not None:
            try:
                return _settings(topic_from_json(json.loads(note)))
            except (ValueError, KeyError, TypeError):
                pass  # a note of somebody else under the same key: the columns speak for themselves
        extra = {HEADERS.name, DELETED.name}
        return {"schema": pa.schema([field for field in self.schema if field.name not in extra])}

    def _damaged(self, error: Exception) -> InvalidInput:
        return InvalidInput(
            f"{self._name} is not a readable {self._kind}: {str(error).splitlines()[0]}.",
            advice="Check the file, or choose another format with --format.",
        )


def _settings(topic: Topic) -> dict[str, Any]:
    return {
        "schema": topic.schema if topic.has_schema else None,
        "key": topic.key if topic.has_schema else None,
        "time": topic.time,
        "lateness": timedelta(microseconds=topic.lateness_us),
        "future_max": timedelta(microseconds=topic.future_us),
        "partitions": topic.partitions,
        "durability": topic.durability,
        "segment_bytes": topic.segment_bytes,
        "event_bytes_max": topic.event_bytes_max,
    }
