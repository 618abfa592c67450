"""The environment and its locks: complete, hashed, and installed only when they have changed."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from tools import environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A project folder of its own, and pip's calls written down instead of made."""
    for name in ("build.lock", "project.lock", "pyproject.toml"):
        (tmp_path / name).write_text("one")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    made: list[str] = []
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "ENVIRONMENT", tmp_path / ".venv")
    monkeypatch.setattr(environment, "PYTHON", python)
    monkeypatch.setattr(environment, "LOCKS", (tmp_path / "build.lock", tmp_path / "project.lock"))
    monkeypatch.setattr(environment, "PROJECT", tmp_path / "pyproject.toml")
    monkeypatch.setattr(environment, "usable", lambda: True)
    monkeypatch.setattr(environment, "pip", lambda *arguments: made.append(Path(arguments[-1]).name))
    return made


def test_what_has_not_changed_is_not_installed_again(calls: list[str], tmp_path: Path) -> None:
    """The second run reaches neither pip nor the network; a changed lock is installed, the other one is not."""
    environment.main()
    assert calls == ["build.lock", "project.lock", tmp_path.name]
    environment.main()
    assert len(calls) == 3
    (tmp_path / "project.lock").write_text("two")
    environment.main()
    assert calls[3:] == ["project.lock", tmp_path.name]


def test_an_installation_that_broke_off_is_taken_up_again(
    calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stamp is written after its step, so a half-made environment is never taken for a whole one."""
    record = environment.pip
    monkeypatch.setattr(environment, "pip", lambda *arguments: arguments[-1].endswith("project.lock") and exit(1))
    with pytest.raises(SystemExit):
        environment.main()
    monkeypatch.setattr(environment, "pip", record)
    environment.main()
    assert calls == ["project.lock", tmp_path.name]


@pytest.mark.parametrize("lock", environment.LOCKS, ids=lambda file: file.name)
def test_every_pin_has_a_hash(lock: Path) -> None:
    entries = re.split(r"\n(?=[a-z0-9])", lock.read_text())[1:]
    assert entries
    assert not [entry for entry in entries if not re.match(r"[\w.-]+==\S+ .*\\\n    --hash=sha256:", entry)]


def test_the_locks_hold_everything_that_is_asked_for() -> None:
    """Whoever changes pyproject.toml runs `make lock`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = chain(*project["project"]["optional-dependencies"].values())
    asked = [*project["project"]["dependencies"], *extras, *chain(*project["dependency-groups"].values())]
    pinned = {
        line.partition("==")[0] for lock in environment.LOCKS for line in lock.read_text().splitlines() if "==" in line
    }
    assert {re.match(r"[\w-]+", line)[0] for line in asked} - {"headwater"} <= pinned
