"""The pipeline's figures beside Spark's Kafka connector: `python -m bench.pipeline` writes `bench/results/pipeline.json`.

One Spark (local[2], the settings of `make_session` for both sides), the same typed events: in a log in a folder for ours, as JSON on
a real Kafka for the connector. `--only write` runs one group, `--quick` shrinks everything and leaves the growth out.
"""

from __future__ import annotations

from bench.harness import main
from bench.pipeline.first_results import first_result, queryable
from bench.pipeline.growth import growth
from bench.pipeline.latency import latency
from bench.pipeline.rates import kafka_json, read, window, write
from bench.pipeline.rig import Rig
from bench.pipeline.view import view

if __name__ == "__main__":
    with Rig() as rig:
        benches = {
            "read": lambda options: read(rig, options),
            "window": lambda options: window(rig, options),
            "write": lambda options: write(rig, options),
            "kafka_json": lambda options: kafka_json(rig, options),
            "latency": lambda options: latency(rig, options),
            "view": view,
            "queryable": lambda options: queryable(rig, options),
            "first_result": first_result,
            "growth": lambda options: growth(rig, options),
        }
        status = main("pipeline", benches)
    raise SystemExit(status)
