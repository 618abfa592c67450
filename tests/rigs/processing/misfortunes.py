"""What befalls processes that write small files on a simulated disk: kills, power losses, and a disk that runs full, by seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from headwater.log.disk.disk import Disk
from headwater.model.errors import DiskFull
from headwater.testing import Crashed, SimDisk

KILL_PROBABILITIES = (0.0, 0.02, 0.1, 0.3)
ROOMS = (0, 1, 20, 400)


class Machine:
    """A simulated disk whose process dies at any of its calls, finds the disk full, or loses power; each seed differently."""

    def __init__(self, seed: int, *, loses_power: bool = True) -> None:
        self.disk = SimDisk(seed)
        self.chance = Random(seed)
        self.lost_power = self.ran_full = self.was_killed = False
        self._loses_power = loses_power

    def run(self, story: Callable[[Disk], None]) -> bool:
        """Lets a process do something; whether it came to its end."""
        self.disk.crash_randomly("one", self.chance.choice(KILL_PROBABILITIES))
        if self.chance.random() < 0.3:
            taken = sum(inode.length for _, inode in self.disk.tree.files())
            self.disk.capacity_bytes = taken + self.chance.choice(ROOMS)
        is_over = False
        try:
            story(self.disk.process("one"))
            is_over = True
        except Crashed:
            self.was_killed = True
        except DiskFull:
            self.ran_full = True
        self.disk.kill("one")
        self.disk.heal()
        self.disk.crash_randomly("one", 0.0)
        self.disk.capacity_bytes = None
        if self._loses_power and self.chance.random() < 0.5:
            self.disk.power_loss()
            self.lost_power = True
        return is_over
