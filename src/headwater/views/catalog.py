"""The catalogue of views: which generations of a view there are in a log, and which one is the view.

It is the compacted topic `headwater.views` with one event for each decision, keyed by the view's name; the last event says all.
A swap is one such event, so it happens at one moment for everybody; stores follow it, and readers of `<view>.changes` get what changed in
the same transaction of the log (see `topic`). Only the holder of a view's stage
writes about that view.
"""

from __future__ import annotations

import msgspec

from headwater.log.log import Log
from headwater.model.errors import NotFound, TopicNotFound
from headwater.views.definition import ViewDefinition, check_definition

TOPIC = "headwater.views"
_SCHEMA = "view STRING NOT NULL, current INT NOT NULL, building INT, definitions STRING NOT NULL"


class CatalogEntry(msgspec.Struct, frozen=True):
    """One view: the generation that readers see, the one that is being built (or None), and their definitions."""

    current: int
    building: int | None
    definitions: dict[int, ViewDefinition]

    @property
    def definition(self) -> ViewDefinition:
        """The definition that readers see."""
        return self.definitions[self.current]


class ViewPlan(msgspec.Struct, frozen=True):
    """How to go on with a view: its definition with the generation to maintain, and why that is a new one if it is."""

    definition: ViewDefinition
    rebuild: bool
    why: str = ""


class ViewCatalog:
    """The views of a log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def names(self) -> list[str]:
        """The views, by name."""
        return sorted(self._entries())

    def find(self, name: str) -> CatalogEntry | None:
        """What is known of a view."""
        return self._entries().get(name)

    def get(self, name: str) -> CatalogEntry:
        """What is known of a view; `NotFound`."""
        entries = self._entries()
        if name not in entries:
            raise NotFound(
                f"View {name!r} does not exist in {self._log.url}.",
                advice=f"The views of this log are: {', '.join(sorted(entries)) or 'none'}.",
            )
        return entries[name]

    def put(self, name: str, entry: CatalogEntry) -> None:
        """Decides something about a view."""
        self._log.create_topic(TOPIC, _SCHEMA, key="view", partitions=1, compact=True, exist_ok=True)
        self._log.append(TOPIC, [catalog_row(name, entry)])

    def _entries(self) -> dict[str, CatalogEntry]:
        try:
            rows = self._log.table(TOPIC)
        except TopicNotFound:
            return {}
        return {row["view"]: _entry(row) for row in rows.to_pylist()}


def catalog_row(name: str, entry: CatalogEntry) -> dict[str, object]:
    """The event of a decision."""
    texts = {generation: definition.to_json() for generation, definition in entry.definitions.items()}
    return {
        "view": name,
        "current": entry.current,
        "building": entry.building,
        "definitions": msgspec.json.encode(texts).decode(),
    }


def plan_view(log: Log, definition: ViewDefinition) -> ViewPlan:
    """Which generation a definition is: the one that is there, the one that is being built, or a new one beside it."""
    entry = ViewCatalog(log).find(definition.name)
    if entry is None:
        return ViewPlan(msgspec.structs.replace(definition, generation=1), rebuild=False)
    verdict = check_definition(entry.definition, definition)
    if verdict.same:
        return ViewPlan(msgspec.structs.replace(definition, generation=entry.current), rebuild=False)
    if entry.building is not None and check_definition(entry.definitions[entry.building], definition).same:
        generation = entry.building
    else:
        generation = max(entry.definitions) + 1
    return ViewPlan(msgspec.structs.replace(definition, generation=generation), rebuild=True, why=verdict.why)


def _entry(row: dict[str, object]) -> CatalogEntry:
    texts = msgspec.json.decode(str(row["definitions"]), type=dict[int, str])
    definitions = {generation: ViewDefinition.from_json(text) for generation, text in texts.items()}
    building = row["building"]
    return CatalogEntry(int(str(row["current"])), None if building is None else int(str(building)), definitions)
