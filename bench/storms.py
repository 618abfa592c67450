"""The long tier of the tests: storms of kills, zombies, captures and thousands of seeds, module by module.

``python -m bench.storms`` runs every test with the mark ``bench`` and writes ``bench/results/storms.json``: one row for each test module,
with the number of its tests that passed. It exits with 1 and names the tests that failed. ``--only test_zombie test_totals`` runs some of
the modules and replaces only their rows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.harness import Figure, Sample, Target, write

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2
MODULE_S_MAX = 3_600.0


@dataclass(frozen=True)
class Outcome:
    """What the long tier of one test module gave."""

    module: str
    passed: int
    failed: tuple[str, ...]
    seconds: float

    def figure(self) -> Figure:
        """The row of the module: every test has to pass."""
        passed = float(self.passed)
        target = Target(">=", self.passed + len(self.failed), "ours")
        what = "tests of the long tier that passed"
        return Figure(self.module, what, "tests", (Sample(passed, passed, 1, quiet=False), None), None, target)


def modules() -> dict[str, str]:
    """The files of the tests that have a long tier, by the names of their modules."""
    listed = _pytest("--collect-only", "-q")
    files = {line.partition("::")[0] for line in listed.stdout.splitlines() if "::" in line}
    twins = [stem for stem, count in Counter(Path(file).stem for file in files).items() if count > 1]
    assert not twins, f"rename one of each, or the other is not run: {twins}"
    return {Path(file).stem: file for file in sorted(files, key=lambda file: Path(file).stem)}


def run(module: str, file: str) -> Outcome:
    """Runs the long tier of one module. A run that gives no report counts as one failed test."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headwater-storms-") as folder:
        report = Path(folder, "report.xml")
        options = ("--timeout", "0", "--numprocesses", str(PROCESSES), "--junitxml", str(report), "-q")
        try:
            ended = _pytest(file, *options)
            said = ended.stdout + ended.stderr
        except subprocess.TimeoutExpired:
            said = f"{module} did not end within {MODULE_S_MAX:.0f} s"
        if not report.exists():
            print(said, file=sys.stderr)
            return Outcome(module, 0, (module,), time.monotonic() - began)
        passed, failed = _read(report)
    if failed:
        print(said, file=sys.stderr)
    return Outcome(module, passed, failed, time.monotonic() - began)


def _read(report: Path) -> tuple[int, tuple[str, ...]]:
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = tuple(
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if any(child.tag in ("failure", "error", "skipped") for child in case)
    )
    return len(cases) - len(failed), failed


def _pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=MODULE_S_MAX)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.storms", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="MODULE", nargs="+", default=[], help="test modules, such as test_zombie")
    given = parser.parse_args(arguments)
    known = modules()
    unknown = [module for module in given.only if module not in known]
    if unknown:
        parser.error(f"no long tier in {', '.join(unknown)}; the modules are {', '.join(known)}")
    chosen = given.only or list(known)
    failed: list[str] = []
    for number, module in enumerate(chosen, 1):
        outcome = run(module, known[module])
        failed += outcome.failed
        count = f"{outcome.passed} passed, {len(outcome.failed)} failed"
        print(f"{number} of {len(chosen)}: {module}: {count} in {outcome.seconds:.0f} s", flush=True)
        write("storms", [outcome.figure().row()], whole=False)
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
