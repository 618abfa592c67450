"""`headwater doctor`: checks every file of a log, reports problems, and repairs those that are safe to repair."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.status import Status
from rich.text import Text

from headwater.cli.log_option import LogOption, log_url
from headwater.cli.output.json import print_json
from headwater.cli.output.quantities import bytes_text
from headwater.cli.output.terminal import printable
from headwater.model.errors import Unsupported

if TYPE_CHECKING:
    from headwater.log.doctor.doctor import Finding, Report

PATH_CHARACTERS_MAX = 60


def doctor(
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair what is safe to repair. No other program may have the log open.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    log: LogOption = None,
) -> None:
    """Check every file of the log. The exit code is 1 if an error remains."""
    url = log_url(log)
    if "://" in url and not url.startswith("file://"):
        raise Unsupported(
            f"`headwater doctor` checks the files of a log in a folder, but {url} is not a folder.",
            advice="Pass a folder with --log.",
        )
    report = _examine(url, repair=repair)
    if json:
        print_json(report)
    else:
        _print_findings(report, repair=repair)
    if not report.healthy:
        raise typer.Exit(1)


def _examine(url: str, *, repair: bool) -> Report:
    from headwater.log.doctor.doctor import examine

    with Status("checking …", console=Console(stderr=True)) as status:

        def show(path: str) -> None:
            status.update(Text(f"checking …{printable(path)[-PATH_CHARACTERS_MAX:]}"))

        return examine(url, repair=repair, on_progress=show if sys.stderr.isatty() else lambda path: None)


def _print_findings(report: Report, *, repair: bool) -> None:
    for finding in report.findings:
        _print_finding(finding)
    seen = f"{report.files:,} files, {report.events:,} events, {bytes_text(report.bytes)}"
    errors = sum(finding.severity == "error" and not finding.repaired for finding in report.findings)
    warnings = sum(finding.severity == "warning" and not finding.repaired for finding in report.findings)
    repaired = sum(finding.repaired for finding in report.findings)
    if not report.findings:
        typer.secho(f"✓ healthy: {seen}", fg="green")
        return
    typer.echo(f"{seen}: {errors} errors, {warnings} warnings, {repaired} repaired")
    if errors + warnings and not repair:
        typer.echo("`headwater doctor --repair` repairs what is safe to repair.")


def _print_finding(finding: Finding) -> None:
    if finding.repaired:
        typer.secho("repaired ", fg="green", bold=True, nl=False)
    else:
        typer.secho(f"{finding.severity} ", fg="red" if finding.severity == "error" else "yellow", bold=True, nl=False)
    typer.echo(f"{printable(finding.path)}: {printable(finding.what)}")
    if finding.note:
        typer.echo(f"  note: {printable(finding.note)}")
    if finding.advice and not finding.repaired:
        typer.echo(f"  next: {printable(finding.advice)}")
