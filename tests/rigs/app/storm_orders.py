"""Orders: where the processes of an application under test are to die, sleep or fail, in a file that all of them look into.

    {"point": "views: changes appended", "left": 2, "what": "kill"}      the second to come by there is killed

`install` puts it behind every named step: of the log, of Spark's sink, of the state of operators, of views and of folders. The
processes that Spark starts are reached by a module `sitecustomize` on their path (`site_folder`), which Python imports before anything
else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Literal

from headwater.model.points import check_point, points_of, watch

ROOT = Path(__file__).parents[3]
VARIABLE = "HEADWATER_STORM"
DRIVER = "app_storm.py"
BY_SOURCE = "cleaned"

What = Literal["kill", "kill all", "raise", "stop"]
"""Only the process itself, everything of its session, an error in place of a crash, or a sleep from which somebody else wakes it."""

COMMIT_STEPS = [
    "transaction: staged", "transaction: synced", "commit: intended", "commit: written", "commit: recorded",
    "stage: marker published", "commit: published one", "commit: done",
]  # fmt: skip


_TASK = "frame: task staged"
"""The one step of a stage that the driver commits which a task comes by."""


def sink_steps() -> list[str]:
    """The steps of Spark's own sink, from a task that begins to everything swept; in Python workers."""
    return points_of("stream:")


def task_steps() -> list[str]:
    """The steps of an operator's state, and of a task whose rows the driver commits; in Python workers."""
    return [*points_of("state:"), _TASK]


def driver_steps() -> list[str]:
    """The steps of streams, views and folders; in the driver. What happens once in a view's life has rounds of its own."""
    seldom = (
        "made", "registered", "old generation fenced", "difference known", "swapped in the log", "swapped in the store",
        "catching up",
    )  # fmt: skip
    found = [*points_of("views:", "files:"), *points_of("frame:")]
    return [step for step in found if step != _TASK and not step.endswith(seldom)]


def order(folder: Path, point: str, what: What, *, nth: int = 1, who: str = "") -> None:
    """Gives an order to the processes that run in a folder: to `who`, the driver or a worker, or whoever comes first."""
    path = folder / "orders"
    path.with_suffix(".new").write_text(
        json.dumps({"point": check_point(point), "left": nth, "what": what, "who": who})
    )
    path.with_suffix(".new").rename(path)


def is_done(folder: Path) -> bool:
    """Whether the order was carried out."""
    return not (folder / "orders").exists()


def withdraw(folder: Path) -> None:
    """Takes an order back."""
    (folder / "orders").unlink(missing_ok=True)


def site_folder(folder: Path) -> Path:
    """A folder for PYTHONPATH: processes that have it there, and the variable set, obey."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text("from tests.rigs.app import storm_orders\n\nstorm_orders.install()\n")
    return site


def environment(folder: Path) -> dict[str, str]:
    """What a process that is to obey is started with."""
    path = os.pathsep.join(map(str, (site_folder(folder), ROOT / "src", ROOT)))
    return {**os.environ, "PYTHONPATH": path, VARIABLE: str(folder)}


def install() -> None:
    """Lets this process look for orders at every step, as soon as it has loaded what has steps; Spark waits for it to start."""
    folder = Path(os.environ[VARIABLE])

    watch(partial(obey, folder))

    def patch_sink(module: Any) -> None:
        _tell_what_became_of(module.StreamWriter, folder)

    def patch_launch(module: Any) -> None:
        """One stage goes out by the data source, as in any Spark program; the others by the driver."""
        made = module.Launch._writer

        def writer(self: Any, log: Any, stage: Any, *more: Any) -> Any:
            return None if stage.name == BY_SOURCE else made(self, log, stage, *more)

        module.Launch._writer = writer

    sys.meta_path.insert(
        0,
        _Patching(
            {
                "headwater.app.launch": patch_launch,
                "headwater.processing.sink.spark_sink": patch_sink,
            }
        ),
    )


class _Patching(MetaPathFinder):
    """Changes modules when they have been loaded."""

    def __init__(self, patches: dict[str, Callable[[Any], None]]) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        patch = self._patches.pop(name, None)
        spec = None if patch is None else PathFinder.find_spec(name, path, target)
        if patch is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_patch(module: Any) -> None:
            load(module)
            patch(module)

        spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec


def _tell_what_became_of(writer: type, folder: Path) -> None:
    """A commit that was woken from a sleep says how it ended: nobody else is left to be told."""
    commit = writer.commit  # type: ignore[attr-defined]

    def told(self: Any, *given: Any) -> None:
        end = "committed"
        try:
            commit(self, *given)
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
            raise
        finally:
            if (folder / "asleep" / str(os.getpid())).exists():
                (folder / "woken").write_text(end)

    writer.commit = told  # type: ignore[attr-defined]


def obey(folder: Path, point: str) -> None:
    """Carries out the order that there is, once; it is counted down by whoever comes by."""
    path = folder / "orders"
    try:
        said = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return
    who = "driver" if Path(sys.argv[0]).name == DRIVER else "worker"
    if said["point"] != point or said["who"] not in ("", who):
        return
    if said["left"] > 1:
        order(folder, point, said["what"], nth=said["left"] - 1, who=said["who"])
        return
    try:
        path.rename(folder / "obeyed")
    except FileNotFoundError:  # somebody else was first
        return
    if said["what"] == "raise":
        raise OSError(f"ordered to fail at {point!r}")
    if said["what"] == "stop":
        fall_asleep(folder)
        return
    if said["what"] == "kill all":
        kill_session(os.getsid(0))
    os.kill(os.getpid(), signal.SIGKILL)


def fall_asleep(folder: Path) -> None:
    """Stops this process, in a session of its own: the kernel wakes, and ends, whoever is stopped when its session goes."""
    (folder / "asleep").mkdir(exist_ok=True)
    os.setsid()
    (folder / "asleep" / str(os.getpid())).touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def asleep(folder: Path) -> list[int]:
    """The processes that sleep."""
    return [int(each.name) for each in (folder / "asleep").iterdir()] if (folder / "asleep").exists() else []


def kill_session(session: int) -> None:
    """Kills every process of a session but the caller; returns when they are gone."""
    deadline = time.monotonic() + 20
    while left := [process for process in session_of(session) if process != os.getpid()]:
        assert time.monotonic() < deadline, f"{left} outlived SIGKILL"
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def session_of(session: int) -> dict[int, str]:
    """The processes of a session that have not ended, with their command lines."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == session and (
                command := (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            ):
                found[int(entry.name)] = command
        except OSError:
            continue
    return found
