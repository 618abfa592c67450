"""The process that Spark's Python workers are forked from, with everything imported that they need.

A worker of Spark's own daemon begins with little, and each imports Arrow, pandas (which Arrow wants for every array that it makes) and our
modules for itself: half a second of a processor before the first row. Imported before the fork, they are there at once, and in memory once.
They are frozen, too: behind each task Spark has a worker look for garbage, which in all that was imported takes 20 ms and finds nothing.

Spark starts it with `spark.python.daemon.module`, and talks to it as to its own.
"""

from __future__ import annotations

import gc
import socket
from importlib import import_module

from pyspark import daemon

NEEDED = ("pandas", "pyarrow.compute", "pyspark.worker", "headwater.processing.source", "headwater.processing.totals")

_work = daemon.worker


def work(sock: socket.socket, authenticated: bool) -> int:
    """What Spark has a worker do. Where Spark has gone meanwhile there is nobody to tell: its own one prints a traceback."""
    try:
        return _work(sock, authenticated)
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    for name in NEEDED:
        import_module(name)
    gc.collect()
    gc.freeze()
    daemon.worker = work
    daemon.manager()
