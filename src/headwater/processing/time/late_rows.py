"""Late rows: how many of them a batch has left out, told by whoever has read them.

Spark can count them, and takes longer for that than for leaving them out: every row passes through a node that cannot be part of the code
that it generates. Where tasks and driver have one disk, a task that has read a range tells the number in a file, and the driver looks
for it when the batch is done. Most batches have none, and no file. A task that is run again tells the same again.

    <folder>/<topic>/<partition>/<start>-<end>             the late rows of that range of offsets
    <folder>/.in.<operator>/<partition>/<start>-<end>      what an operator inside the source has left out of it
    <folder>/.at.<operator>/<partition>/<epoch>-<epoch+1>  what an operator in tasks of its own has left out of a batch
"""

from __future__ import annotations

from collections.abc import Mapping

from headwater.log.disk.disk import Disk, RealDisk
from headwater.processing.checkpoint.offsets import At
from headwater.processing.time.number_file import names_in, read_number, write_number


def inside(uid: str) -> str:
    """How the counts of an operator inside a source are named."""
    return f".in.{uid}"


def apart(uid: str) -> str:
    """How the counts of an operator in tasks of its own are named."""
    return f".at.{uid}"


class LateRows:
    """The folder of one input of a query."""

    def __init__(self, folder: str, *, disk: Disk | None = None) -> None:
        self._folder = folder
        self._disk: Disk = disk or RealDisk()

    def tell(self, at: At, start: int, end: int, count: int) -> None:
        """So many rows between two numbers are late."""
        if count:
            write_number(self._disk, f"{self._folder}/{at[0]}/{at[1]}/{start}-{end}", count, point="late rows:")

    def take(self, spans: Mapping[At, tuple[int, int]]) -> int:
        """How many were told of ranges within a batch that is done; it is not told again."""
        total = 0
        for (topic, partition), (first, behind) in spans.items():
            folder = f"{self._folder}/{topic}/{partition}"
            for name in names_in(self._disk, folder):
                start, _, end = name.removeprefix(".").partition(".")[0].partition("-")
                if first <= int(start) and int(end) <= behind:
                    path = f"{folder}/{name}"
                    total += (read_number(self._disk, path) or 0) if "." not in name else 0
                    self._disk.remove(path)  # a draft too, of a task that died
        return total
