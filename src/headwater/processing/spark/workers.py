"""The workers of a cluster: they have what our tasks need, or the application is refused before it starts.

A task reads the checkpoint of its query (the marker of its batch, Spark's own state) and imports Headwater. On another machine
both can be missing, and Spark would tell so in the middle of a batch, in Java's words. So a small job looks first. It sees the
workers that are there at that time; one that comes later is told by the first batch that fails there.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from headwater.model.errors import SparkUnavailable, Unsupported
from headwater.processing.spark import probe
from headwater.processing.spark.serialization import ship_by_value
from headwater.processing.spark.session import is_local_master

WAIT_S = 120.0
_TASKS_MIN = 8
_SHIP = "Give every worker the Python environment that runs this program, see docs/cluster.md."
_NO_PYTHON = re.compile(r"Cannot run program[^\n]*|\[PYTHON_VERSION_MISMATCH\][^\n]*|No module named [^\n]*")


def check_workers(spark: SparkSession, folders: Sequence[Path], *, wait_s: float = WAIT_S) -> None:
    """Refuses workers that lack Python or our package, and folders that they do not share with this machine."""
    context = spark.sparkContext
    if is_local_master(context.master or "local"):
        return
    python = context.pythonExec
    if os.path.dirname(python) and shutil.which(python) is None:
        raise SparkUnavailable(
            f"This machine has no {python}, which the workers use to run Python, and which this machine needs to plan batches.",
            advice="Start in the folder that it is relative to, or link it there; see docs/cluster.md.",
        )
    name = f"probe-{uuid.uuid4().hex}"
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    try:
        seen = _run(spark, partial(probe.look, folders=[str(folder) for folder in folders], name=name), wait_s)
    finally:
        for folder in folders:
            (folder / name).unlink(missing_ok=True)
    for each in seen:
        _check(each)


def _run(spark: SparkSession, look: Any, wait_s: float) -> list[dict[str, Any]]:
    """The answers of tasks that are spread over the workers."""
    context = spark.sparkContext
    ship_by_value(probe)
    group = f"headwater-{uuid.uuid4().hex}"
    late = threading.Timer(wait_s, lambda: context.cancelJobGroup(group))
    late.start()
    try:
        context.setJobGroup(group, "what the workers have")
        tasks = max(_TASKS_MIN, 2 * context.defaultParallelism)
        return list(context.parallelize(range(tasks), tasks).map(look).collect())
    except Exception as error:
        if late.finished.is_set():
            raise SparkUnavailable(
                f"The master {context.master} gave this application no worker in {wait_s:g} s.",
                advice="Check its page for free cores and memory, or request less with spark.cores.max and spark.executor.memory.",
            ) from None
        found = _NO_PYTHON.search(str(error))
        if found is None:
            raise
        raise SparkUnavailable(f"A worker cannot run Python: {found[0].strip()}.", advice=_SHIP) from None
    finally:
        late.cancel()
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]


def _check(seen: dict[str, Any]) -> None:
    where = f"Worker {seen['host']} ({seen['python']})"
    if seen["missing"]:
        raise SparkUnavailable(f"{where} has no module {', '.join(seen['missing'])}.", advice=_SHIP)
    if seen["version"] != (here := probe.version_of("headwater")):
        raise SparkUnavailable(f"{where} has Headwater {seen['version']}, and this is {here}.", advice=_SHIP)
    for folder, why in seen["away"]:
        raise Unsupported(
            f"{where} cannot use {folder} ({why}), which the tasks and this program have to share.",
            advice="Give state=… (and the folders of sinks) on storage that every machine mounts at the same path, such as NFS.",
        )
