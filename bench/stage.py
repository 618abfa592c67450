"""A stage: one function of an application, over everything that waits in the topics of a log, to a sink that does nothing.

The stage is planned as an application plans it, so its operators run inside their sources where they can. It counts what it finds, so a
run is compared with the peers' answer and not only with their time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import headwater as hw
from bench import machine
from bench.state.rig import StateRig
from headwater.processing.stages.skips import Skips

_FOUND = "found"


@dataclass(frozen=True)
class StageRun:
    """One run: what it found and what it cost."""

    rows: int
    batches_s: tuple[float, ...]
    """The seconds of each batch, planning and commit included."""
    cpu_s: float
    """The CPU seconds of all our processes, Spark's included, from the start of the query to its end."""

    @property
    def seconds(self) -> float:
        """Of all batches."""
        return sum(self.batches_s)


class StageRig(StateRig):
    """Spark as an application has it, and stages in it."""

    @contextmanager
    def stage(
        self,
        url: str,
        function: Callable[..., DataFrame],
        *,
        topics: Sequence[str],
        tables: Sequence[str] = (),
        events_max: int | None = None,
    ) -> Iterator[Callable[[], StageRun]]:
        """A function that runs over what is new since it ran last. All its runs have one checkpoint, and the state of the last run."""
        number = next(self._numbers)
        app = hw.App("bench", log=url, spark=self.spark, state=self.folder / f"state-{number}")
        inputs = [*(app.topic(name) for name in topics), *(app.table(name) for name in tables)]
        app.stream(*inputs, to=f"out-{number}", events_max=events_max)(function)
        with ExitStack() as stack:
            launch = app._launch()
            stack.callback(launch.close)
            supervisor = launch.start()
            stack.callback(supervisor.stop)
            plan = supervisor.stages[0].plan
            result = supervisor.inputs.result(plan, Skips(self.folder / f"skips-{number}.json"))
            writer = result.observe(_FOUND, F.count(F.lit(1)).alias("rows")).writeStream.format("noop")

            def run() -> StageRun:
                cpu_s = machine.cpu_s()[1]
                # An operator inside a source looks for its query's checkpoint.
                query, _ = self.start(writer, checkpoint=Path(plan.checkpoint), availableNow=True)
                query.awaitTermination()
                batches = query.recentProgress
                return StageRun(
                    rows=sum(batch["observedMetrics"][_FOUND]["rows"] for batch in batches if batch["observedMetrics"]),
                    batches_s=tuple(batch["durationMs"]["triggerExecution"] / 1000 for batch in batches),
                    cpu_s=machine.cpu_s()[1] - cpu_s,
                )

            yield run
