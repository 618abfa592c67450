"""A child: a function run in a forked process, so that it may die, be killed or change its user without harm to the tests."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

NOBODY = 65_534


class Child(Generic[T]):
    """A running child; `result` waits for what its function gives."""

    def __init__(self, work: Callable[[], T], *, user: int | None = None) -> None:
        self._reading, writing = os.pipe()
        with warnings.catch_warnings():
            # Later Pythons warn of a fork while threads run; what a fork does to a log is what is tested here.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            self.close()
            _run(work, user, writing)
        os.close(writing)
        self._reaped: int | None = None

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """What it says is not read any more; many are killed without a word."""
        if self._reading >= 0:
            os.close(self._reading)
            self._reading = -1

    def result(self, *, timeout_s: float = 60.0) -> T:
        """What the function gave; raises what it raised, or says of what the child died."""
        raw = bytearray()
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                if not _is_readable(self._reading, max(0.0, deadline - time.monotonic())):
                    self.kill()
                    raise AssertionError(f"the child was not done in {timeout_s} s")
                piece = os.read(self._reading, 1 << 16)
                if not piece:
                    break
                raw += piece
        finally:
            self.close()
        status = self.wait()
        if not raw:
            what = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {status}"
            raise AssertionError(f"the child died of {what}")
        value, error, trace = pickle.loads(raw)
        if error is not None:
            error.add_note(f"in the child:\n{trace}")
            raise error
        return value  # type: ignore[no-any-return]

    def kill(self) -> None:
        """Ends it as `kill -9` does; returns when it is dead."""
        if self._reaped is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def was_killed(self, *, timeout_s: float = 60.0) -> bool:
        """Whether it died of `kill -9` before it was done; what else it died of is raised."""
        try:
            self.result(timeout_s=timeout_s)
        except AssertionError as death:
            if "SIGKILL" not in str(death):
                raise
            return True
        return False

    def is_running(self) -> bool:
        """Whether it has not ended; a process that was stopped has not."""
        if self._reaped is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._reaped = status
        return self._reaped is None

    def wait(self) -> int:
        """Its exit status, when it is dead."""
        if self._reaped is None:
            self._reaped = os.waitpid(self.pid, 0)[1]
        return self._reaped


class Gate:
    """A door between processes that were forked after it was made: one waits until another opens it."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()

    def open(self, word: bytes = b"!") -> None:
        """Lets the one who waits go on, with a word to it."""
        os.write(self._writing, word)

    def wait(self, *, timeout_s: float = 20.0) -> bytes:
        """The word that was given."""
        if not _is_readable(self._reading, timeout_s):
            raise AssertionError(f"nobody opened the gate in {timeout_s} s")
        return os.read(self._reading, 1 << 10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._reading)
        os.close(self._writing)


def in_child(work: Callable[[], T], *, user: int | None = None, timeout_s: float = 60.0) -> T:
    """What the function gives in a child of its own."""
    return Child(work, user=user).result(timeout_s=timeout_s)


def _run(work: Callable[[], Any], user: int | None, writing: int) -> None:
    outcome: tuple[Any, BaseException | None, str]
    try:
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        outcome = (work(), None, "")
    except BaseException as error:  # noqa: BLE001 (everything is for the parent to raise)
        outcome = (None, error, traceback.format_exc())
    try:
        data = pickle.dumps(outcome)
    except Exception:  # noqa: BLE001 (some errors cannot be pickled)
        data = pickle.dumps((None, AssertionError(f"{outcome[1] or outcome[0]!r}"), outcome[2]))
    try:
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(data)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _is_readable(handle: int, timeout_s: float) -> bool:
    """Not by `select`, which knows only the first 1,024 descriptors of a process."""
    poll = select.poll()
    poll.register(handle, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(timeout_s * 1000))


def let_others_in(folder: Path) -> None:
    """Lets every user reach a folder of pytest's, which are private, for a child that runs as somebody else."""
    for above in [folder, *folder.parents]:
        if above == Path(tempfile.gettempdir()):
            return
        above.chmod(0o755)
