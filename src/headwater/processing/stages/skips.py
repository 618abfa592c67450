"""Skips: the events that a stage leaves out, because each of them failed by itself (see `poison`).

<state>/skipped/<stage>.json    {"<topic>": [[<partition>, <offset>], …]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from headwater.processing.checkpoint.offsets import At


class Skips:
    """The events that a stage leaves out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, list[tuple[int, int]]] = {}
        if path.exists():
            read = json.loads(path.read_text())
            self._found = {
                topic: [(partition, offset) for partition, offset in places] for topic, places in read.items()
            }

    def condition(self, topic: str) -> str | None:
        """What the source is to keep of a topic, in SQL."""
        places = self._found.get(topic)
        if not places:
            return None
        return " AND ".join(f"NOT (_partition = {partition} AND _offset = {offset})" for partition, offset in places)

    def add(self, events: Iterable[tuple[At, int]]) -> None:
        """Remembers single events, whole or not at all."""
        for (topic, partition), offset in events:
            self._found.setdefault(topic, []).append((partition, offset))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._found))
        partial.replace(self._path)
