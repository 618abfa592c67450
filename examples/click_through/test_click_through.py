"""Clicks before their search, searches nobody clicked on, clicks that come too late; killed in the middle.

pytest examples/click_through/test_click_through.py
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from headwater.testing import CRASH, AppTest

APP = Path(__file__).with_name("app.py")
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def search(search_id, query, minutes):
    """A search, so many minutes after noon."""
    return {"search_id": search_id, "query": query, "at": NOON + timedelta(minutes=minutes)}


def click(search_id, result, minutes):
    """A click on one of its results."""
    return {"search_id": search_id, "result": result, "at": NOON + timedelta(minutes=minutes)}


def test_each_search_has_one_end():
    """With a click within ten minutes, whichever came first; without one when time has passed; a late click is kept aside."""
    with AppTest(APP) as test:
        test.feed("clicks", [click(1, 3, 1)])
        test.feed("searches", [search(1, "tea", 0), search(2, "tea", 2), search(3, "cups", 3)])
        test.feed("clicks", [CRASH, click(2, 1, 11), click(3, 1, 14)])
        test.run()
        assert sorted((row["search_id"], row["result"]) for row in test.read("outcomes")) == [(1, 3), (2, 1)]
        for topic in ("searches", "clicks"):
            test.log.heartbeat(topic, NOON + timedelta(minutes=30))
        test.feed("clicks", [click(3, 2, 12)])
        test.run()
        found = sorted((row["search_id"], row["result"] or 0) for row in test.read("outcomes"))
        assert found == [(1, 3), (2, 1), (3, 0)]
        assert [row["result"] for row in test.read("outcomes.late.clicks")] == [2]
        assert sorted((row["query"], row["outcomes"], row["clicks"]) for row in test.rows("rates")) == [
            ("cups", 1, 0),
            ("tea", 2, 2),
        ]
