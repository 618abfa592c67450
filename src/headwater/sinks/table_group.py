"""Tables together: several tables of one database that get a batch in one transaction, with one entry of the ledger.

Nobody sees one of them without the others: those that are missing are made by the first batch, not before it. A row that the database
refuses leaves nothing of its batch written. Thread-safety: one thread at a time, as for any sink.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.model.errors import InvalidInput
from headwater.model.marker import Marker
from headwater.model.points import PROCESS
from headwater.sinks.newest_rows import Pieces
from headwater.sinks.sink import Shape, Written, apply_pieces, open_sink
from headwater.sinks.table import TableSink

TARGETS = ("sqlite", "duckdb", "postgresql", "postgres")
"""The databases that take a transaction over several tables."""


def open_together(to: str, shapes: Sequence[Shape], *, stage: str) -> TableSink:
    """The sink of a database, open for these tables: whoever was the stage's writer before is refused from now on."""
    sink = open_sink(to, stage=stage)
    assert isinstance(sink, TableSink)
    for shape in shapes:
        sink.open(shape, creates=False)
    return sink


def write_together(
    sink: TableSink,
    marker: Marker,
    tables: Sequence[tuple[Shape, Pieces]],
) -> Written:
    """Applies a batch to all tables, once; `InvalidInput` where a row is refused."""
    if not sink.begin(marker):
        return Written(written=False)
    try:
        PROCESS.reach("sink: begun")
        upserts = deletes = 0
        for shape, pieces in tables:
            sink.go_on(shape)
            put, removed, dead = apply_pieces(sink, pieces)
            if dead:
                raise InvalidInput(
                    f"{sink.url} rejected a row of table {shape.name!r}, and so the whole transaction: {dead[0].error}",
                    advice="The sink wrote nothing. Correct the target or the source, and restart the stage.",
                )
            upserts, deletes = upserts + put, deletes + removed
        sink.commit(marker)
        PROCESS.reach("sink: committed")
    except BaseException:
        sink.rollback()
        raise
    return Written(written=True, upserts=upserts, deletes=deletes)
