"""The Java process below Spark: started with its words in a file, told in a sentence where it does not start, and never left behind.

What Java and Spark's Python workers write (the warnings of a new Java, the traceback of a worker that was killed, what a user's
function prints) would otherwise stand in the middle of whatever the terminal shows. It goes to the file that the caller gives.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from headwater.model.errors import HeadwaterError, SparkUnavailable

STOP_S = 30.0
GONE_S = 2.0
"""A call fails a moment before the process that answered it is known to have ended."""
AGAIN = "Start it again: an application goes on where it was. If the machine ran out of memory, give Spark less of it."

_WORDS_MAX = 300
_NO_NEWS = ("NOTE:", "WARNING:", "Picked up")
_RAISED = re.compile(r"^: [\w.$]+(?:Exception|Error): (.*)$", re.MULTILINE)


@contextmanager
def starting_java(settings: Mapping[str, str], said: IO[bytes] | None) -> Iterator[None]:
    """Stands around whatever starts Spark: what goes wrong is `SparkUnavailable`, and then no process is left.

    Without a file, or where Java runs already, its words stay where they were.
    """
    starts_here = SparkContext._gateway is None
    try:
        if starts_here and said is not None:
            conf = SparkConf(loadDefaults=False)
            conf.setAll(list(settings.items()))
            gateway = launch_gateway(conf, popen_kwargs={"stdout": said, "stderr": said})  # type: ignore[no-untyped-call]
            SparkContext._ensure_initialized(gateway=gateway)
        yield
    except HeadwaterError:
        raise
    except Exception as error:
        refusal = _told(error, settings, said)  # Spark's errors ask Java for their text
        if starts_here:
            stop_java()
        raise refusal from error


def stop_java() -> None:
    """Ends the Java process, which Spark leaves until this program ends."""
    gateway = SparkContext._gateway
    if gateway is None:
        return
    process = getattr(gateway, "proc", None)
    gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = None
    if process is not None:
        process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def how_it_ended(*, wait_s: float = 0.0) -> str | None:
    """What became of the JVM that this program started, in a sentence; None while it runs, or where there is none of its own."""
    process = getattr(SparkContext._gateway, "proc", None)
    if process is None:
        return None
    try:
        status = process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return None
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"Spark's Java process {how}."


@contextmanager
def told_when_gone() -> Iterator[None]:
    """Stands around whatever calls the JVM: where that has died meanwhile, `SparkUnavailable` says so instead of the call's own error."""
    try:
        yield
    except HeadwaterError:
        raise
    except Exception as error:
        ended = how_it_ended(wait_s=GONE_S)
        if ended is None:
            raise
        raise SparkUnavailable(ended, advice=AGAIN) from error


def keep_quiet(spark: SparkSession) -> None:
    """Has Spark's server of counters say nothing where the JVM breaks off: it would print a traceback over whatever is shown."""
    server: Any = getattr(spark.sparkContext, "_accumulatorServer", None)
    if server is not None:
        told = server.handle_error
        server.handle_error = lambda request, address: None if _broke_off() else told(request, address)


def _broke_off() -> bool:
    return isinstance(sys.exc_info()[1], (EOFError, OSError))


def _told(error: Exception, settings: Mapping[str, str], said: IO[bytes] | None) -> SparkUnavailable:
    ended = how_it_ended(wait_s=GONE_S)
    if ended is not None and "by signal" in ended:
        return SparkUnavailable(ended, advice=AGAIN)
    text = str(error).strip()
    if "JAVA_GATEWAY_EXITED" in text:
        words = _first_words(said)
        return SparkUnavailable(
            f"Spark's Java process ended before Spark had started{f': {words}' if words else '.'}",
            advice="Check spark.driver.memory and Java's options in conf=, and how much memory the machine has left.",
        )
    if "All masters are unresponsive" in text or "stopped SparkContext" in text:
        return SparkUnavailable(
            f"The Spark master {settings['spark.master']} does not answer.",
            advice="Check that it runs and that this machine reaches it; its page names the URL to use.",
        )
    raised = _RAISED.search(text)
    why = raised[1] if raised else text.splitlines()[0] if text else type(error).__name__
    advice = "Correct the settings in conf= or the master."
    if "memory" in why.lower():
        advice = 'Give it more: conf={"spark.driver.memory": "1g"}.'
    return SparkUnavailable(f"Spark cannot be started: {why}", advice=advice)


def _first_words(said: IO[bytes] | None) -> str:
    if said is None:
        return ""
    said.seek(0)
    lines = [line.strip() for line in said.read(100_000).decode("utf-8", errors="replace").splitlines()]
    return ". ".join([line for line in lines if line and not line.startswith(_NO_NEWS)][:2])[:_WORDS_MAX]
