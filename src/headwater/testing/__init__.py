"""What Headwater is tested with, shipped so that users test their applications with it.

Servers are imported when they are first used: some of them need clients.
"""

from typing import TYPE_CHECKING

from headwater.model.lazy_names import lazy_names
from headwater.testing.app_test import CRASH, AppTest, Crash
from headwater.testing.crash.disk import CrashingDisk, RandomCrashDisk, RecordingDisk, SlowSyncDisk
from headwater.testing.simulation.disk import Fault, SimDisk
from headwater.testing.simulation.process import Crashed, SimProcess, WouldDeadlock
from headwater.testing.transform import transform

if TYPE_CHECKING:
    from headwater.testing.servers.couchdb import CouchServer as CouchServer
    from headwater.testing.servers.debian import NatsServer as NatsServer
    from headwater.testing.servers.debian import RabbitMqServer as RabbitMqServer
    from headwater.testing.servers.debian import RedisServer as RedisServer
    from headwater.testing.servers.kafka import KafkaServer as KafkaServer
    from headwater.testing.servers.kafka_cluster import KafkaCluster as KafkaCluster
    from headwater.testing.servers.mariadb import MariaDbServer as MariaDbServer
    from headwater.testing.servers.mongodb import MongoServer as MongoServer
    from headwater.testing.servers.opensearch import OpenSearchServer as OpenSearchServer
    from headwater.testing.servers.postgres import PostgresServer as PostgresServer
    from headwater.testing.servers.s3 import S3Server as S3Server
    from headwater.testing.servers.spark import SparkCluster as SparkCluster

_HOMES = {
    "CouchServer": "headwater.testing.servers.couchdb",
    "KafkaCluster": "headwater.testing.servers.kafka_cluster",
    "KafkaServer": "headwater.testing.servers.kafka",
    "MariaDbServer": "headwater.testing.servers.mariadb",
    "MongoServer": "headwater.testing.servers.mongodb",
    "NatsServer": "headwater.testing.servers.debian",
    "OpenSearchServer": "headwater.testing.servers.opensearch",
    "PostgresServer": "headwater.testing.servers.postgres",
    "RabbitMqServer": "headwater.testing.servers.debian",
    "RedisServer": "headwater.testing.servers.debian",
    "S3Server": "headwater.testing.servers.s3",
    "SparkCluster": "headwater.testing.servers.spark",
}
__all__ = [
    "CRASH",
    "AppTest",
    "CouchServer",
    "Crash",
    "Crashed",
    "CrashingDisk",
    "Fault",
    "KafkaCluster",
    "KafkaServer",
    "MariaDbServer",
    "MongoServer",
    "NatsServer",
    "OpenSearchServer",
    "PostgresServer",
    "RabbitMqServer",
    "RandomCrashDisk",
    "RecordingDisk",
    "RedisServer",
    "S3Server",
    "SimDisk",
    "SimProcess",
    "SlowSyncDisk",
    "SparkCluster",
    "WouldDeadlock",
    "transform",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)
