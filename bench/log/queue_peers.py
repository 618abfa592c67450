"""The peers' side of the queue figures: each event taken once and acknowledged by itself, at most 500 unacknowledged.

Every function stores the payload first and times the taking only; it returns events per second.
"""

from __future__ import annotations

import asyncio
import time

import nats
import pika
import redis
from confluent_kafka import Producer, ShareConsumer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from bench.log.payload import Payload

PREFETCH = 500
PREFETCH_LARGE = 5_000
WAIT_S = 20.0
_NAME = "tasks"


def kafka_share_group(bootstrap: str, payload: Payload, *, name: str, out: int = PREFETCH) -> float:
    """A share group of Kafka with explicit acknowledgement, and about `out` events in each poll.

    Kafka hands out whole batches of its log, however few events a poll asks for: the events are stored in batches of `out`.
    The first member of a group gets nothing for five seconds; time begins when it has its first events, and these do not count.
    """
    client = {"bootstrap.servers": bootstrap, "log_level": 0}
    admin = AdminClient(client)
    admin.create_topics([NewTopic(name, 4, 1)])[name].result()
    settings = {
        "share.auto.offset.reset": "earliest",
        "share.assignment.interval.ms": "0",
        "share.partition.max.record.locks": "4000",
    }
    entries = [ConfigEntry(n, v, incremental_operation=AlterConfigOpType.SET) for n, v in settings.items()]
    group = ConfigResource(ResourceType.GROUP, name, incremental_configs=entries)
    admin.incremental_alter_configs([group])[group].result()
    batches = {"linger.ms": 50, "batch.num.messages": out, "batch.size": 10_000_000, "queue.buffering.max.messages": 0}
    producer = Producer({**client, "acks": 1, **batches})
    for key, value in zip(payload.keys, payload.values, strict=True):
        producer.produce(name, value, key)
    producer.flush()
    asked = {"group.id": name, "share.acknowledgement.mode": "explicit", "max.poll.records": out}
    with ShareConsumer({**client, **asked}) as consumer:
        consumer.subscribe([name])
        left, start, timed, deadline = len(payload), 0.0, 0, time.monotonic() + WAIT_S
        while left:
            messages = consumer.poll(timeout=1.0)
            if start == 0.0 and len(messages):
                start, timed = time.perf_counter(), left - len(messages)
            for message in messages:
                consumer.acknowledge(message)
            left -= len(messages)
            deadline = time.monotonic() + WAIT_S if messages else deadline
            assert time.monotonic() < deadline, f"{left} events did not arrive"
        consumer.commit_sync()
        elapsed_s = time.perf_counter() - start
    return timed / elapsed_s


def rabbitmq(port: int, payload: Payload) -> float:
    """A durable classic queue of RabbitMQ with persistent messages, by pika."""
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
    channel = connection.channel()
    channel.queue_delete(_NAME)
    channel.queue_declare(_NAME, durable=True)
    persistent = pika.BasicProperties(delivery_mode=2)
    for value in payload.values:
        channel.basic_publish("", _NAME, value, persistent)
    channel.basic_qos(prefetch_count=PREFETCH)
    left = len(payload)
    start = time.perf_counter()
    for method, _, _ in channel.consume(_NAME, inactivity_timeout=WAIT_S):
        assert method is not None, f"{left} events did not arrive"
        channel.basic_ack(method.delivery_tag)
        left -= 1
        if not left:
            break
    channel.cancel()
    elapsed_s = time.perf_counter() - start
    connection.close()
    return len(payload) / elapsed_s


def redis_streams(port: int, payload: Payload) -> float:
    """A consumer group on a stream of Redis, the acknowledgements of 500 events in one pipeline."""
    client = redis.Redis("127.0.0.1", port)
    client.delete(_NAME)
    for start_at in range(0, len(payload), PREFETCH):
        pipeline = client.pipeline(transaction=False)
        for value in payload.values[start_at : start_at + PREFETCH]:
            pipeline.xadd(_NAME, {"value": value})
        pipeline.execute()
    client.xgroup_create(_NAME, "workers", id="0")
    left = len(payload)
    start = time.perf_counter()
    while left:
        ((_, found),) = client.xreadgroup("workers", "one", {_NAME: ">"}, count=PREFETCH, block=int(WAIT_S * 1000))
        pipeline = client.pipeline(transaction=False)
        for number, _ in found:
            pipeline.xack(_NAME, "workers", number)
        pipeline.execute()
        left -= len(found)
    elapsed_s = time.perf_counter() - start
    client.close()
    return len(payload) / elapsed_s


def nats_jetstream(port: int, payload: Payload) -> float:
    """A pull consumer on a JetStream stream in a file, each event acknowledged."""
    return asyncio.run(_nats_jetstream(port, payload))


async def _nats_jetstream(port: int, payload: Payload) -> float:
    client = await nats.connect(f"nats://127.0.0.1:{port}")
    stream = client.jetstream()
    await stream.add_stream(name=_NAME, subjects=[_NAME])
    for start_at in range(0, len(payload), PREFETCH):
        await asyncio.gather(
            *(stream.publish(_NAME, value) for value in payload.values[start_at : start_at + PREFETCH])
        )
    subscription = await stream.pull_subscribe(_NAME, "workers")
    left = len(payload)
    start = time.perf_counter()
    while left:
        for message in await subscription.fetch(min(PREFETCH, left), timeout=WAIT_S):
            await message.ack()
            left -= 1
    await client.flush()
    elapsed_s = time.perf_counter() - start
    await stream.delete_stream(_NAME)
    await client.close()
    return len(payload) / elapsed_s
