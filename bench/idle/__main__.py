"""What an application costs that has little to do, beside the same queries in plain Spark: `python -m bench.idle`.

An application of 1, 5, 20 and 50 views, each a count by page over one topic, is run by `headwater run`. Beside it as many streaming queries
over Kafka, with the connector, in a Spark as it comes (with as many shuffle partitions as ours), each written into SQLite by
`foreachBatch`. Measured of the whole process tree, the JVM included: processor time and memory (PSS) without a single event, after a
minute of quiet; the same at 100 events/s; and the time from the start until every query has done its first batch. The broker counts for
neither side.

The whole takes about 25 minutes; `--quick` measures one and five views, briefly. It writes `bench/results/idle.json`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import Producer

import headwater as hw
from bench.harness import Figure, Options, Pair, Sample, Target, main, scratch, watch
from bench.idle.app import LOG, SCHEMA, STAGES, TOPIC
from bench.log.kafka_side import KafkaSide, kafka_side
from bench.pipeline.rig import CONNECTOR, connector_jars
from headwater.processing.stages.status import read_status

COUNTS = (1, 5, 20, 50)
COUNTS_QUICK = (1, 5)
CPU_MAX = 2.0
STAGE_MB_MAX = 30.0
MANY, FEW = 20, 1
EVENTS_PER_S = 100
FIRST_EVENTS = 100
READY_S_MAX = 420.0
END_S_MAX = 60.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ROOT = Path(__file__).parents[2]
_RUN_PEER = "import sys; from bench.idle_spark import run; run(*sys.argv[1:])"

Send = Callable[[str], None]


@dataclass(frozen=True)
class Windows:
    """How long it is quiet, and how long it is measured without and with events."""

    quiet_s: float
    idle_s: float
    warm_s: float
    busy_s: float


LONG = Windows(60.0, 60.0, 10.0, 20.0)
SHORT = Windows(60.0, 30.0, 10.0, 20.0)
QUICK = Windows(10.0, 15.0, 5.0, 10.0)


@dataclass(frozen=True)
class Cost:
    """What the process tree of one side took: seconds to start, and % of a core and MB without and with events."""

    start_s: float
    idle_cpu: float
    idle_mb: float
    busy_cpu: float
    busy_mb: float
    quiet: bool


def costs(options: Options) -> list[Figure]:
    """Both sides for each number of queries."""
    counts = COUNTS_QUICK if options.quick else COUNTS
    found: dict[str, dict[int, Cost]] = {"ours": {}, "peer": {}}
    with scratch() as folder:
        if options.wants("ours"):
            for count in counts:
                found["ours"][count] = _told(_ours(count, _windows(options, count)), f"ours, {count}")
        if options.wants("peer"):
            with kafka_side(folder) as kafka:
                for count in counts:
                    found["peer"][count] = _told(_peer(kafka, count, _windows(options, count)), f"peer, {count}")
    return _figures(found, counts)


def _told(cost: Cost, what: str) -> Cost:
    print(f"{what}: {cost}", flush=True)
    return cost


def _windows(options: Options, count: int) -> Windows:
    return QUICK if options.quick else LONG if count in (FEW, MANY) else SHORT


def _figures(found: Mapping[str, Mapping[int, Cost]], counts: tuple[int, ...]) -> list[Figure]:
    figures = []
    for count in counts:
        views = f"{count} view{'s' if count > 1 else ''} over one topic"
        for name, what, unit, of in (
            ("idle_cpu", f"{views}, no event: share of one core", "%", lambda cost: cost.idle_cpu),
            ("idle_memory", f"{views}, no event: memory (PSS)", "MB", lambda cost: cost.idle_mb),
            ("busy_cpu", f"{views}, {EVENTS_PER_S} events/s: share of one core", "%", lambda cost: cost.busy_cpu),
            ("busy_memory", f"{views}, {EVENTS_PER_S} events/s: memory (PSS)", "MB", lambda cost: cost.busy_mb),
            ("start", f"{views}: from the start until each has done its first batch", "s", lambda cost: cost.start_s),
        ):
            pair = _pair(found, lambda side, of=of, count=count: of(side[count]), (count,))
            target = Target("<=", 1.0) if (name, count) == ("idle_cpu", MANY) else None
            figures.append(Figure(f"{name}_{count}", what, unit, pair, CONNECTOR, target))
    if MANY in counts:
        pair = _pair(found, lambda side: side[MANY].idle_cpu, (MANY,))
        what = f"{MANY} views over one topic, no event: share of one core, all processes"
        figures.append(Figure("idle_cpu", what, "%", pair, CONNECTOR, Target("<=", CPU_MAX, of="ours")))
    more = MANY if MANY in counts else max(counts)
    pair = _pair(found, lambda side: (side[more].idle_mb - side[FEW].idle_mb) / (more - FEW), (FEW, more))
    what = f"memory (PSS) that a view adds, of {more} beside {FEW}"
    figures.append(Figure("stage_memory", what, "MB", pair, CONNECTOR, Target("<=", STAGE_MB_MAX, of="ours")))
    return figures


def _pair(
    found: Mapping[str, Mapping[int, Cost]], of: Callable[[Mapping[int, Cost]], float], counts: tuple[int, ...]
) -> Pair:
    samples: list[Sample | None] = []
    for side in ("ours", "peer"):
        costs = found[side]
        if not all(count in costs for count in counts):
            samples.append(None)
            continue
        value = of(costs)
        samples.append(Sample(value, value, 1, all(costs[count].quiet for count in counts)))
    return samples[0], samples[1]


def _ours(count: int, windows: Windows) -> Cost:
    with scratch() as folder:
        url = str(folder / "log")
        environment = {LOG: url, STAGES: str(count)}
        with hw.open_log(url) as log:
            log.create_topic(TOPIC, SCHEMA, key="page", partitions=4)
            log.append(TOPIC, [{"page": f"/{n}"} for n in range(FIRST_EVENTS)])
            command = ["-m", "headwater.cli.main", "run", "--no-page", str(_ROOT / "bench" / "idle" / "app.py")]

            def is_ready() -> bool:
                status = next(map(read_status, _state_folders(folder)), None)
                epochs = [] if status is None else [stage.epoch for stage in status.stages]
                return len(epochs) == count and min(epochs) >= 0

            with log.producer() as producer:

                def send(page: str) -> None:
                    producer.send(TOPIC, {"page": page})

                return _measured(command, environment, folder, is_ready, send, windows)


def _state_folders(folder: Path) -> list[Path]:
    return [path.parent for path in folder.rglob("status.json")]


def _peer(kafka: KafkaSide, count: int, windows: Windows) -> Cost:
    topic = kafka.create_topic()
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "log_level": 0})

    def send(page: str) -> None:
        producer.produce(topic, key=page, value=page)
        producer.poll(0)

    for n in range(FIRST_EVENTS):
        send(f"/{n}")
    producer.flush()
    with scratch() as folder:
        jars = ",".join(str(jar) for jar in sorted(connector_jars().glob("*.jar")))
        command = ["-c", _RUN_PEER, kafka.bootstrap, topic, str(count), str(folder), jars]
        return _measured(command, {}, folder, (folder / "ready").exists, send, windows)


def _measured(
    command: list[str],
    environment: Mapping[str, str],
    folder: Path,
    is_ready: Callable[[], bool],
    send: Send,
    windows: Windows,
) -> Cost:
    with watch() as watched, _started(command, environment, folder) as process:
        start_s = _wait(process, folder, is_ready)
        time.sleep(windows.quiet_s)
        idle_cpu, idle_mb = _taken(process.pid, windows.idle_s)
        with _sending(send):
            time.sleep(windows.warm_s)
            busy_cpu, busy_mb = _taken(process.pid, windows.busy_s)
    return Cost(start_s, idle_cpu, idle_mb, busy_cpu, busy_mb, watched.quiet)


@contextmanager
def _started(command: list[str], environment: Mapping[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    said = folder / "said"
    with open(said, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | dict(environment) | {"PYTHONPATH": f"{_ROOT}:{_ROOT / 'src'}"},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            for pid in reversed(list(_tree(process.pid))):
                os.kill(pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], folder: Path, is_ready: Callable[[], bool]) -> float:
    """Seconds until it is ready."""
    begun = time.monotonic()
    while not is_ready():
        said = (folder / "said").read_text(errors="replace")[-2_000:]
        assert process.poll() is None, f"it ended: {said}"
        assert time.monotonic() - begun < READY_S_MAX, f"it was not ready in {READY_S_MAX:g} s: {said}"
        time.sleep(0.1)
    return time.monotonic() - begun


@contextmanager
def _sending(send: Send) -> Iterator[None]:
    over = threading.Event()

    def run() -> None:
        begun, sent = time.monotonic(), 0
        while not over.wait(max(0.0, begun + sent / EVENTS_PER_S - time.monotonic())):
            send(f"/{sent % FIRST_EVENTS}")
            sent += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _taken(root: int, seconds: float) -> tuple[float, float]:
    """The % of a core that a process tree takes in the next seconds, and its memory at their end in MB."""
    before, begun = _tree(root), time.monotonic()
    time.sleep(seconds)
    after, elapsed_s = _tree(root), time.monotonic() - begun
    ticks = sum(count - before.get(pid, 0) for pid, count in after.items())
    return ticks / _TICKS_PER_S / elapsed_s * 100, sum(map(_pss_mb, after))


def _tree(root: int) -> dict[int, int]:
    """The ticks of a process, with those of its ended children, and of all below it; parents come first."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            words = Path(f"/proc/{entry}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        parents[int(entry)] = int(words[1])
        ticks[int(entry)] = sum(int(word) for word in words[11:15])
    found = {root: ticks.get(root, 0)}
    for pid in sorted(parents):
        above = pid
        while above > 1 and above != root:
            above = parents.get(above, 0)
        if above == root:
            found[pid] = ticks[pid]
    return found


def _pss_mb(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) / 1000 if found else 0.0


if __name__ == "__main__":
    raise SystemExit(main("idle", {"costs": costs}, runs=1))
