"""Nexmark's 23 queries as DuckDB SQL: each one's final answer, to compare what a stream ended with.

The final answer is what holds when every event was seen and event time has passed everything: windows and auctions are closed, nothing
is provisional. Rows are compared as a multiset without order; a stream with updates is compared by its last row per key (in brackets,
where the answer has one). An event that is late by its own partition (`_late`) does not count; `answer(query, with_late=True)` is for
stages that let late events pass: a stateless one, and one that keeps everything for ever (`COUNTS_LATE`).

Conventions: windows are aligned to 1970, contain their start and not their end, and are called `starttime`, `endtime`. Averages are whole
(`sum // count`), so no float can drift. No two events have the same time, so `dateTime` breaks every tie.

    query  asks                                                              shape in a stream
    q0     all bids, unchanged                                               stateless
    q1     all bids, price in euros                                          stateless
    q2     bids for every 123rd auction                                      stateless filter
    q3     who sells in OR, ID, CA in category 10, and which auctions        join of two streams by key, for ever (auctions × persons)
    q4     average of the winning prices of each category [id]               interval join (bid while open), max per auction, average per
                                                                             category of what may still rise: retracting group-by
    q5     auctions with the most bids in 10 s, every 2 s, all of equal rank hopping window count, then maximum per window
    q6     average of a seller's last 10 winning prices by expiry [seller]   winning bids, the last 10 per seller: retracting top-n, average
    q7     the highest bids of each 10 s, all of equal price                 tumbling window maximum, with ties
    q8     who came and opened an auction in the same 10 s [id]              tumbling window semi-join (persons, auctions)
    q9     the winning bid of each auction [id]                              interval join, then top-1 per auction (price, then the earlier)
    q10    all bids with day and minute, as files are partitioned            stateless, to files
    q11    bids of each bidder by sessions with gaps of 10 s                 session window
    q12    bids of each bidder in each 10 s of processing time               tumbling window by append time (`_appended`, a fake clock's)
    q13    bids with a value from a bounded side table                       stateless join with a static table
    q14    bids between 1 and 50 million euros, time of day, letters counted stateless
    q15    bids, distinct bidders, distinct auctions by price rank [day]     group-by with exact distinct, updating
    q16    the same by channel, and its last minute [channel, day]           group-by with exact distinct, updating
    q17    count, min, max, average, sum by auction [auction, day]           group-by, updating
    q18    each bidder's last bid for each auction [bidder, auction]         dedupe that keeps the last
    q19    the ten highest bids of each auction [auction, rank_number]       top-n per key, updating (price, then the earlier)
    q20    bids for auctions of category 10, with the auction                join of two streams by key, for ever (bids × auctions)
    q21    bids with the channel's id from its name or the url               stateless
    q22    bids with the folders of the url                                  stateless

Shares no code with the queries that it checks. Thread-safety: none.
"""

from __future__ import annotations

from typing import Any

import duckdb
import pyarrow as pa

import headwater as hw

TOPICS = ("persons", "auctions", "bids")

# A tenth of the keys is missing: the join of q13 also filters.
_SIDE_INPUT = "SELECT key, 'side-' || key AS value FROM range(10000) AS keys(key) WHERE key % 10 <> 0"

_WINNING = """
    SELECT a.*, b.auction, b.bidder, b.price, b.dateTime AS bid_dateTime, b.extra AS bid_extra
    FROM auctions a JOIN bids b ON b.auction = a.id AND b.dateTime BETWEEN a.dateTime AND a.expires
    QUALIFY row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.dateTime) = 1
"""
_HOPS = """
    SELECT auction, starttime, starttime + INTERVAL 10 SECOND AS endtime, count(*) AS num
    FROM (SELECT auction, time_bucket(INTERVAL 2 SECOND, dateTime, TIMESTAMP '1970-01-01') - to_seconds(2 * hop) AS starttime
          FROM bids CROSS JOIN range(5) AS hops(hop))
    GROUP BY ALL
"""
_RANKS = """
    count(*) AS total_bids,
    count(*) FILTER (price < 10000) AS rank1_bids,
    count(*) FILTER (price >= 10000 AND price < 1000000) AS rank2_bids,
    count(*) FILTER (price >= 1000000) AS rank3_bids
"""
_DISTINCT = ", ".join(
    f"count(DISTINCT {column}) FILTER ({condition}) AS {rank}_{column}s"
    for column in ("bidder", "auction")
    for rank, condition in (
        ("total", "true"),
        ("rank1", "price < 10000"),
        ("rank2", "price >= 10000 AND price < 1000000"),
        ("rank3", "price >= 1000000"),
    )
)
_EURO = "CAST(CAST(price AS DECIMAL(20, 0)) * CAST(0.908 AS DECIMAL(3, 3)) AS DECIMAL(23, 3))"
_CHANNEL_ID = "nullif(regexp_extract(url, '(&|^)channel_id=([^&]*)', 2), '')"

SQL = {
    "q0": "SELECT auction, bidder, price, dateTime, extra FROM bids",
    "q1": f"SELECT auction, bidder, {_EURO} AS price, dateTime, extra FROM bids",
    "q2": "SELECT auction, price FROM bids WHERE auction % 123 = 0",
    "q3": """
        SELECT p.name, p.city, p.state, a.id FROM auctions a JOIN persons p ON a.seller = p.id
        WHERE a.category = 10 AND p.state IN ('OR', 'ID', 'CA')""",
    "q4": f"SELECT category AS id, CAST(sum(price) // count(*) AS BIGINT) AS final FROM ({_WINNING}) GROUP BY category",
    "q5": f"""
        WITH counted AS ({_HOPS})
        SELECT auction, num, starttime, endtime FROM counted
        QUALIFY num = max(num) OVER (PARTITION BY starttime)""",
    "q6": f"""
        SELECT seller, CAST(sum(price) // count(*) AS BIGINT) AS avg_price
        FROM (SELECT * FROM ({_WINNING}) QUALIFY row_number() OVER (PARTITION BY seller ORDER BY expires DESC, id DESC) <= 10)
        GROUP BY seller""",
    "q7": """
        SELECT auction, bidder, price, dateTime, extra FROM bids
        QUALIFY price = max(price) OVER (PARTITION BY time_bucket(INTERVAL 10 SECOND, dateTime, TIMESTAMP '1970-01-01'))""",
    "q8": """
        WITH came AS (SELECT id, name, time_bucket(INTERVAL 10 SECOND, dateTime, TIMESTAMP '1970-01-01') AS starttime FROM persons),
        opened AS (SELECT seller, time_bucket(INTERVAL 10 SECOND, dateTime, TIMESTAMP '1970-01-01') AS starttime FROM auctions)
        SELECT DISTINCT id, name, starttime FROM came WHERE (id, starttime) IN (SELECT (seller, starttime) FROM opened)""",
    "q9": f"""
        SELECT id, itemName, description, initialBid, reserve, dateTime, expires, seller, category, extra,
               auction, bidder, price, bid_dateTime, bid_extra
        FROM ({_WINNING})""",
    "q10": """
        SELECT auction, bidder, price, dateTime, extra, strftime(dateTime, '%Y-%m-%d') AS dt, strftime(dateTime, '%H:%M') AS hm
        FROM bids""",
    "q11": """
        WITH marked AS (
            SELECT bidder, dateTime, coalesce(dateTime - lag(dateTime) OVER turn > INTERVAL 10 SECOND, true) AS begins
            FROM bids WINDOW turn AS (PARTITION BY bidder ORDER BY dateTime)),
        numbered AS (SELECT bidder, dateTime, sum(begins::INT) OVER (PARTITION BY bidder ORDER BY dateTime) AS session FROM marked)
        SELECT bidder, count(*) AS bid_count, min(dateTime) AS starttime, max(dateTime) + INTERVAL 10 SECOND AS endtime
        FROM numbered GROUP BY bidder, session""",
    "q12": """
        SELECT bidder, count(*) AS bid_count, starttime, starttime + INTERVAL 10 SECOND AS endtime
        FROM (SELECT bidder, time_bucket(INTERVAL 10 SECOND, _appended, TIMESTAMP '1970-01-01') AS starttime FROM bids)
        GROUP BY bidder, starttime""",
    "q13": """
        SELECT b.auction, b.bidder, b.price, b.dateTime, s.value
        FROM bids b JOIN side_input s ON b.auction % 10000 = s.key""",
    "q14": f"""
        SELECT auction, bidder, {_EURO} AS price,
               CASE WHEN hour(dateTime) BETWEEN 8 AND 18 THEN 'dayTime'
                    WHEN hour(dateTime) <= 6 OR hour(dateTime) >= 20 THEN 'nightTime' ELSE 'otherTime' END AS bidTimeType,
               dateTime, extra, length(extra) - length(replace(extra, 'c', '')) AS c_counts
        FROM bids WHERE {_EURO} > 1000000 AND {_EURO} < 50000000""",
    "q15": f"SELECT strftime(dateTime, '%Y-%m-%d') AS day, {_RANKS}, {_DISTINCT} FROM bids GROUP BY day",
    "q16": f"""
        SELECT channel, strftime(dateTime, '%Y-%m-%d') AS day, max(strftime(dateTime, '%H:%M')) AS minute, {_RANKS}, {_DISTINCT}
        FROM bids GROUP BY channel, day""",
    "q17": f"""
        SELECT auction, strftime(dateTime, '%Y-%m-%d') AS day, {_RANKS}, min(price) AS min_price, max(price) AS max_price,
               CAST(sum(price) // count(*) AS BIGINT) AS avg_price, CAST(sum(price) AS BIGINT) AS sum_price
        FROM bids GROUP BY auction, day""",
    "q18": """
        SELECT auction, bidder, price, channel, url, dateTime, extra FROM bids
        QUALIFY row_number() OVER (PARTITION BY bidder, auction ORDER BY dateTime DESC) = 1""",
    "q19": """
        SELECT auction, bidder, price, channel, url, dateTime, extra,
               row_number() OVER (PARTITION BY auction ORDER BY price DESC, dateTime) AS rank_number
        FROM bids QUALIFY rank_number <= 10""",
    "q20": """
        SELECT b.auction, b.bidder, b.price, b.channel, b.url, b.dateTime AS bid_dateTime, b.extra AS bid_extra,
               a.itemName, a.description, a.initialBid, a.reserve, a.dateTime AS auction_dateTime, a.expires, a.seller, a.category,
               a.extra AS auction_extra
        FROM bids b JOIN auctions a ON b.auction = a.id WHERE a.category = 10""",
    "q21": f"""
        SELECT auction, bidder, price, channel,
               CASE lower(channel) WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'
                    ELSE {_CHANNEL_ID} END AS channel_id
        FROM bids WHERE lower(channel) IN ('apple', 'google', 'facebook', 'baidu') OR {_CHANNEL_ID} IS NOT NULL""",
    "q22": """
        SELECT auction, bidder, price, channel, split_part(url, '/', 4) AS dir1, split_part(url, '/', 5) AS dir2,
               split_part(url, '/', 6) AS dir3
        FROM bids""",
}


# An event that is late by its partition counts where no time passes: nothing waits, and nothing is over.
COUNTS_LATE = {"q0", "q1", "q2", "q3", "q10", "q12", "q13", "q14", "q15", "q16", "q18", "q19", "q20", "q21", "q22"}


class Oracle:
    """The three tables, and the answers over them; a context manager."""

    def __init__(self, tables: dict[str, pa.Table]) -> None:
        """`tables` by topic, with the topic's columns; a boolean `_late` and (for q12) `_appended` where they matter."""
        self._connection = duckdb.connect()
        self._connection.execute(f"CREATE VIEW side_input AS {_SIDE_INPUT}")
        for name, table in tables.items():
            if "_late" not in table.column_names:
                table = table.append_column("_late", pa.array([False]).take(pa.array([0] * len(table), pa.int64())))
            self._connection.register("given", without_zones(table))
            self._connection.execute(f"CREATE TABLE all_{name} AS SELECT * FROM given")
            self._connection.unregister("given")

    @classmethod
    def of_log(cls, log: hw.Log) -> Oracle:
        """The answers over all that a log's topics hold; who is late follows from each partition's own order."""
        return cls({name: read_topic(log, name) for name in TOPICS})

    def answer(self, query: str, *, with_late: bool = False) -> pa.Table:
        """The final answer to a query, in no order; times without a zone, in UTC."""
        for name in TOPICS:
            condition = "true" if with_late else "NOT _late"
            self._connection.execute(f"CREATE OR REPLACE VIEW {name} AS SELECT * FROM all_{name} WHERE {condition}")
        return self._connection.sql(SQL[query]).to_arrow_table()

    def table(self, name: str) -> pa.Table:
        """A table as it is asked; `side_input` is the bounded one of q13."""
        return self._connection.sql(f"SELECT * FROM {name}").to_arrow_table()

    def late_count(self, topic: str) -> int:
        """How many events of a topic are late."""
        ((count,),) = self._connection.execute(f"SELECT count(*) FROM all_{topic} WHERE _late").fetchall()
        return int(count)

    def close(self) -> None:
        """Gives the memory back."""
        self._connection.close()

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_topic(log: hw.Log, name: str) -> pa.Table:
    """A topic's events with `_partition`, `_offset`, `_appended`, and `_late`: below the running maximum before it minus the lateness."""
    topic = log.topic(name)
    events = without_zones(log.read(name, columns=[*topic.schema.names, "_partition", "_offset", "_appended"]))
    with duckdb.connect() as connection:
        connection.register("events", events)
        return connection.sql(
            f"""SELECT *, coalesce({topic.time} < max({topic.time}) OVER (
                    PARTITION BY _partition ORDER BY _offset ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
                ) - to_microseconds({topic.lateness_us}), false) AS _late FROM events"""
        ).to_arrow_table()


def rows(table: pa.Table) -> list[tuple[Any, ...]]:
    """What two answers are compared by: the rows in a fixed order, with the names of the columns before them."""
    table = without_zones(table)
    return [tuple(table.column_names), *sorted(zip(*(column.to_pylist() for column in table.columns), strict=True))]


def without_zones(table: pa.Table) -> pa.Table:
    """Times as UTC without a zone: what DuckDB computes with, whatever the machine's zone is."""
    for place, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type):
            table = table.set_column(place, field.name, table.column(place).cast(pa.timestamp("us")))
    return table
