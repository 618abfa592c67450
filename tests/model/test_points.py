"""Points: each one is declared once and reached by some code, and a name that is none is an error wherever a test gives one."""

from __future__ import annotations

import ast
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headwater
from headwater.log.disk.disk import RealDisk
from headwater.model.errors import InvalidInput
from headwater.model.points import (
    DISK_POINTS,
    POINTS,
    PROCESS,
    PROCESS_POINTS,
    check_point,
    points_of,
    watch,
    watched,
)
from headwater.testing import CrashingDisk, RecordingDisk, SimDisk
from headwater.testing.crash.points import at, kill_at
from tests.rigs.app import storm_orders
from tests.rigs.children import Child
from tests.rigs.processing import spark_writers

SOURCE = Path(headwater.__file__).parent
REPLACING = SOURCE / "log" / "disk" / "atomic_file.py"
"""Makes its points of the name that its callers give, or of its default."""


def reached() -> tuple[set[str], set[str]]:
    """The points that the source reaches: through a disk, and through the process."""
    disk, process = set[str](), set[str]()
    for path in SOURCE.rglob("*.py"):
        if "testing" in path.relative_to(SOURCE).parts:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        handed_on = {call for node in ast.walk(tree) if _is_reach(node) for call in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node not in handed_on:
                found = process if _is_process(node) else disk
                found.update(_points_of_call(node, path))
    return disk, process


def _is_reach(node: ast.AST) -> bool:
    """Whether this is a method `reach`, which hands on what it is given."""
    return isinstance(node, ast.FunctionDef) and node.name == "reach"


def _is_process(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "PROCESS"


def _points_of_call(call: ast.Call, path: Path) -> Iterator[str]:
    """A point that is reached, or the two of a file that is replaced, whose beginning is given with the file."""
    begins = [word.value for word in call.keywords if word.arg == "point"]
    if not begins and isinstance(call.func, ast.Name) and call.func.id == "replace_file":
        begins = [ast.Constant("replace:")]
    reaches = isinstance(call.func, ast.Attribute) and call.func.attr == "reach" and path != REPLACING
    for begin in begins:
        if ast.unparse(begin) != "point":  # handed on
            yield from (f"{_text(begin, path)} {step}" for step in ("written", "named"))
    if reaches:
        yield _text(call.args[0], path)


def _text(given: ast.expr, path: Path) -> str:
    assert isinstance(given, ast.Constant), f"{path}:{given.lineno} gives a point that is no plain text"
    return str(given.value)


def test_the_code_reaches_the_declared_points_and_no_others() -> None:
    disk, process = reached()
    assert disk == set(DISK_POINTS)
    assert process == set(PROCESS_POINTS)


def test_each_point_is_declared_once_with_what_has_happened() -> None:
    assert not DISK_POINTS.keys() & PROCESS_POINTS.keys()
    source = (SOURCE / "model" / "points.py").read_text(encoding="utf-8")
    for name, what in POINTS.items():
        subject, _, happened = name.partition(": ")
        assert subject and happened and name == name.lower(), name
        assert what[0].isupper() and what.endswith("."), what
        assert source.count(f'    "{name}": ') == 1, name


def test_an_unknown_name_is_refused_and_the_nearest_one_named() -> None:
    with pytest.raises(
        InvalidInput, match=r"The crash point 'append.written' does not exist. The nearest is 'append: written'"
    ):
        check_point("append.written")
    assert check_point("append: written") == "append: written"


@pytest.mark.parametrize(
    "give",
    [
        lambda point: SimDisk(0).crash_at("p", point),
        lambda point: SimDisk(0).interrupt_at("p", point),
        lambda point: SimDisk(0).process("p").reach(point),
        lambda point: RecordingDisk().reach(point),
        CrashingDisk,
        kill_at,
        lambda point: storm_orders.order(Path("/nowhere"), point, "kill"),
        lambda point: spark_writers.order(Path("/nowhere"), point, nth=1),
    ],
)
def test_everything_that_takes_a_name_checks_it(give: Callable[[str], object]) -> None:
    with pytest.raises(InvalidInput, match="append: written"):
        give("append.written")


@pytest.mark.parametrize("give", [lambda point: SimDisk(0).crash_at("p", point), CrashingDisk])
def test_a_disk_refuses_points_that_no_disk_reaches(give: Callable[[str], object]) -> None:
    """It would never strike there."""
    with pytest.raises(InvalidInput, match="kill_at"):
        give("views: changes appended")


def test_who_watches_hears_of_disks_and_of_the_process() -> None:
    heard: list[str] = []
    disk = RealDisk()
    with watched(heard.append):
        disk.reach("sync: done")
        PROCESS.reach("sink: begun")
        with pytest.raises(InvalidInput, match="views: topic made"):
            PROCESS.reach("views: topic is made")
    disk.reach("sync: done")
    PROCESS.reach("sink: begun")
    assert heard == ["sync: done", "sink: begun"]


def test_one_that_watches_inside_another_gives_way_at_its_end() -> None:
    outer, inner = list[str](), list[str]()
    with watched(outer.append):
        with watched(inner.append):
            PROCESS.reach("sink: begun")
        PROCESS.reach("sink: committed")
        watch(None)
        PROCESS.reach("sink: begun")
    assert (outer, inner) == (["sink: committed"], ["sink: begun"])


def test_what_a_watcher_raises_comes_out_of_the_code() -> None:
    def refuse() -> None:
        raise InterruptedError

    with watched(at("sink: begun", refuse, nth=2)):
        PROCESS.reach("sink: begun")
        PROCESS.reach("sink: committed")
        with pytest.raises(InterruptedError):
            PROCESS.reach("sink: begun")
        PROCESS.reach("sink: begun")


def test_a_process_kills_itself_at_a_point() -> None:
    def work() -> None:
        kill_at("sink: begun", nth=2)
        PROCESS.reach("sink: begun")
        PROCESS.reach("sink: committed")
        PROCESS.reach("sink: begun")

    assert os.WTERMSIG(Child(work).wait()) == signal.SIGKILL


def test_points_are_chosen_by_how_their_names_begin() -> None:
    assert points_of("state:", "redis:") == ["state: drafted", "state: saved", "redis: chunk written"]
