"""`headwater tail TOPIC`: prints events in the order of their appends, and follows new ones.

In a pipe each event is one JSON object with the topic's columns (and `_headers`, `_deleted` if it has them), which
`headwater produce` reads back; nothing else goes to stdout.
"""

from __future__ import annotations

import heapq
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headwater.cli.log_option import LogOption, open_existing
from headwater.cli.output.json import write_json
from headwater.cli.output.rows import rows_of
from headwater.cli.output.table import RowPrinter
from headwater.cli.output.terminal import is_terminal
from headwater.model.clock import duration_us, system_clock, time_us
from headwater.model.errors import InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa

    from headwater.log.log import Log
    from headwater.log.port.topic import Topic
    from headwater.query.filter import RowFilter

LAST = 10
META = ("_partition", "_offset", "_time", "_appended", "_key")
OPTIONAL = ("_headers", "_deleted")

_BATCH_ROWS = 16_384
_FURTHER = 8
_CHUNK_ROWS = 1_000

Row = tuple[Any, ...]


def tail(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to read.")],
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PLACE",
            help='Where to begin: "earliest", "latest", an offset, a time (ISO 8601) or a duration ago ("10 minutes").',
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new events as they arrive, until Ctrl-C.")
    ] = False,
    last: Annotated[
        int, typer.Option("--last", "-n", min=0, help="Without --from: begin this many events before the end.")
    ] = LAST,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many events.")] = None,
    where: Annotated[
        str | None,
        typer.Option(metavar="SQL", help='Print only events that match this condition, such as "amount > 100".'),
    ] = None,
    columns: Annotated[str | None, typer.Option(metavar="A,B", help="Print only these columns.")] = None,
    meta: Annotated[bool, typer.Option("--meta", help=f"Print {', '.join(META)} too.")] = False,
    format: Annotated[
        Literal["table", "json"] | None,
        typer.Option("--format", help="Default: a table on a terminal, JSON lines in a pipe."),
    ] = None,
    log: LogOption = None,
) -> None:
    """Print the newest events of a topic, or all events from a place on."""
    shape = format or ("table" if is_terminal() else "json")
    count = min(last, sys.maxsize)
    with open_existing(log) as opened:
        described = opened.topic(topic)
        shown = _shown(described, columns, meta=meta, shape=shape)
        events = _Events(opened, described, shown, where)
        if start is not None:
            rows = events.until_now(place_offsets(opened, topic, start, events.ends))
        elif where is not None:
            rows = iter(deque(events.until_now(events.firsts), maxlen=count))
        else:
            rows = iter(deque(events.until_now(events.before_end(count)), maxlen=count))
        chunks = _limited(_chunks(rows, events.new() if follow else ()), limit)
        if shape == "json":
            for chunk in chunks:
                write_json(shown, chunk, leave_out=OPTIONAL if columns is None else ())
        else:
            printer = RowPrinter(shown, [events.type_of(name) for name in shown])
            for chunk in chunks:
                printer.print(chunk)


class _Events:
    """A topic's events as rows of the columns to show: first the stored ones, then new ones."""

    def __init__(self, log: Log, topic: Topic, shown: list[str], where: str | None) -> None:
        self._log = log
        self._topic = topic
        self._shown = shown
        self._columns = [*topic.schema.names, *META, *OPTIONAL, "_topic"]
        held = log.offsets(topic.name)
        self.firsts = {number: offsets.start for number, offsets in held.items()}
        self.ends = {number: offsets.stop for number, offsets in held.items()}
        self._where: RowFilter | None = None
        empty = log.scan(topic.name, start=self.ends, end=self.ends, columns=self._columns)
        self._schema = empty.schema
        if where is not None:
            from headwater.query.filter import RowFilter

            self._where = RowFilter(where, empty.schema)

    def type_of(self, column: str) -> pa.DataType:
        """The type of a column."""
        return self._schema.field(column).type

    def before_end(self, count: int) -> dict[int, int]:
        """An offset of each partition from which at least `count` events follow. Offsets may have gaps after compaction."""
        return {number: self._before_end(number, end, count) for number, end in self.ends.items()}

    def _before_end(self, number: int, end: int, count: int) -> int:
        offsets = count
        while (start := max(self.firsts[number], end - offsets)) > self.firsts[number]:
            places = (self.ends | {number: start}, self.ends)
            found = self._log.scan(self._topic.name, start=places[0], end=places[1], columns=["_offset"])
            if sum(batch.num_rows for batch in found) >= count:
                break
            offsets *= _FURTHER
        return start

    def until_now(self, starts: dict[int, int]) -> Iterator[Row]:
        """The events between the starts and the ends, in the order of append times."""
        parts = [
            self._rows_of_partition(number, start) for number, start in starts.items() if start < self.ends[number]
        ]
        for _, row in heapq.merge(*parts, key=lambda pair: pair[0]):
            yield row

    def new(self) -> Iterator[list[Row]]:
        """The events after the ends; yields an empty list while nothing arrives."""
        with self._log.reader(self._topic.name, start=self.ends, columns=self._columns) as reader:
            while True:
                batches = reader.poll_arrow(events_max=_BATCH_ROWS)
                pairs = [pair for batch in batches for pair in self._pairs(batch)]
                yield [row for _, row in sorted(pairs, key=lambda pair: pair[0])]

    def _rows_of_partition(self, number: int, start: int) -> Iterator[tuple[Row, Row]]:
        starts = self.ends | {number: start}
        batches = self._log.scan(self._topic.name, start=starts, end=self.ends, columns=self._columns)
        for batch in batches:
            yield from self._pairs(batch)

    def _pairs(self, batch: pa.RecordBatch) -> Iterator[tuple[Row, Row]]:
        """For each event its place in the order, and the row to show."""
        if self._where is not None:
            batch = self._where.apply(batch)
        appended = batch.column("_appended").cast("int64").to_pylist()
        order = zip(appended, batch["_partition"].to_pylist(), batch["_offset"].to_pylist(), strict=True)
        return zip(order, rows_of(batch.select(self._shown)), strict=True)


def _shown(topic: Topic, columns: str | None, *, meta: bool, shape: str) -> list[str]:
    """The columns to show; the log refuses an unknown one."""
    from headwater.log.arrow.events import output_schema

    if columns is not None:
        names = [name.strip() for name in columns.split(",") if name.strip()]
        if not names:
            raise InvalidInput("--columns names no column.", advice=f"Choose from {', '.join(topic.schema.names)}.")
        output_schema(topic, names)
        extra = [name for name in META if name not in names] if meta else []
        return [*extra, *names]
    if meta:
        return [*META, *topic.schema.names, *OPTIONAL]
    if shape == "json":
        return [*topic.schema.names, *OPTIONAL]
    return ["_partition", "_offset", *(() if topic.time else ("_time",)), *topic.schema.names]


def place_offsets(log: Log, topic: str, place: str, ends: dict[int, int]) -> dict[int, int]:
    """The offset of each partition that a place on the command line means."""
    held = log.offsets(topic)
    if place == "earliest":
        return {number: offsets.start for number, offsets in held.items()}
    if place == "latest":
        return dict(ends)
    if re.fullmatch(r"\d{1,18}", place):
        offset = int(place)
        if offset > max(ends.values()):
            raise InvalidInput(
                f"Offset {offset} is after the end of every partition of topic {topic!r}.",
                advice=f"The longest partition ends at {max(ends.values())}. Use --from latest to wait for new events.",
            )
        return {number: min(max(offset, offsets.start), ends[number]) for number, offsets in held.items()}
    at = _time_of(place)
    return {number: min(offset, ends[number]) for number, offset in log.offsets_at(topic, at).items()}


def _time_of(place: str) -> int:
    try:
        return time_us(place)
    except InvalidInput:
        pass
    try:
        return system_clock() - duration_us(place.removeprefix("-").removesuffix("ago"))
    except InvalidInput:
        raise InvalidInput(
            f"{place!r:.80} is not a place in a topic.",
            advice='Use "earliest", "latest", an offset, a time such as "2026-01-31T12:00:00Z", or "10 minutes" (ago).',
        ) from None


def _chunks(rows: Iterator[Row], more: Iterable[list[Row]]) -> Iterator[list[Row]]:
    """The rows in handy portions, then those to come."""
    while chunk := [row for _, row in zip(range(_CHUNK_ROWS), rows, strict=False)]:
        yield chunk
    yield from more


def _limited(chunks: Iterable[list[Row]], limit: int | None) -> Iterator[list[Row]]:
    left = limit
    for chunk in chunks:
        if left is None:
            yield chunk
            continue
        yield chunk[:left]
        left -= len(chunk[:left])
        if not left:
            return
