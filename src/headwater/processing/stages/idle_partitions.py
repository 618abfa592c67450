"""Idle partitions: what an application does so that nothing waits for ever for a partition that fell silent.

Stages that work by event time wait for the partition furthest behind. One that had no event for a while, seen by this process, is given a
heartbeat: time has come there as far as in the other inputs of the stage. A log in a folder keeps heartbeats itself; for Kafka they
stand beside the checkpoint.

Heartbeats are for ever, so two kinds of partitions are told less:
- those of a topic that a stage of the application writes: no more than that stage has passed, however long it
is silent;
- those that never had an event, in a topic that has some: nobody waits for them. They are told no more than what the stage's inputs have
  all passed, and mostly know more already: whoever goes by the watermark has told them before (see `watermark`).

What a stage of the application has passed: a heartbeat in a topic that a stage writes is a promise in that stage's name, that none of its
rows to come is older. It is known from the stage's last finished batch, whether the stage runs, waits or is behind: what it has not read
yet will be no older than what it has read allows, unless it is late there already. Times that a stage passes on as they are (`kept`) are
after the watermark of that batch. Windows that are given once (`windows`) come in the order of their ends, so none is before one that
is there. Of other results (joins of streams, sessions, times that are computed, mode update) nothing is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from headwater.log.log import Log
from headwater.model.clock import NO_TIME
from headwater.model.errors import HeadwaterError
from headwater.processing.checkpoint.marker import committed, ends_of
from headwater.processing.checkpoint.offsets import BEAT, WATERMARK, At, places_of
from headwater.processing.stages.stage_plan import StagePlan
from headwater.processing.time.maxima import Maxima, maxima_of
from headwater.processing.time.watermark import reached_at, watermark_at

BEAT_S = 1.0
"""So often it is looked who fell silent."""

Passed = Callable[[str, int], "int | None"]
"""For a topic in which event time has come so far: before which time its writer adds nothing; None where that is no stage of ours."""


class TimedStage(Protocol):
    """A stage that waits: its checkpoint, its inputs, those of them that have an event time, and how far that had come where the log
    does not keep it."""

    @property
    def checkpoint(self) -> str: ...
    @property
    def inputs(self) -> Sequence[str]: ...
    @property
    def timed(self) -> Sequence[str]: ...
    @property
    def reached(self) -> Mapping[At, tuple[int, int]]: ...


class IdlePartitions:
    """Gives heartbeats to partitions that had no event for `idle_us`."""

    def __init__(self, log: Log, idle_us: int, passed: Passed) -> None:
        self._log = log
        self._idle_us = idle_us
        self._passed = passed
        self._beat_at = 0.0
        self._silent: dict[At, tuple[int, float]] = {}

    def beat(self, stages: Iterable[TimedStage]) -> None:
        """To be called often; does something now and then. A topic that was deleted or a full disk is told by its stage."""
        if time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + BEAT_S
        tell = self._in_the_log if self._log.store.capabilities.tells_lateness else self._beside
        for stage in stages:
            with suppress(HeadwaterError, OSError):
                tell(stage)

    def _in_the_log(self, stage: TimedStage) -> None:
        reached = {topic: self._log.reached(topic) for topic in stage.timed}
        empty = {topic: self._empty(topic) for topic in reached}
        known = {
            topic: [time for number, time in times.items() if time is not None and number not in empty[topic]]
            for topic, times in reached.items()
        }
        latest = max((max(times) for times in known.values() if times), default=NO_TIME)
        topics = {topic: self._log.topic(topic) for topic in reached}
        behind = [min(times) - topics[topic].lateness_us for topic, times in known.items() if times]
        for topic, times in reached.items():
            greatest = max(known[topic], default=NO_TIME)
            now = self._log.clock()
            limit = self._limit(topic, min(latest, now + topics[topic].future_us), greatest)
            for partition in self._fell_silent(topic):
                until = limit
                if partition in empty[topic]:
                    all_passed = min(behind) + topics[topic].lateness_us if len(behind) == len(reached) else NO_TIME
                    until = min(limit, all_passed)
                if until > (times[partition] or NO_TIME):
                    since = now + 1 - self._idle_us
                    self._log.store.heartbeat(topic, partition, time=until, appended_before=since)

    def _empty(self, topic: str) -> set[int]:
        """The partitions that never had an event, in a topic that has some."""
        ends = {partition: span.stop for partition, span in self._log.offsets(topic).items()}
        return {partition for partition, end in ends.items() if not end} if any(ends.values()) else set()

    def _beside(self, stage: TimedStage) -> None:
        latest = max((reached for _, reached in stage.reached.values()), default=NO_TIME)
        for number, topic in enumerate(stage.inputs):
            if topic not in stage.timed:
                continue
            greatest = max((time for at, (_, time) in stage.reached.items() if at[0] == topic), default=NO_TIME)
            until = self._limit(topic, latest, greatest)
            for partition, end in self._fell_silent(topic).items():
                at = topic, partition
                if stage.reached.get(at, (0, NO_TIME))[1] < until:
                    Maxima(maxima_of(stage.checkpoint, number)).tell(at, end, until, is_heartbeat=True)

    def _limit(self, topic: str, latest: int, greatest: int) -> int:
        """The latest time that may be told, in a topic where the greatest so far is `greatest`."""
        passed = self._passed(topic, greatest)
        return latest if passed is None else min(latest, passed)

    def _fell_silent(self, topic: str) -> dict[int, int]:
        """The partitions, with their ends, to which nothing was appended while this process looked on for so long."""
        found, now = {}, time.monotonic()
        for partition, span in self._log.offsets(topic).items():
            end, since = self._silent.get((topic, partition), (-1, now))
            if end != span.stop:
                self._silent[topic, partition] = span.stop, now
            elif now - since > self._idle_us / 1e6:
                found[partition] = end
        return found


def passed_by(log: Log, writer: StagePlan, greatest: int) -> int:
    """Before which time a stage writes no row any more, when the greatest that is there is `greatest`; NO_TIME where it is not known."""
    match writer.analysed.times:
        case "kept":
            return _at_last_batch(log, writer)
        case "windows":
            return greatest
        case _:
            return NO_TIME


def _at_last_batch(log: Log, writer: StagePlan) -> int:
    epoch = committed(writer.checkpoint)
    if epoch is None:
        return NO_TIME
    ends = [end for end in ends_of(writer.checkpoint, epoch) if end and BEAT not in end]
    if writer.analysed.uses_time:
        return min((int(end.get(WATERMARK, NO_TIME)) for end in ends), default=NO_TIME)
    topics = [log.topic(name) for name in writer.stage.inputs]
    if not log.store.capabilities.tells_lateness or any(topic.time is None for topic in topics):
        return NO_TIME
    return watermark_at(log, topics, reached_at(log, topics, places_of(ends)))
