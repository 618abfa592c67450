"""Random row patterns, by seed: every construct, small enough for brute force."""

from __future__ import annotations

from random import Random

from tests.processing.patterns.brute_force import Part

NAMES = ("a", "b", "c", "d")


def random_part(random: Random, depth: int = 3, *, names: tuple[str, ...] = NAMES, anchors: bool = True) -> Part:
    """A random part of a pattern."""
    if depth == 0 or random.random() < 0.2:
        kind = random.random()
        if kind < 0.06:
            return ("empty",)
        if kind < 0.09 and anchors:
            return (random.choice(["begin", "end"]),)
        return ("var", random.choice(names))
    kind, parts = random.random(), [random_part(random, depth - 1, names=names, anchors=anchors) for _ in range(3)]
    if kind < 0.35:
        return ("seq", parts[: random.choice([2, 2, 3])])
    if kind < 0.5:
        return ("alt", parts[: random.choice([2, 2, 3])])
    if kind < 0.57:
        return ("perm", parts[: random.choice([2, 3])])
    if kind < 0.62:
        return ("out", parts[0])
    least, most = random.choice([(0, 1), (0, None), (1, None), (2, 2), (0, 2), (1, 3), (2, None)])
    part = parts[0]
    if part[0] in ("begin", "end"):
        part = ("var", random.choice(names))
    return ("rep", part, least, most, random.random() < 0.7)
