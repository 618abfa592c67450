"""Offsets: how far a query has read, as Spark keeps it in the checkpoint, and how offsets are shared out.

The JSON is that of Spark's Kafka source, `{"<topic>": {"<partition>": <next offset>}}`, and beside the topics what is true of the
whole source, under keys that begin with "." as no topic's name does:

    {"orders": {"0": 12, "1": 7}, ".incarnation": 0, ".topics": {"orders": {"id": "6f…", "schema": 0}}}

`.watermark`, where a stage asks for it, is the event time up to which nothing more is waited for, and `.reached` what it is made of
where the log does not keep that (see `maxima`); `.version`, where a source has an operator in it, is that of its state (see
`source_operator`), and `.events` how many events it was given since the query began.
`.topics` says which topics these
offsets belong to (one that was deleted and created again has another id) and which version of its schema the query read last;
`.incarnation` is the log's. A reader keeps further keys with a dot as they are, so that a later version can add some. Topics and
partitions stand in order: Spark compares offsets as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headwater.model.clock import time_us
from headwater.model.errors import InvalidInput

EARLIEST, LATEST = "earliest", "latest"
WATERMARK, REACHED = ".watermark", ".reached"
VERSION, EVENTS = ".version", ".events"
BEAT = ".beat"
"""The one key of the offsets of beats (see `beats`), which are no events."""

Place = str | int
"""For all partitions: "earliest", "latest", or an event time in µs."""

Places = Mapping[str, Mapping[int, "int | str"]]
"""For each partition of each topic an offset, -2 for the earliest, -1 for the latest, or a time as text."""

At = tuple[str, int]
"""A partition: its topic and its number."""

Reached = Mapping[At, tuple[int, int]]
"""For partitions an offset, and the greatest event time before it."""


class TopicVersion(NamedTuple):
    """What the offsets of a topic belong to: its id, and the number of the schema it was read with."""

    id: str
    schema: int


class Offsets(msgspec.Struct, frozen=True):
    """The next offset of each partition, and what they belong to."""

    places: Mapping[At, int]
    topics: Mapping[str, TopicVersion]
    incarnation: int = 0
    more: Mapping[str, Any] = {}

    def to_json(self) -> dict[str, Any]:
        """What Spark keeps."""
        kept: dict[str, Any] = to_json(self.places)
        kept[".incarnation"] = self.incarnation
        kept[".topics"] = {name: self.topics[name]._asdict() for name in sorted(self.topics)}
        kept.update({key: self.more[key] for key in sorted(self.more)})
        return kept

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Offsets:
        """What `to_json` gave, perhaps by another version of us."""
        places = {
            (name, int(number)): int(offset)
            for name, partitions in kept.items()
            if not name.startswith(".")
            for number, offset in partitions.items()
        }
        topics = {name: TopicVersion(read["id"], read["schema"]) for name, read in kept.get(".topics", {}).items()}
        known = (".incarnation", ".topics")
        more = {key: value for key, value in kept.items() if key.startswith(".") and key not in known}
        return cls(places, topics, kept.get(".incarnation", 0), more)

    @property
    def reached(self) -> Reached:
        """How far event time had come, where the log does not keep that (see `maxima`)."""
        return {
            (name, int(number)): (int(offset), int(time))
            for name, partitions in self.more.get(REACHED, {}).items()
            for number, (offset, time) in partitions.items()
        }


def to_json(places: Mapping[At, int]) -> dict[str, Any]:
    """Offsets as people and Spark's progress see them, in order."""
    shown: dict[str, Any] = {}
    for name, number in sorted(places):
        shown.setdefault(name, {})[str(number)] = places[name, number]
    return shown


def reached_to_json(reached: Reached) -> dict[str, Any]:
    """How far event time had come, as Spark keeps it under `.reached`."""
    shown: dict[str, Any] = {}
    for name, number in sorted(reached):
        shown.setdefault(name, {})[str(number)] = list(reached[name, number])
    return shown


def places_of(ends: Sequence[Any]) -> dict[At, int]:
    """The offsets of every partition in what a batch's marker says of its sources."""
    found: dict[At, int] = {}
    for source in ends:
        found |= Offsets.from_json(source or {}).places
    return found


def count_between(before: Sequence[Any], after: Sequence[Any]) -> int:
    """How many offsets lie between what two markers say of their sources."""
    starts = places_of(before)
    return sum(end - starts.get(place, 0) for place, end in places_of(after).items())


def parse_places(option: str, text: str, ends: Sequence[str]) -> Places:
    """The JSON of `startingOffsets` or `endingOffsets`."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise _refused(option, text, f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    places: dict[str, dict[int, int | str]] = {}
    for name, partitions in found.items():
        if not isinstance(partitions, dict):
            raise _refused(option, text, f"topic {name!r} has no object with its partitions")
        places[name] = {}
        for number, offset in partitions.items():
            if not re.fullmatch(r"\d{1,9}", number):
                raise _refused(option, text, f"{number!r} is no partition of topic {name!r}")
            places[name][int(number)] = _offset(option, text, offset, ends)
    return places


def share(lags: Mapping[At, int], limit: int) -> dict[At, int]:
    """How many of its waiting offsets each partition may go on by, `limit` in all.

    In proportion to what waits, as in Spark's Kafka source: partitions of one topic then stay at about the same time. Each gets
    at least one where the limit allows it, so none starves behind a larger one.
    """
    waiting = {at: lag for at, lag in lags.items() if lag > 0}
    if sum(waiting.values()) <= limit:
        return waiting
    places = sorted(waiting, key=lambda at: (-waiting[at], at))
    lag = np.array([waiting[at] for at in places], dtype=np.float64)
    least = np.zeros(len(places)) if limit < len(places) else np.ones(len(places))
    exact = least + (lag - least) * ((limit - least.sum()) / (lag - least).sum())
    whole = np.floor(exact).astype(np.int64)
    missing = int(limit - whole.sum())
    whole[np.argsort(-(exact - whole), kind="stable")[:missing]] += 1
    return {at: int(count) for at, count in zip(places, whole, strict=True) if count}


def cut(start: int, end: int, pieces: int) -> list[tuple[int, int]]:
    """A range of offsets as so many ranges of about the same size, none of them empty."""
    pieces = max(1, min(pieces, end - start))
    cuts = [start + (end - start) * number // pieces for number in range(pieces + 1)]
    return list(pairwise(cuts))


def _offset(option: str, text: str, offset: object, ends: Sequence[str]) -> int | str:
    if isinstance(offset, int) and not isinstance(offset, bool):
        if offset >= 0 or offset == -1 or (offset == -2 and EARLIEST in ends):
            return offset
    elif isinstance(offset, str):
        try:
            return time_us(offset) and offset
        except InvalidInput:
            pass
    raise _refused(option, text, f"{offset!r} is no place")


def _refused(option: str, text: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"Option {option}={text!r:.120} is not understood: {why}.",
        advice='Use JSON such as {"orders": {"0": 23, "1": -1}}: offsets, -1 for the latest, -2 (to start) for the earliest, or times in '
        "ISO 8601.",
    )
