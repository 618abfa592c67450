"""A launch: log, Spark, topics and views of an application put together, from its declaration to running stages.

Everything is checked before the first stage starts, and what is wrong is said in one sentence: `InvalidApp` for the script,
other errors for the world around it. Only then topics are made and a lock is taken on the folder `state`, so that one process at a
time runs an application (the log's fencing numbers would keep a second one from doing harm, but not from confusing people).
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pyarrow as pa

from headwater.log.log import Log, open_log
from headwater.log.topic import Topic
from headwater.model.ddl import to_ddl
from headwater.model.errors import AppRunning, InvalidApp, SchemaConflict
from headwater.processing.graph import CHANGES, Graph, StageNode, TopicNode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headwater.processing.analysis import Analysed, Facts
    from headwater.processing.runner import Plan, Runner
    from headwater.views.maintain import Maintainer
    from headwater.views.store import ViewStore

Restart = Literal["marker", "earliest", "latest"]
"""Where a stage begins whose checkpoint is gone: behind what it has written last, or at one end of its inputs."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Where an application runs."""

    log: str
    master: str
    conf: Mapping[str, str]
    state: Path
    views: str


class Launch:
    """One run of an application, from `start` to `close`."""

    def __init__(self, graph: Graph, settings: Settings, *, spark: SparkSession | None = None) -> None:
        self._graph = graph
        self._settings = settings
        self._given_spark = spark
        self._closing: list[Callable[[], object]] = []
        self._building: dict[str, Maintainer] = {}
        self.runner: Runner | None = None

    def describe(self) -> dict[str, list[str]]:
        """What `plan` says of each stage, by its name; nothing is made."""
        with self._opened(create=False) as log:
            self._graph.check(in_log=log.topics() if log else [])
            analysed, _ = self._analysed(self._session(), log)
        return {name: _notes(self._graph.stages[name], found) for name, found in analysed.items()}

    def start(self, *, accept: Mapping[str, Restart] | None = None) -> Runner:
        """Makes what is missing and returns the stages, ready to run."""
        from headwater.processing.runner import Runner

        log = open_log(self._settings.log)
        self._closing.append(log.close)
        self._graph.check(in_log=log.topics())
        self._take_lock()
        spark = self._session()
        for node in self._graph.topics.values():
            _make_declared(log, node)
        analysed, facts = self._analysed(spark, log)
        for stage in self._graph.order():
            _make_output(log, stage, analysed[stage.name])
        plans = [self._plan(log, stage, analysed[stage.name], facts, accept or {}) for stage in self._graph.order()]
        self.runner = Runner(spark, log, self._graph, plans, state=self._settings.state)
        return self.runner

    def look(self) -> None:
        """What is to be done while stages run: a view that was built anew replaces the old one once it has caught up."""
        assert self.runner is not None
        for status in self.runner.statuses:
            maintainer = self._building.get(status.name)
            if maintainer is not None and status.epoch >= 0 and status.lag == 0:
                maintainer.swap()
                del self._building[status.name]

    def close(self) -> None:
        """Frees everything, Spark too where it was started here."""
        while self._closing:
            self._closing.pop()()
