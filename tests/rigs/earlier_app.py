"""An application with state of every kind. A version from before the tree was rebuilt has done the first half."""

from __future__ import annotations

import sys

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import headwater as hw

FOLDER = sys.argv[-1]

app = hw.App("before", log=f"{FOLDER}/log", state=f"{FOLDER}/state", views=f"sqlite:///{FOLDER}/views.db")


@app.stream("clicks", to="unique", key="page", time="at")
def unique(clicks: DataFrame) -> DataFrame:
    return hw.dedupe(clicks, "id")


@app.view("clicks", key="page", mode="update")
def per_page(clicks: DataFrame) -> DataFrame:
    return clicks.groupBy("page").agg(F.count("*").alias("clicks"))


app.sink("clicks", to=f"{FOLDER}/files")

if __name__ == "__main__":
    app.run(available_now=True)
