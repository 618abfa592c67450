"""The world of a simulated history: what its actors share, and what an actor is.

An actor is one process of the simulated machine with one task of the schedule. It opens the log, acts, dies when nature or a
crash point kills it, and begins again. Every call of the log goes through `Actor.call`, which knows the errors a user may
meet at that moment; any other one is a `Violation`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal, TypeVar

from headwater.log.log import Log, open_log
from headwater.log.port.topic import Topic
from headwater.model.errors import Damaged, FormatTooNew, HeadwaterError, NoAccess, StorageError, TopicNotFound
from headwater.testing.oracle import Oracle, PartitionId, Violation, check_error
from headwater.testing.simulation.disk import SimDisk
from headwater.testing.simulation.process import Crashed
from headwater.testing.simulation.schedule import Schedule
from headwater.testing.simulation.scheduled_disk import ScheduledDisk

FOLDER = "/disk/log"
TEMPORARY = "temporary"
COLUMNS = "key STRING, batch BIGINT, row INT, text STRING, attempt BIGINT"

Result = TypeVar("Result")
Errors = tuple[type[HeadwaterError], ...]


class Refused(Exception):
    """The log has refused a call with an error that was to be expected."""

    def __init__(self, error: HeadwaterError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class Comings:
    """The topic that comes and goes: whether it is there for sure, and since which number each id can hold events.

    `changes` rises when a creation or a deletion begins and when its outcome is known; `topic` is the present one, if it is
    known which one that is.
    """

    state: Literal["absent", "present", "unsure"] = "absent"
    changes: int = 0
    topic: Topic | None = None
    since: dict[str, int] = field(default_factory=dict)

    def change(self, state: Literal["absent", "present", "unsure"], topic: Topic | None = None) -> None:
        """A creation or a deletion begins, or its outcome is known."""
        self.state = state
        self.changes += 1
        self.topic = topic


class World:
    """What the actors of one history share."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.disk = SimDisk(seed)
        self.schedule = Schedule(self.random, switch_probability=self.random.choice((0.02, 0.1, 0.3)))
        self.oracle = Oracle()
        self.comings = Comings()
        self.faults = 0
        self.is_healed = False
        self.power_loss_probability = 0.0
        self.topics: dict[str, Topic] = {}
        self.lines: list[str] = []
        self._now = 1_700_000_000_000_000

    def clock(self) -> int:
        """A clock that sometimes goes backwards, as clocks do."""
        self._now += self.random.choice((0, 1, 50, 1000, 1000, -2000))
        return self._now

    def place(self, name: str, partition: int) -> PartitionId | None:
        """A partition of a topic; None where nobody knows which topic has that name now."""
        topic = self.comings.topic if name == TEMPORARY else self.topics[name]
        if topic is None:
            return None
        return PartitionId(name, topic.id, partition, topic.partitions, topic.durability == "fsync")

    def note(self, who: str, what: str) -> None:
        """One line of the history, to be read when it failed."""
        self.lines.append(f"{self.schedule.steps:7} {who:10} {what}")

    def power_loss(self) -> None:
        """Everything unsynced is at stake, everybody is dead."""
        self.note("nature", "power loss")
        self.disk.power_loss()
        self.oracle.power_lost()
        self.schedule.wake()


class Actor:
    """One process that uses the log."""

    def __init__(self, world: World, name: str, *, actions: int = 0, read_only: bool = False) -> None:
        self.world = world
        self.name = name
        self.actions = actions
        self.read_only = read_only
        self.random = Random(world.random.random())
        self._disk: ScheduledDisk | None = None
        self._log: Log | None = None

    @property
    def log(self) -> Log:
        """The open log."""
        assert self._log is not None
        return self._log

    def run(self) -> None:
        """Acts as often as it is to, through deaths and refusals."""
        for _ in range(self.actions):
            try:
                self.open()
                self.act()
            except Crashed:
                self.forget()
                if self.world.random.random() < self.world.power_loss_probability:
                    self.world.power_loss()
            except Refused as refusal:
                if isinstance(refusal.error, StorageError) and self.random.random() < 0.7:
                    self.close()
        self.close()

    def act(self) -> None:
        """One thing that it does."""

    def open(self) -> None:
        """Opens the log if it is not open."""
        if self._log is None:
            disk = self._disk = ScheduledDisk(self.world.disk.process(self.name), self.world.schedule)
            self._log = self.call(
                "open",
                lambda: open_log(FOLDER, disk=disk, clock=self.world.clock, create=False, read_only=self.read_only),
                (NoAccess,) if self.read_only and self.world.oracle.power_losses else (),
            )

    def close(self) -> None:
        """Closes the log, as a process that is done with it does."""
        if self._log is not None:
            log = self._log
            self.forget()
            log.close()

    def forget(self) -> None:
        """What it had open is gone, because it is closed or the process is dead."""
        self._log = None

    def call(self, what: str, work: Callable[[], Result], expected: Errors = ()) -> Result:
        """What a call of the log returns; `Refused` when it raises what is expected now."""
        self.world.note(self.name, what)
        try:
            result = work()
            self._check_alive()
        except (Crashed, Violation) as end:
            self.world.note(self.name, f"… {what}: {type(end).__name__}: {end}")
            raise
        except KeyboardInterrupt as end:
            self.world.note(self.name, f"… {what}: interrupted")
            raise Refused(HeadwaterError("It was interrupted.", advice="Go on.")) from end
        except Exception as error:
            self.world.note(self.name, f"… {what}: {type(error).__name__}: {error}")
            refusal = check_error(error)
            if not self._is_expected(refusal, expected):
                raise Violation(f"{what} raised {type(error).__name__}: {error}") from error
            raise Refused(refusal) from error
        self.world.note(self.name, f"… {what}: {_short(result)}")
        return result

    def call_on(
        self, topics: set[str], what: str, work: Callable[[], Result], expected: Errors = (), changes: int | None = None
    ) -> Result:
        """A call about these topics: one that may have gone, since so many changes, may be said to be gone."""
        comings = self.world.comings
        changes = comings.changes if changes is None else changes
        try:
            return self.call(what, work, (*expected, TopicNotFound) if TEMPORARY in topics else expected)
        except Refused as refusal:
            if isinstance(refusal.error, TopicNotFound) and (comings.state, comings.changes) == ("present", changes):
                raise Violation(f"{what}: the topic is there, and yet: {refusal.error}") from refusal
            raise

    def _may_fail(self) -> bool:
        return self.world.faults > 0 and not self.world.is_healed

    def _check_alive(self) -> None:
        """A call that never came to the disk has not noticed that its process is dead; its answer reaches nobody."""
        if self._disk is None or not self._disk.process.alive:
            raise Crashed(f"Process {self.name} is dead.")

    def _is_expected(self, error: HeadwaterError, expected: Errors) -> bool:
        if isinstance(error, (Damaged, FormatTooNew)):
            return False
        return isinstance(error, expected) or (self._may_fail() and isinstance(error, StorageError))


def _short(result: object) -> str:
    """As much of an answer as is the same each time."""
    if isinstance(result, (bool, int, str, range, list, dict)):
        return f"{result!r:.200}"
    return "done" if result is None else type(result).__name__
