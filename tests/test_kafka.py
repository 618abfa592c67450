"""The log on a real Kafka."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

import headwater
from headwater.testing.contract import LogContract
from headwater.testing.contract_case import OpenLog
from headwater.testing.servers.kafka import KafkaServer


@pytest.fixture(scope="module")
def fresh_urls(kafka: KafkaServer) -> Iterator[Iterator[str]]:
    """Addresses of empty logs; one handle keeps the clients open from test to test."""
    with headwater.open_log(f"kafka://{kafka.bootstrap}"):
        yield (f"kafka://{kafka.bootstrap}?prefix=t{number}." for number in itertools.count())


@pytest.mark.service("kafka")
class TestKafkaLog(LogContract):
    """Acknowledged means with every replica in sync."""

    backend = "kafka"
    dense_offsets = False
    transactions_in_one_moment = False

    @pytest.fixture
    def open_log(self, fresh_urls: Iterator[str]) -> OpenLog:
        url = next(fresh_urls)
        return lambda: headwater.open_log(url)
