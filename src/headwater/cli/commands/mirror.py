"""`headwater mirror FROM TO`: copies a log to another, offset by offset, once or continuously.

In a pipe it prints one line of JSON at the end; with `--follow` it prints one each time it has caught up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from headwater.cli.log_option import open_existing
from headwater.cli.output.progress import progress_line, tell_end
from headwater.cli.output.quantities import events_text
from headwater.cli.output.terminal import is_terminal

if TYPE_CHECKING:
    from headwater.log.copies.mirror import Mirrored


def mirror(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The log to copy: a folder or a URL.")],
    target: Annotated[
        str, typer.Argument(metavar="TO", help="The copy: a folder or a URL. Created if it does not exist.")
    ],
    topic: Annotated[list[str] | None, typer.Option("--topic", "-t", help="Copy only this topic. Repeatable.")] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help='Copy only topics with a matching name, such as "orders.*", also topics created later.',
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Copy new events as they arrive, until Ctrl-C.")
    ] = False,
) -> None:
    """Copy a log to another log. The copy has the same topics, offsets, keys, times, headers and deletions."""
    seen: list[Mirrored] = []
    with open_existing(source) as opened, progress_line(f"{source} → {target}") as line:

        def show(now: Mirrored) -> None:
            line.show(f"{events_text(now.events)} copied, {now.behind:,} behind", done=now.events, total=_total(now))
            if not now.behind and [one.events for one in seen] != [now.events]:
                seen[:] = [now]
                if follow and not is_terminal():
                    tell_end("", msgspec.to_builtins(now))

        try:
            opened.mirror(target, topics=topic, pattern=pattern, follow=follow, on_progress=show)
        except KeyboardInterrupt:
            if not follow:
                raise
    if seen and (not follow or is_terminal()):
        topics = f"{seen[0].topics} topic{'' if seen[0].topics == 1 else 's'}"
        tell_end(f"{events_text(seen[0].events)} copied; {topics} in {target}", msgspec.to_builtins(seen[0]))


def _total(now: Mirrored) -> int:
    return max(1, now.events + now.behind)
