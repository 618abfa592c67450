"""What a statement of the binlog does to tables, as far as a capture has to know: which one, and whether its rows are others now.

A statement is not understood, only sorted: what is not known for sure to leave the rows alone counts as rewriting them, and the table
is copied again. Known to be harmless are clauses about indexes and constraints, a column that is dropped, and one that is added empty.
Functions and frozen data only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

Doing = Literal["truncated", "altered", "rewritten", "gone"]
"""`altered`: other columns, but no value is another than before. `gone`: dropped or renamed, or made anew under this name."""

_TOKENS = re.compile(
    r"""`(?P<name>(?:[^`]|``)*)` | "(?P<double>(?:[^"\\]|\\.|"")*)" | '(?:[^'\\]|\\.|'')*' |
        (?P<word>[\w$]+) | (?P<mark>[^\s\w]) """,
    re.VERBOSE | re.DOTALL,
)
_COMMENTS = re.compile(
    r"""(?P<kept>`(?:[^`]|``)*`|'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")|/\*M?!\d*(?P<inside>.*?)\*/|/\*.*?\*/|(?:--\s|\#)[^\n]*""",
    re.DOTALL,
)
_INDEX_WORDS = {"INDEX", "KEY", "UNIQUE", "PRIMARY", "FULLTEXT", "SPATIAL", "CONSTRAINT", "FOREIGN", "CHECK", "PERIOD"}
_HARMLESS = {
    "COMMENT",
    "AUTO_INCREMENT",
    "ENGINE",
    "LOCK",
    "ALGORITHM",
    "ENABLE",
    "DISABLE",
    "ROW_FORMAT",
    "FORCE",
    "ORDER",
}
_FILLING = {
    "DEFAULT",
    "NOT",
    "AS",
    "GENERATED",
    "AUTO_INCREMENT",
    "SERIAL",
    "PRIMARY",
    "TIMESTAMP",
    "PARTITION",
    "SYSTEM",
}
_NO_ROWS = {
    "CREATE",
    "DROP",
    "ALTER",
    "GRANT",
    "REVOKE",
    "SET",
    "FLUSH",
    "ANALYZE",
    "OPTIMIZE",
    "REPAIR",
    "SAVEPOINT",
    "RELEASE",
}


class Effect(NamedTuple):
    """What happened to a table."""

    database: str
    table: str
    doing: Doing


class _Token(NamedTuple):
    text: str
    is_name: bool
    """Quoted, so never a keyword."""

    @property
    def word(self) -> str:
        return "" if self.is_name else self.text.upper()


def effects(statement: str, database: str, known: Collection[str]) -> list[Effect]:
    """What a statement does to tables; `database` is the one in use, `known` the tables whose names matter outside of DDL."""
    tokens = list(_tokens(statement))
    words = [token.word for token in tokens[:6]] + [""] * 6
    first = words[0]
    if first == "TRUNCATE":
        return [Effect(*name, "truncated") for name, _ in [_named(tokens, 1 + (words[1] == "TABLE"), database)]]
    if first == "ALTER" and "TABLE" in words[1:4]:
        return _altered(tokens, words.index("TABLE") + 1, database)
    if first == "DROP" and words[1] in ("DATABASE", "SCHEMA"):
        at = 4 if words[2] == "IF" else 2
        return [Effect(tokens[at].text, table, "gone") for table in known] if at < len(tokens) else []
    if first == "RENAME" and words[1] in ("TABLE", "TABLES"):
        return [Effect(*name, "gone") for name in _names(tokens, 2, database)]
    if first == "DROP" and "TABLE" in words[1:3] and "TEMPORARY" not in words[1:3]:
        return [Effect(*name, "gone") for name in _names(tokens, words.index("TABLE") + 1, database)]
    if first == "CREATE" and "TABLE" in words[1:5] and "TEMPORARY" not in words[1:5]:
        at = words.index("TABLE") + 1
        if words[at] == "IF":  # one that is there stays as it is
            return []
        return [Effect(*name, "gone") for name, _ in [_named(tokens, at, database)]]
    if not first or first in _NO_ROWS:
        return []
    said = {token.text for token in tokens}
    return [Effect(database, table, "rewritten") for table in known if table in said]


def _tokens(statement: str) -> Iterator[_Token]:
    """Words, names and marks; of comments only those that the server reads, too."""
    bare = _COMMENTS.sub(lambda found: found["kept"] or found["inside"] or " ", statement)
    for found in _TOKENS.finditer(bare):
        if found["name"] is not None:
            yield _Token(found["name"].replace("``", "`"), True)
        elif found["double"] is not None:
            yield _Token(found["double"], True)
        elif found["word"] is not None:
            yield _Token(found["word"], False)
        elif found["mark"] is not None:
            yield _Token(found["mark"], False)
        else:
            yield _Token("'", False)


def _named(tokens: list[_Token], at: int, database: str) -> tuple[tuple[str, str], int]:
    """A table's name, with or without its database, and what follows it."""
    while at < len(tokens) and tokens[at].word in ("IF", "NOT", "EXISTS"):
        at += 1
    if at + 2 < len(tokens) and tokens[at + 1].word == ".":
        return (tokens[at].text, tokens[at + 2].text), at + 3
    return (database, tokens[at].text if at < len(tokens) else ""), at + 1


def _names(tokens: list[_Token], at: int, database: str) -> list[tuple[str, str]]:
    """All names of a list, also those behind TO."""
    found = []
    while at < len(tokens):
        name, at = _named(tokens, at, database)
        found.append(name)
        while at < len(tokens) and tokens[at].word not in (",", "TO"):
            at += 1
        at += 1
    return found


def _altered(tokens: list[_Token], at: int, database: str) -> list[Effect]:
    (schema, table), at = _named(tokens, at, database)
    clauses, depth = [[]], 0  # type: list[list[_Token]], int
    for token in tokens[at:]:
        depth += {"(": 1, ")": -1}.get(token.word, 0)
        if token.word == "," and not depth:
            clauses.append([])
        else:
            clauses[-1].append(token)
    found: list[Effect] = []
    for clause in clauses:
        words = [token.word for token in clause]
        if words[:1] == ["RENAME"] and not {"COLUMN", "INDEX", "KEY"} & set(words[1:2]):
            renamed, _ = _named(clause, 1 + (words[1:2] in (["TO"], ["AS"], ["="])), schema)
            found += [Effect(schema, table, "gone"), Effect(*renamed, "gone")]
    if not found:
        found = [Effect(schema, table, "altered" if all(map(_leaves_rows, clauses)) else "rewritten")]
    return found


def _leaves_rows(clause: list[_Token]) -> bool:
    """Whether a clause is known to change no value of a row that is there."""
    words = [token.word for token in clause]
    first, second = (*words, "", "")[:2]
    if not words or first in _HARMLESS or first in ("WAIT", "NOWAIT", ""):
        return True
    if first == "RENAME" and second in ("INDEX", "KEY"):
        return True
    if first == "DROP":
        return second != "PARTITION" and second != "SYSTEM"
    if first == "ALTER":
        return second in ("INDEX", "KEY", "CONSTRAINT", "CHECK") or "DEFAULT" in words
    if first == "ADD":
        filling = [
            word
            for word, following in zip(words, [*words[1:], ""], strict=True)
            if word in _FILLING and following != "NULL"
        ]
        return second in _INDEX_WORDS or not (filling or "NOT" in words)
    return False
