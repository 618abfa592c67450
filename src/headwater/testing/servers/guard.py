"""The guard: runs one service as its child and ends it when the program that asked for it ends, however that happens.

`python guard.py FOLDER COMMAND…` prints the service's pid, then waits. When its standard input closes (the parent
stopped it, or died, even by SIGKILL) or it is told to terminate, it ends the service by pid and removes FOLDER. It
exits with the service's status when the service ends first, and then leaves FOLDER for the parent to read. Should the
guard itself be killed, the kernel kills the service (PR_SET_PDEATHSIG). A guard that runs as root runs the service as the
owner of FOLDER.

A file of its own with only the standard library, so that it starts in some 20 ms with `python -I -S`.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from typing import Any

STOP_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process `number` when the thread that started it ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def owner(folder: str) -> dict[str, Any]:
    """What `subprocess` takes to run a program as the owner of a folder."""
    if os.geteuid() != 0:
        return {}
    found = os.stat(folder)
    return {"user": found.st_uid, "group": found.st_gid, "extra_groups": []}


def main(folder: str, command: list[str]) -> int:
    """Run `command` in `folder` until it ends or must end."""
    stop_read, stop_write = os.pipe()
    os.set_blocking(stop_write, False)
    signal.set_wakeup_fd(stop_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    with open(os.path.join(folder, "service.log"), "ab") as log:
        service = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            **owner(folder),
            preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
        )
    print(service.pid, flush=True)  # noqa: T201 - the parent reads it
    while service.poll() is None:
        readable, _, _ = select.select([0, stop_read], [], [])
        if 0 in readable and not os.read(0, 4096):
            break
        if stop_read in readable and set(os.read(stop_read, 4096)) - {signal.SIGCHLD}:
            break
    else:
        return service.returncode
    service.terminate()
    try:
        service.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        service.kill()
        service.wait()
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
