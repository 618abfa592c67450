"""The assignment: which member of a group reads which partition.

A pure function of the members' subscriptions and of the assignment before it, so it is the same whoever computes it.

Invariants:
- every partition goes to one member that subscribes to its topic, or to none where nobody does;
- no member could give a partition to another who subscribes to it and then have as many or more: with equal subscriptions
  the counts differ by one at most;
- a partition that need not move does not: with equal subscriptions the number of moves is the least there is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

Place = tuple[str, int]
"""A partition of a log: its topic's name and its number."""


def assign(subscriptions: Mapping[str, Mapping[str, int]], before: Mapping[Place, str]) -> dict[Place, str]:
    """The member of each place.

    `subscriptions` says for each member which topics it reads and how many partitions each has; `before` is the last
    assignment, in which members may stand who are gone.
    """
    members = sorted(subscriptions)
    counts: dict[str, int] = {}
    readers: dict[str, list[str]] = defaultdict(list)
    for member in members:
        for topic, partitions in subscriptions[member].items():
            counts[topic] = max(partitions, counts.get(topic, 0))
            readers[topic].append(member)
    held: dict[str, dict[str, list[int]]] = {member: defaultdict(list) for member in members}
    homeless = []
    for topic in sorted(counts):
        for number in range(counts[topic]):
            owner = before.get((topic, number))
            if owner in held and topic in subscriptions[owner]:
                held[owner][topic].append(number)
            else:
                homeless.append((topic, number))
    loads = {member: sum(map(len, topics.values())) for member, topics in held.items()}
    for topic, number in homeless:
        member = min(readers[topic], key=lambda name: (loads[name], name))
        held[member][topic].append(number)
        loads[member] += 1
    while (move := _best_move(held, loads, readers)) is not None:
        giver, taker, topic = move
        held[taker][topic].append(held[giver][topic].pop())
        loads[giver] -= 1
        loads[taker] += 1
    return {(topic, n): member for member, topics in held.items() for topic, numbers in topics.items() for n in numbers}


def _best_move(
    held: Mapping[str, Mapping[str, list[int]]], loads: Mapping[str, int], readers: Mapping[str, Collection[str]]
) -> tuple[str, str, str] | None:
    """From whom to whom a partition of which topic goes next: where the difference is greatest; None where all is even."""
    best: tuple[int, str, str, str] | None = None
    for giver in sorted(held):
        for topic, numbers in sorted(held[giver].items()):
            if not numbers:
                continue
            taker = min(readers[topic], key=lambda name: (loads[name], name))
            difference = loads[giver] - loads[taker]
            if difference > 1 and (best is None or difference > best[0]):
                best = (difference, giver, taker, topic)
    return best and best[1:]
