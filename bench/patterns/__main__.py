"""Row patterns: `python -m bench.patterns` writes `bench/results/patterns.json`.

The same bids by all sides: ours from a log in a folder to a sink that does nothing, Flink SQL over Parquet files to a sink that drops
its rows, Esper over objects in memory. Rates are bids by the time that the batches need, or Flink's job, or Esper's thread. Each side
first runs over a tenth of the bids. `--only rising` runs one pattern, `--quick` shrinks everything, `--side peer` needs no Spark.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial

from bench.harness import Bench, Figure, Options, Sample, Target, main, measure_sides
from bench.patterns.bids import Bids
from bench.patterns.esper_side import PEER as ESPER
from bench.patterns.flink_side import PEER as FLINK
from bench.patterns.queries import AVERAGE, RISING, Query, rules, small_large
from bench.patterns.rig import PatternRig

BIDS, BIDS_QUICK = 5_000_000, 200_000
RULE_BIDS, RULE_BIDS_QUICK = 200_000, 5_000
FEW = 10  # a tenth
RUNS = 3
TOPIC_KEY, OTHER_KEY = "auction", "bidder"

Rate = Callable[[Bids], float]


def pattern(
    rig: PatternRig, query: Query, options: Options, *, name: str, key: str, targets: Mapping[str, Target]
) -> list[Figure]:
    """One pattern, by ours and by the peers that have a target."""
    sides: dict[str, Rate] = {}
    if options.wants("ours"):
        sides["ours"] = partial(rig.ours, query, key)
    if options.wants("peer") and FLINK in targets and rig.flink:
        sides[FLINK] = partial(rig.by_flink, query, key)
    if options.wants("peer") and ESPER in targets and rig.esper:
        sides[ESPER] = partial(rig.by_esper, query, key)
    bids = rig.bids(BIDS_QUICK if options.quick else BIDS)
    if FLINK in sides:
        rig.check_flink(query, key, bids)
    what = f"{query.what}, by {key}"
    return _figures(name, what, _measured(options, sides, bids, rig.bids(bids.count // FEW)), targets)


def many_rules(rig: PatternRig, options: Options) -> list[Figure]:
    """All rules at once, beside a statement of Esper for each."""
    sides: dict[str, Rate] = {}
    given = rules()
    if options.wants("ours"):
        sides["ours"] = partial(rig.ours_by_rules, given, TOPIC_KEY)
    if options.wants("peer") and rig.esper:
        sides[ESPER] = partial(rig.by_esper_rules, given, TOPIC_KEY)
    bids = rig.bids(RULE_BIDS_QUICK if options.quick else RULE_BIDS)
    what = (
        f"{len(given):,} rules over the same stream, each a number of small prices and then a large one, by {TOPIC_KEY}"
    )
    targets = {ESPER: Target(">=", 1)}
    return _figures("rules", what, _measured(options, sides, bids, rig.bids(bids.count // FEW)), targets)


def _measured(options: Options, sides: Mapping[str, Rate], bids: Bids, few: Bids) -> dict[str, Sample]:
    for rate in sides.values():
        rate(few)
    found = (
        measure_sides(options, {side: lambda rate=rate: (rate(bids),) for side, rate in sides.items()}) if sides else {}
    )
    return {side: samples[0] for side, samples in found.items()}


def _figures(name: str, what: str, samples: Mapping[str, Sample], targets: Mapping[str, Target]) -> list[Figure]:
    """A row for each peer."""
    return [
        Figure(
            f"{name}_{peer.split()[0].lower()}", what, "bids/s", (samples.get("ours"), samples.get(peer)), peer, target
        )
        for peer, target in targets.items()
        if peer in samples or "ours" in samples
    ]


def benches(rig: PatternRig) -> dict[str, Bench]:
    """The figures by their names."""
    by_key = {FLINK: Target(">=", 10), ESPER: Target(">=", 0.4)}
    by_other_key, of_average = {FLINK: Target(">=", 3)}, {FLINK: Target(">=", 2)}
    spelled = {
        "rising": (RISING, TOPIC_KEY, by_key),
        "small_large": (small_large(), TOPIC_KEY, by_key),
        "rising_shuffled": (RISING, OTHER_KEY, by_other_key),
        "small_large_shuffled": (small_large(), OTHER_KEY, by_other_key),
        "average": (AVERAGE, TOPIC_KEY, of_average),
    }
    found: dict[str, Bench] = {
        name: partial(pattern, rig, query, name=name, key=key, targets=targets)
        for name, (query, key, targets) in spelled.items()
    }
    return found | {"rules": partial(many_rules, rig)}


if __name__ == "__main__":
    with PatternRig() as rig:
        sys.exit(main("patterns", benches(rig), runs=RUNS))
