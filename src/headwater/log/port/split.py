"""A split: a topic gets more partitions while others write to it and read it, and every key keeps its order.

Partitions are added by multiples only. With `n` before and `k * n` after, the keys of partition `p` go to `p`, `p + n`,
`p + 2n` …, so each new partition has one parent. Where the parent ended at that moment is its fence: what the keys of the new
partition had before lies in the parent (or in its parents) below the fence, and nothing of them behind it. The topic's file
keeps the number before and the fences of each split; how many there were is the topic's generation.

Invariants:
- a batch that was placed by the number of partitions from before is refused (`Repartitioned`), and whoever placed it places it
  again. A batch that is stored already keeps its place, so a retry across a split stores nothing twice;
- who reads a partition before its ancestors are read up to their fences sees keys out of order: `is_held` says when to wait.

`headwater.log.file.split` has the steps of a split in a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from headwater.log.port.topic import Split, Topic, check_topic
from headwater.model.errors import Diverged, InvalidInput


def check_split(topic: Topic, partitions: object) -> None:
    """Refuses a number of partitions by which keys would not keep their order."""
    if not isinstance(partitions, int) or partitions < topic.partitions or partitions % topic.partitions:
        raise InvalidInput(
            f"Topic {topic.name!r} has {topic.partitions} partitions and cannot get {partitions!r}.",
            advice=f"Use a multiple, so that keys keep their order: {2 * topic.partitions}, {3 * topic.partitions}, …",
        )


def after_split(topic: Topic, partitions: int, fences: Sequence[int]) -> Topic:
    """The topic with more partitions, whose parents ended at the fences."""
    split = Split(topic.partitions, tuple(fences))
    return check_topic(msgspec.structs.replace(topic, partitions=partitions, splits=(*topic.splits, split)))


def is_held(ancestors: Sequence[tuple[int, int]], reached: Callable[[int], int]) -> bool:
    """Whether a partition has to wait: some ancestor was not read up to its fence, where `reached` says how far it was."""
    return any(reached(number) < fence for number, fence in ancestors)


def check_fences(topic: Topic, wanted: Sequence[int] | None, fences: Sequence[int]) -> None:
    """Refuses to split a copy where its log was not split; the caller holds what keeps the ends where they are."""
    if wanted is not None and list(wanted) != list(fences):
        raise Diverged(
            f"Topic {topic.name!r} was to be split at offsets {list(wanted)}, and its partitions end at {list(fences)}.",
            advice="Something else writes to the copy. Delete that topic there, and mirror into a log of its own.",
        )
