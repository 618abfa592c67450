"""A server that tests and benchmarks start: in a temporary folder, watched by the guard, stopped by pid.

It ends with the program that started it, even when that is killed (see `guard`). One object serves one start after another,
from one thread at a time.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from headwater.testing.servers import ServerError, give_away

START_TIMEOUT_S = 60.0
LOG_LINES_SHOWN = 20

_LOOK_AGAIN_S = 0.02


class Serving(ABC):
    """What serves between `start` and `stop`, or inside `with`: a server, or a cluster of them."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @abstractmethod
    def start(self) -> None:
        """Starts it and waits until it serves."""

    @abstractmethod
    def stop(self) -> None:
        """Ends it and leaves nothing behind; stopping twice does nothing."""


class Server(Serving):
    """One server."""

    name: str
    gives_away = True
    """Whether the folder becomes the service's own, so that one started by root runs as `nobody`."""

    def __init__(self, *, parent_folder: Path | None = None, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._parent_folder = parent_folder
        self._start_timeout_s = start_timeout_s
        self._folder: Path | None = None
        self._guard: subprocess.Popen[str] | None = None
        self._command: Sequence[str] = ()
        self.pid = 0

    @abstractmethod
    def start(self) -> None:
        """Starts the server in a new folder and waits until it serves."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it serves."""

    def stop(self) -> None:
        """Ends the server and removes its folder; stopping twice does nothing."""
        self._end()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self.pid = None, 0

    def kill(self) -> None:
        """Ends the server with SIGKILL; its folder stays as it is, for `restart`."""
        os.kill(self.pid, signal.SIGKILL)
        assert self._guard is not None
        self._guard.wait()
        self._end()
        self.pid = 0

    def restart(self) -> None:
        """Starts a server that was killed again, in the same folder and on the same ports."""
        assert self._folder is not None, "this server was stopped, not killed"
        (self._folder / "service.log").unlink()  # what the dead one said does not make this one ready
        self._run(self._command)

    def log_tail(self, lines: int = LOG_LINES_SHOWN) -> str:
        """The last lines of what the server has printed, without stack frames."""
        return tail(self._log(), lines)

    def _new_folder(self) -> Path:
        self._folder = Path(tempfile.mkdtemp(prefix=f"headwater-{self.name}-", dir=self._parent_folder))
        return self._folder

    def _run(self, command: Sequence[str]) -> None:
        """Starts the program, which owns the folder from now on, and waits until it serves."""
        assert self._guard is None, "this server runs already"
        assert self._folder is not None
        self._command = command
        if self.gives_away:
            give_away(self._folder)
        guard = Path(__file__).with_name("guard.py")
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(guard), str(self._folder), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C at the terminal ends the parent first, which then stops the server in order
        )
        assert self._guard.stdout is not None
        self.pid = int(self._guard.stdout.readline())
        self._wait_until_ready()

    def _end(self) -> None:
        """Ends the guard, which ends the server and removes its folder, unless the server had ended before."""
        guard, self._guard = self._guard, None
        if guard is not None:
            assert guard.stdin is not None and guard.stdout is not None
            guard.stdin.close()
            guard.wait()
            guard.stdout.close()

    def _wait_until_ready(self) -> None:
        assert self._guard is not None
        deadline = time.monotonic() + self._start_timeout_s
        while not self.is_ready():
            if self._guard.poll() is not None:
                code = "port_in_use" if "Address already in use" in self._log() else "died"
                what = f"{self.name} ended before it was ready (status {self._guard.returncode})."
                raise ServerError(code, f"{what} Its last log lines:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                what = f"{self.name} was not ready after {self._start_timeout_s:g} s."
                raise ServerError("not_ready", f"{what} Its last log lines:\n{self.log_tail()}")
            time.sleep(_LOOK_AGAIN_S)

    def _log(self) -> str:
        if self._folder is None:
            return ""
        try:
            return (self._folder / "service.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""


def tail(text: str, lines: int = LOG_LINES_SHOWN) -> str:
    """The last lines of a program's output, without stack frames."""
    return "\n".join([line for line in text.splitlines() if not line.startswith("\tat ")][-lines:])


def free_port() -> int:
    """A port on loopback that nobody uses at this moment."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
