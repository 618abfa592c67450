"""The second part of the demonstration: `examples/in_sync/watch.py`, a process of its own on the same terminal.

It uses its own temporary folder and ends by itself, or when its stdin closes because the director has ended. Ctrl-C
reaches only the director, which forwards it; the process then prints its result and ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.cli.demo.application import JAVA_OPTIONS

CLIENTS = ("redis", "tantivy", "deltalake")
"""What its sinks need, which extras bring."""


def play_in_sync(script: Path, folder: Path, *, seconds: float) -> int:
    """Runs the part to its end; its exit code."""
    with _started(script, folder, seconds) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            return process.wait()


@contextmanager
def _started(script: Path, folder: Path, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    scratch = folder / "in_sync"
    scratch.mkdir()
    java = f"{JAVA_OPTIONS} -Djava.io.tmpdir={scratch} {os.environ.get('JDK_JAVA_OPTIONS', '')}".strip()
    process = subprocess.Popen(
        [sys.executable, str(script), "--seconds", str(seconds), "--tied"],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "JDK_JAVA_OPTIONS": java, "SPARK_LOCAL_DIRS": str(scratch), "TMPDIR": str(scratch)},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
