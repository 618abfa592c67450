"""What a prompt shows of an object: its name, where it is and its state, without a password and without asking a server."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import headwater as hw
from tests.rigs.capture.sqlite import USERS


def counted(clicks: Any) -> Any:
    """What a view of an application computes."""
    return clicks.groupBy("page").count()


def test_a_log_and_its_clients_show_what_they_work_on(tmp_path: Path) -> None:
    """A topic shows its columns, a reader its places; what was closed says so."""
    with hw.open_log(tmp_path / "log") as log:
        assert repr(log) == f"Log(url={log.url!r}, durability='fsync')"
        topic = log.create_topic("clicks", "page STRING, n BIGINT", key="page", partitions=1)
        assert repr(topic) == (
            "Topic(name='clicks', schema='page STRING, n BIGINT', key='page', time=None, partitions=1)"
        )
        producer = log.producer(id="importer")
        producer.send("clicks", {"page": "/", "n": 1})
        assert repr(producer) == "Producer(id='importer', open)"
        producer.close()
        assert repr(producer) == "Producer(id='importer', closed)"
        reader = log.reader("clicks")
        assert len(reader.poll()) == 1
        assert repr(reader) == "Reader(topics=['clicks'], next={'clicks/0': 1})"
        reader.close()
        assert repr(reader) == "Reader(topics=['clicks'], closed)"
        consumer = log.consumer("clicks", group="billing")
        assert repr(consumer) == "Consumer(group='billing', topics=['clicks'], partitions=1)"
        consumer.close()
        assert repr(consumer) == "Consumer(group='billing', topics=['clicks'], closed)"


def test_an_application_shows_its_log_and_what_it_consists_of() -> None:
    """The log's password is left out; declaring something opens nothing."""
    app = hw.App("clickstream", log="kafka://ada:secret@localhost:9092", state="./state", views="sqlite:///./views.db")
    app.topic("clicks", "page STRING, at TIMESTAMP", key="page", time="at")
    app.view("clicks", key="page", name="per_page")(counted)
    assert repr(app) == (
        "App(name='clickstream', log='kafka://ada@localhost:9092', topics=['clicks'], stages=['per_page'], not running)"
    )
    assert repr(app.views) == "Views(app='clickstream', names=['per_page'])"


def test_a_view_and_what_keeps_and_follows_it_show_their_store_and_log(tmp_path: Path) -> None:
    """A closed subscription says so."""
    url = f"sqlite:///{tmp_path}/views.db"
    with hw.open_log(tmp_path / "log") as log:
        store = hw.open_view_store(url)
        definition = hw.define_view("per_page", "page STRING, count BIGINT", key="page")
        maintainer = hw.ViewMaintainer(log, store, definition)
        assert repr(maintainer) == (
            f"ViewMaintainer(view='per_page', generation=1, current, store={url!r}, log={log.url!r})"
        )
        view = hw.open_view(url, "per_page", log=log)
        assert repr(view) == f"View(name='per_page', store={url!r}, log={log.url!r})"
        subscription = view.subscribe()
        (change,) = subscription.poll(changes_max=1, timeout_s=0)
        assert repr(subscription) == f"Subscription(view='per_page', token={change.token!r}, open)"
        subscription.close()
        assert repr(subscription).endswith("closed)")
        alone = hw.open_view(url, "per_page")
        assert repr(alone) == f"View(name='per_page', store={url!r}, log=None)"
        alone.close()
        view.close()
        store.close()


def test_a_capture_and_an_export_show_their_ends_and_how_far_they_are(tmp_path: Path) -> None:
    """Before it was opened a capture knows no table."""
    url = f"sqlite:///{tmp_path}/shop.db"
    with closing(sqlite3.connect(tmp_path / "shop.db")) as shop:
        shop.execute(USERS)
        shop.execute("INSERT INTO users (name) VALUES ('ada')")
        shop.commit()
    with hw.open_log(tmp_path / "log") as log:
        capture = hw.Capture(log, url)
        begins = f"Capture(name='shop', source={url!r}, log={log.url!r}, "
        assert repr(capture) == f"{begins}state='starting', tables={{}})"
        with capture:
            capture.catch_up()
            assert repr(capture) == f"{begins}state='live', tables={{'users': 'live'}})"
        export = hw.DebeziumExport(log, "users.changes", to=log, topic="bus.users")
        begins = f"DebeziumExport(history='users.changes', topic='bus.users', to={log.url!r}, "
        assert repr(export) == f"{begins}changes=0, not open)"
        export.open()
        export.catch_up()
        assert repr(export) == f"{begins}changes=1, open)"
