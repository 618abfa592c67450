"""An environment of its own for a peer that needs what Headwater must not have: made once, in the cache, next to the peer's jars."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from headwater.testing.servers import ServerError, cache_folder
from headwater.testing.servers.server import tail


def python_of(peer: str, requirement: str, *, name: str, size: str) -> Path:
    """The Python of an environment with one requirement; `name` is that of its folder in the cache and says the version.

    Several processes may ask at once: one installs. Raises `ServerError` when it cannot be had.
    """
    home = cache_folder(name)
    environment = home / f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = environment / "bin" / "python"
    whole = environment / "whole"  # written last: an installation that broke off is made anew
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            print(f"{peer}: making its environment in {environment}, {size} …", file=sys.stderr, flush=True)
            shutil.rmtree(environment, ignore_errors=True)
            _install(peer, requirement, environment, python)
            whole.touch()
    return python


def _install(peer: str, requirement: str, environment: Path, python: Path) -> None:
    venv.EnvBuilder(with_pip=True, symlinks=True).create(environment)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise ServerError("download_failed", f"pip could not install {peer}. Its last lines:\n{tail(done.stderr)}")
