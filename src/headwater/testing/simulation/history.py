"""A simulated history: writers and readers on a simulated disk, what befalls them, and what must be true in the end, by seed.

    report = run_history(seed)      # raises Violation, with the seed and the last lines of the history, when a promise is broken

It begins with a log that is created under kills, then runs some writers and readers in one schedule with nature against them,
and ends, after one more kill, power loss or orderly stop, with a judge: a new process that reads everything, finds that the
log works without re-opening or repair, and reads again after a last power loss.
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from headwater.log.file import commit
from headwater.log.log import open_log
from headwater.model.errors import Damaged, HeadwaterError, TopicExists
from headwater.testing.oracle import KEYS, LineSource, Violation
from headwater.testing.simulation.nature import TEMPERS, Nature, Temper
from headwater.testing.simulation.process import Crashed
from headwater.testing.simulation.reader import ReaderView, SimReader, read_inside
from headwater.testing.simulation.schedule import Deadlock, Endless
from headwater.testing.simulation.scheduled_disk import ScheduledDisk
from headwater.testing.simulation.world import COLUMNS, FOLDER, TEMPORARY, World
from headwater.testing.simulation.writer import SimWriter, TopicOwner

LINES_SHOWN = 60
ACTIONS = 20
CREATIONS_MAX = 200
LOOKS_INSIDE = 4
COMMITS_BYTES = (200, 600, 3000, commit.COMMITS_BYTES_MAX)
"""How long the file of commit records gets before it begins again: after one transaction, after a few, or never."""


@dataclass(frozen=True)
class HistoryReport:
    """What has happened in a history that broke no promise."""

    seed: int
    temper: str
    events: int
    power_losses: int
    faults: int
    steps: int
    points: Counter[str]
    lines: tuple[str, ...]


def run_history(seed: int, *, temper: Temper | None = None, actions: int = ACTIONS) -> HistoryReport:
    """One history from its creation to its judge; `Violation` names the seed."""
    gc.collect()  # the world before this one is a circle of objects that holds hundreds of descriptors
    world = World(seed)
    temper = temper or TEMPERS[seed % len(TEMPERS)]
    try:
        with patch.object(commit, "COMMITS_BYTES_MAX", world.random.choice(COMMITS_BYTES)):
            return _run(world, temper, actions)
    except (Violation, Deadlock, Endless, Crashed, HeadwaterError) as failure:
        failure.add_note(f"seed {seed}, temper {temper!r}, actions {actions}; the history ends with:")
        failure.add_note("\n".join(world.lines[-LINES_SHOWN:]))
        raise


def _run(world: World, temper: Temper, actions: int) -> HistoryReport:
    sources = _create(world)
    names = ["keeper", "writer", "other", "reader", "looker"]
    actors = [
        TopicOwner(world, "keeper", actions=actions, sources=sources),
        SimWriter(world, "writer", actions=actions, sources=sources),
        SimWriter(world, "other", actions=actions, sources=sources),
        SimReader(world, "reader", actions=actions),
        SimReader(world, "looker", actions=actions, read_only=True),
    ]
    for actor in actors:
        if isinstance(actor, SimWriter):
            actor.topics += [*world.topics, TEMPORARY]
        world.schedule.add(actor.name, actor.run)
    world.schedule.add("nature", Nature(world, names, temper).run, aside=True)
    world.schedule.run()
    events = _judge(world, sources)
    return HistoryReport(
        world.seed,
        temper,
        events,
        world.oracle.power_losses,
        world.faults,
        world.schedule.steps,
        world.disk.points,
        tuple(world.lines),
    )


def _create(world: World) -> list[LineSource]:
    """A log with its topics, made by processes that are killed all the time, and one event for each key in each topic."""
    topics: dict[str, dict[str, Any]] = {
        "first": {"schema": COLUMNS, "key": "key", "partitions": 1},
        "second": {"schema": COLUMNS, "key": "key", "partitions": 2},
        "swift": {"schema": COLUMNS, "key": "key", "partitions": 3, "durability": "os"},
        "bytes": {"partitions": 2, "durability": world.random.choice(("fsync", "os"))},
    }
    segment_bytes = world.random.choice((4096, 8192, 16384))
    probability = world.random.choice((0.0, 0.01, 0.05))
    for _ in range(CREATIONS_MAX):
        world.disk.crash_randomly("creator", probability)
        probability *= 0.9
        try:
            disk = ScheduledDisk(world.disk.process("creator"), world.schedule)
            log = open_log(FOLDER, disk=disk, clock=world.clock)
            for name, options in topics.items():
                try:
                    log.create_topic(name, segment_bytes=segment_bytes, **options)
                except TopicExists:
                    continue
            break
        except Crashed:
            if world.random.random() < 0.3:
                world.power_loss()
        except Damaged as error:
            raise Violation(f"What was left of making a log is damaged: {error}") from error
    else:
        raise Violation(f"No log after {CREATIONS_MAX} attempts to create one.")
    world.disk.crash_randomly("creator", 0.0)
    world.topics = {name: log.topic(name) for name in topics}
    creator = SimWriter(world, "creator")
    creator.open()
    for topic in world.topics:
        for key in KEYS:
            creator.append_one(topic, key)
    world.disk.kill("creator")
    return [world.oracle.source("second"), world.oracle.source("first")]


def _judge(world: World, sources: list[LineSource]) -> int:
    """The log in the eyes of new processes: everything is there, everything works, and goes on to be there."""
    world.disk.heal()
    world.disk.capacity_bytes = None
    world.is_healed = True
    end = world.random.choice(("power loss", "kill", "stop"))
    if end == "power loss":
        world.power_loss()
    _read_all(world, "judge")
    _write_all(world, sources)
    for name in ("keeper", "writer", "other", "reader", "looker", "judge", "clerk"):
        world.disk.kill(name)
    _read_all(world, "judge again")
    world.power_loss()
    return _read_all(world, "judge at last")


def _read_all(world: World, name: str) -> int:
    judge = SimWriter(world, name)
    judge.open()
    view = ReaderView(judge, list(world.topics))
    view.poll()
    world.oracle.check_sources(view.events)
    for topic in world.topics:
        for _ in range(LOOKS_INSIDE):
            read_inside(judge, topic)
    judge.close()
    return sum(map(len, view.events.values()))


def _write_all(world: World, sources: list[LineSource]) -> None:
    """Every way to write works, in one process that is opened now."""
    clerk = SimWriter(world, "clerk", sources=sources)
    clerk.open()
    for topic in world.topics:
        for key in KEYS:
            clerk.append_one(topic, key)
    for act in (clerk.transact, clerk.produce, clerk.produce_lines, clerk.append_atomically):
        act()
    ReaderView(clerk, list(world.topics)).poll()
    clerk.close()
