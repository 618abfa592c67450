"""Sends events one by one, has a view count them, and waits for each change at a subscriber; each event but the first is a round.

A reader takes the place of the stage that would read the topic on Spark: its counts are those of the stage's query.
"""

import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import sitecustomize

import headwater as hw

EVENTS = 4

folder = Path(sys.argv[1])
store = hw.open_view_store(f"sqlite:///{folder}/views.db")
with hw.open_log(folder / "log") as log:
    log.create_topic("clicks", "page STRING, at TIMESTAMP", key="page", time="at")
    definition = hw.define_view("per_page", "page STRING, clicks BIGINT", key="page")
    maintainer = hw.ViewMaintainer(log, store, definition)
    view = hw.open_view(store.url, "per_page", log=log)
    counts = Counter[str]()
    with log.producer() as producer, log.reader("clicks") as reader, view.subscribe() as subscription:
        assert subscription.poll()[-1].kind == "ready"
        for number in range(EVENTS):
            if number > 0:
                sitecustomize.begin_round()
            producer.send("clicks", {"page": "/", "at": "2026-01-01T12:00:00Z"})
            producer.flush()
            counts.update(event.key for event in reader.poll())
            rows = pa.table({"page": list(counts), "clicks": list(counts.values())})
            maintainer.maintain(rows, hw.Marker(query="counts", epoch=number, ends={}))
            assert [change.new for change in subscription.poll()] == [{"page": "/", "clicks": number + 1}]
        sitecustomize.begin_round()
    view.close()
store.close()
