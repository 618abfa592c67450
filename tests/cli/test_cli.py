"""The command line: topics, what it says when something is wrong, and to whom it belongs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater as hw
from tests.rigs.commands import COMMAND, ORDERS, Command, Result, refused

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534


def test_a_new_topic_is_listed_and_shown(command: Command) -> None:
    created = command(
        "topics", "create", "orders", "--schema", ORDERS, "--key", "id", "--time", "at", "--partitions", "2"
    )
    assert (created.code, "2 partitions" in created.out) == (0, True)
    assert "orders" in command("topics", "list").out
    [row] = json.loads(command("topics", "list", "--json").out)
    assert row["partitions"] == 2 and row["events"] == 0 and row["key"] == "id" and row["bytes"] > 0
    shown = command("topics", "show", "orders")
    assert ORDERS in shown.out and "fsync" in shown.out


def test_show_says_what_each_partition_holds(orders: Command) -> None:
    shown = json.loads(orders("topics", "show", "orders", "--json").out)
    assert sum(part["end"] - part["first"] for part in shown["partitions"]) == 3
    assert all((part["newest"] is None) == (part["end"] == 0) for part in shown["partitions"])


def test_a_damaged_topic_does_not_hide_the_others(orders: Command) -> None:
    orders("topics", "create", "other")
    Path("data/topics/orders/topic").write_bytes(b"noise")
    listed = orders("topics", "list")
    assert listed.code == 0 and "other" in listed.out and "damaged" in listed.out


def test_columns_are_added_and_old_events_are_read_with_nulls(orders: Command) -> None:
    assert "note STRING" in orders("topics", "alter", "orders", "--add-column", "note STRING").out
    assert orders("tail", "orders").rows[0]["note"] is None
    refused(orders("topics", "alter", "orders", "--schema", "id STRING"), "schema_conflict", "amount")
    refused(orders("topics", "alter", "orders"), "invalid_input")


def test_a_topic_is_kept_small_by_its_settings(orders: Command) -> None:
    """Each is given, changed, shown, and obeyed on demand."""
    settings = ["--retention", "7 days", "--retention-bytes", 1 << 30, "--compact", "--tombstones", "1 hour"]
    more = ["--bytes-max", 1 << 31, "--overload", "reject", "--archive", "file:///tmp/archive"]
    assert orders("topics", "create", "kept", "--schema", ORDERS, "--key", "id", *settings, *more).code == 0
    shown = json.loads(orders("topics", "show", "kept", "--json").out)
    assert (shown["retention_us"], shown["retention_bytes"]) == (7 * 86_400_000_000, 1 << 30)
    assert (shown["compact"], shown["tombstones_us"]) == (True, 3_600_000_000)
    assert (shown["bytes_max"], shown["overload"], shown["archive"]) == (1 << 31, "reject", "file:///tmp/archive")
    changes = ["--retention", "forever", "--retention-bytes", 0, "--no-compact", "--bytes-max", 0, "--archive", ""]
    assert orders("topics", "alter", "kept", *changes).code == 0
    shown = json.loads(orders("topics", "show", "kept", "--json").out)
    assert (shown["retention_us"], shown["retention_bytes"], shown["compact"]) == (None, None, False)
    assert (shown["bytes_max"], shown["archive"], shown["hours_to_overtaken"]) == (None, None, None)
    refused(orders("topics", "create", "x", "--compact", "--overload", "drop_oldest"), "invalid_input")
    refused(
        orders("topics", "create", "x", "--schema", "id INT", "--key", "id", "--compact", "--retain", "until_acked"),
        "invalid_input",
        "retain",
    )
    orders("topics", "create", "work", "--retain", "until_acked", "--overload", "buffer", "--buffer-bytes", 1 << 20)
    shown = json.loads(orders("topics", "show", "work", "--json").out)
    assert (shown["retain"], shown["overload"], shown["buffer_bytes"]) == ("until_acked", "buffer", 1 << 20)
    orders("topics", "alter", "work", "--retain", "all", "--overload", "block")
    shown = json.loads(orders("topics", "show", "work", "--json").out)
    assert (shown["retain"], shown["overload"], shown["buffer_bytes"]) == ("all", "block", None)
    refused(orders("topics", "alter", "work", "--buffer-bytes", 0), "invalid_input", "buffer_bytes")
    orders("topics", "alter", "orders", "--retention", "1 us")
    assert orders("topics", "tidy", "orders").out == "removed 3 events from topic orders\n"
    assert orders("topics", "tidy", "orders").out == "removed 0 events from topic orders\n"


def test_deleting_needs_a_yes(orders: Command) -> None:
    refused(orders("topics", "delete", "orders"), "invalid_input", "3 events", "--yes")
    assert orders("topics", "delete", "orders", "--yes").code == 0
    refused(orders("topics", "show", "orders"), "topic_not_found")


@pytest.mark.parametrize(
    "name",
    ["../evil", "/etc/passwd", "..", ".", "a/b", "", "x" * 500, "ünïcode", "a\x1b[31mb", "sp ace", "nul\0", "-x"],
)
def test_hostile_names_are_refused_everywhere(orders: Command, name: str) -> None:
    """Nothing outside of the log's folder is touched, and no escape sequence reaches the terminal."""
    before = sorted(Path().rglob("*"))
    for command in (["topics", "create"], ["topics", "show"], ["topics", "delete", "--yes"], ["produce"], ["tail"]):
        result = orders(*command, "--", name, stdin="{}")
        refused(result, "invalid_name")
        assert "\x1b" not in result.err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["topics", "create", "orders"], "topic_exists"),
        (["topics", "create", "x", "--key", "id"], "invalid_input"),
        (["topics", "create", "x", "--schema", "id FOO"], "invalid_schema"),
        (["topics", "create", "x", "--schema", "id STRING", "--key", "nope"], "invalid_input"),
        (["topics", "create", "x", "--schema", "id STRING", "--time", "id"], "invalid_input"),
        (["topics", "create", "x", "--partitions", "0"], "invalid_input"),
        (["topics", "create", "x", "--lateness", "soon"], "invalid_input"),
        (["topics", "show", "nope"], "topic_not_found"),
        (["produce", "nope"], "topic_not_found"),
        (["produce", "orders", "nope.jsonl"], "file_not_found"),
        (["produce", "orders", "."], "invalid_input"),
        (["produce", "orders", "--key", "id"], "invalid_input"),
        (["produce", "orders", "--key-separator", ":"], "invalid_input"),
        (["produce", "orders", "--delimiter", "ab"], "invalid_input"),
        (["tail", "nope"], "topic_not_found"),
        (["tail", "orders", "--columns", "nope"], "invalid_input"),
        (["tail", "orders", "--columns", ","], "invalid_input"),
        (["tail", "orders", "--from", "bogus"], "invalid_input"),
        (["tail", "orders", "--from", "99"], "invalid_input"),
        (["tail", "orders", "--where", "nope > 1"], "invalid_input"),
        (["tail", "orders", "--where", "amount >"], "invalid_input"),
        (["sql", "select * from nope"], "topic_not_found"),
        (["sql", "selec"], "invalid_input"),
        (["sql", "select 1; select 2"], "invalid_input"),
        (["sql", ""], "invalid_input"),
        (["-l", "s3://x", "topics", "list"], "unsupported"),
        (["-l", "memory://", "doctor"], "unsupported"),
    ],
)
def test_what_cannot_work_is_told_with_code_and_advice(orders: Command, arguments: list[str], code: str) -> None:
    result = orders(*arguments)
    assert "events appended" not in result.out
    refused(result, code)


@pytest.mark.parametrize(
    "words",
    [
        ["topics", "list"],
        ["topics", "delete", "x", "--yes"],
        ["produce", "x"],
        ["tail", "x"],
        ["sql", "select 1"],
        ["doctor"],
    ],
)
def test_only_create_makes_a_log(command: Command, words: list[str]) -> None:
    refused(command(*words), "log_not_found", "--log")
    assert not Path("data").exists()


def test_wrong_usage_ends_with_code_two(command: Command) -> None:
    assert command("topics", "create", "x", "--durability", "perhaps").code == 2
    assert command("nope").code == 2


def test_the_log_is_named_before_or_behind_the_command(orders: Command) -> None:
    assert json.loads(orders("topics", "list", "--json", "-l", "data").out)[0]["topic"] == "orders"
    assert json.loads(orders("--log", f"file://{Path('data').resolve()}", "topics", "list", "--json").out)
    refused(orders("topics", "list", "-l", "elsewhere"), "log_not_found")


def test_doctor_finds_and_repairs(orders: Command) -> None:
    """Exit code 1 says that an error remains."""
    assert "healthy" in orders("doctor").out
    head = next(Path("data/topics/orders").glob("*/head"))
    head.write_bytes(b"\xff" * head.stat().st_size)
    found = orders("doctor")
    assert found.code == 1 and str(head.name) in found.out and "--repair" in found.out
    assert json.loads(orders("doctor", "--json").out)["findings"][0]["severity"] == "error"
    repaired = orders("doctor", "--repair")
    assert repaired.code == 0 and "repaired" in repaired.out
    assert "healthy" in orders("doctor").out
    assert len(orders("tail", "orders").rows) == 3


def test_damaged_events_are_never_served(orders: Command) -> None:
    for frames in Path("data/topics/orders").glob("*/*.frames"):
        data = bytearray(frames.read_bytes())
        at = data.find(b"o1")
        if at > 0:
            data[at : at + 2] = b"XX"
            frames.write_bytes(data)
    for command in (["tail", "orders"], ["sql", "select * from orders"]):
        result = orders(*command)
        assert result.code == 1 and "error [damaged]" in result.err and "XX" not in result.out


def test_a_folder_of_a_newer_format_is_refused(orders: Command) -> None:
    marker = Path("data/headwater")
    marker.write_bytes(re.sub(rb"^headwater log \d+", b"headwater log 99", marker.read_bytes()))
    for command in (["topics", "list"], ["tail", "orders"], ["produce", "orders"], ["topics", "create", "x"]):
        refused(orders(*command), "format_too_new", "99", "Upgrade")


def test_the_debug_flag_shows_the_traceback(orders: Command) -> None:
    process = subprocess.run([*COMMAND, "--debug", "tail", "nope"], capture_output=True, text=True)
    assert process.returncode == 1 and "Traceback" in process.stderr and "error [topic_not_found]" in process.stderr


def test_an_unexpected_error_is_told_as_a_bug(orders: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.log.log.Log.topics", lambda log: 1 / 0)
    refused(orders("topics", "list"), "bug", "HEADWATER_DEBUG")


AS_NOBODY = f"""
import contextlib, io, os, sys
from headwater.cli.main import main

def call():
    try:
        main()
    except SystemExit as ended:
        return ended.code

if os.geteuid() == 0:
    # Root may do everything, so it becomes somebody else; not before every module is loaded, which only root may read.
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())), contextlib.redirect_stderr(io.StringIO()):
        call()
    os.setgid({NOBODY})
    os.setuid({NOBODY})
sys.exit(call())
"""


def as_nobody(*arguments: str) -> Result:
    """Call the command line as a user without rights."""
    process = subprocess.run([sys.executable, "-c", AS_NOBODY, *arguments], capture_output=True, text=True)
    return Result(process.returncode, process.stdout, process.stderr)


@pytest.fixture
def reachable(orders: Command) -> Iterator[Path]:
    """A log with a topic `orders` in a folder that every user can reach; pytest's own folders are private."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(shutil.copytree("data", f"{folder}/data"))
        for path in [Path(folder) / "data", *Path(folder).rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_folder_without_rights_is_told(reachable: Path) -> None:
    reachable.chmod(0o700 if os.geteuid() == 0 else 0o000)
    refused(as_nobody("-l", str(reachable), "topics", "list"), "no_access", "permissions")


def test_a_log_that_may_only_be_read_is_read(reachable: Path) -> None:
    for path in sorted(reachable.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    read = as_nobody("-l", str(reachable), "tail", "orders")
    assert (read.code, len(read.rows)) == (0, 3), read.err
    refused(as_nobody("-l", str(reachable), "topics", "create", "x"), "no_access")


def test_the_command_line_starts_quickly() -> None:
    """Nothing heavy is loaded before a command needs it."""
    script = "import sys, headwater.cli.main; print([m for m in ('pyarrow', 'duckdb', 'numpy', 'sqlglot') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "[]"


def test_version_and_coverage(command: Command) -> None:
    assert command("--version").out == f"headwater {hw.__version__}\n"
    assert json.loads(command("coverage", "--json").out)
    assert "topics" in command("--help").out


def test_the_example_runs(tmp_path: Path) -> None:
    example = [sys.executable, str(ROOT / "examples" / "orders.py"), str(tmp_path / "log")]
    process = subprocess.run(example, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "'o1': 'paid'" in process.stdout
