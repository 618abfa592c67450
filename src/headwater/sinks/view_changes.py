"""A view's changes as rows: what a sink writes that follows a view, whose topic has the row before and after in each event.

A deletion is the row that was, marked as deleted, so that its key is known whatever columns that has. A tombstone beside it (in a compacted
topic) says nothing more and is left out. Functions only: safe from any thread.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.schema import DELETED
from headwater.sinks.newest_rows import PLACE

_DELETE = "delete"


def rows_schema(changes: pa.Schema) -> pa.Schema:
    """The columns of a view whose changes have this schema."""
    return pa.schema(list(changes.field("new").type))


def rows_of_changes(events: pa.Table) -> pa.Table:
    """The rows that events of a view's topic leave, each with its place and whether it is gone."""
    told = events.filter(events.column("op").is_valid()).combine_chunks()
    gone = pc.equal(told.column("op"), _DELETE).combine_chunks()
    new, old = (told.column(name).combine_chunks() for name in ("new", "old"))
    fields = list(new.type)
    columns = [pc.if_else(gone, pc.struct_field(old, field.name), pc.struct_field(new, field.name)) for field in fields]
    rows = pa.Table.from_arrays(columns, schema=pa.schema(fields))
    for name in PLACE:
        rows = rows.append_column(name, told.column(name))
    return rows.append_column(DELETED.name, gone)
