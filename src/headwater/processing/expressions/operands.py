"""Operands: what a function's builder needs of the compiler to bring its arguments to the types that Spark would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import pyarrow as pa

from headwater.model.errors import InvalidInput, Unsupported
from headwater.processing.expressions.term import Term
from headwater.processing.expressions.type_rules import INT


class Operands(Protocol):
    """The conversions of a compiler, and its errors."""

    def as_type(self, term: Term, type_: pa.DataType) -> Term: ...
    def alike(self, terms: Sequence[Term], name: str) -> list[Term]: ...
    def truth(self, term: Term, name: str) -> Term: ...
    def number(self, term: Term, name: str) -> Term: ...
    def double(self, term: Term, name: str) -> Term: ...
    def integer(self, term: Term, name: str, type_: pa.DataType = INT) -> Term: ...
    def text(self, term: Term, name: str) -> Term: ...
    def moment(self, term: Term, name: str) -> Term: ...
    def day(self, term: Term, name: str) -> Term: ...
    def computed(self, name: str, left: Term, right: Term, *, tries: bool = False) -> Term: ...
    def unsupported(self, what: str) -> Unsupported: ...
    def wrong(self, why: str) -> InvalidInput: ...


Build = Callable[[Operands, list[Term]], Term]


class Function:
    """A function of the language: how many arguments it takes, and how its term is built."""

    def __init__(self, build: Build, least: int, most: int | None = None) -> None:
        self.build = build
        self.least = least
        self.most = least if most is None else most

    @property
    def takes(self) -> str:
        """How many arguments it takes, as errors say it."""
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"
