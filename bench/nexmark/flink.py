"""Flink beside ours: an environment of its own, made once, and a process in it that runs queries one after another.

`apache-flink` pins older versions of what Headwater needs, so it lies in a virtual environment in the cache, next to the jars that read
Parquet (see `headwater.testing.servers.maven`). One JVM serves all queries, as one Spark does on the other sides, with as much memory.
Flink's own defaults hold but for what `SETTINGS` says: no checkpoints, no mini-batches, state on the heap.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Self

from bench import environment
from bench.nexmark import flink_sql
from headwater.testing.servers import maven
from headwater.testing.servers.server import tail

VERSION = "2.3.0"
PEER = f"Flink SQL {VERSION.rpartition('.')[0]}"
PARALLELISM = 2
SETTINGS = {"parallelism.default": str(PARALLELISM), "table.local-time-zone": "UTC"}
MEMORY = "4g"  # as Spark's driver has

_JARS = (
    f"org.apache.flink:flink-sql-parquet:{VERSION}",
    "org.apache.hadoop:hadoop-client-api:3.4.2",
    "org.apache.hadoop:hadoop-client-runtime:3.4.2",
)
_WORKER = Path(__file__).with_name("flink_worker.py")


class Flink:
    """A process that runs queries; a context manager, and nothing runs after it.

    Raises `ServerError` when it cannot be had, `FlinkError` when it refuses a query.
    """

    def __init__(self, folder: Path) -> None:
        jars, python = fetch()
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            "JVM_ARGS": f"-Xmx{MEMORY}",
            "HADOOP_CLASSPATH": os.pathsep.join(str(jar) for jar in sorted(jars.glob("*.jar"))),
            "FLINK_LOG_DIR": str(folder),
        }
        with open(folder / "flink.out", "w") as told:
            self._process = subprocess.Popen(
                [python, _WORKER],
                cwd=folder,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=told,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run_s(self, name: str, files: Path) -> float:
        """The seconds that the job of a query over these files takes."""
        return float(self._ask(name, files)["ms"]) / 1000

    def rows(self, name: str, files: Path) -> list[list[Any]]:
        """The final answer to a query over these files, in no order; times and decimals as text."""
        found: list[list[Any]] = self._ask(name, files, collects=True)["rows"]
        return found

    def _ask(self, name: str, files: Path, *, collects: bool = False) -> dict[str, Any]:
        asked = {"settings": SETTINGS, "tables": flink_sql.tables(files), "query": flink_sql.QUERIES[name]}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked | {"collects": collects}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process has ended"}
        if "error" in answer:
            raise FlinkError(f"Flink did not run {name}: {tail(answer['error'])}")
        return answer


class FlinkError(RuntimeError):
    """A query that Flink refused, or that failed in it."""


def fetch() -> tuple[Path, Path]:
    """The folder of the jars and the Python of the environment; both are fetched when they are missing."""
    jars = maven.fetch_jars(f"flink-{VERSION}", _JARS, alone=True)
    return jars, environment.python_of(PEER, f"apache-flink=={VERSION}", name=f"flink-{VERSION}", size="0.8 GB")
