"""The Python that Spark starts its workers with: this program's own, which finds pyspark where it is installed.

Spark puts its `pyspark.zip` before everything else that a worker can import, in some workers twice. There is no bytecode in it, so every
process would compile all of pyspark again: three quarters of the time that a query needs to start, and Spark starts several for each. The
package beside that archive is the same one, with bytecode. So workers are started by a few lines of shell that leave the archive out.

There are several kinds of workers, each with a process that they are forked from, and Spark lets us say which that is for one kind only;
the same lines make it ours for all (see `daemon`).
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
    set -- -m headwater.processing.daemon "$@"
fi
exec {python} "$@"
"""


def worker_python() -> str:
    """What to start workers with on this machine; plain Python where Spark is not the one that was installed with pyspark."""
    archives = sorted((Path(pyspark.__file__).parent / "python" / "lib").glob("py*.zip"), reverse=True)
    if "SPARK_HOME" in os.environ or not archives or os.name != "posix":
        return sys.executable
    return _script(_SCRIPT.format(archives=shlex.join(map(str, archives)), python=shlex.quote(sys.executable)))


@lru_cache
def _script(text: str) -> str:
    folder = tempfile.mkdtemp(prefix="headwater-python-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    script = Path(folder) / "python"
    script.write_text(text)
    script.chmod(0o700)
    return str(script)
