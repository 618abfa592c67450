"""Waiting for new events: inotify where there is one, polling where there is none left.

A writer that has published events writes one byte to the topic's `signal` file. A reader watches that file, so it wakes
within a tenth of a millisecond in any process. A machine allows about 128 inotify instances for each user; a waiter that
gets none polls.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import struct
import time
from collections.abc import Sequence
from typing import Protocol

POLL_S = 0.0005
ASYNC_POLL_S = 0.005

_IN_MODIFY = 0x2
_IN_DELETE_SELF = 0x400
_EVENTS_BYTES = 64 * struct.calcsize("iIII")


class InotifyWaiter:
    """Wakes when one of the watched files is written."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._poll = select.poll()  # not `select`, which knows only the first 1,024 descriptors of a process
        self._poll.register(handle, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Returns when something was written, or after the time."""
        if self._poll.poll(max(timeout_s, 0.0) * 1000):
            self.drain()

    def drain(self) -> None:
        """Takes away what woke us."""
        try:
            os.read(self._handle, _EVENTS_BYTES)
        except BlockingIOError:
            return

    def fileno(self) -> int | None:
        """The descriptor to wait on in an event loop."""
        return self._handle

    def close(self) -> None:
        """Frees the inotify instance."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


class PollingWaiter:
    """Sleeps a little: what is left where inotify is exhausted, missing, or the disk is simulated."""

    def wait(self, timeout_s: float) -> None:
        """Returns after half a millisecond, or sooner if asked."""
        time.sleep(max(0.0, min(timeout_s, POLL_S)))

    def drain(self) -> None:
        """Nothing to take away."""

    def fileno(self) -> int | None:
        """There is none."""
        return None

    def close(self) -> None:
        """Nothing to free."""


class _Waiter(Protocol):
    def wait(self, timeout_s: float) -> None: ...

    def fileno(self) -> int | None: ...


async def wait_async(waiter: _Waiter, timeout_s: float) -> None:
    """`wait` for asyncio: other tasks run meanwhile."""
    handle = waiter.fileno()
    if handle is None:
        await asyncio.sleep(min(timeout_s, ASYNC_POLL_S))
        return
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()
    loop.add_reader(handle, _wake, woken)
    try:
        await asyncio.wait_for(woken, timeout_s)
    except TimeoutError:
        return
    finally:
        loop.remove_reader(handle)
    waiter.wait(0)


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


def file_waiter(paths: Sequence[str]) -> InotifyWaiter | PollingWaiter:
    """A waiter on writes to these files."""
    libc = ctypes.CDLL(None)
    handle = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if handle < 0:
        return PollingWaiter()
    for path in paths:
        if libc.inotify_add_watch(handle, os.fsencode(path), _IN_MODIFY | _IN_DELETE_SELF) < 0:
            os.close(handle)
            return PollingWaiter()
    return InotifyWaiter(handle)
