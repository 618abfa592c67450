"""Writes the matrix of docs/guarantees.md: each rule of the log's contract, and which kinds of log were seen to keep it.

    pytest tests/log/test_contract.py tests/log/kafka/test_kafka.py tests/log/kafka/queue/test_kafka_queue.py --junitxml /tmp/contract.xml
    python tools/guarantees.py /tmp/contract.xml

A cell is what the run showed: `yes` when every test of the rule passed on that log, `no` when one failed, `–` when none ran, and
`weaker` with a note when the log says (by a property of its test class) that it keeps only a part of it.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Dict, List, Set, Tuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guarantees.md"
BEGIN = "<!-- The matrix is written by tools/guarantees.py from a run of the contract suite. -->"
END = "<!-- End of the matrix. -->"
KINDS = {"file": ["TestFileLog", "TestFileLogWithoutFsync"], "memory": ["TestMemoryLog"], "kafka": ["TestKafkaLog"]}
QUEUES = {"file": ["TestFileQueues"], "memory": ["TestMemoryQueues"], "kafka": ["TestKafkaQueues"]}
WEAKER = {"kafka": ["dense_offsets", "transactions_in_one_moment"]}
NOTES = {
    "dense_offsets": "a transaction leaves a gap of one offset in each of its partitions",
    "transactions_in_one_moment": "a transaction becomes visible partition by partition, in each of them whole",
}


def main() -> int:
    """Write the matrix; the exit code is 0."""
    parser = argparse.ArgumentParser(
        description="Write the matrix of docs/guarantees.md from a run of the contract suite."
    )
    parser.add_argument("results", type=Path, help="what pytest --junitxml wrote")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n" + matrix(read_results(options.results)) + END + after, encoding="utf-8")
    print("guarantees: wrote", PAGE.relative_to(ROOT))
    return 0


def rules() -> List[Tuple[str, str, List[Tuple[str, Set[str]]]]]:
    """The parts of the contract: title, what it is about, and its tests with the properties that they ask for."""
    sys.path.insert(0, str(ROOT / "src"))
    from headwater.testing.contracts.log import LogContract
    from headwater.testing.contracts.queues.queue import QueueContract

    parts = []
    for part in [*LogContract.__mro__, *QueueContract.__mro__]:
        tests = [
            (name, {p for p in NOTES if f"self.{p}" in inspect.getsource(test)})
            for name, test in vars(part).items()
            if name.startswith("test_")
        ]
        if tests:
            parts.append((part.__name__.replace("Contract", ""), (part.__doc__ or "").strip(), tests))
    return parts


def queue_rules() -> Set[str]:
    """The tests of queues, which have classes of their own."""
    from headwater.testing.contracts.queues.queue import QueueContract

    return {name for name in dir(QueueContract) if name.startswith("test_")}


def read_results(path: Path) -> Dict[Tuple[str, str], Set[str]]:
    """For each class and test the outcomes of its cases."""
    found: Dict[Tuple[str, str], Set[str]] = {}
    for case in ET.parse(path).iter("testcase"):
        key = case.get("classname", "").rpartition(".")[2], re.sub(r"\[.*", "", case.get("name", ""), flags=re.DOTALL)
        bad = case.find("failure") is not None or case.find("error") is not None
        outcome = "no" if bad else "–" if case.find("skipped") is not None else "yes"
        found.setdefault(key, set()).add(outcome)
    return found


def matrix(results: Dict[Tuple[str, str], Set[str]]) -> str:
    """The table as Markdown."""
    lines = []
    for title, what, tests in rules():
        lines += ["", f"**{title}.** {what}", "", "| rule | " + " | ".join(KINDS) + " |", "|---|" + "---|" * len(KINDS)]
        for name, asked in tests:
            sentence = name[len("test_") :].replace("_", " ")
            cells = [cell(kind, name, asked, results) for kind in KINDS]
            lines.append(f"| {sentence} | " + " | ".join(cells) + " |")
    return "\n".join(lines[1:]) + "\n\n"


def cell(kind: str, name: str, asked: Set[str], results: Dict[Tuple[str, str], Set[str]]) -> str:
    """What one kind of log was seen to do about one rule."""
    cases = (QUEUES if name in queue_rules() else KINDS)[kind]
    outcomes: Set[str] = set().union(*(results.get((case, name), {"–"}) for case in cases))
    if "no" in outcomes:
        return "no"
    if "–" in outcomes:
        return "–"
    weaker = sorted(asked & set(WEAKER.get(kind, [])))
    return "weaker: " + "; ".join(NOTES[name] for name in weaker) if weaker else "yes"


if __name__ == "__main__":
    raise SystemExit(main())
