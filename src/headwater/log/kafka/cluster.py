"""A Kafka cluster: the clients of one process for one set of brokers, shared by every handle that names it alike.

A client of librdkafka brings its own threads and connections, and an idempotent producer half a second until its first
event is out. So handles with the same address and options share one `Cluster`, which closes with the last of them.

Thread-safety: everything here may be used by many threads. Lock order: the registry's lock, then a pool's.
"""

from __future__ import annotations

import gc
import os
import threading
from functools import cache
from typing import Any

from headwater.log.kafka.brokers import Address, Brokers
from headwater.log.kafka.reader import Fetchers
from headwater.log.kafka.writer import Writer


class Cluster(Brokers):
    """The brokers, and what reads and writes there for all handles; got by `join`, given back by `leave`."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self.fetchers = Fetchers(self)
        self.writer = Writer(self)

    def close(self) -> None:
        """Frees everything."""
        self.writer.close()
        self.fetchers.close()
        super().close()


def join(address: Address) -> Cluster:
    """The cluster at an address, for one more handle."""
    with _registry().lock:
        entry = _registry().clusters.get(address)
        if entry is None:
            entry = _registry().clusters[address] = [Cluster(address), 0]
        entry[1] += 1
        return entry[0]


def keep_for_ever(client: Any) -> None:
    """A client whose threads are in another process must not be ended: it would wait for them."""
    _registry().inherited.append(client)


def leave(cluster: Cluster) -> None:
    """One handle less; the last one closes the clients."""
    with _registry().lock:
        entry = _registry().clusters.get(cluster.address)
        if entry is None or entry[0] is not cluster:
            return
        entry[1] -= 1
        if entry[1] > 0:
            return
        del _registry().clusters[cluster.address]
    cluster.close()


class _Registry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clusters: dict[Address, list[Any]] = {}
        self.inherited: list[Any] = []
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """A child's clients have no threads: it begins with none, and keeps the old ones so that nothing waits for them.

        Nor are clients freed that were garbage already when it was forked: that ends in a crash.
        """
        gc.freeze()
        self.lock = threading.Lock()
        self.inherited.append(self.clusters)
        self.clusters = {}


@cache
def _registry() -> _Registry:
    return _Registry()
