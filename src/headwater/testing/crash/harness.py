"""The crash harness: rounds of real processes that are killed with SIGKILL, started again, and checked from outside.

    with Nursery() as nursery:
        report = run_round(nursery, folder, seed)      # raises Violation, with the seed, when an invariant does not hold

A round has four writers and two readers on a new log. Its seed chooses a crash point (every writer dies where it reaches it for
the first, second or third time; or anywhere, even in the middle of a write), the moments at which others are killed, and whether
the log is then opened in another boot of the machine, so that it is recovered. Whoever dies is started again. In the end all are
killed, and what the log holds is compared with what the workers wrote down (`invariants`).

The kernel decides when processes run, so a seed repeats the plan of a round and not its every step. Nothing outlives the
harness: workers die with the nursery, the nursery with the thread that started it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

import msgspec

from headwater.log.log import open_log
from headwater.model.errors import HeadwaterError
from headwater.testing.crash.invariants import check_round
from headwater.testing.crash.points import crash_points
from headwater.testing.crash.worker import ANYWHERE, COLUMNS, TOPICS, Role, WorkerOrder, worker_disk
from headwater.testing.oracle import Violation

WRITERS: dict[str, Role] = {"plain": "plain", "lines": "lines", "transactions": "transactions", "keeper": "keeper"}
READERS: dict[str, Role] = {"reader": "reader", "looker": "looker"}
PHASE_S = 0.4
PHASE_TIMEOUT_S = 10.0
RELENTLESS_DEATHS_MIN = 6
POLL_S = 0.005

_ONCE = ("open", "recovery", "settle")
_ANOTHER_MUST_DIE_FIRST = {"settle: before publish": "commit: recorded"}


class Nursery:
    """The process that forks workers; see `worker`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headwater.testing.crash.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    @property
    def pid(self) -> int:
        """The nursery's own pid."""
        return self._process.pid

    def start(self, order: WorkerOrder) -> int:
        """A new worker; returns its pid."""
        return int(self._ask(msgspec.json.encode(order)))

    def ended(self) -> dict[int, int]:
        """The workers that have ended since the last call, by pid, with their exit codes."""
        return msgspec.json.decode(self._ask(b"{}"), type=dict[int, int])

    def close(self) -> None:
        """Ends the nursery, and with it every worker that is left."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, line: bytes) -> bytes:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"The nursery of crash workers has ended ({self._process.wait()}).")
        return answer


@dataclass
class RoundReport:
    """What happened in a round that broke no promise."""

    seed: int
    point: str
    died_at_point: int = 0
    killed: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)


def run_round(
    nursery: Nursery, folder: Path, seed: int, *, phase_s: float = PHASE_S, relentless: bool = False
) -> RoundReport:
    """One round in an empty folder; `Violation` names the seed and leaves the folder as it is.

    In a relentless round a writer that died at the point is started to die there again, until the time is over and it was often enough.
    """
    try:
        return Round(nursery, folder, seed, phase_s=phase_s, relentless=relentless).run()
    except (Violation, HeadwaterError) as failure:
        failure.add_note(f"seed {seed}; the log and the workers' accounts are in {folder}")
        raise


def round_points() -> list[str]:
    """Where the writers of a round may die: each point of the log, and anywhere."""
    return [*crash_points(), ANYWHERE]


class Round:
    """One round: its plan, its workers that are alive, and which of them are to die by themselves."""

    def __init__(self, nursery: Nursery, folder: Path, seed: int, *, phase_s: float, relentless: bool) -> None:
        points = round_points()
        self._nursery = nursery
        self._folder = folder
        self._phase_s = phase_s
        self._relentless = relentless
        self._random = Random(seed)
        self._point = points[seed % len(points)]
        self._report = RoundReport(seed, self._point)
        self._lives = dict.fromkeys((*WRITERS, *READERS), 0)
        self._boot = 0
        self._alive: dict[int, str] = {}
        self._killed: set[int] = set()
        self._mortals: set[str] = set()

    def run(self) -> RoundReport:
        """Runs the round and checks it."""
        began = time.monotonic()
        try:
            self._run_phase(with_point=not self._point.startswith("recovery"))
            if self._point.startswith("recovery") or self._random.random() < 0.3:
                self._kill(list(self._alive))
                self._await_end(list(self._alive))
                self._boot += 1
                self._run_phase(with_point=self._point.startswith("recovery"))
        finally:
            self._kill(list(self._alive))
            self._await_end(list(self._alive))
        self._report.counts = self._check()
        self._report.seconds = time.monotonic() - began
        return self._report

    def _run_phase(self, *, with_point: bool) -> None:
        """Starts everybody, kills some at random and restarts the dead, until all have worked and the point was met."""
        began = time.monotonic()
        before = self._accounts()
        self._mortals = set(WRITERS) if with_point else set()
        met_before, wanted = self._report.died_at_point, RELENTLESS_DEATHS_MIN if self._relentless else 1
        # Whoever opens the log first recovers it, and readers do not die at points.
        waiting = list(READERS) if with_point and self._point.startswith("recovery") else []
        for name in self._lives:
            if name not in waiting:
                self._start(name)
        kills = sorted(self._random.uniform(0.0, self._phase_s) for _ in range(self._random.randint(0, 3)))
        while (passed := time.monotonic() - began) < self._phase_s + PHASE_TIMEOUT_S:
            if kills and passed > kills[0]:
                del kills[0]
                self._kill([self._random.choice(list(self._alive))])
            self._restart_dead()
            met = not with_point or self._report.died_at_point - met_before >= wanted
            while met and waiting:
                self._start(waiting.pop())
            worked = self._relentless or all(size > before[name] for name, size in self._accounts().items())
            if passed > self._phase_s and met and worked:
                return
            time.sleep(POLL_S)

    def _accounts(self) -> dict[str, int]:
        """How much each worker has written down."""
        paths = {name: self._folder / f"{name}.jsonl" for name in self._lives}
        return {name: path.stat().st_size if path.exists() else 0 for name, path in paths.items()}

    def _point_for(self, name: str) -> str:
        """Where a worker is to die: each writer does so once in a round."""
        if name not in self._mortals:
            return ""
        if name == "transactions":
            return _ANOTHER_MUST_DIE_FIRST.get(self._point, self._point)
        return self._point

    def _start(self, name: str) -> None:
        order = WorkerOrder(
            name=name,
            role=(WRITERS | READERS)[name],
            log=str(self._folder / "log"),
            account=str(self._folder / f"{name}.jsonl"),
            seed=self._report.seed,
            life=self._lives[name],
            boot=self._boot,
            point=self._point_for(name),
            nth=self._random.randint(1, 3) if self._lives[name] == 0 and not self._point.startswith(_ONCE) else 1,
        )
        self._lives[name] += 1
        self._alive[self._nursery.start(order)] = name

    def _restart_dead(self) -> None:
        for pid, code in self._nursery.ended().items():
            name = self._alive.pop(pid)
            if code != -signal.SIGKILL:
                raise Violation(f"Worker {name} stopped unexpectedly ({code}): {self._last_words(name)}")
            if pid not in self._killed:
                self._mourn(name)
            self._start(name)

    def _mourn(self, name: str) -> None:
        """A writer has died by itself; it does so once, and then nobody has to die first any more."""
        if self._point_for(name) == self._point:
            self._report.died_at_point += 1
            if not self._relentless:
                self._mortals = {other for other in self._mortals if self._point_for(other) == self._point} - {name}

    def _kill(self, pids: Sequence[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._killed.add(pid)
            self._report.killed += 1

    def _await_end(self, pids: Sequence[int]) -> None:
        left = set(pids)
        while left:
            for pid in self._nursery.ended():
                left.discard(pid)
                self._alive.pop(pid, None)
            time.sleep(POLL_S)

    def _last_words(self, name: str) -> str:
        account = self._folder / f"{name}.jsonl"
        return account.read_text(encoding="utf-8").splitlines()[-1] if account.exists() else "nothing"

    def _check(self) -> dict[str, int]:
        order = WorkerOrder("judge", "plain", "", "", self._report.seed, 0, self._boot)
        accounts = [path for name in self._lives if (path := self._folder / f"{name}.jsonl").exists()]
        # Where every worker died while it made the log there is none. What was acknowledged in one that is gone would be missed.
        with open_log(str(self._folder / "log"), disk=worker_disk(order)) as log:
            for name, options in TOPICS.items():
                log.create_topic(name, COLUMNS, key="key", exist_ok=True, **options)
            return check_round(log, TOPICS, accounts)
