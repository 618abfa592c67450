"""Rows in the driver: the same as Spark's own `toArrow` gives, and an error where that would wait for ever."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark import util as spark_util
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headwater.model.errors import TimedOut
from headwater.processing.spark.driver_rows import rows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

COLUMNS = "n BIGINT, word STRING, data BINARY, at TIMESTAMP, price DECIMAL(9, 2), words ARRAY<STRING>, place STRUCT<x: DOUBLE, y: DOUBLE>"


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_rows_are_those_of_spark(spark: SparkSession, count: int) -> None:
    """Any number of them, in order, with the types of the DataFrame."""
    rows = spark.range(count, numPartitions=3).selectExpr(
        "if(id % 7 = 0, null, id) n",
        "concat('w', id) word",
        "cast('d' as binary) data",
        "timestamp_seconds(id) at",
        "cast(id / 100 as decimal(9, 2)) price",
        "array('a', null) words",
        "struct(1.0D x, 2.0D y) place",
    )
    found = rows_of(rows)
    assert found.equals(rows.toArrow()) and found.num_rows == count
    assert rows_of(spark.createDataFrame([], COLUMNS)).schema == spark.createDataFrame([], COLUMNS).toArrow().schema


def test_what_fails_in_spark_is_told_as_spark_tells_it(spark: SparkSession) -> None:
    with pytest.raises(PySparkException, match="no such row"):
        rows_of(spark.range(5).selectExpr("if(id = 3, raise_error('no such row'), id) n"))


@pytest.mark.parametrize("error", [EOFError(), OSError(24, "Too many open files"), ConnectionResetError()])
def test_who_is_not_connected_waits_for_nobody(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever keeps the driver from taking the rows; a retry may cure it, and another DataFrame is not concerned."""

    def refuse(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as refused:
        refused.setattr(spark_util, "local_connect_and_auth", refuse)
        with pytest.raises(TimedOut, match=rf"did not transfer the rows of a batch \({type(error).__name__}") as told:
            rows_of(spark.range(5))
    assert told.value.retriable
    assert rows_of(spark.range(5)).num_rows == 5
