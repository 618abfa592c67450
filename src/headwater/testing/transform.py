"""A transform: the function of a stage, called with ordinary DataFrames; no log, no streams, no application."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from headwater.model.extras import check_spark

MASTER = "local[1]"


def transform(function: Callable[..., Any], /, **inputs: Any) -> list[dict[str, Any]]:
    """The rows that a function makes of its inputs, each given by the name of its argument.

        transform(visits, clicks=[{"user_id": 1, "page": "/", "at": datetime(2026, 1, 31, tzinfo=UTC)}])

    An input is a list of dicts (types are taken from the values), an Arrow table or a DataFrame. It runs on the Spark session that
    there is, or on one that is started and lives as long as the program. The order of the rows is Spark's. What the function's own
    module defines travels to Spark's workers with it.
    """
    check_spark("transform")
    from headwater.processing.source.spark_source import make_session
    from headwater.processing.spark.serialization import ship_by_value
    from headwater.processing.spark.session import active_session

    if function.__module__ in sys.modules:
        ship_by_value(sys.modules[function.__module__])
    spark = active_session() or make_session("transform", MASTER)
    frames = {name: _frame(spark, given) for name, given in inputs.items()}
    rows: list[dict[str, Any]] = function(**frames).toArrow().to_pylist()
    return rows


def _frame(spark: Any, given: Any) -> Any:
    if isinstance(given, list | tuple):
        given = pa.Table.from_pylist(list(given))
    return spark.createDataFrame(given) if isinstance(given, pa.Table) else given
