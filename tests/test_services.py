"""The real services: what we share with them holds, and a missing one is skipped by name or fails."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from headwater.log.arrow.placement import partitions_of
from headwater.testing.servers.kafka import KafkaServer

SERVICE_TEST = """
    import pytest
    from tests.rigs.services import unavailable

    @pytest.mark.service("kafka")
    def test_needs_kafka():
        unavailable("kafka", "there is no mvn")
"""


@pytest.mark.service("kafka")
def test_the_log_puts_a_key_where_kafka_puts_it(kafka: KafkaServer) -> None:
    """Both logs agree on the partition of every key, so a topic can move from one to the other."""
    keys = [random.Random(length).randbytes(length) for length in range(1, 1_000)]
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic("placed", 7)])["placed"].result(30)
    placed: dict[bytes, int] = {}
    # The partitioner of Kafka's own producer; this client's default is another one.
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "partitioner": "murmur2_random"})
    for key in keys:
        producer.produce(
            "placed", key=key, on_delivery=lambda _, event: placed.update({event.key(): event.partition()})
        )
    assert producer.flush(30) == 0
    assert [placed[key] for key in keys] == partitions_of(pa.array(keys, pa.binary()), 7).tolist()


def test_a_missing_service_is_skipped_with_its_name_and_counted(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADWATER_SERVICES", raising=False)
    pytester.makeini("[pytest]\nmarkers =\n    service(name): service\n")
    pytester.makepyfile(SERVICE_TEST)
    result = pytester.runpytest("-p", "tests.rigs.services", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*service kafka: there is no mvn"])


def test_a_missing_service_fails_where_services_are_required(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWATER_SERVICES", "required")
    pytester.makeini("[pytest]\nmarkers =\n    service(name): service\n")
    pytester.makepyfile(SERVICE_TEST)
    result = pytester.runpytest("-p", "tests.rigs.services")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["service kafka: there is no mvn"])
