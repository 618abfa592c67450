"""A Python worker of Spark: a process that Spark forks from its daemon, and that lives for many tasks."""

from __future__ import annotations

import gc
import sys


def settle() -> None:
    """To be called once what a worker needs is loaded; does nothing in any other process.

    After each task Spark has the worker look through all its objects for garbage. Nearly all of them are modules: that takes longer
    than a small task, and the next task waits for it. Set aside, they are no longer looked at.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name == "pyspark.daemon":
        gc.collect()
        gc.freeze()
