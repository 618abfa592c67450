"""The text of a row pattern: the clauses of MATCH_RECOGNIZE, read into a `RowPattern`.

    PARTITION BY card ORDER BY at
    MEASURES FIRST(probe.at) AS began, strike.amount AS amount
    ONE ROW PER MATCH
    AFTER MATCH SKIP PAST LAST ROW
    PATTERN (probe{3} strike) WITHIN INTERVAL '10' MINUTE
    SUBSET both = (probe, strike)
    DEFINE probe AS amount < 2, strike AS amount > 500

The clauses come in the order of the standard. Expressions are kept as text with their place, and `formula` parses them.
Names are compared without case, as Spark does. Each error gives the line and the column in the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from headwater.model.clock import duration_us
from headwater.model.errors import InvalidInput
from headwater.processing.patterns import tree

TEXT_MAX = 100_000
"""The number of characters of a pattern's text."""
DEPTH_MAX = 100
REPEATS_MAX = 10_000
PERMUTED_MAX = 12

RowsPerMatch = Literal["one", "all"]
EmptyMatches = Literal["show", "omit", "unmatched"]


class Formula(NamedTuple):
    """The text of an expression, and where it begins in the text of the pattern."""

    text: str
    place: int = 0


class Order(NamedTuple):
    """A column by which rows of a partition are ordered."""

    column: str
    is_descending: bool = False
    nulls_first: bool = True


class Skip(NamedTuple):
    """Where the search goes on after a match: after its last row, at its second row, or at a row of a variable."""

    to: Literal["past", "next", "first", "last"] = "past"
    variable: str | None = None
    place: int = 0


class RowPattern(NamedTuple):
    """What is searched for."""

    key: tuple[str, ...]
    order: tuple[Order, ...]
    pattern: tree.Part
    define: Mapping[str, Formula]
    measures: Mapping[str, Formula]
    within_us: int | None = None
    subsets: Mapping[str, tuple[str, ...]] = {}
    rows: RowsPerMatch = "one"
    empty: EmptyMatches = "show"
    skip: Skip = Skip()
    text: str = ""

    def members(self, variable: str) -> tuple[str, ...]:
        """The variables that a name stands for: itself, or those of a subset."""
        return self.subsets.get(variable, (variable,))


class PatternToken(NamedTuple):
    """A word or a sign, and its place."""

    kind: Literal["word", "quoted", "number", "text", "sign"]
    text: str
    place: int

    @property
    def upper(self) -> str:
        """A word in capitals; what is quoted is no keyword."""
        return self.text.upper() if self.kind == "word" else self.text

    @property
    def name(self) -> str:
        """A name as it is compared."""
        return self.text[1:-1].replace("``", "`").lower() if self.kind == "quoted" else self.text.lower()


_TOKEN = re.compile(
    r"""(?P<space>\s+|--[^\n]*|/\*.*?\*/)|(?P<quoted>`(?:[^`]|``)*`)|(?P<text>'(?:[^'\\]|''|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<word>[^\W\d]\w*)|(?P<sign>\{-|-\}|<=>|[<>!]=|<>|\|\||::|.)""",
    re.VERBOSE | re.DOTALL,
)
_CLAUSES: Sequence[tuple[str, Sequence[str]]] = (
    ("key", ("PARTITION", "BY")), ("order", ("ORDER", "BY")), ("measures", ("MEASURES",)),
    ("one", ("ONE", "ROW", "PER", "MATCH")), ("all", ("ALL", "ROWS", "PER", "MATCH")),
    ("skip", ("AFTER", "MATCH", "SKIP")), ("pattern", ("PATTERN", "(")), ("within", ("WITHIN",)),
    ("subset", ("SUBSET",)), ("define", ("DEFINE",)),
)  # fmt: skip


def parse_pattern(text: str, *, key: Sequence[str] = (), at: str | None = None) -> RowPattern:
    """The pattern that a text says. With a time `at` the text has no PARTITION BY and no ORDER BY: these are the key and the time."""
    if len(text) > TEXT_MAX:
        raise InvalidInput(
            f"The pattern has {len(text):,} characters; at most {TEXT_MAX:,} are allowed.",
            advice="Use several patterns.",
        )
    return _Reader(text, None if at is None else (tuple(key), at)).pattern()


def failure(text: str, place: int, what: str, advice: str) -> InvalidInput:
    """The error for something at a place of a text."""
    line, start = text.count("\n", 0, place) + 1, text.rfind("\n", 0, place) + 1
    excerpt = text[place : place + 40].split("\n")[0]
    near = f", at {excerpt!r}" if excerpt else ", at the end"
    return InvalidInput(f"{what} (line {line}, column {place - start + 1}{near})", advice=advice)


def tokens_of(text: str) -> list[PatternToken]:
    """The words and signs of a text."""
    found = list[PatternToken]()
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "sign" and match.group() in "'\"`":
            raise failure(text, match.start(), "A quotation mark has no partner", "Close the quotation.")
        if kind != "space":
            found.append(PatternToken(kind, match.group(), match.start()))  # type: ignore[arg-type]
    return found


class _Reader:
    """Reads one text. `_clauses` holds the tokens of each clause; `given` are key and time where the text does not have them."""

    def __init__(self, text: str, given: tuple[tuple[str, ...], str] | None) -> None:
        self._text, self._given = text, given
        self._clauses: dict[str, list[PatternToken]] = {}
        self._starts: dict[str, int] = {}
        self._cut(self._without_frame(tokens_of(text)))

    def pattern(self) -> RowPattern:
        """The whole."""
        needed = [("pattern", "PATTERN")] if self._given else [("order", "ORDER BY"), ("pattern", "PATTERN")]
        for name in ("key", "order") if self._given else ():
            if name in self._clauses:
                what = "A rule has no PARTITION BY and no ORDER BY: they are the same for all rules"
                raise self._failure(self._starts[name], what, "Remove the clause.")
        for name, keyword in needed:
            if name not in self._clauses:
                raise self._failure(len(self._text), f"The pattern has no {keyword}", f"Add the clause {keyword}.")
        if "one" in self._clauses and "all" in self._clauses:
            raise self._failure(self._starts["all"], "ONE ROW and ALL ROWS exclude each other", "Remove one of them.")
        key = tuple(self._column(part) for part in self._parts("key"))
        order = tuple(self._order(part) for part in self._parts("order"))
        if self._given:
            key, order = self._given[0], (Order(self._given[1]),)
        return RowPattern(
            key, order, PartReader(self._text, self._clauses["pattern"], self._starts["pattern"]).whole(),
            self._formulas("define"), self._formulas("measures"), self._within(), self._subsets(),
            "all" if "all" in self._clauses else "one", self._empty(), self._skip(), self._text,
        )  # fmt: skip

    def _failure(self, place: int, what: str, advice: str) -> InvalidInput:
        return failure(self._text, place, what, advice)

    def _without_frame(self, tokens: list[PatternToken]) -> list[PatternToken]:
        """The clauses without MATCH_RECOGNIZE ( … ) around them."""
        if tokens and tokens[0].upper == "MATCH_RECOGNIZE":
            if len(tokens) < 3 or tokens[1].text != "(" or tokens[-1].text != ")":
                raise self._failure(
                    tokens[0].place, "MATCH_RECOGNIZE needs parentheses", "Write MATCH_RECOGNIZE ( … )."
                )
            return tokens[2:-1]
        return tokens

    def _cut(self, tokens: list[PatternToken]) -> None:
        at, depth, reached, current = 0, 0, -1, ""
        while at < len(tokens):
            token = tokens[at]
            number = self._clause_at(tokens, at) if depth == 0 else None
            if number is not None:
                name, words = _CLAUSES[number]
                if number <= reached:
                    order = (
                        "PARTITION BY, ORDER BY, MEASURES, ROWS PER MATCH, AFTER MATCH, PATTERN, WITHIN, SUBSET, DEFINE"
                    )
                    raise self._failure(token.place, f"{words[0]} is twice or too late here", f"Use the order {order}.")
                reached, current = number, name
                at += len(words) - (name == "pattern")
                self._clauses[name], self._starts[name] = [], token.place
                continue
            if not current:
                raise self._failure(
                    token.place, "A pattern begins with PARTITION BY or ORDER BY", "Begin with a clause."
                )
            depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
            if depth < 0:
                raise self._failure(token.place, "A parenthesis closes that was never open", "Remove it.")
            self._clauses[current].append(token)
            at += 1
        if depth:
            raise self._failure(len(self._text), "A parenthesis is not closed", "Add the missing ).")

    def _clause_at(self, tokens: list[PatternToken], at: int) -> int | None:
        words = tuple(token.upper for token in tokens[at : at + 4])
        found = (n for n, (_, keyword) in enumerate(_CLAUSES) if words[: len(keyword)] == tuple(keyword))
        return next(found, None)

    def _parts(self, clause: str) -> list[list[PatternToken]]:
        """The tokens of a clause between commas."""
        found, depth = [list[PatternToken]()], 0
        for token in self._clauses.get(clause, ()):
            depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
            if token.text == "," and depth == 0:
                found.append([])
            else:
                found[-1].append(token)
        if found == [[]] and clause not in self._clauses:
            return []
        for part in found:
            if not part:
                place = self._starts[clause]
                raise self._failure(place, "Something is missing between two commas", "Add it or remove a comma.")
        return found

    def _column(self, part: list[PatternToken]) -> str:
        if len(part) != 1 or part[0].kind not in ("word", "quoted"):
            raise self._failure(
                part[0].place, "Here only the name of a column can be", "Compute it before, in a select()."
            )
        return part[0].text[1:-1].replace("``", "`") if part[0].kind == "quoted" else part[0].text

    def _order(self, part: list[PatternToken]) -> Order:
        column, rest = self._column(part[:1]), tuple(token.upper for token in part[1:])
        is_descending = rest[:1] == ("DESC",)
        rest = rest[1:] if rest[:1] in (("ASC",), ("DESC",)) else rest
        if rest not in ((), ("NULLS", "FIRST"), ("NULLS", "LAST")):
            raise self._failure(
                part[1].place, "ORDER BY has columns with ASC, DESC, NULLS FIRST or NULLS LAST", "Use those."
            )
        return Order(column, is_descending, rest[1] == "FIRST" if rest else not is_descending)

    def _formulas(self, clause: str) -> dict[str, Formula]:
        return dict(self._formula(clause, part) for part in self._checked_names(clause))

    def _checked_names(self, clause: str) -> list[list[PatternToken]]:
        """The parts of a clause of which each has a name of its own."""
        parts, seen = self._parts(clause), set[str]()
        for part in parts:
            token = part[0] if clause == "define" else part[-1]
            if token.name in seen:
                raise self._failure(token.place, f"{token.text} is there twice", "Give each a name of its own.")
            seen.add(token.name)
        return parts

    def _formula(self, clause: str, part: list[PatternToken]) -> tuple[str, Formula]:
        is_define = clause == "define"
        name, keyword, body = (part[0], part[1:2], part[2:]) if is_define else (part[-1], part[-2:-1], part[:-2])
        if not body or keyword[0].upper != "AS" or name.kind not in ("word", "quoted"):
            form = "variable AS condition" if is_define else "expression AS name"
            raise self._failure(part[0].place, f"{clause.upper()} has parts of the form {form}", "Write it like that.")
        own = name.text[1:-1] if name.kind == "quoted" else name.text
        text = self._text[body[0].place : body[-1].place + len(body[-1].text)]
        return name.name if is_define else own, Formula(text, body[0].place)

    def _within(self) -> int | None:
        tokens = self._clauses.get("within")
        if tokens is None:
            return None
        words = [token.text.strip("'\"") for token in tokens if token.upper != "INTERVAL"]
        try:
            found = duration_us(" ".join(words).lower())
        except InvalidInput as error:
            raise self._failure(self._starts["within"], error.what, "Write WITHIN INTERVAL '10' MINUTE.") from None
        if found <= 0:
            raise self._failure(self._starts["within"], "WITHIN needs a time above zero", "Use a longer time.")
        return found

    def _subsets(self) -> dict[str, tuple[str, ...]]:
        found = dict[str, tuple[str, ...]]()
        for part in self._parts("subset"):
            signs = [token.text for token in part[1:3]] + [part[-1].text]
            names = part[3:-1:2]
            if signs != ["=", "(", ")"] or len(part) % 2 == 0 or any(sign.text != "," for sign in part[4:-1:2]):
                raise self._failure(part[0].place, "SUBSET has parts of the form name = (A, B)", "Write it like that.")
            if part[0].name in found:
                raise self._failure(part[0].place, f"Subset {part[0].text} is there twice", "Give each its own name.")
            found[part[0].name] = tuple(dict.fromkeys(token.name for token in names))
        return found

    def _empty(self) -> EmptyMatches:
        tokens = self._clauses.get("all", self._clauses.get("one", []))
        words = tuple(token.upper for token in tokens)
        choices: dict[tuple[str, ...], EmptyMatches] = {
            (): "show", ("SHOW", "EMPTY", "MATCHES"): "show", ("OMIT", "EMPTY", "MATCHES"): "omit",
            ("WITH", "UNMATCHED", "ROWS"): "unmatched",
        }  # fmt: skip
        if words not in choices or (words and "one" in self._clauses):
            advice = "After ALL ROWS PER MATCH use SHOW EMPTY MATCHES, OMIT EMPTY MATCHES or WITH UNMATCHED ROWS."
            raise self._failure(tokens[0].place, f"{' '.join(words)} cannot be here", advice)
        return choices[words]

    def _skip(self) -> Skip:
        tokens = self._clauses.get("skip")
        if tokens is None:
            return Skip()
        words = tuple(token.upper for token in tokens)
        if words == ("PAST", "LAST", "ROW"):
            return Skip()
        if words == ("TO", "NEXT", "ROW"):
            return Skip("next")
        is_named = len(words) in (2, 3) and words[0] == "TO" and tokens[-1].kind in ("word", "quoted")
        if not is_named or (len(words) == 3 and words[1] not in ("FIRST", "LAST")):
            advice = "Use SKIP PAST LAST ROW, TO NEXT ROW, TO FIRST variable or TO LAST variable."
            raise self._failure(self._starts["skip"], f"SKIP {' '.join(words)} is unknown", advice)
        return Skip("first" if words[1] == "FIRST" and len(words) == 3 else "last", tokens[-1].name, tokens[-1].place)


class PartReader:
    """Reads what stands in PATTERN, by recursive descent: each method reads what its name says and stops after it."""

    def __init__(self, text: str, tokens: Sequence[PatternToken], start: int) -> None:
        self._text, self._tokens, self._start, self._at, self._depth = text, tokens, start, 0, 0

    def whole(self) -> tree.Part:
        """All of it."""
        found = self._primary()
        if self._at < len(self._tokens):
            raise self._failure("PATTERN ends with its parenthesis", "Put everything inside.")
        return found

    def _failure(self, what: str, advice: str) -> InvalidInput:
        is_over = self._at >= len(self._tokens)
        place = self._start if not self._tokens else self._tokens[-1].place if is_over else self._tokens[self._at].place
        return failure(self._text, place, what, advice)

    def _next(self) -> str:
        """The sign or word that comes next, or nothing."""
        return self._tokens[self._at].upper if self._at < len(self._tokens) else ""

    def _take(self, sign: str) -> None:
        if self._next() != sign:
            raise self._failure(f"A {sign} is missing in PATTERN", f"Add {sign}.")
        self._at += 1

    def _choice(self) -> tree.Part:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._failure(f"PATTERN has more than {DEPTH_MAX} parentheses in each other", "Remove some.")
        parts = [self._sequence()]
        while self._next() == "|":
            self._at += 1
            parts.append(self._sequence())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else tree.Choice(tuple(parts))

    def _sequence(self) -> tree.Part:
        parts = list[tree.Part]()
        while self._next() not in ("", ")", "|", "-}", ","):
            parts.append(self._repetition())
        if not parts:
            raise self._failure("A part of PATTERN is missing", "Write () for a part without rows.")
        return parts[0] if len(parts) == 1 else tree.Sequence(tuple(parts))

    def _repetition(self) -> tree.Part:
        part, sign = self._primary(), self._next()
        if sign not in ("?", "*", "+", "{"):
            return part
        if isinstance(part, (tree.Anchor, tree.Absence)):
            raise self._failure("Anchors and ABSENT cannot be repeated", "Remove the quantifier.")
        self._at += 1
        least, most = {"?": (0, 1), "*": (0, None), "+": (1, None), "{": (0, 0)}[sign]
        if sign == "{":
            least, most = self._bounds()
        is_reluctant = self._next() == "?"
        self._at += is_reluctant
        return tree.Repetition(part, least, most, not is_reluctant)

    def _bounds(self) -> tuple[int, int | None]:
        low = self._number()
        if self._next() == ",":
            self._at += 1
            high = self._number()
            if low is None and high is None:
                raise self._failure("A quantifier needs a number", "Write * or {n,}.")
        else:
            high = low
            if low is None:
                raise self._failure("A quantifier needs a number", "Write {n}, {n,}, {n,m} or {,m}.")
        if self._next() == "}" and (high == 0 or (high is not None and high < (low or 0))):
            raise self._failure(
                "A quantifier allows no repetition", "Use an upper bound of at least 1 and the lower bound."
            )
        self._take("}")
        return low or 0, high

    def _number(self) -> int | None:
        if not self._next().isdecimal():
            return None
        found = int(self._next()) if len(self._next()) < 10 else REPEATS_MAX + 1
        if found > REPEATS_MAX:
            raise self._failure(f"A quantifier counts to {REPEATS_MAX:,} at most", "Use a smaller number.")
        self._at += 1
        return found

    def _primary(self) -> tree.Part:
        sign = self._next()
        token = self._tokens[self._at] if self._at < len(self._tokens) else None
        follows = self._tokens[self._at + 1].text if self._at + 1 < len(self._tokens) else ""
        if token is not None and token.kind in ("word", "quoted"):
            if sign == "PERMUTE" and follows == "(":
                return self._permutation()
            if sign == "ABSENT" and follows == "(":
                return self._absence()
            self._at += 1
            return tree.Variable(token.name, token.place)
        if sign == "(":
            self._at += 1
            if self._next() == ")":
                self._at += 1
                return tree.Empty()
            found = self._choice()
            self._take(")")
            return found
        if sign == "{-":
            self._at += 1
            found = tree.Exclusion(self._choice())
            self._take("-}")
            return found
        if sign in ("^", "$"):
            self._at += 1
            return tree.Anchor("begin" if sign == "^" else "end")
        raise self._failure(f"PATTERN cannot have {sign or 'an end'} here", "Use a variable, a group or PERMUTE.")

    def _permutation(self) -> tree.Part:
        start = self._at
        self._at += 2
        parts = [self._choice()]
        while self._next() == ",":
            self._at += 1
            parts.append(self._choice())
        self._take(")")
        if len(parts) > PERMUTED_MAX:
            self._at = start
            raise self._failure(f"PERMUTE has {len(parts)} parts; at most {PERMUTED_MAX} are allowed", "Use fewer.")
        return tree.Permutation(tuple(parts))

    def _absence(self) -> tree.Part:
        self._at += 2
        if self._at >= len(self._tokens) or self._tokens[self._at].kind not in ("word", "quoted"):
            raise self._failure("ABSENT needs a variable", "Write ABSENT(variable).")
        token = self._tokens[self._at]
        self._at += 1
        self._take(")")
        return tree.Absence(tree.Variable(token.name, token.place))
