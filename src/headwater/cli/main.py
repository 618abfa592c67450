"""The command line `headwater`, its commands, and how it prints errors.

A failure prints `error [code]: what` and `next: advice` on stderr and exits with 1, without a traceback; `--debug` (or
`HEADWATER_DEBUG=1`) prints the traceback too. Wrong usage exits with 2, Ctrl-C with 130.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from headwater import __version__
from headwater.cli.commands.backup import backup, restore
from headwater.cli.commands.capture import capture
from headwater.cli.commands.coverage import coverage
from headwater.cli.commands.doctor import doctor
from headwater.cli.commands.export import export
from headwater.cli.commands.groups import groups
from headwater.cli.commands.import_ import import_file
from headwater.cli.commands.lag import lag
from headwater.cli.commands.mirror import mirror
from headwater.cli.commands.produce import produce
from headwater.cli.commands.queues import queues
from headwater.cli.commands.run import plan, run, status
from headwater.cli.commands.sql import sql
from headwater.cli.commands.state import state
from headwater.cli.commands.tail import tail
from headwater.cli.commands.topics import topics
from headwater.cli.commands.verify import verify
from headwater.cli.commands.views import views
from headwater.cli.demo.run import demo
from headwater.cli.log_option import VARIABLE, LogOption
from headwater.cli.output.terminal import printable
from headwater.model.errors import HeadwaterError
from headwater.model.extras import missing_extra

DEBUG = "HEADWATER_DEBUG"
# Where an error's own advice speaks to a program, not to a person at a terminal.
ADVICE = {
    "log_not_found": f"Pass the log with --log or {VARIABLE}, or create one with `headwater topics create`.",
    "topic_exists": "Choose another name, or pass --exist-ok to keep the topic unchanged.",
    "no_access": "Check the owner and the permissions of the log's folder.",
}

app = typer.Typer(
    name="headwater",
    help="Event streams for Python: a durable log, and Spark applications on top of it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(topics, name="topics")
app.add_typer(queues, name="queues")
app.add_typer(groups, name="groups")
app.add_typer(views, name="views")
app.add_typer(state, name="state")
app.add_typer(capture, name="capture")
app.command()(produce)
app.command()(tail)
app.command()(lag)
app.command()(sql)
app.command()(doctor)
app.command()(mirror)
app.command()(backup)
app.command()(restore)
app.command()(export)
app.command("import")(import_file)
app.command()(run)
app.command()(plan)
app.command()(status)
app.command()(demo)
app.command()(verify)
app.command()(coverage)


def main() -> None:
    """Runs the command that the process was started with."""
    try:
        app()
    except HeadwaterError as error:
        _tell(error.code, error.what, ADVICE.get(error.code, error.advice), error)
    except ModuleNotFoundError as error:
        _tell_missing(error)
    except UnicodeEncodeError as error:
        what = f"{error.object!r:.80} contains half of a surrogate pair, which is not a valid character."
        _tell("invalid_input", what, "Write names, URLs and text in UTF-8.", error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        code = "file_not_found" if isinstance(error, FileNotFoundError) else "system"
        advice = (
            "Check the path and its permissions." if error.filename else f"Try again. {DEBUG}=1 prints a traceback."
        )
        _tell(code, f"{where}{error.strerror or error}.", advice, error)
    except Exception as error:  # noqa: BLE001 - the last stop: a person at a terminal gets a sentence, not a traceback
        _tell_bug(error)
    sys.exit(1)


def _tell_missing(error: ModuleNotFoundError) -> None:
    """Prints which extra brings a missing optional package; any other missing module is a bug."""
    missing = missing_extra(error, purpose="This command")
    if missing is None:
        _tell_bug(error)
    else:
        _tell(missing.code, missing.what, missing.advice, error)


def _tell_bug(error: Exception) -> None:
    advice = f"This is a bug in Headwater. Run the command again with {DEBUG}=1, and report the traceback."
    _tell("bug", f"{type(error).__name__}: {error}", advice, error)


def _tell(code: str, what: str, advice: str, error: Exception) -> None:
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    typer.secho(f"error [{code}]: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(printable(what), err=True)
    if advice:
        typer.secho("next: ", fg="yellow", err=True, nl=False)
        typer.echo(printable(advice), err=True)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"headwater {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    log: LogOption = None,
    debug: Annotated[bool, typer.Option("--debug", help=f"Print tracebacks, as {DEBUG}=1 does.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Event streams for Python: a durable log, and Spark applications on top of it."""
    if log:
        os.environ[VARIABLE] = log
    if debug:
        os.environ[DEBUG] = "1"


if __name__ == "__main__":
    main()
