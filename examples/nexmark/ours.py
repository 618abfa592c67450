"""The Nexmark queries that operators of ours answer, as functions from DataFrames to a DataFrame.

Five have shapes that Spark's own streaming refuses: the winning bids of auctions, which may still rise, and what is computed over them
(q4, q6, q9), and distinct counts (q15, q16). The others it can do (`native.py`), and ours keep less for them, or work where events are
read: windows and sessions (q5, q7, q11), the last and the best of each key (q18, q19), and what a lookup can do instead of a join of
windows (q8). q20 is a join for ever: a bid may come before its auction, by any time. It has an operator of its own, which keeps a bid
only until its auction has come.

An auction's bids find it by its row at their time (`hw.lookup`), so nobody waits for more than the lateness, and what a bid is compared by
is kept no longer than bids may ask for it. The module imports nothing of the example but `native`, which lies beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

import headwater as hw
from headwater.operators import H1, H2, Input, Keys, Operator, State, TableSpec, Time, operate, to_arrow

try:
    from native import NATIVE, Query, day
except ImportError:
    from examples.nexmark.native import NATIVE, Query, day

RANKS = {"rank1": "price < 10000", "rank2": "price >= 10000 AND price < 1000000", "rank3": "price >= 1000000"}


def winning(bids: DataFrame, auctions: DataFrame, *columns: str) -> DataFrame:
    """The highest bid of each auction that came while it was open, of equal ones the first, with these columns of the auction."""
    offered = auctions.select(
        F.col("id").alias("auction"), F.col("dateTime").alias("opened"), F.col("expires").alias("closes"), *columns
    )
    placed = bids.select(
        "auction", "bidder", "price", F.col("dateTime").alias("bid_dateTime"), F.col("extra").alias("bid_extra")
    )
    valid = hw.lookup(placed, offered, "auction", at="bid_dateTime", table_at="opened", how="inner")
    valid = valid.where("bid_dateTime <= closes").drop("closes")
    return hw.top_n(valid, 1, by="auction", order=["price DESC", "bid_dateTime"]).drop("rank")


def average_of_categories(bids: DataFrame, auctions: DataFrame) -> DataFrame:
    """q4: the average of the winning prices of each category."""
    won = winning(bids, auctions, "category").select("auction", "category", "price")
    summed = hw.totals(won, by="category", key="auction", total=("sum", "price"), sold="count")
    return summed.selectExpr("category AS id", "total div sold AS final")


def hot_items(bids: DataFrame) -> DataFrame:
    """q5: the auctions with the most bids in ten seconds, every two seconds. Windows that end together are alone in two seconds."""
    counted = hw.windowed(bids, by="auction", over="10 seconds", every="2 seconds", at="dateTime", num="count")
    hot = hw.top_n(
        counted.select("auction", "num", *window_columns()),
        1,
        order="num DESC",
        over="2 seconds",
        ties=True,
        at="endtime",
    )
    return hot.select("auction", "num", "starttime", "endtime")


def average_of_sellers(bids: DataFrame, auctions: DataFrame) -> DataFrame:
    """q6: the average of the winning prices of a seller's ten auctions that expired last."""
    won = winning(bids, auctions, "seller", "expires").select("auction", "seller", "expires", "price")
    last = hw.top_n(won, 10, by="seller", order=["expires DESC", "auction DESC"], key="auction")
    summed = hw.totals(last, by="seller", key=["seller", "rank"], total=("sum", "price"), sold="count")
    return summed.selectExpr("seller", "total div sold AS avg_price")


def highest_bids(bids: DataFrame) -> DataFrame:
    """q7: the bids of the highest price in each ten seconds."""
    rows = bids.select("auction", "bidder", "price", "dateTime", "extra")
    return hw.top_n(rows, 1, order="price DESC", over="10 seconds", ties=True).select(*rows.columns)


def new_users(persons: DataFrame, auctions: DataFrame) -> DataFrame:
    """q8: persons who opened an auction in the ten seconds in which they came, before or after that.

    A person waits for the end of these ten seconds. The last auction that the person has opened by then is in them, or none is.
    """
    starttime = ten_seconds("dateTime")
    last_moment = F.timestamp_micros(F.unix_micros(starttime) + 9_999_999)
    came = persons.select("id", "name", starttime.alias("starttime"), last_moment.alias("until"))
    opened = auctions.select(F.col("seller").alias("id"), F.col("dateTime").alias("opened"), "dateTime")
    last = hw.lookup(came, opened, "id", at="until", table_at="dateTime", how="inner")
    once = hw.dedupe(last.where("opened >= starttime"), ["id", "name"], at="until")
    return once.select("id", "name", "starttime")


def winning_bids(bids: DataFrame, auctions: DataFrame) -> DataFrame:
    """q9: the winning bid of each auction, with the auction."""
    own = ("itemName", "description", "initialBid", "reserve", "dateTime", "expires", "seller", "category", "extra")
    won = winning(bids, auctions, *own)
    return won.select(F.col("auction").alias("id"), *own, "auction", "bidder", "price", "bid_dateTime", "bid_extra")


def user_sessions(bids: DataFrame) -> DataFrame:
    """q11: bids of a bidder without ten seconds of silence between them."""
    sessions = hw.windowed(bids, by="bidder", gap="10 seconds", at="dateTime", bid_count="count")
    return sessions.select("bidder", "bid_count", *window_columns())


def statistics_of_days(bids: DataFrame) -> DataFrame:
    """q15: bids, bidders and auctions of a day, in all and by price."""
    return hw.totals(bids.select(day().alias("day"), *ranked()), by="day", **counts())


def statistics_of_channels(bids: DataFrame) -> DataFrame:
    """q16: the same of a channel and a day, and its last minute."""
    minute = F.date_format("dateTime", "HH:mm").alias("at_minute")
    rows = bids.select("channel", day().alias("day"), minute, *ranked())
    return hw.totals(rows, by=["channel", "day"], minute=("max", "at_minute"), **counts())


def last_bids(bids: DataFrame) -> DataFrame:
    """q18: the last bid of each bidder for each auction."""
    last = hw.top_n(bids, 1, by=["auction", "bidder"], order="dateTime DESC")
    return last.select("auction", "bidder", "price", "channel", "url", "dateTime", "extra")


def top_bids(bids: DataFrame) -> DataFrame:
    """q19: the ten highest bids of each auction; of equal prices the earlier is higher."""
    best = hw.top_n(bids, 10, by="auction", order=["price DESC", "dateTime"])
    return best.select(
        "auction", "bidder", "price", "channel", "url", "dateTime", "extra", F.expr("rank::bigint AS rank_number")
    )


def expanded_bids(bids: DataFrame, auctions: DataFrame) -> DataFrame:
    """q20: bids of one category with their auction, whichever of them comes first."""
    offered = auctions.select(
        F.col("id").alias("auction"),
        *("itemName", "description", "initialBid", "reserve"),
        F.col("dateTime").alias("auction_dateTime"),
        *("expires", "seller", "category"),
        F.col("extra").alias("auction_extra"),
    )
    placed = bids.select(
        *("auction", "bidder", "price", "channel", "url"),
        F.col("dateTime").alias("bid_dateTime"),
        F.col("extra").alias("bid_extra"),
    )
    operator = joining(to_arrow(placed.schema), to_arrow(offered.schema), 10)
    return operate(operator, [Input(placed, ["auction"]), Input(offered, ["auction"])])


def joining(bids: pa.Schema, auctions: pa.Schema, category: int) -> Operator:
    """The operator of q20. An auction is kept for ever, a bid until its auction comes: those of other categories are gone then.

    The class is made here, so that it travels to Spark's workers by value.
    """
    own = [field for field in auctions if field.name != "auction"]

    class Joining:
        name = "joining"
        is_prompt = True
        settings = (category,)
        schema = pa.schema([*bids, *own])
        tables: ClassVar = {
            "auctions": TableSpec("keyed", [field.with_nullable(True) for field in own]),
            "waiting": TableSpec("keyed", [field.with_nullable(True) for field in bids]),
        }

        def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
            placed, offered = inputs
            state["auctions"].put(offered.select([H1, H2, *(field.name for field in own)]))
            came = Keys.of(offered)
            waited, _ = state["waiting"].find(came)
            state["waiting"].remove(came)
            names = [H1, H2, *bids.names]
            due = pa.concat_tables([waited.select(names), placed.select(names).cast(waited.select(names).schema)])
            keys = Keys.of(due)
            known, number = state["auctions"].find(keys)
            row = np.full(len(keys), -1)
            row[number] = np.arange(len(number))
            found = row[keys.row]
            self._wait(state, due.filter(pa.array(found < 0)))
            due, found = due.filter(pa.array(found >= 0)), pa.array(found[found >= 0])
            joined = {name: due.column(name) for name in bids.names}
            joined |= {field.name: known.column(field.name).take(found) for field in own}
            result = pa.table(joined)
            return result.filter(pc.equal(result.column("category"), category))

        def _wait(self, state: State, rows: pa.Table) -> None:
            """Rows of a key replace those before, so these are kept with them."""
            before, _ = state["waiting"].find(Keys.of(rows))
            state["waiting"].put(pa.concat_tables([before.select(rows.column_names), rows]))

    return Joining()


def window_columns() -> list[Column]:
    """Start and end of a window, as the answers name them."""
    return [F.col("window_start").alias("starttime"), F.col("window_end").alias("endtime")]


def ten_seconds(time: str) -> Column:
    """When the ten seconds began that a time is in."""
    us = F.unix_micros(time)
    return F.timestamp_micros(us - F.pmod(us, F.lit(10_000_000)))


def ranked() -> list[Column]:
    """Bidder and auction in all, and of each rank: null where the price is another, which is not counted."""
    conditions = {"total": "true"} | RANKS
    return [
        F.when(F.expr(condition), F.col(column)).alias(f"{rank}_{column}")
        for column in ("bidder", "auction")
        for rank, condition in conditions.items()
    ]


def counts() -> dict[str, tuple[str, str]]:
    """The aggregates over the columns of `ranked`."""
    ranks = ("total", *RANKS)
    found = {f"{rank}_bids": ("count", f"{rank}_bidder") for rank in ranks}
    return found | {
        f"{rank}_{column}s": ("distinct", f"{rank}_{column}") for column in ("bidder", "auction") for rank in ranks
    }


OURS = {
    "q4": Query(average_of_categories, ("bids", "auctions"), "update", ("id",)),
    "q5": Query(hot_items),
    "q6": Query(average_of_sellers, ("bids", "auctions"), "update", ("seller",)),
    "q7": Query(highest_bids),
    "q8": Query(new_users, ("persons", "auctions")),
    "q9": Query(winning_bids, ("bids", "auctions"), "update", ("id",)),
    "q11": Query(user_sessions),
    "q15": Query(statistics_of_days, mode="update", key=("day",)),
    "q16": Query(statistics_of_channels, mode="update", key=("channel", "day")),
    "q18": Query(last_bids, mode="update", key=("bidder", "auction")),
    "q19": Query(top_bids, mode="update", key=("auction", "rank_number")),
    "q20": Query(expanded_bids, ("bids", "auctions")),
}
QUERIES = {name: (NATIVE | OURS)[name] for name in (f"q{number}" for number in range(23))}
