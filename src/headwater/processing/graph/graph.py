"""The graph of an application: topics and tables, and the stages between them; checked and drawn without Spark.

Everything that can be known from the declarations alone is refused here, by a sentence that names the stage and the line of
the script: unknown inputs, two writers of one topic, cycles. What only Spark can tell stands in `analysis`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa

from headwater.log.port.topic import check_name
from headwater.model.clock import Duration, duration_us
from headwater.model.errors import InvalidApp
from headwater.model.schema import SchemaLike, to_arrow_schema
from headwater.model.url import without_password

StageKind = Literal["stream", "view", "sink"]
OutputMode = Literal["append", "update", "complete"]
Late = Literal["drop", "topic", "correct", "window"]
"""What becomes of events that come later than their topic's lateness allows."""

CHANGES = ".changes"
"""What follows a view's name in the topic of its changes."""

DEAD_SCHEMA = "topic STRING, partition INT, offset BIGINT, event STRING, error STRING"
"""The columns of `<stage>.dead`: the place of an event that a stage set aside, the event as JSON, and why."""


class TopicNode(msgspec.Struct, frozen=True, kw_only=True):
    """A topic that stages read: declared with its schema, or found in the log. As a table it is the newest row per key."""

    name: str
    schema: pa.Schema | None = None
    settings: Mapping[str, Any] = {}
    is_table: bool = False
    source: str | None = None
    """The URL of the database that it is captured from, which may hold a password; `shown` does not."""
    shown: str = ""
    where: str = ""

    def __hash__(self) -> int:
        return hash(self.name)


class StageNode(msgspec.Struct, frozen=True, kw_only=True):
    """A function from DataFrames to a DataFrame, and where its result goes; a sink has no function."""

    name: str
    kind: StageKind
    inputs: tuple[str, ...]
    function: Callable[..., Any] | None
    to: str
    key: tuple[str, ...] = ()
    mode: OutputMode = "append"
    trigger: Duration | None = None
    late: Late | Literal["only"] | None = None
    """`only` is for the stage that keeps late events in a topic."""
    late_of: str = ""
    """Of such a stage, the one that they come too late for."""
    corrections_us: int = 0
    log_columns: tuple[str, ...] = ()
    settings: Mapping[str, Any] = {}
    capture: str | None = None
    """The stage of the capture whose transactions a sink applies whole; its inputs are tables of that."""
    where: str = ""

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def place(self) -> str:
        """How errors name it."""
        return f"Stage {self.name!r} ({self.where})"


class Graph:
    """What an application consists of, in the order in which it was declared."""

    def __init__(self, name: str) -> None:
        self.name = check_name(name, of="application")
        self.topics: dict[str, TopicNode] = {}
        self.stages: dict[str, StageNode] = {}

    def add_topic(self, node: TopicNode) -> TopicNode:
        """Declares a topic or table; twice is refused, except at a prompt: there the newer declaration counts."""
        if node.name in self.topics and is_at_prompt():
            del self.topics[node.name]
        self._check_free(check_name(node.name), node.where)
        self.topics[node.name] = node
        return node

    def add_stage(self, node: StageNode) -> StageNode:
        """Declares a stage; its name and its output are its own. At a prompt the newer declaration of a name counts."""
        check_name(node.name, of="stage")
        replaced = self.stages.pop(node.name, None) if is_at_prompt() else None
        try:
            return self._add_stage(node)
        except BaseException:
            if replaced is not None:
                self.stages[node.name] = replaced
            raise

    def _add_stage(self, node: StageNode) -> StageNode:
        if node.name in self.stages:
            before = self.stages[node.name]
            raise InvalidApp(
                f"{node.where}: there is a stage {node.name!r} already, at {before.where}.",
                advice="Give one of the functions another name.",
            )
        if node.trigger is not None:
            check_trigger(node)
        if (most := node.settings.get("events_max")) is not None and (not isinstance(most, int) or most < 1):
            raise InvalidApp(f"{node.place}: events_max={most!r} is not a number of events.", advice="Use 1 or more.")
        if node.kind == "stream" or (node.kind == "sink" and "/" not in node.to):
            self._check_free(check_name(node.to), node.where)
            if len(node.key) > 1:
                raise InvalidApp(
                    f"{node.place}: topic {node.to!r} cannot have the key {', '.join(node.key)}: a topic's key is one column.",
                    advice="Name one of them, or have a stream make a column of them all.",
                )
        if not node.inputs:
            raise InvalidApp(f"{node.place} has no inputs.", advice="Name the topics it reads: @app.stream(clicks, …).")
        twice = next((topic for at, topic in enumerate(node.inputs) if topic in node.inputs[:at]), None)
        if twice is not None:
            raise InvalidApp(
                f"{node.place} reads topic {twice!r} twice.",
                advice=f'Name it once; in the function the DataFrame can be used twice: {twice}.alias("a"), {twice}.alias("b").',
            )
        self.stages[node.name] = node
        return node

    def late_stages(self, stage: StageNode) -> list[StageNode]:
        """The stages that keep what comes too late for a stage: one for each input, if it asks for that. No row of a table is left out."""
        if stage.late not in (None, "drop", "topic", "correct", "window"):
            raise InvalidApp(
                f"{stage.place}: late={stage.late!r} is not a policy for late events.",
                advice='Use "drop", "topic", "correct" or "window".',
            )
        if (stage.late == "correct") != (stage.corrections_us > 0):
            raise InvalidApp(
                f'{stage.place}: late="correct" and corrections= belong together.',
                advice='Say for how long: late="correct", corrections="1 hour".',
            )
        if stage.late != "topic":
            return []
        streams = [topic for topic in stage.inputs if topic not in self.topics or not self.topics[topic].is_table]
        names = dict.fromkeys(streams, f"{stage.name}.late")
        if len(names) > 1:
            names = {topic: f"{name}.{topic}" for topic, name in names.items()}
        return [
            StageNode(
                name=name,
                kind="stream",
                inputs=(topic,),
                function=None,
                to=name,
                late="only",
                late_of=stage.name,
                where=stage.where,
            )
            for topic, name in names.items()
        ]

    def writer_of(self, topic: str) -> StageNode | None:
        """The stage whose result the topic holds."""
        for stage in self.stages.values():
            if topic == stage.to and stage.kind != "view":
                return stage
            if stage.kind == "view" and topic == stage.name + CHANGES:
                return stage
        return None

    def order(self) -> list[StageNode]:
        """All stages, each after those whose results it reads; a cycle is refused."""
        done: dict[str, StageNode] = {}

        def visit(stage: StageNode, path: tuple[str, ...]) -> None:
            if stage.name in done:
                return
            if stage.name in path:
                circle = " → ".join([*path[path.index(stage.name) :], stage.name])
                raise InvalidApp(
                    f"{stage.place} reads what it writes itself: {circle}.",
                    advice="Events flow one way; write to another topic, which no stage before it reads.",
                )
            for topic in stage.inputs:
                writer = self.writer_of(topic)
                if writer is not None:
                    visit(writer, (*path, stage.name))
            done[stage.name] = stage

        for stage in self.stages.values():
            visit(stage, ())
        return list(done.values())

    def check(self, *, in_log: Sequence[str]) -> None:
        """Refuses what cannot run: no stages, inputs that nobody declares, writes or has in the log, cycles."""
        if not self.stages:
            raise InvalidApp(
                f"Application {self.name!r} has no stages.", advice="Declare one with @app.stream or @app.view."
            )
        for stage in self.order():
            for topic in stage.inputs:
                if topic in self.topics and (self.topics[topic].schema is not None or self.topics[topic].source):
                    continue
                if topic not in in_log and self.writer_of(topic) is None:
                    known = ", ".join(
                        sorted(
                            {*self.topics, *in_log, *(without_password(s.to) for s in self.stages.values())} - {topic}
                        )
                    )
                    raise InvalidApp(
                        f"{stage.place} reads topic {topic!r}, which nobody declares and which is not in the log.",
                        advice=f"Declare it with app.topic({topic!r}, schema=…), or name one of: {known}.",
                    )

    def check_names(self, names: Mapping[str, Any]) -> None:
        """Refuses names that are no stage's."""
        for name in names:
            if name not in self.stages:
                raise InvalidApp(
                    f"Application {self.name!r} has no stage {name!r}.",
                    advice=f"Its stages are {', '.join(self.stages)}.",
                )

    def _check_free(self, topic: str, where: str) -> None:
        writer, declared = self.writer_of(topic), self.topics.get(topic)
        taken = writer.where if writer else declared.where if declared else None
        if taken is not None:
            raise InvalidApp(
                f"{where}: topic {topic!r} has a declaration or a writer already, at {taken}.",
                advice="A topic is declared once and written by one stage; choose another name.",
            )

    # Drawing

    def draw(self, notes: Mapping[str, Sequence[str]] | None = None) -> str:
        """The graph as text: from each topic that no stage writes down to where its events leave; `notes` by stage."""
        self.order()
        roots = [topic for stage in self.stages.values() for topic in stage.inputs if self.writer_of(topic) is None]
        lines: list[str] = []
        for root in dict.fromkeys(roots):
            lines += [self._label(root), *self._below(root, notes or {}, "")]
        return "\n".join(lines)

    def _below(self, topic: str, notes: Mapping[str, Sequence[str]], indent: str) -> Iterator[str]:
        readers = [stage for stage in self.stages.values() if topic in stage.inputs]
        for number, stage in enumerate(readers):
            last = number == len(readers) - 1
            others = [other for other in stage.inputs if other != topic]
            also = f" (with {', '.join(others)})" if others else ""
            yield f"{indent}{'└' if last else '├'}─ {_shown(stage)}{also}"
            inner = indent + ("   " if last else "│  ")
            if topic == stage.inputs[0]:
                yield from (f"{inner}  {note}" for note in notes.get(stage.name, ()))
                if stage.kind == "stream":
                    yield from self._below(stage.to, notes, inner)
                elif stage.kind == "view":
                    yield from self._below(stage.name + CHANGES, notes, inner)

    def _label(self, topic: str) -> str:
        node = self.topics.get(topic)
        if node is not None and node.source is not None:
            return f"{topic} (captured from {node.shown})"
        if node is None or node.schema is None:
            return topic
        facts = [f"{role} {node.settings[role]}" for role in ("key", "time") if node.settings.get(role)]
        return f"{topic} ({', '.join(facts)})" if facts else topic


def _shown(stage: StageNode) -> str:
    match stage.kind:
        case "stream":
            return f"{stage.name} → topic {stage.to}"
        case "view":
            return f"{stage.name} → view, key ({', '.join(stage.key)}), {stage.mode}"
        case "sink":
            return f"{stage.name} → sink {without_password(stage.to)}"


def declared_schema(schema: SchemaLike | None) -> pa.Schema | None:
    """A topic's schema as it was declared: a DDL string, an Arrow schema or a dataclass."""
    return None if schema is None else to_arrow_schema(schema)


def check_trigger(stage: StageNode) -> None:
    """Refuses a trigger that is not a duration."""
    try:
        duration_us(stage.trigger)
    except Exception:  # noqa: BLE001 - whatever is wrong with it, the sentence is the same
        raise InvalidApp(
            f"{stage.place}: trigger={stage.trigger!r} is not a duration.", advice='Use one such as "1 second".'
        ) from None


def is_at_prompt() -> bool:
    """Whether somebody types: a notebook, IPython or Python's own prompt. A cell that is run again declares the same things again."""
    return hasattr(sys, "ps1")


def caller(depth: int = 2) -> str:
    """File and line of whoever called the function that calls this: where something was declared."""
    frame = sys._getframe(depth)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def place_of(function: Callable[..., Any]) -> str:
    """File and line of a function; one without is no stage's."""
    code = getattr(function, "__code__", None)
    if code is None:
        raise InvalidApp(
            f"{function!r} is not a Python function.", advice="Decorate a function that is defined with def."
        )
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
