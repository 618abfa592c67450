"""The command line as tests call it: in a folder of its own where `data` is the log, and never ending in a traceback."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from headwater.cli.main import main


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


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Command:
    """Calls `headwater …`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWATER_LOG", "./data")
    monkeypatch.setenv("HEADWATER_DEBUG", "")

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        monkeypatch.setattr(sys, "argv", ["headwater", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = (text.decode() for text in capsysbinary.readouterr())
        assert "Traceback" not in out + err
        return Result(ended.value.code if isinstance(ended.value.code, int) else 0, out, err)

    return call


def refused(result: Result, code: str, *words: str) -> None:
    """Check that an error is told as it should be: code, what happened and what to do next, on stderr only."""
    assert result.code == 1
    assert not result.out
    assert re.search(rf"^error \[{code}\]: ", result.err, re.MULTILINE), result.err
    assert re.search(r"^next: ", result.err, re.MULTILINE), result.err
    for word in words:
        assert word in result.err
