"""The status of an application: what each stage does at this moment, for people and other programs.

While it runs, an application writes it to `<state>/status.json` every second, whole or not at all; `headwater status` and the
page read it from there. The numbers are Spark's own, of each query's last progress.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

StageState = Literal["starting", "running", "waiting", "stopped", "failed", "done"]

FILE = "status.json"


class StageStatus(msgspec.Struct, kw_only=True):
    """One stage. `waiting` is for the next attempt after an error, `failed` for somebody who looks at it."""

    name: str
    kind: str
    to: str
    state: StageState = "starting"
    epoch: int = -1
    events: int = 0
    events_per_s: float = 0.0
    batch_ms: int = 0
    lag: int = 0
    watermark: str | None = None
    state_rows: int = 0
    restarts: int = 0
    dead: int = 0
    error: str | None = None

    def follow(self, progress: Mapping[str, Any]) -> None:
        """Takes over what Spark tells of a query; of a batch that was run once, of one that was only looked for nothing new."""
        duration = progress.get("durationMs") or {}
        rows = int(progress.get("numInputRows") or 0)
        if "addBatch" in duration and int(progress["batchId"]) > self.epoch:
            self.epoch = int(progress["batchId"])
            self.events += rows
            self.batch_ms = int(duration.get("triggerExecution", 0))
        self.events_per_s = 1000 * rows / self.batch_ms if self.batch_ms else 0.0
        self.lag = sum(_lag(source) for source in progress.get("sources") or [])
        self.watermark = (progress.get("eventTime") or {}).get("watermark") or self.watermark
        self.state_rows = sum(int(operator.get("numRowsTotal", 0)) for operator in progress.get("stateOperators") or [])


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


def write_status(folder: Path, status: AppStatus) -> None:
    """Replaces the file in one step."""
    partial = folder / f"{FILE}.partial"
    partial.write_bytes(msgspec.json.encode(status))
    partial.replace(folder / FILE)


def read_status(folder: Path) -> AppStatus | None:
    """What was written last; None where no application has run yet."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=AppStatus)
    except FileNotFoundError:
        return None


def _lag(source: Mapping[str, Any]) -> int:
    """How many events a source had not given out when the batch was planned."""
    end, latest = (_places(source.get(name)) for name in ("endOffset", "latestOffset"))
    return sum(max(0, offset - end.get(at, 0)) for at, offset in latest.items())


def _places(offsets: Any) -> dict[tuple[str, str], int]:
    found = msgspec.json.decode(offsets) if isinstance(offsets, str) and offsets else offsets
    return {
        (topic, number): int(offset)
        for topic, partitions in (found or {}).items()
        if not topic.startswith(".")
        for number, offset in partitions.items()
    }
