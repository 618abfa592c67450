"""Alerts for new flats: people save searches and change them, and each new ad finds the searches that match it.

headwater run examples/property_alerts/app.py
"""

import headwater as hw

app = hw.App("property_alerts", log="./property_alerts")

ads = app.topic(
    "ads",
    schema="ad BIGINT, title STRING, body STRING, rent DOUBLE, rooms INT, lat DOUBLE, lon DOUBLE, at TIMESTAMP",
    key="ad",
    time="at",
    lateness="1 minute",
)
searches = app.table(
    "searches",
    schema="search STRING, query STRING, where STRING, person STRING, changed TIMESTAMP",
    key="search",
    time="changed",
    lateness="1 minute",
)


@app.stream(ads, searches, key="ad", time="at")
def alerts(ads, searches):
    """Each ad with each search that was saved when the ad was posted and matches it, and where."""
    found = hw.percolate(
        ads, searches, ["title", "body"], language="german", places={"home": ("lat", "lon")}, highlights=True
    )
    return found.select("ad", "at", "search", "person", "highlights")


@app.view(alerts, key="person")
def per_person(alerts):
    """How many alerts each person got."""
    return alerts.groupBy("person").count()


if __name__ == "__main__":
    app.run()
