"""How many files one append and one micro-batch pass through: what somebody has to open who follows one of them.

A file counts when a function in it is entered, in whichever process, in each of several rounds: the appends after the first, the
micro-batches after those in which processes start and open the log. What a process does once is left out, as are imports, constants, what
is due only now and then, and the thread of an application that looks at how its stages go. Functions of users are not counted.

The log below is a floor of its own. So of a micro-batch the files outside of `log/` are limited; with those of the log that it reads and
writes there are twice as many, and they are limited too.

To see the lists: `.venv/bin/pytest tests/test_paths.py -s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.rigs.architecture_page import BATCH_WALK, places
from tests.rigs.trace.entries import entered, listed

APPEND_FILES_MAX = 17
BATCH_FILES_MAX = 29
BATCH_FILES_WITH_LOG_MAX = 64


def check(found: Mapping[str, list[str]], files_max: int) -> None:
    print(listed(found))
    assert len(found) <= files_max, listed(found)


def test_an_append_passes_through_few_files(tmp_path: Path) -> None:
    """`log.append` of a few rows to a log in a folder, until all of them are durable."""
    found = entered("traced_append.py", tmp_path, rounds_first=1)
    assert {"log/log.py"} <= found.keys()
    check(found, APPEND_FILES_MAX)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_micro_batch_passes_through_few_files(tmp_path: Path) -> None:
    """From one question of Spark for the newest offsets to the next: planning, reading, an operator with state, staging, the commit."""
    found = entered("traced_app.py", tmp_path, rounds_first=3, round_begins="StreamReader.latestOffset")
    functions = {function.rpartition(".")[2] for names in found.values() for function in names}
    assert {"latestOffset", "partitions", "read", "process", "commit_staged"} <= functions, listed(found)
    missing = [place for place in places(BATCH_WALK) if place.name not in found.get(place.file, [])]
    assert not missing, f"docs/architecture.md does not describe what runs: {missing}\n{listed(found)}"
    check({file: names for file, names in found.items() if not file.startswith("log/")}, BATCH_FILES_MAX)
    check(found, BATCH_FILES_WITH_LOG_MAX)
