"""The status of an application: what each stage does at this moment, for people and other programs.

While it runs, an application writes it to `<state>/status.json` every second, whole or not at all; `headwater status` and the
page read it from there. The numbers are Spark's own, of each query's last progress.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from headwater.log.disk.atomic_file import read_file, replace_file
from headwater.log.disk.disk import Disk, RealDisk
from headwater.model.clock import NO_TIME, system_clock
from headwater.model.errors import AppFailed
from headwater.model.url import without_password
from headwater.processing.checkpoint.offsets import BEAT, EVENTS, REACHED, VERSION, WATERMARK
from headwater.processing.graph.graph import Graph, StageNode

StageState = Literal["starting", "running", "waiting", "stopped", "failed", "done"]

FILE = "status.json"
RATE_OVER_S = 10.0
LATE_ROWS = "late rows"
"""So begins the name of a count of late rows in the progress of a query."""

LATE_TAKEN = f"{LATE_ROWS} of a table"
"""So begins that of rows which are taken all the same."""

LATE_NOTED_MIN, LATE_NOTED_SHARE = 100, 0.01
"""So many events, and so large a part of all, that were left out as late are worth a note."""


class LateCount(NamedTuple):
    """How many late rows a batch has left out, and how many rows of tables were late and taken."""

    left_out: int = 0
    taken: int = 0


class StageStatus(msgspec.Struct, kw_only=True):
    """One stage. `waiting` is for the next attempt after an error, `failed` for somebody who looks at it.

    What was left out is accounted for: `events` are those that were `given` to the function, those `late` that were left out (all of them
    but `late_taken`, late rows of tables, which are given as well), and those `dead`. `late` and `dead` are counted where events are left
    out; `given` is the rest of `events`, so the sum cannot find a row that an operator lost: tests compare results for that.
    """

    name: str
    kind: str
    to: str
    inputs: list[str] = []
    where: str = ""
    state: StageState = "starting"
    epoch: int = -1
    events: int = 0
    events_per_s: float = 0.0
    batch_ms: int = 0
    batch_at_us: int = 0
    lag: int = 0
    watermark: str | None = None
    state_rows: int = 0
    given: int = 0
    late: int = 0
    late_taken: int = 0
    restarts: int = 0
    dead: int = 0
    error: str | None = None

    @classmethod
    def of(cls, stage: StageNode) -> StageStatus:
        """A stage that has not begun."""
        return cls(
            name=stage.name,
            kind=stage.kind,
            to=without_password(stage.to),
            inputs=list(stage.inputs),
            where=stage.where,
        )

    def follow(
        self,
        progress: Mapping[str, Any],
        *,
        rows_kept: int = 0,
        late_in: Callable[[Mapping[str, Any]], LateCount] = lambda _: LateCount(),
        skipped: int = 0,
    ) -> bool:
        """Takes over what Spark tells of a query; of a batch that was run once, of one that was only looked for nothing new.

        `rows_kept` are those of our operators, of which Spark knows nothing, and `late_in` knows of rows that it did not count. `skipped`
        events of the batch were set aside before, as dead. Returns whether the batch was news.
        """
        is_new = False
        duration = progress.get("durationMs") or {}
        if "addBatch" in duration and int(progress["batchId"]) > self.epoch:
            is_new, self.epoch = True, int(progress["batchId"])
            sources = progress.get("sources") or []
            are_all = any(EVENTS in _decoded(source.get("endOffset")) for source in sources)
            events = sum(map(_events, sources)) + (0 if are_all else skipped)
            told, counted = _late(progress), late_in(progress)
            left_out, taken = told.left_out + counted.left_out, told.taken + counted.taken
            self.events += events
            self.late += left_out + taken
            self.late_taken += taken
            self.given += events - left_out - skipped
            waited = duration.get("latestOffset", 0)  # for something to come, see `arrivals`
            self.batch_ms = int(duration.get("triggerExecution", 0) - waited)
            self.batch_at_us = system_clock()
        self.lag = sum(_lag(source) for source in progress.get("sources") or [])
        self.watermark = (progress.get("eventTime") or {}).get("watermark") or _watermark(progress) or self.watermark
        of_spark = sum(int(operator.get("numRowsTotal", 0)) for operator in progress.get("stateOperators") or [])
        self.state_rows = of_spark + rows_kept
        return is_new

    @property
    def is_whole(self) -> bool:
        """Whether what was left out was among the events that were read; a capture gives its events to nobody."""
        left_out = self.late - self.late_taken
        return self.kind == "capture" or (self.given >= 0 and self.events == self.given + left_out + self.dead)

    def bury(self, count: int) -> None:
        """So many events that were given could not be written where they belong."""
        self.dead += count
        self.given -= count


class AppStatus(msgspec.Struct, kw_only=True):
    """One application."""

    name: str
    log: str
    pid: int
    started_us: int
    at_us: int
    notes: list[str] = []
    stages: list[StageStatus] = []

    @property
    def is_alive(self) -> bool:
        """Whether the process that wrote this still runs."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


class Rate:
    """Events per second by the clock, over the last seconds: quiet moments count, unlike in the speed of one batch."""

    def __init__(self, over_s: float = RATE_OVER_S) -> None:
        self._over_s = over_s
        self._seen: deque[tuple[float, int]] = deque()

    def see(self, events: int, now_s: float) -> float:
        """The rate, when so many events are done at this moment."""
        self._seen.append((now_s, events))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - self._over_s:
            self._seen.popleft()
        then_s, before = self._seen[0]
        return max(0.0, (events - before) / (now_s - then_s)) if now_s > then_s else 0.0


def first_status(graph: Graph, log: str) -> AppStatus:
    """An application that is about to start in this process."""
    now_us = system_clock()
    stages = [StageStatus.of(stage) for stage in graph.order()]
    return AppStatus(name=graph.name, log=log, pid=os.getpid(), started_us=now_us, at_us=now_us, stages=stages)


def check_stages(status: AppStatus) -> None:
    """`AppFailed` where stages of an application have failed."""
    failed = [stage for stage in status.stages if stage.state == "failed"]
    if failed:
        told = "; ".join(f"stage {stage.name!r} ({stage.where}) failed: {stage.error}" for stage in failed)
        raise AppFailed(
            f"Application {status.name!r}: {told}",
            advice="Fix the cause and start it again: it continues where it stopped.",
        )


def write_status(folder: Path, status: AppStatus, *, disk: Disk | None = None) -> None:
    """Replaces the file in one step. It is not synced: what a power loss takes is no longer true anyway."""
    pieces = [msgspec.json.encode(status)]
    replace_file(disk or RealDisk(), str(folder / FILE), pieces, point="status:", sync=False, sync_folder=False)


def read_status(folder: Path, *, disk: Disk | None = None) -> AppStatus | None:
    """What was written last; None where no application has run yet, or where a power loss has taken it."""
    try:
        return msgspec.json.decode(read_file(disk or RealDisk(), str(folder / FILE)), type=AppStatus)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def late_notes(stages: Sequence[StageStatus]) -> list[str]:
    """What is to be said of stages that have left out more than a small part of their events as late."""
    writers = {stage.to: stage.name for stage in stages if stage.kind == "stream"}
    notes = []
    for stage in stages:
        late = stage.late - stage.late_taken
        if late < LATE_NOTED_MIN or late <= stage.events * LATE_NOTED_SHARE:
            continue
        written = [f"{topic!r}, which stage {writers[topic]!r} writes" for topic in stage.inputs if topic in writers]
        cause = (
            f"Topic {written[0]}, has them further behind than its lateness: partitions that stage reads are not equally far, or it writes "
            "batches of very different times. Give it a longer lateness=."
            if written
            else "Their times lie further behind the newest of their partition than the topic's lateness: give the topic a longer "
            "lateness=, or look for a clock that is wrong where they come from."
        )
        share = f"{late / stage.events:.0%}" if stage.events else "all"
        keep = "" if stage.kind == "sink" else ' late="topic" keeps them.'
        notes.append(
            f"Stage {stage.name!r} has left out {late:,} of {stage.events:,} events as late ({share}). {cause}{keep}"
        )
    return notes


def _late(progress: Mapping[str, Any]) -> LateCount:
    """How many rows of a batch came too late, by what Spark has counted or dropped."""
    found = progress.get("observedMetrics") or {}
    rows = {name: int(counted["rows"] or 0) for name, counted in found.items() if name.startswith(LATE_ROWS)}
    taken = sum(count for name, count in rows.items() if name.startswith(LATE_TAKEN))
    states = progress.get("stateOperators") or []
    dropped = sum(int(state.get("numRowsDroppedByWatermark", 0)) for state in states)
    return LateCount(sum(rows.values()) - taken + dropped, taken)


def _events(source: Mapping[str, Any]) -> int:
    """How many events a source has read in a batch; of one with an operator in it Spark knows only what that gave."""
    start, end = (_decoded(source.get(name)) for name in ("startOffset", "endOffset"))
    if BEAT in end or _places(start) == _places(end):  # a row that only tells the time is no event
        return 0
    return int(end[EVENTS] - start.get(EVENTS, 0) if EVENTS in end else source.get("numInputRows") or 0)


def _watermark(progress: Mapping[str, Any]) -> str | None:
    """The watermark of a batch by its offsets, as Spark writes times; of an operator inside a source Spark itself knows none."""
    ends = [_decoded(source.get("endOffset")) for source in progress.get("sources") or []]
    known = [end.get(WATERMARK, NO_TIME) for end in ends if VERSION in end]
    if min(known, default=NO_TIME) == NO_TIME:
        return None
    return f"{np.datetime64(min(known) // 1000, 'ms')}Z"


def _decoded(offsets: Any) -> Mapping[str, Any]:
    found = msgspec.json.decode(offsets) if isinstance(offsets, str) and offsets else offsets
    return found or {}


def _lag(source: Mapping[str, Any]) -> int:
    """How many events a source had not given out when the batch was planned."""
    end, latest = (_places(source.get(name)) for name in ("endOffset", "latestOffset"))
    return sum(max(0, offset - end.get(at, 0)) for at, offset in latest.items())


def ends_in(progress: Mapping[str, Any]) -> dict[tuple[str, int], int]:
    """Up to where a batch has read, by topic and partition."""
    return {
        at: offset for source in progress.get("sources") or [] for at, offset in _places(source["endOffset"]).items()
    }


def spans_in(progress: Mapping[str, Any]) -> dict[tuple[str, int], tuple[int, int]]:
    """From where to where a batch has read, by topic and partition."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for source in progress.get("sources") or []:
        starts = _places(source.get("startOffset"))
        found |= {at: (starts.get(at, 0), end) for at, end in _places(source["endOffset"]).items()}
    return found


def reached_in(progress: Mapping[str, Any]) -> dict[tuple[str, int], tuple[int, int]]:
    """How far event time had come where a batch began, where that stands in its offsets (see `maxima`)."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for source in progress.get("sources") or []:
        for topic, partitions in _decoded(source["endOffset"]).get(REACHED, {}).items():
            found |= {(topic, int(number)): (int(offset), int(time)) for number, (offset, time) in partitions.items()}
    return found


def _places(offsets: Any) -> dict[tuple[str, int], int]:
    return {
        (topic, int(number)): int(offset)
        for topic, partitions in _decoded(offsets).items()
        if not topic.startswith(".")
        for number, offset in partitions.items()
    }
