"""The process that Spark's Python workers are forked from, with everything imported that they need.

A worker of Spark's own daemon begins with little, and each imports Arrow, pandas (which Arrow wants for every array that it makes) and our
modules for itself: half a second of a processor before the first row. Imported before the fork, they are there at once, and in memory once.
They are frozen, too: behind each task Spark has a worker look for garbage, which in all that was imported takes 20 ms and finds nothing.

Spark starts it by `spark.python.daemon.module` or `worker_python`, tells it the module that its workers run, and talks to it as to its own.
"""

from __future__ import annotations

import gc
import socket
import sys
from importlib import import_module

from pyspark import daemon

READING = "pyspark.worker"
NEEDED = {
    READING: (
        "pandas",
        "pyarrow.compute",
        "headwater.processing.source.spark_source",
        "headwater.processing.operators.totals",
    )
}
"""What workers need besides their own module: those of other kinds are few, and start once for a query."""

_work = daemon.worker


def work(sock: socket.socket, authenticated: bool) -> int:
    """What Spark has a worker do. Where Spark has gone meanwhile there is nobody to tell: its own one prints a traceback."""
    try:
        return _work(sock, authenticated)
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    kind = sys.argv[1] if len(sys.argv) > 1 else READING
    for name in (kind, *NEEDED.get(kind, ())):
        import_module(name)
    gc.collect()
    gc.freeze()
    daemon.worker = work
    daemon.manager()
