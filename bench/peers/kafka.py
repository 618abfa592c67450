"""Apache Kafka as a peer: the broker that the tests use too, with the memory that a measured one deserves."""

from __future__ import annotations

from headwater.testing.servers import ServerError
from headwater.testing.servers.kafka import KafkaServer

__all__ = ["KafkaPeer", "PeerError"]

KafkaPeer = KafkaServer
PeerError = ServerError
