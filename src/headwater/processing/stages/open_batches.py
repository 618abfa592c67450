"""Writing: the batches that threads of Spark's write in this process. A program does not end in the middle of one.

Spark calls back on threads that Python does not wait for when a program ends. One that is inside a library at that moment is torn out of
it, and libraries that are not written in Python need not survive that: a Delta table ended the program with a segmentation fault. It
happens when nothing else waits for the batch: Spark's JVM is gone, or somebody did not wait for the end of `stop`.

Thread-safety: any thread, at any time.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyspark.sql import DataFrame

from headwater.model.errors import Closed
from headwater.processing.stages.stage_plan import Write

END_S = 30.0
"""So long the end of a program waits for batches that are written."""


class OpenBatches:
    """The batches of one run of an application, from its start to `end`, or to the end of the program."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batches = 0
        self._is_over = False
        atexit.register(self.end)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Stands around what writes a batch; `Closed` where none may begin any more."""
        with self._changed:
            if self._is_over:
                raise Closed("The application has ended.", advice="Start it again. It then repeats the batch.")
            self._batches += 1
        try:
            yield
        finally:
            with self._changed:
                self._batches -= 1
                self._changed.notify_all()

    def writer(
        self, write: Write, *, on_dead: Callable[[int], None], on_error: Callable[[Exception], None]
    ) -> Callable[[DataFrame, int], None]:
        """What `foreachBatch` calls instead of `write`, so that nothing ends in the middle of it.

        `on_dead` is called with the number of dead letters where there are any. `on_error` is called with what `write` raises: Spark
        makes a text of that, in which every error looks like one of Python's.
        """

        def write_batch(result: DataFrame, epoch: int) -> None:
            try:
                with self.batch():
                    dead = write(result, epoch)
                    if isinstance(dead, int) and dead:
                        on_dead(dead)
            except Exception as error:
                on_error(error)
                raise

        return write_batch

    def end(self, timeout_s: float = END_S) -> None:
        """Lets no batch begin any more, and waits for those that have."""
        atexit.unregister(self.end)
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: not self._batches, timeout_s)
