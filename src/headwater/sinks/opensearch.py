"""OpenSearch as a sink: `opensearch://host:9200/products`, or `opensearch+https://…`; a row is a document of the index.

A document's `_id` is the key's text (where that is longer than 512 bytes, its SHA-256) and its source the whole row as JSON. An index that
is missing is made: STRING columns are words to search, with `<column>.keyword` to compare, numbers, BOOLEAN, TIMESTAMP and DATE are
compared, other columns are only kept. A value that a field cannot hold (NaN, a year that dates do not reach) is kept and not indexed.
An index of yours keeps its mapping and gets the columns that it lacks; rows that it refuses are dead letters.

OpenSearch has no transactions, so every document has a version that we give it (`version_type=external_gte`), and a document with an
older one is not written. The ledger is a document for each stage in the index `headwater-ledger`:

    {"target": …, "stage": …, "number": …, "version": …, "marker": …, "uuid": …}

Invariants:
- a batch's version is above that of every batch before it: `number` in its upper half, counted up from the ledger's in its lower. A
  batch that is run again by the same writer has the same version, and by a later one a higher one;
- the ledger changes only as it was read (`if_seq_no`); the marker is entered after the last document. A writer that was overtaken may
  still send documents of the batch it was at: whoever came after it writes that batch too, with a higher version, so none of them stays;
- `uuid` is the index's own: an index that was removed, or made anew, is noticed.

A deleted document's version is remembered for an hour (`index.gc_deletes`) in an index that we make: so late may an overtaken writer wake
up inside a request. A reader sees documents within the index's `refresh_interval`, the newest batch perhaps in part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from headwater.databases.address import parse_address
from headwater.databases.keys import plain_key_texts
from headwater.log.arrow.json_types import row_texts
from headwater.model.errors import Fenced, InvalidInput, Unreachable
from headwater.model.marker import Marker
from headwater.model.points import PROCESS
from headwater.sinks.ledger import NO_ENTRY, LedgerEntry, admits, check_unmoved
from headwater.sinks.opensearch_client import Action, Answer, OpenSearchClient, path_of
from headwater.sinks.sink import Refusal, Shape, ShapedSink

LEDGER = "headwater-ledger"
ID_BYTES_MAX = 512
LEDGERS_MAX = 1_000

_CONFLICT = 409
_LEDGER_FIELDS = {"target": {"type": "keyword"}, "stage": {"type": "keyword"}}


class Ledger(msgspec.Struct, frozen=True):
    """The ledger's document of a stage, and where OpenSearch has it."""

    entry: LedgerEntry = NO_ENTRY
    version: int = 0
    seq_no: int | None = None
    primary_term: int | None = None


class OpenSearchSink(ShapedSink):
    """One index, fed by one stage."""

    def __init__(self, to: str, *, stage: str) -> None:
        address = parse_address(to, options=("ca_file",))
        super().__init__(address.shown, stage=stage)
        server, _, self.index = address.client.partition("://")[2].partition("/")
        if not self.index or "/" in self.index:
            raise InvalidInput(f"{self.url!r} has no index.", advice="Write opensearch://host:9200/index.")
        scheme = "https" if address.scheme.endswith("+https") else "http"
        self.client = OpenSearchClient(
            f"{scheme}://{server}",
            shown=self.url,
            password=address.password,
            ca_file=address.options.get("ca_file"),
        )
        self._number = 0
        self._begun: Ledger | None = None
        self._begun_with = ""
        self._version = 0
        self._is_repair = False

    def open(self, shape: Shape) -> None:
        self._shape = shape
        self._make_index()
        uuid = self._uuid()
        mappings = {"dynamic": False, "properties": _LEDGER_FIELDS}
        self._make(LEDGER, {"mappings": mappings, "settings": {"index": {"number_of_shards": 1}}})
        while True:
            there = self._ledger(uuid)
            number = there.entry.number + 1
            if self._enter(there, LedgerEntry(number, there.entry.last), version=there.version, uuid=uuid):
                self._number = number
                return

    def entry(self) -> LedgerEntry:
        return self._ledger(self._uuid()).entry

    def entries(self) -> dict[str, LedgerEntry]:
        """What the ledger knows of every stage that writes to the index."""
        if self.client.ask("POST", path_of(LEDGER, "_refresh"), allows=[404]).status == 404:
            return {}
        query = {"query": {"term": {"target": self.index}}, "size": LEDGERS_MAX}
        found = self.client.ask("POST", path_of(LEDGER, "_search"), query).body["hits"]["hits"]
        uuid = self._uuid()
        return {hit["_source"]["stage"]: _entry(hit["_source"], uuid) for hit in found}

    def begin(self, marker: Marker) -> bool:
        self._begun_with = self._uuid()
        there = self._ledger(self._begun_with)
        if not admits(self.stage, there.entry, self._number, marker):
            return False
        self._begun, self._is_repair = there, False
        self._version = max(there.version, self._number << 32) + 1
        return True

    def begin_repair(self, marker: Marker | None) -> None:
        """What is repaired gets the version of the last batch: documents of one that is being written are newer, and stay."""
        there = self._ledger(self._uuid())
        check_unmoved(self.stage, there.entry, marker)
        self._begun, self._is_repair = there, True
        self._version = there.version or 1

    def upsert(self, rows: pa.Table) -> Sequence[Refusal]:
        texts = pa.chunked_array([row_texts(batch) for batch in rows.to_batches()]).to_pylist()
        named = zip(self.ids_of(rows), texts, strict=True)
        actions = [Action(self._line("index", name), text) for name, text in named]
        return [Refusal(row, reason) for row, reason in self._carried_out(actions)]

    def delete(self, keys: pa.Table) -> None:
        wrong = self._carried_out([Action(self._line("delete", name)) for name in self.ids_of(keys)])
        if wrong:
            raise InvalidInput(
                f"{self.url}: {wrong[0][1]}", advice="Correct the index, because a document cannot be removed."
            )

    def commit(self, marker: Marker | None) -> None:
        assert self._begun is not None, "no batch was begun"
        begun, self._begun = self._begun, None
        if marker is None:
            return
        # The index that the batch began with: one that somebody made meanwhile lacks what was before.
        if self._enter(begun, LedgerEntry(self._number, marker), version=self._version, uuid=self._begun_with):
            return
        # The answer to a first attempt may have been lost: then the marker is there.
        there = self._ledger(self._begun_with).entry
        if (there.number, there.last and there.last.canonical()) != (self._number, self._named(marker).canonical()):
            raise self._fenced()

    def rollback(self) -> None:
        """What was written is written again when the batch is run again."""
        self._begun = None

    def accept_new_checkpoint(self) -> Marker | None:
        while True:
            there = self._ledger(self._uuid())
            if there.entry == NO_ENTRY:
                return None
            entry = LedgerEntry(there.entry.number + 1, None)
            if self._enter(there, entry, version=there.version, uuid=self._uuid()):
                return there.entry.last

    def close(self) -> None:
        self.client.close()

    def ids_of(self, rows: pa.Table) -> list[str]:
        """The documents' ids: the keys' texts, and a digest of one that is longer than OpenSearch takes."""
        return [
            key if len(key) * 4 <= ID_BYTES_MAX or len(key.encode()) <= ID_BYTES_MAX else _digest(key)
            for key in plain_key_texts(rows, self.shape.key).to_pylist()
        ]

    # Parts

    def _line(self, kind: str, key: str) -> str:
        target = {"_index": self.index, "_id": key, "version": self._version, "version_type": "external_gte"}
        return msgspec.json.encode({kind: target}).decode()

    def _carried_out(self, actions: Sequence[Action]) -> list[tuple[int, str]]:
        """Carries out actions; those that were refused for what they are."""
        refused, overtaken = list[tuple[int, str]](), list[int]()

        def tell(at: int, status: int, reason: str) -> None:
            if status == _CONFLICT:
                overtaken.append(at)
            else:
                refused.append((at, reason))

        if actions:
            self.client.bulk(actions, tell)
            PROCESS.reach("opensearch: bulk sent")
        if overtaken and not self._is_repair:
            raise self._fenced()
        return refused

    def _fenced(self) -> Fenced:
        return Fenced(
            f"{self.url}: Another process opened sink {self.stage!r}, or the index has documents newer than fencing number {self._number}.",
            advice="Another process writes for this stage, so stop this one.",
        )

    def _ledger(self, uuid: str) -> Ledger:
        answer = self.client.ask("GET", self._ledger_path(), allows=[404])
        if not answer.body.get("found"):
            return Ledger()
        source = answer.body["_source"]
        return Ledger(
            _entry(source, uuid), int(source["version"]), answer.body["_seq_no"], answer.body["_primary_term"]
        )

    def _enter(self, there: Ledger, entry: LedgerEntry, *, version: int, uuid: str) -> bool:
        """Replaces the ledger's document as it was read; False where it is another one by now."""
        document = {
            "target": self.index,
            "stage": self.stage,
            "number": entry.number,
            "version": str(version),  # as text: many a client reads numbers of JSON as floats
            "marker": None if entry.last is None else self._named(entry.last).canonical().decode(),
            "uuid": uuid,
        }
        if there.seq_no is None:
            condition = "op_type=create"
        else:
            condition = f"if_seq_no={there.seq_no}&if_primary_term={there.primary_term}"
        path = f"{self._ledger_path()}?{condition}"
        return self.client.ask("PUT", path, document, allows=[_CONFLICT]).status != _CONFLICT

    def _ledger_path(self) -> str:
        return path_of(LEDGER, "_doc", f"{self.index}/{self.stage}")

    def _named(self, marker: Marker) -> Marker:
        return msgspec.structs.replace(marker, stage=self.stage)

    def _uuid(self) -> str:
        """What tells an index from another of the same name; empty where there is none."""
        answer = self.client.ask("GET", f"{path_of(self.index)}/_settings", allows=[404])
        if answer.status == 404:
            return ""
        return ",".join(sorted(one["settings"]["index"]["uuid"] for one in answer.body.values()))

    def _make_index(self) -> None:
        fields = {field.name: _field(field.type) for field in self.shape.schema}
        mappings = {"dynamic": False, "properties": fields}
        if self._make(self.index, {"mappings": mappings, "settings": {"index": {"gc_deletes": "1h"}}}):
            return
        found = self.client.ask("GET", f"{path_of(self.index)}/_mapping").body.values()
        there = {name for one in found for name in one["mappings"].get("properties", {})}
        added = {name: field for name, field in fields.items() if name not in there}
        if added:
            self.client.ask("PUT", f"{path_of(self.index)}/_mapping", {"properties": added})

    def _make(self, index: str, body: Any) -> bool:
        """Makes an index; False where it is there."""
        if self.client.ask("HEAD", path_of(index), allows=[404]).status != 404:
            return False
        answer = self.client.ask("PUT", path_of(index), body, allows=[400])
        if answer.status == 400 and "resource_already_exists" not in str(answer.body):
            raise self.client.error_of(answer)
        return answer.status != 400

    # Reading, for `verify`

    def documents(self, keys: pa.Table) -> list[tuple[str, str]]:
        """The rows of some keys, as JSON, each with its id."""
        if not keys.num_rows:
            return []
        answer = self.client.ask("POST", f"{path_of(self.index)}/_mget", {"ids": self.ids_of(keys)})
        return [_document(one) for one in answer.body["docs"] if one.get("found")]

    def pages(self, size: int) -> Iterator[list[tuple[str, str]]]:
        """All rows as JSON, each with its id, in pages, as they were at one moment."""
        self.client.ask("POST", f"{path_of(self.index)}/_refresh")
        query = {"size": size, "sort": ["_doc"], "query": {"match_all": {}}}
        answer = self.client.ask("POST", f"{path_of(self.index)}/_search?scroll=2m", query)
        try:
            while hits := answer.body["hits"]["hits"]:
                yield [_document(hit) for hit in hits]
                answer = self._next_page(answer)
        finally:
            self.client.ask("DELETE", "/_search/scroll", {"scroll_id": [answer.body["_scroll_id"]]}, allows=[404])

    def _next_page(self, answer: Answer) -> Answer:
        more = {"scroll": "2m", "scroll_id": answer.body["_scroll_id"]}
        found = self.client.ask("POST", "/_search/scroll", more, allows=[404])
        if found.status == 404:
            raise Unreachable(f"{self.url}: The search context expired on the server.", advice="Compare again.")
        return found


def _digest(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def _entry(source: Any, uuid: str) -> LedgerEntry:
    """What a ledger's document says; the marker of an index that is gone counts for nothing."""
    marker = source["marker"] if source["uuid"] == uuid else None
    return LedgerEntry(source["number"], None if marker is None else Marker.from_canonical(marker.encode()))


def _document(hit: Any) -> tuple[str, str]:
    return hit["_id"], msgspec.json.encode(hit["_source"]).decode()


def _field(type_: pa.DataType) -> dict[str, Any]:
    """How a column is indexed."""
    is_ = pa.types
    if is_.is_string(type_):
        return {"type": "text", "fields": {"keyword": {"type": "keyword", "ignore_above": 8_191}}}
    if is_.is_integer(type_):
        return {"type": "long", "ignore_malformed": True}
    if is_.is_floating(type_) or is_.is_decimal(type_):
        return {"type": "double", "ignore_malformed": True}
    if is_.is_boolean(type_):
        return {"type": "boolean"}
    if is_.is_timestamp(type_) or is_.is_date(type_):
        return {"type": "date", "ignore_malformed": True}
    return {"type": "object", "enabled": False}
