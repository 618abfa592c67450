"""Latency: one event at a time, 1,000 a second, from one process to another; and one fdatasync to hold it against.

The sender writes the time into the event just before it sends, the receiver looks at the same clock when it holds the
value. When a slow send makes the sender late, the next events carry the time they were due, so waiting is never left
out.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.harness import Figure, Options, Pair, Target, measure_each, scratch
from bench.log import headwater_side, kafka_side
from bench.log.payload import Payload, make_payload
from bench.processes import run_together

EVENTS_PER_S = 1_000
WARM_EVENTS = 1_000
SECONDS = 10
SECONDS_QUICK = 2
SYNC_BYTES = 512
_STAMP = struct.Struct("<q")
_LEAD_S = 0.3  # the receiver waits for events before the first is sent

Opener = Callable[..., Callable[..., Any]]
End = tuple[Opener, tuple[str, ...]]
"""One end of what is measured: what opens it, and what that is called with."""


def latency(options: Options) -> list[Figure]:
    """With durability "os" beside Kafka, with "fsync" beside one fdatasync."""
    seconds = SECONDS_QUICK if options.quick else SECONDS
    payload = make_payload(WARM_EVENTS + seconds * EVENTS_PER_S)
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        if options.wants("peer"):
            kafka = stack.enter_context(kafka_side.kafka_side(folder))

        def peer() -> tuple[float, float]:
            address = (kafka.bootstrap, kafka.create_topic())
            return measure_latency((kafka_side.open_sender, address), (kafka_side.open_receiver, address), payload)

        def ours(durability: headwater_side.Durability) -> tuple[float, float]:
            with headwater_side.HeadwaterSide(folder, durability=durability).new_folder() as log:
                address = (str(log), durability)
                sender, receiver = headwater_side.open_sender, headwater_side.open_receiver
                return measure_latency((sender, address), (receiver, address), payload)

        if options.wants("peer"):
            peer()  # a young broker is not compiled yet and may take a hundred times as long
        in_memory = measure_each(options, lambda: ours("os"), peer, better="lower")
        syncs = seconds * EVENTS_PER_S
        on_disk = measure_each(options, lambda: ours("fsync"), lambda: measure_fdatasync(folder, syncs), better="lower")
    return _figures("os", in_memory, "Kafka, linger 0", 1.0) + _figures("fsync", on_disk, "one fdatasync", 3.0)


def _figures(durability: str, pairs: list[Pair], peer: str, times_max: float) -> list[Figure]:
    what = f'one event at {EVENTS_PER_S:,}/s from process to process, durability="{durability}"'
    names = ((f"latency_{durability}_p50", Target("<=", times_max)), (f"latency_{durability}_p99", None))
    return [Figure(name, what, "ms", pair, peer, target) for (name, target), pair in zip(names, pairs, strict=True)]


def measure_latency(
    sender: End, receiver: End, payload: Payload, *, events_per_s: int = EVENTS_PER_S
) -> tuple[float, float]:
    """p50 and p99 in milliseconds; both ends are opened in processes of their own."""
    values = [value[_STAMP.size :] for value in payload.values]
    receiving = (_receive, (*receiver, len(values)))
    sending = (_send, (*sender, payload.keys, values, events_per_s))
    latencies, _ = run_together(receiving, sending)
    return percentiles(latencies[WARM_EVENTS:])


def measure_fdatasync(folder: Path, appends: int) -> tuple[float, float]:
    """p50 and p99 in milliseconds of one append of 512 bytes to a plain file and its fdatasync, at the same pace."""
    path, block, times = folder / "plain", os.urandom(SYNC_BYTES), []
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for _ in ticks(appends, EVENTS_PER_S):
        start = time.monotonic_ns()
        os.write(file, block)
        os.fdatasync(file)
        times.append(time.monotonic_ns() - start)
    os.close(file)
    path.unlink()
    return percentiles(times[appends // 10 :])


def _send(
    ready: Callable[[], None],
    opener: Opener,
    address: tuple[str, ...],
    keys: list[bytes],
    values: list[bytes],
    events_per_s: int,
) -> None:
    send, pack = opener(*address), _STAMP.pack
    ready()
    time.sleep(_LEAD_S)
    events = zip(keys, values, strict=True)
    for stamp, (key, value) in zip(ticks(len(values), events_per_s), events, strict=True):
        send(key, pack(stamp) + value)
    ready()  # a client that sends in the background must live until the last event has arrived


def _receive(ready: Callable[[], None], opener: Opener, address: tuple[str, ...], events: int) -> list[int]:
    receive, unpack = opener(*address), _STAMP.unpack_from
    latencies: list[int] = []
    ready()
    while len(latencies) < events:
        values = receive()
        now = time.monotonic_ns()
        assert values, f"only {len(latencies)} of {events} events arrived"
        latencies += [now - unpack(value)[0] for value in values]
    ready()
    return latencies


def ticks(count: int, per_s: int) -> Iterator[int]:
    """The time, so many times a second; the time that was due when the caller is late."""
    pause = 1_000_000_000 // per_s
    due = time.monotonic_ns()
    for _ in range(count):
        early = due - time.monotonic_ns()
        if early > 0:
            time.sleep(early / 1e9)
            yield time.monotonic_ns()
        else:
            yield due
        due += pause


def percentiles(times_ns: list[int]) -> tuple[float, float]:
    """p50 and p99 in milliseconds."""
    ordered = sorted(times_ns)
    return ordered[len(ordered) // 2] / 1e6, ordered[len(ordered) * 99 // 100] / 1e6
