"""Rows that leave by a sink: a batch's rows as Arrow tables in the driver, which writes them to a target outside.

Few rows are fetched. More are picked by the tasks (each key's newest of what a task has) and left in files under the application's state,
mapped by the driver: a batch then never has to fit into its memory, nor through Spark's limit for results. The files of a batch
are removed with it; what a dead run has left, when the next one begins.

    <folder>/<any>.arrow   the rows of one task, as an Arrow IPC file
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame

from headwater.processing.checkpoint.marker import ends_of
from headwater.processing.checkpoint.offsets import count_between
from headwater.processing.sink.frame_writer import FETCH_EVENTS_MAX
from headwater.processing.spark.driver_rows import rows_of

_PATH = "path STRING"

Pick = Callable[[pa.Table], pa.Table]


class BatchTables:
    """How the batches of one query come to the driver; `pick` is what tasks do to their rows."""

    def __init__(self, folder: Path, checkpoint: str, pick: Pick) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._pick = pick
        shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def tables(self, df: DataFrame, epoch: int) -> Iterator[list[pa.Table]]:
        """The rows of a batch, while they are needed."""
        if self._is_small(epoch):
            yield [self._pick(rows_of(df))]
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            paths = [row.path for row in df.mapInArrow(_leaver(str(self._folder), self._pick), _PATH).collect()]
            yield [pa.ipc.open_file(pa.memory_map(path)).read_all() for path in sorted(paths)]
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _is_small(self, epoch: int) -> bool:
        if epoch == 0:
            return False
        before, after = ends_of(self._checkpoint, epoch - 1), ends_of(self._checkpoint, epoch)
        return count_between(before, after) <= FETCH_EVENTS_MAX


def _leaver(folder: str, pick: Pick) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def leave(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = [batch for batch in batches if batch.num_rows]
        paths: list[str] = []
        if found:
            rows = pick(pa.Table.from_batches(found))
            paths.append(f"{folder}/{uuid.uuid4().hex}.arrow")
            with pa.ipc.new_file(paths[0], rows.schema) as file:
                file.write_table(rows)
        yield pa.record_batch([pa.array(paths, pa.string())], names=["path"])

    return leave
