"""The Nexmark queries in Flink SQL, as `examples/nexmark` defines them.

`QUERIES` has what is selected for each, `REFUSED` why it has none. The tables are those of `examples/nexmark/topics.py`, with a watermark
of the same lateness. Windows are table functions, joined as windows where two of them meet (q5, q7, q8).
"""

from __future__ import annotations

from pathlib import Path

from examples.nexmark.native import EURO
from examples.nexmark.topics import LATENESS, TIME, TOPICS

_LATENESS_S = LATENESS.removesuffix(" seconds")
# Flink's event times have milliseconds; the microseconds of the files are read away.
_TYPES = {"TIMESTAMP": "TIMESTAMP(3)"}
_RANKS = {"rank1": "price < 10000", "rank2": "price >= 10000 AND price < 1000000", "rank3": "price >= 1000000"}


def tables(files: Path) -> list[str]:
    """The statements that declare the three tables over folders of Parquet files."""
    return [_table(name, topic.schema, files / name) for name, topic in TOPICS.items()]


def _table(name: str, schema: str, folder: Path) -> str:
    columns = []
    for column in schema.split(","):
        name_of, kind, *more = column.split()
        columns.append(" ".join([f"`{name_of}`", _TYPES.get(kind, kind), *more]))
    return (
        f"CREATE TABLE {name} ({', '.join(columns)}, `proctime` AS PROCTIME(),"
        f" WATERMARK FOR `{TIME}` AS `{TIME}` - INTERVAL '{_LATENESS_S}' SECOND)"
        f" WITH ('connector' = 'filesystem', 'path' = '{folder.as_uri()}', 'format' = 'parquet',"
        " 'parquet.utc-timezone' = 'true')"
    )


def _counts() -> str:
    """Bids, bidders and auctions, in all and by the rank of the price."""
    found = ["COUNT(*) AS total_bids"]
    found += [f"COUNT(*) FILTER (WHERE {which}) AS {rank}_bids" for rank, which in _RANKS.items()]
    for column in ("bidder", "auction"):
        found.append(f"COUNT(DISTINCT {column}) AS total_{column}s")
        for rank, which in _RANKS.items():
            found.append(f"COUNT(DISTINCT {column}) FILTER (WHERE {which}) AS {rank}_{column}s")
    return ", ".join(found)


_VALID = """
    SELECT A.id, A.itemName, A.description, A.initialBid, A.reserve, A.`dateTime`, A.expires, A.seller, A.category, A.extra,
        B.auction, B.bidder, B.price, B.`dateTime` AS bid_dateTime, B.extra AS bid_extra
    FROM auctions A JOIN bids B ON A.id = B.auction
    WHERE B.`dateTime` BETWEEN A.`dateTime` AND A.expires"""
_WINNING = f"""
    SELECT * FROM (
        SELECT *, ROW_NUMBER() OVER (PARTITION BY id ORDER BY price DESC, bid_dateTime) AS place FROM ({_VALID}))
    WHERE place = 1"""
_HOT = """
    SELECT auction, COUNT(*) AS num, window_start, window_end
    FROM TABLE(HOP(TABLE bids, DESCRIPTOR(`dateTime`), INTERVAL '2' SECOND, INTERVAL '10' SECOND))
    GROUP BY auction, window_start, window_end"""
_TUMBLE = "TABLE(TUMBLE(TABLE {}, DESCRIPTOR(`dateTime`), INTERVAL '10' SECOND))"

QUERIES = {
    "q0": "SELECT auction, bidder, price, `dateTime`, extra FROM bids",
    "q1": f"SELECT auction, bidder, {EURO} * price AS price, `dateTime`, extra FROM bids",
    "q2": "SELECT auction, price FROM bids WHERE MOD(auction, 123) = 0",
    "q3": """
        SELECT P.name, P.city, P.state, A.id FROM auctions A JOIN persons P ON A.seller = P.id
        WHERE A.category = 10 AND P.state IN ('OR', 'ID', 'CA')""",
    "q4": f"""
        SELECT category, AVG(final) FROM (SELECT MAX(price) AS final, id, category FROM ({_VALID}) GROUP BY id, category)
        GROUP BY category""",
    "q5": f"""
        SELECT H.auction, H.num, H.window_start, H.window_end FROM ({_HOT}) H
        JOIN (SELECT MAX(num) AS most, window_start, window_end FROM ({_HOT}) GROUP BY window_start, window_end) M
        ON H.window_start = M.window_start AND H.window_end = M.window_end AND H.num = M.most""",
    "q7": f"""
        SELECT B.auction, B.bidder, B.price, B.`dateTime`, B.extra FROM {_TUMBLE.format("bids")} B
        JOIN (SELECT MAX(price) AS price, window_start, window_end FROM {_TUMBLE.format("bids")}
            GROUP BY window_start, window_end) M
        ON B.window_start = M.window_start AND B.window_end = M.window_end AND B.price = M.price""",
    "q8": f"""
        SELECT P.id, P.name, P.window_start FROM
            (SELECT id, name, window_start, window_end FROM {_TUMBLE.format("persons")}
            GROUP BY id, name, window_start, window_end) P
        JOIN (SELECT seller, window_start, window_end FROM {_TUMBLE.format("auctions")}
            GROUP BY seller, window_start, window_end) A
        ON P.id = A.seller AND P.window_start = A.window_start AND P.window_end = A.window_end""",
    "q9": f"""
        SELECT id, itemName, description, initialBid, reserve, `dateTime`, expires, seller, category, extra,
            auction, bidder, price, bid_dateTime, bid_extra FROM ({_WINNING})""",
    "q10": """
        SELECT auction, bidder, price, `dateTime`, extra,
            DATE_FORMAT(`dateTime`, 'yyyy-MM-dd') AS dt, DATE_FORMAT(`dateTime`, 'HH:mm') AS hm FROM bids""",
    "q11": """
        SELECT bidder, COUNT(*) AS bid_count, window_start, window_end
        FROM TABLE(SESSION(TABLE bids PARTITION BY bidder, DESCRIPTOR(`dateTime`), INTERVAL '10' SECOND))
        GROUP BY bidder, window_start, window_end""",
    "q12": """
        SELECT bidder, COUNT(*) AS bid_count, window_start, window_end
        FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(proctime), INTERVAL '10' SECOND))
        GROUP BY bidder, window_start, window_end""",
    "q14": f"""
        SELECT auction, bidder, {EURO} * price AS price,
            CASE WHEN HOUR(`dateTime`) BETWEEN 8 AND 18 THEN 'dayTime'
                WHEN HOUR(`dateTime`) <= 6 OR HOUR(`dateTime`) >= 20 THEN 'nightTime' ELSE 'otherTime' END AS bidTimeType,
            `dateTime`, extra, CHAR_LENGTH(extra) - CHAR_LENGTH(REPLACE(extra, 'c', '')) AS c_counts
        FROM bids WHERE {EURO} * price > 1000000 AND {EURO} * price < 50000000""",
    "q15": f"""
        SELECT `day`, {_counts()} FROM (SELECT *, DATE_FORMAT(`dateTime`, 'yyyy-MM-dd') AS `day` FROM bids) GROUP BY `day`""",
    "q16": f"""
        SELECT channel, `day`, MAX(hm) AS `minute`, {_counts()} FROM (
            SELECT *, DATE_FORMAT(`dateTime`, 'yyyy-MM-dd') AS `day`, DATE_FORMAT(`dateTime`, 'HH:mm') AS hm FROM bids)
        GROUP BY channel, `day`""",
    "q17": f"""
        SELECT auction, `day`, COUNT(*) AS total_bids,
            {", ".join(f"COUNT(*) FILTER (WHERE {which}) AS {rank}_bids" for rank, which in _RANKS.items())},
            MIN(price) AS min_price, MAX(price) AS max_price, AVG(price) AS avg_price, SUM(price) AS sum_price
        FROM (SELECT auction, price, DATE_FORMAT(`dateTime`, 'yyyy-MM-dd') AS `day` FROM bids) GROUP BY auction, `day`""",
    "q18": """
        SELECT auction, bidder, price, channel, url, `dateTime`, extra FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY bidder, auction ORDER BY `dateTime` DESC) AS place FROM bids)
        WHERE place = 1""",
    "q19": """
        SELECT auction, bidder, price, channel, url, `dateTime`, extra, place FROM (
            SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC, `dateTime`) AS place FROM bids)
        WHERE place <= 10""",
    "q20": """
        SELECT B.auction, B.bidder, B.price, B.channel, B.url, B.`dateTime` AS bid_dateTime, B.extra AS bid_extra,
            A.itemName, A.description, A.initialBid, A.reserve, A.`dateTime` AS auction_dateTime, A.expires, A.seller,
            A.category, A.extra AS auction_extra
        FROM bids B JOIN auctions A ON B.auction = A.id WHERE A.category = 10""",
    "q21": """
        SELECT auction, bidder, price, channel, channel_id FROM (
            SELECT *, CASE LOWER(channel) WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2'
                WHEN 'baidu' THEN '3' ELSE REGEXP_EXTRACT(url, '(&|^)channel_id=([^&]*)', 2) END AS channel_id FROM bids)
        WHERE channel_id IS NOT NULL""",
    "q22": """
        SELECT auction, bidder, price, channel,
            SPLIT_INDEX(url, '/', 3) AS dir1, SPLIT_INDEX(url, '/', 4) AS dir2, SPLIT_INDEX(url, '/', 5) AS dir3 FROM bids""",
}
REFUSED = {
    "q6": "its OVER aggregates take no rows that may still change",
    "q13": "it looks rows up in stores only, not in a bounded table",
}
