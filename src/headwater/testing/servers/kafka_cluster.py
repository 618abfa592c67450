"""A real Kafka cluster on one machine: several nodes, each broker and controller, so that one of them can be killed.

    with KafkaCluster() as cluster:
        log = headwater.open_log(f"kafka://{cluster.bootstrap}")
        cluster.kill(1)

Every topic has a copy on each node, and a write is acknowledged when a majority has it. A node that died is missed after three
seconds instead of Kafka's nine, so that tests need not wait.
"""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from headwater.testing.servers.kafka import KafkaServer, new_cluster_id
from headwater.testing.servers.server import Serving

NODES = 3


class KafkaCluster(Serving):
    """Several nodes; their ids are 1, 2, 3 …"""

    def __init__(self, *, nodes: int = NODES) -> None:
        self._count = nodes
        self.nodes: dict[int, KafkaServer] = {}
        self.bootstrap = ""

    def start(self) -> None:
        """Starts all nodes at once: one alone has no majority and would not become ready."""
        numbers = range(1, self._count + 1)
        ports = _free_ports(2 * self._count)
        clients, controllers = ports[: self._count], ports[self._count :]
        voters = ",".join(f"{n}@127.0.0.1:{port}" for n, port in zip(numbers, controllers, strict=True))
        cluster_id = new_cluster_id()
        for number, client, controller in zip(numbers, clients, controllers, strict=True):
            settings = {
                **_settings(self._count),
                "node.id": str(number),
                "controller.quorum.voters": voters,
                "listeners": f"PLAINTEXT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}",
            }
            self.nodes[number] = KafkaServer(port=client, settings=settings, cluster_id=cluster_id)
        self.bootstrap = ",".join(f"127.0.0.1:{port}" for port in clients)
        try:
            with ThreadPoolExecutor(self._count) as pool:
                list(pool.map(lambda node: node.start(), self.nodes.values()))
        except BaseException:
            self.stop()
            raise

    def kill(self, number: int) -> None:
        """Ends a node with SIGKILL."""
        os.kill(self.nodes[number].pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ends all nodes and removes their folders; stopping twice does nothing."""
        with ThreadPoolExecutor(max(1, len(self.nodes))) as pool:
            list(pool.map(lambda node: node.stop(), self.nodes.values()))
        self.nodes = {}


def _settings(nodes: int) -> dict[str, str]:
    copies, majority = str(nodes), str(nodes // 2 + 1)
    return {
        "default.replication.factor": copies,
        "min.insync.replicas": majority,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": majority,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": majority,
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
        "controller.quorum.election.timeout.ms": "1000",
        "controller.quorum.fetch.timeout.ms": "2000",
        "replica.lag.time.max.ms": "4000",
    }


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
