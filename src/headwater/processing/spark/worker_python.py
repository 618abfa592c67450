"""The Python that Spark starts its workers with: this program's own, which finds pyspark where it is installed.

Spark puts its `pyspark.zip` before everything else that a worker can import, in some workers twice. There is no bytecode in it, so every
process would compile all of pyspark again: three quarters of the time that a query needs to start, and Spark starts several for each. The
package beside that archive is the same one, with bytecode. So workers are started by a few lines of shell that leave the archive out.

There are several kinds of workers, each with a process that they are forked from, and Spark lets us say which that is for one kind only;
the same lines make it ours for all (see `worker_daemon`). A process that plans a stream is not started at all, but forked (see `planners`).
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import pyspark

from headwater.processing.spark.planners import PID, PLANNING, REQUESTS, Planners

_SCRIPT = """#!/bin/sh
for archive in {archives}; do
    found=":$PYTHONPATH:"
    while case "$found" in *":$archive:"*) true ;; *) false ;; esac; do
        found="${{found%%":$archive:"*}}:${{found#*":$archive:"}}"
    done
    found="${{found#:}}"
    PYTHONPATH="${{found%:}}"
done
export PYTHONPATH
if [ "$1 $2" = "-m pyspark.daemon" ]; then
    shift 2
    set -- -m headwater.processing.spark.worker_daemon "$@"
fi
if [ "$1 $2" = "-m {planning}" ] && read -r forking < {folder}/{pid} && kill -0 "$forking"; then
    env -0 > {folder}/$$.env && echo $$ 1<> {folder}/{requests} && exit
fi 2> /dev/null
exec {python} "$@"
"""


def worker_python() -> str:
    """What to start workers with on this machine; plain Python where Spark is not the one that was installed with pyspark."""
    archives = sorted((Path(pyspark.__file__).parent / "python" / "lib").glob("py*.zip"), reverse=True)
    if "SPARK_HOME" in os.environ or not archives or os.name != "posix":
        return sys.executable
    script = _folder() / "python"
    if not script.exists():
        script.write_text(
            _SCRIPT.format(
                archives=shlex.join(map(str, archives)),
                python=shlex.quote(sys.executable),
                planning=PLANNING,
                folder=shlex.quote(str(script.parent)),
                pid=PID,
                requests=REQUESTS,
            )
        )
        script.chmod(0o700)
    return str(script)


def planners() -> Planners | None:
    """What forks planners for the Python that Spark starts workers with; None where that is not the one made here."""
    script = os.environ.get("PYSPARK_PYTHON", "")
    return _planners(_folder()) if script == str(_folder() / "python") else None


@lru_cache
def _folder() -> Path:
    """A folder for this program."""
    folder = tempfile.mkdtemp(prefix="headwater-python-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@lru_cache
def _planners(folder: Path) -> Planners:
    made = Planners(folder)
    atexit.register(made.stop)
    return made
