"""Notes which functions of the package a process enters, round after round.

Python imports a module of this name when it starts, so every process whose path has this folder is traced: the program, and whatever
Spark starts or forks. They share the number of the present round, one byte of a file; in round 0 nothing is noted. Class bodies and modules
are not functions, so importing enters none.
"""

import inspect
import mmap
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

FOLDER = Path(os.environ["HEADWATER_TRACE"])
PACKAGE = os.environ["HEADWATER_TRACE_PACKAGE"]
ROUND_BEGINS = os.environ.get("HEADWATER_TRACE_ROUND", "")
"""A function with this name begins a round wherever it is entered."""

ROUNDS_MAX = 255

with open(FOLDER / "round", "r+b") as file:
    shared = mmap.mmap(file.fileno(), 1)
notes = os.open(FOLDER / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
noted: set[tuple[int, CodeType]] = set()


def begin_round() -> None:
    """What is entered from now on belongs to the next round."""
    shared[0] = min(shared[0] + 1, ROUNDS_MAX)


def note(frame: FrameType, event: str, _: object) -> None:
    """What Python calls at each call and each return."""
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(PACKAGE) or not code.co_flags & inspect.CO_OPTIMIZED:
        return
    if code.co_qualname == ROUND_BEGINS:
        begin_round()
    number = shared[0]
    if number and (number, code) not in noted:
        noted.add((number, code))
        os.write(notes, f"{number} {code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}\n".encode())


threading.setprofile(note)
sys.setprofile(note)
