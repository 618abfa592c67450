"""The assignment of partitions to members: complete, balanced, and moved as little as can be."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headwater.log.port.assignment import Place, assign

MEMBERS = st.sets(st.sampled_from("abcdefgh"), min_size=1)
TOPICS = st.dictionaries(st.sampled_from(["t", "u", "v"]), st.integers(1, 9), min_size=1)


def places_of(topics: dict[str, int]) -> set[Place]:
    return {(topic, number) for topic, count in topics.items() for number in range(count)}


def least_moves(loads: list[int], homeless: int) -> int:
    """How many partitions must leave a living member: those above the greatest share that so many members may have."""
    total, members = sum(loads) + homeless, len(loads)
    share, larger = divmod(total, members)
    loads = sorted(loads, reverse=True)
    return sum(max(0, load - share - (rank < larger)) for rank, load in enumerate(loads))


@given(TOPICS, st.lists(MEMBERS, min_size=1, max_size=6))
def test_equal_members_share_evenly_and_little_moves(topics: dict[str, int], generations: list[set[str]]) -> None:
    """Every partition has one living member, the counts differ by one at most, and no move is needless."""
    before: dict[Place, str] = {}
    for members in generations:
        now = assign(dict.fromkeys(members, topics), before)
        assert now.keys() == places_of(topics)
        loads = Counter(dict.fromkeys(members, 0)) + Counter()
        loads.update(now.values())
        counts = [loads[member] for member in members]
        assert set(now.values()) <= members
        assert max(counts) - min(counts) <= 1
        kept = {place: member for place, member in before.items() if member in members}
        moved = sum(now[place] != member for place, member in kept.items())
        held = Counter(kept.values())
        assert moved == least_moves([held[member] for member in members], len(now) - len(kept))
        before = now


@given(st.dictionaries(st.sampled_from("abcdef"), TOPICS, min_size=1), st.randoms(use_true_random=False))
def test_members_get_only_what_they_subscribe_to(subscriptions: dict[str, dict[str, int]], random: object) -> None:
    """With different subscriptions too nobody could give a partition away and even the counts out."""
    first = assign(subscriptions, {})
    everything = {
        (topic, number)
        for topic in {topic for topics in subscriptions.values() for topic in topics}
        for number in range(max(topics.get(topic, 0) for topics in subscriptions.values()))
    }
    assert first.keys() == everything
    assert all(topic in subscriptions[member] for (topic, _), member in first.items())
    loads = Counter(first.values())
    for (topic, _), member in first.items():
        assert all(loads[member] - loads[other] <= 1 for other in subscriptions if topic in subscriptions[other])
    assert assign(dict(reversed(subscriptions.items())), first) == first


def test_nobody_gets_nothing() -> None:
    """Without members there is nothing to assign."""
    assert assign({}, {("t", 0): "gone"}) == {}


def test_a_new_member_takes_its_share_and_the_rest_stays() -> None:
    """Six partitions of two members, then of three: each old one gives one."""
    before = assign({"a": {"t": 6}, "b": {"t": 6}}, {})
    after = assign({"a": {"t": 6}, "b": {"t": 6}, "c": {"t": 6}}, before)
    assert sorted(Counter(after.values()).values()) == [2, 2, 2]
    assert sum(after[place] != before[place] for place in before) == 2
