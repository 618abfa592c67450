"""The command line as tests call it: in a folder of its own where `data` is the log, and never ending in a traceback."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import typer.main

from headwater.cli.main import main

COMMAND = [sys.executable, "-m", "headwater.cli.main"]
ORDERS = "id STRING, amount DOUBLE, at TIMESTAMP"
"""The columns of the topic `orders`."""


@dataclass(frozen=True)
class Result:
    """What a call left behind."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, object]]:
        """The JSON lines on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


Command = Callable[..., Result]

_built = cache(typer.main.get_command)
"""The command line, put together once: that takes longer than most commands."""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Command:
    """Calls `headwater …`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWATER_LOG", "./data")
    monkeypatch.setenv("HEADWATER_DEBUG", "")
    monkeypatch.setattr(typer.main, "get_command", _built)

    def call(*arguments: object, stdin: str | bytes = b"") -> Result:
        given = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        monkeypatch.setattr(sys, "argv", ["headwater", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = (text.decode() for text in capsysbinary.readouterr())
        assert "Traceback" not in out + err
        return Result(ended.value.code if isinstance(ended.value.code, int) else 0, out, err)

    return call


@pytest.fixture
def orders(command: Command) -> Command:
    """The command line, with a topic `orders` of three events."""
    assert command("topics", "create", "orders", "--schema", ORDERS, "--key", "id", "--time", "at").code == 0
    lines = [{"id": f"o{n}", "amount": n + 0.5, "at": f"2026-01-0{n}T00:00:00Z"} for n in (1, 2, 3)]
    assert command("produce", "orders", stdin="".join(json.dumps(line) + "\n" for line in lines)).code == 0
    return command


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start the command line as a shell in the foreground would: Ctrl-C is not ignored, even where the tests ignore it."""
    words = ["env", "--default-signal=INT", *COMMAND, *arguments]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def refused(result: Result, code: str, *words: str) -> None:
    """Check that an error is told as it should be: code, what happened and what to do next, on stderr only."""
    assert result.code == 1
    assert not result.out
    assert re.search(rf"^error \[{code}\]: ", result.err, re.MULTILINE), result.err
    assert re.search(r"^next: ", result.err, re.MULTILINE), result.err
    for word in words:
        assert word in result.err
