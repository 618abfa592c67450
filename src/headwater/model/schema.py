"""A topic's schema: an Arrow schema of exactly the types that Spark reads, however the user wrote it.

Invariants of every schema that `to_arrow_schema` returns:
- each type equals what PySpark's own `to_arrow_schema` gives for it: TIMESTAMP is `timestamp[us, tz=UTC]`, TIMESTAMP_NTZ
  is `timestamp[us]`, array elements are called `element`, and so on; there is no metadata;
- no column name starts with `_` (the log's own columns do), and no two names differ in case only (Spark ignores case);
- elements of arrays and values of maps may be null, because DDL cannot say that they are not.

A schema changes by `widen` only, so `project` can read every older batch with the newest schema.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from headwater.model.ddl import (
    TYPES_ADVICE,
    make_decimal,
    make_list,
    make_map,
    parse_ddl,
    schema_from_json,
    schema_to_json,
    short,
    to_ddl,
    type_to_ddl,
)
from headwater.model.errors import InvalidSchema, SchemaConflict

__all__ = [
    "BYTES_SCHEMA",
    "DELETED",
    "DEPTH_MAX",
    "HEADERS",
    "SchemaLike",
    "project",
    "schema_from_json",
    "schema_to_json",
    "to_arrow_schema",
    "to_ddl",
    "type_to_ddl",
    "widen",
]

SchemaLike: TypeAlias = str | pa.Schema | type
"""A schema as users write it: a Spark DDL string, a `pyarrow.Schema`, or a dataclass."""

BYTES_SCHEMA = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])
"""The schema of a topic that was created without one."""

HEADERS = pa.field("_headers", make_map(pa.string(), pa.binary()))
DELETED = pa.field("_deleted", pa.bool_())
"""The two columns that a stored batch may have beside the topic's own."""

DEPTH_MAX = 32
"""How deep arrays, maps and structs may nest: Arrow's files end at 64, and each map takes two."""

_PYTHON_TYPES = {
    str: pa.string(),
    bytes: pa.binary(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    datetime.datetime: pa.timestamp("us", tz="UTC"),
    datetime.date: pa.date32(),
    decimal.Decimal: pa.decimal128(38, 18),
}
_WIDER = {
    pa.int8(): {pa.int16(), pa.int32(), pa.int64(), pa.float64()},
    pa.int16(): {pa.int32(), pa.int64(), pa.float64()},
    pa.int32(): {pa.int64(), pa.float64()},
    pa.float32(): {pa.float64()},
}
_UNSIGNED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}


def to_arrow_schema(schema: SchemaLike) -> pa.Schema:
    """The schema that a DDL string, a `pyarrow.Schema` or a dataclass describes, in the types that Spark reads.

    In a dataclass `X | None` is a nullable column and everything else NOT NULL; `Annotated[Decimal, pa.decimal128(10, 2)]`
    picks an exact Arrow type.
    """
    if isinstance(schema, str):
        fields = list(parse_ddl(schema))
    elif isinstance(schema, pa.Schema):
        fields = [_spark_field(field, path=field.name) for field in schema]
    elif isinstance(schema, type) and dataclasses.is_dataclass(schema):
        fields = _dataclass_fields(schema, outer=(), path="")
    else:
        raise InvalidSchema(
            f"{short(schema)} is not a schema.",
            advice='Pass a DDL string such as "id STRING, amount DOUBLE", a pyarrow.Schema or a dataclass.',
        )
    if not fields:
        raise InvalidSchema("The schema has no columns.", advice='Declare at least one column, such as "id STRING".')
    for field in fields:
        if field.name.startswith("_"):
            raise InvalidSchema(
                f"Column {field.name}: names that start with an underscore are reserved for the log (_key, _time, _offset …).",
                advice=f"Rename the column, for example to {field.name.lstrip('_') or 'value'!r}.",
            )
        if _depth(field.type) > DEPTH_MAX:
            raise InvalidSchema(
                f"Column {field.name} nests types deeper than {DEPTH_MAX} levels.",
                advice="Flatten the type, or store the value as STRING.",
            )
    _check_names(fields, path="")
    return pa.schema(fields)


def widen(old: pa.Schema, new: pa.Schema, *, key: str | None = None) -> pa.Schema:
    """The schema that fits events of both `old` and `new`: the old columns in their order, then the added ones.

    Accepted: nullable columns and struct fields added; integers to wider ones; TINYINT to INT and FLOAT to DOUBLE;
    decimals to more digits at the same scale; NOT NULL dropped. The `key` column may only become a wider integer, since
    any other change would send the same key to another partition. All other differences raise `SchemaConflict` at once.
    """
    conflicts: list[str] = []
    fields = _widen_fields(list(old), list(new), path="", conflicts=conflicts)
    if key is not None and old.get_field_index(key) >= 0 and new.get_field_index(key) >= 0:
        before, after = old.field(key).type, new.field(key).type
        if before != after and not (pa.types.is_integer(before) and pa.types.is_integer(after)):
            conflicts.append(
                f"column {key} is the key, and with type {type_to_ddl(after)} its events would move to other partitions"
            )
    if conflicts:
        raise SchemaConflict(
            f"The new schema does not fit the stored events: {'; '.join(conflicts)}.",
            advice="Add a nullable column instead, or create a new topic. Types can only be widened "
            "(INT to BIGINT or DOUBLE, FLOAT to DOUBLE, DECIMAL to more digits).",
        )
    return pa.schema(fields)


def has_room_for(type_: pa.DataType, narrower: pa.DataType) -> bool:
    """Whether a column of a type can take every value of another, as `widen` understands it."""
    conflicts: list[str] = []
    return _widen_type(narrower, type_, path="", conflicts=conflicts) == type_ and not conflicts


def project(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with exactly the columns of `schema`: those it lacks are null, narrower types are cast, others left out."""
    if batch.schema.equals(schema):
        return batch
    return pa.RecordBatch.from_arrays([_projected(batch, field) for field in schema], schema=schema)


def _projected(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    at = batch.schema.get_field_index(field.name)
    if at < 0:
        if not field.nullable:
            raise SchemaConflict(
                f"Column {field.name} is NOT NULL, but these events are older than the column.",
                advice="Read the events with the topic's schema, which `widen` returned.",
            )
        return pa.nulls(batch.num_rows, field.type)
    column = batch.column(at)
    return column if column.type == field.type else column.cast(field.type)


def _depth(type_: pa.DataType) -> int:
    return 1 + max((_depth(type_.field(at).type) for at in range(type_.num_fields)), default=0)


def _check_names(fields: Iterable[pa.Field], *, path: str) -> None:
    seen: dict[str, str] = {}
    for field in fields:
        inside = f"{path}.{field.name}" if path else field.name
        if not field.name or not field.name.isprintable():
            raise InvalidSchema(
                f"The column name {inside!r} is empty or contains control characters.", advice="Use a printable name."
            )
        if field.name.lower() in seen:
            raise InvalidSchema(
                f"Columns {seen[field.name.lower()]} and {inside} have the same name, because Spark ignores case.",
                advice="Rename one of them.",
            )
        seen[field.name.lower()] = inside
        for type_, place in _children(field.type, path=inside):
            if pa.types.is_struct(type_):
                _check_names(type_, path=place)


def _children(type_: pa.DataType, *, path: str) -> list[tuple[pa.DataType, str]]:
    """The structs that are reached from a type without passing through another struct, or the type itself."""
    if pa.types.is_list(type_):
        return _children(type_.value_type, path=f"{path}[]")
    if pa.types.is_map(type_):
        return _children(type_.key_type, path=f"{path}.key") + _children(type_.item_type, path=f"{path}.value")
    return [(type_, path)]


def _spark_field(field: pa.Field, *, path: str) -> pa.Field:
    return pa.field(field.name, _spark_type(field.type, path=path), nullable=field.nullable)


def _spark_type(type_: pa.DataType, *, path: str) -> pa.DataType:
    """The type that Spark reads exactly and that holds every value of `type_`."""
    is_ = pa.types
    if is_.is_dictionary(type_) or is_.is_run_end_encoded(type_):
        return _spark_type(type_.value_type, path=path)
    if isinstance(type_, pa.BaseExtensionType):
        return _spark_type(type_.storage_type, path=path)
    if is_.is_list(type_) or is_.is_large_list(type_) or is_.is_fixed_size_list(type_):
        return make_list(_spark_type(type_.value_type, path=f"{path}[]"))
    if is_.is_map(type_):
        key = _spark_type(type_.key_type, path=f"{path}.key")
        return make_map(key, _spark_type(type_.item_type, path=f"{path}.value"))
    if is_.is_struct(type_) and type_.num_fields:
        return pa.struct([_spark_field(field, path=f"{path}.{field.name}") for field in type_])
    if is_.is_decimal(type_):
        return make_decimal(type_.precision, type_.scale, path=path)
    if is_.is_timestamp(type_):
        return pa.timestamp("us", tz="UTC" if type_.tz else None)
    if is_.is_string(type_) or is_.is_large_string(type_) or is_.is_string_view(type_):
        return pa.string()
    if (
        is_.is_binary(type_)
        or is_.is_large_binary(type_)
        or is_.is_binary_view(type_)
        or is_.is_fixed_size_binary(type_)
    ):
        return pa.binary()
    if is_.is_date(type_):
        return pa.date32()
    if is_.is_float16(type_):
        return pa.float32()
    if is_.is_boolean(type_) or is_.is_signed_integer(type_) or is_.is_floating(type_):
        return type_
    if type_ in _UNSIGNED:
        return _UNSIGNED[type_]
    raise InvalidSchema(f"Column {path} has the type {type_}, which Spark does not support.", advice=_instead_of(type_))


def _instead_of(type_: pa.DataType) -> str:
    if pa.types.is_duration(type_) or pa.types.is_interval(type_):
        return "Store the duration as BIGINT, with its unit in the name, such as took_us."
    if pa.types.is_time(type_):
        return "Store the time of day as BIGINT microseconds since midnight, as STRING, or as part of a TIMESTAMP."
    if pa.types.is_null(type_):
        return "Declare a type, such as STRING."
    return TYPES_ADVICE


def _dataclass_fields(class_: type, *, outer: tuple[type, ...], path: str) -> list[pa.Field]:
    if class_ in outer:
        raise InvalidSchema(
            f"Column {path}: {class_.__name__} contains itself.", advice="Store the key of the other row instead."
        )
    try:
        hints = typing.get_type_hints(class_, include_extras=True)
    except (NameError, TypeError) as error:
        raise InvalidSchema(
            f"The annotations of {class_.__name__} cannot be resolved: {error}.",
            advice="Define the annotated classes at the top level of their module.",
        ) from None
    fields = []
    for field in dataclasses.fields(class_):
        inside = f"{path}.{field.name}" if path else field.name
        type_, nullable = _annotated_type(hints[field.name], outer=(*outer, class_), path=inside)
        fields.append(pa.field(field.name, type_, nullable=nullable))
    return fields


def _annotated_type(hint: Any, *, outer: tuple[type, ...], path: str) -> tuple[pa.DataType, bool]:
    """The Arrow type of an annotation, and whether it admits None."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union or origin is types.UnionType:
        rest = [argument for argument in arguments if argument is not type(None)]
        if len(rest) == 1 and len(arguments) == 2:
            return _annotated_type(rest[0], outer=outer, path=path)[0], True
    elif origin is typing.Annotated:
        exact = [note for note in hint.__metadata__ if isinstance(note, pa.DataType)]
        type_, nullable = _annotated_type(arguments[0], outer=outer, path=path)
        return (_spark_type(exact[0], path=path) if exact else type_), nullable
    elif origin in (list, Sequence) or (origin is tuple and arguments[1:] == (...,)):
        return make_list(_annotated_type(arguments[0], outer=outer, path=f"{path}[]")[0]), False
    elif origin in (dict, Mapping):
        key = _annotated_type(arguments[0], outer=outer, path=f"{path}.key")[0]
        return make_map(key, _annotated_type(arguments[1], outer=outer, path=f"{path}.value")[0]), False
    elif hint in _PYTHON_TYPES:
        return _PYTHON_TYPES[hint], False
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return pa.struct(_dataclass_fields(hint, outer=outer, path=path)), False
    raise InvalidSchema(
        f"Column {path} has the annotation {short(hint)}, which has no column type.",
        advice="Use str, bytes, bool, int, float, datetime, date, Decimal, list[…], dict[…, …], another dataclass, or one of "
        "these with | None.",
    )


def _widen_fields(old: list[pa.Field], new: list[pa.Field], *, path: str, conflicts: list[str]) -> list[pa.Field]:
    after = {field.name: field for field in new}
    fields = []
    for field in old:
        inside = f"{path}.{field.name}" if path else field.name
        other = after.pop(field.name, None)
        if other is None:
            conflicts.append(f"column {inside} {type_to_ddl(field.type)} is missing{_renamed(field.name, after)}")
            continue
        if field.nullable and not other.nullable:
            conflicts.append(f"column {inside} is nullable and cannot become NOT NULL")
        type_ = _widen_type(field.type, other.type, path=inside, conflicts=conflicts)
        fields.append(pa.field(field.name, type_, nullable=field.nullable or other.nullable))
    for field in after.values():
        if not field.nullable:
            inside = f"{path}.{field.name}" if path else field.name
            conflicts.append(
                f"column {inside} {type_to_ddl(field.type)} is new and NOT NULL, but old events have no value for it"
            )
        fields.append(field)
    return fields


def _renamed(name: str, added: dict[str, pa.Field]) -> str:
    other = [candidate for candidate in added if candidate.lower() == name.lower()]
    return f" ({other[0]} is a different name)" if other else ""


def _widen_type(old: pa.DataType, new: pa.DataType, *, path: str, conflicts: list[str]) -> pa.DataType:
    if old == new or new in _WIDER.get(old, ()):
        return new
    if (
        pa.types.is_decimal(old)
        and pa.types.is_decimal(new)
        and old.scale == new.scale
        and old.precision < new.precision
    ):
        return new
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        return pa.struct(_widen_fields(list(old), list(new), path=path, conflicts=conflicts))
    if pa.types.is_list(old) and pa.types.is_list(new):
        return make_list(_widen_type(old.value_type, new.value_type, path=f"{path}[]", conflicts=conflicts))
    if pa.types.is_map(old) and pa.types.is_map(new) and old.key_type == new.key_type:
        return make_map(
            old.key_type, _widen_type(old.item_type, new.item_type, path=f"{path}.value", conflicts=conflicts)
        )
    conflicts.append(f"column {path} is {type_to_ddl(old)} and cannot become {type_to_ddl(new)}")
    return old
