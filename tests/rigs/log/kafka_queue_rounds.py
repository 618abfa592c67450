"""A round of a queue on Kafka under fire: worker programs that are killed and stopped, checked by the oracle of `queue_rounds`.

    python kafka_queue_rounds.py <url> <account> <seed> <done>    # one worker

A worker is a program of its own, not a fork: Kafka's client has threads. Nobody can ask a share group what is left, so a round is
over when the accounts say that every event was acknowledged or is a dead letter.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import headwater as hw
from headwater.log.queue.lease import grant_of
from headwater.log.queue.queue import Queue
from tests.rigs.log.queue_rounds import (
    DELIVERIES_MAX,
    EVENTS,
    POISON,
    SCHEDULED,
    Account,
    Place,
    Round,
    settle,
    work_on,
)

WORKERS = 8
LEASE_S = 1.0
PATIENCE_S = 90.0
QUIET_S = 5.0
KILLS, STOPS = 3, 3


class KafkaRound(Round):
    """One round in an empty log."""

    lease_s = LEASE_S
    dead_letters_are_there_once = False

    def __init__(self, folder: Path, seed: int, *, url: str) -> None:
        super().__init__(folder, seed)
        self.address = url
        self.keyed = False
        self._done = folder / "done"
        self._programs: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        """Workers under fire, then one in peace until nothing is left."""
        with hw.open_log(self.address) as log:
            log.create_topic("tasks", "key STRING, n INT, kind STRING", key="key", partitions=3)
            try:
                for _ in range(WORKERS):
                    self._launch()
                self._fight(log)
            finally:
                self._done.touch()
                for name, program in self._programs.items():
                    program.send_signal(signal.SIGCONT)
                    with suppress(subprocess.TimeoutExpired):
                        program.wait(30)
                    if program.poll() != 0:
                        self._killed.setdefault(name, time.time())
                        program.kill()
                        program.wait()
            self._finish(log)

    def _launch(self) -> None:
        self._count += 1
        name = f"w{self._count}"
        paths = [str(Path(hw.__file__).resolve().parent.parent), str(Path(__file__).resolve().parents[3])]
        arguments = [self.address, str(self._accounts / name), str(self._chance.randrange(1 << 30)), str(self._done)]
        self._programs[name] = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )

    def _fight(self, log: hw.Log) -> None:
        """Strikes at workers that have leased something, so that each strike can hurt."""
        sent, deadline = 0, time.monotonic() + PATIENCE_S
        strikes = ["kill"] * KILLS + ["stop"] * STOPS
        self._chance.shuffle(strikes)
        while (sent < EVENTS or strikes) and time.monotonic() < deadline:
            working = [name for name in self._programs if self._has_leased(name)]
            if sent == 0 or (sent < EVENTS and working):
                log.append("tasks", [self._row(sent + n) for n in range(20)])
                sent += 20
            if working and strikes and self._chance.random() < 0.5:
                name = self._chance.choice(working)
                if strikes.pop() == "kill":
                    self._strike_dead(name)
                else:
                    self._strike_down(name)
            time.sleep(self._chance.uniform(0.02, 0.25))

    def _has_leased(self, name: str) -> bool:
        path = self._accounts / name
        return path.exists() and path.stat().st_size > 0

    def _strike_dead(self, name: str) -> None:
        program = self._programs.pop(name)
        self.kills += 1
        self._killed[name] = time.time()
        program.kill()
        program.wait()
        self._launch()

    def _strike_down(self, name: str) -> None:
        self.stops += 1
        self._programs[name].send_signal(signal.SIGSTOP)
        time.sleep(self._chance.choice([0.2, 1.5 * LEASE_S]))
        self._programs[name].send_signal(signal.SIGCONT)

    def _row(self, n: int) -> dict[str, object]:
        row = super()._row(n)
        if row["kind"] == SCHEDULED:
            row = {"key": row["key"], "n": n, "kind": "plain"}
        return row

    def _finish(self, log: hw.Log) -> None:
        """One consumer does what is left, until everything is done, or may be and nothing comes any more."""
        account, deadline = Account(self._accounts / "last"), time.monotonic() + PATIENCE_S
        with open_queue(log) as queue:
            quiet_at = time.monotonic() + QUIET_S
            while time.monotonic() < deadline:
                begun = time.time()
                leases = queue.lease(timeout_s=0.5)
                for lease in leases:
                    place, until = [lease.event.partition, lease.event.offset], grant_of(lease).deadline / 1e6
                    facts = {"begun": begun, "at_us": time.time(), "until": until, "deliveries": lease.deliveries}
                    account.say("lease", place=place, **facts)
                    if lease.event.value["kind"] == POISON:
                        settle(account, "nack", place, lease.nack)
                    else:
                        settle(account, "ack", place, lambda lease=lease: queue.ack([lease]))
                if leases:
                    quiet_at = time.monotonic() + QUIET_S
                    continue
                done, perhaps = self._done_places(queue)
                if len(done) == EVENTS or (len(done | perhaps) == EVENTS and time.monotonic() > quiet_at):
                    return

    def _lines(self) -> list[dict[str, Any]]:
        """Kafka says yes to an acknowledgement of what another has acknowledged meanwhile, and then we do: of two such the one
        whose lease ended while it was asking does not count. Nor does what the brokers have forgotten."""
        lines = super()._lines()
        forget(lines)
        acked: dict[Place, list[dict[str, Any]]] = defaultdict(list)
        for line in lines:
            if line["what"] == "acked":
                acked[tuple(line["place"])].append(line)
        for place, some in acked.items():
            for line in some if len(some) > 1 else ():
                untils = [
                    other["until"]
                    for other in lines
                    if (other["what"], other["worker"]) == ("lease", line["worker"]) and tuple(other["place"]) == place
                ]
                if max(untils) < line["at"]:
                    line["what"] = "late"
        return lines

    def _done_places(self, queue: Queue) -> tuple[set[Place], set[Place]]:
        """What was acknowledged or is a dead letter, and what a worker that died may have acknowledged."""
        lines = self._lines()
        done: set[Place] = {tuple(line["place"]) for line in lines if line["what"] == "acked"}
        perhaps: set[Place] = {
            tuple(line["place"]) for line in lines if line["what"] == "acking" and line["worker"] in self._killed
        }
        for letter in queue.dead(events_max=10 * EVENTS):
            assert letter.headers is not None
            done.add((int(letter.headers["_dead_partition"]), int(letter.headers["_dead_offset"])))
        return done, perhaps


def forget(lines: list[dict[str, Any]]) -> None:
    """Brokers up to 4.3 may make the state of a new group twice, and begin anew with what it was told between: an event that was
    delivered before is delivered for the first time again. Whatever became of it before that is forgotten."""
    delivered = set[Place]()
    for line in sorted(lines, key=lambda line: line["at"]):
        if line["what"] == "lease":
            place = tuple(line["place"])
            if line["deliveries"] == 1 and place in delivered:
                for before in lines:
                    if tuple(before.get("place", ())) == place and before["at"] < line["begun"]:
                        before["what"] = "forgotten"
            delivered.add(place)


def open_queue(log: hw.Log) -> Queue:
    """The queue that everybody works on."""
    return log.queue("tasks", group="g", lease_s=LEASE_S, deliveries_max=DELIVERIES_MAX)


def main(url: str, account: str, seed: str, done: str) -> None:
    """One worker."""
    with hw.open_log(url) as log, open_queue(log) as queue:
        work_on(queue, Path(account), int(seed), done=done, delays=(0,))


if __name__ == "__main__":
    main(*sys.argv[1:])
