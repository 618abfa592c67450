"""Spark's two spellings of a schema: the DDL that people write, and the JSON that is stored.

    id STRING NOT NULL, amount DOUBLE, tags ARRAY<STRING>, place STRUCT<lat: DOUBLE, lon: DOUBLE NOT NULL>

Both keep every type and the nullability of columns and struct fields, so reading back what was written gives an equal
`pyarrow.Schema`. The JSON is that of Spark's `StructType.json()`. It is what the log stores, because reading it needs no
parser: sqlglot, which reads the DDL, costs 0.2 s at import and is loaded only when a DDL string is really given.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from headwater.model.errors import InvalidSchema

_PLAIN = [
    (pa.string(), "STRING", "string"),
    (pa.binary(), "BINARY", "binary"),
    (pa.bool_(), "BOOLEAN", "boolean"),
    (pa.int8(), "TINYINT", "byte"),
    (pa.int16(), "SMALLINT", "short"),
    (pa.int32(), "INT", "integer"),
    (pa.int64(), "BIGINT", "long"),
    (pa.float32(), "FLOAT", "float"),
    (pa.float64(), "DOUBLE", "double"),
    (pa.date32(), "DATE", "date"),
    (pa.timestamp("us", tz="UTC"), "TIMESTAMP", "timestamp"),
    (pa.timestamp("us"), "TIMESTAMP_NTZ", "timestamp_ntz"),
]
_DDL_NAME = {type_: name for type_, name, _ in _PLAIN}
_JSON_NAME = {type_: name for type_, _, name in _PLAIN}
_BY_JSON_NAME = {name: type_ for type_, _, name in _PLAIN}
_BY_PARSED_NAME = {name: type_ for type_, name, _ in _PLAIN} | {
    "TEXT": pa.string(),
    "VARCHAR": pa.string(),
    "CHAR": pa.string(),
    "TIMESTAMPTZ": pa.timestamp("us", tz="UTC"),
    "TIMESTAMPLTZ": pa.timestamp("us", tz="UTC"),
    "TIMESTAMPNTZ": pa.timestamp("us"),
}
_LENGTH_ALLOWED = {"VARCHAR", "CHAR"}

TYPES_ADVICE = (
    "Use STRING, BINARY, BOOLEAN, TINYINT, SMALLINT, INT, BIGINT, FLOAT, DOUBLE, DECIMAL(p, s), DATE, TIMESTAMP, "
    "TIMESTAMP_NTZ, ARRAY<…>, MAP<…, …> or STRUCT<name: …>."
)


def parse_ddl(ddl: str) -> pa.Schema:
    """The schema that a Spark DDL string describes, as `name TYPE [NOT NULL] [COMMENT '…']`, separated by commas."""
    import sqlglot  # 0.2 s: see the module's docstring

    # As the fields of a struct, both "a INT" and "a: INT" are read, and nothing that is left over is dropped in silence.
    try:
        ddl.encode()
        parsed = sqlglot.parse(f"CREATE TABLE t (columns STRUCT<{ddl}\n>)", dialect="spark")
    except (sqlglot.errors.SqlglotError, RecursionError, UnicodeError) as error:
        raise InvalidSchema(f"The schema {short(ddl)} is not valid DDL: {_near(error)}.", advice=TYPES_ADVICE) from None
    outer = parsed[0].this.expressions if len(parsed) == 1 and parsed[0] is not None else []
    if len(outer) != 1 or outer[0].args.get("constraints"):
        raise InvalidSchema(f"The schema {short(ddl)} is not a list of columns.", advice=TYPES_ADVICE)
    return pa.schema(_fields_of(outer[0].args["kind"].expressions, path=""))


def to_ddl(schema: pa.Schema) -> str:
    """The DDL of a schema, such that `parse_ddl` gives the same schema again."""
    return ", ".join(f"{_quoted(field.name)} {type_to_ddl(field.type)}{_not_null(field)}" for field in schema)


def type_to_ddl(type_: pa.DataType) -> str:
    """The DDL of one type; types that Spark does not have come out as Arrow writes them."""
    if type_ in _DDL_NAME:
        return _DDL_NAME[type_]
    if pa.types.is_decimal128(type_):
        return f"DECIMAL({type_.precision}, {type_.scale})"
    if pa.types.is_list(type_):
        return f"ARRAY<{type_to_ddl(type_.value_type)}>"
    if pa.types.is_map(type_):
        return f"MAP<{type_to_ddl(type_.key_type)}, {type_to_ddl(type_.item_type)}>"
    if pa.types.is_struct(type_):
        return f"STRUCT<{', '.join(f'{_quoted(f.name)}: {type_to_ddl(f.type)}{_not_null(f)}' for f in type_)}>"
    return str(type_)


def schema_to_json(schema: pa.Schema) -> dict[str, Any]:
    """The schema as Spark's `StructType.jsonValue()` has it: stored in topic files, readable by people and by Spark."""
    return {"type": "struct", "fields": [_field_to_json(field) for field in schema]}


def schema_from_json(stored: dict[str, Any]) -> pa.Schema:
    """The schema that `schema_to_json` wrote."""
    try:
        return pa.schema([_field_from_json(field) for field in stored["fields"]])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidSchema(
            f"The stored schema is not readable: {error!r}.",
            advice="A stored schema is the JSON of Spark's StructType.",
        ) from None


def make_decimal(precision: int, scale: int, *, path: str) -> pa.DataType:
    """A decimal within Spark's limits."""
    if not (1 <= precision <= 38 and 0 <= scale <= precision):
        raise InvalidSchema(
            f"Column {path}: DECIMAL({precision}, {scale}) is out of range.",
            advice="Use a precision of 1 to 38 digits and a scale between 0 and the precision.",
        )
    return pa.decimal128(precision, scale)


def make_list(element: pa.DataType) -> pa.DataType:
    """An array as Spark hands it over: DDL cannot say that elements are never null, so they may be."""
    return pa.list_(pa.field("element", element))


def make_map(key: pa.DataType, value: pa.DataType) -> pa.DataType:
    """A map as Spark hands it over: keys are never null, values may be."""
    return pa.map_(pa.field("key", key, nullable=False), pa.field("value", value))


def _near(error: Any) -> str:
    """Where the parser failed, without sqlglot's coloured excerpt."""
    details = getattr(error, "errors", None) or [{}]
    word = details[0].get("highlight")
    return f"syntax error at {word!r}" if word else "unbalanced quotes or brackets"


def short(value: object) -> str:
    """The value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _quoted(name: str) -> str:
    """Backticks unless the name is a plain word; `select` and `not` are the two words that the parser does not take."""
    plain = name.isascii() and name.isidentifier() and name.lower() not in ("select", "not")
    return name if plain else "`" + name.replace("`", "``") + "`"


def _not_null(field: pa.Field) -> str:
    return "" if field.nullable else " NOT NULL"


def _fields_of(parsed: list[Any], *, path: str) -> list[pa.Field]:
    fields = []
    for column in parsed:
        if type(column).__name__ != "ColumnDef":
            raise InvalidSchema(
                f"The schema has a type without a column name: {column.sql('spark')}.", advice=TYPES_ADVICE
            )
        inside = f"{path}.{column.name}" if path else column.name
        nullable = _nullable(column, path=inside)
        fields.append(pa.field(column.name, _type_of(column.args["kind"], path=inside), nullable=nullable))
    return fields


def _nullable(column: Any, *, path: str) -> bool:
    nullable = True
    for constraint in column.args.get("constraints") or []:
        kind = type(constraint.args["kind"]).__name__
        if kind == "NotNullColumnConstraint":
            nullable = bool(constraint.args["kind"].args.get("allow_null"))
        elif kind != "CommentColumnConstraint":
            raise InvalidSchema(
                f"Column {path} has {constraint.sql('spark')}, which a topic does not support.",
                advice="Only NOT NULL and COMMENT may follow a column's type.",
            )
    return nullable


def _type_of(parsed: Any, *, path: str) -> pa.DataType:
    kind, inner = getattr(parsed.this, "name", ""), parsed.expressions
    if kind in _BY_PARSED_NAME and (not inner or kind in _LENGTH_ALLOWED):
        return _BY_PARSED_NAME[kind]
    if kind == "DECIMAL" and len(inner) <= 2:
        precision, scale = [int(number.name) for number in inner] + [10, 0][len(inner) :]
        return make_decimal(precision, scale, path=path)
    if kind == "ARRAY" and len(inner) == 1:
        return make_list(_type_of(inner[0], path=f"{path}[]"))
    if kind == "MAP" and len(inner) == 2:
        return make_map(_type_of(inner[0], path=f"{path}.key"), _type_of(inner[1], path=f"{path}.value"))
    if kind == "STRUCT" and inner:
        return pa.struct(_fields_of(inner, path=path))
    raise InvalidSchema(
        f"Column {path} has the type {parsed.sql('spark')}, which a topic does not support.", advice=TYPES_ADVICE
    )


def _field_to_json(field: pa.Field) -> dict[str, Any]:
    return {"name": field.name, "type": _type_to_json(field.type), "nullable": field.nullable, "metadata": {}}


def _type_to_json(type_: pa.DataType) -> Any:
    if type_ in _JSON_NAME:
        return _JSON_NAME[type_]
    if pa.types.is_decimal128(type_):
        return f"decimal({type_.precision},{type_.scale})"
    if pa.types.is_list(type_):
        return {"type": "array", "elementType": _type_to_json(type_.value_type), "containsNull": True}
    if pa.types.is_map(type_):
        key, value = _type_to_json(type_.key_type), _type_to_json(type_.item_type)
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    assert pa.types.is_struct(type_), f"{type_} has not been through to_arrow_schema"
    return {"type": "struct", "fields": [_field_to_json(field) for field in type_]}


def _field_from_json(stored: dict[str, Any]) -> pa.Field:
    return pa.field(stored["name"], _type_from_json(stored["type"]), nullable=stored["nullable"])


def _type_from_json(stored: Any) -> pa.DataType:
    if isinstance(stored, str):
        if stored.startswith("decimal("):
            precision, scale = stored.removeprefix("decimal(").removesuffix(")").split(",")
            return make_decimal(int(precision), int(scale), path=stored)
        return _BY_JSON_NAME[stored]
    if stored["type"] == "array":
        return make_list(_type_from_json(stored["elementType"]))
    if stored["type"] == "map":
        return make_map(_type_from_json(stored["keyType"]), _type_from_json(stored["valueType"]))
    if stored["type"] == "struct":
        return pa.struct([_field_from_json(field) for field in stored["fields"]])
    raise ValueError(f"no type {stored['type']!r}")
