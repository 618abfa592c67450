"""The coverage matrix: each row of docs/coverage.md with the tests that cover it.

A test names its rows with `@pytest.mark.covers("Kafka")`, a concept with `covers("concept: replay")`, on a function, a
class or a module (`pytestmark`). Marks on a contract suite of `headwater.testing` count for every test class derived
from it. The backends of a test are the mark's `backends=[...]`, or else the `backend` attribute of its class.

Marks are read from the source, nothing is imported or run, so the matrix can be printed in a checkout at any moment.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headwater.cli.output.json import print_json
from headwater.cli.output.table import lined_table

CHECKOUT = Path(__file__).resolve().parents[4]
ROWS_FILE = Path("docs/coverage.md")
CONCEPT = "concept: "


@dataclass(frozen=True)
class CoverageRow:
    """One behaviour that a test can show."""

    section: str
    name: str
    behaviour: str


@dataclass(frozen=True)
class CoverageMark:
    """One test that says it shows a row."""

    name: str
    test: str
    backends: tuple[str, ...]


def coverage(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print which behaviours of similar systems the tests cover, and on which backends."""
    if not (CHECKOUT / ROWS_FILE).is_file() or not (CHECKOUT / "tests").is_dir():
        typer.echo(
            "The coverage matrix needs the tests, which are not installed. Run this command in a checkout of the repository.",
            err=True,
        )
        raise typer.Exit(1)
    matrix = pair(read_rows(CHECKOUT), read_marks(CHECKOUT))
    if json:
        print_json([_plain(row, marks) for row, marks in matrix])
    else:
        _print_table(matrix)


def read_rows(checkout: Path) -> list[CoverageRow]:
    """Read the rows of docs/coverage.md, in its order; a concept's name carries its prefix."""
    rows, section, is_header = [], "", False
    for line in (checkout / ROWS_FILE).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section, is_header = line[3:].partition(" (")[0], True
        elif section and line.startswith("|"):
            name, behaviour = (cell.strip() for cell in line.strip("| ").split("|", 1))
            if not is_header and not set(name) <= set("-: "):
                rows.append(CoverageRow(section, CONCEPT + name if section == "Concepts" else name, behaviour))
            is_header = False
    return rows


def read_marks(checkout: Path) -> list[CoverageMark]:
    """Find every covers mark in the tests and in the contract suites, without importing either."""
    contracts = {
        node.name: node
        for file in _sources(checkout / "src" / "headwater", "testing*")
        for node in _parse(file).body
        if isinstance(node, ast.ClassDef)
    }
    return [
        mark
        for file in _sources(checkout / "tests", "**/test_*.py")
        for mark in _marks_of_module(_parse(file), file.relative_to(checkout).as_posix(), contracts)
    ]


def pair(rows: Iterable[CoverageRow], marks: Iterable[CoverageMark]) -> list[tuple[CoverageRow, list[CoverageMark]]]:
    """Put each row beside its marks; a row nobody has reached has none."""
    by_name: dict[str, list[CoverageMark]] = {}
    for mark in marks:
        by_name.setdefault(mark.name, []).append(mark)
    return [(row, by_name.get(row.name, [])) for row in rows]


def _sources(folder: Path, pattern: str) -> list[Path]:
    found = (file for path in folder.glob(pattern) for file in ([path] if path.is_file() else path.rglob("*.py")))
    return sorted(file for file in found if file.suffix == ".py")


def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def _marks_of_module(module: ast.Module, path: str, contracts: dict[str, ast.ClassDef]) -> Iterator[CoverageMark]:
    everywhere = _assigned_marks(module.body)
    local = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield from _marks(everywhere + _covers(node.decorator_list), f"{path}::{node.name}", ())
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _marks_of_class(node, f"{path}::{node.name}", everywhere, {**contracts, **local})


def _marks_of_class(
    node: ast.ClassDef, path: str, everywhere: list[ast.Call], classes: dict[str, ast.ClassDef]
) -> Iterator[CoverageMark]:
    """Give a test class's marks, those of the classes it derives from included; the nearest definition of a test wins."""
    lineage = _lineage(node, classes)
    backend = next((value for owner in lineage for value in _backend(owner)), None)
    seen: set[str] = set()
    for owner in lineage:
        of_class = everywhere + _covers(owner.decorator_list) + _assigned_marks(owner.body)
        for test in owner.body:
            if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and test.name.startswith("test"):
                if test.name not in seen:
                    calls = of_class + _covers(test.decorator_list)
                    yield from _marks(calls, f"{path}::{test.name}", (backend,) if backend else ())
                seen.add(test.name)


def _lineage(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    found = [node]
    for base in node.bases:
        name = ast.unparse(base).rpartition(".")[2]
        if name in classes and classes[name] is not node:
            found += _lineage(classes[name], classes)
    return found


def _backend(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id="backend")], value=ast.Constant(value=str(name)))
                | ast.AnnAssign(target=ast.Name(id="backend"), value=ast.Constant(value=str(name)))
            ):
                yield name


def _assigned_marks(body: list[ast.stmt]) -> list[ast.Call]:
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=ast.List(elts=marks) | ast.Tuple(elts=marks)):
                return _covers(marks)
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=mark):
                return _covers([mark])
    return []


def _covers(expressions: list[ast.expr]) -> list[ast.Call]:
    return [
        expression
        for expression in expressions
        if isinstance(expression, ast.Call) and ast.unparse(expression.func).endswith("mark.covers")
    ]


def _marks(calls: list[ast.Call], test: str, backends: tuple[str, ...]) -> Iterator[CoverageMark]:
    for call in calls:
        named = next(
            (tuple(ast.literal_eval(word.value)) for word in call.keywords if word.arg == "backends"), backends
        )
        for name in call.args:
            yield CoverageMark(ast.literal_eval(name), test, named)


def _plain(row: CoverageRow, marks: list[CoverageMark]) -> dict[str, object]:
    tests = [{"test": mark.test, "backends": list(mark.backends)} for mark in marks]
    return {**asdict(row), "covered": bool(marks), "tests": tests}


def _print_table(matrix: list[tuple[CoverageRow, list[CoverageMark]]]) -> None:
    console = Console()
    for section in dict.fromkeys(row.section for row, _ in matrix):
        table = lined_table("row", "behaviour", "test", "backends", title=section)
        table.show_lines = table.expand = True
        table.columns[0].ratio, table.columns[1].ratio, table.columns[2].ratio = 3, 5, 5
        table.columns[2].overflow, table.columns[3].min_width = "fold", 8
        for row, marks in matrix:
            if row.section == section:
                _add_row(table, row, marks)
        console.print(table)
    reached = sum(bool(marks) for _, marks in matrix)
    console.print(f"{reached} of {len(matrix)} rows are covered, {len(matrix) - reached} are open")


def _add_row(table: Table, row: CoverageRow, marks: list[CoverageMark]) -> None:
    name, behaviour = row.name.removeprefix(CONCEPT), re.sub(r"`([^`]*)`", r"\1", row.behaviour)
    if marks:
        tests = "\n".join(mark.test for mark in marks)
        backends = sorted({backend for mark in marks for backend in mark.backends})
        table.add_row(name, behaviour, tests, ", ".join(backends))
    else:
        table.add_row(name, behaviour, "open", "", style="dim")
