"""The processes of this machine, as tests look for what should be gone."""

from __future__ import annotations

import os
import time
from pathlib import Path

GONE_S_MAX = 60.0


def processes_of(folder: Path) -> list[str]:
    """The command lines of all processes that name a folder, in a word of theirs or as where they work."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            works_in = os.readlink(entry / "cwd")
        except OSError:
            continue
        if command and (str(folder) in command or Path(works_in).is_relative_to(folder)):
            found.append(command)
    return found


def assert_all_gone(folder: Path) -> None:
    """Waits until none of them is left."""
    deadline = time.monotonic() + GONE_S_MAX
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def java_of(pid: int) -> int | None:
    """The JVM of the Spark that a process has started, itself or through others; None where there is none."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
            is_spark = b"org.apache.spark.deploy.SparkSubmit" in words and b"launcher.Main" not in words
            if is_spark and os.readlink(entry / "exe").endswith("/java") and _is_below(int(entry.name), pid):
                return int(entry.name)
        except OSError:
            continue
    return None


def _is_below(process: int, pid: int) -> bool:
    while process > 1 and process != pid:
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process == pid
