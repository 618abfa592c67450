"""Maxima: how far event time has come in the partitions that a query reads, where the log itself does not keep it.

That is so on Kafka. A task that has read a range knows it, and writes it down in a folder beside the query's checkpoint; the next batch is
planned with what the tasks of the one before have told. So here the watermark of a batch is what had been reached where it begins, one
batch behind that of a log in a folder. It stands in the batch's offsets, with the place it is true for, and a batch that is run again has
the same. What is missing in the folder is found by reading the events again.

    <folder>/<topic>/<partition>/<offset>         the greatest event time before that offset, in µs
    <folder>/<topic>/<partition>/<offset>.beat    the same, told by a heartbeat: nothing was appended for a while
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headwater.log.disk.disk import Disk, RealDisk
from headwater.model.clock import NO_TIME
from headwater.processing.checkpoint.offsets import At, Reached
from headwater.processing.time.number_file import names_in, read_number, write_number

_BEAT = ".beat"


class Maxima:
    """The folder of one input of a query."""

    def __init__(self, folder: str, *, disk: Disk | None = None) -> None:
        self._folder = folder
        self._disk: Disk = disk or RealDisk()
        self._known: dict[At, tuple[int, int]] = {}

    def tell(self, at: At, offset: int, time: int, *, is_heartbeat: bool = False) -> None:
        """So far had event time come before an offset; whoever tells it again tells the same."""
        write_number(self._disk, self._path(at, offset, _BEAT if is_heartbeat else ""), time, point="maximum:")

    def reached(
        self, places: Mapping[At, int], before: Reached, read: Callable[[At, int, int, int], int]
    ) -> dict[At, tuple[int, int]]:
        """How far event time had come at these places; `before` is true for earlier ones, and `read` goes on from there."""
        found = {}
        for at, offset in places.items():
            known = self._known.get(at)
            if known is None or known[0] != offset:
                known = self._known[at] = offset, self._told(at, offset, before.get(at, (offset, NO_TIME)), read)
                self._forget(at, offset)
            beat = read_number(self._disk, self._path(at, offset, _BEAT))
            found[at] = offset, known[1] if beat is None else max(known[1], beat)
        return found

    def _told(self, at: At, offset: int, before: tuple[int, int], read: Callable[[At, int, int, int], int]) -> int:
        told = read_number(self._disk, self._path(at, offset))
        if told is not None:
            return told
        start, time = before
        return read(at, start, offset, time) if start < offset else time

    def _forget(self, at: At, offset: int) -> None:
        """A batch that is run again finds its maxima in its offsets, so earlier ones are needed by nobody."""
        folder = self._path(at, offset).rpartition("/")[0]
        for name in names_in(self._disk, folder):
            if int(name.partition(".")[0]) < offset:
                self._disk.remove(f"{folder}/{name}")

    def _path(self, at: At, offset: int, kind: str = "") -> str:
        return f"{self._folder}/{at[0]}/{at[1]}/{offset}{kind}"


def maxima_of(checkpoint: str, number: int) -> str:
    """The folder of an input of the query with this checkpoint."""
    return f"{checkpoint}/maxima/{number}"
