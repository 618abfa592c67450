"""An application that runs: from its launch to its end, with the status that others read."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from headwater.app.launch import Launch
from headwater.app.outputs.views import Attempt
from headwater.app.restarts import Restart
from headwater.app.troubles import Troubles
from headwater.capture.progress import CaptureStatus
from headwater.model.clock import system_clock
from headwater.model.extras import check_spark
from headwater.processing.stages.status import AppStatus, StageState, StageStatus, late_notes, write_status

if TYPE_CHECKING:
    from headwater.processing.stages.rebuild import Rebuild
    from headwater.processing.stages.supervisor import Supervisor

Watch = Callable[[AppStatus], None]
"""Called about once per second with the status of an application that runs."""

_REPORT_S = 1.0
_JOIN_S = 0.5


class AppRun:
    """An application that runs: its launch, its stages, and the status that others read."""

    def __init__(self, launch: Launch, *, name: str, log: str, state: Path, watch: Watch | None = None) -> None:
        """`watch` gets the status about once per second. The status is also written into the folder `state`."""
        self._launch = launch
        self._name, self._log, self._state = name, log, state
        self._watch = watch
        self._started_us = system_clock()
        self._reported = 0.0
        self._troubles = Troubles()
        self._thread: threading.Thread | None = None
        self._supervisor: Supervisor | None = None

    @property
    def supervisor(self) -> Supervisor:
        """Its stages, once it was started."""
        assert self._supervisor is not None
        return self._supervisor

    def start(self, accept: Mapping[str, Restart] | None, rebuild: Mapping[str, Rebuild] | None) -> None:
        """Creates what is missing; stages do not run yet."""
        with _told_when_spark_is_gone():
            self._supervisor = self._launch.start(accept=accept, rebuild=rebuild)

    def run_to_the_end(self) -> None:
        """Captures tables, then runs the stages over the available events. An error outside of the stages ends it."""
        self._launch.captures.catch_up()
        with _told_when_spark_is_gone():
            self.supervisor.run_to_the_end(on_look=partial(self._look, _at_once))

    def supervise(self) -> None:
        """Starts the captures and the stages, and supervises them until they end. It retries what fails outside of the stages."""
        with _told_when_spark_is_gone():
            self._start()
            self.supervisor.supervise(on_look=partial(self._look, self._troubles.attempt))

    def supervise_in_background(self) -> None:
        """The same in a thread of its own."""
        self._start()
        look = partial(self._look, self._troubles.attempt)
        self._thread = threading.Thread(
            target=self.supervisor.supervise, kwargs={"on_look": look}, name="headwater-app", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Lets each stage finish its batch, and frees everything.

        The supervising thread ends first. Otherwise it could start a stage at this moment, which nothing would stop.
        """
        try:
            self._launch.captures.stop()
            if self._supervisor is not None:
                self._supervisor.ask_to_stop()
                while self._thread is not None and self._thread.is_alive():
                    self._supervisor.ask_to_stop()
                    self._thread.join(_JOIN_S)
                with _told_when_spark_is_gone():
                    self._supervisor.stop()
                self._troubles = Troubles()
                self._report(self._troubles.attempt)
        finally:
            self._launch.close()

    def status(self) -> AppStatus:
        """The status at this moment: a copy, which does not change."""
        stages: list[StageStatus] = (
            [] if self._supervisor is None else [replace(each) for each in self._supervisor.statuses]
        )
        stages = [*map(capture_status, self._launch.captures.statuses()), *stages]
        return AppStatus(
            name=self._name,
            log=self._log,
            pid=os.getpid(),
            started_us=self._started_us,
            at_us=system_clock(),
            notes=[*self._launch.notes, *self._troubles.told, *late_notes(stages)],
            stages=stages,
        )

    def _start(self) -> None:
        self._launch.captures.start()
        self.supervisor.start()

    def _look(self, attempt: Attempt) -> None:
        """Called often while stages run."""
        self._launch.look(self.supervisor, attempt)
        if time.monotonic() - self._reported >= _REPORT_S:
            self._report(attempt)

    def _report(self, attempt: Attempt) -> None:
        self._reported = time.monotonic()
        status = self.status()
        attempt(f"The status could not be written into {self._state}", partial(write_status, self._state, status))
        if self._watch is not None:
            self._watch(status)


@contextmanager
def _told_when_spark_is_gone() -> Iterator[None]:
    """Reports a killed JVM as such. The import is late, because it needs PySpark."""
    check_spark("An application")
    from headwater.processing.spark.java import told_when_gone

    with told_when_gone():
        yield


def _at_once(what: str, do: Callable[[], object]) -> None:
    do()


def capture_status(capture: CaptureStatus) -> StageStatus:
    """A capture as one of the stages of an application."""
    progress = capture.progress
    stopped = [f"table {name}: {table.why}" for name, table in progress.tables.items() if table.state == "stopped"]
    states: dict[str, StageState] = {
        "starting": "starting",
        "waiting": "waiting",
        "failed": "failed",
        "ended": "stopped",
    }
    error = "; ".join([*([capture.error] if capture.error else []), *stopped]) or None
    return StageStatus(
        name=f"capture.{capture.name}",
        kind="capture",
        to=", ".join(table.topic for table in progress.tables.values()),
        inputs=[progress.url],
        state="failed" if stopped and capture.state != "waiting" else states.get(capture.state, "running"),
        events=progress.events,
        lag=(capture.lag.rows or 0) if capture.lag else 0,
        error=error,
    )
