"""The views of an application that runs: each is maintained by its query, and swapped after a new generation has caught up.

The thread of a query applies its batches, and the thread that supervises the stages swaps. A maintainer works for one thread at a time,
so both hold the lock of their view. After the swap the checkpoint, the state and the start of older generations are removed. The next
start removes what a killed process left.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.log.disk.disk import RealDisk
from headwater.log.log import Log
from headwater.model.errors import CheckpointConflict
from headwater.model.url import inside
from headwater.processing.graph.graph import Graph, StageNode
from headwater.views.catalog import ViewCatalog, ViewPlan, plan_view
from headwater.views.definition import define_view
from headwater.views.maintainer import ViewMaintainer
from headwater.views.store import ViewStore
from headwater.views.store_url import open_view_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headwater.processing.stages.analysis import StageAnalysis
    from headwater.processing.stages.stage_plan import Write as WriteBatch
    from headwater.processing.stages.supervisor import Supervisor

Attempt = Callable[[str, Callable[[], object]], None]
"""Does something now or later; the text says what has failed, if it fails."""


class ViewStages:
    """The views of one run of an application."""

    def __init__(self, graph: Graph, log: Log, store_url: str, *, state: Path, operators: str | None) -> None:
        """`operators` is where the state of operators is, if that is not in the checkpoints."""
        self._graph = graph
        self._log = log
        self._store_url = store_url
        self._state = state
        self._operators = operators
        self._store: ViewStore | None = None
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._building: dict[str, ViewMaintainer] = {}
        self.notes: list[str] = []
        """Why views are rebuilt."""

    def plan(self, stage: StageNode, analysed: StageAnalysis) -> ViewPlan:
        """Which generation of its view a stage maintains."""
        definition = define_view(
            stage.name,
            analysed.schema,
            key=stage.key,
            mode=stage.mode,
            order=stage.settings["order"] or (),
            limit=stage.settings["limit"],
            code=stage.function,
        )
        return plan_view(self._log, definition)

    def writer(
        self, stage: StageNode, plan: ViewPlan, checkpoint: str, *, check: Callable[[], None]
    ) -> Callable[[], WriteBatch]:
        """The writer of a view's batches. Each run of the query gets a new one; the first is made here, so its errors come early.

        If `check` refuses the checkpoint, none is made. Another process may go on maintaining the view, and the stage fails when it starts.
        """
        from headwater.processing.checkpoint.marker import marker_of
        from headwater.processing.spark.driver_rows import rows_of

        made = list[ViewMaintainer]()
        with suppress(CheckpointConflict):
            check()
            made.append(self._maintainer(stage, plan))
        lock = self._locks[stage.name]

        def maintaining() -> WriteBatch:
            with lock:
                maintainer = made.pop() if made else self._maintainer(stage, plan)

            def maintain(result: DataFrame, epoch: int) -> None:
                rows = rows_of(result)
                with lock:
                    maintainer.maintain(rows, marker_of(checkpoint, epoch))

            return maintain

        return maintaining

    def look(self, supervisor: Supervisor, attempt: Attempt) -> None:
        """Called often while stages run: a rebuilt view replaces the old one after it has caught up."""
        for stage in supervisor.stages:
            name = stage.plan.stage.name
            if name in self._building and stage.is_caught_up:
                attempt(f"View {name!r} was rebuilt, but could not replace the old one", partial(self._swap, name))

    def sweep(self) -> None:
        """Removes what is left of generations that are neither current nor being built."""
        for stage in self._graph.stages.values():
            if stage.kind == "view":
                self._remove_old(stage.name)

    def close(self) -> None:
        """Frees the store."""
        if self._store is not None:
            self._store.close()

    def _maintainer(self, stage: StageNode, plan: ViewPlan) -> ViewMaintainer:
        if self._store is None:
            self._store = open_view_store(self._store_url)
        maintainer = ViewMaintainer(self._log, self._store, plan.definition, app=self._graph.name)
        if plan.rebuild:
            note = f"{plan.why} Queries read the old view until the new one has caught up."
            if maintainer.apart:
                note += (
                    f" Topic {stage.name}.changes cannot hold the new rows, so it stays with the old view: {maintainer.apart} "
                    f"The changes of the new view are in {plan.definition.changes}."
                )
            self.notes += [note] if note not in self.notes else []
            self._building[stage.name] = maintainer
        return maintainer

    def _swap(self, name: str) -> None:
        """Swaps, unless a batch is being applied; then the next call of `look` does."""
        lock = self._locks[name]
        if not lock.acquire(blocking=False):
            return
        try:
            self._building[name].swap()
            self._remove_old(name)
            del self._building[name]
        finally:
            lock.release()

    def _remove_old(self, name: str) -> None:
        from headwater.processing.state.files import StateFolder

        known = ViewCatalog(self._log).get(name).definitions
        operators = self._operators
        elsewhere = [] if operators is None else StateFolder(operators).names(folders_only=True)
        for generation in set(range(1, max(known))) - set(known):
            old = generation_name(name, generation)
            if old in self._graph.stages and old != name:  # another stage, which happens to be called so
                continue
            disk = RealDisk()
            disk.remove_folder(str(self._state / "checkpoints" / old))
            disk.remove(str(self._state / "starts" / f"{old}.json"))
            if operators is not None and old in elsewhere:
                StateFolder(inside(operators, old)).remove_all()


def generation_name(name: str, generation: int) -> str:
    """What the checkpoint of a view's generation is called."""
    return name if generation == 1 else f"{name}.{generation}"
