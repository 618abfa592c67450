"""A rate that changes in the middle of the sales, told before it is in force; sales that come out of order; killed on the way.

pytest examples/tax_rates/test_tax_rates.py
"""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

from headwater.testing import CRASH, AppTest

APP = Path(__file__).with_name("app.py")
NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)


def sale(number, country, hours):
    """A sale of 100, so many hours after New Year."""
    return {"id": number, "country": country, "amount": Decimal(100), "at": NEW_YEAR + timedelta(hours=hours)}


def rate(country, percent, hours):
    """What is in force from then on."""
    return {"country": country, "percent": Decimal(percent), "since": NEW_YEAR + timedelta(hours=hours)}


def test_every_sale_has_the_rate_of_its_time():
    """Before and after the change; without a rate, or when it was abolished, there is no tax. Time passes for rates, too."""
    today = (datetime.now(UTC) - NEW_YEAR) / timedelta(hours=1)
    with AppTest(APP) as test:
        with test.log.producer() as producer:
            for told in (rate("de", "16", -5000), rate("dk", "25", -9000), rate("de", "19", 0)):
                producer.send("rates", told)
            producer.send("rates", None, key="dk")
        test.feed("sales", [sale(1, "de", -1), sale(2, "de", 0.5), CRASH, sale(3, "dk", 0.2), sale(4, "de", -0.4)])
        test.feed("sales", [sale(5, "fr", 0), sale(6, "dk", today + 1)])
        test.run()
        for topic in ("sales", "rates"):
            test.log.heartbeat(topic, NEW_YEAR + timedelta(hours=today + 3))
        test.run()
        found = {row["id"]: row["tax"] for row in test.read("taxed")}
        assert found == {1: Decimal(16), 2: Decimal(19), 3: Decimal(25), 4: Decimal(16), 5: None, 6: None}
