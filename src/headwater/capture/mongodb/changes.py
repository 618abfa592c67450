"""Events of MongoDB's change streams as changes of documents, and documents as their rows.

A document's id is its `_id` as text: strings as they are, an ObjectId in hex, numbers in digits (5, 5.0 and NumberDecimal("5") are one
`_id` in MongoDB, too), anything else as Extended JSON. The whole document is relaxed Extended JSON. In declared columns times are ISO
8601, bytes base64, an ObjectId its hex, a Decimal128 its digits.

An update tells the document as the server found it when asked, which may be newer than the change, or gone: then only its id is known, and
its deletion follows. Functions only, no state: safe from any thread.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import uuid
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from bson import json_util
from bson.binary import UuidRepresentation
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.objectid import ObjectId
from bson.timestamp import Timestamp

from headwater.capture.documents import DOCUMENT, ID, Document, DocumentChange
from headwater.capture.source import DELETE, INSERT, TRUNCATE, UPDATE, SourceTable

RENAME = "rename"

RELAXED, CANONICAL = (
    options.with_options(uuid_representation=UuidRepresentation.STANDARD)
    for options in (json_util.RELAXED_JSON_OPTIONS, json_util.CANONICAL_JSON_OPTIONS)
)
"""Extended JSON for people, and the one that keeps every type; both know UUIDs."""

_OPS = {"insert": INSERT, "update": UPDATE, "replace": UPDATE, "delete": DELETE, "drop": TRUNCATE}


def position_of(event: Mapping[str, Any]) -> str:
    """A resume token's text, which sorts as the changes were made."""
    return str(event["_id"]["_data"])


def transaction_of(event: Mapping[str, Any]) -> str | None:
    """What the events of one transaction have in common; None for a write that is one of its own."""
    if "txnNumber" not in event:
        return None
    return f"{event['lsid']['id'].hex}.{int(event['txnNumber'])}"


def change_of(event: Mapping[str, Any], table: SourceTable) -> DocumentChange | None:
    """The change that an event tells of a table; None where it changes no document (an index was made, say)."""
    op = _OPS.get(event["operationType"])
    if op is None:
        return None
    before = after = None
    if op != TRUNCATE:
        gone = Document(id=id_text(event["documentKey"]["_id"]))
        was, now = event.get("fullDocumentBeforeChange"), event.get("fullDocument")
        before = document_of(was, table) if was is not None else gone if op == DELETE else None
        after = None if op == DELETE else gone if now is None else document_of(now, table)
    return DocumentChange(
        table=table.name,
        op=op,
        before=before,
        after=after,
        position=position_of(event),
        transaction=transaction_of(event),
        committed_us=_committed_us(event),
    )


def document_of(document: Mapping[str, Any], table: SourceTable) -> Document:
    """A document as a row of a table."""
    names = table.schema.names
    wanted = {name: plain(document[name]) for name in names if name != ID and name in document}
    return Document(
        id=id_text(document["_id"]), fields=wanted, text=extended_json(document) if DOCUMENT in names else None
    )


def id_text(value: Any) -> str:
    """An `_id` as text."""
    if isinstance(value, str):
        return value
    if isinstance(value, Decimal128):
        value = value.to_decimal()
    if isinstance(value, (float, Decimal)) and math.isfinite(value):
        digits = Decimal(repr(value)) if isinstance(value, float) else value
        return str(int(digits)) if digits == int(digits) else format(digits.normalize(), "f")
    if isinstance(value, (ObjectId, Decimal)) or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value)
    return extended_json(value)


def extended_json(value: Any) -> str:
    """Relaxed Extended JSON, in characters."""
    return json_util.dumps(value, json_options=RELAXED, ensure_ascii=False, separators=(",", ":"))


def plain(value: Any) -> Any:
    """A value as `headwater.log.arrow.json_types` reads it."""
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if isinstance(value, Timestamp):
        value = value.as_datetime()
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, (ObjectId, Decimal128, uuid.UUID)):
        return str(value)
    return json.loads(extended_json(value))


def _committed_us(event: Mapping[str, Any]) -> int:
    wall = event.get("wallTime")
    if isinstance(wall, datetime.datetime):
        return int(wall.timestamp() * 1000) * 1000
    if isinstance(wall, DatetimeMS):
        return int(wall) * 1000
    time: Timestamp = event["clusterTime"]
    return int(time.time) * 1_000_000
