"""Queues: every event leased, and acknowledged by a call of its own, with 500 out at a time; beside four real servers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import headwater as hw
from bench.harness import Figure, Options, Pair, Target, measure, scratch
from bench.log import queue_peers
from bench.log.headwater_side import TOPIC, HeadwaterSide
from bench.log.headwater_side import send as send_all
from bench.log.payload import Payload, make_payload
from headwater.testing.servers.debian import NatsServer, RabbitMqServer, RedisServer
from headwater.testing.servers.kafka import KafkaServer

EVENTS = 500_000
EVENTS_KAFKA = 200_000
EVENTS_REDIS = 100_000
EVENTS_NATS = 20_000
EVENTS_RABBITMQ = 20_000
QUICK = 10  # times fewer

_GROUPS = itertools.count()


def queue(options: Options) -> list[Figure]:
    """One acknowledgement for each event."""
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        payload = _payload(options, EVENTS)
        if options.wants("ours"):
            log = stack.enter_context(HeadwaterSide(folder).new_log())
            send_all(log, payload)

        def beside(peer: Callable[[], float], *, out: int = queue_peers.PREFETCH) -> Pair:
            return measure(options, lambda: lease_and_ack(log, len(payload), out=out), peer)

        kafka, kafka_large, rabbitmq, redis, nats = _peers(options, stack, folder)
        large = queue_peers.PREFETCH_LARGE
        return [
            _figure("queue_ack", beside(kafka), "Kafka share group, explicit", Target(">=", 2)),
            _figure("queue_ack_5000", beside(kafka_large, out=large), "Kafka share group, explicit", out=large),
            _figure("queue_ack_rabbitmq", beside(rabbitmq), "RabbitMQ classic queue", Target(">=", 20)),
            _figure("queue_ack_redis", beside(redis), "Redis Streams group"),
            _figure("queue_ack_nats", beside(nats), "NATS JetStream pull consumer"),
        ]


def lease_and_ack(log: hw.Log, events: int, *, out: int = queue_peers.PREFETCH) -> float:
    """Take every event of the topic by a new group; events per second."""
    with log.queue(TOPIC, group=f"workers-{next(_GROUPS)}") as tasks:
        left = events
        start = time.perf_counter()
        while left:
            leases = tasks.lease(events_max=out, timeout_s=queue_peers.WAIT_S)
            assert leases, f"{left} events did not arrive"
            for lease in leases:
                lease.ack()
            left -= len(leases)
        tasks.flush()
        return events / (time.perf_counter() - start)


def _peers(options: Options, stack: ExitStack, folder: Path) -> list[Callable[[], float]]:
    if not options.wants("peer"):
        return [lambda: 0.0] * 5
    kafka = stack.enter_context(KafkaServer(size="bench", parent_folder=folder))
    rabbitmq = stack.enter_context(RabbitMqServer(parent_folder=folder))
    redis = stack.enter_context(RedisServer(parent_folder=folder))
    nats = stack.enter_context(NatsServer(parent_folder=folder))
    many, some = _payload(options, EVENTS_KAFKA), _payload(options, EVENTS_REDIS)
    few, fewest = _payload(options, EVENTS_NATS), _payload(options, EVENTS_RABBITMQ)
    return [
        lambda: queue_peers.kafka_share_group(kafka.bootstrap, many, name=f"tasks-{next(_GROUPS)}"),
        lambda: queue_peers.kafka_share_group(
            kafka.bootstrap, many, name=f"tasks-{next(_GROUPS)}", out=queue_peers.PREFETCH_LARGE
        ),
        lambda: queue_peers.rabbitmq(rabbitmq.port, fewest),
        lambda: queue_peers.redis_streams(redis.port, some),
        lambda: queue_peers.nats_jetstream(nats.port, few),
    ]


def _payload(options: Options, events: int) -> Payload:
    return make_payload(events // QUICK if options.quick else events)


def _figure(
    name: str, pair: Pair, peer: str, target: Target | None = None, *, out: int = queue_peers.PREFETCH
) -> Figure:
    what = f"each event leased and acknowledged by a call of its own, {out:,} out at a time"
    return Figure(name, what, "events/s", pair, peer, target)
