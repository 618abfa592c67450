"""The Nexmark queries that operators of ours answer, as functions from DataFrames to a DataFrame.

Five have shapes that Spark's own streaming refuses: the winning bids of auctions, which may still rise, and what is computed over them
(q4, q6, q9), and distinct counts (q15, q16). Two it can do (`native.py`), and ours keep less for them: the last and the best of each
key (q18, q19).

An auction's bids find it by its row at their time (`hw.lookup`), so nobody waits for more than the lateness, and what a bid is compared by
is kept no longer than bids may ask for it. The module imports nothing of the example but `native`, which lies beside it.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

import headwater as hw

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


def average_of_sellers(bids: DataFrame, auctions: DataFrame) -> DataFrame:
    """q6: the average of the winning prices of a seller's ten auctions that expired last."""
    won = winning(bids, auctions, "seller", "expires").select("auction", "seller", "expires", "price")
    last = hw.top_n(won, 10, by="seller", order=["expires DESC", "auction DESC"], key="auction")
    summed = hw.totals(last, by="seller", key=["seller", "rank"], total=("sum", "price"), sold="count")
    return summed.selectExpr("seller", "total div sold AS avg_price")


def winning_bids(bids: DataFrame, auctions: DataFrame) -> DataFrame:
    """q9: the winning bid of each auction, with the auction."""
    own = ("itemName", "description", "initialBid", "reserve", "dateTime", "expires", "seller", "category", "extra")
    won = winning(bids, auctions, *own)
    return won.select(F.col("auction").alias("id"), *own, "auction", "bidder", "price", "bid_dateTime", "bid_extra")


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
    "q6": Query(average_of_sellers, ("bids", "auctions"), "update", ("seller",)),
    "q9": Query(winning_bids, ("bids", "auctions"), "update", ("id",)),
    "q15": Query(statistics_of_days, mode="update", key=("day",)),
    "q16": Query(statistics_of_channels, mode="update", key=("channel", "day")),
    "q18": Query(last_bids, mode="update", key=("bidder", "auction")),
    "q19": Query(top_bids, mode="update", key=("auction", "rank_number")),
}
QUERIES = {name: (NATIVE | OURS)[name] for name in (f"q{number}" for number in range(23))}
