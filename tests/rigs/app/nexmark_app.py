"""Nexmark's application as its users run it, over a log that a test fills: `headwater run examples/nexmark/app.py`, killed or to the end.

Events come shuffled, some of them late, by a clock of the test's own: what the log says about when they were appended is the same in
every run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pyarrow as pa

import headwater as hw
from examples.nexmark.arrival import Arrival
from examples.nexmark.events import Nexmark
from examples.nexmark.generate import batches, create
from examples.nexmark.ours import QUERIES
from examples.nexmark.topics import TOPICS
from headwater.model.clock import time_us
from headwater.views.view import open_view
from tests.rigs.app.storm_orders import kill_session
from tests.rigs.commands import COMMAND

ROOT = Path(__file__).resolve().parents[3]
PERIOD_US = 30_000
EVENING = time_us("2025-01-01T23:59:30+00:00")
APPENDED = time_us("2025-06-01T12:00:00+00:00")
OVER = datetime(2025, 1, 2, 12, tzinfo=UTC)
"""Time has come so far when everything was appended: all windows have ended."""

WRITTEN_S = 400.0


class House:
    """An auction house: its log, and the application over it with some of the queries."""

    def __init__(self, folder: Path, queries: tuple[str, ...], *, events: int, seed: int) -> None:
        print(f"seed {seed}")
        self.folder, self.queries = folder, queries
        self.now_us = APPENDED
        self.log = hw.open_log(folder / "log", clock=lambda: self.now_us)
        create(self.log, partitions=2)
        self.arrival = Arrival(0, events, seed=seed, lateness_events=4_000_000 // PERIOD_US, shuffled=True, late=0.02)
        self._batches = list(batches(Nexmark(seed, PERIOD_US, EVENING), self.arrival, max(1, events // 12)))

    def append(self, share: float = 1.0) -> None:
        """Appends this share of what is left; behind the last event time goes on until everything is over."""
        count = max(1, round(share * len(self._batches)))
        given, self._batches = self._batches[:count], self._batches[count:]
        for tables in given:
            self.now_us += 3_700_000
            for topic, table in tables.items():
                if table.num_rows:
                    self.log.append(topic, table)
        if not self._batches:
            for topic in TOPICS:
                self.log.heartbeat(topic, OVER)

    def kill_on_the_way(self, random: Random) -> None:
        """Runs all queries side by side; each has written a batch, and more events were appended, when everything is killed."""
        before = self._written()
        self.append(0.25)
        with self._started() as life:
            try:
                deadline = time.monotonic() + WRITTEN_S
                while any(epoch <= before[stage] for stage, epoch in self._written().items()):
                    assert life.poll() is None, self.told()
                    assert time.monotonic() < deadline, f"{before} {self._written()}\n{self.told()}"
                    time.sleep(0.05)
                self.append(0.25)
                time.sleep(random.uniform(0.0, 1.5))
            finally:
                kill_session(life.pid)

    def finish(self) -> None:
        """Appends the rest, and runs every query to the end."""
        self.append()
        with self._started("--available-now") as life:
            try:
                assert life.wait(WRITTEN_S * 2) == 0, self.told()
            finally:
                kill_session(life.pid)

    def answer(self, query: str) -> pa.Table:
        """What a query's topic or view holds."""
        if not QUERIES[query].key:
            return self.log.read(query)
        with open_view(f"sqlite:///{self.folder}/log/views.db", query) as view:
            return view.rows()

    def told(self) -> str:
        """What it printed last."""
        return "\n".join((self.folder / "run.txt").read_text(errors="replace").splitlines()[-40:])

    def _written(self) -> dict[str, int]:
        """The batch that each query wrote last."""
        stages = {query: query if QUERIES[query].key else QUERIES[query].function.__name__ for query in self.queries}
        last = {query: self.log.store.stage_state(f"nexmark.{stage}").last for query, stage in stages.items()}
        return {query: -1 if marker is None else marker.epoch for query, marker in last.items()}

    def _started(self, *arguments: str) -> subprocess.Popen[bytes]:
        more = {"NEXMARK_LOG": str(self.folder / "log"), "NEXMARK_QUERIES": ",".join(self.queries)}
        with (self.folder / "run.txt").open("ab") as output:
            return subprocess.Popen(
                [
                    *COMMAND,
                    "run",
                    str(ROOT / "examples/nexmark/app.py"),
                    "--no-page",
                    "--master",
                    "local[2]",
                    *arguments,
                ],
                cwd=self.folder,
                env=os.environ | more | {"PYTHONPATH": str(ROOT / "src")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def script() -> Path:
    """The application's script; what lies beside it is found."""
    path = ROOT / "examples/nexmark/app.py"
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return path
