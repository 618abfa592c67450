"""The import graph of the package, and the drawings that docs/architecture.md has of it.

    python tools/import_graph.py

writes the drawings again. Every import counts: those inside of functions, and those for the type checker alone.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PAGE = ROOT / "docs" / "architecture.md"
DRAWN = ("", "log", "processing")
"""The packages whose packages are drawn; the first is the whole."""

Graph = Mapping[str, set[str]]


def main() -> int:
    """Write the drawings; the exit code is 0."""
    PAGE.write_text(with_drawings(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package has the name of its folder."""
    files = sorted((SOURCE / "headwater").rglob("*.py"))
    return {".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports() -> dict[str, set[str]]:
    """For each module those that it imports. The face of the package is left out: it only names what it gives, and loads that late."""
    files = modules()
    return {name: set(_imported(file, files)) - {name} for name, file in files.items() if name != "headwater"}


def cycles(graph: Graph) -> list[list[str]]:
    """The knots: modules from each of which one comes back to it."""
    reached = {name: _reachable(graph, name) for name in graph}
    inside = [name for name in graph if name in reached[name]]
    knots = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in inside}
    return sorted(list(knot) for knot in knots)


def packages(graph: Graph, below: str) -> dict[str, set[str]]:
    """What the packages and modules directly below a package import of each other, in the order of their names."""
    prefix = f"headwater.{below}." if below else "headwater."
    found: dict[str, set[str]] = {}
    for name, others in sorted(graph.items()):
        if name.startswith(prefix):
            here = name.removeprefix(prefix).partition(".")[0]
            there = {other.removeprefix(prefix).partition(".")[0] for other in others if other.startswith(prefix)}
            found.setdefault(here, set()).update(there - {here})
    return found


def with_drawings(page: str) -> str:
    """The page with every drawing as it is now."""
    graph = imports()
    for below in DRAWN:
        begin, end = f"<!-- drawing: {below or 'headwater'} -->\n", "<!-- end of the drawing -->"
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        assert found and ended, f"{PAGE.name} has no place for the drawing of {below or 'headwater'}"
        page = f"{before}{begin}```mermaid\n{_drawing(packages(graph, below))}\n```\n{end}{after}"
    return page


def _drawing(graph: Graph) -> str:
    """Arrows from each package to those that it imports, without those that follow from others."""
    reached = {name: _reachable(graph, name) for name in graph}
    lines = ["flowchart TD"]
    for name in sorted(graph, key=lambda name: (-len(reached[name]), name)):
        lines.append(f"    {name}_[{name}]")
        lines += [f"    {name}_ --> {other}_" for other in sorted(graph[name] - _by_others(name, graph, reached))]
    return "\n".join(lines)


def _by_others(name: str, graph: Graph, reached: Graph) -> set[str]:
    """What a package reaches by something else that it imports; in a knot nothing follows from anything."""
    return {
        far for near in graph[name] for far in reached[near] if near not in reached[far] and name not in reached[near]
    }


def _reachable(graph: Graph, name: str) -> set[str]:
    """All that a node leads to; itself only by way of others."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _imported(file: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in files:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in files else node.module


if __name__ == "__main__":
    sys.exit(main())
