"""`headwater export TOPIC FILE`: writes the events of a topic to a file, in bounded memory.

Parquet and Arrow files also contain the topic's settings, so that `headwater import --create` can create it again; JSON
lines are those of `headwater tail`. All three preserve values, keys, headers and deletions. The command refuses what a
format cannot hold: CSV has no nested columns, BINARY, headers or deletions, and JSON has no NaN and infinities.
The file appears under its name when it is complete.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headwater.cli.commands.tail import place_offsets
from headwater.cli.log_option import LogOption, open_existing
from headwater.cli.output.json import json_lines
from headwater.cli.output.progress import progress_line, tell_end
from headwater.cli.output.quantities import bytes_text, events_text
from headwater.cli.output.rows import csv_lines, rows_of
from headwater.model.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    import pyarrow as pa

    from headwater.log.port.topic import Topic

Form = Literal["parquet", "json", "csv", "arrow"]
STDOUT = "-"
EXTRA = ("_headers", "_deleted")

_ENDINGS: dict[str, Form] = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_ROWS = 65_536
_BYTES = 32 << 20


def export(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to read.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to write; - means stdout (JSON and CSV only).")],
    format: Annotated[
        Form | None,
        typer.Option("--format", help="Default: by the file extension, else JSON lines."),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="PLACE",
            help='Where to begin: "earliest", an offset, a time (ISO 8601) or a duration ago ("1 hour").',
        ),
    ] = "earliest",
    end: Annotated[
        str,
        typer.Option("--to", metavar="PLACE", help='Where to end; that event itself is not exported. Also "latest".'),
    ] = "latest",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    log: LogOption = None,
) -> None:
    """Write the events of a topic to a Parquet, Arrow, JSON lines or CSV file."""
    form = format or _form_of(file)
    if file != STDOUT and os.path.exists(file) and not force:
        raise InvalidInput(f"{file} already exists.", advice="Choose another name, or overwrite it with --force.")
    with open_existing(log) as opened:
        described = opened.topic(topic)
        ends = {number: offsets.stop for number, offsets in opened.offsets(topic).items()}
        starts = place_offsets(opened, topic, start, ends)
        stops = place_offsets(opened, topic, end, ends)
        starts = {number: min(offset, stops[number]) for number, offset in starts.items()}
        total = sum(stops.values()) - sum(starts.values())
        columns = [*described.schema.names, *EXTRA]
        batches = opened.scan(topic, start=starts, end=stops, columns=columns)
        events = 0
        with _written(file) as stream, progress_line(f"{topic} → {file}") as line:
            with _writer(stream, described, form) as write:
                for batch in _large(batches):
                    write(batch)
                    events += batch.num_rows
                    line.show(events_text(events), done=events, total=total)
            size = stream.tell() if file != STDOUT else 0
    if file != STDOUT:
        tell_end(
            f"{events_text(events)} of {topic} written to {file} ({bytes_text(size)}, {form})",
            {"topic": topic, "file": file, "format": form, "events": events, "bytes": size},
        )


def _form_of(file: str) -> Form:
    ending = os.path.splitext(file.lower())[1]
    if ending and ending not in _ENDINGS:
        raise InvalidInput(
            f"{file} has the extension {ending}, which is not the extension of a supported format.",
            advice=f"Use one of {', '.join(_ENDINGS)}, or choose a format with --format.",
        )
    return _ENDINGS.get(ending, "json")


def _large(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches large enough for a row group, in bounded memory."""
    import pyarrow as pa

    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(one.num_rows for one in waiting) >= _ROWS or sum(one.nbytes for one in waiting) >= _BYTES:
            yield pa.concat_batches(waiting)
            waiting = []
    if waiting:
        yield pa.concat_batches(waiting)


@contextmanager
def _written(file: str) -> Iterator[Any]:
    """A stream to a temporary file that gets its final name when it is complete."""
    if file == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    part = f"{file}.part"
    try:
        with open(part, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise


@contextmanager
def _writer(stream: Any, topic: Topic, form: Form) -> Iterator[Callable[[pa.RecordBatch], None]]:
    if form in ("json", "csv"):
        text = _Json(stream, topic) if form == "json" else _Csv(stream, topic)
        yield text.write
        return
    from headwater.cli.table_file import TableFileWriter

    if stream is sys.stdout.buffer:
        raise Unsupported(
            f"The command cannot write a {form} file to stdout.", advice="Name a file, or use --format json."
        )
    writer = TableFileWriter(stream, topic, form="parquet" if form == "parquet" else "arrow")
    yield writer.write
    writer.close()


class _Json:
    """JSON lines."""

    def __init__(self, stream: Any, topic: Topic) -> None:
        self._stream = stream
        self._names = [*topic.schema.names, *EXTRA]
        for column in topic.schema:
            if _has_other_keys(column.type):
                raise Unsupported(
                    f"JSON cannot hold column {column.name} of type {column.type}, because its keys are not text.",
                    advice="Use --format parquet.",
                )

    def write(self, batch: pa.RecordBatch) -> None:
        for name, column in zip(self._names, batch.columns, strict=True):
            if _has_no_number(column):
                raise Unsupported(
                    f"JSON cannot hold NaN and infinities, which column {name} contains.",
                    advice="Use --format parquet.",
                )
        self._stream.writelines(json_lines(self._names, rows_of(batch), leave_out=EXTRA))


class _Csv:
    """Comma-separated values after a header line."""

    def __init__(self, stream: Any, topic: Topic) -> None:
        import pyarrow as pa

        self._stream = stream
        self._topic = topic
        for column in topic.schema:
            if pa.types.is_nested(column.type) or pa.types.is_binary(column.type):
                raise Unsupported(
                    f"CSV cannot hold column {column.name} of type {column.type}.",
                    advice="Use --format parquet or json.",
                )
        self._stream.write(csv_lines([tuple(topic.schema.names)]))

    def write(self, batch: pa.RecordBatch) -> None:
        import pyarrow.compute as pc

        if batch.column("_headers").null_count < batch.num_rows or pc.any(batch.column("_deleted")).as_py():
            raise Unsupported(
                f"CSV cannot hold headers and deletions, which topic {self._topic.name!r} contains.",
                advice="Use --format parquet or json.",
            )
        self._stream.write(csv_lines(rows_of(batch.select(self._topic.schema.names))))


def _has_other_keys(type_: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_map(type_) and not pa.types.is_string(type_.key_type):
        return True
    return any(_has_other_keys(type_.field(at).type) for at in range(type_.num_fields))


def _has_no_number(column: pa.Array) -> bool:
    """Whether a value, at any depth, is NaN or infinite."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(column.type):
        return bool(pc.any(pc.invert(pc.is_finite(column))).as_py())
    if pa.types.is_struct(column.type):
        return any(map(_has_no_number, column.flatten()))
    if pa.types.is_map(column.type):
        return _has_no_number(column.items)
    return pa.types.is_list(column.type) and _has_no_number(column.flatten())
