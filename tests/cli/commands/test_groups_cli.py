"""The commands `headwater groups …` and `headwater lag`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headwater as hw
from headwater.cli.main import main
from headwater.log.log import Log
from headwater.testing.contracts.groups.case import append, numbered

Command = Callable[..., str]

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src"), "COLUMNS": "120"}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """A topic of forty events, of which a group has committed about half."""
    with hw.open_log(str(tmp_path / "data")) as log:
        numbered(log, partitions=2, count=40)
        with log.consumer("t", group="g") as consumer:
            consumer.poll(events_max=20)
        yield log


@pytest.fixture
def headwater(log: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command here, and gives what it prints."""

    def run(*words: str, code: int = 0) -> str:
        monkeypatch.setenv("HEADWATER_LOG", log.url)
        monkeypatch.setattr(sys, "argv", ["headwater", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == code, err
        assert "Traceback" not in err
        return out if code == 0 else err

    return run


def test_groups_are_listed_and_shown(log: Log, headwater: Command) -> None:
    """With members, idle ones too, offsets and lag; as a table and as JSON."""
    with log.consumer("t", group="g"), log.consumer("t", group="g"), log.consumer("t", group="g"):
        shown = json.loads(headwater("groups", "show", "g", "--json"))
        assert "idle" in headwater("groups", "show", "g")
    assert sorted(member["idle"] for member in shown["members"]) == [False, True, True]
    assert {member["pid"] for member in shown["members"]} == {os.getpid()}
    assert (shown["lag_events"], len(shown["partitions"])) == (20, 2)
    assert sum(part["end"] - part["committed"] for part in shown["partitions"]) == 20
    assert "g" in headwater("groups", "list")
    [listed] = json.loads(headwater("groups", "list", "--json"))
    assert (listed["group"], listed["members"]) == ("g", [])
    assert "group_not_found" in headwater("groups", "show", "nobody", code=1)


def test_a_group_is_reset(log: Log, headwater: Command) -> None:
    """With a yes, to any place, and not while a member lives."""
    assert "--yes" in headwater("groups", "reset", "g", "--to", "earliest", code=1)
    with log.consumer("t", group="g"):
        assert "group_in_use" in headwater("groups", "reset", "g", "--to", "earliest", "--yes", code=1)
    for place, lag in (("earliest", 40), ("latest", 0), ("2026-01-31T12:00:30Z", 10), ("3", 34), ("2 weeks", None)):
        assert "t/1:" in headwater("groups", "reset", "g", "--to", place, "--yes")
        assert lag is None or log.group("g").lag.events == lag, place


def test_a_group_that_cannot_be_read_is_moved_and_deleted_and_hides_no_other(log: Log, headwater: Command) -> None:
    """It is named, the others are shown."""
    with log.consumer("t", group="whole") as consumer:
        consumer.poll()
    slot = Path(log.url.removeprefix("file://")) / "groups" / "g" / "offsets" / "t" / "1"
    os.truncate(slot, 5)
    assert str(slot) in headwater("groups", "list", code=1)
    assert "t/1: - -> 0" in headwater("groups", "reset", "g", "--to", "earliest", "--yes")
    assert '"group": "whole"' in headwater("groups", "list", "--json")
    os.truncate(slot, 5)
    assert "unreadable" in headwater("groups", "delete", "g", "--yes")
    assert log.groups() == ["whole"]


def test_lag_in_a_pipe(log: Log, headwater: Command) -> None:
    """One look, unless it is to follow; JSON has a line for each group."""
    log.consumer("t", group="other").close()
    lines = [json.loads(line) for line in headwater("lag", "--json").splitlines()]
    assert {line["group"]: line["lag_events"] for line in lines} == {"g": 20, "other": 40}
    append(log, "t", range(40, 45))
    [line] = headwater("lag", "g", "--json").splitlines()
    assert json.loads(line)["lag_events"] == 25
    assert json.loads(line)["lag_s"] > 0
    assert "committed" in headwater("lag")
    assert "group_not_found" in headwater("lag", "nobody", code=1)


def test_lag_goes_on_when_asked(log: Log) -> None:
    """Line after line, until it is ended."""
    command = [
        sys.executable,
        "-m",
        "headwater.cli.main",
        "--log",
        log.url,
        "lag",
        "g",
        "--json",
        "-f",
        "--every",
        "0.05",
    ]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert json.loads(running.stdout.readline())["lag_events"] == 20
        append(log, "t", range(40, 45))
        while json.loads(running.stdout.readline())["lag_events"] != 25:
            pass
        running.terminate()
