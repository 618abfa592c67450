"""The matrix of docs/guarantees.md: it has every rule of the contract, and says of each log what its tests say."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from headwater.testing.contracts.log import LogContract
from tests.log.kafka import test_kafka
from tests.rigs.marks import CHECKOUT


def test_the_matrix_has_every_rule_and_every_log_keeps_it() -> None:
    """Written anew as if all tests had passed, which CI sees to, the page stays as it is."""
    tool = _tool()
    passed = {
        (case, name): {"yes"}
        for cases in [*tool.KINDS.values(), *tool.QUEUES.values()]
        for case in cases
        for _, _, tests in tool.rules()
        for name, _ in tests
    }
    page = (CHECKOUT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    written = page.partition(tool.BEGIN)[2].partition(tool.END)[0].strip()
    assert written == tool.matrix(passed).strip(), (
        "run pytest with --junitxml, then tools/guarantees.py on what it wrote"
    )


def test_what_a_log_keeps_only_in_part_is_what_its_tests_say() -> None:
    """No log's tests ask for less than the matrix admits."""
    tool = _tool()
    less = [name for name in tool.NOTES if getattr(test_kafka.TestKafkaLog, name) != getattr(LogContract, name)]
    assert sorted(less) == sorted(tool.WEAKER["kafka"])
    assert all(getattr(LogContract, name) is True for name in tool.NOTES)


def test_a_failed_or_missing_test_shows(tmp_path: object) -> None:
    """The matrix says what was seen, not what is hoped for."""
    tool = _tool()
    name = "test_topics_are_listed_by_name"
    seen = {
        ("TestFileLog", name): {"yes"},
        ("TestFileLogWithoutFsync", name): {"yes", "no"},
        ("TestKafkaLog", name): {"yes"},
    }
    assert f"| {name[5:].replace('_', ' ')} | no | – | yes |" in tool.matrix(seen)


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("guarantees_tool", CHECKOUT / "tools" / "guarantees.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool
