"""A gate: lets a handle be closed while other threads use it.

Whoever uses the handle passes the gate; closing it turns newcomers away and waits for those inside, so no file is closed
under somebody's hands (its number could be another file's a moment later).

Passing takes no lock: adding to a set and setting a flag are single steps of the interpreter, and whoever adds itself and
then looks at the flag cannot be missed by one who sets the flag and then looks at the set. So passing is cheap, and Ctrl-C at
any instruction leaves nothing locked: at worst a thread that is no longer inside is still counted, until it passes again or
closes the gate itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

from headwater.log.disk.disk import File
from headwater.model.errors import Closed

T = TypeVar("T")

_LOOK_AGAIN_S = 0.001


class Gate:
    """Knows which threads are inside; not to be passed twice by one thread, but while it is `staying`."""

    def __init__(self, what: str, advice: str) -> None:
        self._what = what
        self._advice = advice
        self._inside: set[int] = set()
        self._closing = threading.Lock()
        self._closed = False

    def __enter__(self) -> None:
        self._inside.add(threading.get_ident())
        if self._closed and _stay() not in self._inside:
            self._inside.discard(threading.get_ident())
            raise Closed(f"{self._what} was closed.", advice=self._advice)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.discard(threading.get_ident())

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Stays inside for several passes of this thread, also when it is being closed; not itself twice by one thread."""
        with self:
            try:
                self._inside.add(_stay())
                yield
            finally:
                self._inside.discard(_stay())

    def close(self) -> bool:
        """Waits until nobody else is inside; False when it was closed before."""
        if not self._closing.acquire(blocking=False):
            return False
        self._closed = True
        while self._inside - {threading.get_ident(), _stay()}:
            time.sleep(_LOOK_AGAIN_S)
        return True


def _stay() -> int:
    """How the gate knows a thread that stays: no thread has such a number."""
    return -threading.get_ident()


@contextmanager
def settled(mutex: AbstractContextManager[object], lock: File, settle: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of a file that transactions write to, with what a dead one left settled.

    The mutex excludes threads of this process, since a file's lock belongs to the process. The caller has passed the log's gate.
    """
    with mutex:
        try:
            lock.lock()
            settle()
            yield
        finally:
            lock.unlock()


Held = list[Generator[Any, None, None]]
"""Contexts made by generators that were entered one after the other.

Whoever has such a list ends with `try: leave(held)`, `finally: held.clear()`: if Ctrl-C falls on the call of `leave` or between
two of its steps, `clear` leaves the rest in one.
"""


def hold(held: Held, lock: AbstractContextManager[T]) -> T:
    """Enters a context made by a generator, to be left by `held`.

    Not an `ExitStack`: Ctrl-C between entering and registering would leave it entered. Here it is registered first.
    """
    assert isinstance(lock, _GeneratorContextManager)
    held.append(lock.gen)
    return lock.__enter__()


def leave(held: Held) -> None:
    """Leaves all contexts, the last one first, also where leaving one of them fails."""
    failure: BaseException | None = None
    while held:
        try:
            held.pop().close()
        except BaseException as error:  # noqa: BLE001 - it is raised when the others are left
            failure = error
    if failure is not None:
        raise failure
