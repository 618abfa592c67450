"""Lateness: how far event time has come in a partition, and which events come too late for it.

An event is late when its time lies more than the topic's lateness before the greatest time that its own partition had reached before it.
That greatest time, the running maximum, is kept with the events, so the answer is the same however they are read. A time further
ahead of its append than the topic's `future_max` does not advance it: one clock in 2099 must not make the world late.

A heartbeat says of a partition to which nobody appends that event time has passed there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headwater.log.port.chunk import Chunk
from headwater.model.clock import NO_TIME


class Heartbeat(NamedTuple):
    """Event time had reached `time` before the event at `offset`."""

    offset: int
    time: int


def maxima(chunk: Chunk, running: int) -> Any:
    """The running maximum after each event of a chunk, before which it was `running`."""
    if chunk.topic.time is None:
        return np.full(chunk.batch.num_rows, running)
    times = times_in(chunk)
    appended: Any = chunk.appended
    if appended is None:
        appended = np.asarray(chunk.batch.column("_appended").cast(pa.int64()))
    plausible = np.where(times <= appended + chunk.topic.future_us, times, NO_TIME)
    return np.maximum(np.maximum.accumulate(plausible), running) if len(times) else plausible


def reached_after(chunk: Chunk, running: int) -> int:
    """The running maximum after the last event of a chunk."""
    after = maxima(chunk, running)
    return int(after[-1]) if len(after) else running


def is_late(chunk: Chunk, running: int, *, lateness_us: int | None = None, window_us: int | None = None) -> Any:
    """Which events of a chunk are late, by the topic's lateness or another; one without a time never is.

    With `window_us` an event is late when the last moment is of its window of that length, counted from 1970.
    """
    if chunk.topic.time is None or not chunk.batch.num_rows:
        return np.zeros(chunk.batch.num_rows, bool)
    times = times_in(chunk)
    before = np.r_[running, maxima(chunk, running)[:-1]]
    known = (times != NO_TIME) & (before != NO_TIME)
    allowed = chunk.topic.lateness_us if lateness_us is None else lateness_us
    if window_us is not None:
        times = np.where(known, times // window_us * window_us + (window_us - 1), times)
    return known & (times < np.where(known, before, 0) - allowed)


def times_in(chunk: Chunk) -> Any:
    """The event times of a chunk, in µs; NO_TIME of events that have none."""
    assert chunk.topic.time is not None
    return np.asarray(chunk.batch.column(chunk.topic.time).cast(pa.int64()).fill_null(NO_TIME))


def reached_by(beats: Sequence[Heartbeat], offset: int) -> int:
    """The greatest time that heartbeats say was reached before an offset."""
    return max((beat.time for beat in beats if beat.offset <= offset), default=NO_TIME)


def add_heartbeat(beats: list[Heartbeat], beat: Heartbeat) -> None:
    """Puts one behind others, unless they say as much."""
    if beats and beats[-1].time >= beat.time:
        return
    if beats and beats[-1].offset >= beat.offset:
        beats.pop()
    beats.append(beat)
