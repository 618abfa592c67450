"""`headwater run`, `plan` and `status`: an application from the terminal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.output import printable
from headwater.cli.script import Script
from headwater.model.errors import InvalidApp

if TYPE_CHECKING:
    from headwater.launch import Restart
    from headwater.processing.status import AppStatus

PORT = 8642


def run(
    script: Script,
    available_now: Annotated[
        bool, typer.Option("--available-now", help="Process what is there now, as a batch, and end.")
    ] = False,
    accept_new_checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE=FROM",
            help="For a stage whose checkpoint is gone: begin from marker (behind what it wrote last), earliest or latest.",
        ),
    ] = None,
    page: Annotated[bool, typer.Option(help="Serve the status page on this machine.")] = True,
    port: Annotated[int, typer.Option(help="Of the page; the next free one if it is taken.")] = PORT,
) -> None:
    """Run an application: every stage, supervised, until Ctrl-C."""
    from headwater.app import load_app
    from headwater.cli.run_screen import open_screen
    from headwater.server.page import StatusPage

    app = load_app(script)
    accepted = _accepted(accept_new_checkpoint or [])
    with _terminated_as_interrupted(), open_screen(app.name) as screen:
        serving = StatusPage(app, port=port) if page and not available_now else None
        try:
            if serving is not None:
                screen.tell(f"status page: {serving.url}")

            def watch(status: AppStatus) -> None:
                screen.show(status)
                if serving is not None:
                    serving.show(status)

            last = app.run(available_now=available_now, accept_new_checkpoint=accepted, watch=watch)
        finally:
            if serving is not None:
                serving.close()
    _end(last)


def plan(script: Script) -> None:
    """Check an application and draw it: what reads what, what it gives, what keeps state. Nothing is started or made."""
    from headwater.app import load_app

    typer.echo(printable(load_app(script).plan()))


def status(
    script: Script,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what each stage of an application does, as it last told."""
    import msgspec

    from headwater.app import load_app
    from headwater.cli.run_screen import print_status

    app = load_app(script)
    found = app.status()
    if found is None:
        raise InvalidApp(f"Application {app.name!r} has not run yet.", advice=f"Start it: headwater run {script}.")
    if json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        print_status(found)


def _accepted(given: list[str]) -> dict[str, Restart]:
    from headwater.launch import checked_restarts

    pairs = dict[str, str]()
    for each in given:
        stage, equals, start = each.partition("=")
        if not equals:
            raise InvalidApp(
                f"--accept-new-checkpoint {each!r} names no place to begin.",
                advice="Write stage=marker, stage=earliest or stage=latest.",
            )
        pairs[stage] = start.removeprefix("from ")
    return checked_restarts(pairs)


def _end(last: AppStatus) -> None:
    failed = [stage for stage in last.stages if stage.state == "failed"]
    for stage in failed:
        typer.secho(f"stage {stage.name} failed: ", fg="red", err=True, nl=False)
        typer.echo(printable(stage.error or "unknown"), err=True)
    if failed:
        raise typer.Exit(1)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM drains as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
