"""The automaton of a row pattern: for each place in the pattern, which places may come next, in the order of preference.

A **position** is a place in the pattern where one row is read: an occurrence of a variable. A search is at a position when the next row
must satisfy its variable. `follow` lists what may come after it: other positions, `accept` (the match is complete), `at_end` (it
is complete if the partition has no further row) or `at_horizon` (it is complete when its time is over, after ABSENT at the end of the
pattern). Nothing after `accept` in a list is ever chosen, so lists end with it.

An iteration of a repetition beyond its lower bound never matches zero rows: that keeps `(A*)*` finite. PERMUTE stands for a choice between
all orders of its parts. Where each part can match in one way only, such as a variable, it has one position for each set of parts
that came before, not one for each order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import permutations
from typing import NamedTuple

from headwater.model.errors import InvalidInput
from headwater.processing.patterns import tree

POSITIONS_MAX = 30_000
EDGES_MAX = 300_000
"""The size of an automaton: more positions or more pairs of neighbours are refused."""

ABSENT = "!"
"""Before the name of a variable: a row that does not satisfy its condition."""


class Automaton(NamedTuple):
    """A pattern that is ready to be searched for. Targets are positions, or `accept`, `at_end` or `at_horizon`."""

    variables: tuple[str, ...]
    position: tuple[int, ...]
    """For each position the number of its variable."""
    is_hidden: tuple[bool, ...]
    """Whether its row is left out of the output."""
    follow: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    """Where a match begins."""
    first_at_begin: tuple[int, ...]
    """Where it begins at the first row of a partition."""

    @property
    def accept(self) -> int:
        """The target that completes a match."""
        return len(self.position)

    @property
    def at_end(self) -> int:
        """The target that completes a match at the end of a partition."""
        return len(self.position) + 1

    @property
    def at_horizon(self) -> int:
        """The target that completes a match when its time is over."""
        return len(self.position) + 2

    @property
    def waits(self) -> bool:
        """Whether a match can be complete only when its time is over."""
        return any(self.at_horizon in each for each in (*self.follow, self.first))

    def allowing(self, allows: Callable[[str], bool]) -> set[int]:
        """The positions whose variables a function allows."""
        return {at for at, number in enumerate(self.position) if allows(self.variables[number])}

    def completes(self, starts: Iterable[int], through: set[int]) -> bool:
        """Whether a match can be completed from some targets, through these positions only."""
        seen, waiting = set[int](), list(starts)
        while waiting:
            target = waiting.pop()
            if target >= self.accept:
                return True
            if target in through and target not in seen:
                seen.add(target)
                waiting += self.follow[target]
        return False

    def depth(self) -> dict[str, int]:
        """For each variable the least number of rows that a match has before it."""
        found, layer, seen, rows = dict[str, int](), {*self.first, *self.first_at_begin}, set[int](), 0
        while layer:
            layer = {target for target in layer if target < self.accept} - seen
            for target in layer:
                found.setdefault(self.variables[self.position[target]], rows)
            seen |= layer
            layer, rows = {after for target in layer for after in self.follow[target]}, rows + 1
        return found


def automaton_of(part: tree.Part) -> Automaton:
    """The automaton of a pattern."""
    return _Builder().automaton(part)


class _Node(NamedTuple):
    """A step of the construction: a row to read, or something on the way between rows."""

    kind: str
    to: tuple[int, ...]
    variable: str = ""
    is_hidden: bool = False
    loop: int = -1


class _Builder:
    """Builds the steps from the end of the pattern to its begin: each method takes the step that comes after, and gives the first."""

    def __init__(self) -> None:
        self._nodes = [_Node("accept", ())]
        self._loops = self._rows = 0

    def automaton(self, part: tree.Part) -> Automaton:
        """The whole."""
        begin = self._built(part, 0, is_hidden=False)
        places = [number for number, node in enumerate(self._nodes) if node.kind == "row"]
        numbers = {place: number for number, place in enumerate(places)}
        names = tuple(dict.fromkeys(self._nodes[place].variable for place in places))
        follow, edges = list[tuple[int, ...]](), 0
        for place in places:
            follow.append(self._targets(self._nodes[place].to[0], numbers, is_begin=False))
            edges += len(follow[-1])
            if edges > EDGES_MAX:
                raise _too_large()
        return Automaton(
            names, tuple(names.index(self._nodes[place].variable) for place in places),
            tuple(self._nodes[place].is_hidden for place in places), tuple(follow),
            self._targets(begin, numbers, is_begin=False), self._targets(begin, numbers, is_begin=True),
        )  # fmt: skip

    def _targets(self, begin: int, numbers: dict[int, int], *, is_begin: bool) -> tuple[int, ...]:
        """What can be reached without reading a row, in order. `fresh` are the loops whose iteration has read no row."""
        found, seen = dict[int, None](), set[tuple[int, frozenset[int], bool]]()
        waiting = [(begin, frozenset[int](), False)]
        while waiting:
            state = waiting.pop()
            if state in seen:
                continue
            seen.add(state)
            if len(seen) > EDGES_MAX:
                raise _too_large()
            (at, fresh, is_end), node = state, self._nodes[state[0]]
            if node.kind == "accept" and not is_end:
                found[len(numbers)] = None
                break
            if node.kind == "accept":
                found[len(numbers) + 1] = None
            elif node.kind == "horizon":
                found[len(numbers) + 2] = None
            elif node.kind == "row" and not is_end:
                found[numbers[at]] = None
            elif node.kind == "split":
                waiting += [(to, fresh, is_end) for to in reversed(node.to)]
            elif node.kind == "mark":
                waiting.append((node.to[0], fresh | {node.loop}, is_end))
            elif (node.kind == "check" and node.loop not in fresh) or (node.kind == "begin" and is_begin):
                waiting.append((node.to[0], fresh, is_end))
            elif node.kind == "end":
                waiting.append((node.to[0], fresh, True))
        return tuple(found)

    def _add(self, node: _Node) -> int:
        self._rows += node.kind == "row"
        if self._rows > POSITIONS_MAX or len(self._nodes) > 8 * POSITIONS_MAX:
            raise _too_large()
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _built(self, part: tree.Part, after: int, *, is_hidden: bool) -> int:
        if isinstance(part, tree.Variable):
            return self._add(_Node("row", (after,), part.name, is_hidden))
        if isinstance(part, tree.Empty):
            return after
        if isinstance(part, tree.Anchor):
            return self._add(_Node(part.at, (after,)))
        if isinstance(part, tree.Sequence):
            for each in reversed(part.parts):
                after = self._built(each, after, is_hidden=is_hidden)
            return after
        if isinstance(part, tree.Choice):
            return self._add(
                _Node("split", tuple(self._built(each, after, is_hidden=is_hidden) for each in part.parts))
            )
        if isinstance(part, tree.Repetition):
            return self._repetition(part, after, is_hidden=is_hidden)
        if isinstance(part, tree.Permutation):
            return self._permutation(part, after, is_hidden=is_hidden)
        if isinstance(part, tree.Exclusion):
            return self._built(part.part, after, is_hidden=True)
        return self._absence(part, after)

    def _repetition(self, part: tree.Repetition, after: int, *, is_hidden: bool) -> int:
        if part.most is None:
            loop = self._add(_Node("split", ()))
            body = self._iteration(part.part, loop, is_hidden=is_hidden)
            self._nodes[loop] = _Node("split", (body, after) if part.is_greedy else (after, body))
            begin = loop
        else:
            begin = after
            for _ in range(part.most - part.least):
                body = self._iteration(part.part, begin, is_hidden=is_hidden)
                begin = self._add(_Node("split", (body, after) if part.is_greedy else (after, body)))
        for _ in range(part.least):
            begin = self._built(part.part, begin, is_hidden=is_hidden)
        return begin

    def _iteration(self, part: tree.Part, after: int, *, is_hidden: bool) -> int:
        """One iteration that reads at least a row."""
        self._loops += 1
        loop = self._loops
        check = self._add(_Node("check", (after,), loop=loop))
        return self._add(_Node("mark", (self._built(part, check, is_hidden=is_hidden),), loop=loop))

    def _permutation(self, part: tree.Permutation, after: int, *, is_hidden: bool) -> int:
        """One step for each set of parts that are still to come; or all orders, which are preferred by more than the next part."""
        if not all(map(_has_one_way, part.parts)):
            orders = (tree.Sequence(order) for order in permutations(part.parts))
            ways = [self._built(order, after, is_hidden=is_hidden) for order in orders]
            return self._add(_Node("split", tuple(ways)))
        count, begin = len(part.parts), {0: after}
        for rest in range(1, 1 << count):
            ways = [
                self._built(part.parts[number], begin[rest & ~(1 << number)], is_hidden=is_hidden)
                for number in range(count)
                if rest & (1 << number)
            ]
            begin[rest] = self._add(_Node("split", tuple(ways)))
        return begin[(1 << count) - 1]

    def _absence(self, part: tree.Absence, after: int) -> int:
        """Rows that are not of the variable: as few as possible before another part, and all at the end of the pattern."""
        loop = self._add(_Node("split", ()))
        row = self._add(_Node("row", (loop,), ABSENT + part.variable.name, is_hidden=True))
        is_last = self._nodes[after].kind == "accept"
        ways = (row, self._add(_Node("horizon", ()))) if is_last else (after, row)
        self._nodes[loop] = _Node("split", ways)
        return loop


def _has_one_way(part: tree.Part) -> bool:
    """Whether a part matches as the same variables always."""
    if isinstance(part, (tree.Sequence, tree.Permutation)):
        return isinstance(part, tree.Sequence) and all(map(_has_one_way, part.parts))
    if isinstance(part, tree.Exclusion):
        return _has_one_way(part.part)
    if isinstance(part, tree.Repetition):
        return part.least == part.most and _has_one_way(part.part)
    return isinstance(part, (tree.Variable, tree.Anchor, tree.Empty))


def _too_large() -> InvalidInput:
    return InvalidInput(
        f"The pattern has more than {POSITIONS_MAX:,} positions or {EDGES_MAX:,} steps between them.",
        advice="Use smaller numbers in its quantifiers, or fewer parts in PERMUTE.",
    )
