"""Flink beside ours: MATCH_RECOGNIZE over Parquet files of bids, in the environment and with the settings of Nexmark's figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.nexmark.flink import PEER, SETTINGS, Flink, FlinkError
from bench.patterns.bids import TOPIC, Bids
from examples.nexmark.topics import LATENESS, TIME
from headwater.testing.servers.server import tail

# Without them a count of all matches would be a change for each match.
_COUNT_SETTINGS = {
    "table.exec.mini-batch.enabled": "true",
    "table.exec.mini-batch.allow-latency": "5 s",
    "table.exec.mini-batch.size": "100000",
}


class FlinkSide(Flink):
    """Flink with queries over bids, which are given as text. Raises `ServerError` when it cannot be had."""

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes its streams, and waits for its end
            pass

    def run(self, query: str, bids: Bids) -> float:
        """The seconds that the job of a query needs for these bids."""
        return self.run_s(query, bids.files)

    def matches(self, query: str, bids: Bids) -> int:
        """How many matches the query finds."""
        rows = self.rows(f"SELECT COUNT(*) FROM ({query})", bids.files)
        return int(rows[0][0]) if rows else 0

    def _ask(self, name: str, files: Path, *, collects: bool = False) -> dict[str, Any]:
        settings = SETTINGS | (_COUNT_SETTINGS if collects else {})
        asked = {"settings": settings, "tables": [_table(files)], "query": name, "collects": collects}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process has ended"}
        if "error" in answer:
            raise FlinkError(f"Flink did not run {name}: {tail(answer['error'])}")
        return answer


def _table(files: Path) -> str:
    """The statement that declares the bids: only the columns that patterns need, since Flink keeps whole rows of open matches."""
    seconds = LATENESS.removesuffix(" seconds")
    return (
        f"CREATE TABLE {TOPIC} (auction BIGINT, bidder BIGINT, price BIGINT, `{TIME}` TIMESTAMP(3),"
        f" WATERMARK FOR `{TIME}` AS `{TIME}` - INTERVAL '{seconds}' SECOND)"
        f" WITH ('connector' = 'filesystem', 'path' = '{files.as_uri()}', 'format' = 'parquet',"
        " 'parquet.utc-timezone' = 'true')"
    )


__all__ = ["PEER", "FlinkError", "FlinkSide"]
