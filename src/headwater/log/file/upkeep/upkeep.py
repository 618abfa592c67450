"""The upkeep of a local log by one process: what is done to closed segments, on demand and by the keeper's thread.

Thread-safety: may be used by many threads; a partition is worked on by one of them, of all processes, at a time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from headwater.log.disk.gate import Gate
from headwater.log.file.cursor import ancestors_chunks
from headwater.log.file.handles import Handles
from headwater.log.file.partition.partition import Partition
from headwater.log.file.upkeep.compaction import DIRTY_SHARE_MIN, compact_partition, keys_of, remove_covered
from headwater.log.file.upkeep.keeper import Keeper, holding
from headwater.log.file.upkeep.reserve import fill
from headwater.log.file.upkeep.retention import expire_partition
from headwater.log.file.upkeep.seal import seal_partition
from headwater.log.queue.floor import Acked
from headwater.model.clock import Clock
from headwater.model.errors import Damaged, HeadwaterError


class Upkeep:
    """Sealing, retention and compaction of the topics of one log; `has_thread` if a thread may do it by itself."""

    def __init__(
        self,
        handles: Handles,
        gate: Gate,
        *,
        clock: Clock,
        counters: Counter[str],
        acked: Callable[[Partition], Acked | None],
        has_thread: bool,
    ) -> None:
        self._acked = acked
        self._handles = handles
        self._gate = gate
        self._clock = clock
        self._counters = counters
        self._has_thread = has_thread
        self._mutex = threading.Lock()
        self._keeper: Keeper | None = None
        self._closing = False

    def seal(self, name: str) -> int:
        """Seals the closed segments of a topic; returns how many."""
        return self._keep_topic(name, lambda partition: seal_partition(self._handles.disk, partition))

    def tidy(self, name: str, *, dirty_share_min: float = 0.0) -> int:
        """Removes what a topic no longer keeps; returns how many events."""
        return self._keep_topic(name, partial(self._tidy, dirty_share_min=dirty_share_min))

    def expire(self, partition: Partition) -> int:
        """Removes what a partition no longer keeps for its age or size, by its topic as it is now; returns how many events."""
        self._handles.refresh(partition.topic.name)
        return self._keep(partition.topic.name, partition.number, self._expire)

    def seal_later(self) -> None:
        """A segment was closed."""
        keeper = self._started()
        if keeper is not None:
            keeper.seal_later()

    def tidy_regularly(self) -> None:
        """Topics that are to be kept small are tidied from now on."""
        if (keeper := self._keeper or self._started()) is not None:
            keeper.tidy_regularly()

    def close(self) -> None:
        """Ends the thread, after the partition at hand."""
        self._closing = True
        if self._keeper is not None:
            self._keeper.close()

    def _started(self) -> Keeper | None:
        if not self._has_thread:
            return None
        with self._mutex:
            if self._keeper is None:
                self._keeper = Keeper(self._seal_all, self._tidy_all)
            return self._keeper

    def _seal_all(self) -> None:
        for name in self._handles.names():
            with suppress(HeadwaterError), self._gate:
                self.seal(name)

    def _tidy_all(self) -> None:
        for name in self._handles.names():
            with suppress(HeadwaterError), self._gate:
                if self._handles.refresh(name).is_kept_small:
                    self.tidy(name, dirty_share_min=DIRTY_SHARE_MIN)

    def _keep_topic(self, name: str, act: Callable[[Partition], int]) -> int:
        done = 0
        for number in range(self._handles.refresh(name).partitions):
            if not self._closing:
                done += self._keep(name, number, act)
        return done

    def _keep(self, name: str, number: int, act: Callable[[Partition], int]) -> int:
        """Does something to a partition's closed segments, unless somebody else is at them."""
        partition = self._handles.partition(name, number)
        topic = partition.topic
        try:
            with holding(self._handles.disk, partition) as alone:
                if not alone:
                    return 0
                try:
                    return act(partition)
                except Damaged:
                    if self._handles.refresh(name).schema_id == topic.schema_id:
                        raise
                    return act(partition)
        except FileNotFoundError:
            self._handles.refresh(name)
            return 0

    def _tidy(self, partition: Partition, *, dirty_share_min: float) -> int:
        removed = self._expire(partition)
        if partition.topic.compact:
            compacted = compact_partition(
                self._handles.disk,
                partition,
                now_us=self._clock(),
                dirty_share_min=dirty_share_min,
                older_keys=lambda: map(keys_of, ancestors_chunks(self._handles, partition)),
            )
            self._counters["compacted"] += compacted
            removed += compacted
        fill(self._handles.disk, partition)
        return removed

    def _expire(self, partition: Partition) -> int:
        acked = self._acked(partition) if partition.topic.retain == "until_acked" else None
        if partition.topic.compact or acked is not None:
            remove_covered(self._handles.disk, partition)
        expired = expire_partition(self._handles.disk, partition, now_us=self._clock(), acked=acked)
        self._counters["expired"] += expired
        return expired
