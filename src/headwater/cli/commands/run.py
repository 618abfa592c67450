"""`headwater run`, `plan` and `status`: run, check and observe an application."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.output.json import print_json_line
from headwater.cli.output.terminal import printable
from headwater.model.errors import InvalidApp

if TYPE_CHECKING:
    from headwater.app.restarts import Restart
    from headwater.processing.stages.rebuild import Rebuild
    from headwater.processing.stages.status import AppStatus

PORT = 8642

Script = Annotated[Path, typer.Argument(metavar="APP.PY", help="The script that declares the application.")]
Master = Annotated[
    str | None, typer.Option(metavar="URL", help="The Spark master, such as spark://host:7077. Overrides the script.")
]
Conf = Annotated[list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="A Spark setting. Repeatable.")]


def run(
    script: Script,
    available_now: Annotated[
        bool, typer.Option("--available-now", help="Process the present events as a batch, then exit.")
    ] = False,
    accept_new_checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE=FROM",
            help="Where a stage without its checkpoint begins: marker (after its last output), earliest or latest.",
        ),
    ] = None,
    rebuild_state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE",
            help="Rebuild the lost state of a stage from the log. STAGE=kept uses only the events that retention has kept.",
        ),
    ] = None,
    page: Annotated[bool, typer.Option(help="Serve the status page on this machine.")] = True,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="The port of the page, or the next free port after it.")
    ] = PORT,
    master: Master = None,
    conf: Conf = None,
) -> None:
    """Run all stages of an application until Ctrl-C, and restart those that fail."""
    from headwater.app.app import load_app
    from headwater.cli.output.run_screen import open_screen
    from headwater.processing.stages.status import first_status
    from headwater.server.page import StatusPage

    app = load_app(script)
    app.use(master=master, conf=_settings(conf or []))
    accepted, rebuilt = _accepted(accept_new_checkpoint or []), _rebuilt(rebuild_state or [])
    with open_screen(first_status(app.graph, app.log_url)) as screen, _ended_by_signals(screen.tell):
        serving = StatusPage(app, port=port) if page and not available_now else None
        try:
            if serving is not None:
                screen.tell(f"status page: {serving.url}   Ctrl-C stops after the current batches")

            def watch(status: AppStatus) -> None:
                screen.show(status)
                if serving is not None:
                    serving.show(status)

            last = app.run(
                available_now=available_now,
                accept_new_checkpoint=accepted,
                rebuild_state=rebuilt,
                watch=watch,
                check=False,
            )
        finally:
            if serving is not None:
                serving.close()
    _end(last)


def plan(script: Script, master: Master = None, conf: Conf = None) -> None:
    """Check an application, and draw its topics, stages, outputs and state. The command does not start or change anything."""
    from headwater.app.app import load_app
    from headwater.cli.output.run_screen import print_plan

    app = load_app(script)
    app.use(master=master, conf=_settings(conf or []))
    print_plan(printable(app.plan()))


def status(
    script: Script,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the last reported status of each stage of an application."""
    from headwater.app.app import load_app
    from headwater.cli.output.run_screen import print_status

    app = load_app(script)
    found = app.status()
    if found is None:
        raise InvalidApp(
            f"Application {app.name!r} has not run yet.", advice=f"Start it with `headwater run {script}`."
        )
    if json:
        print_json_line(found)
    else:
        print_status(found)


def _accepted(given: list[str]) -> dict[str, Restart]:
    from headwater.app.restarts import checked_restarts

    pairs = dict[str, str]()
    for each in given:
        stage, equals, start = each.partition("=")
        if not equals:
            raise InvalidApp(
                f"--accept-new-checkpoint {each!r} does not say where the stage begins.",
                advice="Write STAGE=marker, STAGE=earliest or STAGE=latest.",
            )
        pairs[stage] = start.removeprefix("from ")
    return checked_restarts(pairs)


def _rebuilt(given: list[str]) -> dict[str, Rebuild]:
    pairs: dict[str, Rebuild] = {}
    for each in given:
        stage, equals, how = each.partition("=")
        if equals and how != "kept":
            raise InvalidApp(
                f"--rebuild-state {each!r} is not a stage, and does not end with =kept.",
                advice="Write STAGE to rebuild from all events, or STAGE=kept to use the events that retention has kept.",
            )
        pairs[stage] = "kept" if equals else "all"
    return pairs


def _settings(given: list[str]) -> dict[str, str]:
    for each in given:
        if not each.partition("=")[1]:
            raise InvalidApp(
                f"--conf {each!r} has no value.", advice="Write, for example, --conf spark.executor.memory=2g."
            )
    return {name: value for name, _, value in (each.partition("=") for each in given)}


def _end(last: AppStatus) -> None:
    failed = [stage for stage in last.stages if stage.state == "failed"]
    for stage in failed:
        typer.secho(f"stage {stage.name} failed: ", fg="red", err=True, nl=False)
        typer.echo(printable(stage.error or "unknown"), err=True)
    if failed:
        raise typer.Exit(1)


@contextmanager
def _ended_by_signals(tell: Callable[[str], None]) -> Iterator[None]:
    """Handles SIGTERM and SIGHUP like Ctrl-C: the first signal stops after the current batches, the second one at once."""

    def interrupt(number: int, frame: object) -> None:
        tell("stopping after the current batches; press Ctrl-C again to stop at once")
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)  # a shell's background job ignores it, and goes on doing so
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
