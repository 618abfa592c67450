"""Queues on a real Kafka: the contract, what share groups cannot do, and what only they do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

import headwater
from headwater.log.log import Log
from headwater.testing.contract_case import OpenLog
from headwater.testing.contract_queues import QueueContract
from headwater.testing.servers.kafka import KafkaServer

pytestmark = pytest.mark.service("kafka")


@pytest.fixture(scope="module")
def fresh_urls(kafka: KafkaServer) -> Iterator[Iterator[str]]:
    """Addresses of empty logs; one handle keeps the clients open from test to test."""
    with headwater.open_log(f"kafka://{kafka.bootstrap}"):
        yield (f"kafka://{kafka.bootstrap}?prefix=q{number}." for number in itertools.count())


@pytest.fixture
def url(fresh_urls: Iterator[str]) -> str:
    """The address of an empty log."""
    return next(fresh_urls)


@pytest.fixture
def log(url: str) -> Iterator[Log]:
    """An empty log."""
    with headwater.open_log(url) as log:
        yield log


class TestKafkaQueues(QueueContract):
    """Queues made of share groups."""

    backend = "kafka"
    queues_can_be_counted = False
    lease_s_min = 1.0

    @pytest.fixture
    def open_log(self, url: str) -> OpenLog:
        return lambda: headwater.open_log(url)
