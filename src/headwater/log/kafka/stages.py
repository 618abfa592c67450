"""Stages on Kafka: markers are records of the compacted topic `__headwater.stages`, written in the transaction that stores the events.

Whoever opens a stage takes the transactional id of that stage: the brokers roll back what its holder had begun, and refuse every
earlier holder from then on. Then the new fencing number is written (key `<stage>/number`), and when readers see it the newest
marker (key `<stage>/marker`) is read: nobody else can write one any more. A transaction of another stage that is open in the topic
keeps readers before it, so a holder looks at its marker only when all that it has committed is seen.

Not the offsets of a group, whose metadata could hold a marker too: brokers forget the offsets of a group without members after a
week, and a stage that was stopped for longer would write its last batch again (see docs/decisions/0009).

What a transaction wrote becomes visible partition by partition, as always on Kafka. Where the events of an earlier commit
stand is not kept. A number belongs to the process that took it: a transaction cannot be handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.log.kafka.catalog import INTERNAL, CompactedTopic
from headwater.log.kafka.cluster import Cluster
from headwater.log.kafka.writer import Parcel, Transactor
from headwater.log.port.stage import Positions, StageCommit, StageState, already_there
from headwater.log.port.write import Write
from headwater.model.errors import Fenced
from headwater.model.marker import Marker

_NUMBER, _MARKER = "number", "marker"


class KafkaStages:
    """What the topic says of the stages of one log, and the transactions of those that this process holds."""

    def __init__(self, cluster: Cluster, prefix: str) -> None:
        self._cluster = cluster
        self._holders: dict[tuple[str, int], Transactor] = {}
        self._markers: dict[str, Marker] = {}
        self._numbers: dict[str, int] = {}
        self._topic = CompactedTopic(cluster, f"{prefix}{INTERNAL}stages", self._apply)

    def names(self) -> list[str]:
        """The names of all stages, sorted."""
        self._topic.refresh()
        return sorted(self._numbers)

    def state(self, name: str) -> StageState:
        """What every reader may know, and at least what a holder in this process has committed."""
        for (stage, _), holder in list(self._holders.items()):
            if stage == name:
                holder.wait_until_seen()
        self._topic.refresh()
        return StageState(self._numbers.get(name, 0), self._markers.get(name))

    def held(self, name: str) -> int | None:
        """The number by which this process holds a stage that nobody has opened since: it need not open it again.

        Opening makes a new client, which takes most of the time of a small commit.
        """
        self._topic.refresh()
        number = self._numbers.get(name, 0)
        holder = self._holders.get((name, number))
        return number if holder is not None and holder.is_usable else None

    def take(self, name: str) -> int:
        """A new fencing number: fences every holder, and only then looks at what they left."""
        self._topic.make()
        number: int = self._cluster.writer.run(lambda: self._taken(name)).result()
        return number

    def commit(
        self,
        name: str,
        number: int,
        marker: Marker | None,
        writes: Sequence[Write],
        *,
        gaps: bool,
        parcel: Callable[[Write], Parcel],
    ) -> StageCommit:
        """Appends what `parcel` makes of the writes together with the marker, or does nothing (see `port.stage`)."""
        if known := already_there(name, number, self.state(name), marker, gaps=gaps):
            return known
        parcels = [*map(parcel, writes), self.parcel(name, marker)]
        offsets = self._cluster.writer.run(lambda: self.holder(name, number).commit(parcels)).result()
        positions: Positions = {}
        for write, given in zip(writes, offsets, strict=False):
            spans = positions.setdefault(write.topic.name, {})
            first = spans[write.partition].start if write.partition in spans else given[0]
            spans[write.partition] = range(first, given[-1] + 1)
        return StageCommit(marker, written=True, positions=positions)

    def release(self) -> None:
        """Ends the transactions of all stages that are held."""
        for holder in list(self._holders.values()):
            holder.close()

    def holder(self, name: str, number: int) -> Transactor:
        """The transactions of a stage that this process has opened."""
        found = self._holders.get((name, number))
        if found is None:
            raise Fenced(
                f"Stage {name!r} was not opened in this process with number {number}, or was opened again since.",
                advice="Nothing was written. On Kafka, open the stage where it commits.",
            )
        return found

    def parcel(self, name: str, marker: Marker | None) -> Parcel:
        """The record that says which marker is the last."""
        return self._topic.parcel([(_key(name, _MARKER), None if marker is None else marker.canonical())])

    def _taken(self, name: str) -> int:
        transactor = Transactor(self._cluster, f"{self._topic.name}.{name}")
        try:
            self._topic.refresh()
            number = self._numbers.get(name, 0) + 1
            transactor.commit([self._topic.parcel([(_key(name, _NUMBER), b"%d" % number)])])
            transactor.wait_until_seen()  # then readers see all that earlier holders have committed, too
        except BaseException:
            transactor.close()
            raise
        for held in [held for held in self._holders if held[0] == name]:
            self._holders.pop(held).close()
        self._holders[name, number] = transactor
        return number

    def _apply(self, key: bytes, value: bytes | None) -> None:
        name, _, kind = key.decode("utf-8").rpartition("/")
        if kind == _NUMBER and value is not None:
            self._numbers[name] = int(value)
        elif kind == _MARKER and value is not None:
            self._markers[name] = Marker.from_canonical(value)
        elif kind == _MARKER:
            self._markers.pop(name, None)


def _key(name: str, kind: str) -> bytes:
    return f"{name}/{kind}".encode()
