"""The oracles of storms and rounds find what is wrong: each is shown a true history and the same one with a mistake planted in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.log.group_storm import Storm
from tests.rigs.log.queue_rounds import Round

Line = dict[str, Any]


class ToldStorm(Storm):
    """A storm whose history is made up: two partitions of ten events, the first given from one member to another."""

    def __init__(self) -> None:
        self.mode, self.sent = "transactions", 20
        self.made = list(range(20))
        self.told: list[Line] = [
            {"partition": 0, "generation": 1, "member": "a", "first": 0, "end": 4},
            {"partition": 0, "generation": 1, "member": "a", "committed": 4},
            {"partition": 0, "generation": 1, "member": "a", "first": 4, "end": 7},
            {"partition": 0, "generation": 2, "member": "b", "first": 4, "end": 10},
            {"partition": 0, "generation": 2, "member": "b", "committed": 10},
            {"partition": 1, "generation": 1, "member": "b", "first": 0, "end": 10},
            {"partition": 1, "generation": 1, "member": "b", "committed": 10},
        ]

    def lines(self) -> list[Line]:
        return self.told

    def stored(self) -> dict[int, list[int]]:
        return {0: list(range(10)), 1: list(range(10))}

    def output(self) -> list[int]:
        return self.made


def test_a_true_history_of_a_group_passes() -> None:
    """Events that were not committed come again to the next owner, and that is all."""
    ToldStorm().check()


GROUP_MISTAKES: dict[str, tuple[Callable[[ToldStorm], None], str]] = {
    "the next owner begins behind what was handed out": (lambda storm: storm.told[3].update(first=8), "a new owner"),
    "what was committed comes again": (lambda storm: storm.told[3].update(first=2), "a new owner"),
    "an owner skips events": (lambda storm: storm.told[2].update(first=5), "skipped events"),
    "nobody reads the last event": (lambda storm: storm.told[5].update(end=9), "skipped the last"),
    "two owners in one generation": (lambda storm: storm.told[2].update(member="c"), "two owners"),
    "an event that is not stored is handed out": (lambda storm: storm.told[5].update(end=12), "nothing is stored"),
    "a result is there twice": (lambda storm: storm.made.append(7), "exactly once"),
    "a result is missing": (lambda storm: storm.made.remove(7), "exactly once"),
    "an event is lost": (lambda storm: setattr(storm, "sent", 21), "others are stored"),
    "a member failed": (lambda storm: storm.told.append({"error": "OSError()"}), "workers failed"),
}


@pytest.mark.parametrize("mistake", GROUP_MISTAKES)
def test_a_mistake_in_a_groups_history_is_found(mistake: str) -> None:
    """Each of the promises that storms are checked for."""
    storm = ToldStorm()
    plant, says = GROUP_MISTAKES[mistake]
    plant(storm)
    with pytest.raises(AssertionError, match=says):
        storm.check()


@pytest.fixture(scope="module")
def fought(tmp_path_factory: pytest.TempPathFactory) -> Round:
    """A round of a keyed queue that really took place."""
    fight = Round(tmp_path_factory.mktemp("round"), seed=1, phase_s=0.1)
    fight.run()
    fight.check()
    return fight


def _plain(lines: list[Line]) -> Line:
    """The last line of an event that one worker leased once and acknowledged, and so did nobody else."""
    places = [line["place"] for line in lines]
    return next(line for line in lines if line["what"] == "acked" and places.count(line["place"]) == 3)


def _lose(lines: list[Line]) -> None:
    lost = _plain(lines)["place"]
    lines[:] = [line for line in lines if line["place"] != lost or line["what"] == "lease"]


def _acknowledge_twice(lines: list[Line]) -> None:
    lines.append(_plain(lines) | {"worker": "other"})


def _deliver_when_done(lines: list[Line]) -> None:
    done = _plain(lines)
    later = done["at"] + 1.0
    lines.append(
        {"what": "lease", "place": done["place"], "worker": "other", "at": later, "begun": later, "at_us": later}
        | {"deliveries": 2}
    )


def _lease_to_two(lines: list[Line]) -> None:
    place = _plain(lines)["place"]
    lease = next(line for line in lines if line["what"] == "lease" and line["place"] == place)
    settling = next(line for line in lines if line["what"] == "acking" and line["place"] == place)
    lease["begun"] = lease["at"] = lease["at_us"] = settling["at"] - 0.01
    again = {"begun": lease["begun"] + 0.001, "at_us": lease["at_us"] + 0.001, "until": lease["at_us"] + 0.2}
    lines.append(lease | again | {"worker": "other", "deliveries": 2})


def _count_wrongly(lines: list[Line]) -> None:
    place = _plain(lines)["place"]
    next(line for line in lines if line["what"] == "lease" and line["place"] == place)["deliveries"] = 9


def _deliver_early(lines: list[Line]) -> None:
    for line in lines:
        if line["what"] == "lease":
            line["at"] -= 60.0


QUEUE_MISTAKES: dict[str, tuple[Callable[[list[Line]], None], str]] = {
    "an event is lost": (_lose, "is lost"),
    "an event is acknowledged twice": (_acknowledge_twice, "acknowledged twice"),
    "an event that is done comes again": (_deliver_when_done, "came again"),
    "two workers have one event": (_lease_to_two, "two live leases"),
    "deliveries are counted wrongly": (_count_wrongly, "deliveries"),
    "a scheduled event comes early": (_deliver_early, "came before"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", QUEUE_MISTAKES)
def test_a_mistake_in_a_queues_history_is_found(fought: Round, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    """Each of the promises that rounds are checked for, in the accounts of real workers."""
    lines = [
        json.loads(raw) | {"worker": file.name}
        for file in sorted(Path(fought.folder).parent.joinpath("accounts").iterdir())
        for raw in file.read_bytes().splitlines()
    ]
    plant, says = QUEUE_MISTAKES[mistake]
    plant(lines)
    monkeypatch.setattr(fought, "_lines", lambda: lines)
    with pytest.raises(AssertionError, match=says):
        fought.check()
