"""The application, tested: a function on plain rows, and all of it on a temporary log, killed in the middle.

pytest examples/clickstream/test_clickstream.py
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import headwater as hw
from headwater.testing import CRASH, AppTest, transform

APP = Path(__file__).with_name("app.py")
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def click(user_id, page, seconds=0):
    """A click, so many seconds after noon."""
    return {"user_id": user_id, "page": page, "at": NOON + timedelta(seconds=seconds)}


def test_monitoring_and_parameters_do_not_count():
    """A function of the application is a function: rows in, rows out."""
    visits = hw.load_app(APP).functions["visits"]
    found = transform(visits, clicks=[click(1, "/health"), click(2, "/cart?from=mail")])
    assert found == [{"page": "/cart", "user_id": 2, "at": NOON}]


def test_every_visit_counts_once_whatever_dies():
    """CRASH kills driver, JVM and workers when a batch was written and Spark has not noted it; the next run goes on from there."""
    with AppTest(APP) as test:
        test.feed("clicks", [click(1, "/"), click(2, "/cart"), CRASH, click(3, "/", seconds=30), click(3, "/cart", 90)])
        test.run()
        assert test.rows("top_pages") == [{"page": "/", "visits": 2}, {"page": "/cart", "visits": 2}]
        assert [row["visits"] for row in test.rows("per_minute", {"page": "/cart"})] == [1, 1]
        assert sorted(row["user_id"] for row in test.read("visits")) == [1, 2, 3, 3]
