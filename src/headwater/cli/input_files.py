"""The inputs of `produce` and `import`: files and stdin, each with a format from its extension or from `--format`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from headwater.cli.schema_inference import infer_schema
from headwater.cli.table_file import TableFile
from headwater.formats.blocks import Blocks
from headwater.formats.formats import ArrowRows, Csv, InputFormat, JsonLines, Lines, Parsed, Parser
from headwater.log.port.topic import Topic
from headwater.model.errors import InvalidInput

STDIN = "-"

_ENDINGS: dict[str, InputFormat] = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "lines",
    ".log": "lines",
}
_COMPRESSED = {".gz", ".bz2", ".zst", ".lz4"}


def open_inputs(
    names: list[str], *, form: InputFormat | None, delimiter: str | None, stack: ExitStack
) -> list[InputFile]:
    """Opens every input before the command appends anything, so that a wrong name has no effect."""
    if delimiter is not None and len(delimiter) != 1:
        raise InvalidInput(
            f"The delimiter {delimiter!r} is not a single character.", advice="Use one character, such as ';'."
        )
    return [_open(name, form, delimiter, stack) for name in names]


class InputFile:
    """One file, or stdin."""

    def __init__(self, name: str, stream: Any, *, form: InputFormat | None, delimiter: str, size: int | None) -> None:
        self.name = "stdin" if name == STDIN else name
        self.size = size
        self.form = form or "json"
        self._is_form_given = form is not None
        self._stream = stream
        self._delimiter = delimiter
        self._table: TableFile | None = None
        self._blocks = Blocks(stream, self.name, quotes=self.form == "csv")

    @property
    def bytes_read(self) -> int:
        """The number of bytes read so far."""
        if not self._is_table:
            return self._blocks.bytes_read
        return 0 if self._table is None else int((self.size or 0) * self._table.share_read)

    def place(self, line: int) -> str:
        """The suffix that gives the place of a row after the input's name."""
        return f", row {line}" if self._is_table else f":{line}"

    def topic_settings(self) -> dict[str, Any]:
        """Settings for a new topic: those that `export` has stored in the file, else the inferred columns."""
        if self._is_table:
            return self._open_table().topic_settings()
        schema = infer_schema(self._blocks.peek(), self.form, name=self.name, delimiter=self._delimiter)
        return {"schema": schema}

    def parse(
        self, topic: Topic, *, stop: bool, key_separator: str | None = None, rows_only: bool = False
    ) -> Iterator[Parsed]:
        """Yields the events block by block; `stop` ends them at the first bad row.

        A topic of bytes takes each line as a value; with `rows_only` each line is a row with `key` and `value`.
        """
        if key_separator is not None and topic.has_schema:
            raise InvalidInput(
                f"--key-separator does not apply to topic {topic.name!r}, because the topic has columns.",
                advice="Leave out --key-separator.",
            )
        if self._is_table:
            return self._parse_table(topic, stop=stop)
        return self._parse_text(self._parser(topic, key_separator, rows_only=rows_only), stop=stop)

    @property
    def _is_table(self) -> bool:
        return self.form in ("parquet", "arrow")

    def _parser(self, topic: Topic, key_separator: str | None, *, rows_only: bool) -> Parser:
        if not topic.has_schema and not rows_only:
            self._blocks.quotes = False
            return Lines(topic, key_separator=key_separator)
        if self.form == "lines" and self._is_form_given:
            raise InvalidInput(
                f"Topic {topic.name!r} has columns, but --format lines reads {self.name} as plain text.",
                advice="Use --format json or --format csv.",
            )
        if self.form == "csv":
            return Csv(topic, self._blocks.take_line(), name=self.name, delimiter=self._delimiter)
        return JsonLines(topic)

    def _parse_text(self, parser: Parser, *, stop: bool) -> Iterator[Parsed]:
        for block in self._blocks:
            parsed = parser.parse(block, stop=stop)
            yield parsed
            if stop and parsed.bad:
                return

    def _parse_table(self, topic: Topic, *, stop: bool) -> Iterator[Parsed]:
        table = self._open_table()
        rows = ArrowRows(topic, table.schema, name=self.name)
        row = 1
        for batch in table.batches():
            parsed = rows.parse_batch(batch, row, stop=stop)
            row += batch.num_rows
            yield parsed
            if stop and parsed.bad:
                return

    def _open_table(self) -> TableFile:
        if self._table is None:
            self._table = TableFile(self._stream, self.name, form=self.form)
        return self._table


def _open(name: str, form: InputFormat | None, delimiter: str | None, stack: ExitStack) -> InputFile:
    stem, ending = os.path.splitext(name.lower())
    is_compressed = ending in _COMPRESSED
    if is_compressed:
        ending = os.path.splitext(stem)[1]
    form = form or _ENDINGS.get(ending)
    delimiter = delimiter or ("\t" if ending == ".tsv" else ",")
    if name == STDIN:
        stream = _spooled(stack) if form in ("parquet", "arrow") else sys.stdin.buffer
        return InputFile(name, stream, form=form, delimiter=delimiter, size=None)
    if os.path.isdir(name):
        raise InvalidInput(f"{name} is a folder.", advice="Pass the files in it.")
    file = stack.enter_context(open(name, "rb"))  # noqa: SIM115 - the stack closes it
    size = os.fstat(file.fileno()).st_size
    if is_compressed:
        return InputFile(name, pa.input_stream(name, compression="detect"), form=form, delimiter=delimiter, size=None)
    return InputFile(name, file, form=form, delimiter=delimiter, size=size or None)


def _spooled(stack: ExitStack) -> Any:
    """Stdin copied to a file, because Parquet and Arrow need random access."""
    file = stack.enter_context(tempfile.TemporaryFile(prefix="headwater-"))  # noqa: SIM115 - the stack closes it
    shutil.copyfileobj(sys.stdin.buffer, file)
    file.seek(0)
    return file
