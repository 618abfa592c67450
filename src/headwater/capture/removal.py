"""Removing a capture: nothing of it stays in the database, and the log no longer goes on from where it was."""

from __future__ import annotations

from headwater.capture.progress import STAGE, captures
from headwater.capture.source_url import open_source
from headwater.capture.topics import HISTORY
from headwater.log.log import Log
from headwater.model.errors import HeadwaterError, NotFound


def remove_capture(
    log: Log, name: str, *, url: str | None = None, topics: bool = False, forget: bool = False
) -> list[str]:
    """Takes out of the database what the capture put there; with `topics` its topics go, too. Returns those.

    A capture that still runs is refused from now on, so it cannot make anything anew. With `forget` a database that cannot be
    reached is left as it is. `url` is for one that the log cannot reach by what it knows (a password is never kept).
    """
    progress = captures(log).get(name)
    if progress is None and url is None:
        raise NotFound(f"There is no capture {name!r} in this log.", advice="Name its database with url=.")
    stage = log.stage(STAGE + name)
    tables = [] if progress is None else list(progress.tables)
    source = open_source(url or (progress.url if progress else ""), tables, name=name)
    try:
        source.remove()
    except HeadwaterError:
        if not forget:
            raise
    finally:
        source.close()
    stage.accept_new_checkpoint()
    if not topics or progress is None:
        return []
    known = [table.topic for table in progress.tables.values()]
    wanted = [*known, *(topic + HISTORY for topic in known), f"{name}.transactions", f"{name}.messages"]
    there = log.topics()
    gone = [topic for topic in wanted if topic in there]
    for topic in gone:
        log.delete_topic(topic)
    return gone
