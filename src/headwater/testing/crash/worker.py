"""The crash worker: a process that writes to or reads from a log until it is killed, and keeps its own account of it.

`python -m headwater.testing.crash.worker` is the nursery: it imports everything once, then forks a worker for each order it
reads from its standard input (a line of JSON, see `WorkerOrder`), so that a worker is there in a few milliseconds. It answers each
line with one of its own: the pid, or for the order `{}` the pids that have ended, with their status. Workers die with the
nursery, the nursery with whoever started it.

A worker's account is a file of JSON lines. A writer adds a line after every acknowledgement, a reader after every poll. All
workers make the log and its topics together; whoever is first has them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from random import Random
from typing import Any, Literal, NoReturn

import msgspec

from headwater.log.disk.disk import RealDisk
from headwater.log.log import Log, open_log
from headwater.model.errors import LogNotFound, NoAccess, TopicNotFound
from headwater.testing.crash.disk import CrashingDisk, RandomCrashDisk, of_boot

Role = Literal["plain", "lines", "transactions", "keeper", "reader", "looker"]

ANYWHERE = "anywhere"
ANYWHERE_PROBABILITY = 0.002
COLUMNS = "key STRING, worker STRING, batch BIGINT, row INT, size INT, text STRING, line BIGINT, transaction_size INT"
KEYS = ("a", "b", "c", "d", "e")
LINE_KEYS = 5
RESENT_LINES = 20
START_TIMEOUT_S = 20.0
TEMPORARY = "temporary"
TOPICS: dict[str, dict[str, Any]] = {
    "first": {"partitions": 2},
    "second": {"partitions": 1},
    "swift": {"partitions": 2, "durability": "os"},
}

_PR_SET_PDEATHSIG = 1


class WorkerOrder(msgspec.Struct, frozen=True):
    """What a worker is to do: which role, on which log, and where it is to die by itself, if anywhere."""

    name: str
    role: Role
    log: str
    account: str
    seed: int
    life: int
    boot: int
    point: str = ""
    nth: int = 1


def worker_disk(order: WorkerOrder) -> RealDisk:
    """The real disk, with the worker's death in it."""
    if order.point == ANYWHERE:
        return of_boot(RandomCrashDisk(order.seed * 1000 + order.life, ANYWHERE_PROBABILITY), order.boot)
    return of_boot(CrashingDisk(order.point, order.nth) if order.point else RealDisk(), order.boot)


class Account:
    """The worker's file: lines are written with one call; one that was cut when an earlier worker was killed is taken away."""

    def __init__(self, path: str) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        told = os.pread(self._handle, os.fstat(self._handle).st_size, 0)
        if not told.endswith(b"\n"):
            os.ftruncate(self._handle, told.rfind(b"\n") + 1)

    def add(self, *lines: dict[str, Any]) -> None:
        """Some lines at once."""
        os.write(self._handle, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


class Worker:
    """One worker, between its start and its death."""

    def __init__(self, order: WorkerOrder) -> None:
        self.order = order
        self.random = Random(f"{order.seed} {order.name} {order.life}")
        self.account = Account(order.account)
        self.batches = order.life * 1_000_000
        self.log = self._open()

    def work(self) -> NoReturn:
        """Goes on until the process is killed."""
        roles: dict[str, Callable[[], None]] = {
            "plain": self._append,
            "lines": self._send_lines,
            "transactions": self._transact,
            "keeper": self._keep,
            "reader": self._read,
            "looker": self._read,
        }
        act = roles[self.order.role]
        while True:
            act()

    def _open(self) -> Log:
        disk = worker_disk(self.order)
        if self.order.role not in ("reader", "looker"):
            log = open_log(self.order.log, disk=disk)
            for name, options in TOPICS.items():
                log.create_topic(name, COLUMNS, key="key", segment_bytes=16384, exist_ok=True, **options)
            return log
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                log = open_log(self.order.log, disk=disk, create=False, read_only=self.order.role == "looker")
                for name in TOPICS:
                    log.topic(name)
                return log
            except (LogNotFound, TopicNotFound, NoAccess):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    # What writers do

    def _append(self) -> None:
        topic = self.random.choice(("first", "first", "swift", "second"))
        rows = self._rows(self.random.randint(1, 4), key=self.random.choice(KEYS))
        self._acknowledge(topic, self.log.append(topic, rows))

    def _transact(self) -> None:
        size = self.random.randint(2, 6)
        rows = self._rows(size, transaction_size=size)
        cut = self.random.randint(1, size - 1)
        with self.log.transaction() as transaction:
            transaction.append("first", rows[:cut])
            transaction.append("second", rows[cut:])
        self._acknowledge_batch()

    def _keep(self) -> None:
        """Atomic appends over the partitions of one topic, and everything that is done to topics."""
        size = self.random.randint(2, 5)
        self.log.append("first", self._rows(size, transaction_size=size), atomic=True)
        self._acknowledge_batch()
        self.log.create_topic(TEMPORARY, COLUMNS, key="key", partitions=1, segment_bytes=4096, exist_ok=True)
        for _ in range(self.random.randint(1, 3)):
            self.log.append(TEMPORARY, self._rows(2, key="a"))
        if self.random.random() < 0.5:
            self.log.alter_topic("second", schema=f"{COLUMNS}, note STRING")
        for topic in TOPICS:
            self.log.seal(topic)
        self.log.delete_topic(TEMPORARY)

    def _send_lines(self) -> NoReturn:
        """Copies numbered lines, beginning some way before the last that is known to be there."""
        line = max(0, self._last_line() - RESENT_LINES)
        with self.log.producer(id=self.order.name, linger_ms=1.0) as producer:
            while True:
                last = line + self.random.randint(1, 8)
                for number in range(line, last):
                    row = self._row(0, 1, KEYS[number % LINE_KEYS], line=number)
                    producer.send("first", row, sequence=number)
                producer.flush()
                self.account.add({"worker": self.order.name, "lines": last})
                line = last

    def _last_line(self) -> int:
        with open(self.order.account, "rb") as file:
            lines = [json.loads(line) for line in file.read().splitlines()]
        return max((line["lines"] for line in lines if "lines" in line), default=0)

    def _rows(self, size: int, *, key: str | None = None, transaction_size: int | None = None) -> list[dict[str, Any]]:
        self.batches += 1
        keys = [key or self.random.choice(KEYS) for _ in range(size)]
        return [self._row(row, size, keys[row], transaction_size=transaction_size) for row in range(size)]

    def _row(
        self, row: int, size: int, key: str, *, line: int | None = None, transaction_size: int | None = None
    ) -> dict[str, Any]:
        number = self.batches if line is None else line
        return {
            "key": key,
            "worker": self.order.name,
            "batch": self.batches,
            "row": row,
            "size": size,
            "text": "x" * ((number * 31 + row * 7) % 300),
            "line": line,
            "transaction_size": transaction_size,
        }

    def _acknowledge(self, topic: str, offsets: dict[int, range]) -> None:
        for partition, span in offsets.items():
            place = {"topic": topic, "partition": partition, "first": span.start, "count": len(span)}
            self.account.add({"worker": self.order.name, "batch": self.batches, **place})

    def _acknowledge_batch(self) -> None:
        self.account.add({"worker": self.order.name, "batch": self.batches})

    # What readers do

    def _read(self) -> NoReturn:
        """Follows all topics from the first event; after each poll it writes down what it saw."""
        poll = 0
        with self.log.reader(list(TOPICS)) as reader:
            while True:
                events = reader.poll(events_max=100_000, timeout_s=0.1)
                if not events:
                    continue
                poll += 1
                life = f"{self.order.name}.{self.order.life}"
                lines = [
                    {
                        "reader": life,
                        "poll": poll,
                        "topic": event.topic,
                        "partition": event.partition,
                        "offset": event.offset,
                        "worker": event.value["worker"],
                        "batch": event.value["batch"],
                        "row": event.value["row"],
                        "line": event.value["line"],
                    }
                    for event in events
                ]
                self.account.add(*lines, {"reader": life, "polled": poll, "events": len(events)})


def run_worker(order: WorkerOrder) -> NoReturn:
    """The whole life of a worker, in a process of its own."""
    die_with_parent()
    try:
        Worker(order).work()
    except BaseException:  # noqa: BLE001 - the driver reads it in the account
        Account(order.account).add({"worker": order.name, "error": traceback.format_exc()})
    os._exit(1)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> int:
    """The nursery: a worker for each order, until there are no more."""
    _warm_up()
    die_with_parent()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    for line in sys.stdin.buffer:
        if line.strip() == b"{}":
            answers.write(msgspec.json.encode(_ended()) + b"\n")
            continue
        order = msgspec.json.decode(line, type=WorkerOrder)
        pid = os.fork()
        if pid == 0:
            os.dup2(null, 0)
            run_worker(order)
        answers.write(b"%d\n" % pid)
    return 0


def _warm_up() -> None:
    """Imports here, once, what a worker would import at its first event."""
    import_module("headwater.log.file.store")
    with open_log("memory://") as log:
        log.create_topic("any", COLUMNS, key="key")
        log.append("any", [{"key": "a"}])
        log.reader("any").poll()


def _ended() -> dict[int, int]:
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    raise SystemExit(main())
