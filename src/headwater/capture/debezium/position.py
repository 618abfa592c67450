"""A position in topics that Debezium fills.

A position is how many events the capture has read of all topics, then where an event stood: `00000000000000001234 users/0@567`. It sorts as
they were read, which is their order within each partition, and so for each key; Kafka keeps no order between partitions. The position
up to which everything was read names all partitions: `00000000000000001234~users/0@568,users/1@12`. There `*` behind a table's name says
that it is copied, and `d` behind an offset that the event before it was a delete, whose tombstone may follow.

Not thread-safe.
"""

from __future__ import annotations

import re

import msgspec

_PLACE = re.compile(r"(.+?)(\*?)/(\d+)@(\d+)(d?)")


class Place(msgspec.Struct):
    """How far a partition was read, and whether the last event was a delete."""

    offset: int
    behind_delete: bool = False


class Read(msgspec.Struct):
    """How far everything was read: a position, taken apart."""

    events: int = 0
    copied: set[str] = msgspec.field(default_factory=set)
    places: dict[tuple[str, int], Place] = msgspec.field(default_factory=dict)

    @classmethod
    def at(cls, position: str) -> Read:
        """The parts of a position."""
        events, _, listed = position.partition("~")
        read = cls(int(events))
        for text in filter(None, listed.split(",")):
            found = _PLACE.fullmatch(text)
            assert found is not None, position
            table, copied, partition, offset, deleted = found.groups()
            read.places[table, int(partition)] = Place(int(offset), bool(deleted))
            if copied:
                read.copied.add(table)
        return read

    @property
    def position(self) -> str:
        """The text of it."""
        places = (
            f"{table}{'*' if table in self.copied else ''}/{partition}@{place.offset}{'d' if place.behind_delete else ''}"
            for (table, partition), place in sorted(self.places.items())
        )
        return f"{self.events:020d}~{','.join(places)}"
