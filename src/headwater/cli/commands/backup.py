"""`headwater backup LOG TO` and `headwater restore FROM LOG`: back up a log as of one moment, and restore it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.log_option import open_existing
from headwater.cli.output.progress import progress_line, tell_end
from headwater.cli.output.quantities import bytes_text, events_text
from headwater.model.clock import time_of

if TYPE_CHECKING:
    from headwater.log.copies.backup import BackedUp
    from headwater.log.copies.restore import Restored


def backup(
    log: Annotated[str, typer.Argument(metavar="LOG", help="The log to back up: a folder.")],
    to: Annotated[str, typer.Argument(metavar="TO", help="A folder, or a URL that pyarrow supports (s3://…, gs://…).")],
) -> None:
    """Back up a log as of this moment. Programs may keep writing. The next backup copies only new files."""
    import msgspec

    with open_existing(log) as opened, progress_line(f"{log} → {to}") as line:

        def show(now: BackedUp) -> None:
            files = now.copied + now.linked + now.kept
            line.show(f"{files:,} files, {bytes_text(now.copied_bytes)} copied")

        done = opened.backup(to, on_progress=show)
    tell_end(
        f"{events_text(done.events)} of {done.topics} topics as of {_time(done.taken_us)} in {to} "
        f"({done.copied:,} files copied, {done.linked:,} linked, {done.kept:,} unchanged; {bytes_text(done.copied_bytes)})",
        msgspec.to_builtins(done),
    )


def restore(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The backup: a folder or a URL.")],
    log: Annotated[str, typer.Argument(metavar="LOG", help="The log to create: a new or empty folder.")],
) -> None:
    """Restore a log from a backup, after checking every file of the backup."""
    import msgspec

    from headwater.log.copies.restore import restore_log

    with progress_line(f"{source} → {log}") as line:

        def show(now: Restored) -> None:
            line.show(f"{now.files:,} files, {bytes_text(now.bytes)}")

        done = restore_log(source, log, on_progress=show)
    tell_end(
        f"{events_text(done.events)} of {done.topics} topics as of {_time(done.taken_us)} restored to {log} "
        f"({done.files:,} files, {bytes_text(done.bytes)})",
        msgspec.to_builtins(done),
    )


def _time(at_us: int) -> str:
    return f"{time_of(at_us):%Y-%m-%d %H:%M:%S} UTC"
