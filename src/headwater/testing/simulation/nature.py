"""Nature: what befalls the processes and the disk of a simulated history, by seed.

A temper says which misfortunes a history has to expect, so that some histories meet only kills and there every error is one too
many, and others meet everything at once.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Literal

from headwater.testing.crash.points import crash_points, rare_points
from headwater.testing.simulation.disk import Fault, Operation
from headwater.testing.simulation.world import World

Temper = Literal["calm", "kills", "power", "sync", "full", "double", "records", "doubt", "rolls", "all"]
TEMPERS: tuple[Temper, ...] = ("kills", "power", "power", "sync", "full", "double", "records", "all", "all")

_SYNC_PATTERNS = ("*.frames", "*.frames", "*/commits", "*/commits*", "*/head", "*/state", "*/topic.new", "*", "*")
_OTHER_FAULTS: tuple[tuple[Operation, int], ...] = (
    ("sync_folder", errno.EIO),
    ("write", errno.ENOSPC),
    ("write", errno.EIO),
    ("allocate", errno.ENOSPC),
    ("rename", errno.EIO),
    ("truncate", errno.EIO),
)
_WRITING = (
    "append: locked",
    "append: written",
    "append: published",
    "sync: done",
    "roll: created",
    "transaction: staged",
)
_MENDING = (
    "heal: cut",
    "heal: begun segments removed",
    "settle: before publish",
    "records: begun again",
    "roll: written published",
)
_LOOKS = 100


class Nature:
    """The misfortunes of one history, for the processes with these names."""

    def __init__(self, world: World, names: Sequence[str], temper: Temper) -> None:
        self._world = world
        self._random = world.random
        self._names = names
        self._points = [*crash_points(), *rare_points()]
        kills = (self._kill, self._crash_at_point, self._crash_at_point, self._crash_anywhere, self._interrupt)
        strikes: dict[Temper, tuple[Callable[[], None], ...]] = {
            "calm": (),
            "kills": kills,
            "power": (*kills, world.power_loss),
            "sync": (*kills, self._fail_sync, self._fail_sync, self._fail_sync, self._heal),
            "records": (self._begin_again_and_lose_power,),
            "doubt": (self._fail_record_and_lose_power,),
            "rolls": (self._lose_power_in_a_roll, self._die_in_a_roll_and_fail),
            "full": (*kills, self._fill_disk, self._fill_disk, self._heal),
        }
        strikes["double"] = (
            self._kill_and_lose_power,
            self._kill_and_lose_power,
            self._fail_and_kill,
            self._heal,
            self._crash_at_point,
        )
        strikes["all"] = (
            *strikes["power"],
            *strikes["double"],
            *strikes["records"],
            *strikes["doubt"],
            *strikes["rolls"],
            *strikes["sync"],
            *strikes["full"],
            self._fail_something,
        )
        self._strikes = strikes[temper]
        if temper in ("power", "double", "all"):
            world.power_loss_probability = self._random.choice((0.0, 0.5))

    def run(self) -> None:
        """Strikes now and then, as long as anybody is there."""
        while self._world.schedule.sleep(self._random.choice((20, 200, 800))):
            if self._strikes:
                self._random.choice(self._strikes)()

    def _kill(self) -> None:
        name = self._random.choice(self._names)
        self._world.note("nature", f"kills {name}")
        self._world.disk.kill(name)
        self._world.schedule.wake()

    def _crash_at_point(self) -> None:
        name, point, nth = (
            self._random.choice(self._names),
            self._random.choice(self._points),
            self._random.randint(1, 3),
        )
        self._world.note("nature", f"will kill {name} at {point!r} ({nth})")
        self._world.disk.crash_at(name, point, nth)

    def _interrupt(self) -> None:
        name, point, nth = self._random.choice(self._names), self._random.choice(_WRITING), self._random.randint(1, 2)
        self._world.note("nature", f"will interrupt {name} at {point!r} ({nth})")
        self._world.disk.interrupt_at(name, point, nth)

    def _kill_and_lose_power(self) -> None:
        """Somebody dies, others go on from what it left, and then the power is lost."""
        self._crash_at_point()
        if self._world.schedule.sleep(self._random.choice((50, 150, 400))):
            self._world.power_loss()

    def _begin_again_and_lose_power(self) -> None:
        """A process that begins the commit records again dies; a transaction that was under way goes on, and then the power is lost."""
        point = "records: begun again"
        self._world.note("nature", f"will kill everybody at {point!r}")
        died = self._world.disk.points[point] + 1
        for name in self._names:
            self._world.disk.crash_at(name, point)
        if self._comes(lambda: self._world.disk.points[point] >= died, steps=10):
            self._lose_power_in((20, 50, 100))

    def _fail_record_and_lose_power(self) -> None:
        """A commit record's sync fails; others go on beside what nobody can say was decided, and then the power is lost."""
        if self._random.random() < 0.5:
            self._world.note("nature", "will kill everybody at 'commit: recorded'")
            for name in self._names:
                self._world.disk.crash_at(name, "commit: recorded")
        fault = self._fail("sync", "*/commits", errno.EIO)
        if self._comes(lambda: fault.struck > 0, steps=10):
            self._lose_power_in((20, 50, 100))

    def _lose_power_in_a_roll(self) -> None:
        """The next segment has its name and nothing else: its first truncation fails, that after the one of the segment before it."""
        fault = self._fail("truncate", "*.frames", errno.EIO, after=1, times=1)
        if self._comes(lambda: fault.struck > 0, steps=1):
            self._world.power_loss()

    def _die_in_a_roll_and_fail(self) -> None:
        """Whoever begins the next segment dies, and the first sync of others there fails."""
        point = "roll: written published"
        begun = self._world.disk.points[point]
        self._world.note("nature", f"will kill everybody at {point!r}")
        for name in self._names:
            self._world.disk.crash_at(name, point)
        if self._comes(lambda: self._world.disk.points[point] > begun, steps=5):
            self._fail("sync", "*.frames", errno.EIO, after=0)

    def _comes(self, what: Callable[[], bool], *, steps: int) -> bool:
        """Looks every few steps; whether it came while somebody was there."""
        for _ in range(_LOOKS):
            if not self._world.schedule.sleep(steps):
                return False
            if what():
                return True
        return False

    def _lose_power_in(self, steps: Sequence[int]) -> None:
        if self._world.schedule.sleep(self._random.choice(steps)):
            self._world.power_loss()

    def _fail_and_kill(self) -> None:
        """A sync fails, and whoever mends what it left dies."""
        self._fail_sync()
        point, name = self._random.choice(_MENDING), self._random.choice(self._names)
        self._world.note("nature", f"will kill {name} at {point!r}")
        self._world.disk.crash_at(name, point)

    def _crash_anywhere(self) -> None:
        name, probability = self._random.choice(self._names), self._random.choice((0.0, 0.003, 0.02))
        self._world.note("nature", f"will kill {name} with probability {probability}")
        self._world.disk.crash_randomly(name, probability)

    def _fail_sync(self) -> None:
        self._fail("sync", self._random.choice(_SYNC_PATTERNS), errno.EIO)

    def _fail_something(self) -> None:
        operation, error = self._random.choice(_OTHER_FAULTS)
        self._fail(operation, "*", error)

    def _fail(
        self, operation: Operation, pattern: str, error: int, *, after: int | None = None, times: int | None = None
    ) -> Fault:
        after = self._random.randint(0, 5) if after is None else after
        times = times or self._random.randint(1, 2)
        self._world.note("nature", f"will fail {operation} of {pattern} with {errno.errorcode[error]}")
        self._world.faults += 1
        return self._world.disk.fail(operation, pattern, error, after=after, times=times)

    def _fill_disk(self) -> None:
        taken = sum(inode.length for _, inode in self._world.disk.tree.files())
        room = self._random.choice((0, 1, 500, 5_000, 50_000))
        self._world.note("nature", f"leaves {room} bytes on the disk")
        self._world.faults += 1
        self._world.disk.capacity_bytes = taken + room

    def _heal(self) -> None:
        self._world.note("nature", "heals the disk")
        self._world.disk.heal()
        self._world.disk.capacity_bytes = None
