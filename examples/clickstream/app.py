"""Clicks on a site: cleaned, counted per page and minute, and the busiest pages, live.

headwater run examples/clickstream/app.py
python examples/clickstream/visitors.py         in another terminal: people who click
headwater views watch top_pages --store sqlite:///./clickstream/views.db
"""

from pyspark.sql import functions as F

import headwater as hw

app = hw.App("clickstream", log="./clickstream")

clicks = app.topic(
    "clicks", schema="user_id BIGINT, page STRING, at TIMESTAMP", key="user_id", time="at", lateness="1 minute"
)


@app.stream(clicks, to="visits", key="page", time="at", lateness="1 minute")
def visits(clicks):
    """Pages without what follows the question mark; monitoring does not count."""
    page = F.split("page", r"\?").getItem(0).alias("page")
    return clicks.where(~F.col("page").startswith("/health")).select(page, "user_id", "at")


@app.view(visits, key=["page", "minute"])
def per_minute(visits):
    """How often each page was visited in each minute, by the time of the click."""
    counted = visits.groupBy(F.window("at", "1 minute"), "page").count()
    return counted.select("page", F.col("window.start").alias("minute"), F.col("count").alias("visits"))


@app.view(visits, key="page", order="-visits", limit=10)
def top_pages(visits):
    """The ten pages with the most visits."""
    return visits.groupBy("page").agg(F.count("*").alias("visits"))


if __name__ == "__main__":
    app.run()
