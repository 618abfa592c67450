"""A round of a queue under fire: workers that write down what they do, their murderer, and an oracle over what was written.

Eight processes lease from one queue while events are appended, some on slow disks. By the round's seed they are killed with
SIGKILL at any moment or at a chosen point, and stopped with SIGSTOP beyond their leases. The oracle knows only the accounts, the
topic and the dead letters; it shares no code with the queue.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import headwater as hw
from headwater.log.queue.lease import grant_of
from headwater.model.errors import LeaseExpired
from headwater.testing.crash.disk import CrashingDisk, SlowSyncDisk
from headwater.testing.crash.points import queue_points
from tests.rigs.children import Child

WORKERS = 8
EVENTS = 480
LEASE_S = 0.3
DELIVERIES_MAX = 4
KEYS = 24
STRIKES_MIN = 12
SYNC_DELAYS_MS = (0.0, 0.0, 5.0)
FIRST_DICE = (1.0, 0.0, 0.3, 0.0, 0.3)
FOR_EVER = float("inf")
POISON, SCHEDULED = "poison", "scheduled"

Place = tuple[int, int]


class Account:
    """What one worker says it does: a line for each step, with the operating system before the next step begins."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(self, what: str, **facts: Any) -> None:
        os.write(self._handle, json.dumps({"what": what, "at": time.time(), **facts}).encode() + b"\n")


def work(folder: str, path: Path, seed: int, *, keyed: bool, point: str | None, nth: int, sync_delay_ms: float) -> None:
    """A worker on a log in a folder, which may kill itself at a point, or has a slow disk."""
    disk = SlowSyncDisk(sync_delay_ms) if point is None else CrashingDisk(point, nth)
    with hw.open_log(folder, disk=disk) as log, open_queue(log, keyed=keyed) as queue:
        work_on(queue, path, seed, done=f"{folder}.done")


def work_on(queue: Any, path: Path, seed: int, *, done: str, delays: Sequence[float] = (0, 0.02)) -> None:
    """Leases, and acknowledges, gives back, hangs or fails by its dice, until it is killed or told to end."""
    chance = random.Random(seed)
    account = Account(path)
    while not os.path.exists(done):
        begun = time.time()
        leases = queue.lease(events_max=chance.choice([1, 5, 40]), timeout_s=0.05)
        ended = time.time()
        for lease in leases:
            place = [lease.event.partition, lease.event.offset]
            until = grant_of(lease).deadline / 1e6
            account.say("lease", place=place, begun=begun, at_us=ended, until=until, deliveries=lease.deliveries)
        for lease in leases:
            place = [lease.event.partition, lease.event.offset]
            dice = chance.random()
            is_poison = lease.event.value["kind"] == POISON
            if is_poison or dice < 0.1:
                delay_s = 0.0 if is_poison else chance.choice(delays)
                settle(account, "nack", place, lambda lease=lease, delay_s=delay_s: lease.nack(delay_s=delay_s))
            elif dice < 0.13:
                account.say("left", place=place)
            else:
                settle(account, "ack", place, lambda lease=lease: queue.ack([lease]))
    account.say("closing", place=[-1, -1])


def settle(account: Account, what: str, place: list[int], step: Any) -> None:
    account.say(f"{what}ing", place=place)
    try:
        step()
    except LeaseExpired:
        account.say("late", place=place)
    else:
        account.say(f"{what}ed", place=place)


def open_queue(log: hw.Log, *, keyed: bool) -> Any:
    return log.queue(
        "tasks", group="g", lease_s=LEASE_S, deliveries_max=DELIVERIES_MAX, order="key" if keyed else "none"
    )


class Round:
    """One round in an empty folder."""

    lease_s = LEASE_S
    dead_letters_are_there_once = True

    def __init__(self, folder: Path, seed: int, *, phase_s: float = 1.0) -> None:
        self.folder = self.address = str(folder / "log")
        self._accounts = folder / "accounts"
        self._accounts.mkdir()
        self._chance = random.Random(seed)
        self._phase_s = phase_s
        self.keyed = bool(seed % 2)
        self._count = 0
        self._killed: dict[str, float] = {}
        self._alive: dict[str, Child[None]] = {}
        self.kills = self.stops = self.self_kills = 0

    def run(self) -> None:
        """Eight workers under fire, then as many as needed in peace until nothing is left."""
        with hw.open_log(self.folder, durability="os") as log:
            log.create_topic("tasks", "key STRING, n INT, kind STRING", key="key", partitions=3)
        try:
            for _ in range(WORKERS):
                self._start(may_die=True)
            self._under_fire()
        finally:
            Path(f"{self.folder}.done").touch()
            for child in self._alive.values():
                os.kill(child.pid, signal.SIGCONT)
            for name, child in self._alive.items():
                if os.WIFSIGNALED(child.wait()):
                    self._killed.setdefault(name, 0.0)
        self._drain()

    def _under_fire(self) -> None:
        deadline = time.monotonic() + self._phase_s
        sent, strikes, stopped = 0, 0, list[tuple[float, Child[None]]]()
        with hw.open_log(self.folder) as log:
            while time.monotonic() < deadline or sent < EVENTS or strikes < STRIKES_MIN:
                if sent < EVENTS:
                    log.append("tasks", [self._row(sent + n) for n in range(40)])
                    sent += 40
                for until, child in stopped:
                    if until <= time.monotonic() and child in self._alive.values():
                        os.kill(child.pid, signal.SIGCONT)
                stopped = [(until, child) for until, child in stopped if until > time.monotonic()]
                self._reap()
                name = self._chance.choice(list(self._alive))
                strikes += 1
                dice = FIRST_DICE[strikes] if strikes < len(FIRST_DICE) else self._chance.random()
                if dice < 0.2:
                    self._kill(name)
                    self._start(may_die=True)
                elif dice < 0.5:
                    self.stops += 1
                    os.kill(self._alive[name].pid, signal.SIGSTOP)
                    stopped.append((time.monotonic() + self._chance.choice([0.05, 1.5 * LEASE_S]), self._alive[name]))
                time.sleep(self._chance.uniform(0.01, 0.06))

    def _row(self, n: int) -> dict[str, Any]:
        kind = POISON if n % 37 == 5 else SCHEDULED if n % 11 == 3 else "plain"
        row: dict[str, Any] = {"key": f"k{n % KEYS}", "n": n, "kind": kind}
        if kind == SCHEDULED:
            due = int((time.time() + self._chance.uniform(0.05, 0.6)) * 1e6)
            row["_headers"] = {"_deliver_at": b"%d" % due}
        return row

    def _start(self, *, may_die: bool) -> None:
        self._count += 1
        name, seed = f"w{self._count}", self._chance.randrange(1 << 30)
        dies = may_die and self._chance.random() < 0.4
        point, nth = (self._chance.choice(queue_points()) if dies else None), self._chance.choice([1, 2, 6])
        path, delay_ms = self._accounts / name, self._chance.choice(SYNC_DELAYS_MS)
        self._alive[name] = Child(
            lambda: work(self.folder, path, seed, keyed=self.keyed, point=point, nth=nth, sync_delay_ms=delay_ms)
        )

    def _kill(self, name: str) -> None:
        self.kills += 1
        self._killed[name] = time.time()
        child = self._alive.pop(name)
        child.kill()

    def _reap(self) -> None:
        """Workers that killed themselves are replaced."""
        for name, child in list(self._alive.items()):
            if child._reaped is None and os.waitpid(child.pid, os.WNOHANG)[0]:
                child._reaped = signal.SIGKILL
                self._killed[name] = 0.0
                del self._alive[name]
                self.self_kills += 1
                self._start(may_die=True)

    def _drain(self) -> None:
        """One consumer in peace does everything that is left, and writes it down."""
        account = Account(self._accounts / "last")
        with hw.open_log(self.folder) as log, open_queue(log, keyed=self.keyed) as queue:
            while (depth := queue.depth()).ready + depth.leased + depth.scheduled:
                begun = time.time()
                for lease in queue.lease(timeout_s=1.0):
                    place = [lease.event.partition, lease.event.offset]
                    account.say("lease", place=place, begun=begun, at_us=time.time(), deliveries=lease.deliveries)
                    if lease.event.value["kind"] == POISON:
                        settle(account, "nack", place, lease.nack)
                    else:
                        settle(account, "ack", place, lambda lease=lease: queue.ack([lease]))

    # The oracle

    def check(self) -> None:
        """Raises at the first promise that was not kept."""
        with hw.open_log(self.address) as log, log.reader("tasks") as reader:
            events = {(e.partition, e.offset): e for e in reader.poll(events_max=10 * EVENTS, timeout_s=0)}
            letters = []
            if "tasks.dead" in log.topics():
                with log.reader("tasks.dead") as of_dead:
                    letters = of_dead.poll(events_max=10 * EVENTS, timeout_s=0)
        assert len(events) == EVENTS
        lines = self._lines()
        dead: dict[Place, float] = {}
        for letter in letters:
            headers = letter.headers
            place = (int(headers["_dead_partition"]), int(headers["_dead_offset"]))
            assert place not in dead or not self.dead_letters_are_there_once, f"{place} is twice among the dead letters"
            assert events[place].value == letter.value
            assert int(headers["_dead_deliveries"]) == DELIVERIES_MAX, f"{place}: {headers}"
            died = int(headers["_dead_at"]) / 1e6
            dead[place] = min(died, dead.get(place, died))
        by_place: dict[Place, list[dict[str, Any]]] = defaultdict(list)
        for line in sorted(lines, key=lambda line: line["at"]):
            by_place[tuple(line["place"])].append(line)
        for place, event in events.items():
            self._check_event(place, event, by_place[place], dead.get(place))
        self._check_never_two(lines, events)
        if self.keyed:
            self._check_order(by_place, events, dead)

    def _check_event(self, place: Place, event: hw.Event, lines: list[dict[str, Any]], died: float | None) -> None:
        acked = [line for line in lines if line["what"] == "acked"]
        maybe = [line for line in lines if line["what"] == "acking" and line["worker"] in self._killed]
        leases = [line for line in lines if line["what"] == "lease"]
        assert len(acked) <= 1, f"{place} was acknowledged twice: {lines}"
        assert acked or maybe or died is not None, f"{place} is lost: {lines}"
        assert not acked or died is None, f"{place} was acknowledged and is a dead letter: {lines}"
        assert event.value["kind"] != POISON or died is not None, f"{place} should be a dead letter: {lines}"
        numbers = [line["deliveries"] for line in leases]
        assert len(set(numbers)) == len(numbers) and max(numbers, default=1) <= DELIVERIES_MAX, f"{place}: {lines}"
        ends = [line["at"] for line in acked] + ([] if died is None else [died])
        if ends:
            assert all(line["begun"] <= min(ends) for line in leases), f"{place} came again when it was done: {lines}"
        if event.headers:
            due = int(event.headers["_deliver_at"]) / 1e6
            assert all(line["at"] >= due for line in leases), f"{place} came before {due}: {lines}"

    def _check_never_two(self, lines: list[dict[str, Any]], events: dict[Place, hw.Event]) -> None:
        """Inner intervals: from when the worker had the lease to when it began to settle it, or it surely had ended."""
        ends: dict[tuple[str, Place], list[float]] = defaultdict(list)
        last: dict[str, float] = {}
        closed: dict[str, float] = {}
        for line in sorted(lines, key=lambda line: line["at"]):
            last[line["worker"]] = line["at"]
            if line["what"] in ("acking", "nacking"):
                ends[line["worker"], tuple(line["place"])].append(line["at"])
            elif line["what"] == "closing":
                closed[line["worker"]] = line["at"]
        spans: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        for line in lines:
            if line["what"] == "lease":
                place, worker, start = tuple(line["place"]), line["worker"], line["at_us"]
                settled = [end for end in ends[worker, place] if end >= start]
                until = min(line["begun"] + self.lease_s, line.get("until", FOR_EVER))
                end = min([until, *settled[:1], closed.get(worker, FOR_EVER)])
                if worker in self._killed:
                    end = min(end, self._killed[worker] or last[worker])
                spans[events[place].key if self.keyed else place].append((start, end, worker))
        for what, some in spans.items():
            some = sorted(span for span in some if span[0] < span[1])
            for one, other in pairwise(some):
                assert one[1] <= other[0], f"two live leases of {what}: {one} and {other}"

    def _check_order(
        self, by_place: dict[Place, list[dict[str, Any]]], events: dict[Place, hw.Event], dead: dict[Place, float]
    ) -> None:
        """When an event is delivered, every earlier one of its key is done; the scheduled ones come when they come."""
        by_key: dict[str, list[Place]] = defaultdict(list)
        for place in sorted(events):
            if events[place].value["kind"] != SCHEDULED:
                by_key[events[place].key].append(place)
        for places in by_key.values():
            for earlier, later in pairwise(places):
                done = [line["at"] for line in by_place[earlier] if line["what"] == "acking"]
                if earlier in dead:
                    done.append(dead[earlier])
                first = min(line["at_us"] for line in by_place[later] if line["what"] == "lease")
                assert min(done) <= first, f"{later} came before {earlier} was done"

    def _lines(self) -> list[dict[str, Any]]:
        lines = []
        for file in self._accounts.iterdir():
            for raw in file.read_bytes().splitlines():
                lines.append(json.loads(raw) | {"worker": file.name})
        return lines
