"""Views on Kafka: the same maintainer, feed and rebuild, where offsets have gaps and transactions are Kafka's own."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

import headwater as hw
from headwater.model.errors import Fenced
from headwater.testing.contracts.views import Feeder, by_page, counts, drained, pages
from headwater.testing.servers.kafka import KafkaServer
from headwater.views.store_url import open_view_store
from headwater.views.view import View
from tests.views.test_views_swap import followed, next_generation, shown


@pytest.mark.service("kafka")
@pytest.mark.parametrize("compact", [False, True], ids=["whole", "compacted"])
def test_a_view_on_kafka_is_maintained_followed_and_made_again(
    kafka: KafkaServer, tmp_path: Path, *, compact: bool
) -> None:
    """Deletions keep their old row, whether they are tombstones or not; the store is made of the topic again."""
    with hw.open_log(f"kafka://{kafka.bootstrap}?prefix=v{uuid.uuid4().hex[:8]}.") as log:
        store = open_view_store(f"sqlite:///{tmp_path}/views.db")
        feeder = Feeder(log, store, pages(), compact=compact)
        view = View(store, "per_page", log=log)
        feeder.give(counts(a=1, b=2))
        with view.subscribe() as feed:
            assert {change.kind for change in drained(feed)} == {"added", "ready"}
            feeder.give([{"page": "a", "_deleted": True}, *counts(b=3, c=4)])
            told = feed.poll(timeout_s=10)
            while len(told) < 3:
                told += feed.poll(timeout_s=10)
            token = feed.token
        assert sorted((change.kind, (change.old or {}).get("n")) for change in told) == [
            ("added", None),
            ("changed", 2),
            ("removed", 1),
        ]
        assert by_page(view) == {"b": 3, "c": 4}
        feeder.give(counts(c=5))
        if not compact:
            with view.subscribe(token) as feed:
                assert [change.new for change in drained(feed)] == counts(c=5)
            assert view.rows(as_of=token).num_rows == 2
        other = open_view_store(f"sqlite:///{tmp_path}/other.db")
        Feeder(log, other, pages(), compact=compact)
        assert by_page(View(other, "per_page")) == {"b": 3, "c": 5}
        for used in (store, other):
            used.close()


@pytest.mark.service("kafka")
def test_what_reads_a_view_on_kafka_follows_its_generations(kafka: KafkaServer, tmp_path: Path) -> None:
    """The difference and the swap are one transaction of Kafka; a subscriber is told to begin again, once."""
    with hw.open_log(f"kafka://{kafka.bootstrap}?prefix=v{uuid.uuid4().hex[:8]}.") as log:
        store = open_view_store(f"sqlite:///{tmp_path}/views.db")
        old = Feeder(log, store, pages())
        old.give(counts(a=1, b=2))
        view = View(store, "per_page", log=log)
        with view.subscribe() as feed:
            while feed.poll(timeout_s=10)[-1].kind != "ready":
                pass
            for number in (2, 3):
                new = next_generation(log, store, pages(code=f"{number}"))
                new.give(counts(b=number, c=number))
                new.maintainer.swap()
                new.give(counts(d=number))
                assert followed(log) == shown(log, store) == counts(b=number, c=number, d=number)
                told: list[str] = []
                while "ready" not in told:
                    told += [change.kind for change in feed.poll(timeout_s=10)]
                assert told == ["reset", "added", "added", "added", "ready"]
        with pytest.raises(Fenced):
            old.give(counts(a=5))
        assert followed(log) == shown(log, store)
        store.close()
