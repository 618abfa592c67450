"""The crowd: the processes of the visitors, and their acknowledged clicks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Literal

from headwater.cli.demo.child import Child
from headwater.cli.demo.clicks import REGIONS
from headwater.model.clock import system_clock

READY_S_MAX = 60.0

State = Literal["starting", "clicking", "catching up", "killed", "gone"]


class Region:
    """The visitors of one region, as the director sees them."""

    def __init__(self, name: str, url: str, rate: float, folder: Path) -> None:
        self.name = name
        self.state: State = "starting"
        self.acknowledged = 0
        self.killed_at: int | None = None
        self._arguments = [url, name, str(rate)]
        self._errors = folder / f"{name}.err"
        self._ready = threading.Event()
        self._child = self._open()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._child.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has opened the log."""
        return self._ready.is_set()

    def wait_until_ready(self) -> None:
        """Returns when it has opened the log."""
        deadline = time.monotonic() + READY_S_MAX
        while not self._ready.wait(0.1):
            if not self._child.is_running or time.monotonic() > deadline:
                raise self._child.failed("did not start")

    def begin(self, begun_us: int) -> None:
        """Tells it when the day began; from now on it clicks."""
        self._child.say(str(begun_us))
        self.state = "clicking" if self.killed_at is None else "catching up"

    def kill(self) -> None:
        """Ends it as a crash would: no chance to flush or to say anything."""
        self._child.kill()
        self.state, self.killed_at = "killed", self.acknowledged

    def open_again(self) -> None:
        """Restarts the process, which remembers nothing."""
        self.state = "starting"
        self._ready.clear()
        self._child = self._open()

    def check(self) -> None:
        """Raises when it has died by itself."""
        if self.state not in ("killed", "gone") and not self._child.is_running:
            raise self._child.failed("stopped unexpectedly")

    def close(self) -> None:
        """Tells it to end, and waits until every click is acknowledged."""
        self._child.end()
        self.state = "gone"

    def leave(self) -> None:
        """Ends it in any case."""
        self._child.leave()

    def _open(self) -> Child:
        return Child(
            f"The process of {self.name}",
            "headwater.cli.demo.visitors",
            self._arguments,
            errors=self._errors,
            hear=self._hear,
        )

    def _hear(self, line: bytes) -> None:
        """What was acknowledged once stays so, while a process that starts again sends its first clicks again."""
        self._ready.set()
        if line.strip().isdigit():
            acknowledged = int(line)
            if self.state == "catching up" and acknowledged >= self.acknowledged:
                self.state = "clicking"
            self.acknowledged = max(self.acknowledged, acknowledged)


class Crowd:
    """All regions; whatever happens, no process is left running behind it."""

    def __init__(self, url: str, folder: Path, *, rate: float) -> None:
        self.regions: list[Region] = []
        self.begun_us = 0
        self.rate = rate
        try:
            for name in REGIONS:
                self.regions.append(Region(name, url, rate, folder))
        except BaseException:
            self.leave()
            raise

    def begin(self) -> None:
        """Lets all of them click, from one moment on."""
        for region in self.regions:
            region.wait_until_ready()
        self.begun_us = system_clock()
        for region in self.regions:
            region.begin(self.begun_us)

    def begin_those_ready(self) -> list[Region]:
        """Starts the clicks of restarted regions that are ready; returns these regions."""
        ready = [region for region in self.regions if region.state == "starting" and region.is_ready]
        for region in ready:
            region.begin(self.begun_us)
        return ready

    @property
    def is_whole(self) -> bool:
        """Whether everybody clicks."""
        return all(region.state == "clicking" for region in self.regions)

    def check(self) -> None:
        """Raises when a process has died by itself."""
        for region in self.regions:
            region.check()

    def close(self) -> None:
        """Ends the day; returns when every click is acknowledged, also of those that were dead at this moment."""
        for region in self.regions:
            if region.state == "killed":
                region.open_again()
            if region.state == "starting":
                region.wait_until_ready()
                region.begin(self.begun_us)
            region.close()

    def leave(self) -> None:
        """Ends every process that is left."""
        for region in self.regions:
            region.leave()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
