"""Redis as a sink: `redis://host:6379/0?prefix=users:&as=hash`.

| `as=` | a row becomes |
|---|---|
| `hash` (the default) | the hash `<prefix><key>` with a field for each column that is not null |
| `json` | the string `<prefix><key>`: one JSON object |
| `set` | a member of the set `<prefix><first key column>`: what the other key columns say; a key of one column must be a JSON array |

The prefix is the topic's name and a colon unless told. In a hash STRING and BINARY are as they are, everything else is the JSON that
the log writes to Kafka (`headwater.log.arrow.json_types`), without quotes around times, dates and decimals.

Rows travel in pieces of a few thousand, each one call of a script: it looks at the fencing number in the ledger (the hash
`headwater:ledger:<stage>`) and writes, and nothing else runs in between. So a writer that was overtaken changes nothing, and an older
row never replaces a newer one: whoever holds the number writes batches in order, and a batch that it had not finished again from its
start. A piece also says after which marker it comes: one that Redis runs late, when its client had given it up, is refused. The
marker comes with the last piece; a reader may see a part of the newest batch. How much survives a power loss is decided by Redis's own
settings (`appendfsync`); what is lost is noticed by the marker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.databases.address import load_client, parse_address
from headwater.databases.keys import plain_key_texts
from headwater.log.arrow.json_types import from_json_texts, row_texts
from headwater.model.errors import Fenced, InvalidInput, NoAccess, Unreachable
from headwater.model.marker import Marker
from headwater.model.points import PROCESS
from headwater.sinks.ledger import NO_ENTRY, LedgerEntry, admits, check_unmoved
from headwater.sinks.sink import Refusal, Shape, ShapedSink

As = Literal["hash", "json", "set"]

CHUNK_ROWS = 4_000
TIMEOUT_S = 30.0
LEDGER = "headwater:ledger:"

_NOT_NOW = ("OOM", "MISCONF", "READONLY", "LOADING", "BUSY ")
_CHECKED = """
local number = redis.call('HGET', KEYS[1], 'number')
if (number or '') ~= ARGV[1] then return redis.error_reply('FENCED ' .. (number or 'nobody')) end
if (redis.call('HGET', KEYS[1], 'marker') or 'none') ~= ARGV[2] then return redis.error_reply('MOVED') end
"""
_DELETE = _CHECKED + "for i = 3, #ARGV do redis.call('DEL', ARGV[i]) end"
_JSON = _CHECKED + "for i = 3, #ARGV, 2 do redis.call('SET', ARGV[i], ARGV[i + 1]) end"
_SET_ADD = _CHECKED + "for i = 3, #ARGV, 2 do redis.call('SADD', ARGV[i], ARGV[i + 1]) end"
_SET_REMOVE = _CHECKED + "for i = 3, #ARGV, 2 do redis.call('SREM', ARGV[i], ARGV[i + 1]) end"
_HASH = (
    _CHECKED
    + """
local width = tonumber(ARGV[3])
local fields = {}
for j = 1, width do fields[2 * j - 1] = ARGV[3 + j] end
for i = 4 + width, #ARGV, 1 + width do
  for j = 1, width do fields[2 * j] = ARGV[i + j] end
  redis.call('DEL', ARGV[i])
  redis.call('HSET', ARGV[i], unpack(fields))
end
"""
)
_HASH_WITH_NULLS = (
    _CHECKED
    + """
local width = tonumber(ARGV[3])
for i = 4 + width, #ARGV, 1 + width do
  local fields = {}
  for j = 1, width do
    local value = ARGV[i + j]
    if string.byte(value, 1) == 43 then
      fields[#fields + 1] = ARGV[3 + j]
      fields[#fields + 1] = string.sub(value, 2)
    end
  end
  redis.call('DEL', ARGV[i])
  redis.call('HSET', ARGV[i], unpack(fields))
end
"""
)
_ENTER = _CHECKED + "redis.call('HSET', KEYS[1], 'marker', ARGV[3])"
_FLOATS_WITHOUT_DIGITS = ("NaN", "Infinity", "-Infinity")
_TAKE = "return redis.call('HINCRBY', KEYS[1], 'number', 1)"


class RedisSink(ShapedSink):
    """The keys of one prefix, fed by one stage."""

    def __init__(self, to: str, *, stage: str) -> None:
        address = parse_address(to, options=("prefix", "as"), others=True)
        super().__init__(address.shown, stage=stage)
        self.style = _style(address.options.get("as", "hash"), self.url)
        self._prefix = address.options.get("prefix")
        self._redis = load_client("redis", extra="redis", purpose="The Redis sink")
        more = {} if address.password is None else {"password": address.password}
        timeouts = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
        self.client: Any = self._redis.Redis.from_url(address.client, **timeouts, **more)
        self._number = ""
        self._expected = ""

    @property
    def prefix(self) -> str:
        """What its keys begin with."""
        return f"{self.shape.name}:" if self._prefix is None else self._prefix

    @property
    def ledger(self) -> str:
        """The key of the ledger's entry."""
        return LEDGER + self.stage

    def open(self, shape: Shape) -> None:
        self.attach(shape)
        with self.told():
            self._number = str(self.client.eval(_TAKE, 1, self.ledger))

    def attach(self, shape: Shape) -> None:
        super().attach(shape)
        if (
            self.style == "set"
            and len(shape.key) == 1
            and not pa.types.is_string(shape.schema.field(shape.key[0]).type)
        ):
            raise InvalidInput(
                f"{self.url}: Members of sets need a key of two columns, or of one column with JSON arrays, and {shape.key[0]} is neither.",
                advice="Use as=hash or as=json.",
            )

    def entry(self) -> LedgerEntry:
        with self.told():
            return entry_of(self.client.hgetall(self.ledger))

    def entries(self) -> dict[str, LedgerEntry]:
        """What Redis knows of every stage that writes to it."""
        with self.told():
            names = list(self.client.scan_iter(f"{LEDGER}*", count=1000))
            return {name.decode().removeprefix(LEDGER): entry_of(self.client.hgetall(name)) for name in names}

    def begin(self, marker: Marker) -> bool:
        entry = self.entry()
        self._expect(entry.last)
        return admits(self.stage, entry, int(self._number), marker)

    def begin_repair(self, marker: Marker | None) -> None:
        """Each piece of a repair finds number and marker as they were, or changes nothing."""
        entry = self.entry()
        check_unmoved(self.stage, entry, marker)
        self._number = str(entry.number) if entry != NO_ENTRY else ""
        self._expect(marker)

    def upsert(self, rows: pa.Table) -> Sequence[Refusal]:
        refused = self._refused(rows) if self.style == "set" else []
        if refused:
            rows = rows.take(pa.array(np.setdiff1d(np.arange(rows.num_rows), [one.row for one in refused])))
        arguments = {"hash": self._hashes, "json": self._strings, "set": self._members}[self.style]
        has_nulls = any(column.null_count for column in rows.columns)
        script = {"hash": _HASH_WITH_NULLS if has_nulls else _HASH, "json": _JSON, "set": _SET_ADD}[self.style]
        self._chunked(script, rows, lambda chunk: arguments(chunk, marks=has_nulls))
        return refused

    def delete(self, keys: pa.Table) -> None:
        if self.style == "set":
            whole = (
                [split_key(text) is not None for text in keys.column(0).to_pylist()]
                if len(self.shape.key) == 1
                else None
            )
            kept = keys if whole is None else keys.filter(pa.array(whole))
            self._chunked(_SET_REMOVE, kept, lambda chunk: self._members(chunk, marks=False))
        else:
            self._chunked(_DELETE, keys, lambda rows: self.names_of(rows).to_pylist())

    def commit(self, marker: Marker | None) -> None:
        if marker is None:
            return
        try:
            self._run(_ENTER, [self._text(marker)])
        except Fenced:
            # The client repeats a call whose answer was lost: then the marker is there.
            entry = self.entry()
            if (str(entry.number), entry.last and self._text(entry.last)) != (self._number, self._text(marker)):
                raise

    def rollback(self) -> None:
        """What was written is written again when the batch is run again."""

    def accept_new_checkpoint(self) -> Marker | None:
        last = self.entry().last
        with self.told():
            self.client.eval(_TAKE, 1, self.ledger)
            self.client.hdel(self.ledger, "marker")
        return last

    def close(self) -> None:
        self.client.close()

    def names_of(self, keys: pa.Table) -> pa.Array:
        """The name in Redis of each row's key."""
        return pc.binary_join_element_wise(self.prefix, plain_key_texts(keys, self.shape.key), "")

    def pairs_of(self, keys: pa.Table) -> tuple[list[str], list[str]]:
        """The sets' names and the members of rows."""
        first, *others = self.shape.key
        if others:
            groups, members = plain_key_texts(keys, (first,)).to_pylist(), plain_key_texts(keys, others).to_pylist()
        else:
            pairs = [split_key(text) or ("", "") for text in keys.column(first).to_pylist()]
            groups, members = [group for group, _ in pairs], [member for _, member in pairs]
        return [self.prefix + group for group in groups], members

    def _refused(self, rows: pa.Table) -> list[Refusal]:
        """The rows of sets whose key names no set and member."""
        if len(self.shape.key) > 1:
            return []
        keys = enumerate(rows.column(self.shape.key[0]).to_pylist())
        return [
            Refusal(row, f"The key {key[:60]!r} is not a JSON array of two values.")
            for row, key in keys
            if split_key(key) is None
        ]

    @contextmanager
    def told(self) -> Iterator[None]:
        """Redis's errors in our words."""
        errors = self._redis.exceptions
        try:
            yield
        except (errors.AuthenticationError, errors.NoPermissionError) as error:
            raise NoAccess(
                f"{self.url}: {error}.", advice="Pass the user or the password that Redis requires."
            ) from None
        except (errors.ConnectionError, errors.TimeoutError, OSError) as error:
            raise Unreachable(f"{self.url}: {error}.", advice="Check the URL and the server.") from None
        except errors.ResponseError as error:
            said = str(error)
            if any(code in said for code in _NOT_NOW):
                raise Unreachable(
                    f"{self.url}: {said}.", advice="Redis does not accept writes at the moment. Check its log."
                ) from None
            raise InvalidInput(
                f"{self.url}: {said}.", advice="Use another prefix, or correct the existing keys."
            ) from None

    def _run(self, script: str, arguments: Sequence[Any]) -> None:
        with self.told():
            try:
                self.client.eval(script, 1, self.ledger, self._number, self._expected, *arguments)
            except self._redis.exceptions.ResponseError as error:
                if not any(code in str(error) for code in ("FENCED", "MOVED")):
                    raise
                raise Fenced(
                    f"{self.url}: Another process opened sink {self.stage!r} after number {self._number or 'none'}, or wrote a batch.",
                    advice="This chunk was not written. Another process writes for this stage, so stop this one.",
                ) from None

    def _chunked(self, script: str, rows: pa.Table, arguments: Callable[[pa.Table], Sequence[Any]]) -> None:
        for start in range(0, rows.num_rows, CHUNK_ROWS):
            self._run(script, arguments(rows.slice(start, CHUNK_ROWS)))
            PROCESS.reach("redis: chunk written")

    def _hashes(self, rows: pa.Table, *, marks: bool) -> list[Any]:
        """Names of columns, then each row's key and fields; with `marks` a null can be told from an empty text."""
        columns = [column.combine_chunks() for column in rows.columns]
        fields = [_marked(column) if marks else field_texts(column).to_pylist() for column in columns]
        flat = chain.from_iterable(zip(self.names_of(rows).to_pylist(), *fields, strict=True))
        return [str(rows.num_columns), *rows.schema.names, *flat]

    def _strings(self, rows: pa.Table, *, marks: bool) -> list[Any]:
        texts = pa.chunked_array([row_texts(batch) for batch in rows.to_batches()]).to_pylist()
        return list(chain.from_iterable(zip(self.names_of(rows).to_pylist(), texts, strict=True)))

    def _members(self, rows: pa.Table, *, marks: bool) -> list[Any]:
        return list(chain.from_iterable(zip(*self.pairs_of(rows), strict=True)))

    def _expect(self, last: Marker | None) -> None:
        """What the ledger must say whenever something is written."""
        self._expected = "none" if last is None else self._text(last)

    def _text(self, marker: Marker) -> str:
        return msgspec.structs.replace(marker, stage=self.stage).canonical().decode()


def entry_of(found: Mapping[bytes, bytes]) -> LedgerEntry:
    """The ledger's entry as its hash has it."""
    marker = found.get(b"marker")
    return LedgerEntry(int(found.get(b"number", 0)), None if marker is None else Marker.from_canonical(marker))


def split_key(text: str) -> tuple[str, str] | None:
    """The set and the member that a key of one column names: the parts of a JSON array; None where it is none."""
    try:
        first, second, *others = msgspec.json.decode(text, type=list[Any])
    except (msgspec.DecodeError, ValueError):
        return None
    parts = [part if isinstance(part, str) else msgspec.json.encode(part).decode() for part in (first, second, *others)]
    return parts[0], "|".join(parts[1:])


def _marked(column: pa.Array) -> list[bytes]:
    """The fields of a column: a plus sign and the value, nothing where it is null."""
    return pc.binary_join_element_wise(b"+", field_texts(column), b"").fill_null(b"").to_pylist()


def _style(given: str, url: str) -> As:
    for known in get_args(As):
        if given == known:
            return known
    raise InvalidInput(f"{url}: as={given} is not valid.", advice=f"Use one of {', '.join(get_args(As))}.")


def field_texts(column: pa.Array) -> pa.Array:
    """The bytes of each value of a column; null stays null."""
    is_, type_ = pa.types, column.type
    if is_.is_binary(type_):
        return column
    if is_.is_string(type_):
        return column.view(pa.binary())
    texts = row_texts(pa.record_batch([column], names=["v"]))
    texts = pc.utf8_slice_codeunits(texts, len('{"v":'), -1)
    if not is_.is_nested(type_):
        texts = pc.utf8_trim(texts, '"')
    return pc.if_else(column.is_valid(), texts, pa.scalar(None, pa.string())).view(pa.binary())


def from_field_texts(values: Sequence[bytes | None], field: pa.Field) -> pa.Array:
    """The column that `field_texts` gave these values for; `ValueError` and errors of ours where somebody wrote something else."""
    is_, type_ = pa.types, field.type
    if is_.is_binary(type_):
        return pa.array(values, pa.binary())
    texts = pa.array([None if value is None else value.decode() for value in values], pa.string())
    if is_.is_string(type_):
        return texts
    if is_.is_timestamp(type_) or is_.is_date(type_) or is_.is_decimal(type_):
        texts = pc.binary_join_element_wise('"', texts, '"', "")
    elif is_.is_floating(type_):
        quoted = pc.binary_join_element_wise('"', texts, '"', "")
        texts = pc.if_else(pc.is_in(texts, value_set=pa.array(_FLOATS_WITHOUT_DIGITS)), quoted, texts)
    return from_json_texts(texts.to_pylist(), field)
