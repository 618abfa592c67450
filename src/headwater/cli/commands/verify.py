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
    from headwater.verify.comparison import Difference, Pair, VerifyReport
    from headwater.verify.repair import Repaired

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
    from headwater.verify.comparison import open_pair

    pair = open_pair(source, target, key=key or (), columns=_names(columns), stage=stage)
    is_json = json or not is_terminal()
    is_equal = True
    try:
        while True:
            is_equal = _once(pair, settle_s=settle_s, repairs=repair, is_json=is_json)
            if not watch:
                break
            time.sleep(every_s)
    except KeyboardInterrupt:
        if not watch:
            raise
    finally:
        pair.close()
    if not is_equal:
        raise typer.Exit(1)


def _once(pair: Pair, *, settle_s: float, repairs: bool, is_json: bool) -> bool:
    from headwater.verify.comparison import compare
    from headwater.verify.repair import repair

    report, repaired = compare(pair, settle_s=settle_s), None
    before = report
    if repairs and not report.is_equal:
        repaired, report = repair(pair, report, settle_s=settle_s)
    if is_json:
        print_json_line(_plain(before, report, repaired))
    else:
        _print(before, report, repaired)
    return report.is_equal


def _plain(before: VerifyReport, after: VerifyReport, repaired: Repaired | None) -> dict[str, Any]:
    import msgspec

    shown: dict[str, Any] = {"equal": after.is_equal, **msgspec.to_builtins(before, enc_hook=str)}
    if repaired is not None:
        shown["repaired"] = msgspec.to_builtins(repaired)
        shown["left"] = after.differing
    return shown


def _print(before: VerifyReport, after: VerifyReport, repaired: Repaired | None) -> None:
    for one in before.differences[:SHOWN_MAX]:
        _print_difference(one)
    if before.differing > SHOWN_MAX:
        typer.echo(f"… and {before.differing - SHOWN_MAX:,} more")
    for name in before.unreadable[:SHOWN_MAX]:
        typer.secho(f"! {printable(name)} is not a row", fg="red")
    if before.duplicates:
        typer.secho(f"! {before.duplicates:,} duplicate keys", fg="red")
    rows = f"{before.rows:,} row{'' if before.rows == 1 else 's'}"
    behind = f", {before.behind:,} events behind" if before.behind else ""
    where = "at one position" if before.exact else "without a common position"
    if before.is_equal:
        typer.secho(f"equal: {rows} in {before.chunks:,} chunks, {where}{behind}", fg="green")
    else:
        typer.secho(f"not equal: {before.differing:,} of {rows} differ, {where}{behind}", fg="red")
    if repaired is not None:
        left = "nothing differs now" if after.is_equal else f"{after.differing:,} still differ"
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
