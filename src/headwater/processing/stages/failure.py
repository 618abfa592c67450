"""A failure of a query: what its error is about, and how it is told in a sentence.

Spark carries what a worker raised as text, with a traceback in it; so it is looked for in the text.
"""

from __future__ import annotations

import re
from pathlib import Path

from headwater.processing.graph.graph import StageNode

_NO_MEMORY = re.compile(r"^(?:[\w.: ]+[. ])?(?:OutOf)?MemoryError\b", re.MULTILINE)
_WORKER_DIED = re.compile(r"Python worker (exited unexpectedly|failed to connect back)|PYTHON_WORKER_EXITED")
_DATA_EXCEPTION = re.compile(r"SQLSTATE: 22")
_RAISED = re.compile(r"^(?:: )?(?:[\w.$]+\.)?([A-Z]\w*(?:Error|Exception|Warning): .*)$", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def is_about_data(error: BaseException) -> bool:
    """Whether it is the events, or the function, that an error is about: Python raised it, or SQL calls it a data exception.

    Anything else (a worker that did not start, a dead machine, no memory) may be gone at the next attempt.
    """
    text = str(error)
    if _NO_MEMORY.search(text) or _WORKER_DIED.search(text):
        return False
    return "Traceback (most recent call last)" in text or _DATA_EXCEPTION.search(text) is not None


def sentence(error: BaseException, stage: StageNode) -> str:
    """The part of an error that says most: what Python raised and in which line of the script, or Spark's first line."""
    text = str(error)
    if _WORKER_DIED.search(text):
        return "A Python process of Spark died, or did not start in time: killed, out of memory, or a busy machine."
    raised = _RAISED.findall(text)
    if not raised:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[0] if lines else type(error).__name__
    script = stage.function.__code__.co_filename if stage.function is not None else ""
    lines = [number for file, number in _FRAME.findall(text) if file == script]
    return f"{Path(script).name}:{lines[-1]}: {raised[-1]}" if lines else raised[-1]
