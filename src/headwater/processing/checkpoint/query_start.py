"""The beginning of a query: the offsets that its first batch begins at, written beside its checkpoint before that batch.

Spark's own files say where batches end, so nobody could tell of the first one where it began: at offset 0 only where retention has
removed nothing and the stage was not told to begin elsewhere. A checkpoint without the file `began` is taken to begin at 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from headwater.log.disk.disk import RealDisk
from headwater.log.disk.text import read_text, write_text
from headwater.log.log import Log
from headwater.processing.checkpoint.marker import planned
from headwater.processing.checkpoint.offsets import At, Offsets, to_json

_FILE = _KIND = "began"


def note_beginning(log: Log, checkpoint: str, topics: Sequence[str], start: Mapping[str, str]) -> None:
    """Notes where a query that has planned no batch yet will begin; `start` has offsets of topics, or "earliest"."""
    if planned(checkpoint) is not None:
        return
    places: dict[At, int] = {}
    for topic in topics:
        given = start.get(topic, "")
        told = Offsets.from_json(json.loads(given)).places if given.startswith("{") else {}
        for number, span in log.offsets(topic).items():
            places[topic, number] = max(span.start, told.get((topic, number), 0))
    disk = RealDisk()
    disk.make_folder(checkpoint)
    write_text(disk, f"{checkpoint}/{_FILE}", _KIND, to_json(places))


def beginning(checkpoint: str) -> dict[At, int]:
    """Where a query began; a partition that is not named came later, or is one of a checkpoint without the file."""
    try:
        return dict(Offsets.from_json(read_text(RealDisk(), f"{checkpoint}/{_FILE}", _KIND)).places)
    except FileNotFoundError:
        return {}


def places_text(topic: str, places: Mapping[int, int]) -> str:
    """Offsets of one topic as the options of the data source have them."""
    return json.dumps({topic: {str(number): offset for number, offset in places.items()}})
