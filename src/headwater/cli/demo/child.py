"""A child process of the demonstration: talks in lines over stdin and stdout, and can be killed with all its processes.

It has its own session, so that Ctrl-C reaches only the director. Its stdin closes when the director ends, in any way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headwater.model.errors import HeadwaterError, TimedOut

GONE_S_MAX = 30.0

_TICK_S = 0.05


class Child:
    """One process, from the constructor until `wait_until_ended`, `kill` or `leave`."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        errors: Path,
        hear: Callable[[bytes], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`hear` is called with each line, by a thread of its own."""
        self.name = name
        self._errors = errors
        with errors.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        self._listener = threading.Thread(target=self._listen, args=(hear,), daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def say(self, line: str) -> None:
        """Writes a line to its stdin."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode("ascii"))
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.failed("stopped unexpectedly") from None

    def kill(self) -> None:
        """Ends it as a crash would, with no chance to say anything; returns when what it had started is gone too."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait()
        self._see_off()

    def end(self) -> None:
        """Ends its stdin, which tells it to finish, and waits until it has; `HeadwaterError` where it failed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.wait_until_ended()

    def wait_until_ended(self, timeout_s: float = GONE_S_MAX) -> None:
        """Waits until it has finished by itself; `HeadwaterError` where it failed."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimedOut(
                f"{self.name} did not end in {timeout_s:g} s.",
                advice="Run the demo again when the machine is less busy.",
            ) from None
        self._see_off()
        if self._process.returncode != 0:
            raise self.failed(f"ended with code {self._process.returncode}")

    def leave(self) -> None:
        """Ends it in any case, and whatever it has started."""
        if self.is_running:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        self._see_off()

    def failed(self, what: str) -> HeadwaterError:
        """What to raise: what happened, and what it said last."""
        said = self._errors.read_text(errors="replace").strip().splitlines()[-1:] or ["it printed no error"]
        return HeadwaterError(
            f"{self.name} {what}: {said[0]}", advice="Run the demo again. If the error repeats, report it."
        )

    def _listen(self, hear: Callable[[bytes], None]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith(b"\n"):
                hear(line)

    def _see_off(self) -> None:
        """Waits for the rest of its session (Spark's JVM and workers end by themselves), and does not wait for ever."""
        deadline = time.monotonic() + GONE_S_MAX
        while (left := processes_of_session(self.pid)) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # what was still to be said has nobody to hear it


def processes_of_session(session: int) -> list[int]:
    """The processes of a session that run; one that has ended and was not waited for does not count."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = entry.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(int(entry.parent.name))
    return found
