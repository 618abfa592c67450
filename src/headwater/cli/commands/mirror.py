"""`headwater mirror FROM TO`: makes a log equal to another, offset by offset, once or for as long as it runs.

In a pipe it prints one line of JSON when it has ended; with `--follow` one whenever it has caught up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from headwater.cli.location import open_existing
from headwater.cli.output.progress import progress_line, tell_end
from headwater.cli.output.rows import events_text, is_terminal

if TYPE_CHECKING:
    from headwater.log.copies.mirror import Mirrored


def mirror(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The log to copy: a folder or a URL.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The copy: a folder or a URL, made where it is missing.")],
    topic: Annotated[list[str] | None, typer.Option("--topic", "-t", help="Only this topic; may be repeated.")] = None,
    pattern: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help='Only topics whose name matches, such as "orders.*", new ones too.'),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new events until Ctrl-C.")] = False,
) -> None:
    """Keep another log equal to this one: same topics, offsets, keys, times, headers and deletions."""
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
