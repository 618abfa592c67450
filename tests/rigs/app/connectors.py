"""An application of connectors alone: three sources of three kinds, a function over each of two, and a target that refuses some rows.

As a program it is the driver: `python connectors.py FOLDER [now]`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import headwater as hw


def loud(users: Any) -> DataFrame:
    return users.changes.select("id", F.upper("name").alias("name"))


def doubled(orders: Any) -> DataFrame:
    return orders.changes.select("id", (2 * F.col("amount")).alias("amount"))


def declare(folder: Path) -> hw.App:
    """The application; each source is a task of its own."""
    settings = {"spark.sql.shuffle.partitions": "2", "spark.driver.memory": "1g"}
    app = hw.App("connectors", log=f"{folder}/log", master="local[2]", conf=settings)
    users = app.table("users", source=f"sqlite:///{folder}/shop.db")
    orders = app.table(
        "orders", source=f"poll+sqlite:///{folder}/old.db?by=version&settle=0 seconds&every=50 milliseconds"
    )
    stock = app.table(
        "stock", source=f"debezium+file://{folder}/kafka?topics=erp.hr&columns.stock=id BIGINT, name STRING"
    )
    app.stream(users, to="loud", key="id", trigger="200 milliseconds")(loud)
    app.stream(orders, to="doubled", key="id", trigger="200 milliseconds")(doubled)
    app.sink("loud", to=f"sqlite:///{folder}/target.db?table=people", name="people", trigger="200 milliseconds")
    app.sink("doubled", to=f"sqlite:///{folder}/target.db?table=doubled", name="amounts", trigger="200 milliseconds")
    app.sink(stock, to=f"sqlite:///{folder}/target.db?table=stock", name="stock.copy", trigger="200 milliseconds")
    return app


if __name__ == "__main__":
    declare(Path(sys.argv[1])).run(available_now="now" in sys.argv, check=False)
