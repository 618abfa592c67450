"""A storm: members of a group in processes of their own, some on slow disks, which are killed, stopped and started again.

Each worker writes a line of JSON for everything it was handed and everything it committed. The oracle reads those lines and the
topics; it knows nothing of how groups work.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Literal

import headwater as hw
from headwater.log.clients.consumer import Consumer
from headwater.model.errors import NotOwner, TimedOut, Unreachable
from headwater.testing.crash.disk import SlowSyncDisk
from tests.rigs.children import Child

Mode = Literal["auto", "manual", "transactions"]

GROUP = "g"
PARTITIONS = 4


class Storm:
    """One seeded round."""

    poll_interval_s = 0.25
    finish_s = 30.0
    batch_max = 60
    polled_max = 80
    pause_s = (0.01, 0.12)
    """Between two strikes."""
    sync_delays_ms: Sequence[float] = (0.0, 0.0, 5.0)
    """How slow the disk of a worker is; each has one of these."""

    def __init__(self, folder: Path, seed: int, mode: Mode, *, url: str | None = None, workers: int = 3) -> None:
        self.folder = folder
        self.url = url or str(folder / "log")
        self.random = Random(seed)
        self.mode = mode
        self.sent = 0
        self.lives = 0
        self.strikes: Counter[str] = Counter()
        self.stopped: dict[int, float] = {}
        self.log = hw.open_log(self.url)
        self.log.create_topic("in", "n INT", key="n", partitions=PARTITIONS)
        self.log.create_topic("out", "n INT", key="n", partitions=2)
        self.children = [self._start() for _ in range(workers)]

    def run(self, *, strikes: int) -> None:
        """Produces and strikes for a while, then lets the group finish."""
        try:
            for _ in range(strikes):
                self._produce()
                time.sleep(self.random.uniform(*self.pause_s))
                self._wake()
                self._restart_ended()
                self.random.choice((self._kill, self._kill, self._stop))()
            self._produce()
            ends = {number: offsets[-1] + 1 for number, offsets in self.stored().items() if offsets}
            deadline = time.monotonic() + self.finish_s
            while self.stopped or self.log.groups() != [GROUP] or not self._has_reached(ends):
                assert time.monotonic() < deadline, f"the group does not finish: {self.log.group(GROUP)}"
                self._wake()
                self._restart_ended()
                time.sleep(0.02)
        finally:
            for child in self.children:
                child.kill()

    def lines(self) -> list[dict[str, Any]]:
        """What the workers wrote down; a line that was cut by a death does not count."""
        found = []
        for path in sorted(self.folder.glob("*.jsonl")):
            whole = path.read_bytes().rpartition(b"\n")[0]
            found += [json.loads(line) for line in whole.splitlines()]
        return found

    def check(self) -> None:
        """Nothing skipped, no two owners in one generation, and in transactions everything exactly once."""
        lines = self.lines()
        errors = [line["error"] for line in lines if "error" in line]
        assert not errors, f"workers failed: {errors}"
        stored = self.stored()
        assert sum(map(len, stored.values())) == self.sent, f"{self.sent} events were sent, others are stored"
        handed, committed, members = defaultdict(list), defaultdict(list), defaultdict(set)
        for line in lines:
            turn, there = (line["partition"], line["generation"]), stored[line["partition"]]
            members[turn].add(line["member"])
            if "first" in line:
                assert line["first"] in there and line["end"] - 1 in there, f"nothing is stored there: {line}"
                handed[turn].append((bisect_left(there, line["first"]), bisect_left(there, line["end"])))
            else:
                committed[turn].append(bisect_left(there, line["committed"]))
        assert all(len(found) == 1 for found in members.values()), "two owners in one generation"
        for partition, there in stored.items():
            reached = safe = 0
            for generation in sorted(number for place, number in handed if place == partition):
                spans = handed[partition, generation]
                assert safe <= spans[0][0] <= reached, f"a new owner began at {spans[0][0]}, not in {safe} to {reached}"
                for (_, before), (first, _) in pairwise(spans):
                    assert first <= before, "an owner skipped events"
                reached = max(reached, *(last for _, last in spans))
                safe = max([safe, *committed[partition, generation]])
            assert reached == len(there), "the group skipped the last events"
        if self.mode == "transactions":
            found = Counter(self.output())
            assert found == Counter(range(self.sent)), "the output is not each input exactly once"

    def stored(self) -> dict[int, list[int]]:
        """The offsets of all events of each partition."""
        return {number: list(span) for number, span in self.log.offsets("in").items()}

    def output(self) -> list[int]:
        """What the transactions have made."""
        return [int(number) for number in self.log.read("out")["n"].to_pylist()]

    def _has_reached(self, ends: Mapping[int, int]) -> bool:
        committed = {part.partition: part.committed or 0 for part in self.log.group(GROUP).partitions}
        return all(committed.get(number, 0) >= end for number, end in ends.items())

    def _produce(self) -> None:
        count = self.random.randint(1, self.batch_max)
        self.log.append("in", [{"n": number} for number in range(self.sent, self.sent + count)])
        self.sent += count

    def _start(self) -> Child[None]:
        self.lives += 1
        path, seed = self.folder / f"{self.lives}.jsonl", self.random.random()
        return Child(lambda: self.work(str(path), Random(seed)))

    def work(self, account: str, random: Random) -> None:
        """A worker's life, in its own process."""
        work(
            self.url,
            account,
            self.mode,
            random,
            poll_interval_s=self.poll_interval_s,
            polled_max=self.polled_max,
            sync_delay_ms=random.choice(self.sync_delays_ms),
        )

    def _kill(self) -> None:
        number = self.random.randrange(len(self.children))
        self.stopped.pop(self.children[number].pid, None)
        self.children[number].kill()
        self.children[number] = self._start()
        self.strikes["kill"] += 1

    def _stop(self) -> None:
        """Stopped for longer than it may be silent; the others take over, unless it held a lock in that moment."""
        child = self.random.choice(self.children)
        os.kill(child.pid, signal.SIGSTOP)
        stop_s = self.poll_interval_s * 1.5
        self.stopped[child.pid] = time.monotonic() + stop_s
        self.strikes["stop"] += 1
        # Not only by `_wake`: if it holds a lock, this process may be waiting for that.
        timer = threading.Timer(stop_s, self._go_on, (child.pid,))
        timer.daemon = True
        timer.start()

    def _go_on(self, pid: int) -> None:
        if pid in self.stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _wake(self) -> None:
        for pid in [pid for pid, until in self.stopped.items() if time.monotonic() > until]:
            self._go_on(pid)
            del self.stopped[pid]

    def _restart_ended(self) -> None:
        for number, child in enumerate(self.children):
            if not child.is_running():
                self.stopped.pop(child.pid, None)
                self.children[number] = self._start()
                self.strikes["leave"] += 1


def work(
    log: str,
    account: str,
    mode: Mode,
    random: Random,
    *,
    poll_interval_s: float,
    polled_max: int,
    sync_delay_ms: float,
) -> None:
    """It polls, writes down, commits, and leaves of its own accord now and then."""
    handle = os.open(account, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(consumer: Consumer, **facts: Any) -> None:
        share = consumer._shares.by_place["in", facts["partition"]]
        line = facts | {"member": share.owner.member, "generation": share.owner.generation}
        os.write(handle, json.dumps(line).encode() + b"\n")

    try:
        with (
            hw.open_log(log, **({"disk": SlowSyncDisk(sync_delay_ms / 1000)} if sync_delay_ms else {})) as mine,
            mine.consumer(
                "in",
                group=GROUP,
                commit="auto" if mode == "auto" else "manual",
                poll_interval_s_max=poll_interval_s,
            ) as consumer,
        ):
            for _ in range(random.randint(20, 200)):
                step(mine, consumer, mode, random, write, polled_max=polled_max)
    except BaseException as error:  # noqa: BLE001 - the oracle reads it
        os.write(handle, json.dumps({"error": repr(error)}).encode() + b"\n")
    return


def step(log: hw.Log, consumer: Consumer, mode: Mode, random: Random, write: Any, *, polled_max: int) -> None:
    """One poll and what follows from it."""
    events = consumer.poll(events_max=random.randint(1, polled_max), timeout_s=0.05)
    spans: dict[int, list[int]] = defaultdict(list)
    for event in events:
        spans[event.partition].append(event.offset)
    for partition, offsets in spans.items():
        write(consumer, partition=partition, first=offsets[0], end=offsets[-1] + 1)
    if random.random() < 0.2:
        time.sleep(random.uniform(0, 0.02))
    try:
        if mode == "manual":
            consumer.commit()
        elif mode == "transactions" and events:
            with log.transaction() as transaction:
                transaction.append("out", [event.value for event in events])
                transaction.commit_offsets(consumer)
    except (NotOwner, TimedOut, Unreachable):  # stopped for so long that the brokers do not wait for it: it comes again
        return
    if mode != "auto":
        for partition, offsets in spans.items():
            write(consumer, partition=partition, committed=offsets[-1] + 1)
