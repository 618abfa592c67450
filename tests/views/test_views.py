"""Views: the feed and its tokens, top-N, several views of one log, readers in other processes."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import headwater as hw
from headwater.log.log import Log
from headwater.model.errors import Conflict, EventsMissed, InvalidInput, NotFound, Unsupported
from headwater.model.marker import Marker
from headwater.testing.contracts.case import refused
from headwater.testing.contracts.views import Feeder, by_page, counts, drained, pages, small_topic
from headwater.views.catalog import ViewCatalog, plan_view
from headwater.views.definition import define_view
from headwater.views.maintainer import ViewMaintainer
from headwater.views.store import ViewStore
from headwater.views.store_url import open_view_store
from headwater.views.token import parse_token
from headwater.views.view import View, open_view
from tests.rigs.children import Child, Gate, in_child

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with hw.open_log(tmp_path / "log", durability="os") as log:
        yield log


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/views.db"


@pytest.fixture
def store(url: str) -> Iterator[ViewStore]:
    store = open_view_store(url)
    yield store
    store.close()


@pytest.fixture
def feeder(log: Log, store: ViewStore) -> Feeder:
    return Feeder(log, store, pages())


@pytest.fixture
def view(log: Log, store: ViewStore, feeder: Feeder) -> View:
    return View(store, "per_page", log=log)


# Modes


def test_rows_without_a_key_are_only_added(log: Log, store: ViewStore) -> None:
    """Equal rows stay two rows."""
    feeder = Feeder(log, store, define_view("lines", "text STRING", mode="append"))
    feeder.give([{"text": "a"}, {"text": "a"}])
    feeder.give([{"text": "b"}])
    assert sorted(View(store, "lines").rows().column("text").to_pylist()) == ["a", "a", "b"]


def test_an_appended_key_comes_once(log: Log, store: ViewStore) -> None:
    """Another row for it is refused, before anything is written; the same row is no change."""
    feeder = Feeder(log, store, pages(mode="append"))
    feeder.give(counts(a=1))
    with refused(InvalidInput, "'a'", "append"):
        feeder.give(counts(a=2, b=1))
    feeder.epoch -= 1
    with refused(InvalidInput, "_deleted"):
        feeder.give([{"page": "a", "_deleted": True}])
    feeder.epoch -= 1
    assert feeder.give(counts(a=1, b=1)).changes == 1
    assert by_page(View(store, "per_page")) == {"a": 1, "b": 1}


def test_a_batch_of_another_checkpoint_is_refused(feeder: Feeder, view: View) -> None:
    """Neither log nor store take it."""
    feeder.give(counts(a=1))
    rows = pa.Table.from_pylist(counts(a=2))
    with pytest.raises(Conflict):
        feeder.maintainer.maintain(rows, Marker(query="other", epoch=0, ends={}))
    with pytest.raises(InvalidInput):
        feeder.maintainer.maintain(pa.table({"page": ["a"], "wrong": [1]}), Marker(query="q", epoch=1, ends={}))
    assert by_page(view) == {"a": 1}
    again = feeder.maintainer.maintain(rows, Marker(query="q", epoch=0, ends={"t": 0}))
    assert not again.written and by_page(view) == {"a": 1}


# The feed


def test_changes_follow_the_rows_without_a_gap(feeder: Feeder, view: View) -> None:
    """What is changed while somebody subscribes is in the rows or in the changes, never in both or in neither."""
    stop = threading.Event()

    def feed_on() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            feeder.give(counts(a=number, **{f"p{number % 5}": number}))

    thread = threading.Thread(target=feed_on)
    thread.start()
    try:
        for _ in range(8):
            rows: dict[str, Any] = {}
            with view.subscribe() as feed:
                while len(rows) < 6 or feed.token is None:
                    for change in feed.poll():
                        _apply(rows, change)
    finally:
        stop.set()
        thread.join()
    with view.subscribe() as feed:
        rows = {}
        for change in drained(feed):
            _apply(rows, change)
    assert {page: row["n"] for page, row in rows.items()} == by_page(view)


def _apply(rows: dict[str, Any], change: Any) -> None:
    if change.kind == "reset":
        rows.clear()
    if change.old is not None:
        assert rows.pop(change.old["page"]) == change.old
    if change.new is not None:
        assert change.new["page"] not in rows
        rows[change.new["page"]] = change.new


@pytest.mark.parametrize("cut", range(5))
def test_a_token_goes_on_after_its_change(feeder: Feeder, view: View, cut: int) -> None:
    """Wherever a subscriber stopped, it is told the rest."""
    feeder.give(counts(a=1))
    with view.subscribe() as feed:
        assert [change.kind for change in drained(feed)] == ["added", "ready"]
        feeder.give(counts(a=2, b=1))
        feeder.give([{"page": "a", "_deleted": True}, {"page": "c", "n": 1}])
        told = feed.poll(changes_max=4)
    all_told = [(change.kind, change.old, change.new) for change in told]
    assert [kind for kind, _, _ in all_told] == ["changed", "added", "removed", "added"]
    token = feed.token if cut == 4 else told[cut].token
    rest = all_told[4:] if cut == 4 else all_told[cut + 1 :]
    with view.subscribe(token) as feed:
        assert [(change.kind, change.old, change.new) for change in drained(feed)] == rest


def test_a_token_that_is_no_place_any_more_begins_again(log: Log, feeder: Feeder, view: View, store: ViewStore) -> None:
    """Retention overtook it, or the topic is another one: `reset` says why, then come the rows."""
    feeder.give(counts(a=1))
    with view.subscribe() as feed:
        drained(feed)
        token = parse_token(feed.token, view="per_page")
    for n in range(3):
        feeder.give(counts(a=n + 2))
    for stale in (
        msgspec.structs.replace(token, generation=7),
        msgspec.structs.replace(token, topic_id="other"),
        msgspec.structs.replace(token, positions={0: 99}),
    ):
        with view.subscribe(stale) as feed:
            told = drained(feed)
        assert [change.kind for change in told] == ["reset", "added", "ready"] and told[0].why
    with refused(InvalidInput, "not a token"):
        view.subscribe("nonsense")
    with refused(InvalidInput, "'other'"):
        view.subscribe(msgspec.structs.replace(token, view="other"))


@pytest.mark.parametrize("kept", ["compact", "retention_bytes"])
def test_a_history_that_is_gone_begins_again(log: Log, store: ViewStore, kept: str) -> None:
    """Compacted or given up: who lacks changes that are gone gets the rows anew; earlier states are refused."""
    small_topic(log, pages(), **{kept: 4096 if kept == "retention_bytes" else True})
    feeder = Feeder(log, store, pages(), compact=kept == "compact")
    view = View(store, "per_page", log=log)
    feeder.give(counts(a=1))
    with view.subscribe() as slow:
        drained(slow)
        for n in range(40):
            feeder.give(counts(a=n + 2, b=n))
        assert log.tidy("per_page.changes") > 0
        told = drained(slow)
        assert (told[0].kind == "reset") == (kept == "retention_bytes")
        rows = [change.new for change in told[told[0].kind == "reset" :] if change.new]
        assert rows[-2:] == counts(a=41, b=39)
    with view.subscribe(slow.token) as feed:
        assert drained(feed) == []
    token = msgspec.structs.replace(parse_token(slow.token, view="per_page"), positions={0: 1})
    with view.subscribe(token) as feed:
        assert [change.kind for change in drained(feed)] == ["reset", "added", "added", "ready"]
    with refused(EventsMissed, "earlier states"):
        view.rows(as_of=NOON)


def test_a_store_is_not_made_of_half_a_history(log: Log, store: ViewStore, tmp_path: Path) -> None:
    """Where retention took the beginning and the store is gone, that is said."""
    small_topic(log, pages(), retention_bytes=4096)
    feeder = Feeder(log, store, pages())
    for n in range(40):
        feeder.give(counts(**{f"p{n}": n}))
    assert log.tidy("per_page.changes") > 0
    assert len(by_page(View(store, "per_page"))) == 40
    other = open_view_store(f"sqlite:///{tmp_path}/other.db")
    with refused(EventsMissed, "retention"):
        ViewMaintainer(log, other, pages())
    other.close()


def test_waiting_has_heartbeats_and_an_end(feeder: Feeder, view: View) -> None:
    """Nothing happens: an empty list after the time, or a heartbeat; closing ends whoever iterates."""
    with view.subscribe(heartbeat_s=0.05) as feed:
        assert [change.kind for change in feed.poll()] == ["ready"]
        assert [change.kind for change in feed.poll(timeout_s=5)] == ["heartbeat"]
    with view.subscribe() as feed:
        assert [change.kind for change in feed.poll()] == ["ready"]
        assert feed.poll(timeout_s=0.05) == []
        seen = []
        feeder.give(counts(a=1, b=2))
        for change in feed:
            seen.append(change.kind)
            if len(seen) == 2:
                feed.close()
    assert seen == ["added", "added"]
    with refused(InvalidInput, "heartbeat_s"):
        view.subscribe(heartbeat_s=0)


def test_a_subscription_in_an_event_loop(feeder: Feeder, view: View) -> None:
    """Other tasks run while it waits."""

    async def follow() -> list[str]:
        kinds = []
        async with view.subscribe() as feed:
            async for change in feed:
                kinds.append(change.kind)
                if change.kind == "ready":
                    asyncio.get_running_loop().call_later(0.02, feeder.give, counts(a=1))
                if change.kind == "added":
                    break
        return kinds

    assert asyncio.run(asyncio.wait_for(follow(), 20)) == ["ready", "added"]


# Top-N


@pytest.mark.covers("RethinkDB")
@pytest.mark.parametrize("seed", range(2))
def test_a_top_n_says_who_enters_and_who_leaves(log: Log, store: ViewStore, seed: int) -> None:
    """Current rows, then old/new pairs: applied to the rows they give what sorting everything gives, at every batch."""
    chance = random.Random(seed)
    order = ["-n", "page"]
    feeder = Feeder(log, store, pages(order=order, limit=3))
    view = View(store, "per_page", log=log)
    everything: dict[str, Any] = {}
    seen: dict[str, Any] = {}
    token = None
    for _ in range(25):
        with view.subscribe(token) as feed:
            for change in drained(feed):
                assert change.kind != "reset"
                _apply(seen, change)
            rows: list[dict[str, Any]] = []
            for page in chance.sample("abcdefgh", chance.randrange(1, 4)):
                gone = chance.random() < 0.35
                row = {"page": page, "n": chance.choice([None, *range(5)])}
                everything.pop(page, None)
                if not gone:
                    everything[page] = row
                rows.append({**row, "_deleted": gone})
            feeder.give(rows)
            for change in drained(feed):
                _apply(seen, change)
            token = feed.token
        first = sorted(everything.values(), key=lambda row: (row["n"] is None, -(row["n"] or 0), row["page"]))[:3]
        assert sorted(seen.values(), key=str) == sorted(first, key=str)
        assert view.rows().to_pylist() == first == view.rows(as_of=token).to_pylist()


def test_any_view_can_be_followed_as_a_top_n(feeder: Feeder, view: View) -> None:
    """Order and limit may be given by the subscriber."""
    feeder.give(counts(a=1, b=2, c=3))
    with view.subscribe(order="-n", limit=1) as feed:
        assert [(change.kind, change.new and change.new["page"]) for change in drained(feed)] == [
            ("added", "c"),
            ("ready", None),
        ]
        feeder.give(counts(a=9))
        feeder.give(counts(b=5))
        feeder.give([{"page": "a", "_deleted": True}])
        pairs = [(change.kind, change.old["page"], change.new["page"]) for change in drained(feed)]
    assert pairs == [("changed", "c", "a"), ("changed", "a", "b")]


# The log is the truth


@pytest.mark.covers("concept: state = integral of the stream")
def test_the_fold_of_the_changes_is_the_view_as_of_any_time(tmp_path: Path, url: str) -> None:
    """By append time, by token, and in SQL."""
    now = [1_800_000_000_000_000]
    with hw.open_log(tmp_path / "timed", clock=lambda: now[0]) as log:
        store = open_view_store(url)
        feeder = Feeder(log, store, pages())
        view = View(store, "per_page", log=log)
        states: list[tuple[int, dict[str, int]]] = []
        state: dict[str, int] = {}
        chance = random.Random(3)
        for _ in range(20):
            now[0] += 1_000_000
            page, n = chance.choice("abc"), chance.randrange(3)
            feeder.give(counts(**{page: n}))
            state = {**state, page: n}
            states.append((now[0], state))
        for time_us, then in states:
            moment = datetime.fromtimestamp(time_us / 1e6, UTC)
            rows = view.rows(as_of=moment).to_pylist()
            assert {row["page"]: row["n"] for row in rows} == then
            assert view.sql("select sum(n) as s from per_page", as_of=moment)["s"].to_pylist() == [sum(then.values())]
            # A loop over the events themselves gives the same.
            folded: dict[str, int] = {}
            for event in log.reader("per_page.changes").poll(events_max=1000, timeout_s=0):
                if event.appended <= moment:
                    folded[event.key] = event.value["new"]["n"]
            assert folded == then
        assert view.rows(as_of=moment - timedelta(days=1)).num_rows == 0
        store.close()


@pytest.mark.covers("concept: several views of one log")
def test_three_views_in_three_stores_are_rebuilt_from_nothing(log: Log, tmp_path: Path) -> None:
    """Three read models of one topic; each store is deleted and made again from the log, equal to the last row."""
    log.create_topic("orders", "id BIGINT, customer STRING, amount BIGINT", key="id")
    chance = random.Random(1)
    orders = [{"id": n, "customer": chance.choice("xyz"), "amount": chance.randrange(9)} for n in range(60)]
    log.append("orders", orders)
    models = {
        "latest": define_view("latest", "customer STRING, id BIGINT", key="customer"),
        "totals": define_view("totals", "customer STRING, total BIGINT", key="customer", mode="complete"),
        "large": define_view("large", "id BIGINT, amount BIGINT", key="id", mode="append"),
    }
    events = sorted(log.read("orders").to_pylist(), key=lambda order: order["id"])
    for turn in ("maintained", "made again from the changes", "built again from the topic"):
        for name, definition in models.items():
            if turn.startswith("built"):
                definition = plan_view(log, msgspec.structs.replace(definition, fingerprint="again")).definition
            store = open_view_store(f"sqlite:///{tmp_path}/{name}.db")
            feeder = Feeder(log, store, definition)
            for at in range(0, 0 if turn.startswith("made") else 60, 20):
                feeder.give(_model(name, events[: at + 20] if name == "totals" else events[at : at + 20]))
            feeder.maintainer.swap()
            found = View(store, name).rows().to_pylist()
            assert sorted(map(str, found)) == sorted(map(str, _expected(name, orders))), turn
            store.close()
            for file in tmp_path.glob(f"{name}.db*"):
                file.unlink()


def _model(name: str, orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the query of a read model gives for a batch."""
    if name == "latest":
        return [{"customer": order["customer"], "id": order["id"]} for order in orders]
    if name == "large":
        return [{"id": order["id"], "amount": order["amount"]} for order in orders if order["amount"] > 4]
    totals: dict[str, int] = {}
    for order in orders:
        totals[order["customer"]] = totals.get(order["customer"], 0) + order["amount"]
    return [{"customer": customer, "total": total} for customer, total in totals.items()]


def _expected(name: str, orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = _model(name, orders)
    return list({row["customer"]: row for row in rows}.values()) if name == "latest" else rows


# Readers


def test_readers_in_other_processes_see_whole_batches(feeder: Feeder, view: View, url: str, tmp_path: Path) -> None:
    """Two processes read while one writes: both numbers of a batch are always equal, by SQL and by rows."""
    feeder.give(counts(a=0, b=0))

    def read_on(gate: Gate) -> int:
        with open_view(url, "per_page", log=tmp_path / "log") as other:
            gate.open()
            highest = 0
            while highest < 20:
                rows = by_page(other)
                assert rows["a"] == rows["b"] >= highest
                (answer,) = other.sql("select min(n) as least, max(n) as most from per_page").to_pylist()
                assert answer["least"] == answer["most"]
                highest = rows["a"]
            return highest

    with Gate() as first, Gate() as second:  # one each: two words in one pipe may be read as one
        readers = [Child(partial(read_on, gate)) for gate in (first, second)]
        first.wait()
        second.wait()
        for n in range(1, 21):
            feeder.give(counts(a=n, b=n))
        assert [reader.result() for reader in readers] == [20, 20]


def test_a_subscriber_in_another_process_is_woken(feeder: Feeder, url: str, tmp_path: Path) -> None:
    """It waits on a log that it may only read."""

    def follow(gate: Gate) -> list[str]:
        with open_view(url, "per_page", log=tmp_path / "log") as other, other.subscribe() as feed:
            kinds = [change.kind for change in feed.poll()]
            gate.open()
            return kinds + [change.new["page"] for change in feed.poll(timeout_s=30)]

    with Gate() as gate:
        follower = Child(lambda: follow(gate))
        gate.wait()
        feeder.give(counts(a=1))
        assert follower.result() == ["ready", "a"]


def test_a_forked_child_reads_and_does_not_write(feeder: Feeder, view: View) -> None:
    """Its own connections; the writer is the parent's."""
    feeder.give(counts(a=1))

    def child() -> dict[Any, Any]:
        with refused(hw.errors.Closed, "forked"):
            feeder.maintainer._store.create(define_view("other", "k STRING", key="k"))
        return by_page(view)

    assert in_child(child) == {"a": 1} == by_page(view)


def test_what_a_view_needs_is_said(tmp_path: Path, log: Log, feeder: Feeder, url: str) -> None:
    """Without a log nothing can be followed; an unknown view or file is named."""
    with hw.open_view(url, "per_page") as alone:
        assert alone.rows().num_rows == 0
        with refused(Unsupported, "subscribe"):
            alone.subscribe()
        with refused(Unsupported, "earlier state"):
            alone.rows(as_of=NOON)
    with refused(NotFound, "'other'"):
        hw.open_view(url, "other")
    with refused(NotFound, "nothing.db does not exist"):
        hw.open_view(f"sqlite:///{tmp_path}/nothing.db", "per_page")
    with refused(NotFound, "'nobody'"):
        ViewCatalog(log).get("nobody")
    (tmp_path / "text.db").write_text("not a database at all, just some text that is long enough" * 20)
    with pytest.raises(hw.HeadwaterError, match="damaged"):
        hw.open_view(f"sqlite:///{tmp_path}/text.db", "per_page")


def test_an_old_generation_is_not_gone_on_with(log: Log, store: ViewStore, feeder: Feeder) -> None:
    """Once it was replaced."""
    ViewMaintainer(log, store, msgspec.structs.replace(pages(), generation=2)).swap()
    with refused(InvalidInput, "was replaced by generation 2"):
        ViewMaintainer(log, store, pages())
