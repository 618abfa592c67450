"""Types: a topic's Arrow schema and Spark's, one made of the other.

A topic's schema has only types that Spark has (`headwater.model.schema`), and the JSON in which the log keeps it is Spark's own;
so there is no second map that could differ from the first:

| topic | Arrow | Spark |
|---|---|---|
| STRING, BINARY, BOOLEAN | string, binary, bool | StringType, BinaryType, BooleanType |
| TINYINT, SMALLINT, INT, BIGINT | int8, int16, int32, int64 | ByteType, ShortType, IntegerType, LongType |
| FLOAT, DOUBLE, DECIMAL(p, s) | float, double, decimal128(p, s) | FloatType, DoubleType, DecimalType(p, s) |
| DATE, TIMESTAMP, TIMESTAMP_NTZ | date32, timestamp[us, UTC], timestamp[us] | DateType, TimestampType, TimestampNTZType |
| ARRAY, MAP, STRUCT | list, map, struct | ArrayType, MapType, StructType |

Spark takes a batch only if its schema equals what Spark itself makes of the DataFrame's, nullability included. `conform` brings a
batch there: a query keeps the columns and types it was started with, though its topic's schema may have moved on.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from headwater.model.ddl import type_to_ddl
from headwater.model.errors import SchemaConflict
from headwater.model.schema import schema_to_json

RESTART = "Start the query again: it then reads with the topic's present schema."


def to_spark(schema: pa.Schema) -> StructType:
    """The Spark schema of an Arrow schema of ours."""
    return StructType.fromJson(schema_to_json(schema))


def to_arrow(schema: StructType) -> pa.Schema:
    """The Arrow schema that Spark wants of the rows of a DataFrame with this schema."""
    return to_arrow_schema(schema, timezone="UTC")


def conform(batch: pa.RecordBatch, schema: pa.Schema, *, topic: str) -> pa.RecordBatch:
    """The batch's columns, found by name, with exactly this schema; no value changes, or it is refused."""
    if batch.schema.equals(schema):
        return batch
    columns = [_conformed(batch.column(field.name), field, topic) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _conformed(column: pa.Array, field: pa.Field, topic: str) -> pa.Array:
    if column.type != field.type:
        try:
            column = column.cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaConflict(
                f"Column {field.name} of topic {topic!r} is now {type_to_ddl(column.type)}, and a value does not fit "
                f"into the {type_to_ddl(field.type)} that this query was started with: {str(error).splitlines()[0]}.",
                advice=RESTART,
            ) from None
    if not field.nullable and column.null_count:
        raise SchemaConflict(
            f"Column {field.name} of topic {topic!r} holds a null, and was NOT NULL when this query was started.",
            advice=RESTART,
        )
    return column
