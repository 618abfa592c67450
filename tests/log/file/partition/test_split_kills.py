"""Partitions added to a topic while its writers, its readers and whoever adds them are killed: real processes, and an oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headwater.testing.crash.points import split_points
from tests.rigs.log.split_storm import SplitStorm
from tests.rigs.memory_folders import memory_folder

CI_ROUNDS = range(3)
BENCH_ROUNDS = range(100, 160)
STRIKES = 8
REACHED_ONCE = ("split: fenced", "split: written")


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


def run_storm(folder: Path, seed: int, *, strikes: int, points: Sequence[str] = (), nth: int = 1) -> SplitStorm:
    print(f"seed {seed}")
    storm = SplitStorm(folder, seed, points=points, nth=nth)
    try:
        storm.run(strikes=strikes)
        storm.check()
        print(f"{len(storm.read)} events read, {dict(storm.strikes)}")
    finally:
        storm.log.close()
    return storm


@pytest.mark.slow
@pytest.mark.covers("Kinesis", backends=["file"])
@pytest.mark.parametrize("seed", CI_ROUNDS)
def test_a_split_survives_a_storm(folder: Path, seed: int) -> None:
    """Writers of every kind, consumers and whoever splits are killed at random; no key loses its order, no event is lost or doubled."""
    assert run_storm(folder, seed, strikes=STRIKES).read


@pytest.mark.bench
@pytest.mark.parametrize("seed", BENCH_ROUNDS)
def test_a_split_survives_many_storms(folder: Path, seed: int) -> None:
    """The same, sixty times."""
    assert run_storm(folder, seed, strikes=STRIKES).read


@pytest.mark.slow
@pytest.mark.covers("Kinesis", backends=["file"])
@pytest.mark.parametrize("nth", [1, 2])
def test_whoever_splits_dies_at_every_point(folder: Path, nth: int) -> None:
    """Between any two steps: it has happened or it has not, and others go on at once."""
    points = [point for point in split_points() if nth == 1 or point not in REACHED_ONCE]
    storm = run_storm(folder, nth, strikes=0, points=points, nth=nth)
    assert storm.strikes["splitter died"] == len(points), "a point is not reached"
