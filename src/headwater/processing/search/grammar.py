"""The grammar of searches: Lucene's query language, read into `query`.

    query    = clause { [AND | OR | && | ||] clause }
    clause   = [+ | - | ! | NOT] [field ":"] ( "(" query ")" | term ) [^boost]
    term     = word | wor* | w?r*d | word~1 | "a phrase"~2 | [a TO b} | >=5 | near(lat, lon, 5km) | box(south, west, north, east) | *

AND, OR and NOT are those of Lucene's classic parser: AND makes the clauses on both its sides required, OR leaves them as they are. So
`a AND b OR c` requires a and b, and c decides nothing; brackets say what is meant. Clauses side by side are joined by OR.
Boosts are read and do nothing, because a search has no score. What is refused is refused with its place in the text.

A word that the analysis cuts in several (`wi-fi`) is a phrase. A clause of stop words alone is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from headwater.model.errors import InvalidInput
from headwater.processing.search.analysis import Analyzer, words_of
from headwater.processing.search.fields import HIGHEST, LOWEST, SearchFields, bounds_of
from headwater.processing.search.query import (
    ANY,
    Box,
    Circle,
    Clauses,
    Everything,
    Filled,
    Fuzzy,
    Phrase,
    Prefix,
    Query,
    Stretch,
    Wildcard,
    Word,
    WordRange,
)

SEARCH_SIGNS_MAX = 65_536
CLAUSES_MAX = 1_024
DEPTH_MAX = 50
PHRASE_WORDS_MAX = 64
SLOP_MAX = 1_000
EDITS_MAX = 2
FUZZY_SIGNS_MAX = 64
RADIUS_M_MAX = 20_037_508.0
"""Half of the way round the earth."""

_SIGN = r'[^\s+\-!():^\[\]"{}~*?\\<>]|\\.'
_TOKENS = re.compile(
    rf"""
      (?P<space>[\s\u3000]+)
    | (?P<both>&&) | (?P<either>\|\|)
    | (?P<word>(?:{_SIGN}|[*?])(?:{_SIGN}|[*?+\-!<>])*)
    | (?P<phrase>"(?:[^"\\]|\\.)*")
    | (?P<range>[\[{{](?:[^\]}}"\\]|\\.|"(?:[^"\\]|\\.)*")*[\]}}])
    | (?P<compare>[<>]=?)
    | (?P<about>~[0-9.]*)
    | (?P<boost>\^[0-9.]*)
    | (?P<sign>[+\-!():])
    """,
    re.VERBOSE | re.DOTALL,
)
_BOUNDS = re.compile(
    r"""(?P<low>"(?:[^"\\]|\\.)*"|(?:[^\s"\\]|\\.)+)\s+TO\s+(?P<high>"(?:[^"\\]|\\.)*"|(?:[^\s"\\]|\\.)+)""",
    re.DOTALL,
)
_LENGTH = re.compile(r"([0-9.]+(?:e[+-]?\d+)?)\s*(mi|km|m)", re.IGNORECASE)
_METRES = {"m": 1.0, "km": 1_000.0, "mi": 1_609.344}
_OPERATORS = {"AND": "both", "OR": "either", "NOT": "!"}


class _Token(NamedTuple):
    """A piece of the text: what it is, and where."""

    kind: str
    text: str
    at: int


class _Limits:
    """How many clauses a search has so far, and how deep its brackets are."""

    def __init__(self) -> None:
        self.clauses, self.depth = 0, 0


def parse_search(text: str, fields: SearchFields, analyzer: Analyzer) -> Query:
    """The query that a text says; `InvalidInput` with the place in the text where it says none."""
    if len(text) > SEARCH_SIGNS_MAX:
        raise InvalidInput(
            f"A search of {len(text):,} characters is too long.",
            advice=f"The limit is {SEARCH_SIGNS_MAX:,} characters.",
        )
    return _SearchParser(text, fields, analyzer).whole()


class _SearchParser:
    """Reads one text from left to right."""

    def __init__(self, text: str, fields: SearchFields, analyzer: Analyzer) -> None:
        self._text, self._fields, self._analyzer = text, fields, analyzer
        self._tokens = self._cut()
        self._next = 0
        self._limits = _Limits()

    def whole(self) -> Query:
        """The whole text as a query."""
        if self._peek().kind == "end":
            self._refuse(0, "The search is empty.", "Write one word at least.")
        found = self._query(ANY)
        token = self._peek()
        if token.kind != "end":
            self._refuse(token.at, "There is a ) without its (.", "Remove it, or write \\) to search for it.")
        if found is None:
            self._refuse(
                0,
                "The search has only words that are left out.",
                "Stop words and signs match nothing: add another word.",
            )
        return found

    def _cut(self) -> list[_Token]:
        found, at = list[_Token](), 0
        while at < len(self._text):
            match = _TOKENS.match(self._text, at)
            if match is None:
                self._refuse_sign(at)
            kind, text = str(match.lastgroup), match.group()
            if kind != "space":
                found.append(_Token("sign" if kind == "word" and text in _OPERATORS else kind, text, at))
            at = match.end()
        return [*found, _Token("end", "", at)]

    def _refuse_sign(self, at: int) -> NoReturn:
        sign = self._text[at]
        if sign == '"':
            self._refuse(
                at, 'The quotation mark " has no second one.', 'Close the phrase, or write \\" for the sign itself.'
            )
        if sign in "[{":
            self._refuse(at, f"The range has no end after its {sign}.", "Write a range as [1 TO 5].")
        if sign == "\\":
            self._refuse(at, "A \\ has nothing after it.", "Write \\\\ for the sign itself.")
        self._refuse(at, f"{sign!r} has no meaning here.", f"Write \\{sign} for the sign itself.")

    def _query(self, field: str) -> Query | None:
        """Clauses up to a closing bracket or the end, joined as Lucene's classic parser joins them."""
        found: list[tuple[str, Query]] = []
        start = self._peek().at
        is_first = True
        while not self._is_end():
            joins = self._joint(is_first=is_first)
            occurs = self._modifier()
            query = self._clause(field)
            is_first = False
            if joins == "both" and found and found[-1][0] != "not":
                found[-1] = ("must", found[-1][1])
            if query is not None:
                found.append(("must" if joins == "both" and occurs == "should" else occurs, query))
        return self._joined(found, start)

    def _joined(self, found: list[tuple[str, Query]], start: int) -> Query | None:
        if not found:
            return None
        must, should, must_not = (tuple(q for each, q in found if each == kind) for kind in ("must", "should", "not"))
        if not must and not should:
            self._refuse(
                start,
                "Only what must not hold matches nothing.",
                "Write *:* before it for all other documents: *:* -word.",
            )
        if not must_not and len(must) + len(should) == 1:
            return (must or should)[0]
        return Clauses(must, should, must_not)

    def _joint(self, *, is_first: bool) -> str:
        """What joins a clause with the one before."""
        token = self._peek()
        kind = _OPERATORS.get(token.text, token.kind) if token.kind in ("sign", "both", "either") else ""
        if kind not in ("both", "either"):
            return ""
        self._take()
        if is_first or self._is_end():
            side = "before" if is_first else "after"
            self._refuse(
                token.at, f"There is nothing {side} {token.text}.", f'Write "{token.text}" to search for the word.'
            )
        return kind

    def _modifier(self) -> str:
        found = "should"
        while self._peek().kind == "sign" and self._peek().text in ("+", "-", "!", "NOT"):
            token = self._take()
            if found != "should" or self._is_end():
                self._refuse(
                    token.at, f"There is nothing that {token.text} belongs to.", f"Write \\{token.text} for the sign."
                )
            found = "must" if token.text == "+" else "not"
        return found

    def _clause(self, field: str) -> Query | None:
        """A term or a group, with the field that it names."""
        self._limits.clauses += 1
        token = self._take()
        if self._limits.clauses > CLAUSES_MAX:
            self._refuse(token.at, f"The search has more than {CLAUSES_MAX:,} clauses.", "Divide it into several.")
        if token.kind == "word" and self._peek().text == ":" and self._peek().kind == "sign":
            return self._named(token)
        if token.text == "(" and token.kind == "sign":
            return self._group(field, token)
        found = self._term(field, token)
        self._boost()
        return found

    def _named(self, token: _Token) -> Query | None:
        """What stands after `field:`."""
        field = _plain(token.text)
        self._take()
        after = self._take()
        if token.text == "*" and after.text == "*":
            self._boost()
            return Everything()
        if token.text == "_exists_" and after.kind == "word":
            self._known(_plain(after.text), after)
            return Filled(_plain(after.text))
        self._known(field, token)
        if after.text == "(" and after.kind == "sign":
            return self._group(field, after)
        if after.text == "-" and self._peek().kind == "word" and not self._is_apart():
            number = self._take()
            after = _Token("word", after.text + number.text, after.at)
        found = self._term(field, after)
        self._boost()
        return found

    def _known(self, field: str, token: _Token) -> None:
        if field not in self._fields.kinds:
            self._refuse(
                token.at, f"There is no field {field!r:.60}.",
                f"Fields are {self._fields.names()}. Write \\: for the sign itself.",
            )  # fmt: skip

    def _group(self, field: str, token: _Token) -> Query | None:
        self._limits.depth += 1
        if self._limits.depth > DEPTH_MAX:
            self._refuse(
                token.at, f"Brackets are nested more than {DEPTH_MAX} deep.", "Divide the search into several."
            )
        found = self._query(field)
        closing = self._take()
        if closing.text != ")":
            self._refuse(token.at, "There is a ( without its ).", "Close it, or write \\( to search for it.")
        if self._next >= 2 and self._tokens[self._next - 2] is token:
            self._refuse(token.at, "The brackets are empty.", "Write one word at least between them.")
        self._limits.depth -= 1
        self._boost()
        return found

    def _term(self, field: str, token: _Token) -> Query | None:
        """One term, by the kind of its field."""
        kind = "text" if field == ANY else self._fields.kinds[field]
        if token.kind in ("end", "sign"):
            self._refuse(
                token.at, f"A term is missing{f' before {token.text}' if token.text else ''}.", "Write a word."
            )
        if token.kind not in ("word", "phrase", "range", "compare"):
            self._refuse(
                token.at, f"{token.text:.20} has nothing that it belongs to.", f"Write \\{token.text[0]} for the sign."
            )
        if token.text == "*":
            if field == ANY:
                self._refuse(
                    token.at, "* alone says nothing.",
                    "Write *:* to match every document, or field:* for a field with a value.",
                )  # fmt: skip
            return Filled(field)
        if kind == "place":
            return self._place(field, token)
        if token.kind in ("range", "compare"):
            return self._range(field, kind, token)
        if kind in ("text", "name"):
            return self._words(field, token, is_text=kind == "text")
        if self._peek().kind == "about" and not self._is_apart():
            self._refuse(self._peek().at, f"{field} is not a text.", "Write a range, such as [1 TO 5].")
        text = _plain(token.text[1:-1] if token.kind == "phrase" else token.text)
        return self._stretch(field, text, text, token)

    def _stretch(
        self,
        field: str,
        low: str | None,
        high: str | None,
        token: _Token,
        *,
        with_low: bool = True,
        with_high: bool = True,
    ) -> Query:
        """A range of a column that is not a text."""
        try:
            lowest, highest = bounds_of(self._fields, field, low, high, with_low=with_low, with_high=with_high)
        except InvalidInput as error:
            self._refuse(token.at, error.what, error.advice)
        return Stretch(field, max(lowest, LOWEST), min(highest, HIGHEST))

    def _range(self, field: str, kind: str, token: _Token) -> Query:
        if token.kind == "compare":
            return self._comparison(field, kind, token)
        inside = token.text[1:-1].strip()
        found = _BOUNDS.fullmatch(inside)
        if found is None:
            self._refuse(
                token.at,
                f"{token.text!r:.60} is not a range.",
                "Write a range as [1 TO 5], or {1 TO 5} without its bounds.",
            )
        low, high = (_bound(found[side]) for side in ("low", "high"))
        return self._between(
            field, kind, token, low, high, with_low=token.text[0] == "[", with_high=token.text[-1] == "]"
        )

    def _comparison(self, field: str, kind: str, token: _Token) -> Query:
        value = self._take()
        is_number = value.kind in ("word", "phrase") or (value.text == "-" and self._peek().kind == "word")
        if not is_number:
            self._refuse(token.at, f"There is no value after {token.text}.", "Write it as price:>=5.")
        text = value.text + (self._take().text if value.text == "-" else "")
        bound, is_with = _bound(text), token.text.endswith("=")
        low, high = (bound, None) if token.text[0] == ">" else (None, bound)
        return self._between(field, kind, token, low, high, with_low=is_with, with_high=is_with)

    def _between(
        self,
        field: str,
        kind: str,
        token: _Token,
        low: str | None,
        high: str | None,
        *,
        with_low: bool,
        with_high: bool,
    ) -> Query:
        if low is None and high is None and field != ANY:
            return Filled(field)
        if kind not in ("text", "name"):
            return self._stretch(field, low, high, token, with_low=with_low, with_high=with_high)
        if kind == "text":
            low, high = (None if bound is None else self._one_word(bound, token) for bound in (low, high))
        return WordRange(field, low, high, with_low, with_high)

    def _words(self, field: str, token: _Token, *, is_text: bool) -> Query | None:
        """Words of a text, or a whole name."""
        about = self._take() if self._peek().kind == "about" and not self._is_apart() else None
        if token.kind == "phrase":
            return self._phrase(field, _plain(token.text[1:-1]), about, token, is_text=is_text)
        pieces = _pieces(token.text)
        if any(isinstance(piece, int) for piece in pieces):
            if about is not None:
                self._refuse(about.at, "A word with * or ? cannot be fuzzy.", "Use one of the two.")
            return self._pattern(field, pieces, token, is_text=is_text)
        text = "".join(map(str, pieces))
        if about is None:
            return self._phrase(field, text, None, token, is_text=is_text)
        word = self._one_word(text, token) if is_text else text
        edits = _whole_number(about.text[1:], EDITS_MAX)
        if edits is None or edits > EDITS_MAX:
            self._refuse(about.at, f"{about.text} is not a number of edits.", f"Write {word}~1 or {word}~{EDITS_MAX}.")
        if len(word) > FUZZY_SIGNS_MAX:
            self._refuse(token.at, "The word is too long to be fuzzy.", f"The limit is {FUZZY_SIGNS_MAX} characters.")
        return Fuzzy(field, word, edits)

    def _phrase(self, field: str, text: str, about: _Token | None, token: _Token, *, is_text: bool) -> Query | None:
        slop = 0 if about is None else _whole_number(about.text[1:], None)
        if slop is None or slop > SLOP_MAX:
            assert about is not None
            self._refuse(
                about.at, f"{about.text} is not a distance of words.", f"Write a number up to {SLOP_MAX}, such as ~2."
            )
        if not is_text:
            return Word(field, text)
        terms = self._analyzer.terms(text)
        if len(terms) > PHRASE_WORDS_MAX:
            self._refuse(token.at, f"The phrase has {len(terms)} words.", f"The limit is {PHRASE_WORDS_MAX}.")
        if not terms:
            return None
        if len(terms) == 1:
            return Word(field, terms[0][0])
        first = terms[0][1]
        return Phrase(field, tuple(term for term, _ in terms), tuple(place - first for _, place in terms), slop)

    def _pattern(self, field: str, pieces: list[str | int], token: _Token, *, is_text: bool) -> Query:
        texts = [piece for piece in pieces if isinstance(piece, str)]
        if not texts:
            self._refuse(
                token.at,
                f"{token.text:.20} says nothing of a word.",
                "Write some of its letters, or field:* for any value.",
            )
        if is_text:
            pieces = [self._letters(piece, token) if isinstance(piece, str) else piece for piece in pieces]
        if len(pieces) == 2 and isinstance(pieces[0], str) and pieces[1] == 0:
            return Prefix(field, pieces[0])
        return Wildcard(field, tuple(pieces))

    def _letters(self, text: str, token: _Token) -> str:
        """A part of a word, in lower case."""
        words = words_of(text)
        if len(words) != 1 or words_of(f"x{text}x") != [f"x{words[0]}x"]:
            self._refuse(
                token.at,
                f"{text!r:.40} is not part of a word.",
                "A word has letters and digits; put a phrase in quotation marks.",
            )
        return words[0]

    def _one_word(self, text: str, token: _Token) -> str:
        words = words_of(text)
        if len(words) != 1:
            self._refuse(token.at, f"{text!r:.40} is not one word.", "A word has letters and digits.")
        return words[0]

    def _place(self, field: str, token: _Token) -> Query:
        """`near(…)` and `box(…)`."""
        shapes: dict[str, Callable[[str, list[str], _Token], Query]] = {"near": self._circle, "box": self._box}
        opening = self._take()
        if token.text not in shapes or opening.text != "(":
            self._refuse(
                token.at, f"{field} is a place.",
                f"Write {field}:near(52.5, 13.4, 5km) or {field}:box(52.3, 13.0, 52.7, 13.8).",
            )  # fmt: skip
        end = self._text.find(")", opening.at)
        if end < 0:
            self._refuse(opening.at, "There is a ( without its ).", "Close it.")
        while self._peek().at <= end and self._peek().kind != "end":
            self._take()
        inside = self._text[opening.at + 1 : end]
        return shapes[token.text](field, [part.strip() for part in inside.split(",")], token)

    def _circle(self, field: str, parts: list[str], token: _Token) -> Query:
        length = _LENGTH.fullmatch(parts[2]) if len(parts) == 3 else None
        if length is None:
            self._refuse(
                token.at, "near(…) needs a latitude, a longitude and a distance.", "Write near(52.5, 13.4, 5km)."
            )
        distance_m = self._degrees(length[1], token, HIGHEST) * _METRES[length[2].lower()]
        if not 0 < distance_m <= RADIUS_M_MAX:
            self._refuse(
                token.at, f"{parts[2]} is not a distance on the earth.", "Use more than 0 and at most 20,037 km."
            )
        return Circle(field, self._degrees(parts[0], token, 90), self._degrees(parts[1], token, 180), distance_m)

    def _box(self, field: str, parts: list[str], token: _Token) -> Query:
        if len(parts) != 4:
            self._refuse(token.at, "box(…) needs four numbers.", "Write box(south, west, north, east).")
        south, west, north, east = (
            self._degrees(part, token, most) for part, most in zip(parts, (90, 180, 90, 180), strict=True)
        )
        if south > north:
            self._refuse(
                token.at,
                f"The box begins north of where it ends: {south} > {north}.",
                "Write box(south, west, north, east).",
            )
        return Box(field, south, west, north, east)

    def _degrees(self, text: str, token: _Token, most: int) -> float:
        try:
            found = float(text)
        except ValueError:
            self._refuse(token.at, f"{text!r:.40} is not a number.", "Write degrees as 52.5.")
        if not abs(found) <= most:
            self._refuse(
                token.at,
                f"{text} lies beyond {most} degrees.",
                "Latitudes go from -90 to 90, longitudes from -180 to 180.",
            )
        return found

    def _boost(self) -> None:
        """Reads what does nothing here."""
        if self._peek().kind == "boost":
            token = self._take()
            if not re.fullmatch(r"\^\d+(\.\d+)?", token.text):
                self._refuse(token.at, "A ^ has no number after it.", "Write ^2, or \\^ for the sign itself.")

    def _is_apart(self) -> bool:
        """Whether there is space before the next piece."""
        before = self._tokens[self._next - 1]
        return self._peek().at > before.at + len(before.text)

    def _is_end(self) -> bool:
        token = self._peek()
        return token.kind == "end" or (token.kind == "sign" and token.text == ")")

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        self._next = min(self._next + 1, len(self._tokens) - 1)
        return token

    def _refuse(self, at: int, what: str, advice: str) -> NoReturn:
        start, end = max(0, at - 20), min(len(self._text), at + 20)
        shown = (
            f"{'…' if start else ''}{self._text[start:at]}▸{self._text[at:end]}{'…' if end < len(self._text) else ''}"
        )
        raise InvalidInput(f"{what} (character {at + 1}: {shown})", advice=advice)


def _plain(text: str) -> str:
    """A text without the signs that say that the next one is itself."""
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)


def _bound(text: str) -> str | None:
    """A bound of a range; None for `*`."""
    if text == "*":
        return None
    return _plain(text[1:-1] if text.startswith('"') and len(text) > 1 else text)


def _pieces(text: str) -> list[str | int]:
    """A word as texts between its wildcards: 1 for `?`, 0 for `*`."""
    found: list[str | int] = []
    for each in re.findall(r"\\.|[^\\]", text, flags=re.DOTALL):
        if each == "?" or (each == "*" and found[-1:] != [0]):
            found.append(1 if each == "?" else 0)
        elif each != "*":
            letter = each[-1]
            if found and isinstance(found[-1], str):
                found[-1] += letter
            else:
                found.append(letter)
    return found


def _whole_number(text: str, default: int | None) -> int | None:
    """A number, the default where there is none, None where it is something else."""
    if not text:
        return default
    return int(text) if text.isdecimal() and len(text) < 6 else None
