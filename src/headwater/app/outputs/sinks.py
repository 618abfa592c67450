"""A sink's stage: it writes the rows of each batch to a target outside of the log, exactly once.

It joins `processing.sink.batch_tables` (a batch's rows in the driver) and `sinks` (how a target takes them). Each run of the query opens
the sink again, which fences a process that is left of an earlier run. Rows that the target refuses go to the topic `<stage>.dead`, with
the batch's marker, so a batch that Spark repeats after a crash does not write them twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
import pyarrow as pa

from headwater.log.clients.stage import Stage
from headwater.log.log import Log
from headwater.model.errors import InvalidApp
from headwater.model.marker import Marker
from headwater.model.schema import DELETED
from headwater.processing.graph.graph import DEAD_SCHEMA, Graph, StageNode
from headwater.sinks.files import FileSink, is_folder
from headwater.sinks.newest_rows import PLACE, Pieces, newest
from headwater.sinks.sink import Dead, Shape, Sink, is_target, open_sink, write_batch
from headwater.sinks.view_changes import rows_of_changes, rows_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LOG_COLUMNS = (*PLACE, DELETED.name)
"""The columns that a stage for a target reads in addition to those of its topic."""

EVENTS_MAX = 250_000
"""The default limit of events in a batch, which is one transaction of the target."""

TEST_TARGETS = "sqlite:///./targets.db"


def ledger_of(stage: StageNode, name: str) -> FileSink | Sink | None:
    """What stores the last marker of a stage, if the log does not; otherwise None."""
    if stage.kind != "sink":
        return None
    if is_target(stage.to):
        return open_sink(stage.to, stage=name)
    return FileSink(stage.to, stage=name) if is_folder(stage.to) else None


def partitioned(to: str, columns: str | Sequence[str], *, where: str) -> str:
    """The target with the columns that partition its files; `InvalidApp` for a target that has no files."""
    names = [columns] if isinstance(columns, str) else list(columns)
    if not names:
        return to
    if not is_folder(to) and not to.startswith("delta://"):
        raise InvalidApp(
            f"{where}: {to.partition('?')[0]} cannot be partitioned by {names[0]!r}, because it is not a folder.",
            advice="Use partition_by= only with files in a folder and with delta:///.",
        )
    wrong = [name for name in names if not name or "," in name]
    if wrong:
        raise InvalidApp(
            f"{where}: {wrong[0]!r} in partition_by is not a column that files can be partitioned by.",
            advice="Rename the column.",
        )
    return f"{to}{'&' if '?' in to else '?'}partition_by={quote(','.join(names), safe=',')}"


def check_partitioned(stage: StageNode, columns: Sequence[str], partition_by: Sequence[str]) -> None:
    """Refuses columns that do not exist, and all columns together."""
    missing = [name for name in partition_by if name not in columns]
    if missing:
        raise InvalidApp(
            f"{stage.place}: column {missing[0]!r} of partition_by does not exist.",
            advice=f"The columns are: {', '.join(columns)}.",
        )
    if partition_by and not set(columns) - set(partition_by):
        raise InvalidApp(
            f"{stage.place}: partition_by names all columns, so no column is left for the files.",
            advice="Partition by fewer columns.",
        )


def redirected(graph: Graph) -> Graph:
    """The same graph, in which every target is `targets.db` in the working directory, with a table named as the stage is: for tests.

    The tables of a transactional sink are named as their topics are.
    """
    other = copy.copy(graph)
    other.stages = {
        name: msgspec.structs.replace(stage, to=TEST_TARGETS if stage.capture else f"{TEST_TARGETS}?table={name}")
        if stage.kind == "sink" and is_target(stage.to)
        else stage
        for name, stage in graph.stages.items()
    }
    return other


def shape_of(stage: StageNode, schema: pa.Schema, *, key: str | None, view: StageNode | None) -> Shape:
    """What a stage writes to its target: the columns of its topic, or of the view whose changes that has."""
    topic = stage.inputs[0]
    columns = schema if view is None else rows_schema(schema)
    columns = pa.schema([field for field in columns if field.name not in LOG_COLUMNS])
    chosen = stage.key or (view.key if view is not None else () if key is None else (key,))
    missing = [name for name in chosen if name not in columns.names]
    if not chosen or missing:
        said = f"has no column {missing[0]!r}" if missing else "has no key"
        raise InvalidApp(
            f"{stage.place}: {topic!r} {said}, but a target has one row for each key.",
            advice=f"Pass the key with key=…. The columns are: {', '.join(columns.names)}.",
        )
    nested = [name for name in chosen if pa.types.is_nested(columns.field(name).type)]
    if nested:
        raise InvalidApp(
            f"{stage.place}: the key {nested[0]!r} is a nested column.", advice="Use a column that is not nested."
        )
    return Shape(view.name if view is not None else topic, columns, tuple(chosen))


class TargetWriter:
    """Writes the batches of a stage to its target; `begin` gives the writer for one run of the query."""

    def __init__(
        self, log: Log, stage: StageNode, shape: Shape, *, name: str, checkpoint: str, folder: Path, of_view: bool
    ) -> None:
        self._log = log
        self._stage = stage
        self._shape = shape
        self._name = name
        self._checkpoint = checkpoint
        self._folder = folder
        self._sink = open_sink(stage.to, stage=name)  # here, so that a wrong address is an error before anything starts
        self._of_view = of_view

    def begin(self) -> Callable[[DataFrame, int], int]:
        """Opens the sink again. Returns the function for `foreachBatch`, which returns how many rows the target refused."""
        from headwater.processing.checkpoint.marker import marker_of
        from headwater.processing.sink.batch_tables import BatchTables

        self.close()
        sink = self._sink = open_sink(self._stage.to, stage=self._name)
        sink.open(self._shape)
        leaving = BatchTables(self._folder, self._checkpoint, picker(self._shape.key, of_view=self._of_view))

        def write(result: DataFrame, epoch: int) -> int:
            marker = marker_of(self._checkpoint, epoch)
            with leaving.tables(result, epoch) as tables:
                pieces = Pieces(tables, self._shape.key)
                return write_batch(sink, marker, pieces, tell=partial(self._bury, marker)).dead

        return write

    def close(self) -> None:
        """Frees the sink's connections."""
        self._sink.close()

    def _bury(self, marker: Marker, dead: Sequence[Dead]) -> None:
        topic = f"{self._stage.name}.dead"
        self._log.create_topic(topic, DEAD_SCHEMA, partitions=1, exist_ok=True)
        rows = [{"topic": self._stage.inputs[0], **msgspec.structs.asdict(one)} for one in dead]
        Stage(self._log.appender, f"{self._name}.refused", gaps=True).commit(marker, [(topic, rows)])


def picker(key: tuple[str, ...], *, of_view: bool) -> Callable[[pa.Table], pa.Table]:
    """The function that picks each key's newest row of a batch, in tasks or in the driver."""
    return partial(_picked_of_view if of_view else newest, key=key)


def _picked_of_view(events: pa.Table, key: tuple[str, ...]) -> pa.Table:
    return newest(rows_of_changes(events), key)
