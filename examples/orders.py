"""A log on this machine, from the first topic to the newest row per key: `python examples/orders.py [FOLDER]`."""

import sys
import tempfile
from datetime import UTC, datetime, timedelta

import headwater as hw

noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="headwater-orders-")

with hw.open_log(folder) as log:
    log.create_topic(
        "orders", schema="id STRING, state STRING, amount DOUBLE, at TIMESTAMP", key="id", time="at", exist_ok=True
    )

    # Many events at once, from dicts, Arrow, pandas or Polars; on disk when the call returns.
    hours = [noon + timedelta(hours=hour) for hour in range(3)]
    log.append("orders", [{"id": f"o{n}", "state": "new", "amount": 10.0 * n, "at": at} for n, at in enumerate(hours)])

    # One at a time: a producer makes batches of them, and each has a receipt.
    with log.producer() as producer:
        receipt = producer.send("orders", {"id": "o1", "state": "paid", "amount": 10.0, "at": hours[2]})
        print("o1 paid at", receipt.result())

    # A reader follows from any place: an offset, a time, the beginning or the end.
    with log.reader("orders", start="earliest") as reader:
        for event in reader.poll():
            print(
                f"{event.time:%H:%M} {event.key} {event.value['state']} (partition {event.partition}, offset {event.offset})"
            )

    # The topic as a table: the newest row of each key, now and as it was at an event time.
    now, before = log.table("orders"), log.table("orders", as_of=hours[1])
    print("now:", {row["id"]: row["state"] for row in now.to_pylist()})
    print("at 13:00:", {row["id"]: row["state"] for row in before.to_pylist()})

print(f"Look again: headwater -l {folder} tail orders")
