"""An application with one operator, which removes copies of events, over what is there: some micro-batches, each large enough for tasks."""

import sys

import pyarrow as pa
from pyspark.sql import DataFrame

import headwater as hw

FOLDER = sys.argv[1]
BATCHES, BATCH_EVENTS = 12, 12_000

app = hw.App("traced", log=f"{FOLDER}/log", state=f"{FOLDER}/state", master="local[2]")


@app.stream("clicks", to="unique", key="page", time="at", events_max=BATCH_EVENTS)
def unique(clicks: DataFrame) -> DataFrame:
    return hw.dedupe(clicks, "id")


if __name__ == "__main__":
    with hw.open_log(f"{FOLDER}/log") as log:
        log.create_topic("clicks", "id BIGINT, page STRING, at TIMESTAMP", key="page", time="at")
        events = range(BATCHES * BATCH_EVENTS)
        times = pa.array(events, pa.timestamp("us", "UTC"))
        log.append("clicks", pa.table({"id": events, "page": [f"/{number % 99}" for number in events], "at": times}))
    # This thread only starts the stage and then looks at how it goes, which is no part of a micro-batch.
    sys.setprofile(None)
    app.run(available_now=True)
