"""Queues of a log that may only be read: looked at as by their owner, and never changed."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headwater as hw
from headwater.cli.main import main
from headwater.log.log import Log
from headwater.log.queue.depth import Depth
from headwater.log.queue.queue import Queue
from headwater.log.queue.window import CAPACITY_MIN
from headwater.model.errors import Damaged, NoAccess, StorageError
from headwater.testing.contracts.case import refused
from headwater.testing.crash.disk import CrashingDisk
from tests.rigs.children import NOBODY, Child, in_child
from tests.rigs.log.folders import open_folders

NEEDS_TWO_USERS = pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can reach."""
    yield from open_folders()


@pytest.fixture
def owner(folder: Path) -> Iterator[Log]:
    """A log with a queue of which one event is done, one dead, one out and one scheduled; the rest is ready."""
    with hw.open_log(str(folder)) as log:
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"done", b"poison", b"out", b"left", b"right"])
        with log.queue("tasks", lease_s=600) as queue:
            first = queue.lease(events_max=3)
            queue.send(b"later", delay_s=3600)
            first[0].ack()
            first[1].reject("cannot be read")
            queue.flush()
            yield log


def fingerprint(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def looked(log: Log) -> tuple[Depth, dict[int, int], list[tuple[bytes, str, int]], list[bytes]]:
    """What a handle sees of the queue."""
    with log.queue("tasks") as queue:
        entries = [(entry.event.value, entry.state, entry.deliveries) for entry in queue.browse()]
        return queue.depth(), queue.floors(), entries, [letter.value for letter in queue.dead()]


SEEN = (
    Depth(ready=2, leased=1, scheduled=1, dead=1),
    {0: 2},
    [(b"out", "leased", 1), (b"left", "ready", 0), (b"right", "ready", 0), (b"later", "scheduled", 0)],
    [b"poison"],
)


def test_a_queue_of_a_read_only_log_is_looked_at_and_not_one_byte_changes(owner: Log, folder: Path) -> None:
    """The same is seen as by its owner, also before anybody has looked at its dead letters, and what comes later too."""
    before = fingerprint(folder)
    with hw.open_log(str(folder), read_only=True) as log:
        assert looked(log) == SEEN
        assert fingerprint(folder) == before
        assert looked(owner) == SEEN
        with log.queue("tasks") as looking, owner.queue("tasks") as queue:
            queue.ack(queue.lease(events_max=1))
            owner.append("tasks", [b"new"])
            assert [entry.event.value for entry in looking.browse()] == [b"out", b"right", b"later", b"new"]


def test_what_changes_a_queue_of_a_read_only_log_is_refused(owner: Log, folder: Path) -> None:
    """Each in a sentence that says how it would be allowed."""
    before = fingerprint(folder)
    changes: list[Callable[[Queue], object]] = [
        lambda queue: queue.lease(timeout_s=0),
        lambda queue: queue.redrive(),
        lambda queue: queue.seek("earliest"),
        lambda queue: queue.recall([]),
        lambda queue: queue.send(b"x"),
    ]
    with hw.open_log(str(folder), read_only=True) as log:
        with log.queue("tasks") as queue:
            for change in changes:
                with pytest.raises(StorageError, match="read-only") as caught:
                    change(queue)
                assert caught.value.code == NoAccess.code and "may write" in caught.value.advice
        with refused(NoAccess, "read-only"):
            log.delete_queue("tasks")
    assert fingerprint(folder) == before


def test_a_queue_nobody_has_opened_looks_as_it_would_when_it_is_made(owner: Log, folder: Path) -> None:
    """And is not made by looking."""
    with hw.open_log(str(folder), read_only=True) as log:
        with log.queue("tasks", group="others", order="key") as queue:
            assert queue.depth() == Depth(ready=5, leased=0, scheduled=1, dead=0)
            assert queue.floors() == {0: 0}
        assert [made["group"] for made in log.store.queues()] == ["default"]


def test_a_window_that_grew_is_looked_at(folder: Path) -> None:
    """Whatever its size; one that is damaged is named."""
    with hw.open_log(str(folder), durability="os") as owner:
        owner.create_topic("tasks", partitions=1)
        owner.append("tasks", [b"%d" % number for number in range(3 * CAPACITY_MIN)])
        with owner.queue("tasks", lease_s=600) as queue, hw.open_log(str(folder), read_only=True) as log:
            leases = queue.lease(events_max=2 * CAPACITY_MIN)
            queue.ack(leases[1:])
            with log.queue("tasks") as looking:
                assert looking.depth() == Depth(ready=CAPACITY_MIN, leased=1, scheduled=0, dead=0)
                path = folder / "queues/default/tasks/0.window"
                path.write_bytes(path.read_bytes()[:-8])
                with refused(Damaged, "0.window"):
                    looking.depth()


@pytest.mark.parametrize(("point", "left"), [("queue: unit begun", 3), ("queue: unit committed", 1)])
def test_a_unit_of_work_of_a_dead_process_is_seen_as_far_as_it_was_committed(
    folder: Path, point: str, left: int
) -> None:
    """Its acknowledgements count when its events do, although nobody has told the window."""
    with hw.open_log(str(folder)) as owner:
        owner.create_topic("tasks", partitions=1)
        owner.create_topic("done", partitions=1)
        owner.append("tasks", [b"a", b"b", b"c"])

    def work() -> None:
        log = hw.open_log(str(folder), disk=CrashingDisk(point))
        leases = log.queue("tasks").lease(events_max=2)
        with log.transaction() as tx:
            tx.append("done", [b"a and b"])
            tx.ack(leases)

    Child(work).wait()
    before = fingerprint(folder)
    with hw.open_log(str(folder), read_only=True) as log, log.queue("tasks") as queue:
        assert len(queue.browse()) == left
    assert fingerprint(folder) == before


# Another user


@NEEDS_TWO_USERS
def test_a_user_who_may_only_read_sees_what_the_owner_sees(owner: Log, folder: Path) -> None:
    """While the owner has leases out, and without a right to write anywhere in the folder."""

    def use() -> object:
        with hw.open_log(str(folder), read_only=True) as log:
            with log.queue("tasks") as queue, refused(NoAccess, "read-only"):
                queue.lease(timeout_s=0)
            return looked(log)

    assert in_child(use, user=NOBODY) == SEEN


COMMANDS = [["list"], ["show", "tasks"], ["peek", "tasks"], ["peek", "tasks", "--json"], ["dead", "tasks"]]


@NEEDS_TWO_USERS
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_the_commands_that_look_print_the_same_for_a_user_who_may_only_read(
    owner: Log, folder: Path, arguments: list[str]
) -> None:
    """They change nothing, so they need no right to change anything."""
    for_owner = called(folder, *arguments)
    assert for_owner[0] == 0, for_owner
    before = fingerprint(folder)
    assert in_child(lambda: called(folder, *arguments), user=NOBODY) == for_owner
    assert fingerprint(folder) == before


@NEEDS_TWO_USERS
@pytest.mark.parametrize("arguments", [["redrive", "tasks"], ["delete", "tasks", "--yes"]], ids=" ".join)
def test_the_commands_that_change_are_refused_to_a_user_who_may_only_read(
    owner: Log, folder: Path, arguments: list[str]
) -> None:
    """With the code, and what would help."""
    called(folder, "list")  # loads every module while they may be read
    code, out, err = in_child(lambda: called(folder, *arguments), user=NOBODY)
    assert (code, out) == (1, ""), err
    assert "error [no_access]" in err and "read-only" in err and "the permissions of the log's folder" in err


def called(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """What `headwater queues …` ends with and prints, in this process."""
    out, err, before = io.TextIOWrapper(io.BytesIO()), io.StringIO(), sys.argv
    sys.argv = ["headwater", "queues", *arguments, "--log", str(folder)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    out.seek(0)
    return int(ended.value.code or 0), out.read(), err.getvalue()
