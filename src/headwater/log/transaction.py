"""A transaction as users see it: appends to any topics, offsets of consumers and leases of queues, all together or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from headwater.log.clients.appender import place_again
from headwater.log.clients.consumer import ConsumedPart, Consumer
from headwater.log.port.group import OffsetPart
from headwater.log.port.write import Write
from headwater.log.queue.lease import Lease
from headwater.log.queue.queue_log import QueueLog
from headwater.log.queue.unit_of_work import checked_leases, commit_work, tell_committed
from headwater.model.errors import Closed, InvalidInput, LeaseExpired, Repartitioned


class Transaction:
    """Gathers what belongs together; `with` commits at its end, unless something was raised. `offsets` say what went where.

    It is used once: after its commit, or after something was raised, it is over.
    """

    def __init__(self, log: QueueLog, writes: Iterable[Write] = ()) -> None:
        """`writes` are among its appends, and placed already."""
        self._log = log
        self._writes: list[Write] = [*writes]
        self._consumed: dict[tuple[str, str, int], OffsetPart] = {}
        self._consumed_parts: list[ConsumedPart] = []
        self._leases: list[Lease] = []
        self._is_over = False
        self.offsets: dict[str, dict[int, list[range]]] = {}

    def append(self, topic: str, rows: Any) -> None:
        """Adds events to the transaction; nothing is written before it commits."""
        self._check_not_over()
        self._writes += self._log.appender.place(topic, rows)

    def commit_offsets(self, consumer: Consumer) -> None:
        """Commits what the consumer has handed out so far together with the appends: both happen or neither.

        If the transaction does not commit, the consumer goes back to what it had committed, so the events come again.
        """
        self._check_not_over()
        if not isinstance(consumer, Consumer):
            raise InvalidInput(
                f"{consumer!r:.80} is not a consumer.",
                advice='Give the consumer that log.consumer("…", group="…") opened.',
            )
        consumed = ConsumedPart(consumer)
        self._consumed_parts.append(consumed)
        for part in consumed.offsets(self._log.store):
            self._consumed[part.group, part.topic, part.partition] = part

    def ack(self, leases: Iterable[Lease]) -> None:
        """Acknowledges leases, of any queues, together with everything else; given back if the transaction fails."""
        self._check_not_over()
        self._leases += checked_leases(leases)

    def commit(self) -> None:
        """Appends everything, commits the offsets and acknowledges the leases."""
        self._check_not_over()
        self._is_over = True
        writes, leases, consumed = self._writes, self._leases, list(self._consumed.values())
        if not (writes or leases or consumed):
            return
        try:
            writes, spans = self._write(writes, leases, consumed)
        except BaseException:
            self._end(None)
            raise
        self._end(consumed)
        tell_committed(leases)
        for write, span in zip(writes, spans, strict=True):
            self.offsets.setdefault(write.topic.name, {}).setdefault(write.partition, []).append(span)

    def __enter__(self) -> Self:
        self._check_not_over()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_over:  # `commit` was called in the block
            return
        if kind is None:
            self.commit()
            return
        self._is_over = True
        self._end(None)
        for lease in self._leases:
            with suppress(LeaseExpired):
                lease.nack(reason="the transaction failed")

    def _check_not_over(self) -> None:
        if self._is_over:
            raise Closed("The transaction is over.", advice="Begin another with log.transaction().")

    def _write(
        self, writes: list[Write], leases: list[Lease], consumed: list[OffsetPart]
    ) -> tuple[list[Write], list[range]]:
        """What was written and where it stands; what a topic's split has moved since it was placed is placed again."""
        while True:
            try:
                if leases:
                    return writes, commit_work(self._log, writes, leases, offsets=consumed)
                return writes, self._log.store.write_atomically(writes, consumed)
            except Repartitioned:
                writes = place_again(self._log.store, writes)

    def _end(self, committed: Sequence[OffsetPart] | None) -> None:
        """Tells the consumers what was committed of theirs."""
        consumed_parts, self._consumed_parts = self._consumed_parts, []
        for consumed in consumed_parts:
            consumed.ended(committed)
