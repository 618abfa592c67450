"""An application: topics, tables and the functions between them, declared in one script and run together on Spark.

    app = hw.App("clickstream", log="./data")
    clicks = app.topic("clicks", schema="user_id BIGINT, page STRING, at TIMESTAMP", key="user_id", time="at")

    @app.view(clicks, key=["page"])
    def per_page(clicks):
        return clicks.groupBy("page").count()

    if __name__ == "__main__":
        app.run()

Decorators return the function unchanged, so tests can call it with ordinary DataFrames. An application opens, makes and starts
nothing before `plan`, `start` or `run`. Its folder `state` holds its checkpoints, its status and the rows that it left out.
"""

from __future__ import annotations

import atexit
import copy
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from headwater.app.declaration import captured_node, check_settings
from headwater.app.launch import Launch, Settings, check_partitions
from headwater.app.outputs.sinks import EVENTS_MAX, LOG_COLUMNS, partitioned, redirected
from headwater.app.outputs.transactions import transactional
from headwater.app.restarts import Restart
from headwater.app.run import AppRun, Watch
from headwater.log.log import open_log
from headwater.log.port.topic import TopicSettings, check_name
from headwater.model.clock import Duration, duration_us
from headwater.model.errors import HeadwaterError, InvalidApp, NotFound
from headwater.model.extras import check_spark
from headwater.model.schema import SchemaLike
from headwater.model.url import inside, without_password
from headwater.processing.graph.graph import (
    CHANGES,
    Graph,
    Late,
    OutputMode,
    StageNode,
    TopicNode,
    caller,
    declared_schema,
    place_of,
)
from headwater.processing.stages.status import AppStatus, check_stages, read_status
from headwater.sinks.sink import is_target

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater.processing.stages.rebuild import Rebuild
    from headwater.views.view import View

F = TypeVar("F", bound=Callable[..., Any])
Input = TopicNode | str | Callable[..., Any]
"""What a stage reads: what `app.topic` returned, the function of another stage, or the name of a topic."""


class App:
    """One application; see the module."""

    def __init__(
        self,
        name: str,
        *,
        log: str | os.PathLike[str] = "./data",
        spark: SparkSession | None = None,
        master: str | None = None,
        conf: Mapping[str, str] | None = None,
        state: str | os.PathLike[str] | None = None,
        state_partitions: int = 4,
        views: str | None = None,
        idle: Duration = "30 seconds",
    ) -> None:
        """`spark` is a session to use. Without it the application starts one with `master` and `conf`, and stops it at the end.

        The default `master` is that of `spark-submit`, otherwise `local[*]`: this machine.

        Windows and joins wait for the partition whose event time is furthest behind. They do not wait for a partition that had no
        event for `idle`.

        `state` and `views` are by default in the folder of the log; for a log on Kafka they are in the folder `./<name>`.
        `state` may be a URL that `pyarrow.fs` knows: it then holds the state of operators, and checkpoints stay in the default folder.
        `state_partitions` is the number of parts of that state, with one task for each. A later run may use another number.
        """
        self._graph = Graph(name)
        self._url = os.fspath(log)
        self._given_spark = spark
        self._master = master
        self._conf = dict(conf or {})
        is_url = state is not None and "://" in os.fspath(state)
        self._operators_url = os.fspath(state) if state is not None and is_url else None
        self._state_partitions = check_partitions(state_partitions)
        self.state = Path(state if state is not None and not is_url else self._beside(f"apps/{name}"))
        self._views_url = views if views is not None else f"sqlite:///{self._beside('views.db')}"
        self._idle_us = duration_us(idle)
        self._functions: dict[Callable[..., Any], StageNode] = {}
        self._running: AppRun | None = None
        self.views = Views(self)

    def __repr__(self) -> str:
        state = "not running" if self._running is None else "running"
        return (
            f"App(name={self.name!r}, log={without_password(self._url)!r}, "
            f"topics={list(self._graph.topics)}, stages={list(self._graph.stages)}, {state})"
        )

    @property
    def name(self) -> str:
        """Its name: part of the names of its stages."""
        return self._graph.name

    @property
    def log_url(self) -> str:
        """The log that it reads and writes."""
        return self._url

    @property
    def operators_url(self) -> str | None:
        """The URL of the operators' state, if that is not beside the checkpoints."""
        return None if self._operators_url is None else inside(self._operators_url, self.name)

    @property
    def graph(self) -> Graph:
        """What was declared."""
        return self._graph

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions of its stages by name, as they were declared. Tests call them with ordinary DataFrames."""
        return {node.name: function for function, node in self._functions.items()}

    def moved(self, log: str | os.PathLike[str], *, master: str, conf: Mapping[str, str] | None = None) -> App:
        """The same application over another log, with its state and views there, and a Spark of its own: for tests.

        Its sinks write to tables of SQLite in the working directory instead of the systems that it names.
        """
        other = copy.copy(self)
        other._graph = redirected(self._graph)
        other._url = os.fspath(log)
        other._given_spark, other._master, other._conf = None, master, {**self._conf, **(conf or {})}
        other.state, other._operators_url = Path(other._beside(f"apps/{self.name}")), None
        other._views_url = f"sqlite:///{other._beside('views.db')}"
        other._running, other.views = None, Views(other)
        return other

    # Declaring

    def topic(
        self, name: str, schema: SchemaLike | None = None, *, key: str | None = None, **settings: Unpack[TopicSettings]
    ) -> TopicNode:
        """A topic to read. With a schema the application creates a missing topic, with the settings of `log.create_topic`."""
        where = caller()
        made = {"key": key, **check_settings(settings, where)}
        return self._graph.add_topic(TopicNode(name=name, schema=declared_schema(schema), settings=made, where=where))

    def table(
        self,
        name: str,
        schema: SchemaLike | None = None,
        *,
        key: str | None = None,
        source: str | None = None,
        **settings: Unpack[TopicSettings],
    ) -> TopicNode:
        """A topic of which the newest row per key counts. A function gets an object whose `changes` is a DataFrame.

        With `source`, such as "sqlite:///shop.db?table=users", it is a table of a database, which the application captures while it runs.
        Without `?table=` the database's table has this name. The database gives the columns and the key; pass `key` only for a table
        without a primary key.
        """
        where = caller()
        if source is not None:
            return self._graph.add_topic(captured_node(name, schema, key, source, settings, where))
        if schema is not None and key is None:
            raise InvalidApp(
                f"{where}: table {name!r} has no key.", advice="Pass key=… with the column that identifies a row."
            )
        made = {"key": key, "compact": True, **check_settings(settings, where)}
        return self._graph.add_topic(
            TopicNode(name=name, schema=declared_schema(schema), settings=made, is_table=True, where=where)
        )

    def stream(
        self,
        *inputs: Input,
        to: str | None = None,
        key: str | None = None,
        mode: OutputMode = "append",
        trigger: Duration | None = None,
        late: Late | None = None,
        corrections: Duration = "0 seconds",
        log_columns: Sequence[str] = (),
        events_max: int | None = None,
        **settings: Unpack[TopicSettings],
    ) -> Callable[[F], F]:
        """Declares a function whose result is written to a topic, exactly once; `to` defaults to the function's name.

        A missing topic is created with the columns of the result; `key` and the settings of `log.create_topic` are its own.
        `late` decides about events that are too late for a window or a join: "drop" counts them, and "topic" also writes them to the
        topic `<name>.late`. "correct" still applies them for the time `corrections`. With "window" an event counts
        as long as its window of `hw.windowed` is open.

        `log_columns` adds columns of the log to the inputs, such as `_appended`, its time. A result by `_appended` is a result
        by processing time, and a repeated batch gives the same one. A batch has at most `events_max` events of each input; without
        it, all that are available.
        """

        def declare(function: F) -> F:
            made = {"key": key, **check_settings(settings, place_of(function)), "events_max": events_max}
            self._add(
                function,
                StageNode(
                    name=function.__name__,
                    kind="stream",
                    inputs=self._names(inputs, place_of(function)),
                    function=function,
                    to=to or function.__name__,
                    key=() if key is None else (key,),
                    mode=mode,
                    trigger=trigger,
                    late=late,
                    corrections_us=duration_us(corrections),
                    log_columns=tuple(log_columns),
                    settings=made,
                    where=place_of(function),
                ),
            )
            return function

        return declare

    def view(
        self,
        *inputs: Input,
        key: str | Sequence[str] = (),
        mode: OutputMode = "update",
        order: str | Sequence[str] | None = None,
        limit: int | None = None,
        trigger: Duration | None = None,
        late: Late | None = None,
        corrections: Duration = "0 seconds",
        log_columns: Sequence[str] = (),
        events_max: int | None = None,
        name: str | None = None,
    ) -> Callable[[F], F]:
        """Declares a function whose result you can query and subscribe to: with `app.views[name]`, elsewhere with `hw.open_view`.

        The columns `key` identify a row. With `order` and `limit` the view has the first rows in that order. `late`, `log_columns` and
        `events_max` are as in `stream`.
        """

        def declare(function: F) -> F:
            called = name or function.__name__
            self._add(
                function,
                StageNode(
                    name=called,
                    kind="view",
                    inputs=self._names(inputs, place_of(function)),
                    function=function,
                    to=f"view {called}",
                    key=(key,) if isinstance(key, str) else tuple(key),
                    mode=mode,
                    trigger=trigger,
                    late=late,
                    corrections_us=duration_us(corrections),
                    log_columns=tuple(log_columns),
                    settings={"order": order, "limit": limit, "events_max": events_max},
                    where=place_of(function),
                ),
            )
            return function

        return declare

    def sink(
        self,
        source: Input | Sequence[Input],
        *,
        to: str,
        key: str | Sequence[str] | None = None,
        name: str | None = None,
        trigger: Duration | None = None,
        events_max: int | None = None,
        partition_by: str | Sequence[str] = (),
        transactions: bool = False,
    ) -> None:
        """Copies the events of a topic or stage to another topic, to files in a folder, or to another system, each once.

        | `to=` | what it holds |
        |---|---|
        | `"copies"` | the events, in another topic; its key is that of the source, or the column `key` |
        | `"./warehouse/orders"` | the events, in Parquet files of a folder; `?format=json` or `?format=csv` for other files |
        | `"postgresql://…?table=users"`, `"redis://…"`, `"sqlite:///…"` | the newest row of each key; a deleted key is removed |

        The sink of a view writes the view's rows. A transaction of another system has at most `events_max` events (250,000).
        `partition_by` names columns whose values become folders (`country=PE/`), for a folder and for "delta:///…".

        With `transactions` the sources are captured tables of one database, such as `[users, orders]`. The target is a database, which gets
        all tables of a batch in one transaction. It always holds what the source held at a commit.
        """
        where = caller()
        topics = self._names(source if isinstance(source, list | tuple) else (source,), where)
        to = partitioned(to, partition_by, where=where)
        node = StageNode(
            name=name or ".".join((*topics, "sink")),
            kind="sink",
            inputs=topics,
            function=None,
            to=to,
            key=() if key is None else (key,) if isinstance(key, str) else tuple(key),
            trigger=trigger,
            log_columns=LOG_COLUMNS if is_target(to) else (),
            settings={"events_max": EVENTS_MAX if events_max is None else events_max} if is_target(to) else {},
            where=where,
        )
        if transactions:
            node = transactional(self._graph, node, log=self._url, events_max=events_max)
        elif len(topics) > 1:
            raise InvalidApp(
                f"{where}: a sink copies one topic or table, but {len(topics)} were given.",
                advice="Declare one sink for each. To apply the transactions of captured tables whole, pass transactions=True.",
            )
        self._graph.add_stage(node)

    # Running

    def plan(self) -> str:
        """Checks the application without reading an event, and returns a drawing of its graph."""
        launch = self._launch()
        try:
            return self._graph.draw(launch.describe())
        finally:
            launch.close()

    def run(
        self,
        *,
        available_now: bool = False,
        accept_new_checkpoint: Mapping[str, Restart] | None = None,
        rebuild_state: Mapping[str, Rebuild] | None = None,
        watch: Watch | None = None,
        check: bool = True,
    ) -> AppStatus:
        """Runs all stages until Ctrl-C, which lets each finish its batch. With `available_now` it processes the available events and ends.

        `accept_new_checkpoint` decides where a stage starts whose checkpoint was lost: `{"enriched": "marker"}` continues after its
        last batch; the others are "earliest" and "latest". `rebuild_state` is for a stage whose operators lost their state or have new
        settings. The stage first rebuilds the state from the log: from all events with `{"enriched": "all"}`, from those that
        retention kept with "kept".

        Returns the last status. It raises `AppFailed` if a stage has failed, unless `check` is false.
        """
        running = self._run(watch)
        try:
            running.start(accept_new_checkpoint, rebuild_state)
            if available_now:
                running.run_to_the_end()
            else:
                running.supervise()
        except KeyboardInterrupt:
            if available_now:
                raise
        finally:
            running.end()
        status = running.status()
        if check:
            check_stages(status)
        return status

    def use(self, *, master: str | None = None, conf: Mapping[str, str] | None = None) -> None:
        """Replaces the master and the Spark settings of the script, as `headwater run --master` does."""
        self._master = master or self._master
        self._conf |= conf or {}

    def start(
        self,
        *,
        accept_new_checkpoint: Mapping[str, Restart] | None = None,
        rebuild_state: Mapping[str, Rebuild] | None = None,
    ) -> None:
        """Starts all stages and returns, for notebooks and tests. A thread supervises them; the end of the program stops them."""
        if self._running is not None:
            raise InvalidApp(f"Application {self.name!r} is already running.", advice="Call stop() first.")
        running = self._run(None)
        try:
            running.start(accept_new_checkpoint, rebuild_state)
        except BaseException:
            running.end()
            raise
        running.supervise_in_background()
        self._running = running
        atexit.register(self.stop)

    def stop(self) -> None:
        """Lets each stage finish its batch, and ends. A second call does nothing."""
        running, self._running = self._running, None
        if running is not None:
            atexit.unregister(self.stop)
            running.end()

    def status(self) -> AppStatus | None:
        """The status of each stage now, or of the last run; None if the application has never run."""
        return self._running.status() if self._running is not None else read_status(self.state)

    def _run(self, watch: Watch | None) -> AppRun:
        return AppRun(self._launch(), name=self.name, log=self.log_url, state=self.state, watch=watch)

    def _launch(self) -> Launch:
        settings = Settings(
            log=self._url, master=self._master, conf=self._conf, state=self.state.absolute(), views=self._views_url,
            idle_us=self._idle_us, operators=self.operators_url, state_partitions=self._state_partitions,
        )  # fmt: skip
        return Launch(self._graph, settings, spark=self._given_spark)

    def _open_view(self, name: str) -> View:
        from headwater.views.view import open_view

        return open_view(self._views_url, name, log=open_log(self._url, create=False, read_only=True))

    def _add(self, function: Callable[..., Any], node: StageNode) -> None:
        self._graph.add_stage(node)
        self._functions[function] = node
        for late in self._graph.late_stages(node):
            self._graph.add_stage(late)

    def _names(self, inputs: Sequence[Input], where: str) -> tuple[str, ...]:
        return tuple(self._topic_of(each, where) for each in inputs)

    def _topic_of(self, given: Input, where: str) -> str:
        if isinstance(given, TopicNode):
            if self._graph.topics.get(given.name) is not given:
                raise InvalidApp(
                    f"{where}: topic {given.name!r} was declared by another application.",
                    advice=f"Declare it here too: app.topic({given.name!r}).",
                )
            return given.name
        if isinstance(given, str):
            return check_name(given)
        stage = next((node for function, node in self._functions.items() if function is given), None)
        if stage is None:
            raise InvalidApp(
                f"{where}: {given!r} is not an input.",
                advice="Pass the result of app.topic or app.table, the function of another stage, or the name of a topic.",
            )
        return stage.name + CHANGES if stage.kind == "view" else stage.to

    def _beside(self, what: str) -> str:
        scheme, _, path = self._url.partition("://") if "://" in self._url else ("file", "", self._url)
        if scheme != "file":
            return f"./{self._graph.name}/{what}"
        return os.path.join(path, what)


def load_app(script: str | os.PathLike[str]) -> App:
    """The application of a script; `InvalidApp` names the line at which the script failed.

    The script's functions go to Spark's workers by value, because they cannot import the script as a module.
    """
    path = Path(script)
    if not path.is_file():
        raise InvalidApp(f"Script {path} does not exist.", advice="Name the file that declares the application.")
    check_spark("An application")
    from headwater.processing.spark.serialization import ship_by_value

    spec = importlib.util.spec_from_file_location("headwater_app", path)
    if spec is None or spec.loader is None:
        raise InvalidApp(f"{path} is not a Python script.", advice="Name a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules["headwater_app"] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except HeadwaterError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        where = f"{path.name}:{lines[-1]}" if lines else path.name
        raise InvalidApp(f"{where}: {type(error).__name__}: {error}", advice="Fix the script.") from error
    ship_by_value(module)
    apps = list({id(value): value for value in vars(module).values() if isinstance(value, App)}.values())
    if len(apps) != 1:
        found = "no application" if not apps else f"{len(apps)} applications"
        raise InvalidApp(f"{path} declares {found}.", advice='A script declares exactly one: app = hw.App("name").')
    return apps[0]


class Views:
    """The views of an application by name: `app.views["per_page"]` opens the view."""

    def __init__(self, app: App) -> None:
        self._app = app

    def __repr__(self) -> str:
        return f"Views(app={self._app.name!r}, names={list(self)})"

    def __iter__(self) -> Iterator[str]:
        return (stage.name for stage in self._app.graph.stages.values() if stage.kind == "view")

    def __getitem__(self, name: str) -> View:
        if name not in list(self):
            raise NotFound(
                f"Application {self._app.name!r} has no view {name!r}.",
                advice=f"Its views are: {', '.join(self) or 'none'}.",
            )
        return self._app._open_view(name)
