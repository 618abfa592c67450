"""The answers that Spark gives no second opinion on, computed once more by loops over rows, as the specification reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from examples.nexmark.events import Nexmark
from headwater.model.clock import time_us
from tests.rigs.app.nexmark_oracle import SQL, Oracle, rows, without_zones

SEED = 11
RANKS = ((0, 10_000), (10_000, 1_000_000), (1_000_000, 1 << 62))
Row = dict[str, Any]


@pytest.fixture(scope="module")
def tables() -> dict[str, pa.Table]:
    """Two days, 2,500 events."""
    return Nexmark(SEED, 40_000, time_us("2025-01-01T23:59:30+00:00")).tables(np.arange(2_500))


@pytest.fixture(scope="module")
def oracle(tables: dict[str, pa.Table]) -> Iterator[Oracle]:
    with Oracle(tables) as oracle:
        yield oracle


@pytest.fixture(scope="module")
def auctions(tables: dict[str, pa.Table]) -> list[Row]:
    return without_zones(tables["auctions"]).to_pylist()


@pytest.fixture(scope="module")
def bids(tables: dict[str, pa.Table]) -> list[Row]:
    return without_zones(tables["bids"]).to_pylist()


@pytest.fixture(scope="module")
def winning(auctions: list[Row], bids: list[Row]) -> list[tuple[Row, Row]]:
    """Each auction with the first of the highest bids that came while it was open."""
    found = []
    for auction in auctions:
        valid = [
            b
            for b in bids
            if b["auction"] == auction["id"] and auction["dateTime"] <= b["dateTime"] <= auction["expires"]
        ]
        if valid:
            found.append((auction, max(valid, key=lambda b: (b["price"], -b["dateTime"].timestamp()))))
    return found


def test_average_price_of_a_category(winning: list[tuple[Row, Row]], oracle: Oracle) -> None:
    """q4."""
    prices = defaultdict(list)
    for auction, bid in winning:
        prices[auction["category"]].append(bid["price"])
    assert rows(oracle.answer("q4"))[1:] == sorted((category, sum(p) // len(p)) for category, p in prices.items())


def test_average_price_of_a_sellers_last_ten(winning: list[tuple[Row, Row]], oracle: Oracle) -> None:
    """q6; some seller has more than ten, so that ten are chosen."""
    prices = defaultdict(list)
    for auction, bid in sorted(winning, key=lambda pair: (pair[0]["expires"], pair[0]["id"])):
        prices[auction["seller"]].append(bid["price"])
    assert max(map(len, prices.values())) > 10
    wanted = sorted((seller, sum(p[-10:]) // len(p[-10:])) for seller, p in prices.items())
    assert rows(oracle.answer("q6"))[1:] == wanted


def test_winning_bids(winning: list[tuple[Row, Row]], auctions: list[Row], oracle: Oracle) -> None:
    """q9; some auctions have no winner."""
    assert 0 < len(winning) < len(auctions)
    bid_columns = ("auction", "bidder", "price", "dateTime", "extra")
    wanted = sorted((*auction.values(), *(bid[name] for name in bid_columns)) for auction, bid in winning)
    assert rows(oracle.answer("q9"))[1:] == wanted


@pytest.mark.parametrize("query", ["q15", "q16"])
def test_distinct_bidders_and_auctions(query: str, bids: list[Row], oracle: Oracle) -> None:
    """q15 by day, q16 by channel and day with the last minute."""
    groups = defaultdict(list)
    for bid in bids:
        groups[() if query == "q15" else (bid["channel"],), f"{bid['dateTime']:%Y-%m-%d}"].append(bid)
    wanted = []
    for (channel, day), members in groups.items():
        ranks = [members, *([b for b in members if low <= b["price"] < high] for low, high in RANKS)]
        minute = () if query == "q15" else (max(f"{b['dateTime']:%H:%M}" for b in members),)
        distinct = [len({b[column] for b in rank}) for column in ("bidder", "auction") for rank in ranks]
        wanted.append((*channel, day, *minute, *map(len, ranks), *distinct))
    assert rows(oracle.answer(query))[1:] == sorted(wanted)
    assert len({row[1 if query == "q16" else 0] for row in wanted}) == 2


def test_nothing_in_is_nothing_out() -> None:
    """Every query has an answer over no events; q12 needs to know when they were appended."""
    nothing = Nexmark().tables(np.arange(0))
    appended = nothing["bids"].append_column("_appended", pa.array([], pa.timestamp("us")))
    with Oracle(nothing | {"bids": appended}) as oracle:
        assert [query for query in SQL if oracle.answer(query).num_rows] == []
