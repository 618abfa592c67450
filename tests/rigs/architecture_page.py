"""The architecture page: its tables, and what of the package they name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "headwater"
PAGE = ROOT / "docs" / "architecture.md"

CHANGES = "Where do I change …?"
EVENT_WALK = "Walk: an event, from `send` to a subscriber"
BATCH_WALK = "Walk: a micro-batch, from trigger to commit"
PACKAGES = "Packages"
NAMES = "Old and new names"


@dataclass(frozen=True)
class Place:
    """A line of a table that names a file and one of its functions or classes."""

    file: str
    name: str


def section(title: str) -> str:
    """The text of a section."""
    _, found, rest = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")
    assert found, f"{PAGE.name} has no section {title!r}"
    return rest.partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The cells of each row of the table in a section, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def places(title: str) -> list[Place]:
    """What the table of a section names: the file is in its second cell, functions are in its third."""
    return [Place(_code(row[1])[0], name) for row in rows(title) for name in _code(row[2])]


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def defined(file: str) -> set[str]:
    """The functions, classes and methods of a module: `encode`, `Partition`, `Partition.append`."""
    module = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    return set(_definitions(module.body, ""))


def _definitions(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for statement in body:
        match statement:
            case ast.ClassDef():
                yield f"{prefix}{statement.name}"
                yield from _definitions(statement.body, f"{prefix}{statement.name}.")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield f"{prefix}{statement.name}"
