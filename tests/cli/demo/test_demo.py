"""The demonstration: its claim is proved, its proof can fail, and nothing of it is left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.cli.demo.clicks import REGIONS, TOPIC, clicks, clicks_until
from headwater.cli.demo.proof import QUESTIONS, compare, prove, stored
from headwater.cli.demo.run import find_script
from headwater.views.definition import define_view
from headwater.views.maintainer import ViewMaintainer
from headwater.views.store_url import open_view_store
from tests.rigs.commands import COMMAND
from tests.rigs.processes import assert_all_gone, processes_of

CLAIM = re.compile(r"✓ ([\d,]+) events acknowledged, ([\d,]+) in the log, each exactly once; the live views agree")
IN_SYNC = re.compile(r"([\d,]+) are wrong because of a failed write and ([\d,]+) because of a race")
BEGUN_US = 1_800_000_000_000_000
SCHEMA = "user_id BIGINT, page STRING, at TIMESTAMP"


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the demonstration with its temporary folder in `folder`, by which its processes can be told."""
    # As a shell in the foreground would: Ctrl-C is not ignored, even where the tests ignore it.
    command = ["env", "--default-signal=INT", *COMMAND, "demo", *arguments]
    environment = os.environ | {"TMPDIR": str(folder), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    read = ""
    while words not in (line := process.stdout.readline()):
        assert line, f"it ended without saying {words!r}: {read} {process.stderr and process.stderr.read()}"
        read += line
    return read + line


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_a_terminal_it_proves_the_numbers_and_leaves_nothing(tmp_path: Path) -> None:
    """A producer and the application are killed on the way; a taken port moves on to the next. Then what follows a shop's log is equal to
    the shop, and what its clients write twice is not."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(tmp_path, "--seconds", "5", "--port", str(port))
        out, err = process.communicate(timeout=800)
    assert (process.returncode, err) == (0, ""), out
    claim = CLAIM.search(out)
    assert claim is not None and claim[1] == claim[2]
    assert int(claim[1].replace(",", "")) > 1_000
    assert "the producer of asia dies" in out and "the application and Spark die" in out
    assert re.search(r"the application resumes \d+\.\d s after the kill", out)
    page = re.search(r"status page: http://127\.0\.0\.1:(\d+)", out)
    assert page is not None and port < int(page[1]) < port + 20
    assert re.search(r"first result came \d+\.\d s after the start", out) and "examples/clickstream/app.py" in out
    wrong = IN_SYNC.search(out)
    assert wrong is not None and any(count != "0" for count in wrong.groups())
    assert re.search(
        r"✓ the systems derived from the log: 0 wrong rows in [34] systems, in each of \d+ comparisons", out
    )
    assert "\x1b" not in out, "no terminal, no escape sequences"
    assert processes_of(tmp_path) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_process_survives_the_end_of_the_demonstration(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Whatever ends it, while Spark is there: Ctrl-C, a service manager, or a crash of its own."""
    process = start(tmp_path)
    read_until(process, "status page")
    while not any("java" in name for name in processes_of(tmp_path)):
        assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (code, "")
    assert_all_gone(tmp_path)
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_second_part_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """Its stdin is all it has of the one who directs the play; with that it goes, and Spark, Redis and the clients with it."""
    process = subprocess.Popen(
        [sys.executable, str(find_script("in_sync/watch.py")), "--tied"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    while not any("java" in name for name in processes_of(tmp_path)):
        assert process.poll() is None
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and b"Traceback" not in err
    assert_all_gone(tmp_path)


def table_of(region: str, end: int, first: int = 0) -> pa.Table:
    return clicks(region, first, end, begun_us=BEGUN_US, rate=1_000)


def test_the_proof_finds_what_is_lost_doubled_or_made_up() -> None:
    """A proof that cannot fail proves nothing."""
    with hw.open_log("memory://") as log:
        log.create_topic(TOPIC, SCHEMA, key="user_id", time="at")
        log.append(TOPIC, table_of("europe", 10))
        log.append(TOPIC, pa.concat_tables([table_of("america", 3), table_of("america", 3, 2)]))
        log.append(TOPIC, table_of("asia", 2).set_column(1, "page", pa.array(["/", "/made-up"])))
        acknowledged = {"europe": 10, "america": 4, "asia": 1}
        lines = {line.region: line for line in prove(log, acknowledged, begun_us=BEGUN_US, rate=1_000)}
        assert lines["europe"].is_right and stored(log, "europe") == 10
        assert not lines["america"].is_right and (lines["america"].lost, lines["america"].doubled) == (1, 1)
        assert not lines["asia"].is_right and lines["asia"].never_sent >= 1


def visits_of(table: pa.Table) -> Counter[tuple[str, datetime]]:
    """The visits by page and minute, counted by a loop."""
    return Counter(
        (row["page"].partition("?")[0], row["at"].replace(second=0, microsecond=0))
        for row in table.to_pylist()
        if not row["page"].startswith("/health")
    )


@pytest.mark.parametrize("name", list(QUESTIONS))
def test_a_view_that_differs_from_the_log_is_found(tmp_path: Path, name: str) -> None:
    minutes = visits_of(table_of("europe", 90_000))
    if name == "top_pages":
        schema, key = "page STRING, visits BIGINT", ["page"]
        counts = Counter[str]()
        for (page, _), count in minutes.items():
            counts[page] += count
        rows = [{"page": page, "visits": count} for page, count in counts.items()]
    else:
        schema, key = "page STRING, minute TIMESTAMP, visits BIGINT", ["page", "minute"]
        rows = [{"page": page, "minute": minute, "visits": count} for (page, minute), count in minutes.items()]
    definition = define_view(name, schema, key=key)
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic(TOPIC, SCHEMA, key="user_id", time="at")
        log.append(TOPIC, table_of("europe", 90_000))
        store = open_view_store(f"sqlite:///{tmp_path}/views.db")
        maintainer = ViewMaintainer(log, store, definition)

        def agree(epoch: int, rows: list[dict[str, Any]]) -> Any:
            table = pa.Table.from_pylist(rows, definition.schema)
            maintainer.maintain(table, hw.Marker(query="test", epoch=epoch, ends={}))
            with hw.open_view(f"sqlite:///{tmp_path}/views.db", name) as view:
                return compare(log, view)

        right = agree(0, rows)
        assert right.is_right and right.rows == len(rows) and right.visits == sum(minutes.values())
        wrong = agree(1, [rows[0] | {"visits": rows[0]["visits"] - 1}])
        assert not wrong.is_right and wrong.visits == wrong.visits_expected - 1 and wrong.differing == 2
        store.close()


def test_clicks_of_a_region_only_grow_and_are_the_same_wherever_they_are_computed() -> None:
    counts = [clicks_until(tenths / 10, rate=1_000, phase=2) for tenths in range(600)]
    assert counts == sorted(counts) and counts[0] == 0 and 0.9 < counts[-1] / 59_900 < 1.1
    whole = table_of("asia", 1_000)
    assert pa.concat_tables([table_of("asia", 300), table_of("asia", 1_000, 300)]).equals(whole)
    assert len({user // 100_000 for region in REGIONS for user in table_of(region, 50)["user_id"].to_pylist()}) == 3
    assert len(set(whole["page"].to_pylist())) == 8


def test_the_demonstration_is_the_example() -> None:
    """It compares the views that the example declares, and none is left out."""
    from headwater.app.app import load_app

    assert find_script().name == "app.py" and find_script().is_file()
    assert find_script("in_sync/watch.py").is_file()
    assert set(load_app(find_script()).views) == set(QUESTIONS)
