"""The log's figures beside a real Kafka: `python -m bench.log` writes `bench/results/log.json`.

Events of 10-byte key and 100-byte value; ours with default durability (each acknowledged event is on disk), Kafka
with acks=1 (it is in the broker's page cache). `--only send` runs one group, `--quick` shrinks everything,
`--side peer` measures the peers alone.
"""

from __future__ import annotations

from bench.harness import Bench, main
from bench.log.group_commit import together
from bench.log.groups import groups
from bench.log.growth import growth, segments
from bench.log.latency import latency
from bench.log.queues import queue
from bench.log.rates import append, read, send
from bench.log.upkeep import keeping

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
