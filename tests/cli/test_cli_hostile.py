"""Hostile values on the command line: whatever a person, a script or a file gives, the answer is a sentence, never a bug of ours.

Every command has one call that works here; then each of its options and arguments gets each value of a table. What comes of it may be an
answer, a refusal (exit code 1) or wrong usage (2): never `error [bug]`, and never a traceback, which `commands` looks for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from headwater.cli.main import app
from tests.rigs.commands import ORDERS, Command, Result, refused

NUMBERS = [
    "9" * 20,
    "-" + "9" * 20,
    "9" * 400,
    str(2**63 - 1),
    "-1",
    "0",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "٣",
    "0x10",
    "1_0",
]
TEXTS = [
    "", " ", "\udcff", "a\udcffb", "\x1b[31mred", "😀" * 300, "9" * 5_000, "..", "/", "a/b", "-", "=", ",", ":", "[", "'", '"', "%s",
    "infinity", "-infinity", "epoch", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59.999999-23:59", "999999999 days",
    "99999999999999999999 weeks", "9" * 400 + " days", "-1 day", "nan seconds", "[" * 50_000, "(" * 5_000,
    "select 'infinity'::timestamp", "sqlite:///\udcff?table=a", "kafka://[", "kafka://:99999999", "postgresql://[::1/a", "s3://",
    "id STRING, id STRING", "a DECIMAL(99,99)", "STRUCT<" * 2_000,
]  # fmt: skip
# A call of each command that works, in a folder with the log `data` and some files.
CALLS: dict[str, list[str]] = {
    "produce": ["orders", "rows.jsonl"],
    "tail": ["orders"],
    "lag": ["billing", "--once"],
    "sql": ["select * from orders"],
    "doctor": [],
    "mirror": ["data", "copy"],
    "backup": ["data", "saved"],
    "restore": ["saved", "restored"],
    "export": ["orders", "out.jsonl", "--force"],
    "import": ["rows.jsonl", "orders"],
    "verify": ["topic:orders", "topic:orders"],
    "topics create": ["made", "--exist-ok"],
    "topics list": [],
    "topics show": ["orders"],
    "topics alter": ["orders"],
    "topics tidy": ["orders"],
    "topics delete": ["absent", "--yes"],
    "queues list": [],
    "queues show": ["orders", "--group", "workers"],
    "queues peek": ["orders", "--group", "workers"],
    "queues dead": ["orders", "--group", "workers"],
    "queues redrive": ["orders", "--group", "workers"],
    "queues delete": ["orders", "--group", "absent", "--yes"],
    "groups list": [],
    "groups show": ["billing"],
    "groups reset": ["billing", "--to", "earliest", "--yes"],
    "groups delete": ["absent", "--yes"],
    "views list": [],
    "views show": ["absent"],
    "views get": ["absent", "id=1"],
    "views sql": ["select 1 as one"],
    "views watch": ["absent", "--changes-max", "1"],
    "state list": ["data"],
    "state show": ["data", "absent"],
    "capture run": ["sqlite:///shop.db?table=users", "--available-now"],
    "capture list": [],
    "capture status": ["absent"],
    "capture remove": ["absent", "--yes"],
    "capture export": ["absent", "--to", "copy", "--available-now"],
    "status": ["absent.py"],
    "plan": ["absent.py"],
    "run": ["absent.py"],
}
LEFT_OUT = {"demo", "coverage"}
"""These take no text: numbers with limits, and nothing."""


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command with its name."""
    if not hasattr(command, "commands"):
        yield " ".join(path), command
        return
    for name, inner in command.commands.items():
        yield from leaves(inner, (*path, name))


COMMANDS = dict(leaves(typer.main.get_command(app)))


@pytest.fixture
def shop(command: Command, tmp_path: Path) -> Command:
    """The command line in a folder with a log, a queue, a group, a backup and a database."""
    import sqlite3

    from headwater.log.log import open_log

    assert command("topics", "create", "orders", "--schema", ORDERS, "--key", "id", "--time", "at").code == 0
    row = json.dumps({"id": "o1", "amount": 1.5, "at": "2026-01-01T00:00:00Z"})
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    assert command("produce", "orders", "rows.jsonl").code == 0
    with open_log("./data") as log:
        with log.consumer("orders", group="billing") as consumer:
            consumer.poll(timeout_s=5.0)
            consumer.commit()
        with log.queue("orders", group="workers") as queue:
            queue.lease(events_max=1)
    assert command("backup", "data", "saved").code == 0
    with sqlite3.connect(tmp_path / "shop.db") as database:
        database.execute("create table users (id integer primary key, name text)")
    database.close()
    return command


def calls_of(name: str) -> Iterator[list[str]]:
    """Each option and each argument of a command, with each hostile value in its place."""
    base = CALLS[name]
    for number in range(len([word for word in base if not word.startswith("--")])):
        for value in TEXTS:
            if not value.startswith("-"):
                yield [*base[:number], value, *base[number + 1 :]]
    for parameter in COMMANDS[name].params:
        if not parameter.opts[0].startswith("-") or parameter.is_flag:
            continue
        annotation = str(parameter.type_descriptor.annotation)
        values = NUMBERS if "int" in annotation or "float" in annotation else [*NUMBERS, *TEXTS]
        for value in values:
            yield [*base, f"{parameter.opts[0]}={value}"]


def check(shop: Command, name: str, words: list[str]) -> Result:
    called = [*name.split(), *words]
    result = shop(*called)
    assert result.code in (0, 1, 2), called
    assert "error [bug]" not in result.err, (called, result.err)
    return result


def test_every_command_is_in_the_table() -> None:
    """A new command gets its line here."""
    assert set(COMMANDS) == set(CALLS) | LEFT_OUT


def test_some_hostile_values_are_answered_in_a_sentence(shop: Command) -> None:
    """A few for each command, chosen by its name; all of them are in the long tier."""
    for name in CALLS:
        calls = [words for words in calls_of(name) if "kafka://" not in "".join(words)]  # a broker is waited for
        for words in random.Random(name).sample(calls, min(4, len(calls))):
            check(shop, name, words)


@pytest.mark.bench
@pytest.mark.parametrize("name", sorted(CALLS))
def test_all_hostile_values_are_answered_in_a_sentence(shop: Command, name: str) -> None:
    """The whole table."""
    found = []
    for words in calls_of(name):
        try:
            check(shop, name, words)
        except AssertionError as error:
            found.append(f"{name} {[word[:80] for word in words]}: {str(error)[-300:]}")
    assert not found, "\n".join(found)


FOUND: list[tuple[list[str], str]] = [
    (["tail", "orders", "--last", "9" * 20], ""),
    (["tail", "orders", "--from", "9" * 5_000], "is not a place in a topic"),
    (["tail", "orders", "--from", "9" * 400 + " days"], "is not a place in a topic"),
    (["export", "orders", "\udcff", "--force"], "half of a surrogate pair"),
    (["groups", "reset", "billing", "--to", "999999999 days", "--yes"], ""),
    (["mirror", "data", "copy", "--pattern", "(" * 5_000], "is not a regular expression"),
    (["sql", "\udcff"], "half of a surrogate pair"),
    (["topics", "create", "made", "--retention", "9" * 400 + " days"], "longer than 146,000 years"),
    (["queues", "peek", "orders", "\udcff"], "half of a surrogate pair"),
]


@pytest.mark.parametrize(("words", "told"), FOUND, ids=lambda each: each[0] if isinstance(each, list) else "")
def test_values_that_were_bugs_are_answered(shop: Command, words: list[str], told: str) -> None:
    """Each of these ended in `error [bug]`."""
    assert told in check(shop, words[0], words[1:]).err


def test_times_beyond_pythons_years_are_shown(shop: Command) -> None:
    """DuckDB has infinite times, and years beyond 9999; nothing else in the answer suffers from them."""
    asked = "select 'infinity'::timestamp a, '-infinity'::date b, ['infinity'::timestamptz] c, '2026-01-31'::date d"
    assert shop("sql", asked, "--format", "json").rows == [
        {"a": "infinity", "b": "-infinity", "c": ["infinity"], "d": "2026-01-31"}
    ]
    for form in ("json", "csv", "table"):
        answered = shop("sql", "select * from test_all_types()", "--format", form)
        assert (answered.code, answered.err) == (0, ""), form


@pytest.mark.parametrize("options", [[], ["--create"], ["--skip-bad"]], ids=["", "create", "skip-bad"])
def test_json_that_is_nested_too_deep_is_refused(shop: Command, options: list[str]) -> None:
    """Neither our decoder nor Arrow's, which would end the process, is let into it."""
    deep = b'{"id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    result = shop("produce", "fresh" if "--create" in options else "orders", *options, stdin=deep)
    assert "nested" in result.err
    assert "error [bug]" not in result.err


def test_a_question_has_limits_of_time_and_memory(shop: Command) -> None:
    """`headwater sql` ends where it takes too long or too much, and says which option gives it more."""
    refused(shop("sql", "select count(*) from range(1000000000000)", "--timeout", "0.2"), "timed_out", "--timeout")
    much = "select list(x order by x desc) from range(50000000) t(x)"
    refused(shop("sql", much, "--memory", "32"), "invalid_input", "--memory")
    assert shop("sql", "select count(*) as n from orders", "--timeout", "inf", "--memory", "100").rows == [{"n": 1}]
