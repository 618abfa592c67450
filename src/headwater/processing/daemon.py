"""The process that Spark's Python workers are forked from, with everything imported that they need.

A worker of Spark's own daemon begins with little, and each imports Arrow, pandas (which Arrow wants for every array that it makes) and our
modules for itself: half a second of a processor before the first row. Imported before the fork, they are there at once, and in memory once.

Spark starts it with `spark.python.daemon.module`, and talks to it as to its own.
"""

from __future__ import annotations

from importlib import import_module

from pyspark import daemon

NEEDED = ("pandas", "pyarrow.compute", "pyspark.worker", "headwater.processing.source", "headwater.processing.totals")

if __name__ == "__main__":
    for name in NEEDED:
        import_module(name)
    daemon.manager()
