"""A transactional sink: tables of one capture, kept in step in one database, which always holds what the source held at a commit.

One query reads the topics of all tables to ends at which transactions are whole (see `processing.source.capture_transactions`), and each
batch is one transaction of the target, over all its tables and the ledger. Several transactions of the source may be applied as one,
never a part of one.

Each key's newest row is read from compacted topics. Compaction removes a row when there is a later one, which may be after the ends
of a batch. So a batch is applied only while its ends are new. A batch that a killed run planned is planned again, and so is one
that compaction overtook while it was read. Neither wrote anything, as the ledger shows.

If a table gets a column while the application runs, the first batch that may have values of it adds the column to the target.

A row that the target refuses stops the stage. Without the row the target would have a state that the source never had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from headwater.app.outputs.sinks import LOG_COLUMNS, picker, shape_of
from headwater.capture.progress import STAGE
from headwater.capture.source_url import SourceUrl, parse_source_url
from headwater.log.log import Log
from headwater.model.errors import InvalidApp
from headwater.model.points import PROCESS
from headwater.model.url import without_password
from headwater.processing.graph.graph import Graph, StageNode
from headwater.sinks.newest_rows import Pieces
from headwater.sinks.sink import Shape, Sink, open_sink
from headwater.sinks.table_group import TARGETS, open_together, write_together

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headwater.processing.sink.batch_tables import BatchTables

SOURCES = ("sqlite", "postgresql", "mariadb", "mysql")
"""Captures that report all changes of each transaction, in commit order."""


def transactional(graph: Graph, stage: StageNode, *, log: str, events_max: int | None) -> StageNode:
    """A sink that was declared with `transactions`, as a stage that applies them whole; `InvalidApp` where that is impossible."""
    _check_target(stage)
    if "://" in log and not log.startswith("file://"):
        raise InvalidApp(
            f"{stage.place}: on {log.partition('://')[0]}:// a transaction becomes visible partition by partition. A sink cannot "
            "apply it as a whole.",
            advice="Capture into a log in a folder, or leave out transactions=True.",
        )
    if events_max is not None:
        raise InvalidApp(
            f"{stage.place}: events_max={events_max} would split transactions.",
            advice="Leave out events_max. A batch has all transactions that are available.",
        )
    if stage.key:
        raise InvalidApp(
            f"{stage.place}: key={stage.key[0]!r} cannot apply to all tables of the sink.",
            advice="Leave out key. Each table has the key of its source.",
        )
    sources = [_source_of(graph, stage, topic) for topic in stage.inputs]
    other = next((number for number, source in enumerate(sources) if source != sources[0]), None)
    if other is not None:
        raise InvalidApp(
            f"{stage.place}: {stage.inputs[0]!r} and {stage.inputs[other]!r} come from different databases, which do not share "
            "transactions.",
            advice="Declare one sink for the tables of each database.",
        )
    return msgspec.structs.replace(stage, capture=STAGE + sources[0].database, settings={}) if sources else stage


class TransactionWriter:
    """Writes the batches of a stage to the tables of its target; `begin` gives the writer for one run of the query."""

    def __init__(self, log: Log, stage: StageNode, *, name: str, checkpoint: str, folder: Path) -> None:
        self._log = log
        self._stage = stage
        self._name = name
        self._checkpoint = checkpoint
        self._folder = folder
        # Here, so that a wrong address is an error before anything starts.
        self._sink: Sink = open_sink(stage.to, stage=name)

    def begin(self) -> Callable[[DataFrame, int], None]:
        """Opens the sink again, and returns the function for `foreachBatch`."""
        from headwater.processing.checkpoint.marker import marker_of
        from headwater.processing.sink.batch_tables import BatchTables
        from headwater.processing.source.capture_transactions import check_not_overtaken, forget_old_plan

        self.close()
        shapes = self._shapes()
        sink = self._sink = open_together(self._stage.to, shapes, stage=self._name)
        written = sink.last
        forget_old_plan(self._checkpoint, written=written)
        ways = [
            BatchTables(self._folder / shape.name, self._checkpoint, picker(shape.key, of_view=False))
            for shape in shapes
        ]

        def write(result: DataFrame, epoch: int) -> None:
            marker = marker_of(self._checkpoint, epoch)
            if written is not None and written.epoch == epoch:  # its run died before Spark had noted it as done
                write_together(sink, marker, [])
                return
            PROCESS.reach("transactions: planned")
            shapes = self._shapes()  # again: a topic has a column before it has the first event with it
            with ExitStack() as held:
                rows = [
                    held.enter_context(self._rows(shape, way, result, epoch))
                    for shape, way in zip(shapes, ways, strict=True)
                ]
                check_not_overtaken(self._log, self._checkpoint, epoch)
                PROCESS.reach("transactions: read")
                tables = [(shape, Pieces(found, shape.key)) for shape, found in zip(shapes, rows, strict=True)]
                write_together(sink, marker, tables)

        return write

    def _shapes(self) -> list[Shape]:
        """The tables with the columns that they have now."""
        return [_shape(self._log, self._stage, topic) for topic in self._stage.inputs]

    @contextmanager
    def _rows(self, shape: Shape, leaving: BatchTables, result: DataFrame, epoch: int) -> Iterator[list[pa.Table]]:
        """The rows of a table in a batch. Few are read here; many by Spark's tasks, which pick each key's newest row."""
        from headwater.processing.sink.frame_writer import FETCH_EVENTS_MAX
        from headwater.processing.source.capture_transactions import span_of

        span = span_of(self._log, shape.name, checkpoint=self._checkpoint, epoch=epoch)
        columns = (*shape.schema.names, *LOG_COLUMNS)
        if span.count <= FETCH_EVENTS_MAX:
            yield [span.table(self._log, columns)]
            return
        with leaving.tables(span.frame(result.sparkSession, self._log, columns), epoch) as tables:
            yield tables

    def close(self) -> None:
        """Frees the sink's connections."""
        self._sink.close()


def _check_target(stage: StageNode) -> None:
    scheme, _, rest = stage.to.partition("://")
    shown = without_password(stage.to).partition("?")[0]
    if scheme not in TARGETS:
        raise InvalidApp(
            f"{stage.place}: {shown} does not support transactions over several tables.",
            advice=f"Use transactions=True only with {', '.join(f'{known}://' for known in TARGETS[:3])}.",
        )
    if "table=" in rest.partition("?")[2]:
        raise InvalidApp(
            f"{stage.place}: the target names one table, but transactions change all tables of the source.",
            advice="Leave out ?table=. Each table gets the name of its topic.",
        )


def _source_of(graph: Graph, stage: StageNode, topic: str) -> SourceUrl:
    """The database that a table is captured from."""
    node = graph.topics.get(topic)
    if node is None or node.source is None:
        raise InvalidApp(
            f"{stage.place}: {topic!r} is not a captured table. Only captured tables have transactions.",
            advice=f"Declare it with app.table({topic!r}, source=…), or leave out transactions=True.",
        )
    source = msgspec.structs.replace(parse_source_url(node.source), tables=())
    if source.scheme not in SOURCES:
        raise InvalidApp(
            f"{stage.place}: {topic!r} is captured by {source.scheme}://, which does not report all changes of a transaction.",
            advice=f"Use transactions=True only with captures of {', '.join(f'{known}://' for known in SOURCES)}.",
        )
    return source


def _shape(log: Log, stage: StageNode, topic: str) -> Shape:
    found = log.topic(topic)
    return shape_of(msgspec.structs.replace(stage, inputs=(topic,)), found.schema, key=found.key, view=None)
