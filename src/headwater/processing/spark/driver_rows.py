"""Rows in the driver: what a batch gives, as an Arrow table or an error; never a wait without an end.

`DataFrame.toArrow()` does the same, but for one case. The driver connects to a thread of Spark's, which by TCP gives it ten seconds to
say a secret. A driver that was held up for so long (a busy machine, one that was suspended), or that cannot connect, is given up
there, and `toArrow` then waits for a result that nobody works on: its stage would stand still for ever, and no error would tell why. Here
it is an error that a retry cures: nothing was computed yet.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkRuntimeError
from pyspark.errors.exceptions.captured import unwrap_spark_exception
from pyspark.sql import DataFrame
from pyspark.sql.pandas.serializers import ArrowCollectSerializer
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.util import _create_local_socket

from headwater.model.errors import TimedOut


def rows_of(df: DataFrame) -> pa.Table:
    """All rows of a DataFrame; `TimedOut` where Spark did not hand them over."""
    schema = to_arrow_schema(df.schema, error_on_duplicated_field_names_in_struct=True, timezone="UTC")
    served: Any = df._jdf.collectAsArrowToPython()
    try:
        stream, connection = _create_local_socket(served)
    except (EOFError, OSError, PySparkRuntimeError) as error:
        why = f"{type(error).__name__}: {error}".rstrip(": ")
        raise TimedOut(
            f"Spark did not transfer the rows of a batch ({why}).",
            advice="The driver did not respond for ten seconds, or has too many open files. Spark retries the batch.",
        ) from error
    try:
        with closing(connection), closing(stream):
            batches = list(ArrowCollectSerializer().load_stream(stream))  # type: ignore[arg-type]  # it reads, no more
    finally:
        with unwrap_spark_exception():
            served[2].getResult()  # raises what went wrong in Spark: the stream says only that it ended
    return pa.Table.from_batches(batches).cast(schema) if batches else schema.empty_table()
