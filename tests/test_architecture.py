"""The architecture page agrees with the package: its files and functions exist, its walks are what runs, its drawings are of today."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.rigs.architecture_page import (
    BATCH_WALK,
    CHANGES,
    EVENT_WALK,
    NAMES,
    PACKAGE,
    PACKAGES,
    PAGE,
    ROOT,
    Place,
    defined,
    places,
    rows,
)
from tests.rigs.trace.entries import entered, listed
from tools.import_graph import with_drawings


@pytest.mark.parametrize("title", [CHANGES, EVENT_WALK, BATCH_WALK])
def test_every_place_that_the_page_names_exists(title: str) -> None:
    """A file of the package, and a function, class or method in it."""
    named = places(title)
    assert len(named) > 15
    missing = [
        place for place in named if not (PACKAGE / place.file).is_file() or place.name not in defined(place.file)
    ]
    assert not missing


def test_the_page_answers_twenty_questions() -> None:
    """Each names what a reader wants to change, and no two are the same."""
    questions = [row[0] for row in rows(CHANGES)]
    assert len(questions) == len(set(questions)) >= 20


def test_the_walk_of_an_event_is_what_runs(tmp_path: Path) -> None:
    """Each function of the walk is entered for each event that is sent, on its way to a subscriber."""
    found = entered("traced_event.py", tmp_path, rounds_first=1)
    missing = [place for place in places(EVENT_WALK) if place.name not in found.get(place.file, [])]
    assert not missing, listed(found)


def test_the_drawings_are_of_the_imports_of_today() -> None:
    """`python tools/import_graph.py` writes them again."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_drawings(page), "run: python tools/import_graph.py"


def test_every_package_has_its_line() -> None:
    """In the words of its own docstring."""
    folders = {
        file.parent: ast.parse(file.read_text(encoding="utf-8"))
        for file in PACKAGE.rglob("__init__.py")
        if file.parent != PACKAGE
    }
    sentences = {
        folder.relative_to(PACKAGE).as_posix(): " ".join((ast.get_docstring(module) or "").partition("\n\n")[0].split())
        for folder, module in folders.items()
    }
    assert {row[0].strip("`"): row[1] for row in rows(PACKAGES)} == sentences


def test_new_names_exist_and_old_ones_are_gone() -> None:
    """An old name that is still a module's is in the list only where that module was divided."""
    table = [(row[0].strip("`"), re.findall(r"`([^`]+)`", row[1])) for row in rows(NAMES)]
    assert len(table) > 300
    assert not [new for _, names in table for new in names if not (PACKAGE / new).exists()]
    there = [old for old, names in table if (PACKAGE / old).exists() and old not in names]
    assert not there


def test_contributing_draws_the_layers_that_are_checked() -> None:
    """From the top down, without what only names things or is for tests."""
    (drawn,) = re.findall(r"^cli .*→.*$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = [contract["layers"] for contract in contracts if contract["id"] == "layers"]
    checked = [re.findall(r"\w+", layer) for layer in layers]
    beside = {"testing", "operators", "errors", "aggregates"}
    assert [re.findall(r"\w+", layer) for layer in drawn.split("→")] == [
        [name for name in layer if name not in beside] for layer in checked
    ]


def test_a_place_that_is_gone_is_found() -> None:
    """The check of places sees functions, classes and methods, and nothing else."""
    names = defined("log/file/segments/frame.py")
    assert "encode" in names and "Frame.stride" in names
    assert Place("log/file/segments/frame.py", "struct").name not in names
