"""A real Spark standalone cluster on one machine: a master and workers, each a Java process from the jars of the installed pyspark.

    with SparkCluster() as cluster:
        make_session("app", cluster.url, {"spark.pyspark.python": "/opt/app/bin/python"}, log="kafka://…")
        cluster.kill_executors(1)

Each worker has a folder of its own for what it keeps (`SPARK_WORKER_DIR`), its scratch files (`SPARK_LOCAL_DIRS`) and nothing of the
caller's Python: neither `PYTHONPATH` nor `PYSPARK_PYTHON` reaches it, as on another machine. It runs as the caller, because the tasks
read and write the caller's folders (a checkpoint), which stand for shared storage.

Executors are children of their worker and Python processes children of those. A worker that is stopped ends them; one that is
killed is missed by its executors, which then end themselves. `stop` waits until none of them is left.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headwater.testing.servers import ServerError
from headwater.testing.servers.kafka import find_java
from headwater.testing.servers.server import Server, Serving, free_port

WORKERS = 2
GONE_S = 15.0

_JAVA_OPTIONS = ("-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_NOT_FOR_WORKERS = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_CONF_DIR", "VIRTUAL_ENV")


class SparkDaemon(Server):
    """A master or a worker."""

    gives_away = False
    main: str
    ready: str

    def is_ready(self) -> bool:
        """Whether it says so."""
        return self.ready in self._log()

    def _start(self, arguments: list[str], settings: dict[str, str], options: tuple[str, ...] = ()) -> None:
        home = spark_home()
        unset = [word for name in _NOT_FOR_WORKERS for word in ("-u", name)]
        # Spark's own scripts set the Scala version; without it a worker looks for a source tree to find it out.
        places = {"SPARK_HOME": str(home), "SPARK_SCALA_VERSION": "2.13", "SPARK_LOCAL_IP": "127.0.0.1", **settings}
        environment = ["env", *unset, *(f"{name}={value}" for name, value in places.items())]
        java = [find_java(), *_JAVA_OPTIONS, *options, "-cp", str(home / "jars" / "*"), self.main]
        try:
            self._run([*environment, *java, "--host", "127.0.0.1", "--webui-port", "0", *arguments])
        except BaseException:
            self.stop()
            raise


class SparkMaster(SparkDaemon):
    """Knows the workers and gives applications executors on them."""

    name = "spark-master"
    main = "org.apache.spark.deploy.master.Master"
    ready = "New state: ALIVE"
    port = 0

    @property
    def url(self) -> str:
        """What an application names as its master."""
        return f"spark://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it on a free port."""
        self._new_folder()
        self.port = free_port()
        self._start(["--port", str(self.port)], {}, ("-Dspark.master.rest.enabled=false",))


class SparkWorker(SparkDaemon):
    """Runs executors."""

    name = "spark-worker"
    main = "org.apache.spark.deploy.worker.Worker"
    ready = "Successfully registered with master"

    def __init__(self, master: str, *, cores: int, memory: str, parent_folder: Path | None = None) -> None:
        super().__init__(parent_folder=parent_folder)
        self._arguments = ["--cores", str(cores), "--memory", memory, master]

    @property
    def folder(self) -> Path:
        """What is its own."""
        assert self._folder is not None, "this worker does not run"
        return self._folder

    def start(self) -> None:
        """Starts it and waits until the master knows it."""
        folder = self._new_folder()
        places = {"SPARK_WORKER_DIR": folder / "work", "SPARK_LOCAL_DIRS": folder / "scratch"}
        for place in places.values():
            place.mkdir()
        self._start(self._arguments, {name: str(place) for name, place in places.items()})

    def stop(self) -> None:
        """Ends the worker with everything below it."""
        below = self.processes()
        super().stop()
        _wait_until_gone(below)

    def processes(self) -> dict[int, str]:
        """Executors and Python processes that run below the worker, with what they were when they were seen."""
        return _descendants(self.pid) if self.pid else {}

    def kill_executors(self) -> int:
        """Ends every executor and its Pythons with SIGKILL; the worker stays, and is given new ones. How many died."""
        killed = self.processes()
        for pid in killed:
            _kill(pid)
        return len(killed)

    def kill(self) -> None:
        """Ends the worker and everything below it with SIGKILL, as when its machine stops."""
        below = self.processes()
        super().kill()
        for pid in below:
            _kill(pid)


class SparkCluster(Serving):
    """A master and workers; the workers' numbers are 0, 1 …"""

    def __init__(self, *, workers: int = WORKERS, cores: int = 1, memory: str = "1g") -> None:
        """`cores` and `memory` are what each worker has to give."""
        self._count, self._cores, self._memory = workers, cores, memory
        self._master = SparkMaster()
        self.workers: list[SparkWorker] = []

    @property
    def url(self) -> str:
        """What an application names as its master."""
        return self._master.url

    def start(self) -> None:
        """Starts the master, then all workers at once."""
        self._master.start()
        self.workers = [
            SparkWorker(self._master.url, cores=self._cores, memory=self._memory) for _ in range(self._count)
        ]
        try:
            with ThreadPoolExecutor(self._count) as pool:
                list(pool.map(lambda worker: worker.start(), self.workers))
        except BaseException:
            self.stop()
            raise

    def kill_executors(self, number: int) -> int:
        """Ends the executors of a worker with SIGKILL, their Pythons too."""
        return self.workers[number].kill_executors()

    def kill_worker(self, number: int) -> None:
        """Ends a worker with SIGKILL and everything that it runs."""
        self.workers[number].kill()

    def stop(self) -> None:
        """Ends everything; stopping twice does nothing."""
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.stop()
        self._master.stop()


def spark_home() -> Path:
    """The folder of the installed pyspark, which is a whole Spark; found without importing it."""
    found = importlib.util.find_spec("pyspark")
    if found is None or not found.submodule_search_locations:
        raise ServerError("program_missing", "Spark is not installed. Run: pip install pyspark.")
    return Path(found.submodule_search_locations[0])


def _descendants(pid: int) -> dict[int, str]:
    """The processes that a process has started, and that those have, with the time at which each was started."""
    found: dict[int, tuple[int, str]] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            parent, started = _stat(int(process.name))
            if started:
                found[int(process.name)] = parent, started
    below: dict[int, str] = {}
    more = {pid}
    while more:
        more = {child for child, (parent, _) in found.items() if parent in more}
        below |= {child: found[child][1] for child in more}
    return below


def _stat(pid: int) -> tuple[int, str]:
    """The parent of a process and when it was started; no time when it is gone or only waits for its parent to notice."""
    try:
        state, parent, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, ""
    return int(parent), "" if state == "Z" else rest[17]


def _wait_until_gone(processes: dict[int, str]) -> None:
    """Waits for processes to end, and ends those that do not; a number that was given to another process is not touched."""
    deadline = time.monotonic() + GONE_S
    while left := {pid: started for pid, started in processes.items() if _stat(pid)[1] == started}:
        if time.monotonic() > deadline:
            for pid in left:
                _kill(pid)
        time.sleep(0.02)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
