"""A rig for Debezium's topics: samples that a real Debezium 3.6 wrote of PostgreSQL, put into a log, and read back by a capture."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from headwater.capture.capture import Capture
from headwater.capture.source_url import open_source
from headwater.log.log import Log

SAMPLES = Path(__file__).parent / "samples"


def samples(kind: str) -> list[dict[str, Any]]:
    """The events of one run of Debezium: topic, key, value, in the order in which it gave them."""
    return [json.loads(line) for line in (SAMPLES / f"debezium-{kind}.jsonl").read_text(encoding="utf-8").splitlines()]


def pour(log: Log, events: list[dict[str, Any]], *, prefix: str = "") -> None:
    """Appends events to the topics that they name."""
    for event in events:
        log.create_topic(prefix + event["topic"], partitions=1, exist_ok=True)
        row = {name: None if event[name] is None else event[name].encode() for name in ("key", "value")}
        log.append(prefix + event["topic"], [row])


def captured(log: Log, url: str, **settings: Any) -> Capture:
    """A capture that has brought what there is, and is closed."""
    capture = Capture(log, open_source(url), partitions=2, **settings)
    capture.open()
    capture.catch_up()
    capture.close()
    return capture


def history(log: Log, table: str) -> list[dict[str, Any]]:
    """The changes of a table as they were read."""
    return sorted(log.read(f"{table}.changes").to_pylist(), key=lambda change: change["position"])


def envelope(number: int, *, op: str = "c", name: str | None = "n", before: dict[str, Any] | None = None) -> str:
    """A payload without a schema part, as `value.converter.schemas.enable=false` gives it."""
    after = None if op == "d" else {"id": number, "name": name}
    before = {"id": number, "name": name} if op == "d" else before
    payload = {"before": before, "after": after, "source": {"ts_ms": 1_700_000_000_000 + number}, "op": op, "ts_ms": 1}
    return json.dumps(payload)


def unscaled(text: str) -> int:
    """The number that base64 of big-endian bytes stands for: how Connect's documentation says it is to be read."""
    return int.from_bytes(base64.b64decode(text), "big", signed=True)
