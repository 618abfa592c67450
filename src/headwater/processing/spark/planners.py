"""Planners: the Python processes in which Spark plans streams, forked from one that has everything imported that they need.

Spark starts a new Python for each source of each query, which lives as long as the query: half a second of a processor, and 60 MB that
none of them shares. A fork takes some milliseconds, and shares what was imported before. So a local session has a process that forks
planners (`serve`). The program by which Spark starts Python (see `worker_python`) leaves a request in a folder and ends, instead of
becoming a planner; the fork connects to Spark as the process would that Spark has started.

In the folder: `requests`, a named pipe with a line for each request; `<line>.env`, the environment that Spark gave; `pid`, of the process
that forks. Where that does not run, Spark gets a Python of its own for each source, as before.

Spark stops a planner by a signal to the process that it has started, which has ended long before, and closes its connection. So a planner
ends when its connection is closed, whatever it does at that moment.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO

PLANNING = "pyspark.sql.streaming.python_streaming_source_runner"
REQUESTS, PID = "requests", "pid"
STOP_S = 10.0
PARENT_LOOK_S = 30.0
NEEDED = (
    "pandas",
    "pyarrow.compute",
    "headwater.processing.source.spark_source",
    "headwater.processing.operators.totals",
    PLANNING,
)

_CLOSED = 0x2000  # POLLRDHUP
_LINE_BYTES_MAX = 4096


class Planners:
    """The process of this program that forks planners; one at a time, and it ends with this program."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = -1

    def start(self, said: IO[bytes] | None = None) -> None:
        """Starts it, if it does not run. What planners write to stderr goes to the file `said`."""
        if self.pid is not None:
            return
        self.stop()
        path = self._folder / REQUESTS
        os.mkfifo(path, 0o600)
        self._requests = os.open(
            path, os.O_RDWR | os.O_CLOEXEC
        )  # held open: a request outlives the process that leaves it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headwater.processing.spark.planners", str(self._folder)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=os.environ
            | {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")},  # as Spark has it in its workers
            process_group=0,  # a Ctrl-C in the terminal is for the application, which stops its queries in order
        )
        draft = self._folder / f"{PID}.new"
        draft.write_text(f"{self._process.pid}\n")
        draft.replace(self._folder / PID)
        threading.Thread(target=self._forget, args=(self._process,), name="headwater-planners", daemon=True).start()

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        """Leaves no request any more for a process that has ended."""
        process.wait()
        if self._process is process:
            (self._folder / PID).unlink(missing_ok=True)

    @property
    def pid(self) -> int | None:
        """That of the process, while it runs."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def stop(self) -> None:
        """Ends it; planners end with their queries."""
        process, self._process = self._process, None
        (self._folder / PID).unlink(missing_ok=True)
        (self._folder / REQUESTS).unlink(missing_ok=True)
        if self._requests >= 0:
            os.close(self._requests)
            self._requests = -1
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def serve(folder: Path) -> None:
    """Forks a planner for each request, until whoever started this process is gone."""
    parent = os.getppid()
    requests = os.open(folder / REQUESTS, os.O_RDONLY | os.O_CLOEXEC)
    for name in NEEDED:
        import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while os.getppid() == parent:
        if not poll.poll(PARENT_LOOK_S * 1000):
            continue
        lines = os.read(requests, _LINE_BYTES_MAX)
        if not lines:
            return
        for line in lines.decode().split():
            if os.fork() == 0:
                os.close(requests)
                _plan(folder / f"{line}.env")


def _plan(request: Path) -> None:
    """What a fork does; never returns. Where it has imported other modules than Spark wants, it becomes a new Python."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        environment = _read(request)
        if not _fits(environment):
            os.execve(sys.executable, [sys.executable, "-m", "headwater.processing.spark.planners"], environment)
        os.environ.clear()
        os.environ.update(environment)
    except BaseException:  # noqa: BLE001 - a fork must never go on as the process it was forked from
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    _end_with(environment)


def _end_with(environment: Mapping[str, str]) -> None:
    """A planner from its first to its last moment; never returns."""
    status = 1
    try:
        status = _run(environment)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BrokenPipeError:
        status = 1  # Spark has gone: nobody is there to be told
    except BaseException:  # noqa: BLE001 - a fork must never go on as the process it was forked from
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


def _fits(environment: Mapping[str, str]) -> bool:
    """Whether a Python that starts in this environment would find the modules that were imported here, and hash as here."""
    return _how_it_imports(environment) == _how_it_imports(os.environ)


def _how_it_imports(environment: Mapping[str, str]) -> tuple[list[str], str | None]:
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    known = dict.fromkeys(path for path in paths if path and not path.endswith(".jar"))  # Spark adds its own jar
    return list(known), environment.get("PYTHONHASHSEED")


def _run(environment: Mapping[str, str]) -> int:
    from pyspark.serializers import write_int
    from pyspark.util import local_connect_and_auth

    where: str | int = environment.get("PYTHON_WORKER_FACTORY_SOCK_PATH", "")
    where = where or int(environment["PYTHON_WORKER_FACTORY_PORT"])
    file, connection = local_connect_and_auth(where, environment.get("PYTHON_WORKER_FACTORY_SECRET"))
    connection.settimeout(None)
    write_int(os.getpid(), file)  # type: ignore[no-untyped-call]
    file.flush()
    threading.Thread(target=_end_when_closed, args=(connection.fileno(),), daemon=True).start()
    import_module(PLANNING).main(file, file)
    return 0


def _end_when_closed(connection: int) -> None:
    poll = select.poll()
    poll.register(connection, _CLOSED)
    poll.poll()
    os._exit(0)


def _read(request: Path) -> dict[str, str]:
    """The environment that Spark gave to the process that left the request."""
    text = os.fsdecode(request.read_bytes())
    request.unlink()
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        _end_with(os.environ)
    serve(Path(sys.argv[1]))
