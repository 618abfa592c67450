"""The demonstration: its claim is proved, its proof can fail, and nothing of it is left behind."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

import headwater as hw
from headwater.cli.demo.orders import SCHEMA, TOPIC, order, orders_until
from headwater.cli.demo.proof import prove, stored

CLAIM = re.compile(r"✓ ([\d,]+) events acknowledged, ([\d,]+) in the log, each exactly once")
GONE_S_MAX = 20.0


def start(folder: Path, *, seconds: int, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start the demonstration with its temporary folder in `folder`, by which its processes can be told."""
    # As a shell in the foreground would: Ctrl-C is not ignored, even where the tests ignore it.
    command = [
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "headwater.cli.main",
        "demo",
        "--seconds",
        str(seconds),
    ]
    environment = os.environ | {"TMPDIR": str(folder), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)


def processes_of(folder: Path) -> list[str]:
    """Find the command lines of all processes that name the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found


def assert_all_gone(folder: Path) -> None:
    deadline = time.monotonic() + GONE_S_MAX
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


@pytest.mark.slow
def test_without_a_terminal_it_proves_the_count_and_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, seconds=6)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    claim = CLAIM.search(out)
    assert claim is not None and claim[1] == claim[2]
    assert int(claim[1].replace(",", "")) > 1_000
    assert "kill -9" in out and "starts again" in out and "revenue" in out
    assert "\x1b" not in out, "no terminal, no escape sequences"
    assert processes_of(tmp_path) == [] and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_on_a_terminal_it_draws_and_proves_the_same(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = start(tmp_path, seconds=5, stdout=theirs)
    os.close(theirs)
    drawn: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 65_536):
                drawn.append(data)
        except OSError:
            return  # a terminal whose other side is closed

    reader = threading.Thread(target=read)
    reader.start()
    _, err = process.communicate(timeout=60)
    reader.join(timeout=20)
    os.close(ours)
    screen = b"".join(drawn).decode()
    assert (process.returncode, err) == (0, "")
    assert CLAIM.search(screen)
    assert "partition 0" in screen and "catching up" in screen and "killed" in screen


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_process_survives_the_end_of_the_demonstration(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Whatever ends it: Ctrl-C, a service manager, or a crash of its own."""
    process = start(tmp_path, seconds=40)
    assert process.stdout is not None
    while "four shops sell" not in process.stdout.readline():
        assert process.poll() is None
    assert len(processes_of(tmp_path)) == 4
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, "")
    assert_all_gone(tmp_path)
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def test_the_proof_finds_what_is_lost_doubled_or_made_up() -> None:
    """A proof that cannot fail proves nothing."""
    now = datetime.now(UTC)
    with hw.open_log("memory://") as log:
        log.create_topic(TOPIC, SCHEMA, key="id", time="at")
        log.append(TOPIC, [order("north", number, now) for number in range(10)])
        log.append(TOPIC, [order("east", number, now) for number in (0, 1, 1, 3)])
        log.append(TOPIC, [order("west", 0, now) | {"amount": 0.01}])
        lines = {line.shop: line for line in prove(log, {"north": 10, "east": 4, "west": 1})}
        assert lines["north"].is_right and stored(log, "north") == 10
        assert not lines["east"].is_right and (lines["east"].lost, lines["east"].doubled) == (1, 1)
        assert not lines["west"].is_right and (lines["west"].lost, lines["west"].never_sent) == (1, 1)


def test_orders_of_a_shop_only_grow() -> None:
    counts = [orders_until(tenths / 10, rate=1_000, phase=2) for tenths in range(600)]
    assert counts == sorted(counts) and counts[0] == 0 and 0.9 < counts[-1] / 59_900 < 1.1
