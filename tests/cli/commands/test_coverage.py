"""`headwater coverage`: the matrix is read from docs/coverage.md and from the marks in the tests' source."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from headwater.cli.commands import coverage

CHECKOUT = Path(__file__).resolve().parents[3]

ROWS = """\
# The matrix
| not | a row |
|---|---|

## Transmitting event streams
| system | behaviour to show |
|---|---|
| Kafka | offsets, `groups` | replay |
| Qpid | credit |

## Concepts (marked the same way)
| concept | behaviour to show |
|---|---|
| replay | output identical |
"""
CONTRACT = """
import pytest

class LogContract:
    @pytest.mark.covers("Kafka")
    def test_offsets_are_dense(self): ...

    @pytest.mark.covers("Qpid")
    def test_credit(self): ...
"""
TESTS = """
import pytest
from headwater import testing

class TestFileLog(testing.LogContract):
    backend = "file"

class TestMemoryLog(testing.LogContract):
    backend: str = "memory"

    def test_credit(self):
        "Overridden without a mark."

@pytest.mark.covers("concept: replay", backends=["file", "kafka"])
async def test_replay(): ...

@pytest.mark.covers("Kafka")
def not_a_test(): ...
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for path, text in {
        "docs/coverage.md": ROWS,
        "src/headwater/testing/contracts/log.py": CONTRACT,
        "tests/log/test_contract.py": TESTS,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(coverage.coverage)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_rows_are_the_tables_of_the_sections(checkout: Path) -> None:
    """Headings, rules and tables before the first section are no rows; a bar inside a behaviour is kept."""
    assert coverage.read_rows(checkout) == [
        coverage.CoverageRow("Transmitting event streams", "Kafka", "offsets, `groups` | replay"),
        coverage.CoverageRow("Transmitting event streams", "Qpid", "credit"),
        coverage.CoverageRow("Concepts", "concept: replay", "output identical"),
    ]


def test_every_row_of_ours_is_read() -> None:
    """One row per table line, and no name twice: a mark must point at exactly one."""
    lines = (CHECKOUT / "docs" / "coverage.md").read_text().splitlines()
    tables = sum(line.startswith("|---") for line in lines)
    names = [row.name for row in coverage.read_rows(CHECKOUT)]
    assert len(names) == sum(line.startswith("|") for line in lines) - 2 * tables
    assert len(set(names)) == len(names)


def test_marks_of_a_contract_count_for_every_class_derived_from_it(checkout: Path) -> None:
    """The backend is the derived class's; a test it overrides counts only with its own marks."""
    assert coverage.read_marks(checkout) == [
        coverage.CoverageMark("Kafka", "tests/log/test_contract.py::TestFileLog::test_offsets_are_dense", ("file",)),
        coverage.CoverageMark("Qpid", "tests/log/test_contract.py::TestFileLog::test_credit", ("file",)),
        coverage.CoverageMark(
            "Kafka", "tests/log/test_contract.py::TestMemoryLog::test_offsets_are_dense", ("memory",)
        ),
        coverage.CoverageMark("concept: replay", "tests/log/test_contract.py::test_replay", ("file", "kafka")),
    ]


def test_marks_on_modules_and_classes_count_for_all_their_tests(checkout: Path) -> None:
    (checkout / "tests/log/test_contract.py").write_text("""
import pytest
pytestmark = [pytest.mark.slow, pytest.mark.covers("Kafka")]

@pytest.mark.covers("Qpid")
class TestIt:
    pytestmark = pytest.mark.covers("concept: replay")
    def test_one(self): ...

def test_two(): ...
""")
    assert [(mark.name, mark.test.rpartition("::")[2]) for mark in coverage.read_marks(checkout)] == [
        ("Kafka", "test_one"),
        ("Qpid", "test_one"),
        ("concept: replay", "test_one"),
        ("Kafka", "test_two"),
    ]


def test_what_is_read_is_what_pytest_collects(request: pytest.FixtureRequest) -> None:
    """Reading the source and collecting the tests must agree, or the matrix would claim or forget something."""
    collected = {
        (name, item.nodeid.partition("[")[0])
        for item in request.session.items
        for mark in item.iter_markers("covers")
        for name in mark.args
    }
    read = {(mark.name, mark.test) for mark in coverage.read_marks(CHECKOUT)}
    assert collected <= read


def test_the_table_shows_tests_backends_and_open_rows(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "CHECKOUT", checkout)
    monkeypatch.setenv("COLUMNS", "200")
    (checkout / "docs" / "coverage.md").write_text(ROWS + "| dual write | cured by capture |\n")
    code, output = run()
    lines = output.splitlines()
    assert code == 0
    assert "open" in next(line for line in lines if "dual write" in line)
    assert "file, memory" in next(line for line in lines if "Kafka" in line)
    assert "3 of 4 rows are covered, 1 are open" in lines[-1]


def test_json_lists_every_row_with_its_tests(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "CHECKOUT", checkout)
    code, output = run("--json")
    rows = msgspec.json.decode(output)
    assert code == 0
    assert [row["name"] for row in rows] == ["Kafka", "Qpid", "concept: replay"]
    assert rows[1] == {
        "section": "Transmitting event streams",
        "name": "Qpid",
        "behaviour": "credit",
        "covered": True,
        "tests": [{"test": "tests/log/test_contract.py::TestFileLog::test_credit", "backends": ["file"]}],
    }


def test_without_the_tests_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed wheel carries no tests: one sentence, no traceback."""
    monkeypatch.setattr(coverage, "CHECKOUT", tmp_path)
    code, output = run()
    assert code == 1
    assert (
        output.strip()
        == "The coverage matrix needs the tests, which are not installed. Run this command in a checkout of the repository."
    )
