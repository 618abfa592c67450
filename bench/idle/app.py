"""The application of `bench.idle`: as many views over one topic as the environment says."""

from __future__ import annotations

import os

from pyspark.sql import DataFrame

import headwater as hw

LOG, STAGES = "BENCH_IDLE_LOG", "BENCH_IDLE_STAGES"
TOPIC, SCHEMA = "visits", "page STRING"


def per_page(visits: DataFrame) -> DataFrame:
    """How often each page was visited."""
    return visits.groupBy("page").count()


def make_app() -> hw.App:
    """The application."""
    made = hw.App("idle", log=os.environ[LOG])
    visits = made.topic(TOPIC, schema=SCHEMA, key="page", partitions=4)
    for number in range(int(os.environ[STAGES])):

        def view(visits: DataFrame) -> DataFrame:
            return per_page(visits)

        view.__name__ = f"per_page_{number}"
        made.view(visits, key="page")(view)
    return made


if LOG in os.environ:
    app = make_app()
