"""`headwater import FILE TOPIC`: appends the rows of a Parquet, Arrow, JSON lines or CSV file to a topic.

It works like `produce` for one file; `--create` takes the topic's settings from a file that `export` wrote. It appends each
row once, in the order of the file, and prints the number of stored events.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Literal

import typer

from headwater.cli.commands.produce import ProduceRun, check_there, create_for, given_settings
from headwater.cli.log_option import LogOption, open_existing, open_or_create


def import_file(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to read; - means stdin.")],
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to append to.")],
    format: Annotated[
        Literal["parquet", "json", "csv", "arrow"] | None,
        typer.Option("--format", help="Default: by the file extension, else JSON lines."),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create the topic from the file if it does not exist.")
    ] = False,
    schema: Annotated[
        str | None, typer.Option(metavar="DDL", help="With --create: the columns. Default: those of the file.")
    ] = None,
    key: Annotated[str | None, typer.Option(metavar="COLUMN", help="With --create: the key column.")] = None,
    time: Annotated[str | None, typer.Option(metavar="COLUMN", help="With --create: the event-time column.")] = None,
    partitions: Annotated[int | None, typer.Option(help="With --create: the number of partitions.")] = None,
    log: LogOption = None,
) -> None:
    """Append the rows of a file to a topic: a file of `headwater export`, or any Parquet, Arrow, JSON lines or CSV file."""
    from headwater.cli.input_files import open_inputs

    given = given_settings(create=create, schema=schema, key=key, time=time, partitions=partitions)
    with ExitStack() as stack:
        inputs = open_inputs([file], form=format, delimiter=None, stack=stack)
        opened = stack.enter_context(open_or_create(log) if create else open_existing(log))
        if create:
            create_for(opened, topic, inputs, given)
        else:
            check_there(opened, topic)
        run = ProduceRun(opened, topic, skip_bad=False, facts=True)
        with run:
            run.append_all(inputs[0], rows_only=True)
