"""Late rows: how many of them a batch has left out, told by whoever has read them.

Spark can count them, and takes longer for that than for leaving them out: every row passes through a node that cannot be part of the code
that it generates. Where tasks and driver have one disk, a task that has read a range tells the number in a file, and the driver looks
for it when the batch is done. Most batches have none, and no file. A task that is run again tells the same again.

    <folder>/<topic>/<partition>/<start>-<end>             the late rows of that range of offsets
    <folder>/.in.<operator>/<partition>/<start>-<end>      what an operator inside the source has left out of it
    <folder>/.at.<operator>/<partition>/<epoch>-<epoch+1>  what an operator in tasks of its own has left out of a batch
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from headwater.processing.checkpoint.offsets import At


def inside(uid: str) -> str:
    """How the counts of an operator inside a source are named."""
    return f".in.{uid}"


def apart(uid: str) -> str:
    """How the counts of an operator in tasks of its own are named."""
    return f".at.{uid}"


class LateRows:
    """The folder of one input of a query."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def tell(self, at: At, start: int, end: int, count: int) -> None:
        """So many rows between two numbers are late."""
        if not count:
            return
        path = self._folder / at[0] / str(at[1]) / f"{start}-{end}"
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(str(count))
        draft.replace(path)

    def take(self, spans: Mapping[At, tuple[int, int]]) -> int:
        """How many were told of ranges within a batch that is done; it is not told again."""
        total = 0
        for (topic, partition), (first, behind) in spans.items():
            with suppress(FileNotFoundError):
                for path in (self._folder / topic / str(partition)).iterdir():
                    start, _, end = path.name.partition("-")
                    if not start.startswith(".") and first <= int(start) and int(end) <= behind:
                        total += int(path.read_text())
                        path.unlink()
        return total
