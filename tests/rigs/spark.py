"""One Spark for all tests that need a real one: started for the first, stopped after the last, and nothing of it left running."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headwater.processing.source.spark_source import make_session
from headwater.processing.spark.session import stop_session

STARTS_MAX = 5
ROOT = Path(__file__).parents[2]

_T = TypeVar("_T")


def patiently(use: Callable[[], _T]) -> _T:
    """Runs a stream, again where Spark gave up on a Python process: it allows ten seconds for the start, and a busy machine needs more."""
    for _ in range(STARTS_MAX - 1):
        try:
            return use()
        except PySparkException as error:
            if "Python worker failed to connect back" not in str(error):
                raise
    return use()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local Spark with two cores that runs a failed task again; the data source is registered."""
    folder = tmp_path_factory.mktemp("spark")
    settings = {
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder),
        "spark.driver.memory": "1g",
    }
    with pytest.MonkeyPatch.context() as environment:
        # Workers inherit it from the JVM; some load modules of the tests.
        environment.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
        # The second number of the master is how often a task may fail: locally Spark would otherwise give up at once.
        session = make_session("tests", "local[2, 4]", settings)
    assert SparkContext._gateway is not None
    process = SparkContext._gateway.proc
    try:
        yield session
    finally:
        stop_session(session)
        assert process.poll() is not None, "the JVM survived its session"
