"""The watermark: the event time that a query no longer waits for, from how far the partitions it reads have come.

A partition that never had an event would hold up the others for ever. So nobody waits for it, and that stands in the log before anybody
goes by it: it is given a heartbeat of the time that all other partitions of its topic have reached. An event that comes there first and
is older than the lateness allows is late by its own partition then, for whoever reads it, however batches are cut. A heartbeat is
written only while the partition is empty; where an event came before it, the watermark stays and waits for that event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from headwater.log.log import Log
from headwater.log.port.topic import Topic
from headwater.model.clock import NO_TIME
from headwater.processing.checkpoint.offsets import At

Tell = Callable[[At, int], "int | None"]
"""Tells an empty partition that time has come so far; returns how far it has come there, None where an event was first."""


def reached_at(log: Log, topics: Iterable[Topic], places: Mapping[At, int]) -> dict[At, int]:
    """The greatest event time of each partition before these offsets."""
    found = log.store.bounds([topic.name for topic in topics])
    return {at: log.store.reached(*at, offset=places.get(at, 0)) for at in found}


def watermark_at(
    log: Log,
    topics: Iterable[Topic],
    reached: Mapping[At, int],
    *,
    lateness_us: int | None = None,
    tell: Tell | None = None,
) -> int:
    """The event time that is passed when partitions have reached so much: that of the one furthest behind, less the topic's lateness.

    An event that is late by the lateness exactly is not late, so it is the microsecond before that. A partition that never had an
    event waits for nothing, and with `tell` is told so before. `lateness_us` counts instead of the topics' own.
    """
    lateness = {topic.name: topic.lateness_us if lateness_us is None else lateness_us for topic in topics}
    bounds = log.store.bounds(list(lateness))
    known = {at: reached.get(at, NO_TIME) for at in bounds}
    if any(known[at] == NO_TIME for at, bound in bounds.items() if bound.end > 0):
        return NO_TIME
    for name in lateness if tell is not None else ():
        until = min((known[at] for at, bound in bounds.items() if at[0] == name and bound.end > 0), default=NO_TIME)
        for at in [at for at, bound in bounds.items() if at[0] == name and bound.end == 0 and known[at] < until]:
            assert tell is not None
            told = tell(at, until)
            if told is None:
                return NO_TIME
            known[at] = told
    return min((time - lateness[at[0]] - 1 for at, time in known.items() if time != NO_TIME), default=NO_TIME)
