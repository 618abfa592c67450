"""The patterns that are measured, in the text of each side.

Conditions of one pattern exclude each other, because the peers differ where a row fits two variables: the standard backtracks, and
Flink's greedy variables do not. Prices lie evenly in their logarithm from 100 to 100,000,000.

Each side says in its own way that a match lasts less than ten minutes. Ours and Flink say WITHIN. Esper has no such clause (its
`interval` makes a match wait), so the condition on the last row compares the times.

Flink has no PREV. Its `LAST(B.price, 1)` is the price of the row that was B before, and in these patterns that is the row before.
"""

from __future__ import annotations

from dataclasses import dataclass

from examples.nexmark.topics import TIME

WITHIN_MS = 600_000
SMALL, LARGE = 10_000, 10_000_000
MANY, FACTOR = 1_000_000, 128  # a factor that is a power of two: the comparison is then exact in floating point
RULES = 1_000


@dataclass(frozen=True)
class Query:
    """A pattern: what is the same for all sides, and the conditions of each."""

    what: str
    pattern: str
    last: str
    """The variable of the last row."""
    ours: str
    flink: str
    esper: str | None = None
    is_bounded: bool = True
    """Whether a match lasts less than ten minutes."""

    def text(self, key: str) -> str:
        """The pattern as `hw.detect` reads it."""
        return f"PARTITION BY {key} ORDER BY {TIME} {self._clauses(TIME)} DEFINE {self.ours}"

    def rule(self) -> str:
        """The pattern as a rule: `hw.detect` is given the key for all of them."""
        return f"{self._clauses(TIME)} DEFINE {self.ours}"

    def sql(self, key: str) -> str:
        """The query for Flink."""
        clauses = f"PARTITION BY {key} ORDER BY `{TIME}` {self._clauses(f'`{TIME}`')} DEFINE {self.flink}"
        return f"SELECT * FROM bids MATCH_RECOGNIZE ({clauses})"

    def statement(self, key: str) -> str:
        """The statement for Esper."""
        assert self.esper is not None
        clauses = f"partition by {key} measures {self.last}.price as price, {self.last}.time as ended"
        clauses += f" after match skip past last row pattern ({self.pattern}) define {self.esper}"
        return f"select * from Bid match_recognize ({clauses})"

    def _clauses(self, time: str) -> str:
        within = f" WITHIN INTERVAL '{WITHIN_MS // 60_000}' MINUTE" if self.is_bounded else ""
        return (
            f"MEASURES {self.last}.price AS price, {self.last}.{time} AS ended ONE ROW PER MATCH"
            f" AFTER MATCH SKIP PAST LAST ROW PATTERN ({self.pattern}){within}"
        )


RISING = Query(
    what="prices that rise, once or more, and then fall: A B+ C",
    pattern="A B+ C",
    last="C",
    ours="B AS B.price > PREV(B.price), C AS C.price < PREV(C.price)",
    flink="B AS B.price > A.price AND (LAST(B.price, 1) IS NULL OR B.price > LAST(B.price, 1)), C AS C.price < LAST(B.price)",
    esper="B as B.price > prev(B.price), C as C.price < prev(C.price)",
    is_bounded=False,
)
AVERAGE = Query(
    what="small prices, and then one above 128 times their average: A+ B, within 10 minutes",
    pattern="A+ B",
    last="B",
    ours=f"A AS A.price < {MANY}, B AS B.price >= {MANY} AND B.price > {FACTOR} * AVG(A.price)",
    flink=f"A AS A.price < {MANY}, B AS B.price >= {MANY} AND B.price > {FACTOR} * AVG(CAST(A.price AS DOUBLE))",
)


def small_large(small: int = SMALL, large: int = LARGE, times: int = 3) -> Query:
    """So many small prices, then a large one."""
    defined = f"A AS A.price < {small}, B AS B.price >= {large}"
    return Query(
        what=f"{times} small prices, then a large one: A{{{times}}} B, within 10 minutes",
        pattern=f"A{{{times}}} B",
        last="B",
        ours=defined,
        flink=defined,
        esper=f"A as A.price < {small}, B as B.price >= {large} and B.time - A[0].time < {WITHIN_MS}",
    )


@dataclass(frozen=True)
class Rule:
    """One of the rules: what makes a price small, a price large, and how many are small."""

    small: int
    large: int
    times: int

    @property
    def query(self) -> Query:
        """Its pattern."""
        return small_large(self.small, self.large, self.times)


def rules(count: int = RULES) -> list[Rule]:
    """Different rules; of 1,000 there are 25 small prices, 10 large ones, and 2 to 5 times."""
    return [
        Rule(
            small=1_000 * (1 + number % 25),
            large=5_000_000 * (1 + number // 25 % 10),
            times=2 + number // 250 % 4,
        )
        for number in range(count)
    ]
