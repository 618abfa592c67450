"""The documentation's Python blocks run: a page is one program, in a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PAGES = sorted(
    page for page in [_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md")] if _BLOCK.search(page.read_text())
)

_README = _BLOCK.findall((_ROOT / "README.md").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_a_pages_blocks_run_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    """What a newcomer copies works, with warnings as errors."""
    program = tmp_path / "page.py"
    program.write_text("\n".join(_BLOCK.findall(page.read_text())))
    _run(program)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(_README)))
def test_each_block_of_the_readme_runs_twice_in_one_folder(number: int, tmp_path: Path) -> None:
    """A newcomer runs a snippet again, and it works again."""
    program = tmp_path / "block.py"
    program.write_text(_README[number])
    _run(program)
    _run(program)


def test_the_readmes_example_is_short() -> None:
    """Twenty-odd lines say what it is."""
    assert len([line for line in _README[0].splitlines() if line.strip()]) <= 20


def _run(program: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=program.parent,
        env=os.environ | {"PYTHONPATH": str(_ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
