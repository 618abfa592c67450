"""The topics of an application: what its script declares, made in the log or held against what is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from headwater.capture.supervisor import CapturedTable
from headwater.log.log import Log
from headwater.log.port.topic import TopicSettings
from headwater.model.clock import duration_us
from headwater.model.ddl import to_ddl
from headwater.model.errors import HeadwaterError, InvalidApp
from headwater.model.schema import SchemaLike, widen
from headwater.processing.graph.graph import StageNode, TopicNode
from headwater.sinks.files import is_folder
from headwater.sinks.sink import is_target
from headwater.views.changes import CHANGES_KEY

if TYPE_CHECKING:
    from headwater.processing.stages.analysis import StageAnalysis

_DURATIONS = ("lateness", "future_max", "retention", "tombstones")


def check_settings(settings: TopicSettings, where: str) -> TopicSettings:
    """The settings of a topic that an application makes; `InvalidApp` for what a topic has not, and for what is no duration."""
    known = list(TopicSettings.__annotations__)
    wrong = next((name for name in settings if name not in known), None)
    if wrong is not None:
        raise InvalidApp(
            f"{where}: a topic has no setting {wrong!r}.", advice=f"Its settings are: key, {', '.join(known)}."
        )
    for name in _DURATIONS:
        try:
            duration_us(settings.get(name) or "0 seconds")
        except HeadwaterError as error:
            raise InvalidApp(f"{where}: {name}: {error.what}", advice=error.advice) from None
    return settings


def make_declared(log: Log, node: TopicNode) -> None:
    """A declared topic is made; one that is there must have the columns that were declared."""
    if node.schema is None:
        return
    if node.name not in log.topics():
        log.create_topic(node.name, node.schema, exist_ok=True, **node.settings)
        return
    there = log.topic(node.name).schema
    for field in node.schema:
        found = there.field(field.name) if field.name in there.names else None
        if found is None or found.type != field.type:
            has = f"has no column {field.name}" if found is None else f"has {field.name} {to_ddl(pa.schema([found]))}"
            raise InvalidApp(
                f"{node.where}: topic {node.name!r} is declared with {field.name}, but in the log it {has}.",
                advice="Declare the columns that `headwater topics show` prints, or alter the topic.",
            )


def captured_table(node: TopicNode) -> CapturedTable:
    """A declared table as its capture knows it."""
    assert node.source is not None
    key = node.settings.get("key")
    return CapturedTable(topic=node.name, url=node.source, key=None if key is None else (key,))


def captured_node(
    name: str, schema: SchemaLike | None, key: str | None, source: str, settings: TopicSettings, where: str
) -> TopicNode:
    """A table that is captured from a database, which knows its columns itself."""
    if schema is not None or settings:
        given = ", ".join([*(["schema"] if schema is not None else []), *settings])
        raise InvalidApp(
            f"{where}: table {name!r} is captured from a database, which defines {given}.",
            advice=f"Leave out {given}. To change its topics later, run `headwater topics alter`.",
        )
    node = TopicNode(name=name, settings={"key": key}, is_table=True, source=source, where=where)
    declared = captured_table(node)
    try:
        table, shown = declared.table, declared.shown
    except HeadwaterError as error:
        raise InvalidApp(f"{where}: table {name!r}: {error.what}", advice=error.advice) from None
    return msgspec.structs.replace(node, shown=shown if table == name else f"{shown}, table {table}")


def writes_topic(stage: StageNode) -> bool:
    """Whether a stage's result is a topic, and neither a view, nor files, nor rows elsewhere."""
    return stage.kind != "view" and not is_folder(stage.to) and not is_target(stage.to)


def make_output(log: Log, stage: StageNode, analysed: StageAnalysis) -> None:
    """The topic of a stage's result is made; one that is there takes the new columns, or the stage is refused.

    A copy has the key of what it copies, unless another was named: what comes of one row keeps its order. A topic that is there is taken
    with the key it has.
    """
    if not writes_topic(stage):
        return
    named = stage.key[0] if stage.key else None
    is_copy = stage.kind == "sink" and named is None
    if stage.to not in log.topics():
        settings = {name: value for name, value in stage.settings.items() if name != "events_max"}
        settings["key"] = _copied_key(log, stage.inputs[0]) if is_copy else named
        log.create_topic(stage.to, analysed.schema, exist_ok=True, **settings)
        return
    there = log.topic(stage.to)
    if there.key != named and not is_copy:
        raise InvalidApp(
            f"{stage.place} writes topic {stage.to!r} with key {named!r}, but the topic's key is {there.key!r}.",
            advice="The key of a topic cannot change. Write to another topic, or declare the topic's key.",
        )
    try:
        if widen(there.schema, analysed.schema) != there.schema:
            log.alter_topic(stage.to, schema=analysed.schema)
    except HeadwaterError as error:
        raise InvalidApp(f"{stage.place} does not fit topic {stage.to!r}: {error.what}", advice=error.advice) from None


def _copied_key(log: Log, topic: str) -> str | None:
    """The key of a topic; what is not in the log yet are the changes of a view, which is made after the topics."""
    return log.topic(topic).key if topic in log.topics() else CHANGES_KEY
