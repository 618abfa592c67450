"""The Nexmark queries that Spark's own streaming can answer, as functions from DataFrames to a DataFrame.

Eighteen of 23: those without state, windows and sessions by event time, joins of streams by key, and group-bys whose functions Spark keeps
incrementally. Left out are those whose shape it refuses on streams: a group-by over a group-by that may still change (q4, q6, q9) and
distinct counts (q15, q16).

`NATIVE` says for each what it reads, in which output mode it runs, and which columns tell its rows apart where a later row replaces an
earlier one. Inputs have the columns of `topics.py`; q12 needs `_appended` as well. A watermark on `dateTime` is whoever calls them to give.
The module imports nothing of the example, so that an application beside it finds it as `native`.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Literal, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

EURO = Decimal("0.908")
SIDE_KEYS = 10_000
CHANNEL_IDS = {"apple": "0", "google": "1", "facebook": "2", "baidu": "3"}


class Query(NamedTuple):
    """A query: called with the DataFrames of its inputs, in that order. Without a key its rows are only ever added."""

    function: Callable[..., DataFrame]
    inputs: tuple[str, ...] = ("bids",)
    mode: Literal["append", "update"] = "append"
    key: tuple[str, ...] = ()


def pass_through(bids: DataFrame) -> DataFrame:
    """q0: all bids."""
    return bids.select("auction", "bidder", "price", "dateTime", "extra")


def currency_conversion(bids: DataFrame) -> DataFrame:
    """q1: prices in euros."""
    return bids.select("auction", "bidder", euros().alias("price"), "dateTime", "extra")


def selection(bids: DataFrame) -> DataFrame:
    """q2: bids for every 123rd auction."""
    return bids.where("auction % 123 = 0").select("auction", "price")


def local_items(auctions: DataFrame, persons: DataFrame) -> DataFrame:
    """q3: who sells in three states, and what. Nothing bounds the time between a person and an auction: both sides are kept for ever."""
    sellers = persons.where(F.col("state").isin("OR", "ID", "CA")).select(
        F.col("id").alias("seller"), "name", "city", "state"
    )
    offered = auctions.where("category = 10").select("id", "seller")
    return offered.join(sellers, "seller").select("name", "city", "state", "id")


def hot_items(bids: DataFrame) -> DataFrame:
    """q5: the auctions with the most bids in ten seconds, every two seconds."""
    counted = bids.groupBy(F.window("dateTime", "10 seconds", "2 seconds"), "auction").agg(F.count("*").alias("num"))
    ranked = counted.groupBy("window").agg(
        F.max("num").alias("most"), F.collect_list(F.struct("auction", "num")).alias("all")
    )
    hot = ranked.select("window", F.explode(F.filter("all", lambda one: one["num"] == F.col("most"))).alias("hot"))
    return hot.select("hot.auction", "hot.num", *window_columns())


def highest_bids(bids: DataFrame) -> DataFrame:
    """q7: the bids of the highest price in each ten seconds."""
    bid = F.struct("auction", "bidder", "price", "dateTime", "extra")
    by_price = bids.groupBy(F.window("dateTime", "10 seconds"), "price").agg(F.collect_list(bid).alias("bids"))
    return by_price.groupBy("window").agg(F.max_by("bids", "price").alias("bids")).selectExpr("inline(bids)")


def new_users(persons: DataFrame, auctions: DataFrame) -> DataFrame:
    """q8: persons who opened an auction in the ten seconds in which they came."""
    came = persons.select("id", "name", F.window("dateTime", "10 seconds").alias("came"))
    opened = auctions.select("seller", F.window("dateTime", "10 seconds").alias("opened"))
    matching = (F.col("id") == F.col("seller")) & (F.col("came") == F.col("opened"))
    return came.join(opened, matching, "left_semi").select("id", "name", F.col("came.start").alias("starttime"))


def log_to_files(bids: DataFrame) -> DataFrame:
    """q10: all bids, with the day and the minute by which files are partitioned."""
    minute = F.date_format("dateTime", "HH:mm").alias("hm")
    return bids.select("auction", "bidder", "price", "dateTime", "extra", day().alias("dt"), minute)


def user_sessions(bids: DataFrame) -> DataFrame:
    """q11: bids of a bidder without ten seconds of silence between them."""
    sessions = bids.groupBy("bidder", F.session_window("dateTime", "10 seconds").alias("window"))
    return sessions.agg(F.count("*").alias("bid_count")).select("bidder", "bid_count", *window_columns())


def processing_time_windows(bids: DataFrame) -> DataFrame:
    """q12: bids of a bidder in ten seconds of the log's time."""
    counted = bids.groupBy("bidder", F.window("_appended", "10 seconds")).agg(F.count("*").alias("bid_count"))
    return counted.select("bidder", "bid_count", *window_columns())


def side_input_join(bids: DataFrame) -> DataFrame:
    """q13: bids with a value from a bounded table."""
    side = F.broadcast(side_input(bids.sparkSession))
    return bids.join(side, bids["auction"] % SIDE_KEYS == side["key"]).select(
        "auction", "bidder", "price", "dateTime", "value"
    )


def calculation(bids: DataFrame) -> DataFrame:
    """q14: bids between one and fifty million euros, by time of day, and how many c they have."""
    hour = F.hour("dateTime")
    time_type = (
        F.when(hour.between(8, 18), "dayTime").when((hour <= 6) | (hour >= 20), "nightTime").otherwise("otherTime")
    )
    letters = F.length("extra") - F.length(F.replace("extra", F.lit("c"), F.lit("")))
    return bids.where((euros() > 1_000_000) & (euros() < 50_000_000)).select(
        "auction",
        "bidder",
        euros().alias("price"),
        time_type.alias("bidTimeType"),
        "dateTime",
        "extra",
        letters.cast("bigint").alias("c_counts"),
    )


def auction_statistics(bids: DataFrame) -> DataFrame:
    """q17: how many bids an auction got on a day, and of which prices."""
    price = F.col("price")
    return bids.groupBy("auction", day().alias("day")).agg(
        F.count("*").alias("total_bids"),
        F.count_if(price < 10_000).alias("rank1_bids"),
        F.count_if((price >= 10_000) & (price < 1_000_000)).alias("rank2_bids"),
        F.count_if(price >= 1_000_000).alias("rank3_bids"),
        F.min("price").alias("min_price"),
        F.max("price").alias("max_price"),
        F.expr("sum(price) div count(*)").alias("avg_price"),
        F.sum("price").alias("sum_price"),
    )


def last_bids(bids: DataFrame) -> DataFrame:
    """q18: the last bid of each bidder for each auction."""
    bid = F.struct("price", "channel", "url", "dateTime", "extra")
    last = bids.groupBy("auction", "bidder").agg(F.max_by(bid, "dateTime").alias("last"))
    return last.select("auction", "bidder", "last.*")


def top_bids(bids: DataFrame) -> DataFrame:
    """q19: the ten highest bids of each auction; of equal prices the earlier is higher."""
    bid = F.struct("bidder", "price", "channel", "url", "dateTime", "extra")
    order = F.struct(F.col("price"), -F.unix_micros("dateTime"))
    top = bids.groupBy("auction").agg(F.max_by(bid, order, 10).alias("top"))
    ranked = top.select("auction", F.posexplode("top").alias("place", "bid"))
    return ranked.select("auction", "bid.*", (F.col("place") + 1).cast("bigint").alias("rank_number"))


def expanded_bids(bids: DataFrame, auctions: DataFrame) -> DataFrame:
    """q20: bids of one category with their auction; auctions are kept for ever."""
    offered = auctions.where("category = 10").select(
        F.col("id").alias("auction"),
        *("itemName", "description", "initialBid", "reserve"),
        F.col("dateTime").alias("auction_dateTime"),
        *("expires", "seller", "category"),
        F.col("extra").alias("auction_extra"),
    )
    placed = bids.withColumnsRenamed({"dateTime": "bid_dateTime", "extra": "bid_extra"})
    placed = placed.select("auction", "bidder", "price", "channel", "url", "bid_dateTime", "bid_extra")
    return placed.join(offered, "auction")


def channel_ids(bids: DataFrame) -> DataFrame:
    """q21: the id of a bid's channel: known by name, or given in the url."""
    channel = F.lower("channel")
    known = F.coalesce(*(F.when(channel == name, number) for name, number in CHANNEL_IDS.items()))
    given = F.nullif(F.regexp_extract("url", "(&|^)channel_id=([^&]*)", 2), F.lit(""))
    found = bids.select("auction", "bidder", "price", "channel", F.coalesce(known, given).alias("channel_id"))
    return found.where("channel_id IS NOT NULL")


def url_folders(bids: DataFrame) -> DataFrame:
    """q22: the folders of a bid's url."""
    parts = F.split("url", "/")
    folders = [parts.getItem(place + 2).alias(f"dir{place}") for place in (1, 2, 3)]
    return bids.select("auction", "bidder", "price", "channel", *folders)


NATIVE = {
    "q0": Query(pass_through),
    "q1": Query(currency_conversion),
    "q2": Query(selection),
    "q3": Query(local_items, ("auctions", "persons")),
    "q5": Query(hot_items),
    "q7": Query(highest_bids),
    "q8": Query(new_users, ("persons", "auctions")),
    "q10": Query(log_to_files),
    "q11": Query(user_sessions),
    "q12": Query(processing_time_windows, mode="update", key=("bidder", "starttime")),
    "q13": Query(side_input_join),
    "q14": Query(calculation),
    "q17": Query(auction_statistics, mode="update", key=("auction", "day")),
    "q18": Query(last_bids, mode="update", key=("bidder", "auction")),
    "q19": Query(top_bids, mode="update", key=("auction", "rank_number")),
    "q20": Query(expanded_bids, ("bids", "auctions")),
    "q21": Query(channel_ids),
    "q22": Query(url_folders),
}


def side_input(spark: SparkSession) -> DataFrame:
    """The bounded table of q13: a value for each key but every tenth."""
    return spark.range(SIDE_KEYS).where("id % 10 <> 0").selectExpr("id AS key", "concat('side-', id) AS value")


def euros() -> Column:
    """A bid's price in euros, exactly."""
    return (F.col("price") * F.lit(EURO)).cast("decimal(23, 3)")


def day() -> Column:
    """The day on which something happened."""
    return F.date_format("dateTime", "yyyy-MM-dd")


def window_columns() -> list[Column]:
    """Start and end of the column `window`."""
    return [F.col("window.start").alias("starttime"), F.col("window.end").alias("endtime")]
