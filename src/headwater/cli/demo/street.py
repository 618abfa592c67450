"""The street: starts the shops' processes, hears what they acknowledge, kills one, and leaves none running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal

from headwater.cli.demo.orders import SHOPS
from headwater.model.errors import HeadwaterError, TimedOut

READY_S_MAX = 30.0
END_S_MAX = 30.0

State = Literal["starting", "selling", "catching up", "killed", "closed"]


class Shop:
    """One shop as its neighbours see it."""

    def __init__(self, name: str, url: str, rate: float, errors: Path) -> None:
        self.name = name
        self.state: State = "starting"
        self.acknowledged = 0
        self.killed_at: int | None = None
        self._command = [sys.executable, "-m", "headwater.cli.demo.shop", url, name, str(rate)]
        self._errors = errors
        self._open()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Returns when it has opened the log."""
        if not self._ready.wait(READY_S_MAX) or self._process.poll() is not None:
            raise self._failed("did not start")

    def is_ready(self) -> bool:
        """Whether it has opened the log."""
        return self._ready.is_set()

    def begin(self, begun: float) -> None:
        """Tells it when the day began; from now on it sells."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{begun}\n".encode("ascii"))
        self._process.stdin.flush()
        self.state = "selling" if self.killed_at is None else "catching up"

    def kill(self) -> None:
        """Ends it as a crash would: no chance to flush or to say anything."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listener.join()
        self._close_pipes()
        self.state, self.killed_at = "killed", self.acknowledged

    def open_again(self) -> None:
        """Starts it anew; it remembers nothing."""
        self._open()

    def check(self) -> None:
        """Raises when it has died by itself."""
        if self.state not in ("killed", "closed") and self._process.poll() is not None:
            raise self._failed("ended by itself")

    def close(self) -> None:
        """Tells it to end, and waits until everything it sold is acknowledged."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            raise TimedOut(
                f"Shop {self.name} did not end in {END_S_MAX:g} s.", advice="Is the disk very slow?"
            ) from None
        self._listener.join()
        if self._process.returncode != 0:
            raise self._failed(f"ended with code {self._process.returncode}")
        self._close_pipes()
        self.state = "closed"

    def leave(self) -> None:
        """Ends it in any case."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        self._close_pipes()

    def _open(self) -> None:
        self.state = "starting"
        self._ready = threading.Event()
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for the one who directs the play
            )
        self._listener = threading.Thread(target=self._listen, args=(self._process, self._ready), daemon=True)
        self._listener.start()

    def _listen(self, process: subprocess.Popen[bytes], ready: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip().isdigit() and line.endswith(b"\n"):
                self._hear(int(line))
            ready.set()
        ready.set()

    def _hear(self, acknowledged: int) -> None:
        """What was acknowledged once stays so, while a shop that starts again sends its first orders again."""
        if self.state == "catching up" and acknowledged >= self.acknowledged:
            self.state = "selling"
        self.acknowledged = max(self.acknowledged, acknowledged)

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _failed(self, what: str) -> HeadwaterError:
        said = self._errors.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        return HeadwaterError(
            f"Shop {self.name} {what}: {said[0]}", advice="Run it again; if it happens again, report it."
        )


class Street:
    """All shops; whatever happens, none is left running behind it."""

    def __init__(self, url: str, folder: Path, *, rate: float) -> None:
        self.shops: list[Shop] = []
        self._begun = 0.0
        try:
            for name in SHOPS:
                self.shops.append(Shop(name, url, rate, folder / f"{name}.err"))
        except BaseException:
            self.leave()
            raise

    def begin(self) -> None:
        """Opens all shops at one moment."""
        for shop in self.shops:
            shop.wait_until_ready()
        self._begun = time.time()
        for shop in self.shops:
            shop.begin(self._begun)

    def begin_those_ready(self) -> list[Shop]:
        """Lets shops that were started anew sell, once they are ready; returns them."""
        ready = [shop for shop in self.shops if shop.state == "starting" and shop.is_ready()]
        for shop in ready:
            shop.begin(self._begun)
        return ready

    def check(self) -> None:
        """Raises when a shop has died by itself."""
        for shop in self.shops:
            shop.check()

    def close(self) -> None:
        """Ends the day; returns when every order is acknowledged."""
        for shop in self.shops:
            shop.close()

    def leave(self) -> None:
        """Ends every process that is left."""
        for shop in self.shops:
            shop.leave()

    def __enter__(self) -> Street:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
