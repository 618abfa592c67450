"""A row pattern as a tree: what stands in PATTERN, part by part.

Part
├── Variable       one row that satisfies the variable's condition
├── Empty          no row: ()
├── Anchor         the begin or the end of the partition: ^ $
├── Sequence       parts one after the other: A B
├── Choice         the first part that leads to a match: A | B
├── Repetition     a part several times: A* A+? A{2,5}
├── Permutation    parts in any order: PERMUTE(A, B)
├── Exclusion      rows that belong to the match and not to its output: {- A -}
└── Absence        rows that do not satisfy the variable's condition, any number: ABSENT(A)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

Part: TypeAlias = "Variable | Empty | Anchor | Sequence | Choice | Repetition | Permutation | Exclusion | Absence"


class Variable(NamedTuple):
    """One row; `place` is where the name stands in the text."""

    name: str
    place: int = 0


class Empty(NamedTuple):
    """No row."""


class Anchor(NamedTuple):
    """The begin or the end of the partition."""

    at: Literal["begin", "end"]


class Sequence(NamedTuple):
    """Parts one after the other."""

    parts: tuple[Part, ...]


class Choice(NamedTuple):
    """Parts of which the earlier are preferred."""

    parts: tuple[Part, ...]


class Repetition(NamedTuple):
    """A part from `least` to `most` times, without bound where that is None; greedy repetitions prefer more."""

    part: Part
    least: int
    most: int | None
    is_greedy: bool = True


class Permutation(NamedTuple):
    """Parts in any order; orders that are first in the dictionary of their places are preferred."""

    parts: tuple[Part, ...]


class Exclusion(NamedTuple):
    """Rows that are matched but not given."""

    part: Part


class Absence(NamedTuple):
    """Rows, any number, of which none satisfies the variable's condition."""

    variable: Variable


def variables(part: Part) -> Iterator[Variable]:
    """All variables of a part, in the order of the text."""
    if isinstance(part, Variable):
        yield part
    elif isinstance(part, Absence):
        yield part.variable
    elif isinstance(part, (Sequence, Choice, Permutation)):
        for each in part.parts:
            yield from variables(each)
    elif isinstance(part, (Repetition, Exclusion)):
        yield from variables(part.part)
