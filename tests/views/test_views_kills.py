"""Maintaining processes and subscribers are killed, at each step and at random: nothing is lost, nothing comes twice."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from headwater.log.log import open_log
from headwater.model.points import points_of
from headwater.testing.contracts.views import Feeder, by_page, counts, pages
from headwater.testing.crash.points import kill_at
from headwater.testing.servers.postgres import PostgresServer
from headwater.views.catalog import plan_view
from headwater.views.store_url import open_view_store
from headwater.views.view import View, open_view
from tests.rigs.app import view_storm
from tests.rigs.children import Child
from tests.views.test_views_stores import new_schema

POINTS = points_of("views:")
SWAPS = {"views: swapped in the log", "views: swapped in the store"}
BEFORE_SWAPS = {"views: old generation fenced", "views: difference known"}
"""Until there nothing is decided; `test_views_swap` strikes there."""


@pytest.mark.slow
@pytest.mark.parametrize("point", [point for point in POINTS if point not in SWAPS | BEFORE_SWAPS])
def test_a_maintainer_killed_at_a_step_is_gone_on_with(tmp_path: Path, point: str) -> None:
    """Killed when it comes by there, and a later time; the next process ends what it began."""
    url = f"sqlite:///{tmp_path}/views.db"
    seed = len(point)
    for die_on in (1, 2):
        view_storm.run(tmp_path / "log", url, seed, die_at=point, die_on=die_on)
    assert view_storm.run(tmp_path / "log", url, seed)
    view_storm.check(tmp_path / "log", url, seed)


@pytest.mark.slow
@pytest.mark.parametrize("point", sorted(SWAPS))
def test_a_swap_killed_at_a_step_is_ended_by_the_next(tmp_path: Path, point: str) -> None:
    """The log has decided: whoever comes next lets the store follow, and subscribers see the new generation."""
    url = f"sqlite:///{tmp_path}/views.db"

    def swap_and_die() -> None:
        with open_log(tmp_path / "log") as log:
            store = open_view_store(url)
            Feeder(log, store, pages()).give(counts(a=1))
            new = Feeder(log, store, plan_view(log, pages(code="other")).definition)
            new.give(counts(b=2))
            # The old generation's maintainer, which is made to fence it, comes by the store first.
            kill_at(point, 2 if point == "views: swapped in the store" else 1)
            new.maintainer.swap()

    with pytest.raises(AssertionError, match="SIGKILL"):
        Child(swap_and_die).result()
    with open_log(tmp_path / "log") as log:
        store = open_view_store(url)
        view = View(store, "per_page", log=log)
        with view.subscribe() as feed:
            assert [change.new["page"] for change in feed.poll() if change.new] == ["b"]
        plan = plan_view(log, pages(code="other"))
        assert (plan.rebuild, plan.definition.generation) == (False, 2)
        Feeder(log, store, plan.definition)
        assert by_page(view) == {"b": 2}
        assert [stored.definition.generation for stored in store.stored()] == [2]
        store.close()


def storm(folder: Path, url: str, seed: int, *, kills: int, forget: bool) -> None:
    """Kills at random moments; with `forget` the store is deleted once in a while."""
    chance = random.Random(seed)
    for _ in range(kills):
        view_storm.run(folder / "log", url, seed, kill_after_s=chance.random() * 0.4)
        if forget and chance.random() < 0.3:
            for file in folder.glob("views.db*"):
                file.unlink()
    assert view_storm.run(folder / "log", url, seed)
    view_storm.check(folder / "log", url, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_storm_of_kills(tmp_path: Path, seed: int) -> None:
    """SQLite, whose file is deleted now and then."""
    storm(tmp_path, f"sqlite:///{tmp_path}/views.db", seed, kills=8, forget=True)


@pytest.mark.service("postgres")
def test_a_storm_of_kills_on_postgres(tmp_path: Path, postgres: PostgresServer) -> None:
    """And at the step between log and store."""
    url = new_schema(postgres)
    view_storm.run(tmp_path / "log", url, 7, die_at="views: changes appended", die_on=3)
    storm(tmp_path, url, 7, kills=5, forget=False)


@pytest.mark.bench
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_storms_of_kills(tmp_path: Path, seed: int) -> None:
    """The long tier."""
    storm(tmp_path, f"sqlite:///{tmp_path}/views.db", seed, kills=12, forget=True)


def follow_and_die(folder: Path, url: str, token: str, stop: int, told: Path) -> None:
    """A subscriber in a process of its own, which dies after so many changes."""
    with told.open("a") as lines, open_view(url, "storm", log=folder) as view, view.subscribe(token or None) as feed:
        for number, change in enumerate(feed, 1):
            rows = [row and (row["k"], row["n"]) for row in (change.old, change.new)]
            print(repr((change.kind, *rows, change.token)), file=lines, flush=True)
            if number == stop:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_subscriber_goes_on_exactly_by_its_token(tmp_path: Path) -> None:
    """Whatever it was told before it died, it is told the rest and nothing twice; in a process of its own, as are others."""
    url = f"sqlite:///{tmp_path}/views.db"
    assert not view_storm.run(tmp_path / "log", url, 5, die_at="views: changes appended", die_on=4)
    rows: dict[str, int] = {}
    token, changes = "", 0
    for turn, stop in enumerate((30, 9, 5, 200)):
        if turn == 1:
            assert view_storm.run(tmp_path / "log", url, 5)
        told = _follow(tmp_path / "log", url, token, stop if turn else None)
        for kind, old, new, place in told:
            if kind == "added" and place is None:
                assert not token
            if old is not None:
                assert rows.pop(old[0]) == old[1]
                changes += 1
            if new is not None:
                assert rows.setdefault(new[0], new[1]) == new[1]
            token = place or token
    assert rows == view_storm.oracle(5, view_storm.BATCHES)
    assert changes


def _follow(folder: Path, url: str, token: str, stop: int | None) -> list[tuple]:
    """What a follower in a process of its own is told before it dies: after so many changes, or when there are no more."""
    with open_log(folder) as log:
        store = open_view_store(url)
        with View(store, "storm", log=log).subscribe(token or None) as feed:
            ahead = 0
            while found := feed.poll(timeout_s=0):
                ahead += len(found)
        store.close()
    stop = ahead if stop is None else min(stop, ahead)
    if not stop:
        return []
    told = folder.parent / f"told {len(list(folder.parent.glob('told *')))}"
    child = Child(lambda: follow_and_die(folder, url, token, stop, told))
    with pytest.raises(AssertionError, match="SIGKILL"):
        child.result()
    return [eval(line) for line in told.read_text().splitlines()]
