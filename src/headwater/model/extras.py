"""Extras: the optional packages that features need, and the sentence that names the one to install.

`pip install headwater` is the log alone. A feature that needs more imports it when it is first used, and where the import fails
`missing_extra` says what to run: pip install "headwater[spark]".
"""

from __future__ import annotations

from importlib.util import find_spec

from headwater.model.errors import SparkUnavailable, Unsupported

SPARK = "spark"
EXTRAS = {
    "pyspark": SPARK,
    "py4j": SPARK,
    "pandas": SPARK,
    "confluent_kafka": "kafka",
    "psycopg": "postgres",
    "psycopg2": "postgres",
    "adbc_driver_postgresql": "postgres",
    "adbc_driver_manager": "postgres",
    "pymysql": "mysql",
    "pymysqlreplication": "mysql",
    "redis": "redis",
    "tantivy": "search",
    "deltalake": "delta",
    "pymongo": "mongodb",
    "bson": "mongodb",
}
"""The extra that brings a module."""


def install_advice(extra: str) -> str:
    """The command that installs an extra."""
    return f'Run: pip install "headwater[{extra}]".'


def check_spark(purpose: str) -> None:
    """Refuses what runs on Spark where the extra is not installed; `SparkUnavailable`. It imports nothing."""
    for module in ("pyspark", "pandas"):
        if find_spec(module) is None:
            raise _missing(module, SPARK, purpose)


def missing_extra(error: ModuleNotFoundError, *, purpose: str = "This") -> SparkUnavailable | Unsupported | None:
    """The error to raise for a module that an extra brings; None for any other module."""
    module = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(module)
    return None if extra is None else _missing(module, extra, purpose)


def _missing(module: str, extra: str, purpose: str) -> SparkUnavailable | Unsupported:
    kind = SparkUnavailable if extra == SPARK else Unsupported
    return kind(f"{purpose} needs the package {module}, which is not installed.", advice=install_advice(extra))
