"""A schedule: several tasks of a simulated history that take turns, in an order that a seed decides.

Each task is a thread, but only one runs at any time; it hands over when it reaches a turn (`ScheduledDisk` makes every call of
the disk one) or waits for a lock. So two simulated processes meet in every way two real ones could between two calls of the
disk, and the same seed gives the same meeting again.

    schedule = Schedule(random)
    schedule.add("writer", write)
    schedule.add("nature", strike, aside=True)     # ends with the others, never keeps the schedule going
    schedule.run()                                 # raises what the first task that failed has raised

Time is counted in steps: one for each turn of anybody.

Thread-safety: only the running task, or nobody's thread before `run` and after it, may call anything here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

STEPS_MAX = 2_000_000


class Deadlock(Exception):
    """Every task waits for a lock that another one holds."""


class Endless(Exception):
    """The history has taken more steps than any should."""


class Abandoned(BaseException):
    """Another task has failed. Not an `Exception`, so that nothing handles it."""


class ScheduledTask:
    """One thread of the schedule; it runs while it has the baton."""

    def __init__(self, name: str, work: Callable[[], None], *, aside: bool) -> None:
        self.name = name
        self.work = work
        self.aside = aside
        self.baton = threading.Semaphore(0)
        self.waiting = False
        self.asleep_until = 0


class Schedule:
    """The tasks of one history and whose turn it is."""

    def __init__(self, random: Random, *, switch_probability: float = 0.2, steps_max: int = STEPS_MAX) -> None:
        self.steps = 0
        self._random = random
        self._switch_probability = switch_probability
        self._steps_max = steps_max
        self._tasks: list[ScheduledTask] = []
        self._running: ScheduledTask | None = None
        self._failure: BaseException | None = None
        self._ended = threading.Event()

    def add(self, name: str, work: Callable[[], None], *, aside: bool = False) -> None:
        """One more task; `aside` for one that does not keep the others company when they are done."""
        self._tasks.append(ScheduledTask(name, work, aside=aside))

    def run(self) -> None:
        """Runs all tasks to their end; raises what the first that failed has raised."""
        threads = [
            threading.Thread(target=self._work, args=(task,), name=task.name, daemon=True) for task in self._tasks
        ]
        for thread in threads:
            thread.start()
        self._pass_on()
        self._ended.wait()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    @property
    def running(self) -> str:
        """The name of the task whose turn it is; empty outside `run`."""
        return self._running.name if self._running is not None else ""

    def turn(self) -> None:
        """The running task has come to a place where another may go on."""
        if self._running is None:
            return
        self._check()
        self.steps += 1
        if self.steps > self._steps_max:
            raise Endless(f"No end after {self._steps_max:,} steps.")
        if self._random.random() < self._switch_probability:
            self._hand_over()

    def wait(self) -> None:
        """The running task cannot go on before somebody calls `wake`."""
        assert self._running is not None, "nobody can free a lock outside the schedule"
        self._check()
        self._running.waiting = True
        self._hand_over()

    def wake(self) -> None:
        """A lock was freed: whoever waits may look again."""
        for task in self._tasks:
            task.waiting = False

    def sleep(self, steps: int) -> bool:
        """The running task lets the others take so many steps; False when all of them have ended."""
        assert self._running is not None
        self._running.asleep_until = self.steps + steps
        self._hand_over()
        return any(not task.aside for task in self._tasks)

    def _work(self, task: ScheduledTask) -> None:
        task.baton.acquire()
        try:
            self._check()
            task.work()
        except Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._failure = self._failure or error
        self._tasks.remove(task)
        self._pass_on()

    def _hand_over(self) -> None:
        """Another task goes on, or the same one."""
        task = self._running
        assert task is not None
        self._pass_on()
        task.baton.acquire()
        self._check()

    def _pass_on(self) -> None:
        """Gives the baton to somebody; when nobody can use it, to each in turn so that it ends."""
        if not self._tasks:
            self._running = None
            self._ended.set()
            return
        if self._failure is not None:
            self._running = self._tasks[0]
        else:
            self._running = self._random.choice(self._ready())
        self._running.baton.release()

    def _ready(self) -> list[ScheduledTask]:
        ready = [task for task in self._tasks if not task.waiting and task.asleep_until <= self.steps]
        if any(not task.aside for task in ready):
            return ready
        if any(not task.aside and task.waiting for task in self._tasks):
            names = ", ".join(task.name for task in self._tasks if task.waiting)
            self._failure = Deadlock(f"Each of {names} waits for a lock.")
            return self._tasks
        self.steps = max(self.steps, min(task.asleep_until for task in self._tasks))
        return [task for task in self._tasks if task.asleep_until <= self.steps]

    def _check(self) -> None:
        if self._failure is not None:
            raise Abandoned
