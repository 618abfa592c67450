"""The repair of a target: the keys that differ get the rows that the source has, and keys that it has not are removed.

The rows are written by the sink's own code, in a transaction that begins with a look at the ledger: where the stage has gone on
since the comparison, nothing is written, and both are compared again. The stage itself is not stopped, and its marker stays.
"""

from __future__ import annotations

from contextlib import suppress

import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.errors import Conflict, Unsupported
from headwater.sinks.sink import Refusal, Sink
from headwater.verify.comparison import SETTLE_S, Difference, Pair, Repaired, VerifyReport, compare
from headwater.verify.digest import canonical
from headwater.verify.side import nullable

VAIN_MAX = 20
"""So many times in all the stage may have gone on meanwhile, or as much differ after a repair as before."""


def repair(pair: Pair, report: VerifyReport, *, settle_s: float = SETTLE_S) -> Repaired:
    """Writes the keys that differ to the target, and compares again; `Unsupported` where the target is not ours to change."""
    if report.unreadable:
        raise Unsupported(
            f"{report.unreadable[0]!r} in {report.source} or {report.target} is not a row, so its correct value is unknown.",
            advice="Remove it first.",
        )
    if set(pair.shape.schema.names) != _all_columns(pair):
        raise Unsupported("A repair writes whole rows, so it cannot use --columns.", advice="Leave out --columns.")
    written = removed = vain = 0
    refused: list[str] = []
    while report.differences and not refused and vain < VAIN_MAX:
        before = report.differing
        with suppress(Conflict):  # the stage went on: what differs now is found anew
            one, other, refused = _apply(pair, report.differences)
            written, removed = written + one, removed + other
        report = compare(pair, settle_s=settle_s)
        vain += report.differing >= before
    return Repaired(written, removed, tuple(refused), after=report)


def _apply(pair: Pair, differences: tuple[Difference, ...]) -> tuple[int, int, list[str]]:
    fields = nullable(pa.schema([pair.shape.schema.field(name) for name in pair.shape.key]))
    keys = pa.Table.from_pylist([dict(one.key) for one in differences], schema=fields)
    with pair.looks() as (here, there):
        rows = here.rows(keys)
        follows = there.follows
    gone = _without(keys, rows, pair)
    sink = pair.target.repairs("" if follows is None else follows.stage)
    try:
        sink.begin_repair(None if follows is None else follows.marker)
        try:
            refused = _write(sink, rows, gone)
            sink.commit(None)
        except BaseException:
            sink.rollback()
            raise
    finally:
        sink.close()
    return rows.num_rows - len(refused), gone.num_rows, [one.reason for one in refused]


def _write(sink: Sink, rows: pa.Table, gone: pa.Table) -> list[Refusal]:
    if gone.num_rows:
        sink.delete(gone)
    return list(sink.upsert(rows)) if rows.num_rows else []


def _without(keys: pa.Table, rows: pa.Table, pair: Pair) -> pa.Table:
    """The keys that have no row."""
    there = canonical(rows, pair.shape.key)
    return keys.filter(pc.invert(pc.is_in(canonical(keys, pair.shape.key), value_set=there)))


def _all_columns(pair: Pair) -> set[str]:
    shape = pair.source.shape() or pair.target.shape()
    return set(pair.shape.schema.names) if shape is None else set(shape.schema.names)
