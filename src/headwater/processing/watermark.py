"""The watermark: the event time that a query no longer waits for, from how far the partitions it reads have come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headwater.log.frame import NO_TIME
from headwater.log.log import Log
from headwater.log.topic import Topic
from headwater.processing.offsets import At


def reached_at(log: Log, topics: Iterable[Topic], places: Mapping[At, int]) -> dict[At, int]:
    """The greatest event time of each partition before these offsets."""
    found = log.store.bounds([topic.name for topic in topics])
    return {at: log.store.reached(*at, offset=places.get(at, 0)) for at in found}


def watermark_at(
    log: Log, topics: Iterable[Topic], reached: Mapping[At, int], *, lateness_us: int | None = None
) -> int:
    """The event time that is passed when partitions have reached so much: that of the one furthest behind, less the topic's lateness.

    An event that is late by the lateness exactly is not late, so it is the microsecond before that. A partition that never had an
    event or a heartbeat waits for nothing. `lateness_us` counts instead of the topics' own.
    """
    lateness = {topic.name: topic.lateness_us if lateness_us is None else lateness_us for topic in topics}
    found = []
    for at, bound in log.store.bounds(list(lateness)).items():
        time = reached.get(at, NO_TIME)
        if time != NO_TIME:
            found.append(time - lateness[at[0]] - 1)
        elif bound.end > 0:
            return NO_TIME
    return min(found, default=NO_TIME)
