"""Idle partitions: what an application does so that nothing waits for ever for a partition that fell silent.

Stages that work by event time wait for the partition furthest behind. One that had no event for a while is given a heartbeat: time has come
there as far as in the other inputs of the stage. A log in a folder keeps heartbeats itself; for Kafka they stand beside the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from headwater.log.frame import NO_TIME
from headwater.log.log import Log
from headwater.model.errors import HeadwaterError
from headwater.processing.maxima import Maxima, maxima_of
from headwater.processing.offsets import At
from headwater.processing.reading import is_local

BEAT_S = 1.0
"""So often it is looked who fell silent."""


class Waiting(Protocol):
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


class Idle:
    """Gives heartbeats to partitions that had no event for `idle_us`."""

    def __init__(self, log: Log, idle_us: int) -> None:
        self._log = log
        self._idle_us = idle_us
        self._beat_at = 0.0
        self._silent: dict[At, tuple[int, float]] = {}

    def beat(self, stages: Iterable[Waiting]) -> None:
        """To be called often; does something now and then. A topic that was deleted or a full disk is told by its stage."""
        if time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + BEAT_S
        tell = self._in_the_log if is_local(self._log) else self._beside
        for stage in stages:
            with suppress(HeadwaterError, OSError):
                tell(stage)

    def _in_the_log(self, stage: Waiting) -> None:
        reached = [time for topic in stage.timed for time in self._log.reached(topic).values() if time is not None]
        for topic in stage.timed if reached else ():
            latest = self._log.clock() + self._log.topic(topic).future_us
            self._log.heartbeat(topic, min(max(reached), latest), idle=timedelta(microseconds=self._idle_us))

    def _beside(self, stage: Waiting) -> None:
        """For partitions that this process has seen fall silent."""
        latest = max((reached for _, reached in stage.reached.values()), default=NO_TIME)
        for number, topic in enumerate(stage.inputs):
            for partition, span in self._log.offsets(topic).items() if topic in stage.timed else ():
                at = topic, partition
                end, since = self._silent.setdefault(at, (span.stop, time.monotonic()))
                if end != span.stop:
                    self._silent[at] = span.stop, time.monotonic()
                elif time.monotonic() - since > self._idle_us / 1e6 and stage.reached.get(at, (0, NO_TIME))[1] < latest:
                    Maxima(maxima_of(stage.checkpoint, number)).tell(at, end, latest, is_heartbeat=True)
