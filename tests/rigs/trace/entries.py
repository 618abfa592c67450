"""Entries: which functions of which files of the package a traced program entered in every one of its rounds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import headwater

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PACKAGE = Path(headwater.__file__).parent


def entered(
    program: str, folder: Path, *, rounds_first: int, round_begins: str = "", timeout_s: float = 240.0
) -> Mapping[str, list[str]]:
    """Runs a program of this folder; for each file the functions that were entered in all rounds from `rounds_first` to the last whole one.

    The last round has no end, so it is left out. With `round_begins`, each call of a function with that name begins a round.
    """
    folder.mkdir(exist_ok=True)
    (folder / "round").write_bytes(b"\0")
    paths = [HERE, PACKAGE.parent, ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(map(str, paths))),
        "HEADWATER_TRACE": str(folder),
        "HEADWATER_TRACE_PACKAGE": f"{PACKAGE}{os.sep}",
        "HEADWATER_TRACE_ROUND": round_begins,
    }
    done = subprocess.run(
        [sys.executable, str(HERE / program), str(folder)],
        env=os.environ | environment,
        text=True,
        capture_output=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    rounds: dict[int, set[str]] = defaultdict(set)
    for line in (folder / "notes").read_text().splitlines():
        number, _, function = line.partition(" ")
        rounds[int(number)].add(function)
    whole = [
        functions for number, functions in rounds.items() if rounds_first <= number < (folder / "round").read_bytes()[0]
    ]
    assert len(whole) >= 2, f"{program} had only the rounds {sorted(rounds)}"
    found: dict[str, list[str]] = defaultdict(list)
    for function in sorted(set.intersection(*whole)):
        file, _, name = function.partition(":")
        found[file].append(name)
    return found


def listed(found: Mapping[str, list[str]]) -> str:
    """The files with their functions, for people who want fewer."""
    return "\n".join([f"{len(found)} files:", *(f"  {file}: {', '.join(names)}" for file, names in found.items())])
