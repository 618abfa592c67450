"""An application that runs: from its launch to its end, with the status that others read."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from headwater.launch import Launch, Restart
from headwater.model.clock import system_clock
from headwater.processing.status import AppStatus, StageStatus, write_status

if TYPE_CHECKING:
    from headwater.processing.rebuild import Rebuild
    from headwater.processing.runner import Runner

Watch = Callable[[AppStatus], None]
"""Called while an application runs, every second or so, with its status."""

_REPORT_S = 1.0


class Running:
    """An application that runs: its launch, its stages, and the status that others read."""

    def __init__(self, launch: Launch, *, name: str, log: str, state: Path, watch: Watch | None = None) -> None:
        """`watch` is called every second or so with the status, which is written into the folder `state` as well."""
        self._launch = launch
        self._name, self._log, self._state = name, log, state
        self._watch = watch
        self._started_us = system_clock()
        self._reported = 0.0
        self._thread: threading.Thread | None = None
        self._runner: Runner | None = None

    @property
    def runner(self) -> Runner:
        """Its stages, once it was started."""
        assert self._runner is not None
        return self._runner

    def start(self, accept: Mapping[str, Restart] | None, rebuild: Mapping[str, Rebuild] | None) -> None:
        """Makes what is missing; stages do not run yet."""
        self._runner = self._launch.start(accept=accept, rebuild=rebuild)

    def supervise_in_background(self) -> None:
        """Starts the stages, and a thread that looks after them."""
        self.runner.start()
        self._thread = threading.Thread(
            target=self.runner.supervise, kwargs={"on_look": self.look}, name="headwater-app", daemon=True
        )
        self._thread.start()

    def look(self) -> None:
        """To be called often while stages run."""
        self._launch.look(self.runner)
        if time.monotonic() - self._reported >= _REPORT_S:
            self._report()

    def end(self) -> None:
        """Lets each stage finish its batch, and frees everything."""
        try:
            if self._runner is not None:
                self._runner.stop()
                if self._thread is not None:
                    self._thread.join()
                self._report()
        finally:
            self._launch.close()

    def status(self) -> AppStatus:
        """How it is at this moment: a copy, which does not change any more."""
        stages: list[StageStatus] = [] if self._runner is None else [replace(each) for each in self._runner.statuses]
        return AppStatus(
            name=self._name,
            log=self._log,
            pid=os.getpid(),
            started_us=self._started_us,
            at_us=system_clock(),
            notes=self._launch.notes,
            stages=stages,
        )

    def _report(self) -> None:
        self._reported = time.monotonic()
        status = self.status()
        write_status(self._state, status)
        if self._watch is not None:
            self._watch(status)
