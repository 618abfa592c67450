"""The pictures of the figures: each shows the rows that are committed beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.draw import AMBER, GREEN, draw
from bench.harness import RESULTS

MACHINE = {"cpu": "<fast & small>", "cores": 2, "memory_gb": 8.0, "filesystem": "ext4"}


@pytest.mark.parametrize("file", sorted(file.name for file in RESULTS.glob("*.json") if file.stem != "machine"))
def test_a_picture_shows_what_was_measured(file: str) -> None:
    path = RESULTS / file
    machine = json.loads((RESULTS / "machine.json").read_text())
    assert Path(path.with_suffix(".svg")).read_text() == draw(path.stem, json.loads(path.read_text()), machine)


def row(ratio: float, *, unit: str = "events/s", target: str | None = None, met: bool | None = None) -> dict[str, Any]:
    return {"name": "a", "unit": unit, "ours": ratio, "peer_value": 1.0, "ratio": ratio, "target": target, "met": met}


def bars(*rows: dict[str, Any]) -> list[tuple[float, float, str | None]]:
    """Where each bar begins, how long it is, and its colour."""
    picture = ElementTree.fromstring(draw("x", rows, MACHINE))
    found = [each for each in picture.iter("{http://www.w3.org/2000/svg}rect") if each.get("height") == "12"]
    return [(float(each.get("x", "")), float(each.get("width", "")), each.get("fill")) for each in found[: len(rows)]]


def test_to_the_right_is_better() -> None:
    """Twice the rate is as good as half the time, and goes to the other side of the peer than half the rate."""
    rate, time, worse = bars(
        row(2.0, target=">= 1.5 x", met=True), row(0.5, unit="ms"), row(0.5, target=">= 1 x", met=False)
    )
    assert rate[:2] == time[:2]
    assert worse[0] + worse[1] == pytest.approx(rate[0], abs=0.11)
    assert (rate[2], worse[2]) == (GREEN, AMBER)
