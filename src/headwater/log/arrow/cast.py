"""A cast: foreign Arrow data becomes an array of exactly the topic's type, or is refused; no value ever changes.

Arrow's own safe cast is not safe enough: it turns 5 into "5", "5" into 5, True into 1 and a TIMESTAMP into its day. So the pair
of types is looked at first (the table stands in `headwater.log.arrow.columns`), and only then the values.
"""

from __future__ import annotations

from datetime import date
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log.arrow.columns import ARROW_ERRORS, Place, advice, extremes, first_refused, map_parts
from headwater.model.ddl import short, type_to_ddl
from headwater.model.errors import SchemaMismatch

_DAY_US = 86_400_000_000
_DAYS = ((date.min - date(1970, 1, 1)).days, (date.max - date(1970, 1, 1)).days)


def is_exact(column: pa.Array, type_: pa.DataType) -> bool:
    """Whether `cast_column` has nothing to do, and nothing to refuse."""
    return column.type == type_ and _within_years(column)


def cast_column(column: pa.Array, type_: pa.DataType, *, place: Place) -> pa.Array:
    """The array of exactly this type that holds the same values as `column`; the array itself where nothing is to do."""
    if column.type != type_:
        column = _cast(_decoded(column), type_, place=place)
    if not _within_years(column):
        at = first_refused(len(column), lambda start, end: _assert_years(column.slice(start, end - start)))
        raise SchemaMismatch(
            f"Column {place.column}, row {place.row_of(at)} (from 0): a time outside the years 1 to 9999.",
            advice="Python and Spark cannot show it; was it written in another unit, such as nanoseconds for microseconds?",
        )
    return column


def _decoded(column: pa.Array) -> pa.Array:
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    if pa.types.is_dictionary(column.type) and pa.types.is_string_view(column.type.value_type):
        column = column.dictionary.cast(pa.string()).take(
            column.indices
        )  # Polars' categories; Arrow has no cast for them
    return column


def _cast(column: pa.Array, type_: pa.DataType, *, place: Place) -> pa.Array:
    if not _castable(column.type, type_):
        raise SchemaMismatch(
            f"Column {place.column}: the rows have {column.type}, the topic has {type_to_ddl(type_)}.",
            advice="Cast the column before you append it. Headwater makes only casts that cannot change a value.",
        )
    if pa.types.is_decimal(type_) and pa.types.is_integer(column.type):
        # Arrow wants room for every number of the source type; a detour asks for the numbers that are there.
        return _cast(column.cast(pa.decimal256(76, type_.scale)), type_, place=place)
    try:
        return column.cast(type_)
    except ARROW_ERRORS as error:
        at = first_refused(len(column), lambda start, end: column.slice(start, end - start).cast(type_))
        raise SchemaMismatch(
            f"Column {place.column}, row {place.row_of(at)} (from 0): {short(column[at])} does not fit into "
            f"{type_to_ddl(type_)}: {str(error).splitlines()[0].rstrip('.')}.",
            advice=advice(type_, column[at].as_py()) if column[at].is_valid else "Give every row a value.",
        ) from None


def _castable(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether Arrow's safe cast from `source` cannot change a value: it also turns 5 into "5" and True into 1, which this refuses."""
    is_ = pa.types
    if source == target or is_.is_null(source):
        return True
    if is_.is_dictionary(source):
        return _castable(source.value_type, target)
    text = is_.is_string(source) or is_.is_large_string(source) or is_.is_string_view(source)
    if is_.is_string(target):
        return text
    if is_.is_binary(target):
        fixed = is_.is_fixed_size_binary(source) or is_.is_large_binary(source) or is_.is_binary_view(source)
        return text or fixed
    if is_.is_integer(target):
        return is_.is_integer(source) or is_.is_floating(source)
    if is_.is_floating(target):
        return is_.is_integer(source) or (is_.is_floating(source) and source.bit_width < target.bit_width)
    if is_.is_decimal(target):
        return is_.is_decimal(source) or is_.is_integer(source)
    if is_.is_timestamp(target):
        return is_.is_timestamp(source) and (target.tz is not None or source.tz is None)
    if is_.is_date(target):
        return is_.is_date(source)
    return _castable_parts(source, target)


def _castable_parts(source: pa.DataType, target: pa.DataType) -> bool:
    is_ = pa.types
    # Not from list views: Arrow 26 casts [[1], [2, 3]] to [[1], []].
    if is_.is_list(target):
        lists = is_.is_list(source) or is_.is_large_list(source) or is_.is_fixed_size_list(source)
        return lists and _castable(source.value_type, target.value_type)
    if is_.is_map(target):
        maps = is_.is_map(source) and _castable(source.key_type, target.key_type)
        return maps and _castable(source.item_type, target.item_type)
    if not (is_.is_struct(target) and is_.is_struct(source)):
        return False
    there = {field.name: field.type for field in source}
    known = {field.name for field in target}.issuperset(there) and len(there) == source.num_fields
    return known and all(
        _castable(there[field.name], field.type) if field.name in there else field.nullable for field in target
    )


def _within_years(column: pa.Array) -> bool:
    """Whether each time, at any depth, is one that Python can show."""
    type_ = column.type
    if column.null_count == len(column):
        return True
    if pa.types.is_timestamp(type_) or pa.types.is_date(type_):
        return _within(column, 1) if pa.types.is_date(type_) else _within(column, _DAY_US)
    if not type_.num_fields or not _has_times(type_):
        return True
    if pa.types.is_map(type_):
        return all(map(_within_years, map_parts(column)[:2]))
    inner = column.flatten()
    return all(map(_within_years, inner)) if pa.types.is_struct(type_) else _within_years(inner)


def _within(column: pa.Array, day: int) -> bool:
    """Whether each of some times is, by how many make a day."""
    first, behind = _DAYS[0] * day, (_DAYS[1] + 1) * day
    kind = np.int32 if day == 1 else np.int64
    raw = np.frombuffer(column.buffers()[1], kind, len(column), column.offset * np.dtype(kind).itemsize)
    least, greatest = extremes(raw)
    if least >= first and greatest < behind:
        return True
    if not column.null_count:
        return False
    bounds = pc.min_max(column.view(pa.from_numpy_dtype(kind))).as_py()  # what stands at a null means nothing
    return bool(bounds["min"] >= first and bounds["max"] < behind)


@lru_cache(maxsize=1024)
def _has_times(type_: pa.DataType) -> bool:
    if pa.types.is_timestamp(type_) or pa.types.is_date(type_):
        return True
    return any(_has_times(type_.field(at).type) for at in range(type_.num_fields))


def _assert_years(column: pa.Array) -> None:
    if not _within_years(column):
        raise ValueError
