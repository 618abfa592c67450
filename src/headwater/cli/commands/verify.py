"""`headwater verify SOURCE TARGET`: compares a derived system with its source, and repairs the keys that differ.

Both are URLs; see `headwater.verify.side_url`. The exit code is 0 if both are equal, also after a repair, and else 1.
In a pipe, or with `--json`, the command prints one line of JSON per comparison.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.cli.output.json import print_json_line
from headwater.cli.output.terminal import is_terminal, printable

if TYPE_CHECKING:
    from headwater.verify.comparison import Difference, VerifyReport

SHOWN_MAX = 100
WATCH_S = 10.0


def verify(
    source: Annotated[str, typer.Argument(help="The source: LOG#TOPIC, LOG#VIEW or a table of a database.")],
    target: Annotated[str, typer.Argument(help="The derived system: a table, redis://…, tantivy:///…, delta:///….")],
    key: Annotated[
        list[str] | None,
        typer.Option("--key", "-k", help="A key column, if the source does not declare a key. Repeatable."),
    ] = None,
    columns: Annotated[str | None, typer.Option(metavar="A,B", help="Compare only these columns.")] = None,
    stage: Annotated[
        str | None, typer.Option(help="The sink that writes the target, as APP.STAGE, if there are several.")
    ] = None,
    settle_s: Annotated[
        float,
        typer.Option(
            "--settle",
            metavar="SECONDS",
            help="How long a key must differ before it counts, if the target reports no position.",
        ),
    ] = 10.0,
    watch: Annotated[bool, typer.Option("--watch", help=f"Repeat every {WATCH_S:g} s until Ctrl-C.")] = False,
    every_s: Annotated[float, typer.Option("--every", metavar="SECONDS", help="The interval of --watch.")] = WATCH_S,
    repair: Annotated[bool, typer.Option("--repair", help="Write the keys that differ to the target.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a derived system with its source by checksums, and print the keys that differ."""
    from headwater.verify.verification import verify_copy

    is_json, is_equal = json or not is_terminal(), True
    try:
        while True:
            report = verify_copy(
                source,
                target,
                key=key or (),
                columns=_names(columns),
                stage=stage,
                settle_s=settle_s,
                repair=repair,
            )
            is_equal = report.is_equal
            if is_json:
                print_json_line(_plain(report))
            else:
                _print(report)
            if not watch:
                break
            time.sleep(every_s)
    except KeyboardInterrupt:
        if not watch:
            raise
    if not is_equal:
        raise typer.Exit(1)


def _plain(report: VerifyReport) -> dict[str, Any]:
    import msgspec

    shown: dict[str, Any] = {"equal": report.is_equal, **msgspec.to_builtins(report, enc_hook=str)}
    repaired = shown.pop("repaired")
    if repaired is not None:
        after = repaired.pop("after")
        shown |= {"repaired": repaired, "left": after["differing"]}
    return shown


def _print(report: VerifyReport) -> None:
    for one in report.differences[:SHOWN_MAX]:
        _print_difference(one)
    if report.differing > SHOWN_MAX:
        typer.echo(f"… and {report.differing - SHOWN_MAX:,} more")
    for name in report.unreadable[:SHOWN_MAX]:
        typer.secho(f"! {printable(name)} is not a row", fg="red")
    if report.duplicates:
        typer.secho(f"! {report.duplicates:,} duplicate keys", fg="red")
    repaired = report.repaired
    rows = f"{report.rows:,} row{'' if report.rows == 1 else 's'}"
    behind = f", {report.behind:,} events behind" if report.behind else ""
    where = "at one position" if report.exact else "without a common position"
    if report.is_equal and repaired is None:
        typer.secho(f"equal: {rows} in {report.chunks:,} chunks, {where}{behind}", fg="green")
    else:
        typer.secho(f"not equal: {report.differing:,} of {rows} differ, {where}{behind}", fg="red")
    if repaired is not None:
        left = "nothing differs now" if report.is_equal else f"{repaired.after.differing:,} still differ"
        typer.echo(f"repaired: {repaired.written:,} written, {repaired.removed:,} removed; {left}")
        for reason in repaired.refused:
            typer.secho(f"! refused: {printable(reason)}", fg="red")


def _print_difference(one: Difference) -> None:
    signs = {"missing": ("-", "red"), "extra": ("+", "yellow"), "different": ("~", "yellow")}
    sign, color = signs[one.kind]
    key = ", ".join(f"{name}={value}" for name, value in one.key.items())
    what = f"{one.kind} in {', '.join(one.columns)}" if one.columns else one.kind
    typer.secho(printable(f"{sign} {key}: {what}"), fg=color)
    for label, text in (("source", one.source), ("target", one.target)):
        if text is not None:
            typer.echo(printable(f"    {label}  {text}"))


def _names(columns: str | None) -> list[str]:
    return [name.strip() for name in (columns or "").split(",") if name.strip()]
