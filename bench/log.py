"""The log's figures beside a real Kafka: `python -m bench.log` writes `bench/results/log.json`.

Events of 10-byte key and 100-byte value; ours with default durability (each acknowledged event is on disk), Kafka
with acks=1 (it is in the broker's page cache). `--only send` runs one group, `--quick` shrinks everything,
`--side peer` measures the peers alone.
"""

from __future__ import annotations

from bench.harness import Bench, main
from bench.log_groups import groups
from bench.log_growth import growth, segments
from bench.log_keeping import keeping
from bench.log_latency import latency
from bench.log_queue import queue
from bench.log_rates import append, read, send
from bench.log_together import together

BENCHES: dict[str, Bench] = {
    "send": send,
    "append": append,
    "read": read,
    "latency": latency,
    "together": together,
    "groups": groups,
    "queue": queue,
    "keeping": keeping,
    "segments": segments,
    "growth": growth,
}

if __name__ == "__main__":
    raise SystemExit(main("log", BENCHES))
