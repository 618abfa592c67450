"""Saved searches: `python -m bench.searches` writes `bench/results/searches.json`.

The same documents and searches by both sides, analysis included: ours as a stage of an application from a log to a sink that does
nothing, Lucene Monitor in one thread. Both have the searches in memory before the clock starts. `--quick` shrinks everything, `--side peer`
needs no Spark.
"""

from __future__ import annotations

import sys
from functools import partial

from bench.harness import Bench, Figure, Options, Target, main, measure, measure_sides
from bench.searches.lucene_side import BATCH, PEER
from bench.searches.rig import SearchRig
from bench.searches.workload import DOCUMENTS

SEARCHES, SEARCHES_QUICK = 100_000, 5_000
MILLION, MILLION_QUICK = 1_000_000, 20_000
DOCUMENTS_QUICK = 2_000
COPIES = 5
"""Ours has the documents so many times: two seconds are mostly the start of a batch."""

ONE_BY_ONE_SHARE = 10
"""Lucene has so many times fewer documents when it takes them one at a time: a rate, and minutes are enough."""

ROUNDS, ROUNDS_QUICK = 60, 5
RUNS = 3


def rates(rig: SearchRig, options: Options) -> list[Figure]:
    """Documents in a CPU second, beside Lucene one at a time and in batches."""
    searches, documents = _sizes(options, SEARCHES, SEARCHES_QUICK)
    few = documents // ONE_BY_ONE_SHARE
    sides = {}
    if options.wants("peer") and rig.lucene:
        rig.check(searches, documents)
        rig.check(searches, few)
        sides["one"] = lambda: (few / rig.by_lucene(searches, few).cpu_s,)
        sides["batches"] = lambda: (documents / rig.by_lucene(searches, documents, batch=BATCH).cpu_s,)
    if options.wants("ours"):
        sides["ours"] = lambda: (COPIES * documents / rig.ours(searches, documents, copies=COPIES).cpu_s,)
    samples = {side: found[0] for side, found in measure_sides(options, sides).items()} if sides else {}
    ours, one, batches = (samples.get(side) for side in ("ours", "one", "batches"))
    what, unit = f"documents matched with {searches:,} searches, analysis included", "documents/CPU s"
    return [
        Figure("documents", what, unit, (ours, one), f"{PEER}, one at a time", Target(">=", 30)),
        Figure("documents_batches", what, unit, (ours, batches), f"{PEER}, {BATCH:,} at a time", Target(">=", 5)),
    ]


def million(rig: SearchRig, options: Options) -> list[Figure]:
    """Documents a second with ten times the searches, by the time of the batches."""
    searches, documents = _sizes(options, MILLION, MILLION_QUICK)
    has_peer = options.wants("peer") and rig.lucene is not None
    if not (has_peer or options.wants("ours")):
        return []
    if has_peer:
        rig.check(searches, documents)
    pair = measure(
        options,
        lambda: documents / rig.ours(searches, documents).seconds,
        (lambda: documents / rig.by_lucene(searches, documents, batch=BATCH).seconds) if has_peer else None,
    )
    what = f"documents matched with {searches:,} searches, analysis included, by the time of the batches"
    peer = f"{PEER}, {BATCH:,} at a time, one thread"
    return [Figure("million", what, "documents/s", pair, peer, Target(">=", 1_500, of="ours"))]


def changes(rig: SearchRig, options: Options) -> list[Figure]:
    """The slowest batch, while searches change."""
    if not options.wants("ours"):
        return []
    searches, _ = _sizes(options, MILLION, MILLION_QUICK)
    rounds = ROUNDS_QUICK if options.quick else ROUNDS
    pair = measure(options, lambda: rig.slowest_batch(searches, BATCH, rounds=rounds), better="lower")
    what = (
        f"the slowest batch of {BATCH:,} documents, with {searches:,} searches of which 1,000 change before each batch"
    )
    return [Figure("changes", what, "medians", pair, None, Target("<=", 2, of="ours"))]


def _sizes(options: Options, searches: int, searches_quick: int) -> tuple[int, int]:
    return (searches_quick, DOCUMENTS_QUICK) if options.quick else (searches, DOCUMENTS)


def benches(rig: SearchRig) -> dict[str, Bench]:
    """The figures by their names."""
    return {"rates": partial(rates, rig), "million": partial(million, rig), "changes": partial(changes, rig)}


if __name__ == "__main__":
    with SearchRig() as rig:
        sys.exit(main("searches", benches(rig), runs=RUNS))
