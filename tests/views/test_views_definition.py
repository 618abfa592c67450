"""What a view is: definitions that are refused, what changed in one, and the texts of keys."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from headwater.databases.keys import key_texts
from headwater.model.errors import InvalidInput
from headwater.views.definition import ViewDefinition, check_definition, code_fingerprint, define_view
from headwater.views.view import key_text

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "../x"}, ["'../x'", "view's name"]),
        ({"name": "x" * 190}, ["too long"]),
        ({"key": "nope"}, ["'nope'", "key"]),
        ({"key": ()}, ["no key", "update"]),
        ({"key": "tags"}, ["'tags'", "a key cannot have"]),
        ({"mode": "replace"}, ["'replace'"]),
        ({"order": "-nope"}, ["'nope'", "order"]),
        ({"limit": 0}, ["limit 0"]),
    ],
)
def test_a_definition_that_cannot_work_is_refused(settings: dict[str, Any], words: list[str]) -> None:
    """Before anything is made of it."""
    good: dict[str, Any] = {"name": "v", "schema": "k STRING, n BIGINT, tags ARRAY<STRING>", "key": "k"}
    with pytest.raises(InvalidInput) as caught:
        define_view(**good | settings)
    assert all(word in str(caught.value) for word in words) and caught.value.advice


def test_what_changed_is_said() -> None:
    """One sentence names the difference; order and limit are only how rows are read."""
    was = define_view("v", "k STRING, n BIGINT", key="k", code="select 1")
    assert check_definition(was, msgspec.structs.replace(was, order=("-n",), limit=3)).same
    for settings, words in (
        ({"schema": "k STRING, n DOUBLE"}, ["n BIGINT", "n DOUBLE"]),
        ({"key": ["k", "n"]}, ["(k)", "(k, n)"]),
        ({"mode": "complete"}, ["update", "complete"]),
        ({"code": "select 2"}, ["code"]),
    ):
        given = {"schema": "k STRING, n BIGINT", "key": "k", "code": "select 1"} | settings
        verdict = check_definition(was, define_view("v", **given))
        assert not verdict.same and all(word in verdict.why for word in words), verdict
    assert ViewDefinition.from_json(was.to_json()) == was


def test_the_fingerprint_of_code_is_what_it_does() -> None:
    """Comments, layout and docstrings do not count; a constant does."""

    def one(clicks: Any) -> Any:
        """Says something."""
        return clicks.limit(1)  # a comment

    first = code_fingerprint(one)

    def one(clicks: Any) -> Any:
        return clicks.limit(1)

    assert code_fingerprint(one) == first

    def one(clicks: Any) -> Any:
        return clicks.limit(2)

    assert code_fingerprint(one) != first
    assert code_fingerprint("select  1\n") == code_fingerprint("select 1") != code_fingerprint("select 2")
    assert code_fingerprint(len) != code_fingerprint(max)


def test_texts_of_keys_are_as_written() -> None:
    """They are stored: another text for the same key would be another row."""
    definition = define_view("v", "a STRING, at TIMESTAMP, n DOUBLE, x BINARY, d DATE, b BOOLEAN", key=["a", "at", "n"])
    assert key_text(definition, {"a": "a|b\\", "at": NOON, "n": -0.0}) == "a\\pb\\\\|1769860800000000|0"
    assert key_text(definition, {"a": None, "at": None, "n": 1.5}) == "\\N|\\N|1.5"
    rows = pa.table({"x": [b"\x00\xff", None], "d": pa.array([NOON.date(), None]), "b": [True, None]})
    assert key_texts(rows, ["x", "d", "b"]).to_pylist() == ["00ff|2026-01-31|true", "\\N|\\N|\\N"]
    texts = key_texts(pa.table({"a": ["\\N", None, "\\\\N", ""]}), ["a"]).to_pylist()
    assert len(set(texts)) == 4
