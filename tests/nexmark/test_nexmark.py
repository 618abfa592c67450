"""Nexmark's generator: events by their number, the same from any process and in any slice, in an order that keeps its promises."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

import headwater as hw
from examples.nexmark.arrival import Arrival
from examples.nexmark.events import HORIZON, PERIOD_US, START_US, Nexmark
from examples.nexmark.generate import batches, create, fill, main
from examples.nexmark.topics import TOPICS
from headwater.model.schema import to_arrow_schema
from tests.rigs.app.nexmark_oracle import read_topic, rows

ROOT = Path(__file__).resolve().parents[2]
EVENTS = 50_000
SHUFFLES = 30
EVENTS_OF_7 = Nexmark(7)

AT = datetime(2025, 1, 1, 0, 1, 40, tzinfo=UTC)
PERSON = {
    "id": 21_000,
    "name": "Ines Falk",
    "emailAddress": "bbwshum@yvkrb.com",
    "creditCard": "5814 2464 4994 9495",
    "city": "Tucson",
    "state": "WA",
    "dateTime": AT,
}
AUCTION = {
    "id": 61_000,
    "itemName": "ujp",
    "description": "pengmwkvnkwjxyzhmssmmczbcvngtaxrzfcffyypcwaskafspczql hdilrhrtracztoq",
    "initialBid": 442,
    "reserve": 38_202,
    "dateTime": AT.replace(microsecond=100),
    "expires": AT.replace(microsecond=319_300),
    "seller": 20_143,
    "category": 11,
}
BID = {
    "auction": 61_000,
    "bidder": 21_000,
    "price": 6_846,
    "channel": "Baidu",
    "url": "https://auctions.example/khjqa/ilutt/nydsi/item.htm?query=1",
    "dateTime": AT.replace(microsecond=400),
}
PRICES = 535_892_355


@pytest.fixture(scope="module")
def whole() -> dict[str, pa.Table]:
    return EVENTS_OF_7.tables(np.arange(EVENTS))


@pytest.fixture(scope="module")
def asked(whole: dict[str, pa.Table]) -> duckdb.DuckDBPyConnection:
    """DuckDB over all events."""
    connection = duckdb.connect()
    for name, table in whole.items():
        connection.register(name, table)
    return connection


def test_an_event_is_what_it_has_always_been() -> None:
    """Other versions, machines and processes make the same of seed and number: figures that were taken from them stay comparable."""
    tables = Nexmark(7).tables(np.arange(1_000_000, 1_000_050))
    person, auction, bid = (tables[name].slice(0, 1).drop("extra").to_pylist()[0] for name in TOPICS)
    assert person == PERSON
    assert auction == AUCTION
    assert bid == BID
    assert sum(tables["bids"]["price"].to_pylist()) == PRICES


def test_proportions_are_exact(whole: dict[str, pa.Table]) -> None:
    """1 : 3 : 46, in every 50 events."""
    assert [whole[name].num_rows for name in TOPICS] == [EVENTS // 50, EVENTS * 3 // 50, EVENTS * 46 // 50]
    for cycle in (0, 1, 12_345):
        tables = EVENTS_OF_7.tables(np.arange(cycle * 50, cycle * 50 + 50))
        assert [tables[name].num_rows for name in TOPICS] == [1, 3, 46]


def test_columns_are_the_topics(whole: dict[str, pa.Table]) -> None:
    for name, topic in TOPICS.items():
        wanted = to_arrow_schema(topic.schema)
        assert [(f.name, f.type) for f in whole[name].schema] == [(f.name, f.type) for f in wanted]
        assert not any(column.null_count for column in whole[name].columns)


def test_times_follow_from_numbers(whole: dict[str, pa.Table]) -> None:
    """One event each 100 µs, none at the same time as another."""
    times = np.concatenate([np.asarray(whole[name]["dateTime"].cast(pa.int64())) for name in TOPICS])
    assert np.array_equal(np.sort(times), START_US + np.arange(EVENTS) * PERIOD_US)


def test_nobody_refers_to_what_is_not_there_yet(asked: duckdb.DuckDBPyConnection) -> None:
    """A bid's auction and bidder, an auction's seller: there, and from before; ids are unique."""
    for child, column, parent in (
        ("bids", "auction", "auctions"),
        ("bids", "bidder", "persons"),
        ("auctions", "seller", "persons"),
    ):
        sql = f"SELECT count(*) FROM {child} c JOIN {parent} p ON c.{column} = p.id WHERE p.dateTime < c.dateTime"
        assert asked.execute(sql).fetchall() == asked.execute(f"SELECT count(*) FROM {child}").fetchall()
    for name in ("persons", "auctions"):
        assert asked.execute(f"SELECT count(*) - count(DISTINCT id) FROM {name}").fetchall() == [(0,)]


def test_some_are_hot(asked: duckdb.DuckDBPyConnection) -> None:
    """Half of the bids for one auction in a hundred, three quarters by and for one person in a hundred."""
    shares = asked.execute(
        """SELECT (SELECT avg((auction % 100 = 0)::INT) FROM bids), (SELECT avg((bidder % 100 = 1)::INT) FROM bids),
                  (SELECT avg((seller % 100 = 0)::INT) FROM auctions),
                  (SELECT avg((channel NOT LIKE 'channel-%')::INT) FROM bids),
                  (SELECT avg((url LIKE '%channel_id=%')::INT) FROM bids WHERE channel LIKE 'channel-%')"""
    ).fetchall()[0]
    assert shares == pytest.approx((0.505, 0.75, 0.75, 0.5, 0.9), abs=0.02)


def test_prices_are_even_in_their_logarithm(whole: dict[str, pa.Table]) -> None:
    """As many between 100 and 1,000 as between ten and a hundred million."""
    decades = np.bincount(np.floor(np.log10(np.asarray(whole["bids"]["price"]))).astype(int), minlength=8)
    assert decades[2:8] / decades.sum() == pytest.approx(np.full(6, 1 / 6), abs=0.01)
    assert decades.sum() == decades[2:8].sum()


def test_auctions_expire_and_have_a_reserve(asked: duckdb.DuckDBPyConnection) -> None:
    """Some bids come too late for their auction, many do not."""
    longest = 2 * HORIZON * PERIOD_US
    ((wrong,),) = asked.execute(
        f"""SELECT count(*) FROM auctions WHERE NOT (expires > dateTime AND expires <= dateTime + to_microseconds({longest})
            AND reserve > initialBid AND category BETWEEN 10 AND 14)"""
    ).fetchall()
    assert wrong == 0
    ((share,),) = asked.execute(
        "SELECT avg((b.dateTime <= a.expires)::INT) FROM bids b JOIN auctions a ON b.auction = a.id"
    ).fetchall()
    assert 0.3 < share < 0.9


def test_slices_compose(whole: dict[str, pa.Table]) -> None:
    """Any slice alone, in any process, is that part of the whole; single events too."""
    cuts = [0, 1, 49, 50, 777, 20_000, EVENTS]
    slices = [Nexmark(7).tables(np.arange(*cut)) for cut in itertools.pairwise(cuts)]
    for name in TOPICS:
        assert pa.concat_tables([tables[name] for tables in slices]).equals(whole[name])
    chosen = np.random.default_rng(1).permutation(EVENTS)[:500]
    bids = chosen[chosen % 50 >= 4]
    places = pa.array(bids // 50 * 46 + bids % 50 - 4)
    assert Nexmark(7).bids(bids).equals(whole["bids"].take(places).combine_chunks())


def test_another_seed_is_another_world(whole: dict[str, pa.Table]) -> None:
    other = Nexmark(8).tables(np.arange(EVENTS))
    for name, column in (("persons", "name"), ("auctions", "category"), ("bids", "price"), ("bids", "extra")):
        same = np.mean(np.asarray(other[name][column]) == np.asarray(whole[name][column]))
        assert same < 0.25, (name, column)


@pytest.mark.parametrize("seed", range(SHUFFLES))
def test_shuffled_events_are_not_late(seed: int) -> None:
    """Each arrives once, in another order than it happened, and no topic's partition sees one below its maximum minus the lateness."""
    chance = np.random.default_rng(seed)
    lateness_events = int(chance.integers(1, 400))
    arrival = Arrival(0, 3_000, seed=seed, lateness_events=lateness_events, shuffled=True)
    numbers = arrival.numbers(0, arrival.end)
    assert np.array_equal(np.sort(numbers), np.arange(3_000)) and not np.array_equal(numbers, np.arange(3_000))
    assert (np.maximum.accumulate(numbers) - numbers).max() <= lateness_events
    with hw.open_log("memory://") as log:
        create(log, lateness=f"{lateness_events * PERIOD_US} us", partitions=int(chance.integers(1, 5)))
        fill(log, EVENTS_OF_7, arrival, events_max=int(chance.integers(100, 4_000)))
        assert [sum(read_topic(log, name)["_late"].to_pylist()) for name in TOPICS] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_late_events_are_those_that_were_delayed(seed: int) -> None:
    """Nearly all of them and nobody else: a topic with few events may have had nothing newer before one."""
    arrival = Arrival(0, 20_000, seed=seed, lateness_events=1_000, shuffled=True, late=0.03)
    delayed = np.flatnonzero(arrival.is_delayed(np.arange(20_000)))
    with hw.open_log("memory://") as log:
        create(log, lateness=f"{1_000 * PERIOD_US} us")
        fill(log, EVENTS_OF_7, arrival)
        bids = read_topic(log, "bids")
    late_us = np.asarray(bids.filter(bids["_late"])["dateTime"].cast(pa.int64()))
    late = (late_us - START_US) // PERIOD_US
    assert np.isin(late, delayed).all()
    assert 0.9 * (delayed % 50 >= 4).sum() < len(late)


def test_arrivals_compose() -> None:
    """Two processes that take turns at places append what one would have appended."""
    arrival = Arrival(150, 5_150, seed=3, lateness_events=200, shuffled=True, late=0.05)
    cuts = [150, 151, 1_000, 4_000, arrival.end]
    parts = [arrival.numbers(*cut) for cut in itertools.pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), arrival.numbers(150, arrival.end))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(150, 5_150))
    tables = list(batches(EVENTS_OF_7, arrival, 700))
    once = EVENTS_OF_7.tables(arrival.numbers(150, arrival.end))
    assert all(pa.concat_tables([part[name] for part in tables]).equals(once[name]) for name in TOPICS)


@pytest.mark.slow
def test_two_processes_make_the_two_halves(tmp_path: Path, whole: dict[str, pa.Table]) -> None:
    """As its users start it: the log has every event once, each key's in order."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    for first in (0, EVENTS // 2):
        command = ["--log", str(tmp_path), "--seed", "7", "--first", str(first), "--events", str(EVENTS // 2)]
        ended = subprocess.run(
            [sys.executable, "-m", "examples.nexmark.generate", *command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0 and "23,000 bids" in ended.stdout, ended.stderr
    with hw.open_log(tmp_path) as log:
        for name, table in whole.items():
            assert rows(log.read(name)) == rows(table)
        assert log.topic("bids").lateness_us == 4_000_000 and log.topic("bids").key == "auction"
        assert not any(read_topic(log, "bids")["_late"].to_pylist())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rate", "0"], "cannot happen at that rate"),
        (["--rate", "2000000"], "no two events happen in the same microsecond"),
        (["--events", "-1"], "counted from 0"),
        (["--late", "1.5"], "is no share"),
        (["--lateness", "soon"], "is not a duration"),
        (["--partitions", "0"], "cannot have 0 partitions"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=sentence):
        main(["--log", str(tmp_path / "log"), "--events", "100", *arguments])
