"""Threads that Ctrl-C cannot spoil: one that runs in the background, and several that make calls side by side.

An interrupt while `threading` waits for a thread to start, or to end, comes out as an error about locks, and may leave one locked for ever:
what `threading` and `concurrent.futures` wait by are locks in Python code. So threads are started, given work and waited for by single
calls into C here, and a wait looks again whether there is still something to wait for. They end with their process, like daemon threads.

Thread-safe; a forked process has none of the threads. There `SideBySide` starts its own, and `Background` has ended.
"""

from __future__ import annotations

import os
from _thread import allocate_lock, get_ident, start_new_thread
from collections.abc import Callable, Sequence
from queue import SimpleQueue

_LOOK_S = 0.05


class Background:
    """Runs a function until it returns."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._process = os.getpid()
        self._ended = allocate_lock()
        self._ended.acquire()
        self._is_ended = False
        self._thread = start_new_thread(self._work, ())

    def join(self) -> None:
        """Returns when the function has returned: at once in a forked process, which has no such thread, and in the function itself."""
        while not self._is_ended and self._process == os.getpid() and self._thread != get_ident():
            self._ended.acquire(timeout=_LOOK_S)

    def _work(self) -> None:
        try:
            self._run()
        finally:
            self._is_ended = True
            self._ended.release()


class SideBySide:
    """Calls that wait for the disk, in threads, so that they wait at the same time.

    The caller gets on when all of them are done, also when it is interrupted meanwhile. Threads are started when they are needed, and stay
    until `close`.
    """

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._begin()

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Returns when all calls are done, the first of them by the caller itself; raises what one of them raised."""
        own, *others = calls
        jobs = [_Job(call) for call in others]
        interrupted: BaseException | None = None
        try:
            self._give(jobs)
            own()
        except BaseException as error:  # noqa: BLE001 - raised again below, when no thread is at work any more
            interrupted = error
        are_done = False
        while not are_done:
            try:  # around the loop: Python looks for interrupts where a loop goes round
                while not all(job.is_done for job in jobs):
                    for job in jobs:
                        job.wait(_LOOK_S)
                        if not job.is_done and interrupted is not None:
                            self._give([job])  # the interrupt may have come before it was given; it is done once
                are_done = True
            except KeyboardInterrupt as error:
                interrupted = error
        for failure in (interrupted, *(job.failure for job in jobs)):
            if failure is not None:
                raise failure

    def close(self) -> None:
        """Lets the threads end; the next call of `run` starts others."""
        self._jobs.put(None)
        self._begin()

    def __del__(self) -> None:
        self._jobs.put(None)

    def _begin(self) -> None:
        self._process, self._started = os.getpid(), 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()

    def _give(self, jobs: Sequence[_Job]) -> None:
        if self._process != os.getpid():
            self._begin()
        try:
            while self._started < min(len(jobs), self._threads_max):
                start_new_thread(_work, (self._jobs,))
                self._started += 1
        except RuntimeError:  # no thread can be had: the machine has no more, or the interpreter is about to end
            if not self._started:
                for job in jobs:
                    job.run()
        for job in jobs:
            self._jobs.put(job)


class _Job:
    """One call: done once, by whichever thread comes first."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._turn, self._done = allocate_lock(), allocate_lock()
        self._done.acquire()
        self.failure: BaseException | None = None
        self.is_done = False

    def run(self) -> None:
        """Does it, unless somebody else does."""
        try:
            if not self._turn.acquire(blocking=False):
                return
            self._call()
        except BaseException as error:  # noqa: BLE001 - it is the caller's to raise
            self.failure = error
        self.is_done = True
        self._done.release()

    def wait(self, timeout_s: float) -> None:
        """Returns when it is done, or after that time."""
        if not self.is_done:
            self._done.acquire(timeout=timeout_s)


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
    jobs.put(None)  # the others are to end as well
