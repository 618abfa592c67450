"""An environment with a wheel of this project and nothing but what the wheel asks for, made offline in seconds.

The wheel is installed by pip. Its requirements are looked up as pip does, extras and markers too, and the files of each are linked
from the environment of the tests, as `uv` links them from its cache: what is installed there is what pip would have downloaded.
A package that the wheel does not ask for is not there.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300.0


def build_wheel(folder: Path) -> Path:
    """The project's wheel, built by its own back-end."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


@dataclass(frozen=True)
class Ended:
    """What a program left behind."""

    code: int
    out: str
    err: str


class CleanInstall:
    """A virtual environment with the wheel, `extras` and what these need; programs run in the folder `work`, which is empty."""

    def __init__(self, folder: Path, wheel: Path, *, extras: frozenset[str] = frozenset()) -> None:
        self.root = folder / "environment"
        self.work = folder / "work"
        self.work.mkdir()
        venv.EnvBuilder(with_pip=False, symlinks=True).create(self.root)
        self.python = self.root / "bin" / "python"
        self._pip("install", "--quiet", "--no-deps", "--no-index", str(wheel))
        (self._packages,) = self.root.glob("lib/python*/site-packages")
        (found,) = importlib.metadata.distributions(name="headwater", path=[str(self._packages)])
        self.distributions = frozenset(_closure(found, extras))
        for name in self.distributions:
            self._link(importlib.metadata.distribution(name))
        self._pip("check")

    def run(self, *command: str) -> Ended:
        """Runs a program of the environment (`headwater`, `python`) in the empty folder."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HEADWATER_"))}
        ended = subprocess.run(
            [str(self.root / "bin" / command[0]), *command[1:]],
            cwd=self.work,
            env=kept,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def _pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.python), *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def _link(self, distribution: importlib.metadata.Distribution) -> None:
        for file in distribution.files or []:
            if ".." in file.parts:  # scripts, which name another Python
                continue
            target = self._packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            source = Path(str(distribution.locate_file(file)))
            try:
                os.link(source, target)
            except FileNotFoundError:  # bytecode that was never written
                continue
            except OSError:  # another file system
                shutil.copy2(source, target)


def _closure(found: importlib.metadata.Distribution, extras: frozenset[str]) -> set[str]:
    """The names of all distributions that one needs with these extras, itself left out."""
    ours = canonicalize_name(found.metadata["Name"])
    seen: set[tuple[str, str]] = set()
    waiting = [(ours, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        distribution = found if name == ours else importlib.metadata.distribution(name)
        for text in distribution.requires or []:
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(wanted.name), each) for each in ("", *wanted.extras)]
    return {name for name, _ in seen} - {ours}
