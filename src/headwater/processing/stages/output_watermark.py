"""How far event time has passed in what a stage of the application writes.

A heartbeat in a topic that a stage writes is a promise in that stage's name: none of its rows to come lies before. Whoever gives one knows
it from the stage's last finished batch, whether the stage runs, waits or lies behind: what it has not read yet will be no older than
what it has read allows, unless it is late there already.

Times that a stage hands on as they are (`kept`) lie behind the watermark of that batch. Windows that are given once (`windows`) come
in the order of their ends, so none lies before one that is there. Of other results (joins of streams, sessions, times that are
computed, mode update) nothing is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.log.log import Log
from headwater.model.clock import NO_TIME
from headwater.processing.checkpoint.marker import committed, ends_of
from headwater.processing.checkpoint.offsets import BEAT, WATERMARK, places_of
from headwater.processing.source.reading import is_local
from headwater.processing.time.watermark import reached_at, watermark_at

if TYPE_CHECKING:
    from headwater.processing.stages.runner import Plan


def passed_by(log: Log, writer: Plan, greatest: int) -> int:
    """Before which time a stage writes no row any more, when the greatest that is there is `greatest`; NO_TIME where it is not known."""
    match writer.analysed.times:
        case "kept":
            return _at_last_batch(log, writer)
        case "windows":
            return greatest
        case _:
            return NO_TIME


def _at_last_batch(log: Log, writer: Plan) -> int:
    epoch = committed(writer.checkpoint)
    if epoch is None:
        return NO_TIME
    ends = [end for end in ends_of(writer.checkpoint, epoch) if end and BEAT not in end]
    if writer.analysed.uses_time:
        return min((int(end.get(WATERMARK, NO_TIME)) for end in ends), default=NO_TIME)
    topics = [log.topic(name) for name in writer.stage.inputs]
    if not is_local(log) or any(topic.time is None for topic in topics):
        return NO_TIME
    return watermark_at(log, topics, reached_at(log, topics, places_of(ends)))
