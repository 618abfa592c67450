"""Searches and the clicks on their results: which search led to a click, and which to none.

A search waits for its click ten minutes of event time; then it is told as one that nobody clicked on. They come in any order.

headwater run examples/click_through/app.py
headwater views watch rates --store sqlite:///./click_through/views.db
"""

from pyspark.sql import functions as F

import headwater as hw

app = hw.App("click_through", log="./click_through")

searches = app.topic(
    "searches", schema="search_id BIGINT, query STRING, at TIMESTAMP", key="search_id", time="at", lateness="1 minute"
)
clicks = app.topic(
    "clicks", schema="search_id BIGINT, result INT, at TIMESTAMP", key="search_id", time="at", lateness="1 minute"
)


@app.stream(searches, clicks, key="query", late="topic")
def outcomes(searches, clicks):
    """Each search with each click on it within ten minutes; without one when the ten minutes are over."""
    clicked = clicks.select(F.col("search_id").alias("of"), "result", F.col("at").alias("clicked"))
    is_soon = F.col("clicked").between(F.col("at"), F.col("at") + F.expr("INTERVAL 10 MINUTES"))
    return searches.join(clicked, (F.col("search_id") == F.col("of")) & is_soon, "left").drop("of")


@app.view(outcomes, key="query")
def rates(outcomes):
    """How many outcomes each query had, and how many of them were clicks."""
    return outcomes.groupBy("query").agg(F.count("*").alias("outcomes"), F.count("result").alias("clicks"))


if __name__ == "__main__":
    app.run()
