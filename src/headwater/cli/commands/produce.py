"""`headwater produce TOPIC [FILE…]`: appends events from files or a pipe to a topic.

The command appends events block by block, in bounded memory. A bad line ends the command with an error that names the
line; the log then holds every line before it and none after it. With `--skip-bad` the command skips and counts bad lines.
"""

from __future__ import annotations

import signal
import sys
import time as clock
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from headwater.cli.log_option import LogOption, open_existing, open_or_create
from headwater.cli.output.progress import tell_end
from headwater.cli.output.quantities import bytes_text, events_text
from headwater.cli.output.terminal import is_terminal, printable
from headwater.model.errors import HeadwaterError, InvalidInput, SchemaMismatch, TopicNotFound

if TYPE_CHECKING:
    from headwater.cli.input_files import InputFile
    from headwater.formats.formats import Parsed
    from headwater.log.log import Log

BAD_SHOWN_MAX = 5


def produce(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to append to.")],
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]...", help="The files to append. Default: stdin, also written as -."),
    ] = None,
    format: Annotated[
        Literal["json", "csv", "parquet", "arrow", "lines"] | None,
        typer.Option(
            "--format", help="Default: by the file extension, else JSON lines; plain lines for a topic of bytes."
        ),
    ] = None,
    delimiter: Annotated[str | None, typer.Option(help="The delimiter of CSV. Default: a comma.")] = None,
    key_separator: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The text between key and value in each line, for a topic of bytes."),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip and count bad rows instead of stopping at the first.")
    ] = False,
    create: Annotated[
        bool, typer.Option("--create", help="Create the topic and the log if they do not exist.")
    ] = False,
    schema: Annotated[
        str | None, typer.Option(metavar="DDL", help="With --create: the columns. Default: inferred from the input.")
    ] = None,
    key: Annotated[str | None, typer.Option(metavar="COLUMN", help="With --create: the key column.")] = None,
    time: Annotated[str | None, typer.Option(metavar="COLUMN", help="With --create: the event-time column.")] = None,
    partitions: Annotated[int | None, typer.Option(help="With --create: the number of partitions. Default: 4.")] = None,
    log: LogOption = None,
) -> None:
    """Append events from files or stdin: JSON lines, CSV, Parquet, or plain lines for a topic of bytes."""
    from headwater.cli.input_files import open_inputs

    given = given_settings(create=create, schema=schema, key=key, time=time, partitions=partitions)
    with ExitStack() as stack:
        inputs = open_inputs(files or ["-"], form=format, delimiter=delimiter, stack=stack)
        opened = stack.enter_context(open_or_create(log) if create else open_existing(log))
        if create:
            create_for(opened, topic, inputs, given)
        else:
            check_there(opened, topic)
        run = ProduceRun(opened, topic, skip_bad=skip_bad)
        with run:
            for one in inputs:
                run.append_all(one, key_separator=key_separator)


def given_settings(*, create: bool, **settings: Any) -> dict[str, Any]:
    """The given settings of a new topic; refused without `--create`."""
    given = {setting: value for setting, value in settings.items() if value is not None}
    if given and not create:
        raise InvalidInput(
            f"--{next(iter(given))} applies only to a new topic.",
            advice=f"Add --create, or leave out --{next(iter(given))}.",
        )
    return given


def check_there(log: Log, topic: str) -> None:
    """Refuses a topic that does not exist."""
    try:
        log.topic(topic)
    except TopicNotFound as error:
        raise TopicNotFound(error.what, advice=f"{error.advice} Add --create to create it.") from None


def create_for(log: Log, topic: str, inputs: list[InputFile], settings: dict[str, Any]) -> None:
    """Creates a missing topic from the settings, or else from the first input."""
    from headwater.cli.schema_inference import with_time
    from headwater.log.port.topic import check_name

    if check_name(topic) in log.topics():
        return
    if "schema" not in settings and inputs[0].form != "lines":
        settings = inputs[0].topic_settings() | settings
        settings["schema"] = with_time(settings["schema"], settings.get("time"))
    log.create_topic(topic, exist_ok=True, **settings)


class ProduceRun:
    """One call of the command: counts what it appends, shows progress, and prints a summary at the end.

    With `facts` the summary in a pipe is JSON.
    """

    def __init__(self, log: Log, topic: str, *, skip_bad: bool, facts: bool = False) -> None:
        self._facts = facts
        self._log = log
        self._topic = topic
        self._skip_bad = skip_bad
        self._events = self._bytes = self._bad = 0
        self._begun = clock.monotonic()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            _Counts(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )

    def append_all(self, one: InputFile, *, key_separator: str | None = None, rows_only: bool = False) -> None:
        """Appends every event of one input."""
        task = self._progress.add_task(printable(one.name), total=one.size, events=0)
        before = self._bytes
        topic = self._log.topic(self._topic)
        for parsed in one.parse(topic, stop=not self._skip_bad, key_separator=key_separator, rows_only=rows_only):
            self._append(parsed)
            self._bytes = before + one.bytes_read
            self._progress.update(task, completed=one.bytes_read, events=self._events)
            self._tell_bad(one, parsed)
        self._progress.update(task, total=one.bytes_read)

    def _append(self, parsed: Parsed) -> None:
        import pyarrow as pa

        if parsed.batches:
            parts = [pa.Table.from_batches([batch]) for batch in parsed.batches]
            rows = pa.concat_tables(parts, promote_options="default")  # only some may have deletions or headers
            with _uninterrupted():
                self._log.append(self._topic, rows)
                self._events += rows.num_rows

    def _tell_bad(self, one: InputFile, parsed: Parsed) -> None:
        for bad in parsed.bad:
            place = f"{one.name}{one.place(bad.line)}"
            if not self._skip_bad:
                stored = ""
                if self._events:
                    stored = f" The log holds the {events_text(self._events)} before it, so resume there."
                raise SchemaMismatch(
                    f"{place}: {bad.error.what}", advice=f"{bad.error.advice}{stored} To skip bad rows, use --skip-bad."
                )
            self._bad += 1
            if self._bad <= BAD_SHOWN_MAX:
                typer.echo(f"skipped {printable(place)}: {printable(bad.error.what)}", err=True)
            if self._bad == BAD_SHOWN_MAX:
                typer.echo("further bad rows are counted, but not printed", err=True)

    def __enter__(self) -> None:
        self._progress.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._progress.stop()
        took = max(clock.monotonic() - self._begun, 1e-6)
        if self._facts and kind is None and not is_terminal():
            tell_end("", {"topic": self._topic, "events": self._events, "skipped": self._bad, "bytes": self._bytes})
            return
        skipped = f", {self._bad:,} bad rows skipped" if self._skip_bad else ""
        until = (
            ""
            if kind is None
            else " before the error"
            if isinstance(error, HeadwaterError)
            else " before the command was stopped"
        )
        typer.echo(
            f"{events_text(self._events)} appended to {self._topic}{until}{skipped} "
            f"({bytes_text(self._bytes)} in {took:.1f} s, {self._events / took:,.0f} events/s)",
            err=kind is not None,
        )


class _Counts(ProgressColumn):
    """The number of events and bytes so far, and the rates."""

    def render(self, task: Task) -> Text:
        elapsed = max(task.elapsed or 0, 1e-6)
        events = task.fields["events"]
        return Text(
            f"{events_text(events)} · {bytes_text(int(task.completed))} · {events / elapsed:,.0f} events/s "
            f"· {bytes_text(int(task.completed / elapsed))}/s",
            style="cyan",
        )


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C until the block has ended, so that the count agrees with what is stored."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
