"""Draws figures: what `bench/results/<name>.svg` is made with whenever `<name>.json` is written.

A bar goes from "as good as the peer" to how many times better or worse ours is, on a logarithmic scale: to the right is better, whatever
the unit. A small line stands where the target is. Plain SVG without a library, so that a new run changes few lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

WIDTH, LEFT, RIGHT, ROW, TOP = 1080, 250, 330, 26, 58
GREEN, AMBER, GREY = "#2f7d5d", "#c4622d", "#8a94a0"
_LOWER_IS_BETTER = ("ms", "s", "MB")
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def draw(name: str, rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> str:
    """The picture of the rows that have a peer."""
    shown = [row for row in rows if row["ratio"]]
    goods = [good for row in shown for good in (_good(row, row["ratio"]), _target(row)) if good]
    low, high = min([0.5, *goods]) / 1.15, max([2.0, *goods]) * 1.15
    height = TOP + ROW * len(shown) + 44

    def x(good: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(good / low) / math.log(high / low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="17" fill="#1c2730">bench.{escape(name)}: ours beside the peer of each row</text>',
        f'<text x="16" y="45" fill="{GREY}">{escape(_described(machine))}</text>',
        *_scale(x, [tick for tick in _TICKS if low <= tick <= high], height),
        *(part for number, row in enumerate(shown) for part in _bar(row, TOP + ROW * number + 16, x)),
        *_legend(height),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _good(row: Mapping[str, Any], ratio: float) -> float:
    """How many times better than the peer: rates as they are, times and memory turned round."""
    is_lower = row["unit"] in _LOWER_IS_BETTER or (row["target"] or "").startswith("<=")
    return 1 / ratio if is_lower else ratio


def _target(row: Mapping[str, Any]) -> float | None:
    words = (row["target"] or "").split()
    return _good(row, float(words[1])) if len(words) == 3 and words[2] == "x" else None


def _scale(x: Any, ticks: Sequence[float], height: int) -> Iterator[str]:
    for tick in ticks:
        colour, at = ("#56616b" if tick == 1 else "#dfe4e8"), round(x(tick), 1)
        yield f'<line x1="{at}" y1="{TOP}" x2="{at}" y2="{height - 40}" stroke="{colour}"/>'
        yield f'<text x="{at}" y="{height - 26}" text-anchor="middle" font-size="11" fill="{GREY}">{tick:g} ×</text>'


def _bar(row: Mapping[str, Any], y: int, x: Any) -> Iterator[str]:
    good = _good(row, row["ratio"])
    colour = {True: GREEN, False: AMBER, None: GREY}[row["met"]]
    start, end = sorted((x(1), x(good)))
    yield f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end" fill="#1c2730">{escape(row["name"])}</text>'
    yield f'<rect x="{start:.1f}" y="{y - 6}" width="{max(end - start, 1.5):.1f}" height="12" rx="2" fill="{colour}"/>'
    wanted = _target(row)
    if wanted is not None:
        at = round(x(wanted), 1)
        yield f'<line x1="{at}" y1="{y - 10}" x2="{at}" y2="{y + 10}" stroke="#1c2730" stroke-width="2"/>'
    told = f"{_short(row['ours'])} against {_short(row['peer_value'])} {row['unit']}: {row['ratio']:.3g} ×"
    yield f'<text x="{WIDTH - RIGHT + 14}" y="{y + 4}" font-size="12" fill="#1c2730">{escape(told)}</text>'


def _legend(height: int) -> Iterator[str]:
    at = 16
    for colour, said in ((GREEN, "target met"), (AMBER, "target missed"), (GREY, "no target")):
        yield f'<rect x="{at}" y="{height - 18}" width="12" height="12" rx="2" fill="{colour}"/>'
        yield f'<text x="{at + 18}" y="{height - 8}" font-size="11" fill="{GREY}">{said}</text>'
        at += 120
    yield f'<line x1="{at + 4}" y1="{height - 20}" x2="{at + 4}" y2="{height - 4}" stroke="#1c2730" stroke-width="2"/>'
    yield f'<text x="{at + 14}" y="{height - 8}" font-size="11" fill="{GREY}">the target; to the right is better</text>'


def _short(value: float) -> str:
    for size, letter in ((1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _described(machine: Mapping[str, Any]) -> str:
    return f"{machine['cores']} cores, {machine['cpu']}, {machine['memory_gb']:.0f} GB, {machine['filesystem']}"
