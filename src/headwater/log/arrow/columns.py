"""A column: Python values or foreign Arrow data become an Arrow array of exactly one type, and Arrow becomes Python again.

Nothing is guessed and nothing is lost on the way in. pyarrow alone would turn 1.5 into 1, True into 1.0, "abc" into a list
of letters and a `datetime` into a date, and drop unknown struct fields; here each of these raises `SchemaMismatch` with
the column, the row and what to do. What is accepted beyond the exact type:

    into                  from Python                                          from Arrow
    integers              floats without a fraction                            any integer or float that fits exactly
    FLOAT, DOUBLE         ints that fit exactly                                the same, and floats that are narrower
    DECIMAL               ints, and strings such as "9.50"                     integers and decimals that fit exactly
    DATE                  ISO 8601 strings                                     date64 at midnight
    TIMESTAMP             ISO 8601 strings; without a zone it is UTC           other units without loss, any zone, none is UTC
    TIMESTAMP_NTZ         ISO 8601 strings without a zone                      other units without loss
    BINARY                str as UTF-8, bytearray, memoryview                  strings, large, view and fixed-size binary
    ARRAY, MAP, STRUCT    list, tuple, ndarray; dict, pairs; dict, dataclass   the same by their parts; missing fields are null

Columns are converted whole; single values are looked at only where a column holds something other than the exact type.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.clock import TIME_US_MAX, TIME_US_MIN
from headwater.model.ddl import short, type_to_ddl
from headwater.model.errors import InvalidInput, SchemaMismatch, Unsupported

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_NTZ = _EPOCH.replace(tzinfo=None)
_EDGES = (1, 9999)
_TIMESTAMP = pa.timestamp("us").id
_FLOAT = pa.float32().id
_FEW = 16
ARROW_ERRORS = (ValueError, TypeError, OverflowError, NotImplementedError)


def _itself(row: int) -> int:
    return row


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where values stand, for the error that may become necessary: the column's path, and the row of a value's index."""

    column: str
    row_of: Callable[[int], int] = _itself

    def inside(self, name: str) -> Place:
        """The place of a struct's field."""
        return Place(f"{self.column}.{name}", self.row_of)

    def under(self, name: str, offsets: Any) -> Place:
        """The place of what lists or maps hold, when value number i of them starts at `offsets[i]`."""
        return Place(
            f"{self.column}{name}", lambda at: self.row_of(int(np.searchsorted(offsets, at, side="right")) - 1)
        )

    def mismatch(self, at: int, value: object, type_: pa.DataType) -> SchemaMismatch:
        """The error that says that this value cannot stand here."""
        what = "null" if value is None else f"{short(value)} ({type(value).__name__})"
        wanted = f"{type_to_ddl(type_)} NOT NULL" if value is None else type_to_ddl(type_)
        return SchemaMismatch(
            f"Column {self.column}, row {self.row_of(at)} (from 0): {what} is not a valid {wanted}.",
            advice=advice(type_, value),
        )


def column_of(values: list[Any], type_: pa.DataType, *, place: Place) -> pa.Array:
    """The Arrow array of exactly this type that holds these Python values; None is null."""
    kind = type_.id  # a number: comparing types would dominate the cost of a single event
    if kind in _NESTED:
        return _NESTED[kind](values, type_, place=place)
    exact, convert = _RULES[kind]
    if not exact.issuperset(map(type, values)):
        values = _converted(values, convert, type_, place=place)
    build = _timestamps if kind == _TIMESTAMP else pa.array
    try:
        column = build(values, type_)
    except ARROW_ERRORS:
        at = first_refused(len(values), lambda start, end: build(values[start:end], type_))
        raise place.mismatch(at, values[at], type_) from None
    if isinstance(column, pa.ChunkedArray):
        raise too_large(place.column)
    if kind == _FLOAT:
        _check_overflow(column, values, place=place)
    return column


def datetimes_of(column: pa.Array) -> list[Any]:
    """The TIMESTAMPs of a column as `datetime`s; `Unsupported` where one lies outside the years that Python knows."""
    since = column.view(pa.int64()).fill_null(0).to_numpy().view("m8[us]").tolist()
    try:
        return _with_nulls(list(map((_EPOCH if column.type.tz else _EPOCH_NTZ).__add__, since)), column)
    except OverflowError:
        raise _outside() from None


def values_of(column: pa.Array, times_of: Callable[[pa.Array], list[Any]] = datetimes_of) -> list[Any]:
    """The values of a column in Python: TIMESTAMPs are aware `datetime`s in UTC, maps and structs are dicts.

    `times_of` makes the values of TIMESTAMPs and of DATEs, which Python's own types may be too small for.
    """
    type_ = column.type
    if column.null_count == len(column):
        return [None] * len(column)
    if pa.types.is_timestamp(type_):
        return times_of(column)
    if pa.types.is_struct(type_):
        make_row = row_maker(tuple(field.name for field in type_))
        fields = [values_of(field, times_of) for field in column.flatten()]
        return _with_nulls(list(map(make_row, *fields)) if fields else [{} for _ in column], column)
    if pa.types.is_list(type_):
        inner = iter(values_of(column.flatten(), times_of))
        lengths = pc.list_value_length(column).to_pylist()
        return [None if length is None else list(itertools.islice(inner, length)) for length in lengths]
    if pa.types.is_map(type_):
        keys, items, lengths = map_parts(column)
        pairs = zip(values_of(keys, times_of), values_of(items, times_of), strict=True)
        return _with_nulls([dict(itertools.islice(pairs, length)) for length in lengths], column)
    if pa.types.is_date(type_) and times_of is not datetimes_of:
        return times_of(column)
    try:
        return column.to_pylist()
    except (OverflowError, ValueError):
        raise _outside() from None


def _outside() -> Unsupported:
    return Unsupported(
        "An event holds a time or a date outside the years 1 to 9999, which Python cannot show.",
        advice="Read it as Arrow: poll_arrow, read or scan.",
    )


@functools.lru_cache(maxsize=256)
def row_maker(names: tuple[str, ...]) -> Callable[..., dict[str, Any]]:
    """A function from one value per name to a dict; generated, because a dict display is 2.5 times as fast as `dict(zip(…))`."""
    arguments = ", ".join(f"v{at}" for at in range(len(names)))
    pairs = ", ".join(f"{name!r}: v{at}" for at, name in enumerate(names))
    return eval(f"lambda {arguments}: {{{pairs}}}")


def map_parts(column: pa.Array) -> tuple[pa.Array, pa.Array, list[int]]:
    """The keys, the values and the entries per row of a map column; pyarrow's own `keys` and `items` ignore slices."""
    offsets = column.offsets.to_numpy()
    start, count = int(offsets[0]), int(offsets[-1] - offsets[0])
    return column.keys.slice(start, count), column.items.slice(start, count), np.diff(offsets).tolist()


def extremes(numbers: npt.NDArray[Any]) -> tuple[int, int]:
    """The least and the greatest of some numbers; of a few by Python, whose calls cost less than NumPy's."""
    if len(numbers) <= _FEW:
        few = numbers.tolist()
        return min(few), max(few)
    return int(numbers.min()), int(numbers.max())


def first_null(column: pa.Array) -> int:
    """The index of the first null of a column that has one."""
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))


def as_mapping(row: object) -> Mapping[str, Any] | None:
    """A dict or dataclass instance as a mapping from names; None for anything else."""
    if isinstance(row, Mapping):
        return row if type(row) is dict else dict(row)  # a defaultdict would invent the columns that it lacks
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    return None


def first_refused(count: int, attempt: Callable[[int, int], object]) -> int:
    """The index of the first value for which `attempt(start, end)` fails, when it fails for the whole."""
    start, end = 0, count
    while end - start > 1:
        middle = (start + end) // 2
        try:
            attempt(start, middle)
            start = middle
        except ARROW_ERRORS:
            end = middle
    return start


def advice(type_: pa.DataType, value: object) -> str:
    """What to give instead."""
    is_ = pa.types
    if value is None:
        return "Give every row a value, or make the column nullable."
    if is_.is_integer(type_):
        bits = type_.bit_width - 1
        return f"Give an int from {-(2**bits)} to {2**bits - 1}."
    if is_.is_timestamp(type_):
        zone = "a datetime or an ISO 8601 string, to the microsecond" + (
            "; for a number of seconds datetime.fromtimestamp(n, UTC)." if type_.tz else ", without a time zone."
        )
        return f"Give {zone}"
    if is_.is_decimal(type_):
        return "Give a Decimal, an int or a string with so many digits; for a float say how to round it: Decimal(f'{x:.2f}')."
    known = {
        pa.string(): "Give a str; numbers are not turned into text for you, nor bytes decoded.",
        pa.binary(): "Give bytes, or a str to be stored as UTF-8.",
        pa.bool_(): "Give True or False.",
        pa.float32(): "Give a float, or an int that a FLOAT holds exactly.",
        pa.float64(): "Give a float, or an int that a DOUBLE holds exactly.",
        pa.date32(): 'Give a date or an ISO 8601 string such as "2026-01-31"; of a datetime take .date().',
    }
    if type_ in known:
        return known[type_]
    return "Give a list." if is_.is_list(type_) else "Give a dict."


def too_large(column: str) -> InvalidInput:
    """The error for a column beyond Arrow's 2 GiB."""
    return InvalidInput(f"Column {column}: more than 2 GiB in one batch.", advice="Append the rows in smaller parts.")


def _structs(values: list[Any], type_: pa.DataType, *, place: Place) -> pa.Array:
    if not {dict, type(None)}.issuperset(map(type, values)):
        values = _converted(values, _required_mapping, type_, place=place)
    names = {field.name for field in type_}
    unknown = set().union(*(value for value in values if value is not None)) - names
    if unknown:
        name = min(unknown, key=str)
        at = next(at for at, value in enumerate(values) if value is not None and name in value)
        raise SchemaMismatch(
            f"Column {place.column}, row {place.row_of(at)} (from 0): unknown field {name!r}.",
            advice=f"The topic has {type_to_ddl(type_)}; add a nullable field to it, or leave this one out.",
        )
    mask = np.array([value is None for value in values], bool)
    children = []
    for field in type_:
        inner = [None if value is None else value.get(field.name) for value in values]
        child = column_of(inner, field.type, place=place.inside(field.name))
        if not field.nullable and child.null_count > mask.sum():
            absent = child.is_null().to_numpy(zero_copy_only=False) & ~mask
            raise place.inside(field.name).mismatch(int(np.argmax(absent)), None, field.type)
        children.append(child)
    return pa.StructArray.from_arrays(children, fields=list(type_), mask=pa.array(mask))


def _lists(values: list[Any], type_: pa.DataType, *, place: Place) -> pa.Array:
    if not {list, tuple, type(None)}.issuperset(map(type, values)):
        values = _converted(values, _required_list, type_, place=place)
    offsets, mask = _offsets(values)
    inner = list(itertools.chain.from_iterable(value for value in values if value is not None))
    flat = column_of(inner, type_.value_type, place=place.under("[]", offsets))
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=type_, mask=mask)


def _maps(values: list[Any], type_: pa.DataType, *, place: Place) -> pa.Array:
    pairs = _converted(values, _required_pairs, type_, place=place)
    offsets, mask = _offsets(pairs)
    entries = list(itertools.chain.from_iterable(value for value in pairs if value is not None))
    key_place = place.under(".key", offsets)
    keys = column_of([key for key, _ in entries], type_.key_type, place=key_place)
    if keys.null_count:
        raise key_place.mismatch(first_null(keys), None, type_.key_type)
    items = column_of([item for _, item in entries], type_.item_type, place=place.under(".value", offsets))
    return pa.MapArray.from_arrays(pa.array(offsets), keys, items, type=type_, mask=mask)


def _offsets(values: list[Any]) -> tuple[Any, pa.Array]:
    lengths = np.fromiter((0 if value is None else len(value) for value in values), np.int64, len(values))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return offsets, pa.array([value is None for value in values], pa.bool_())


def _timestamps(values: list[Any], type_: pa.DataType) -> pa.Array:
    """By way of durations since 1970, which pyarrow reads four times as fast as aware `datetime`s."""
    epoch = _EPOCH if type_.tz else _EPOCH_NTZ
    try:
        since = [None if value is None else value - epoch for value in values]
    except TypeError:
        if not type_.tz:
            raise
        since = [None if v is None else (v if v.tzinfo else v.replace(tzinfo=UTC)) - epoch for v in values]
    if any(value is not None and value.year in _EDGES for value in values):  # with a zone it may be another year in UTC
        low, high = timedelta(microseconds=TIME_US_MIN), timedelta(microseconds=TIME_US_MAX)
        if not all(each is None or low <= each <= high for each in since):
            raise OverflowError("a time outside the years 1 to 9999 in UTC")
    return pa.array(since, pa.duration("us")).view(type_)


def _converted(values: list[Any], convert: Callable[[Any], Any], type_: pa.DataType, *, place: Place) -> list[Any]:
    out = []
    for at, value in enumerate(values):
        try:
            out.append(None if value is None else convert(_unboxed(value)))
        except (TypeError, ValueError, InvalidOperation):
            raise place.mismatch(at, value, type_) from None
    return out


def _unboxed(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _instance(value: Any, kind: type | tuple[type, ...], *, but: type | tuple[type, ...] = ()) -> Any:
    if not isinstance(value, kind) or isinstance(value, but):
        raise TypeError
    return value


def _as_str(value: Any) -> str:
    return str.__str__(_instance(value, str))


def _as_bytes(value: Any) -> Any:
    return _instance(value, (bytes, str, bytearray, memoryview))


def _as_bool(value: Any) -> Any:
    return _instance(value, bool)


def _as_int(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(_instance(value, int, but=bool))


def _as_float(value: Any) -> Any:
    return _instance(value, (float, int), but=bool)


def _as_decimal(value: Any) -> Any:
    return Decimal(value) if isinstance(value, str) else _instance(value, (Decimal, int), but=bool)


def _as_date(value: Any) -> Any:
    return date.fromisoformat(value) if isinstance(value, str) else _instance(value, date, but=datetime)


def _as_datetime(value: Any) -> datetime | None:
    if isinstance(value, str):
        return datetime.fromisoformat(value)
    _instance(value, datetime)
    if type(value).__module__.startswith("pandas"):  # Timestamp and NaT call themselves datetimes
        if value != value:
            return None
        if value.nanosecond:
            raise ValueError
        return value.to_pydatetime()
    return value


def _required_mapping(value: Any) -> Mapping[str, Any]:
    mapping = as_mapping(value)
    if mapping is None:
        raise TypeError
    return mapping


def _required_list(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) and value.ndim == 1 else _instance(value, (list, tuple))


def _required_pairs(value: Any) -> list[Any]:
    pairs: Iterable[Any] = value.items() if isinstance(value, Mapping) else _instance(value, (list, tuple))
    return [(key, item) for key, item in pairs]


def _check_overflow(column: pa.Array, values: list[Any], *, place: Place) -> None:
    infinite = np.isinf(column.to_numpy(zero_copy_only=False))
    for at in np.flatnonzero(infinite).tolist():
        if values[at] not in (float("inf"), float("-inf")):
            raise place.mismatch(at, values[at], column.type)


def _with_nulls(values: list[Any], column: pa.Array) -> list[Any]:
    if column.null_count:
        for at in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
            values[at] = None
    return values


_NONE = type(None)
_NESTED: dict[int, Callable[..., pa.Array]] = {
    pa.struct([]).id: _structs,
    pa.list_(pa.null()).id: _lists,
    pa.map_(pa.string(), pa.null()).id: _maps,
}
_RULES: dict[int, tuple[set[type], Callable[[Any], Any]]] = {
    pa.string().id: ({str, _NONE}, _as_str),
    pa.binary().id: ({bytes, str, bytearray, memoryview, _NONE}, _as_bytes),
    pa.bool_().id: ({bool, _NONE}, _as_bool),
    pa.int8().id: ({int, _NONE}, _as_int),
    pa.int16().id: ({int, _NONE}, _as_int),
    pa.int32().id: ({int, _NONE}, _as_int),
    pa.int64().id: ({int, _NONE}, _as_int),
    pa.float32().id: ({float, int, _NONE}, _as_float),
    pa.float64().id: ({float, int, _NONE}, _as_float),
    pa.decimal128(1).id: ({Decimal, int, _NONE}, _as_decimal),
    pa.date32().id: ({date, _NONE}, _as_date),
    _TIMESTAMP: ({datetime, _NONE}, _as_datetime),
}
"""For each type the Python types that pyarrow may convert by itself, and what to do with any other value."""
