"""The words that users meet: errors, their advice, warnings and help texts, in plain English as far as a machine can see it.

A template counts as one text, with `…` for each value in it. The parts of a conditional expression are texts of their own.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headwater.model import errors

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "headwater"
# Packages join this list as their texts are put right.
DONE = [
    "app",
    "capture",
    "cli",
    "databases",
    "formats",
    "model",
    "processing",
    "query",
    "server",
    "sinks",
    "testing",
    "verify",
    "views",
]
FILES = sorted(file for folder in DONE for file in (PACKAGE / folder).rglob("*.py"))

ERRORS = {name for name, _ in inspect.getmembers(errors, inspect.isclass)}
LOG_METHODS = {"debug", "info", "warning", "error", "exception"}
SENTENCE_WORDS_MAX = 30
VALUE = "…"

# What reads slowly or is not idiomatic, and what to write in its place.
NOT_OURS = {
    r"\banew\b": "again",
    r"\bwh(o|at|ere)ever\b": "name the actor",
    r"\b(is|are|was|were) no(ne)? (?!longer|more)\w": "is not a …, does not exist",
    r"\b(so|that) (many|long|often)\b": "at most this many",
    r"\bunless told\b": "Default: …",
    r"\bunless said\b": "Default: …",
    r"\bstands?\b|\bstood\b": "is",
    r"\btold\b|\btells?\b": "reports, prints, says",
    r"\basked\b": "queried, requested",
    r"\bgoes? on\b|\bwent on\b": "continues, resumes",
    r"\bfor ever\b": "forever, permanently",
    r"\bby (itself|themselves)\b": "name the actor",
    r"\bby now\b": "now",
    r"\b(is|are) there (already|as)\b|\bthere already\b": "already exists",
    r"\bthose that there are\b|\bthose there are\b": "name them",
    r"\bbehind (the|a|an|what|it|its)\b": "after",
    r"\bmade of (it|them)\b": "built from",
    r"\b(cannot|can not) be had\b": "is not available",
    r"\bnot known\b": "unknown",
}
# Texts that name a thing and are no sentence: a value in another text, which the test of that text covers.
STARTS = re.compile(rf"[A-Z0-9`\"'\-{VALUE}$]|headwater\b|pip\b|https?:|\w+\(|\w+=|_\w|[a-z]+\.|[a-z]+_")


@dataclass(frozen=True)
class Text:
    """One text of the package, with its place."""

    kind: str
    place: str
    text: str


def texts(file: Path) -> Iterator[Text]:
    """Every message of an error, advice, help text and log line of a module."""
    module = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            for kind, value in _arguments(node):
                yield from _texts_of(file, kind, value)
        if isinstance(node, ast.FunctionDef) and any("command" in ast.unparse(one) for one in node.decorator_list):
            yield Text("help", f"{file.relative_to(PACKAGE)}:{node.lineno}", ast.get_docstring(node) or "")
    if file.parent.name == "commands" or file.name == "run.py":
        for function in module.body:
            if isinstance(function, ast.FunctionDef) and not function.name.startswith("_") and _is_command(function):
                yield Text("help", f"{file.relative_to(PACKAGE)}:{function.lineno}", ast.get_docstring(function) or "")


def _is_command(function: ast.FunctionDef) -> bool:
    return any("typer." in ast.unparse(one.annotation) for one in function.args.args if one.annotation is not None)


def _arguments(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = ast.unparse(call.func).rpartition(".")[2]
    if name in ERRORS and call.args:
        yield "message", call.args[0]
    if name == "ServerError":
        yield "message", call.args[1]
    if name in LOG_METHODS and call.args and "log" in ast.unparse(call.func).lower():
        yield "log line", call.args[0]
    for word in call.keywords:
        if word.arg in ("advice", "help"):
            yield word.arg, word.value


def _texts_of(file: Path, kind: str, value: ast.expr) -> Iterator[Text]:
    if isinstance(value, ast.IfExp):
        yield from _texts_of(file, kind, value.body)
        yield from _texts_of(file, kind, value.orelse)
    elif (text := template(value)) is not None:
        yield Text(kind, f"{file.relative_to(PACKAGE)}:{value.lineno}", text)


def template(value: ast.expr) -> str | None:
    """The text of a string or an f-string; None where it is computed elsewhere."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else None
    if isinstance(value, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in value.values)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        left, right = template(value.left), template(value.right)
        return None if left is None and right is None else f"{left or VALUE}{right or VALUE}"
    return None


ALL = [text for file in FILES for text in texts(file) if text.text]


def none_of(found: list[Text], better: str = "") -> None:
    assert not found, "\n".join([better, *(f"{one.place}: {one.text}" for one in found)])


@pytest.mark.parametrize("pattern", NOT_OURS, ids=lambda pattern: NOT_OURS[pattern])
def test_texts_use_the_words_of_the_field(pattern: str) -> None:
    """Each of these shapes has a plainer one, which the table names."""
    none_of([one for one in ALL if re.search(pattern, one.text)], f"better: {NOT_OURS[pattern]}")


def test_sentences_are_short() -> None:
    """One idea in each."""
    sentences = [(one, re.split(r"(?<=[.?!;:])\s", one.text)) for one in ALL]
    none_of([one for one, parts in sentences if max(len(part.split()) for part in parts) > SENTENCE_WORDS_MAX])


def test_texts_end_with_a_full_stop() -> None:
    """A text that ends with a value ends as the value does."""
    ended = re.compile(rf"([.?:;)]|{VALUE}|[.?]['\")]|``)$")
    none_of([one for one in ALL if one.kind != "log line" and not ended.search(one.text)])


def test_texts_are_sentences() -> None:
    """They begin as a sentence does, or with a name."""
    none_of([one for one in ALL if not STARTS.match(one.text)])


def test_texts_are_found() -> None:
    """The collector sees all kinds."""
    assert {one.kind for one in ALL} >= {"message", "advice", "help", "log line"} and len(ALL) > 300
