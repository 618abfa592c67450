"""The test of an application: it runs on a temporary file log, in processes of its own that are killed where the test says so.

    with AppTest("app.py") as test:
        test.feed("clicks", [click, click, CRASH, click])
        test.run()
        assert test.rows("per_page") == [{"page": "/", "count": 3}]

Nothing of what the script says about places counts: log, state and views lie in a folder that is gone afterwards, which is also the
working directory (`test.folder`), so a sink to "./warehouse" writes there. The application is sent to its process by value, as
Spark sends functions to its workers; what it imports is imported there again.

Thread-safety: none; one thread uses a test.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from headwater.app.app import App, load_app
from headwater.app.declaration import make_declared
from headwater.log.log import Log, open_log
from headwater.model.errors import HeadwaterError, InvalidApp, InvalidInput, TimedOut
from headwater.processing.graph.graph import StageNode
from headwater.processing.stages.status import AppStatus
from headwater.sinks.files import FileSink, is_folder

MASTER = "local[2]"
CONF = {"spark.sql.shuffle.partitions": "2"}
TIMEOUT_S = 300.0

_LOOK_S = 0.002
_ENDED_S = 20.0
_TOLD_LINES = 30


class Crash(msgspec.Struct, frozen=True):
    """Among the events of a feed: here everything of the application is killed (SIGKILL), as soon as a batch is written.

    That is the worst moment: the batch with the events before it is in the log, and Spark's checkpoint does not know. `after`
    names the stage whose batch it is; without it, the first that writes one.
    """

    after: str | None = None


CRASH = Crash()
"""A crash after the first batch that any stage writes."""


class AppTest:
    """One application on a log of its own, inside `with`.

    `app` is a script, an `hw.App`, or a function that makes one. `master` and `conf` are Spark's, `timeout_s` is for each start.
    """

    def __init__(
        self,
        app: App | str | os.PathLike[str] | Callable[[], App],
        *,
        master: str = MASTER,
        conf: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._given = app
        self._master = master
        self._conf = {**CONF, **(conf or {})}
        self._timeout_s = timeout_s
        self._waiting: list[tuple[str, Sequence[Any]] | Crash] = []
        self._life: _Life | None = None

    def __enter__(self) -> Self:
        self._temporary = tempfile.TemporaryDirectory(prefix="headwater-test-")
        self.folder = Path(self._temporary.name)
        self.log: Log = open_log(self.folder / "log")
        try:
            self.app = made(self._given).moved(self.folder / "log", master=self._master, conf=self._conf)
            for node in self.app.graph.topics.values():
                make_declared(self.log, node)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._life is not None:
            self._life.kill()
        self.log.close()
        self._temporary.cleanup()

    def feed(self, topic: str, rows: Any) -> None:
        """Gives events to a topic: rows as `log.append` takes them, or a list of dicts with `CRASH` in some places.

        What comes before the first crash is in the log at once, the rest when `run` has come so far.
        """
        self.log.topic(topic)
        pieces: Iterable[Any] = _pieces(rows) if isinstance(rows, list | tuple) else [rows]
        for piece in pieces:
            if isinstance(piece, Crash):
                self.app.graph.check_names({piece.after: None} if piece.after else {})
                self._waiting.append(piece)
            elif self._waiting:
                self._waiting.append((topic, piece))
            else:
                self.log.append(topic, piece)

    def run(self) -> AppStatus:
        """Runs the application over everything that was fed, with the crashes in their places, until nothing is left to do.

        Returns the last status. What the application refuses is raised; a stage that failed is `InvalidApp` with its error.
        """
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            if isinstance(step, Crash):
                self._run_and_crash(step)
            else:
                self.log.append(*step)
        self._life = _Life(self)
        status = self._life.ended(self._timeout_s)
        for stage in status.stages:
            if stage.state == "failed":
                raise InvalidApp(f"Stage {stage.name!r} failed: {stage.error}", advice="Fix the application.")
            assert stage.is_whole, f"Events of stage {stage.name!r} are unaccounted for: {stage}"
        return status

    def rows(self, view: str, where: Any = None) -> list[dict[str, Any]]:
        """The rows of a view, by key."""
        with self.app.views[view] as found:
            key = list(found.definition.key)
            return found.rows(where, order=key or None).to_pylist()

    def read(self, topic: str) -> list[dict[str, Any]]:
        """The events of a topic, partition by partition; the changes of a view are in `<view>.changes`."""
        return self.log.read(topic).to_pylist()

    def _run_and_crash(self, crash: Crash) -> None:
        with open_log(self.folder / "log", read_only=True) as log:
            before = self._written(log, crash.after)
            self._life = life = _Life(self)
            deadline = time.monotonic() + self._timeout_s
            while self._written(log, crash.after) == before:
                if not life.is_running:
                    life.ended(0.0)
                    raise InvalidInput(
                        f"Nothing was written before the crash{f' after {crash.after!r}' if crash.after else ''}.",
                        advice="Feed events before CRASH that reach the stage.",
                    )
                if time.monotonic() > deadline:
                    life.kill()
                    raise TimedOut(f"Nothing was written in {self._timeout_s:g} s.", advice=life.told)
                time.sleep(_LOOK_S)
            life.kill()

    def _written(self, log: Log, after: str | None) -> dict[str, object]:
        """What the stages have written last; a view that is built anew is a stage beside the old one."""
        stages = [stage for stage in self.app.graph.stages.values() if after in (None, stage.name)]
        owns = {f"{self.app.name}.{stage.name}" for stage in stages}
        names = [name for name in log.stages() if name in owns or name.rpartition(".")[0] in owns]
        written: dict[str, object] = {name: log.store.stage_state(name).last for name in names}
        written |= {stage.name: self._files(stage).last for stage in stages if _is_files(stage)}
        return {name: last for name, last in written.items() if last is not None}

    def _files(self, stage: StageNode) -> FileSink:
        scheme, is_url, path = stage.to.rpartition("://")
        return FileSink(f"{scheme}{is_url}{self.folder / path}", stage=stage.name)


class _Life:
    """One process that runs the application, in a session of its own: its JVM and its workers are in it too."""

    def __init__(self, test: AppTest) -> None:
        from headwater.processing.spark.serialization import pickled

        self._folder = test.folder
        self._outcome = test.folder / "outcome.pickle"
        self._outcome.unlink(missing_ok=True)
        functions = [stage.function for stage in test.app.graph.stages.values() if stage.function is not None]
        modules = {function.__module__ for function in functions} & sys.modules.keys()
        (test.folder / "app.pickle").write_bytes(pickled(test.app, [sys.modules[name] for name in modules]))
        with (test.folder / "output.txt").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headwater.testing.app_process", str(test.folder)],
                cwd=test.folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def told(self) -> str:
        """The last lines that it printed."""
        lines = (self._folder / "output.txt").read_text(errors="replace").splitlines()
        return "\n".join(["It printed:", *lines[-_TOLD_LINES:]])

    def ended(self, timeout_s: float) -> AppStatus:
        """What became of it; raises what it raised."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimedOut(f"The application did not finish in {timeout_s:g} s.", advice=self.told) from None
        self.kill()
        try:
            outcome = pickle.loads(self._outcome.read_bytes())
        except FileNotFoundError:
            status = self._process.returncode
            raise InvalidApp(f"The application's process ended with status {status}.", advice=self.told) from None
        if isinstance(outcome, HeadwaterError):
            raise outcome
        assert isinstance(outcome, AppStatus)
        return outcome

    def kill(self) -> None:
        """Ends everything of it at once; returns when all of it is gone."""
        deadline = time.monotonic() + _ENDED_S
        while (left := list(processes_of(self._process.pid))) and time.monotonic() < deadline:
            for process in left:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._process.poll()
            time.sleep(_LOOK_S)
        self._process.wait()


def made(given: App | str | os.PathLike[str] | Callable[[], App]) -> App:
    """The application that a test was given."""
    if isinstance(given, App):
        return given
    if isinstance(given, str | os.PathLike):
        return load_app(Path(given))
    app = given()
    if not isinstance(app, App):
        raise InvalidApp(f"{given!r} returned {app!r}, which is not an application.", advice="Return an hw.App.")
    return app


def processes_of(session: int) -> Iterator[int]:
    """The processes of a session that have not ended."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.getsid(int(entry)) == session and _state(entry) != "Z":
                    yield int(entry)
            except (ProcessLookupError, FileNotFoundError):
                continue


def _state(process: str) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def _pieces(rows: Sequence[Any]) -> Iterator[Any]:
    """The runs of rows between crashes, and the crashes."""
    run: list[Any] = []
    for row in rows:
        if isinstance(row, Crash):
            if run:
                yield run
            yield row
            run = []
        else:
            run.append(row)
    if run:
        yield run


def _is_files(stage: StageNode) -> bool:
    return stage.kind == "sink" and is_folder(stage.to)
