"""Searches that are saved, changed, broken and repaired while ads are posted; killed on the way.

pytest examples/property_alerts/test_property_alerts.py
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from headwater.testing import CRASH, AppTest

APP = Path(__file__).with_name("app.py")
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def ad(number, minutes, title, rent=900.0, lat=52.5, lon=13.4):
    """A flat, posted so many minutes after noon."""
    at = NOON + timedelta(minutes=minutes)
    return {"ad": number, "title": title, "body": "", "rent": rent, "rooms": 3, "lat": lat, "lon": lon, "at": at}


def saved(name, minutes, query, where=None):
    """A search of a person, as it is from then on."""
    changed = NOON + timedelta(minutes=minutes)
    return {"search": name, "query": query, "where": where, "person": name[:4], "changed": changed}


def test_an_ad_alerts_the_people_whose_searches_match_it_at_its_time():
    """Anna lowers her limit at 10 past, Ben breaks his search and repairs it, Cleo wants no balcony."""
    with AppTest(APP) as test:
        with test.log.producer() as producer:
            producer.send("searches", saved("anna-1", -60, "balkon AND rent:<1000 AND home:near(52.52, 13.41, 5km)"))
            producer.send("searches", saved("ben1-1", -60, '"ruhiger altbau"~2', where="rent / rooms < 400"))
            producer.send("searches", saved("cleo-1", -60, "wohnungen OR altbau -balkon"))
            producer.send("searches", saved("anna-1", 10, "balkon AND rent:<800"))
            producer.send("searches", saved("ben1-1", 10, '"ruhiger altbau'))
            producer.send("searches", saved("ben1-1", 20, "altbau"))
        flats = [ad(1, 1, "Altbau, sehr ruhiger, mit Balkonen"), ad(2, 5, "Altbau mit Balkon", lat=48.1)]
        flats += [ad(3, 12, "Ruhiger Altbau mit Balkon"), ad(4, 13, "Balkon", rent=700.0)]
        test.feed("ads", [*flats, ad(5, 25, "Altbau, eine Wohnung"), CRASH])
        test.run()
        for topic in ("ads", "searches"):
            test.log.heartbeat(topic, NOON + timedelta(hours=3))
        test.run()
        found = {(row["ad"], row["search"]) for row in test.read("alerts")}
        assert found == {(1, "anna-1"), (4, "anna-1"), (5, "ben1-1"), (5, "cleo-1")}
        [places] = [row["highlights"] for row in test.read("alerts") if row["ad"] == 1]
        assert places == [{"field": "title", "start": 26, "end": 34}]
        assert {row["person"]: row["count"] for row in test.rows("per_person")} == {"anna": 2, "ben1": 1, "cleo": 1}
