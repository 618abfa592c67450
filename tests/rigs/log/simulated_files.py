"""What the tests of the simulated disk share: a stored file, and a random change of one."""

from __future__ import annotations

import random

from headwater.log.disk.disk import File
from headwater.testing import SimDisk

PATH = "/disk/a"


def stored(disk: SimDisk, content: bytes, path: str = PATH) -> None:
    """A file whose bytes and name are on the platter."""
    process = disk.process("setup")
    file = process.open(path, "create")
    file.write_at(0, [content])
    file.sync()
    process.sync_folder(path.rpartition("/")[0])
    disk.kill("setup")


def change_at_random(file: File, chance: random.Random) -> None:
    """One write, cut or growth."""
    call = chance.choice(("write", "write", "write", "truncate", "allocate"))
    if call == "write":
        at = chance.choice((0, file.size(), chance.randint(0, 4000)))
        file.write_at(at, [chance.randbytes(chance.randint(0, 1500)), b"|"])
    elif call == "truncate":
        file.truncate(chance.randint(0, 5000))
    else:
        file.allocate(chance.randint(1, 5000))
