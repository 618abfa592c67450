"""Gathered acknowledgements: what `lease.ack()` leaves to be written with others.

They are written when the owner asks (at the next `lease`, by `flush`, `close` and whatever looks at the queue), and by a thread
a few milliseconds after the first, so that an idle consumer's acknowledgements are not forgotten until its leases expire. On
a simulated disk there is no thread.

Gathering takes no lock: appending to a list is one step of the interpreter. An acknowledgement is taken from its grant only
when it is written. A grant that is dropped is marked first and looked at then, while `ack` appends first and looks at the mark
then, so none is missed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue

from headwater.log.disk.threads import Background
from headwater.log.queue.lease import Grant
from headwater.model.clock import Clock
from headwater.model.errors import Closed, HeadwaterError

FLUSH_S = 0.005

Write = Callable[[int, list[int], int], int]
"""Writes acknowledgements: partition, offsets and token; how many came too late."""


class Acks:
    """The grants of one handle and what was acknowledged of them. May be used by many threads."""

    def __init__(self, write: Write, *, clock: Clock, threads: bool, counters: Counter[str]) -> None:
        self._write = write
        self._clock = clock
        self._threads = threads
        self._counters = counters
        self._closed = False
        self.ticking = False
        """Whether somebody is about to write what is gathered."""
        self.failure: HeadwaterError | None = None
        self.refused = 0
        self._grants: list[Grant] = []
        self._mutex = threading.Lock()
        self._wake: SimpleQueue[None] = SimpleQueue()  # not an Event: Ctrl-C could leave its lock taken
        self._thread: Background | None = None

    def add(self, grant: Grant) -> None:
        """Another grant whose acknowledgements are to be written."""
        with self._mutex:
            self._grants.append(grant)

    def gathered(self, grant: Grant) -> None:
        """An acknowledgement came while nobody was about to write, or after its grant was dropped."""
        if self._closed:
            raise Closed("The queue of this lease was closed.", advice="Settle leases before you close their queue.")
        if grant.dropped:
            with self._mutex:
                grant.dropped = False
                self._grants.append(grant)
        if not self.ticking:
            self.ticking = True
            if self._threads:
                self._start()
                self._wake.put(None)

    def settled(self, grant: Grant, count: int) -> None:
        """So many leases of a grant were settled otherwise."""
        with self._mutex:
            grant.settled += count

    def outstanding(self, now: int) -> int:
        """How many leases are out and in force."""
        with self._mutex:
            return sum(g.count - g.settled - len(g.acked) for g in self._grants if g.deadline > now)

    def write(self) -> None:
        """Writes what was gathered."""
        with self._mutex:
            now, kept = self._clock(), []
            for grant in self._grants:
                is_over = grant.dropped = grant.deadline < now
                if count := len(grant.acked):
                    late = self._write(grant.partition, grant.acked[:count], grant.token)
                    del grant.acked[:count]
                    grant.settled += count
                    self.refused += late
                    self._counters["expired"] += late
                    self._counters["acked"] += count - late
                if is_over or grant.settled >= grant.count:
                    grant.dropped = True
                else:
                    kept.append(grant)
            self._grants = kept

    def close(self) -> None:
        """Takes no more, and ends the thread."""
        self._closed = True
        self.ticking = False
        self._wake.put(None)
        if self._thread is not None:
            self._thread.join()

    def forked(self) -> None:
        """In a child: what was gathered is the parent's."""
        self._closed = True
        self.ticking = False
        self._grants = []
        self._mutex = threading.Lock()
        self._wake = SimpleQueue()
        self._thread = None

    def _start(self) -> None:
        with self._mutex:
            if self._thread is None:
                self._thread = Background(self._run)

    def _run(self) -> None:
        while True:
            self._wake.get()
            if self._closed:
                self._wake.put(None)  # for a second thread, where Ctrl-C fell into the start of the first
                return
            time.sleep(FLUSH_S)
            self.ticking = False
            try:
                self.write()
            except HeadwaterError as error:
                self.failure = error
